"""`--coordinator`, `--num-processes`, `--process-id`: one command in many processes."""

import contextlib
import ctypes
import os
import signal
import sys

NAMES = ("--coordinator", "--num-processes", "--process-id")
HELP = """\
With --coordinator HOST:PORT --num-processes N --process-id I a command is one of N
processes whose devices make one mesh, each started with its I, from 0; with
--coordinator cluster the cluster's environment says the rest."""


MANY = ("generate", "train")
"""Commands that divide their work; others would each do the same."""
_DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def is_requested(args: list[str]) -> bool:
    """Whether the words after `jaxkv` name other processes."""
    return any(word.startswith(NAMES) for word in args)


def fork_worker() -> int | None:
    """Has a child do the work of this process, and says what ended it.

    JAX ends a process that is told of another's death from outside of Python, where
    nothing can be caught. Called before there are threads.

    Returns:
      None in the child; in its parent the status to leave with.
    """
    if not hasattr(os, "fork"):
        return None
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # it hears of Ctrl-C once, from its parent
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        return None

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGABRT:
        print("jaxkv: another process has ended, and with it this one", file=sys.stderr)
        return 1
    return status if status >= 0 else 128 - status


def check_command(command: str) -> None:
    """Refuses processes for a command that would do the same in each.

    Raises:
      ValueError: names those that divide their work.
    """
    joined = sys.modules.get("jaxkv.parallel.processes")
    if joined is not None and joined.num() > 1 and command not in MANY:
        raise ValueError(
            f"{NAMES[0]} is for {' and '.join(MANY)} alone: each of {joined.num()} "
            f"processes would do all of {command}"
        )


def join_processes(args: list[str]) -> list[str]:
    """Joins other processes if it is asked for; all but the first are silent then.

    Args:
      args: the words after `jaxkv`.

    Returns:
      Those that are not about it.

    Raises:
      ValueError: a number is missing or out of range, or nobody answers.
    """
    given, rest = _split_flags(args)
    if not given:
        return args
    if NAMES[0] not in given:
        raise ValueError(f"{next(iter(given))} needs {NAMES[0]} HOST:PORT")
    from jaxkv.parallel import processes

    for name in NAMES[1:]:
        if name in given and not given[name].isdecimal():
            raise ValueError(f"{name} {given[name]}: must be a whole number")
    numbers = [int(given[name]) if name in given else None for name in NAMES[1:]]
    processes.join(given[NAMES[0]], *numbers)
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return rest


def is_first_process() -> bool:
    """Whether this process is the first, or alone."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    return joined is None or joined.is_first()


def is_peer_loss(error: Exception) -> bool:
    """Whether it says that another process has gone."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    is_joined = joined is not None and joined.num() > 1
    return is_joined and ("Gloo" in str(error) or "NCCL" in str(error))


def exit_unjoined(status: int, *, at_once: bool = False) -> int:
    """Ends a process that failed to join, or joined: others are not waited for.

    Args:
      status: to end with.
      at_once: True if the others did not agree to end, whatever the status.
    """
    if (at_once or status in (1, 2)) and is_requested(sys.argv[1:]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _split_flags(args: list[str]) -> tuple[dict[str, str], list[str]]:
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
