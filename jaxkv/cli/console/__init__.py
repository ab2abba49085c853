"""Output on a terminal, and interrupts."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.cli.console.answer_writer import AnswerWriter
    from jaxkv.cli.console.interrupts import (
        RESUMABLE,
        STATUS,
        WorkStopped,
        exit_now,
        exit_on_interrupt,
        handle_signals,
        raise_stopped,
        status_of,
    )
    from jaxkv.cli.console.printing import print_parts
    from jaxkv.cli.console.step_log import StepLog, open_step_log
    from jaxkv.cli.console.streams import OutputError, guard_streams
    from jaxkv.cli.console.terminal import Terminal
    from jaxkv.cli.console.terminal_text import last_lines, make_printable

__all__, __getattr__, __dir__ = lazy_exports(__name__)
