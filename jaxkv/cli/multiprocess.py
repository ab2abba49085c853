"""One command in several processes, by `--coordinator` and related flags."""

import contextlib
import ctypes
import os
import signal
import sys

PROCESS_FLAGS = ("--coordinator", "--num-processes", "--process-id")
HELP = """\
With --coordinator HOST:PORT --num-processes N --process-id I a command is one
of N processes whose devices form one mesh; I starts at 0. With --coordinator
cluster, N and I are taken from the cluster's environment."""


MANY = ("generate", "train")
"""Commands that divide their work over processes; other commands would repeat it."""
_DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def is_requested(args: list[str]) -> bool:
    """Returns True if the arguments after `jaxkv` request several processes."""
    return any(word.startswith(PROCESS_FLAGS) for word in args)


def fork_worker() -> int | None:
    """Forks a child that does the work, and waits for it.

    JAX aborts a process from native code when another process of the group ends, where
    no exception can be caught. Must be called before threads exist.

    Returns:
      None in the child; the exit status in the parent.
    """
    if not hasattr(os, "fork"):
        return None
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # the parent forwards Ctrl-C, so it arrives once
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
        print("jaxkv: ended because another process has ended", file=sys.stderr)
        return 1
    return status if status >= 0 else 128 - status


def check_command(command: str) -> None:
    """Rejects several processes for a command that would repeat its work in each.

    Raises:
      ValueError: the command does not divide its work.
    """
    joined = sys.modules.get("jaxkv.parallel.processes")
    num = 1 if joined is None else joined.num_processes()
    if num > 1 and command not in MANY:
        raise ValueError(
            f"{PROCESS_FLAGS[0]} is only for {' and '.join(MANY)}: each of {num} "
            f"processes would repeat {command}"
        )


def join_from_command(args: list[str]) -> list[str]:
    """Joins a group of processes if requested; only the first one prints afterwards.

    Args:
      args: arguments after `jaxkv`.

    Returns:
      The remaining arguments.

    Raises:
      ValueError: a number is missing or out of range, or no process answers.
    """
    value_by_flag, remaining_args = _split_flags(args)
    if not value_by_flag:
        return args
    if PROCESS_FLAGS[0] not in value_by_flag:
        raise ValueError(
            f"{next(iter(value_by_flag))} needs {PROCESS_FLAGS[0]} HOST:PORT"
        )
    from jaxkv.parallel import is_first, join_processes

    for name in PROCESS_FLAGS[1:]:
        if name in value_by_flag and not value_by_flag[name].isdecimal():
            raise ValueError(f"{name} {value_by_flag[name]}: must be a whole number")
    numbers = [
        int(value_by_flag[name]) if name in value_by_flag else None
        for name in PROCESS_FLAGS[1:]
    ]
    join_processes(value_by_flag[PROCESS_FLAGS[0]], *numbers)
    if not is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return remaining_args


def is_first_process() -> bool:
    """Returns True if this process is the first of its group, or the only one."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    return joined is None or joined.is_first()


def is_peer_loss(error: Exception) -> bool:
    """Returns True if an error means that another process has ended."""
    joined = sys.modules.get("jaxkv.parallel.processes")
    is_joined = joined is not None and joined.num_processes() > 1
    return is_joined and ("Gloo" in str(error) or "NCCL" in str(error))


def exit_unjoined(status: int, *, at_once: bool = False) -> int:
    """Ends a process of a group after a failure, without waiting for the group.

    Args:
      status: exit status.
      at_once: True if the group did not agree to end, for any status.
    """
    if (at_once or status in (1, 2)) and is_requested(sys.argv[1:]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _split_flags(args: list[str]) -> tuple[dict[str, str], list[str]]:
    value_by_flag: dict[str, str] = {}
    remaining_args = []
    words = iter(args)
    for word in words:
        name, is_joined, value = word.partition("=")
        if name not in PROCESS_FLAGS:
            remaining_args.append(word)
            continue
        if name in value_by_flag:
            raise ValueError(f"{name} is given twice")
        value_by_flag[name] = value if is_joined else next(words, "")
        if not value_by_flag[name]:
            raise ValueError(f"{name} needs a value")
    return value_by_flag, remaining_args
