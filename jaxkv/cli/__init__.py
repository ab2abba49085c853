"""The command line: dispatch, arguments, terminal, and the commands of the engine."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.cli.arguments import (
        asks_help,
        choose_word,
        is_word,
        parse_changes,
        parse_subject,
        take_value,
        value_of,
    )
    from jaxkv.cli.console.interrupts import RESUMABLE, WorkStopped
    from jaxkv.cli.console.step_log import open_step_log
    from jaxkv.cli.console.terminal import Terminal
    from jaxkv.cli.console.terminal_text import last_lines, make_printable
    from jaxkv.cli.output import CommandOutput
    from jaxkv.cli.parsing import (
        MAX_SECONDS,
        NoOptions,
        describe_default,
        parse_options,
        refuse_outside,
    )
    from jaxkv.cli.run import run_study

__all__, __getattr__, __dir__ = lazy_exports(__name__)
