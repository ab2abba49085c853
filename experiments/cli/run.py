"""Carries out one run: folder, progress, result, and what the command line says."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.cli.console import interrupts
from experiments.framework import user_errors

if TYPE_CHECKING:
    from experiments.cli.console import Terminal
    from experiments.framework import Experiment, RunFolder


class CommandOutput(NamedTuple):
    """The output of a command.

    Attributes:
      document: the JSON document.
      parts: tables, texts and claims of `report` for a person.
      lines: what else a person should read, below them.
      status: the exit status.
    """

    document: dict[str, Any]
    parts: list[Any]
    lines: list[str]
    status: int = 0


def run(
    experiment: "Experiment",
    config: Any,
    out: Path | None,
    max_seconds: float = math.inf,
    config_name: str = "",
) -> CommandOutput:
    """Runs an experiment into a run folder.

    Ctrl-C asks the run to end early, as does the clock; what it had by then is kept
    like a whole result.
    An earlier run in the same folder is replaced by a result alone: whatever else comes
    of this one, the earlier one is still there.

    Args:
      experiment: what to run.
      config: the config to run it with.
      out: the folder for the results, as `run_folder.new_folder` takes it.
      max_seconds: after which it is asked.
      config_name: the shipped config that `config` was made from, if any.

    Returns:
      The folder, claims and metrics, with status 130 if it was ended early, 143 if by
      SIGTERM, or `interrupts.AGAIN` if by the clock and another call goes on from
      there.

    Raises:
      interrupts.Stopped: a second Ctrl-C; a new folder holds the config only. Or the
        experiment had nothing to show when it was stopped; nothing is left in it.
      ValueError: the folder or something the config names cannot be used; nothing is
        left in it. Or another process is writing there.
    """
    from experiments.cli.console import terminal
    from experiments.framework import run_folder

    with run_folder.reserve(out, experiment.name) as folder:

        def last_words() -> str:
            return _give_up(folder, KeyboardInterrupt())

        with terminal.Terminal(last_words, max_seconds=max_seconds) as bars:
            goes_on = bool(getattr(config, "folder", ""))  # where it keeps what it has
            try:
                kept = _carry_out(experiment, config, folder, bars, config_name)
            except BaseException as error:
                line = _give_up(folder, error)
                if isinstance(error, KeyboardInterrupt):
                    status = _status(bars, goes_on) or interrupts.STATUS
                    raise interrupts.WorkStopped(line, status) from None
                raise
    was_stopped = kept.env["status"] == "interrupted"
    document = {
        "out": folder,
        "interrupted": was_stopped,
        "claims": kept.claims,
        "metrics": kept.metrics,
    }
    status = _status(bars, goes_on)
    lines = ["interrupted; this is what it had"] if was_stopped else []
    if status == interrupts.RESUMABLE:
        lines = ["time is up; this is what it had, and the same command goes on"]
    lines.append(f"report: {folder / 'report.md'}")
    return CommandOutput(document, kept.parts, lines, status)


def _carry_out(
    experiment: "Experiment",
    config: Any,
    folder: Path,
    bars: "Terminal",
    config_name: str,
) -> "RunFolder":
    """Runs it and writes what came of it."""
    from experiments.framework import run_folder
    from jaxkv import parallel

    if (num := getattr(config, "mesh_devices", 1)) > 1:
        parallel.count_cpu_as(num)  # before anybody asks how many there are
    experiment.study_of(config).prepare()
    run_folder.begin_run(folder, experiment, config, config_name)
    started = time.monotonic()
    if getattr(config, "folder", "") == run_folder.OUT:
        config = dataclasses.replace(config, folder=str(folder))
    result = experiment.study_of(config).run(config, bars)
    duration_s = time.monotonic() - started
    bars.show("drawing")
    was_stopped = bars.has_stopped  # from here on all is done
    try:
        return run_folder.finish_run(
            folder, experiment, result, duration_s=duration_s, interrupted=was_stopped
        )
    except OSError as error:
        line = f"{folder}: cannot be written: {error.strerror or error}"
        raise ValueError(line) from error


def _status(bars: "Terminal", goes_on: bool) -> int:
    """The exit status: to be told that a command goes on, it must."""
    is_over = bars.status == interrupts.RESUMABLE and not goes_on
    return interrupts.STATUS if is_over else bars.status


def _give_up(folder: Path, error: BaseException) -> str:
    """Leaves a folder as it should be found; says what is in it."""
    from experiments.framework import run_folder

    if not folder.is_dir():
        return "interrupted at once"
    has_result = run_folder.has_result(folder)
    reason = str(error) if isinstance(error, KeyboardInterrupt) else ""
    is_empty = bool(reason) or user_errors.is_user_error(error)
    if (is_empty or (folder / run_folder.EARLIER).is_dir()) and not has_result:
        run_folder.abandon_run(folder)
        return reason or f"interrupted at once; {folder} is as it was"
    if (folder / "env.json").exists():
        was_interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(OSError, ValueError):  # where the disk is full
            run_folder.mark_status(
                folder, "interrupted" if was_interrupted else "failed"
            )
    run_folder.discard_earlier(folder)
    what = "result" if has_result else "config"
    return f"interrupted at once; only the {what} is in {folder}"
