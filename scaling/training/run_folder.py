"""The folder of one training run: config, curve, and checkpoints.

    config.json         the run, the digest of its corpus, and its first step
    curve.jsonl         one line per report, see `train.TrainResult`
    checkpoints/STEP    states after STEP steps, the last two, see
                        `train.save_checkpoint`

A checkpoint holds the curve up to its step. A resumed run continues that curve, and
later reports are removed.
"""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxkv import files
from jaxkv.files import WriterLock
from scaling.costs import Layout

CURVE = "curve.jsonl"
RUN_FILE = "run.json"
"""Files of a checkpoint in addition to its arrays: the curve up to its step; and the
first step of the run with the layouts of its steps."""

PARAMETRIZATION = ("parametrization", "base_width")
"""Fields that earlier configs of runs do not have, left out unless `mup`."""

TOLERANCE = 2e-3
"""Largest relative difference of losses after a run continues with another layout or
number of processes, which changes rounding. Training amplifies it, near divergence to
5e-2; `jaxkv/parallel/README.md` has measurements."""

_NUM_CHECKPOINTS = 2


class RunFolder:
    """The folder of a run, open for writing until `close`; creates a missing folder.

    Args:
      out: the folder.
      described: inputs that determine the run's result, as plain JSON values.
      first_step: first step of a new run; an existing run keeps its own.

    Attributes:
      first_step: first step of the run.

    Raises:
      ValueError: the folder holds another run or other content, is not writable, or
        another process writes to it.
    """

    def __init__(self, out: Path, described: Mapping[str, object], first_step: int):
        self._checkpoints = Path(out).absolute() / "checkpoints"
        self._curve = self._checkpoints.with_name(CURVE)
        self._config = self._checkpoints.with_name("config.json")
        self._lines: list[str] = []
        self._divided: list[dict[str, Any]] = []
        self._lock = WriterLock(out)
        try:
            self.first_step = self._open(out, described, first_step)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Releases the folder."""
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        """Returns the path of the checkpoint after a number of steps."""
        return self._checkpoints / str(step)

    def prune(self) -> None:
        """Deletes all checkpoints but the last two."""
        for step in self._steps()[_NUM_CHECKPOINTS:]:
            _remove(self.checkpoint(step))

    def newest_checkpoint(self, resume: Literal["last", "previous"]) -> Path | None:
        """Returns the checkpoint to continue from, or None without checkpoints.

        Args:
          resume: `last` for the last one, `previous` for the newest undamaged one.

        Raises:
          ValueError: the last one is damaged, or no checkpoint is undamaged.
        """
        damage: list[ValueError] = []
        for path in map(self.checkpoint, self._steps()):
            try:
                files.verify_checksums(path)
            except ValueError as error:
                damage.append(error)
                if resume == "last":
                    break
                continue
            for error in damage:
                warnings.warn(f"{error}; going on from {path}", stacklevel=2)
            return path
        if not damage:
            return None
        advice = "no checkpoint is whole; train in another folder"
        if resume == "last":
            last = self.checkpoint(self._steps()[0])
            advice = (
                f"--resume previous (or deleting {last}) goes on from the newest "
                "whole checkpoint"
            )
        raise ValueError(f"{damage[0]}; {advice}")

    def go_on(
        self,
        last: Path | None,
        step: int,
        num_processes: int,
        layout: Mapping[str, object],
    ) -> list[dict[str, int | float]]:
        """Starts writing from a step on; removes later checkpoints and reports.

        Args:
          last: the checkpoint that was read, or None.
          step: step of its state, or of the initial state.
          num_processes: number of processes from now on.
          layout: layout of the steps from now on.

        Returns:
          The lines of the curve up to the step.

        Raises:
          ValueError: the checkpoint has another step, or `config.json` another first
            step.
        """
        text = ""
        first_step = step
        if last is not None:
            run = files.read_json(last / RUN_FILE)
            text = files.read_text(last / CURVE)
            first_step = run["first_step"]
            self._divided = run["divided"]
            if step != int(last.name):
                raise ValueError(f"{last}: holds the state of {step=}")
        if self.first_step != first_step:
            raise ValueError(
                f"{self._config}: first_step={self.first_step} must be {first_step}"
            )
        self._divide({"num_processes": num_processes, "layout": layout}, step)
        for later in self._steps():
            if later > step:
                _remove(self.checkpoint(later))
        self._lines = text.splitlines(keepends=True)
        if text or self._curve.exists():
            files.write_atomically(self._curve, text)
        return [files.parse_object(line, self._curve) for line in self._lines]

    def texts(self) -> dict[str, str]:
        """Returns the files of a checkpoint in addition to its arrays."""
        run = {"first_step": self.first_step, "divided": self._divided}
        return {RUN_FILE: json.dumps(run), CURVE: "".join(self._lines)}

    def report(self, line: Mapping[str, int | float]) -> None:
        """Appends a line to the curve.

        Raises:
          ValueError: the disk is full.
        """
        text = json.dumps(line) + "\n"
        comfort = "; the last checkpoint is kept, and the same command goes on"
        with (
            files.reporting_write_errors(self._curve, comfort=comfort),
            self._curve.open("a", encoding="utf-8") as file,
        ):
            file.write(text)
        self._lines.append(text)

    def _open(self, out: Path, described: Mapping[str, object], first_step: int) -> int:
        """Checks the run against the folder's, or starts it; returns its first step."""
        described = json.loads(json.dumps(described))
        before = files.read_json(self._config) if self._config.exists() else None
        if before is not None:
            first_step = before.pop("first_step", 0)
            if differs := _differences(_deciding(before), _deciding(described)):
                raise ValueError(f"{out}: holds another run; differs in {differs}")
        with files.reporting_write_errors(self._checkpoints):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
        if before is None and self._steps():
            raise ValueError(
                f"{self._config}: is missing, and {self._checkpoints} holds a run"
            )
        if before is None:
            text = json.dumps(described | {"first_step": first_step}, indent=2)
            files.write_atomically(self._config, text + "\n")
        # Removes partial checkpoints of a killed run.
        for entry in self._checkpoints.iterdir():
            if not _is_step(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        return first_step

    def _divide(self, now: dict[str, Any], step: int) -> None:
        """Records the layout of steps from now on, and warns of a change."""
        taken = [entry for entry in self._divided if entry["first_step"] < step]
        before = taken[-1] if taken else None
        if before is not None and all(before[name] == now[name] for name in now):
            return
        self._divided = [*taken, {"first_step": step, **now}]
        if before is not None:
            warnings.warn(
                f"{self._config.parent}: steps up to {step} were divided as "
                f"{_division(before)}, later ones as {_division(now)}: losses agree "
                f"with those of the unbroken run to a relative {TOLERANCE:g}, "
                "less closely at a learning rate near divergence",
                stacklevel=3,
            )

    def _steps(self) -> list[int]:
        """Returns the steps of the checkpoints, the newest first."""
        names = (entry.name for entry in self._checkpoints.iterdir())
        return sorted((int(x) for x in names if _is_step(x)), reverse=True)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _division(divided: dict[str, Any]) -> str:
    """Formats the layout of steps, as `data=2,num_processes=1`."""
    plain = dataclasses.asdict(Layout())
    degrees = [f"{k}={v}" for k, v in divided["layout"].items() if v != plain.get(k)]
    return ",".join([*degrees, f"num_processes={divided['num_processes']}"])


def _deciding(run: dict[str, object]) -> dict[str, object]:
    """Removes the layout from a run if it changes only rounding.

    With a capacity, or for experts with accumulation, the layout changes dropped rows
    or balanced loads. The schedule has its present name, and fields of the standard
    parametrization are left out.
    """
    if run.get("parametrization", "standard") == "standard":
        run = {k: v for k, v in run.items() if k not in PARAMETRIZATION}
    if run.get("schedule") == "stable":
        run = run | {"schedule": "wsd"}
    how = run.get("how")
    model = run.get("model")
    if not isinstance(how, dict) or not isinstance(layout := how.get("layout"), dict):
        return run
    is_mixture = isinstance(model, dict) and model.get("experts") is not None
    if layout.get("capacity") is None and not (
        is_mixture and how.get("accumulation") != 1
    ):
        layout = None
    return run | {"how": how | {"layout": layout}}


def _differences(before: object, now: object, name: str = "") -> list[str]:
    """Lists the names of values that differ, nested ones with dots."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [name]
    keys = sorted(before.keys() | now.keys())
    parts = (
        _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        for key in keys
    )
    return [difference for part in parts for difference in part]
