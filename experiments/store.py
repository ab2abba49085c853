"""Run folders: what was asked, on what, what came out, and the figure drawn from it.

    config.json                  the config, as `--config` takes it back
    env.json                     versions, device, processor, commit, time
    result.npz or runs.jsonl     a result of arrays, or of rows
    claims.json                  published numbers held against ours
    figure.svg, figure.png       drawn from the files above, never from memory
    report.md                    all of it for a reader

Every file is written aside and renamed, so a reader never meets half of one.
"""

import json
import os
import tempfile
import typing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import documents, environment, reporting, style
from experiments.catalogue import Experiment
from experiments.claims import Claim


class Run(NamedTuple):
    """A run folder, read back and checked.

    Attributes:
      folder: where it lies.
      config: the config, of the experiment's type.
      env: the content of `env.json`.
      result: the result, of the experiment's type, arrays as NumPy's.
      claims: the claims, judged anew from the result.
      metrics: what to print, computed anew from the result.
    """

    folder: Path
    config: Any
    env: dict[str, Any]
    result: Any
    claims: list[Claim]
    metrics: dict[str, Any]


def new_folder(out: Path | None, name: str) -> Path:
    """Makes the folder of a run.

    Args:
      out: where it should be: a new or empty folder, or an earlier run's, which is
        then replaced file by file. `None` picks a new one, `runs/NAME-DATE-TIME`.
      name: the experiment's name.

    Raises:
      ValueError: `out` is a file, or holds something that is not a run.
    """
    if out is None:
        stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        number = 1
        while (
            out := Path("runs", stamp if number == 1 else f"{stamp}-{number}")
        ).exists():
            number += 1
    elif out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file, not a folder")
    elif out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ValueError(f"{out}: holds something else than a run; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    return out


def begin(folder: Path, experiment: Experiment, config: Any) -> None:
    """Writes what is known before the work: `config.json` and `env.json`.

    What an earlier run left in the folder goes first, so that the new config never
    stands beside old results.
    """
    for name in ("result.npz", "runs.jsonl", "claims.json", "report.md"):
        (folder / name).unlink(missing_ok=True)
    for kind in ("svg", "png"):
        (folder / f"figure.{kind}").unlink(missing_ok=True)
    write(folder / "config.json", documents.config_dumps(config))
    env = {"experiment": experiment.name} | environment.describe()
    write(folder / "env.json", documents.dumps(env))


def finish(
    folder: Path,
    experiment: Experiment,
    result: Any,
    *,
    duration_s: float,
    interrupted: bool = False,
) -> Run:
    """Writes the result, reads it back, and derives everything else from that.

    Args:
      folder: a folder that `begin` prepared.
      experiment: what was run.
      result: what `experiment.run` returned.
      duration_s: how long that took.
      interrupted: whether it was stopped before its end.

    Returns:
      The run as it stands in the folder.

    Raises:
      TypeError: the result holds something that neither file can.
    """
    if isinstance(result, list):
        rows = (documents.dumps(row, indent=None) + "\n" for row in result)
        write(folder / "runs.jsonl", "".join(rows))
    else:
        arrays = _flatten(result)
        _write(folder / "result.npz", lambda file: np.savez_compressed(file, **arrays))
    env = json.loads((folder / "env.json").read_text("utf-8"))
    # The run has started the devices by now; before it, asking would have.
    env |= {"devices": environment.devices()}
    env |= {"duration_s": duration_s, "interrupted": interrupted}
    write(folder / "env.json", documents.dumps(env))
    run = read(folder, experiment)
    write(folder / "claims.json", documents.dumps(run.claims))
    draw(run, experiment)
    report = reporting.report(
        experiment.question, run.config, env, run.claims, run.metrics
    )
    write(folder / "report.md", report)
    return run


def read(folder: Path, experiment: Experiment) -> Run:
    """Reads a run folder; nothing in it is believed unchecked or unpickled.

    Args:
      folder: a folder that `finish` completed.
      experiment: what it is a run of.

    Raises:
      ValueError: a file is missing, or is not what it should be.
    """
    config_type = type(next(iter(experiment.configs.values())))
    path = folder / "config.json"
    config = documents.config_loads(config_type, _text(path), str(path))
    env = _object(folder / "env.json", _text(folder / "env.json"))
    if (
        experiment.result_type is list
        or typing.get_origin(experiment.result_type) is list
    ):
        path = folder / "runs.jsonl"
        result: Any = [_object(path, line) for line in _text(path).splitlines()]
    else:
        result = _load_arrays(folder / "result.npz", experiment.result_type)
    return Run(
        folder=folder,
        config=config,
        env=env,
        result=result,
        claims=list(experiment.claims(result)),
        metrics=experiment.metrics(result),
    )


def draw(run: Run, experiment: Experiment) -> None:
    """Draws the figure of a run that was read, and writes it into its folder."""
    figures = style.render(
        lambda axes: experiment.plot(axes, run.result),
        panels=experiment.panels,
        size_inches=experiment.panel_size_inches,
    )
    for name, content in figures.items():
        write(run.folder / name, content)


def write(path: Path, content: str | bytes) -> None:
    """Writes a file aside and renames it into place."""
    data = content.encode() if isinstance(content, str) else content
    _write(path, lambda file: file.write(data))


def _write(path: Path, fill: typing.Callable[[typing.BinaryIO], Any]) -> None:
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def _flatten(result: Any, prefix: str = "") -> dict[str, Any]:
    """Names every leaf of nested NamedTuples, `outer.inner`, as a NumPy array."""
    arrays = {}
    for name, value in result._asdict().items():
        if hasattr(value, "_asdict"):
            arrays |= _flatten(value, f"{prefix}{name}.")
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
        if hasattr(inner, "_fields"):
            values[name] = _unflatten(path, inner, arrays, f"{prefix}{name}.")
        elif prefix + name not in arrays:
            raise ValueError(f"{path}: lacks {prefix}{name}")
        else:
            array = arrays[prefix + name]
            values[name] = array.item() if inner in (bool, int, float, str) else array
    return hint(**values)
