"""`--coordinator`, `--num-processes`, `--process-id`: one command in many processes."""

import os
import sys

NAMES = ("--coordinator", "--num-processes", "--process-id")
HELP = """\
With --coordinator HOST:PORT --num-processes N --process-id I a command is one of N
processes whose devices make one mesh, each started with its I, from 0; with
--coordinator cluster the cluster's environment says the rest."""


def is_asked(args: list[str]) -> bool:
    """Whether the words after `jaxkv` name other processes."""
    return any(word.startswith(NAMES) for word in args)


def join(args: list[str]) -> list[str]:
    """Joins other processes if it is asked for; all but the first are silent then.

    Args:
      args: the words after `jaxkv`.

    Returns:
      Those that are not about it.

    Raises:
      ValueError: a number is missing or out of range, or nobody answers.
    """
    given, rest = _taken(args)
    if not given:
        return args
    if NAMES[0] not in given:
        raise ValueError(f"{next(iter(given))} needs {NAMES[0]} HOST:PORT")
    from jaxkv.parallel import processes

    numbers = [_number(name, given) for name in NAMES[1:]]
    processes.join(given[NAMES[0]], *numbers)
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return rest


def speaks() -> bool:
    """Whether this process is the first, or alone."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    return joined is None or joined.is_first()


def is_loss(error: Exception) -> bool:
    """Whether it says that another process has gone."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    is_joined = joined is not None and joined.num() > 1
    return is_joined and ("Gloo" in str(error) or "NCCL" in str(error))


def leave(status: int) -> int:
    """Ends a joined process that failed: the others are not there to be waited for."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    if status in (1, 2) and joined is not None and joined.num() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _taken(args: list[str]) -> tuple[dict[str, str], list[str]]:
    given: dict[str, str] = {}
    rest, words = [], iter(args)
    for word in words:
        name, is_joined, value = word.partition("=")
        if name not in NAMES:
            rest.append(word)
            continue
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = value if is_joined else next(words, "")
        if not given[name]:
            raise ValueError(f"{name} needs a value")
    return given, rest


def _number(name: str, given: dict[str, str]) -> int | None:
    if name not in given:
        return None
    if not given[name].isdecimal():
        raise ValueError(f"{name} {given[name]}: must be a whole number")
    return int(given[name])
