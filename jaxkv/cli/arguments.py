"""Arguments of a command: names first, then flags; importable without tyro."""

import contextlib
import textwrap
from pathlib import Path
from typing import Any

from jaxkv.validation import format_unknown_name

SHORT_HELP = ("-h", "--help")
"""Flags of the help that fits a screen: a line for each option."""
FULL_HELP = "--help-all"
"""Flag of the help with the whole text and the default value of each option."""
MAX_HELP_LINES = 50
"""Largest number of lines of the short help."""
HELP_COLUMNS = 80
"""Width of the short help in characters."""


def asks_help(args: list[str]) -> bool:
    """Returns True if a flag of either help is among the arguments."""
    return bool({*SHORT_HELP, FULL_HELP} & {*args})


def is_word(args: list[str]) -> bool:
    """Returns True if the first argument exists and is not a flag."""
    return bool(args) and not args[0].startswith("-")


def choose_word(args: list[str], kind: str, choices: dict[str, str], usage: str) -> str:
    """Parses the first argument as one of the choices, or prints help.

    Args:
      args: arguments.
      kind: noun for the choices, for messages.
      choices: line of help by name.
      usage: first lines of the help.

    Raises:
      ValueError: the name is missing or unknown.
      SystemExit: help was requested, and has been printed.
    """
    if asks_help(args[:1]):
        width = max(map(len, choices), default=0)
        lines = [f"  {name:{width}}  {help}" for name, help in choices.items()]
        if args[0] in SHORT_HELP:
            room = HELP_COLUMNS - width - 4
            short_lines = [
                f"  {name:{width}}  {textwrap.shorten(help, room, placeholder=' ...')}"
                for name, help in choices.items()
            ]
            if len(lines) > MAX_HELP_LINES - 10:
                names = textwrap.wrap(", ".join(choices), HELP_COLUMNS - 2)
                short_lines = [f"  {line}" for line in names]
            if short_lines != lines:
                lines = [*short_lines, "", f"{FULL_HELP} describes each {kind}."]
        print("\n".join([usage, "", *lines]))
        raise SystemExit(0)
    if not is_word(args):
        raise ValueError(f"{kind} is missing; one of: {', '.join(choices)}")
    if args[0] not in choices:
        raise ValueError(format_unknown_name(kind, args[0], choices))
    return args[0]


def value_of(args: list[str], flag: str) -> str | None:
    """Returns the value of `--flag value` or `--flag=value`, without a full parse."""
    for arg, following in zip(args, [*args, None][1:], strict=True):
        if arg == flag:
            return following
        if arg.startswith(f"{flag}="):
            return arg.partition("=")[2]
    return None


def take_value(args: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Returns the value of a flag, None without it, and the other arguments.

    Raises:
      ValueError: the flag has no value.
    """
    names = [arg.partition("=")[0] for arg in args]
    if flag not in names:
        return None, args
    if (value := value_of(args, flag)) is None:
        raise ValueError(f"{flag} has no value")
    place = names.index(flag)
    end = place + (1 if "=" in args[place] else 2)
    return value, args[:place] + args[end:]


def parse_subject[T](
    args: list[str],
    options: type[T],
    prog: str,
    missing: str,
    description: str,
    default: T | None = None,
) -> tuple[str, T]:
    """Parses `COMMAND SUBJECT [OPTIONS]`.

    Args:
      args: arguments after the command.
      options: dataclass of the options.
      prog: command, with the name of its subject.
      missing: error message if there is no subject.
      description: text for the help.
      default: options that the flags change; None takes the defaults of the dataclass.

    Raises:
      ValueError: the subject is missing, or a flag is invalid.
    """
    from jaxkv.cli import parsing

    if not is_word(args) and not asks_help(args):
        raise ValueError(missing)
    flags = args[1:] if is_word(args) else args
    parsed = parsing.parse_options(options, flags, prog, description, default=default)
    return args[0], parsed


def parse_model_options[T](
    args: list[str], options: type[T], prog: str, default: T | None = None
) -> tuple[str, T]:
    """Parses `COMMAND MODEL [OPTIONS]`; the model is a folder or a bundled one."""
    from jaxkv.files import bundled_models

    names = ", ".join(bundled_models())
    missing = f"MODEL is missing: a folder, or one of: {names}"
    description = f"MODEL is a folder or a bundled model: {names}."
    return parse_subject(args, options, prog, missing, description, default)


type RunRequest = tuple[Any, Path | None, float]
"""Config, folder and time limit in s of a run."""
_COMMON_FLAGS = ("--out", "--config", "--max-seconds")
"""Flags that are parsed without tyro if there is no other flag."""


def parse_changes(
    base: object,
    args: list[str],
    prog: str,
    description: str,
    out: str = "a new one under runs/",
) -> RunRequest:
    """Parses changes to a config, and the flags of a run, except `--config`.

    Args:
      base: config that the flags change.
      args: flags.
      prog: command, for help and errors.
      description: text for the help.
      out: description of the folder without `--out`.

    Raises:
      ValueError: a flag or its value is invalid.
    """
    remaining = list(args)
    plain: dict[str, str] = {}
    while remaining:
        flag, joined, value = remaining.pop(0).partition("=")
        if not joined and remaining and not remaining[0].startswith("-"):
            value = remaining.pop(0)
        if flag in plain or flag not in _COMMON_FLAGS or not value:
            break
        plain[flag] = value
    else:
        with contextlib.suppress(ValueError):  # not a number
            max_seconds = float(plain.get("--max-seconds", "inf"))
            return base, Path(plain["--out"]) if "--out" in plain else None, max_seconds

    # Imported here, because a benchmark machine may not have tyro.
    from jaxkv.cli import parsing

    parsed = parsing.parse_options(
        parsing.config_options(base, out), args, prog, description, ()
    )
    return parsed.settings, parsed.out, parsed.max_seconds
