"""Run folders: what was asked, on what, what came out, and the figure drawn from it.

    config.json                  the config, as `--config` takes it back
    env.json                     status, versions, device, processor, commit, time
    result.npz or runs.jsonl     a result of arrays, or of rows
    claims.json                  published numbers held against ours
    figure.svg, figure.png       drawn from the files above, never from memory
    figure-1.svg, figure-1.png   its first panel by itself, and so on, of several
    report.md                    all of it for a reader
    fit.json                     a fitted law, as `plan` reads it
    sweep.json, prediction.json  what was trained, and what was predicted

Every file is written aside and renamed, so a reader never meets half of one. The status
in `env.json` is "running" until the run is "done", was "interrupted", or has "failed".
One process writes there at a time.
"""

import contextlib
import os
import shutil
import tempfile
import typing
from collections.abc import Generator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.framework import config_json, environment, registry, table
from experiments.framework import report as framework_report
from experiments.framework.claims import Claim
from experiments.framework.report import ReportPart, Verdicts
from experiments.framework.study import Experiment, Study
from experiments.plotting import style
from jaxkv import files
from jaxkv.parallel import processes
from scaling import locking

FILES = (
    "config.json",
    "env.json",
    "result.npz",
    "runs.jsonl",
    "claims.json",
    "figure.svg",
    "figure.png",
    "report.md",
    "fit.json",
    "sweep.json",
    "prediction.json",
)
"""What a run folder may hold, the panels of its figure aside."""
PANELS = "figure-*.*"
"""The panels' files: `figure-1.svg`, `figure-1.png` and so on."""
EARLIER = ".earlier"
"""Where in the folder an earlier run waits until the new one is whole."""
OUT = "{out}"
"""In a config's `folder`, the run folder itself, of which nothing else is replaced."""
DEFAULT_PARENT = Path("runs")
"""Where run folders go that nobody gave a place."""

Status = Literal["running", "done", "interrupted", "failed"]


class RunFolder(NamedTuple):
    """A run folder, read back and checked.

    Attributes:
      folder: where it lies.
      study: what it is a run of.
      config: the config, of the experiment's type.
      env: the content of `env.json`.
      result: the result, of the experiment's type, arrays as NumPy's.
      claims: the claims, judged anew from the result.
      metrics: its numbers, computed anew from the result.
      parts: what to tell a person of it.
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
def reserve(out: Path | None, name: str) -> Generator[Path]:
    """Has the folder of a run to itself; arguments are those of `new_folder`.

    Yields:
      The folder. If there is nothing in it in the end, it is gone.

    Raises:
      ValueError: another process writes there, or it cannot be used.
    """
    if not processes.is_first():  # the first one's is kept
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    folder = new_folder(out, name)
    lock = locking.WriterLock(folder)
    try:
        yield folder
    finally:
        lock.close()
        _drop_empty(folder)


def write_files(
    folder: Path | None, name: str, contents: Mapping[str, str | bytes]
) -> Path:
    """Writes what a command without a run found, by file, into a folder.

    Returns:
      The folder; where none was named it is a new one, `runs/NAME-DATE-TIME`.

    Raises:
      ValueError: another process writes there, or it cannot be written.
    """
    folder = folder or new_folder(None, name)
    with contextlib.closing(locking.WriterLock(folder)):
        for file, content in contents.items():
            files.write_aside(folder / file, content)
    return folder


def new_folder(out: Path | None, name: str) -> Path:
    """Chooses the folder of a run; `claimed` has it to itself.

    Args:
      out: where it should be: a new or empty folder, or an earlier run's, which is
        then replaced. `None` makes a new one, `runs/NAME-DATE-TIME`.
      name: the experiment's name.

    Raises:
      ValueError: `out` is a file, or holds something that is not a run.
    """
    if out is None:
        stamp, number = f"{name}-{datetime.now():%Y%m%d-%H%M%S}", 1
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
        and {x.name for x in out.iterdir()} - {locking.NAME}
    ):
        raise ValueError(f"{out}: holds something else than a run; name a new folder")
    return out


def begin_run(
    folder: Path, experiment: Experiment, config: Any, config_name: str = ""
) -> None:
    """Writes what is known before the work: `config.json` and `env.json`.

    `config_name` is the shipped config that `config` was made from, if any.

    What an earlier run left in the folder is put aside, so that the new config never
    stands beside old results; `finish` deletes it, `abandon` puts it back.

    Raises:
      ValueError: the folder cannot be made, or nothing can be written there.
    """
    env = {"experiment": experiment.name, "status": "running"}
    env |= {"config": config_name} if config_name else {}
    env |= environment.describe_machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / EARLIER).is_dir():  # the run that put it there was killed
            abandon_run(folder)
        if _is_run(folder):
            (folder / EARLIER).mkdir()
            _move(folder, folder / EARLIER)
        files.write_aside(folder / "config.json", config_json.config_dumps(config))
        files.write_aside(folder / "env.json", config_json.dumps(env))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written: {error.strerror}") from None


def abandon_run(folder: Path) -> None:
    """Takes back what `begin` did: an earlier run is back, a new folder is gone."""
    for name in _names(folder):
        (folder / name).unlink(missing_ok=True)
    if (folder / EARLIER).is_dir():
        _move(folder / EARLIER, folder)
        (folder / EARLIER).rmdir()
    _drop_empty(folder)


def has_result(folder: Path) -> bool:
    """Tells whether a run came as far as writing its result."""
    return any((folder / name).exists() for name in ("result.npz", "runs.jsonl"))


def mark_status(folder: Path, status: Status) -> None:
    """Notes in `env.json` what became of a run that has no result."""
    env = _env(folder) | {"status": status}
    files.write_aside(folder / "env.json", config_json.dumps(env))


def finish_run(
    folder: Path,
    experiment: Experiment,
    result: Any,
    *,
    duration_s: float,
    interrupted: bool = False,
) -> RunFolder:
    """Writes the result, reads it back, and derives everything else from that.

    Args:
      folder: a folder that `begin` prepared.
      experiment: what was run.
      result: what the study's `run` returned.
      duration_s: how long that took.
      interrupted: whether it was stopped before its end.

    Raises:
      TypeError: the result holds something that neither file can.
    """
    if isinstance(result, list):
        rows = (config_json.dumps(row, indent=None) + "\n" for row in result)
        files.write_aside(folder / "runs.jsonl", "".join(rows))
    else:
        arrays = _flatten(result)
        files.write_aside(
            folder / "result.npz", lambda file: np.savez_compressed(file, **arrays)
        )
    run = read_run(folder, experiment)
    files.write_aside(folder / "claims.json", config_json.dumps(run.claims))
    for name, text in run.study.files(run.result).items():
        files.write_aside(folder / name, text)
    draw_figure(run)
    status: Status = "interrupted" if interrupted else "done"
    env = _env(folder) | {"status": status, "duration_s": duration_s}
    report = framework_report.render_report(
        experiment.question, run.config, env, run.parts
    )
    files.write_aside(folder / "report.md", report)
    # The last word: whoever reads "done" finds everything else.
    files.write_aside(folder / "env.json", config_json.dumps(env))
    discard_earlier(folder)
    return run._replace(env=env)


def discard_earlier(folder: Path) -> None:
    """Deletes the earlier run that `begin` put aside."""
    shutil.rmtree(folder / EARLIER, ignore_errors=True)


def read_run(folder: Path, experiment: Experiment) -> RunFolder:
    """Reads a run folder; nothing in it is believed unchecked or unpickled.

    Raises:
      ValueError: a file is missing, or is not what it should be.
    """
    path = folder / "config.json"
    config = experiment.config_loads(files.read_text(path), str(path))
    study = experiment.study_of(config)
    env_path = folder / "env.json"
    env = files.read_json(env_path)
    if list in (study.result, typing.get_origin(study.result)):
        path = folder / "runs.jsonl"
        result: Any = [
            files.parse_object(line, path)
            for line in files.read_text(path).splitlines()
        ]
    else:
        result = _load_arrays(folder / "result.npz", study.result)
    claims, parts = study.claims(result), study.report_parts(result)
    if registry.SMOKE in (env.get("config"), study.name_of(config)):
        claims = [claim.at_smoke_size() for claim in claims]
    parts += [Verdicts(claims)] if claims else []
    return RunFolder(
        folder=folder,
        study=study,
        config=config,
        env=env,
        result=result,
        claims=claims,
        metrics=study.metrics(result),
        parts=parts,
    )


def draw_figure(run: RunFolder) -> None:
    """Draws the figure of a run that was read, and its panels, into its folder."""
    figures = style.render_figure(
        lambda axes: run.study.plot(axes, run.result),
        panels=run.study.panels,
        size_inches=run.study.panel_size_inches,
    )
    for old in run.folder.glob(PANELS):
        if old.name not in figures:  # of a figure that had more panels
            old.unlink()
    for name, content in figures.items():
        files.write_aside(run.folder / name, content)


def _drop_empty(folder: Path) -> None:
    """Deletes a folder that holds nothing, and the one of all runs with the last."""
    with contextlib.suppress(OSError):  # one that holds something else stays
        folder.rmdir()
        if folder.parent == DEFAULT_PARENT:
            DEFAULT_PARENT.rmdir()


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / EARLIER).exists()


def _move(source: Path, target: Path) -> None:
    for path in (x for name in _names(source) if (x := source / name).exists()):
        os.replace(path, target / path.name)


def _names(folder: Path) -> list[str]:
    """Names of the files of a run, those of its figure's panels among them."""
    return [*FILES, *(path.name for path in folder.glob(PANELS))]


def _env(folder: Path) -> dict[str, Any]:
    path = folder / "env.json"
    # The run has started the devices by now; before it, asking would have.
    env = files.read_json(path)
    return env | {"devices": environment.device_names()}


def _flatten(result: Any, prefix: str = "") -> dict[str, Any]:
    """Names every leaf of nested records, `outer.inner`, as a NumPy array."""
    arrays = {}
    for name, value in table.field_values(result).items():
        if table.is_compound(type(value)):
            arrays |= _flatten(value, prefix + table.array_prefix(type(result), name))
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
        if table.is_compound(inner):
            inside = prefix + table.array_prefix(hint, name)
            values[name] = _unflatten(path, inner, arrays, inside)
        elif prefix + name not in arrays:
            raise ValueError(f"{path}: lacks {prefix}{name}")
        else:
            array = arrays[prefix + name]
            values[name] = array.item() if inner in (bool, int, float, str) else array
    return hint(**values)
