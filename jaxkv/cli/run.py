"""One run of an experiment: folder, progress, result, and output."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli.console import RESUMABLE, STATUS, WorkStopped
from jaxkv.cli.output import CommandOutput
from jaxkv.cli.user_errors import is_user_error

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jaxkv.cli.console import Terminal
    from jaxkv.report import Experiment, SavedRun


def run_study(
    experiment: "Experiment",
    config: "DataclassInstance",
    out: Path | None,
    max_seconds: float = math.inf,
    config_name: str = "",
    log: str | None = None,
) -> CommandOutput:
    """Runs an experiment into a run folder.

    Ctrl-C or the time limit asks the run to end early; a partial result is kept like a
    complete one. An earlier run in the same folder is replaced only if this run has a
    result.

    Args:
      experiment: experiment to run.
      config: config.
      out: folder for the results, as for `run_folder.new_folder`.
      max_seconds: time limit in s.
      config_name: name of the shipped config that `config` was made from, if any.
      log: destination of the numbers of steps, as for `console.open_step_log`.

    Returns:
      Folder, claims and metrics. The status is 130 if the run was ended early, 143
      after SIGTERM, or `interrupts.RESUMABLE` if the time limit was reached and another
      call continues the work.

    Raises:
      interrupts.WorkStopped: a second Ctrl-C, after which a new folder contains only
        the config; or the experiment had no result when it was stopped, and the folder
        is removed.
      ValueError: the folder or an input named in the config cannot be used, and the
        folder is removed; or another process is writing there; or the study has no
        steps to log.
    """
    from jaxkv.cli import console
    from jaxkv.report import lock_folder

    if log is not None and not experiment.study_of(config).has_steps:
        raise ValueError(f"--log {log}: {experiment.name} has no steps to log")
    with (
        lock_folder(out, experiment.name) as folder,
        console.open_step_log(log, folder) as log_step,
    ):

        def last_words() -> str:
            return _give_up(folder, KeyboardInterrupt())

        with console.Terminal(last_words, max_seconds, log_step) as bars:
            goes_on = bool(getattr(config, "folder", ""))  # has resumable results
            try:
                saved_run = _carry_out(experiment, config, folder, bars, config_name)
            except BaseException as error:
                line = _give_up(folder, error)
                if isinstance(error, KeyboardInterrupt):
                    status = _status(bars, goes_on) or STATUS
                    raise WorkStopped(line, status) from None
                raise
    was_stopped = saved_run.env["status"] == "interrupted"
    document = {
        "out": folder,
        "interrupted": was_stopped,
        "claims": saved_run.claims,
        "metrics": saved_run.metrics,
    }
    status = _status(bars, goes_on)
    lines = ["interrupted; the result is partial"] if was_stopped else []
    if status == RESUMABLE:
        lines = ["time limit reached; run the same command to continue"]
    lines.append(f"report: {folder / 'report.md'}")
    return CommandOutput(document, saved_run.parts, lines, status)


def _carry_out(
    experiment: "Experiment",
    config: "DataclassInstance",
    folder: Path,
    bars: "Terminal",
    config_name: str,
) -> "SavedRun":
    """Runs the experiment and writes its result."""
    from jaxkv import parallel
    from jaxkv.report import OUT, begin_run, finish_run

    if (num := getattr(config, "mesh_devices", 1)) > 1:
        parallel.set_cpu_devices(num)  # before JAX lists its devices
    experiment.study_of(config).prepare()
    begin_run(folder, experiment, config, config_name)
    started = time.monotonic()
    if getattr(config, "folder", "") == OUT:
        config = dataclasses.replace(config, folder=str(folder))
    result = experiment.study_of(config).run(config, bars)
    duration_s = time.monotonic() - started
    bars.show("drawing")
    was_stopped = bars.has_stopped  # a stop from here on has no effect
    try:
        return finish_run(
            folder, experiment, result, duration_s=duration_s, interrupted=was_stopped
        )
    except OSError as error:
        line = f"{folder}: cannot be written: {error.strerror or error}"
        raise ValueError(line) from error


def _status(bars: "Terminal", goes_on: bool) -> int:
    """Returns the exit status; "resumable" only for commands that can be resumed."""
    is_over = bars.status == RESUMABLE and not goes_on
    return STATUS if is_over else bars.status


def _give_up(folder: Path, error: BaseException) -> str:
    """Cleans up the folder of a failed run; returns a message about its content."""
    from jaxkv import report
    from jaxkv.report import EARLIER, abandon_run, discard_earlier, mark_status

    if not folder.is_dir():
        return "interrupted at once"
    has_result = report.has_result(folder)
    reason = str(error) if isinstance(error, KeyboardInterrupt) else ""
    is_empty = bool(reason) or is_user_error(error)
    if (is_empty or (folder / EARLIER).is_dir()) and not has_result:
        abandon_run(folder)
        return reason or f"interrupted at once; {folder} is unchanged"
    if (folder / "env.json").exists():
        was_interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(OSError, ValueError):  # the disk may be full
            mark_status(folder, "interrupted" if was_interrupted else "failed")
    discard_earlier(folder)
    content = "result" if has_result else "config"
    return f"interrupted at once; only the {content} is in {folder}"
