"""Run folders: config, environment, result, and everything derived from the result.

    config.json                  config, in the form that `--config` accepts
    env.json                     status, versions, device, processor, commit, time
    result.npz or runs.jsonl     result of arrays, or of rows
    claims.json                  published and measured numbers with verdicts
    figure.svg, figure.png       drawn from the files above; figure.pdf on request
    figure.csv                   plotted data
    figure-1.svg, figure-1.png   first panel of several, and so on
    report.md                    report for readers
    fit.json                     fitted law, which `jaxkv plan` reads
    server.json                  fitted server, which `jaxkv simulate` reads
    sweep.json, prediction.json  training runs of a sweep, and predictions
    steps.jsonl                  numbers of steps, on request

Every file is written under a temporary name and renamed, so a reader never sees a
partial file. The status in `env.json` is "running" until the run is "done", was
"interrupted", or has "failed". One process at a time writes to a folder.
"""

import contextlib
import os
import shutil
import tempfile
import typing
from collections.abc import Generator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxkv import files, validation
from jaxkv.files import LOCK_FILE, WriterLock
from jaxkv.parallel import is_first
from jaxkv.plotting import render_figure
from jaxkv.report import environment, plain_json, tables
from jaxkv.report import parts as framework_report
from jaxkv.report.claims import Claim
from jaxkv.report.parts import ReportPart, Verdicts
from jaxkv.report.study import SMOKE, Experiment, Study

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILES = (
    "config.json",
    "env.json",
    "result.npz",
    "runs.jsonl",
    "claims.json",
    "figure.svg",
    "figure.png",
    "figure.pdf",
    "figure.csv",
    "report.md",
    "fit.json",
    "policy.json",
    "server.json",
    "sweep.json",
    "prediction.json",
    "predictions.csv",
    "schedule.csv",
    "steps.jsonl",
)
"""Files that a run folder may contain, without the panels of its figure."""
PANELS = "figure-*.*"
"""Pattern of the panels' files: `figure-1.svg`, `figure-1.png` and so on."""
EARLIER = ".earlier"
"""Subfolder that keeps an earlier run until the new run is complete."""
OUT = "{out}"
"""Value of a config's `folder` that means the run folder itself."""
DEFAULT_PARENT = Path("runs")
"""Parent of run folders if `--out` is not given."""

Status = Literal["running", "done", "interrupted", "failed"]


class SavedRun(NamedTuple):
    """A run folder that was read and validated.

    Attributes:
      folder: path.
      study: study that was run.
      config: config, of the study's type.
      env: content of `env.json`.
      result: result, of the study's type, with NumPy arrays.
      claims: claims, judged again from the result.
      metrics: metrics, computed again from the result.
      parts: parts of the report.
    """

    folder: Path
    study: Study
    config: Any
    env: dict[str, Any]
    result: Any
    claims: list[Claim]
    metrics: dict[str, Any]
    parts: list[ReportPart]


@contextlib.contextmanager
def lock_folder(out: Path | None, name: str) -> Generator[Path]:
    """Locks the folder of a run; arguments are those of `new_folder`.

    Yields:
      The folder. It is deleted at the end if it is empty.

    Raises:
      ValueError: another process writes there, or the folder cannot be used.
    """
    if not is_first():  # only the first process keeps its folder
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    folder = new_folder(out, name)
    lock = WriterLock(folder)
    try:
        yield folder
    finally:
        lock.close()
        _drop_empty(folder)


def write_files(
    folder: Path | None, name: str, contents: Mapping[str, str | bytes]
) -> Path:
    """Writes files of a command that makes no run into a folder.

    Args:
      folder: target; None makes a new one, `runs/NAME-DATE-TIME`.
      name: name of a new folder.
      contents: contents by file name.

    Returns:
      The folder.

    Raises:
      ValueError: another process writes there, or the folder cannot be written.
    """
    folder = folder or new_folder(None, name)
    with contextlib.closing(WriterLock(folder)):
        for file, content in contents.items():
            files.write_atomically(folder / file, content)
    return folder


def new_folder(out: Path | None, name: str) -> Path:
    """Returns the folder of a run; `reserve` locks it.

    Args:
      out: a new or empty folder, or the folder of an earlier run, which is replaced.
        None makes a new one, `runs/NAME-DATE-TIME`.
      name: name of the experiment.

    Raises:
      ValueError: `out` is a file, or contains something other than a run.
    """
    if out is None:
        stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        number = 1
        while True:  # several may start in the same second
            out = DEFAULT_PARENT / (stamp if number == 1 else f"{stamp}-{number}")
            try:
                out.mkdir(parents=True)
                return out
            except FileExistsError:
                number += 1
            except OSError as error:
                line = f"{out}: cannot be written: {error.strerror}"
                raise ValueError(line) from None
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file, not a folder")
    if (
        out.exists()
        and not _is_run(out)
        and {x.name for x in out.iterdir()} - {LOCK_FILE}
    ):
        raise ValueError(f"{out}: holds files that are not a run; name a new folder")
    return out


def begin_run(
    folder: Path,
    experiment: Experiment,
    config: "DataclassInstance",
    config_name: str = "",
) -> None:
    """Writes `config.json` and `env.json` before the work starts.

    Files of an earlier run are moved to a subfolder, so that the new config is never
    mixed with old results. `finish_run` deletes them and `abandon_run` restores them.

    Args:
      folder: run folder.
      experiment: experiment to run.
      config: its config.
      config_name: name of the shipped config that `config` was made from, if any.

    Raises:
      ValueError: the folder cannot be made or written.
    """
    env = {"experiment": experiment.name, "status": "running"}
    env |= {"config": config_name} if config_name else {}
    env |= environment.describe_machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / EARLIER).is_dir():  # the previous run was killed
            abandon_run(folder)
        if _is_run(folder):
            (folder / EARLIER).mkdir()
            _move(folder, folder / EARLIER)
        files.write_atomically(folder / "config.json", plain_json.config_dumps(config))
        files.write_atomically(folder / "env.json", plain_json.dumps(env))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written: {error.strerror}") from None


def abandon_run(folder: Path) -> None:
    """Reverts `begin_run`: restores an earlier run, and deletes a new folder."""
    for name in _names(folder):
        (folder / name).unlink(missing_ok=True)
    if (folder / EARLIER).is_dir():
        _move(folder / EARLIER, folder)
        (folder / EARLIER).rmdir()
    _drop_empty(folder)


def has_result(folder: str | os.PathLike[str]) -> bool:
    """Returns True if a run has written its result."""
    folder = validation.path("folder", folder)
    return any((folder / name).exists() for name in ("result.npz", "runs.jsonl"))


def mark_status(folder: Path, status: Status) -> None:
    """Writes the final status of a run without a result to `env.json`."""
    env = _env(folder) | {"status": status}
    files.write_atomically(folder / "env.json", plain_json.dumps(env))


@validation.checks_numbers(duration_s=0)
def finish_run(
    folder: Path,
    experiment: Experiment,
    result: object,
    *,
    duration_s: float,
    interrupted: bool = False,
) -> SavedRun:
    """Writes the result, reads it back, and derives all other files from it.

    Args:
      folder: folder that `begin_run` prepared.
      experiment: experiment that was run.
      result: return value of the study's `run`.
      duration_s: duration of the run, in s.
      interrupted: True if the run was stopped early.

    Raises:
      TypeError: the result contains a type that neither result file supports.
    """
    if isinstance(result, list):
        rows = (plain_json.dumps(row, indent=None) + "\n" for row in result)
        files.write_atomically(folder / "runs.jsonl", "".join(rows))
    else:
        arrays = _flatten(result)
        files.write_atomically(
            folder / "result.npz", lambda file: np.savez_compressed(file, **arrays)
        )
    run = read_run(folder, experiment)
    files.write_atomically(folder / "claims.json", plain_json.dumps(run.claims))
    for name, text in run.study.files(run.result).items():
        files.write_atomically(folder / name, text)
    draw_figure(run)
    status: Status = "interrupted" if interrupted else "done"
    env = _env(folder) | {"status": status, "duration_s": duration_s}
    report = framework_report.render_report(
        experiment.question, run.config, env, run.parts
    )
    files.write_atomically(folder / "report.md", report)
    # Written last: the status "done" implies that all other files exist.
    files.write_atomically(folder / "env.json", plain_json.dumps(env))
    discard_earlier(folder)
    return run._replace(env=env)


def discard_earlier(folder: Path) -> None:
    """Deletes the earlier run that `begin_run` moved to a subfolder."""
    shutil.rmtree(folder / EARLIER, ignore_errors=True)


def replace_run(folder: Path, source: Path) -> None:
    """Replaces the run in a folder by a complete one, whose folder is deleted.

    Figures in SVG are left out: they repeat those in PNG, and are larger.
    """
    for name in _names(folder):
        (folder / name).unlink(missing_ok=True)
    for name in _names(source):
        if (source / name).exists() and not name.endswith(".svg"):
            shutil.move(source / name, folder / name)
    shutil.rmtree(source)


def read_run(folder: str | os.PathLike[str], experiment: Experiment) -> SavedRun:
    """Reads and validates a run folder; no file is unpickled.

    Raises:
      ValueError: a file is missing or invalid.
    """
    folder = validation.path("folder", folder)
    path = folder / "config.json"
    config = experiment.config_loads(files.read_text(path), str(path))
    study = experiment.study_of(config)
    env_path = folder / "env.json"
    env = files.read_json(env_path)
    if list in (study.result, typing.get_origin(study.result)):
        path = folder / "runs.jsonl"
        result = [
            files.parse_object(line, path)
            for line in files.read_text(path).splitlines()
        ]
    else:
        result = _load_arrays(folder / "result.npz", study.result)
    claims = study.claims(result)
    parts = study.report_parts(result)
    if SMOKE in (env.get("config"), study.name_of(config)):
        claims = [claim.at_smoke_size() for claim in claims]
    parts += [Verdicts(claims)] if claims else []
    return SavedRun(
        folder=folder,
        study=study,
        config=config,
        env=env,
        result=result,
        claims=claims,
        metrics=study.metrics(result),
        parts=parts,
    )


def draw_figure(run: SavedRun) -> None:
    """Draws the figure of a run and its panels into its folder."""
    figures = render_figure(
        lambda axes: run.study.plot(axes, run.result),
        panels=run.study.panels[:2],
        size_inches=run.study.panels.size_inches,
    )
    for old in run.folder.glob(PANELS):
        if old.name not in figures:  # panels of an earlier figure
            old.unlink()
    for name, content in figures.items():
        files.write_atomically(run.folder / name, content)


def _drop_empty(folder: Path) -> None:
    """Deletes an empty folder, and the default parent if it becomes empty."""
    with contextlib.suppress(OSError):  # a folder with other files is kept
        folder.rmdir()
        if folder.parent == DEFAULT_PARENT:
            DEFAULT_PARENT.rmdir()


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / EARLIER).exists()


def _move(source: Path, target: Path) -> None:
    for path in (x for name in _names(source) if (x := source / name).exists()):
        os.replace(path, target / path.name)


def _names(folder: Path) -> list[str]:
    """Returns the file names of a run, including the panels of its figure."""
    return [*FILES, *(path.name for path in folder.glob(PANELS))]


def _env(folder: Path) -> dict[str, Any]:
    path = folder / "env.json"
    # Listing devices initializes them, so they are listed only after the run.
    env = files.read_json(path)
    return env | {"devices": environment.device_names()}


def _flatten(result: object, prefix: str = "") -> dict[str, Any]:
    """Returns every leaf of nested records as a NumPy array, by name `outer.inner`."""
    arrays = {}
    for name, value in tables.field_values(result).items():
        if tables.is_compound(type(value)):
            arrays |= _flatten(value, prefix + tables.array_prefix(type(result), name))
            continue
        array = np.asarray(value)
        if array.dtype.kind not in "biufcU":
            raise TypeError(f"result field {prefix}{name} has dtype {array.dtype}")
        arrays[prefix + name] = array
    return arrays


def _load_arrays(path: Path, result_type: Any) -> Any:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return _unflatten(path, result_type, arrays, "")


def _unflatten(
    path: Path, hint: Any, arrays: dict[str, np.ndarray], prefix: str
) -> Any:
    values = {}
    for name, inner in typing.get_type_hints(hint).items():
        if tables.is_compound(inner):
            inside = prefix + tables.array_prefix(hint, name)
            values[name] = _unflatten(path, inner, arrays, inside)
        elif prefix + name not in arrays:
            raise ValueError(f"{path}: lacks {prefix}{name}")
        else:
            array = arrays[prefix + name]
            values[name] = array.item() if inner in (bool, int, float, str) else array
    return hint(**values)
