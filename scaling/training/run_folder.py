"""The folder of one training run: what was asked, the curve, and the checkpoints.

    config.json         the run, the text's digest and where the run started
    curve.jsonl         one line per report, see `training.Result`
    checkpoints/STEP    the state after so many steps, the last two, see
    `train.save_checkpoint`

A checkpoint holds the curve up to its step. A run that goes on takes the curve from
there, and what was reported later is cut off.
"""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

from jaxkv import files
from scaling import locking
from scaling.costs.parallelism import Layout

CURVE, RUN = "curve.jsonl", "run.json"
"""Files of a checkpoint beside its arrays: the curve up to its step; the step that the
run started from, and how its steps were divided."""

TOLERANCE = 2e-3
"""Largest relative difference of later losses where a run goes on under another layout
or in another number of processes: sums round otherwise. Training amplifies that, at a
learning rate near divergence to 5e-2; `jaxkv/parallel/README.md` has measurements."""

_NUM_KEPT = 2


class RunFolder:
    """Opens the folder of a run until `close`, making it where it is missing.

    Args:
      out: the folder.
      described: what decides the run's result, as plain JSON values.
      first_step: the step a new run starts from; a run that is there keeps its own.

    Attributes:
      first_step: the step that the run started from.

    Raises:
      ValueError: the folder holds a run that was described otherwise, or something
        else, or cannot be written, or another process is writing there.
    """

    def __init__(self, out: Path, described: dict[str, Any], first_step: int):
        self._checkpoints = Path(out).absolute() / "checkpoints"
        self._curve = self._checkpoints.with_name(CURVE)
        self._config = self._checkpoints.with_name("config.json")
        self._lines: list[str] = []
        self._divided: list[dict[str, Any]] = []
        self._lock = locking.WriterLock(out)
        try:
            self.first_step = self._open(out, described, first_step)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Lets another process in."""
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        """The place of the checkpoint after so many steps."""
        return self._checkpoints / str(step)

    def prune(self) -> None:
        """Drops all checkpoints but the last two."""
        for step in self._steps()[_NUM_KEPT:]:
            _remove(self.checkpoint(step))

    def newest_checkpoint(self, resume: Literal["last", "previous"]) -> Path | None:
        """Finds the checkpoint to go on from; None of a run that has none.

        Args:
          resume: the last one, or the newest one that is whole.

        Raises:
          ValueError: names a damaged file of the last one, or no checkpoint is whole.
        """
        damage: list[ValueError] = []
        for path in map(self.checkpoint, self._steps()):
            try:
                files.check_seal(path)
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
        way = "no checkpoint is whole; train in another folder"
        if resume == "last":
            last = self.checkpoint(self._steps()[0])
            way = (
                f"--resume previous (or deleting {last}) goes on from the newest "
                "whole checkpoint"
            )
        raise ValueError(f"{damage[0]}; {way}")

    def go_on(
        self, last: Path | None, step: int, num_processes: int, layout: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Begins to write from a step on; removes what is of later ones.

        Args:
          last: the checkpoint that was read, if there is one.
          step: that of the state in it, or of the first state.
          num_processes: how many processes take the steps from now on.
          layout: how they divide them over devices.

        Returns:
          The lines of the curve up to the step.

        Raises:
          ValueError: the checkpoint is of another step, or `config.json` names another
            first step.
        """
        text, first_step = "", step
        if last is not None:
            run, text = files.read_json(last / RUN), files.read_text(last / CURVE)
            first_step, self._divided = run["first_step"], run["divided"]
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
            files.write_aside(self._curve, text)
        return [files.parse_object(line, self._curve) for line in self._lines]

    def texts(self) -> dict[str, str]:
        """Returns the files of a checkpoint beside its arrays."""
        run = {"first_step": self.first_step, "divided": self._divided}
        return {RUN: json.dumps(run), CURVE: "".join(self._lines)}

    def report(self, line: dict[str, Any]) -> None:
        """Adds a line to the curve.

        Raises:
          ValueError: there is no room.
        """
        text = json.dumps(line) + "\n"
        comfort = "; the last checkpoint is kept, and the same command goes on"
        with (
            files.writing(self._curve, comfort=comfort),
            self._curve.open("a", encoding="utf-8") as file,
        ):
            file.write(text)
        self._lines.append(text)

    def _open(self, out: Path, described: dict[str, Any], first_step: int) -> int:
        """Compares the run with the folder's, or begins it; the step it starts from."""
        described = json.loads(json.dumps(described))
        before = files.read_json(self._config) if self._config.exists() else None
        if before is not None:
            first_step = before.pop("first_step", 0)
            if differs := _differences(_deciding(before), _deciding(described)):
                raise ValueError(f"{out}: holds another run; differs in {differs}")
        with files.writing(self._checkpoints):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
        if before is None and self._steps():
            raise ValueError(
                f"{self._config}: is missing, and {self._checkpoints} holds a run"
            )
        if before is None:
            text = json.dumps(described | {"first_step": first_step}, indent=2)
            files.write_aside(self._config, text + "\n")
        # What a killed run was writing when it ended.
        for entry in self._checkpoints.iterdir():
            if not _is_step(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        return first_step

    def _divide(self, now: dict[str, Any], step: int) -> None:
        """Notes how steps from now on are divided, and warns where that changes."""
        taken = [each for each in self._divided if each["first_step"] < step]
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
        """The steps of the checkpoints, the newest first."""
        names = (entry.name for entry in self._checkpoints.iterdir())
        return sorted((int(x) for x in names if _is_step(x)), reverse=True)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _division(divided: dict[str, Any]) -> str:
    """How steps were divided, as `data=2,num_processes=1`."""
    plain = dataclasses.asdict(Layout())
    degrees = [f"{k}={v}" for k, v in divided["layout"].items() if v != plain.get(k)]
    return ",".join([*degrees, f"num_processes={divided['num_processes']}"])


def _deciding(run: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the layout of steps over devices if it changes only rounding.

    Rows that experts drop, and the pieces whose loads a mixture balances, depend on it.
    """
    how, model = run.get("how"), run.get("model")
    if not isinstance(how, dict) or not isinstance(layout := how.get("layout"), dict):
        return run
    is_mixture = isinstance(model, dict) and model.get("experts") is not None
    if layout.get("capacity") is None and not (
        is_mixture and how.get("accumulation") != 1
    ):
        layout = None
    return run | {"how": how | {"layout": layout}}


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Names the values that differ, nested ones with dots."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [name]
    keys = sorted(before.keys() | now.keys())
    found = (
        _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        for key in keys
    )
    return [difference for part in found for difference in part]
