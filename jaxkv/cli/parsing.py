"""Flags of commands, by tyro: options are a dataclass, and errors are one line."""

import contextlib
import dataclasses
import io
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxkv.cli.arguments import FULL_HELP, HELP_COLUMNS, SHORT_HELP

_MAX_ABOUT_LINES = 4
"""Largest number of lines of a command's description in the short help."""
_FLAG_COLUMNS = 24
"""Width of flags and their values in the short help."""
_MIN_CLAUSE = 10
"""Fewest characters of a clause that explains an option."""


def describe_default(text: str, help: str | None = None) -> object:
    """Annotates an optional flag whose default value needs an explanation.

    Args:
      text: description of the behaviour without the flag.
      help: help text; by default the docstring of the field.
    """
    return tyro.conf.arg(help=help, help_behavior_hint=f"(default: {text})")


UNNAMED = tyro.conf.arg(name="")
"""Annotates a field whose own fields are flags without a prefix."""
MAX_SECONDS = (
    "Time limit in seconds, after which the run stops as after Ctrl-C; status 75 means "
    "that the same command continues it."
)


def refuse_outside(
    options: object, name: str, allowed: str, low: float, high: float = math.inf
) -> None:
    """Refuses a number out of its range; None, a flag that is not given, is in it.

    Args:
      options: the options.
      name: field of the options.
      allowed: description of the range, after "must be".
      low: smallest value.
      high: largest value; infinity is itself out of range.

    Raises:
      ValueError: the number is out of range.
    """
    value = getattr(options, name)
    if value is not None and not (low <= value <= high and value < math.inf):
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{flag} {value:g}: must be {allowed}")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a command that has only --help and --json."""


def config_options(base: object, folder: str) -> Any:
    """Returns the options of a run: fields of a config as flags, and the general flags.

    Args:
      base: config that the flags change.
      folder: description of the folder without `--out`.
    """
    config_type: Any = type(base)
    no_none: Any = tyro.conf.DisallowNone  # a field of a config may be set to None
    in_folder = describe_default(folder, "Folder for the results.")
    no_end = describe_default("no limit", MAX_SECONDS)
    named = describe_default(
        "the named config", "A config.json to start from, instead of a named config."
    )

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        settings: Annotated[config_type, UNNAMED] = base
        out: Annotated[Path | None, no_none, in_folder] = None
        config: Annotated[Path | None, no_none, named] = None
        max_seconds: Annotated[float, no_none, no_end] = math.inf

    return Options


def parse_options[T](
    options: type[T],
    args: list[str],
    prog: str,
    description: str,
    markers: tuple[object, ...] = (tyro.conf.DisallowNone, tyro.conf.UseAppendAction),
    default: T | None = None,
) -> T:
    """Parses flags into a dataclass; framed errors of tyro become one line.

    Args:
      options: dataclass.
      args: flags.
      prog: command, for the help and errors.
      description: text for the help.
      markers: markers of tyro. By default None cannot be given as a value, and a flag
        of several values is repeated.
      default: options that the flags change; None takes the defaults of the dataclass.

    Raises:
      ValueError: a flag or its value is invalid.
      SystemExit: help was requested, and has been printed.
    """
    is_short = not {*SHORT_HELP}.isdisjoint(args)
    args = [SHORT_HELP[-1] if arg == FULL_HELP else arg for arg in args]
    errors = io.StringIO()
    printed = io.StringIO()
    # A field of several types keeps the type of its default.
    config = (tyro.conf.AvoidSubcommands, *markers)
    try:
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(printed if is_short else sys.stdout),
        ):
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
        if is_short:
            print(_shorten_help(printed.getvalue(), prog, description))
        raise


def _shorten_help(full: str, prog: str, description: str) -> str:
    """Returns a help with one line for each option of tyro's help."""
    options: list[tuple[str, list[str]]] = []
    for framed in full.splitlines():
        line = framed.strip("│").rstrip()
        flag, _, text = line.strip().partition("  ")
        if re.match(r" {1,2}-{1,2}\w", line):
            options.append((flag, [text.strip()]))
        elif options and line.startswith("   "):
            options[-1][1].append(line.strip())
    about = textwrap.wrap(
        description, HELP_COLUMNS, max_lines=_MAX_ABOUT_LINES, placeholder=" ..."
    )
    lines = [f"usage: {prog} [OPTIONS]", "", *about, ""]
    for flag, texts in options:
        name, _, value = flag.partition(" ")
        if name == "-h,":
            name, value = flag, ""
        elif name.endswith(","):  # --x, --no-x
            name, value = name.rstrip(","), ""
        elif len(f"{name} {value}") > _FLAG_COLUMNS:
            value = ""
        room = HELP_COLUMNS - _FLAG_COLUMNS - 4
        text = _first_clause(" ".join(filter(None, texts)), room)
        lines.append(f"  {f'{name} {value}':{_FLAG_COLUMNS}}  {text}".rstrip())
    return "\n".join([*lines, f"{FULL_HELP} has the whole text of each option."])


def _first_clause(text: str, room: int) -> str:
    """Returns the longest beginning of a help text that is within `room` characters.

    It ends with the first sentence, a clause, or else with "...". The default value
    follows, if there is room.
    """
    default = re.search(r" ?\(default: ([^()]*)\)$", text)
    if default is not None:
        text = text[: default.start()]
    clauses = [text.partition(". ")[0].rstrip(".")]
    for mark in ("[;:](?= )", ",(?= )"):
        ends = [match.start() for match in re.finditer(mark, clauses[0])]
        clauses += [text[:end] for end in reversed(ends) if end >= _MIN_CLAUSE]
    clauses.append(textwrap.shorten(text, room, placeholder=" ..."))
    clause = next(clause for clause in clauses if len(clause) <= room)
    value = default and default.group(1).strip("' ")
    if value and len(f"{clause} [{value}]") <= room:
        clause += f" [{value}]"
    return clause


def _one_line(framed: str) -> str:
    """Extracts the message and similar flags from a framed error of tyro."""
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
    text = re.sub("'None', |, 'None'", "", text)  # no flag accepts None
    near = [x.split()[0] for part in sections[1:] for x in part if x[:2] == "--"]
    if near and "Perhaps you meant" in framed:
        text += f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    return text or " ".join(framed.split())
