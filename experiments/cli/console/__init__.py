"""Output on a terminal, and interrupts."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.cli.console.answer_writer import AnswerWriter
    from experiments.cli.console.interrupts import (
        RESUMABLE,
        STATUS,
        WorkStopped,
        exit_now,
        exit_on_interrupt,
        handle_signals,
        raise_stopped,
        status_of,
    )
    from experiments.cli.console.printing import print_parts
    from experiments.cli.console.streams import OutputError, guard_streams
    from experiments.cli.console.terminal import Terminal

__all__, __getattr__, __dir__ = lazy_exports(__name__)
