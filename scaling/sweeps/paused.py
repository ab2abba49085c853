"""State of the stopped runs of a sweep, in a folder.

trunk, branch   states, as `scaling.training.save_checkpoint` writes them
half.json       further fields of `branching.PausedRuns`
SHA256SUMS      digest of each file, checked before any is read
"""

import json
from pathlib import Path

import numpy as np

from jaxkv import files
from scaling.sweeps.branching import BatchedRuns, PausedRuns
from scaling.training import TrainState, restore_checkpoint, save_checkpoint

_REST = "half.json"


def save_paused(folder: Path, half: PausedRuns) -> None:
    """Writes the state of stopped runs, and replaces the content of the folder.

    Raises:
      ValueError: the disk is full.
    """
    metadata: dict[str, object] = {"horizon": half.horizon}
    with files.replace_folder(folder) as new:
        for name, lanes in half._asdict().items():
            if isinstance(lanes, BatchedRuns):
                save_checkpoint(new / name, lanes.state)
                lane_record = lanes._replace(state=None, alive=lanes.alive.tolist())
                metadata[name] = lane_record._asdict()
        (new / _REST).write_text(json.dumps(metadata), "utf-8")
        files.write_checksums(new)


def load_paused(folder: Path, like: TrainState) -> PausedRuns | None:
    """Reads the output of `save_paused`; None if the folder does not exist.

    `like` is a state of the same runs.

    Raises:
      ValueError: the folder cannot be read; without the folder, the runs start again.
    """
    if not folder.is_dir():
        return None

    def lanes(name: str) -> BatchedRuns | None:
        if name not in metadata:
            return None
        curves = tuple(tuple(map(tuple, curve)) for curve in metadata[name]["curves"])
        return BatchedRuns(
            state=restore_checkpoint(folder / name, like),
            step=int(metadata[name]["step"]),
            alive=np.array(metadata[name]["alive"], bool),
            curves=curves,
            seconds=float(metadata[name]["seconds"]),
        )

    try:
        files.verify_checksums(folder)
        metadata = files.read_json(folder / _REST)
        trunk = lanes("trunk")
        if trunk is None:
            raise ValueError("no trunk")
        return PausedRuns(int(metadata["horizon"]), trunk, lanes("branch"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{folder}: cannot be continued; delete it: {error}"
        ) from error
