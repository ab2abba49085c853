"""What a person at a terminal sees, and how it is ended."""

from experiments.cli.console.terminal import Terminal as Terminal

__all__ = [
    "Terminal",
    "answer_writer",
    "interrupts",
    "printing",
    "streams",
    "terminal",
]
