"""Flags, by tyro: a command's options are a dataclass, its errors one line."""

import contextlib
import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Annotated, Any

import tyro


def describe_default(text: str, help: str | None = None) -> object:
    """Annotates a flag that need not be given, and whose default would tell nothing.

    Args:
      said: what holds without it.
      help: its text; that under the field by default.
    """
    return tyro.conf.arg(help=help, help_behavior_hint=f"(default: {text})")


GROUP = tyro.conf.arg(name="")
"""Annotates a field whose own fields are flags without a prefix."""
MAX_SECONDS = (
    "Seconds of work after which it stops as after Ctrl-C; status 75 says that the "
    "same command goes on from there."
)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A command that takes nothing but --help and --json."""


def config_options(base: Any, folder: str) -> Any:
    """Options of a run: the fields of a config as flags without a prefix, and the rest.

    Args:
      base: the config that the flags change.
      folder: where the results go without `--out`.
    """
    config_type: Any = type(base)
    no_none: Any = tyro.conf.DisallowNone  # a config's field may be changed to it
    in_folder = describe_default(folder, "Folder for the results.")
    no_end = describe_default("no end", MAX_SECONDS)
    named = describe_default(
        "the config named", "A config.json to start from, in place of a named config."
    )

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        settings: Annotated[config_type, GROUP] = base
        out: Annotated[Path | None, no_none, in_folder] = None
        config: Annotated[Path | None, no_none, named] = None
        max_seconds: Annotated[float, no_none, no_end] = math.inf

    return Options


def parse_options[T](
    options: type[T],
    args: list[str],
    prog: str,
    description: str,
    markers: tuple[Any, ...] = (tyro.conf.DisallowNone, tyro.conf.UseAppendAction),
    default: T | None = None,
) -> T:
    """Parses flags into a dataclass; tyro's framed errors become one line.

    Args:
      options: the dataclass.
      args: the flags.
      prog: the command, as its help and errors call it.
      description: for its help.
      markers: of tyro. By default what is not given is None, and nobody gives it; and
        a flag of several values is repeated.
      default: the options that the flags change; None takes those of the dataclass.

    Raises:
      ValueError: a flag or its value is wrong.
      SystemExit: help was asked for, and has been printed.
    """
    errors = io.StringIO()
    # A field of several types keeps the one that its default has.
    config = (tyro.conf.AvoidSubcommands, *markers)
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                options,
                args=args,
                prog=prog,
                description=description,
                config=config,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as done:
        if done.code:
            line = _one_line(errors.getvalue())
            raise ValueError(f"{prog}: {line}") from None
        raise


def _one_line(framed: str) -> str:
    """Takes what is wrong, and the nearest flags, out of a framed error of tyro's."""
    # A title, then sections between rules; the frame is drawn only on a UTF-8 terminal.
    lines = [line.strip("│ ") for line in framed.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines[1:]:
        if line.strip("─-╰╯"):
            sections[-1].append(line)
        elif sections[-1]:
            sections.append([])
    text = re.sub(
        r"^Error parsing ((settings|loading)(\.|: )?|[A-Z]\w*: )?",
        "",
        " ".join(sections[0]),
    )
    text = re.sub("'None', |, 'None'", "", text)  # which no flag takes
    near = [x.split()[0] for part in sections[1:] for x in part if x[:2] == "--"]
    if near and "Perhaps you meant" in framed:
        text += f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    return text or " ".join(framed.split())
