"""The folder of one training run: what was asked, the curve, where checkpoints lie.

    config.json         the run, the text's digest and where the run started
    curve.jsonl         one line per report, see `training.Result`
    checkpoints/STEP    the state after so many steps, the last two

Small files are written aside and renamed; a reader never meets half of one.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxkv import files
from scaling import locking

_NUM_KEPT = 2


class RunFolder:
    """Opens the folder of a run until `close`, making it where it is missing.

    Args:
      out: the folder.
      described: what decides the run's result, as plain JSON values.
      first_step: the step a new run starts from; a run that is there keeps its own.

    Raises:
      ValueError: the folder holds a run that was described otherwise, or something
        else, or cannot be written, or another process is writing there.
    """

    def __init__(self, out: Path, described: dict[str, Any], first_step: int):
        self._checkpoints = Path(out).absolute() / "checkpoints"
        self._curve = self._checkpoints.with_name("curve.jsonl")
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

    def last_step(self) -> int | None:
        """The step of the last whole checkpoint; None if there is none."""
        return max(self._steps(), default=None)

    def prune(self) -> None:
        """Drops all checkpoints but the last two."""
        for step in sorted(self._steps())[:-_NUM_KEPT]:
            shutil.rmtree(self.checkpoint(step))

    def read_curve(self, step: int) -> list[dict[str, Any]]:
        """Reads the curve up to a step, and cuts off what was reported after it."""
        if not self._curve.exists():
            return []
        lines = self._curve.read_text("utf-8").splitlines(keepends=True)
        # A killed run may have left half a line.
        whole = [
            files.parse_object(line, self._curve)
            for line in lines
            if line.endswith("\n")
        ]
        kept = [line for line in whole if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        files.write_aside(self._curve, text)
        return kept

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

    def _open(self, out: Path, described: dict[str, Any], first_step: int) -> int:
        """Compares the run with the folder's, or begins it; the step it starts from."""
        described = json.loads(json.dumps(described))
        file = self._curve.with_name("config.json")
        if file.exists():
            before = files.read_json(file)
            first_step = before.pop("first_step", 0)
            if differs := _differences(before, described):
                raise ValueError(f"{out}: holds another run; differs in {differs}")
        else:
            described |= {"first_step": first_step}
            with files.writing(file):
                self._checkpoints.mkdir(parents=True, exist_ok=True)
            files.write_aside(file, json.dumps(described, indent=2) + "\n")
        # What a killed run was writing when it ended.
        for entry in self._checkpoints.iterdir():
            if not entry.name.isdigit():
                shutil.rmtree(entry, ignore_errors=True)
        return first_step

    def _steps(self) -> list[int]:
        names = (entry.name for entry in self._checkpoints.iterdir())
        return [int(name) for name in names if name.isdigit()]


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
