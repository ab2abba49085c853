"""Output on a terminal, and interrupts."""

from experiments.cli.console.terminal import Terminal as Terminal

__all__ = [
    "Terminal",
    "answer_writer",
    "interrupts",
    "printing",
    "streams",
    "terminal",
]
