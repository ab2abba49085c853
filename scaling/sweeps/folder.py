"""The folder of a sweep: one record for each completed run, and the training curves.

    sweep.json      config, corpus, and mode of execution
    runs.jsonl      a line for each run, see `RECORD`
    curves.jsonl    run_id, step, num_tokens, flops, loss: the mean training loss of a
                    range of steps, at its middle
    models/RUN_ID   the trained model, if models are kept

The curve of a run is written before its record, and the record in one write: a killed
sweep leaves at most a curve without a record, or part of a line, and opening the folder
removes both. Lines are never changed.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from jaxkv import files
from jaxkv.files import WriterLock
from scaling.logs import CURVES, RUNS

SWEEP_FILE = "sweep.json"

RECORD = {
    "run_id": "digest of all settings that determine the record",
    "cell": "digest of the settings without the learning rate and the seed",
    "status": "done, diverged (a loss was not finite) or failed (see error)",
    "architecture": "family of the model",
    "hidden_size": "width of the model",
    "num_layers": "depth of the model",
    "num_params": "all parameters",
    "num_params_non_embedding": "parameters without embeddings and head",
    "num_params_matmul": "parameters in matrix products",
    "num_params_active": "parameters that a token uses",
    "num_steps": "training steps",
    "num_tokens": "training tokens",
    "num_unique_tokens": "unique training tokens",
    "epochs": "passes over the corpus",
    "flops": "exact training operations, with causal attention",
    "flops_6nd": "6 num_params num_tokens",
    "loss": "held-out loss, nats per token; null unless done",
    "loss_se": "standard error of the loss over windows, which all runs share",
    "bits_per_byte": "held-out loss per byte of text; null without bytes",
    "decayed": "true if the learning rate had decayed to zero",
    "schedule": "learning rate schedule: wsd, cosine or constant",
    "optimizer": "kind of the optimizer",
    "parametrization": "standard or mup",
    "weight_decay": "decoupled weight decay of the layers' matrices",
    "learning_rate": "peak learning rate",
    "batch_tokens": "tokens per step",
    "seq_len": "tokens per window",
    "seed": "seed of the initial parameters and the order of the corpus",
    "seconds": "duration of the run, including parts shared with other runs",
    "device": "device of the run",
    "commit": "commit of the program",
    "error": "message of a failed run; null otherwise",
}
"""Columns of runs.jsonl."""


class RecordRow(TypedDict):
    """A line of runs.jsonl, see `RECORD`."""

    run_id: str
    cell: str
    status: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_params: int
    num_params_non_embedding: int
    num_params_matmul: int
    num_params_active: int
    num_steps: int
    num_tokens: int
    num_unique_tokens: int
    epochs: float
    flops: float
    flops_6nd: int
    loss: float | None
    loss_se: float | None
    bits_per_byte: float | None
    decayed: bool
    schedule: str
    optimizer: str
    parametrization: str
    weight_decay: float
    learning_rate: float
    batch_tokens: int
    seq_len: int
    seed: int
    seconds: float
    device: str
    commit: str
    error: str | None


class CurveRow(TypedDict):
    """A line of curves.jsonl."""

    run_id: str
    step: float
    num_tokens: float
    flops: float
    loss: float


def shared_shape(folder: Path) -> dict[str, int | bool]:
    """Reads the common sizes of a sweep's models from its header.

    Returns:
      `vocab_size`, `tie_embeddings` and `sequence`, the tokens of a window; without
      those that differ between models, and empty without a header of a sweep.
    """
    try:
        config = json.loads((folder / SWEEP_FILE).read_text("utf-8"))["config"]
        choices = {"sequence": {config["seq_len"]}}
        for name in ("vocab_size", "tie_embeddings"):
            choices[name] = {model.get(name) for model in config["models"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    only = {name: values.pop() for name, values in choices.items() if len(values) == 1}
    return {name: value for name, value in only.items() if isinstance(value, int)}


class SweepFolder:
    """A sweep's folder, open for writing; creates a missing folder.

    Args:
      out: the folder; one process at a time.

    Attributes:
      known: records of the folder by run_id.

    Raises:
      ValueError: the folder cannot be written, another process writes to it, or it has
        other content.
    """

    def __init__(self, out: Path):
        self.path = Path(out).absolute()
        self.known: dict[str, RecordRow] = {}
        self._runs = self.path / RUNS
        self._curves = self.path / CURVES
        self._lock = WriterLock(out)
        try:
            with files.reporting_write_errors(out):
                for row in self._read(self._runs):
                    self.known.setdefault(row["run_id"], row)
                # Removes partial output of a killed sweep.
                rows = self._read(self._curves)
                valid_rows = [row for row in rows if row["run_id"] in self.known]
                if len(valid_rows) < len(rows):
                    text = "".join(json.dumps(row) + "\n" for row in valid_rows)
                    files.write_atomically(self._curves, text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the folder."""
        self._lock.close()

    def header(self) -> dict[str, Any]:
        """Reads sweep.json; empty if there is none.

        Raises:
          ValueError: the file was not written by `write_header`.
        """
        path = self.path / SWEEP_FILE
        if not path.exists():
            return {}
        header = files.read_json(path)
        if not isinstance(header.get("config"), dict):
            raise ValueError(f"{path}: config must be a JSON object")
        for name in ("corpus_digest", "reason"):
            if not isinstance(header.get(name), str):
                raise ValueError(f"{path}: {name}={header.get(name)!r} must be a text")
        if header.get("mode") not in ("loop", "vmap"):
            raise ValueError(
                f"{path}: mode={header.get('mode')!r} must be 'loop' or 'vmap'"
            )
        return header

    def write_header(self, header: Mapping[str, object]) -> None:
        """Replaces sweep.json in one write."""
        text = json.dumps(header, indent=2, default=str)
        files.write_atomically(self.path / SWEEP_FILE, text + "\n")

    def add(self, record: RecordRow, curve: Iterable[CurveRow]) -> None:
        """Appends a completed run, unless the folder has it.

        Raises:
          ValueError: the disk is full; the folder is unchanged.
        """
        if record["run_id"] in self.known:
            return
        self._append(self._curves, curve)
        self._append(self._runs, [record])
        self.known[record["run_id"]] = record

    def _read(self, path: Path) -> list[Any]:
        """Reads the complete lines of a file, and truncates a partial last line."""
        if not path.exists():
            return []
        data = path.read_bytes()
        full_lines = data[: data.rfind(b"\n") + 1]
        if len(full_lines) < len(data):
            os.truncate(path, len(full_lines))
        rows = []
        for number, line in enumerate(full_lines.splitlines(), 1):
            try:
                row = json.loads(line)
                row["run_id"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: line {number}: no run of a sweep") from None
            rows.append(row)
        return rows

    def _append(self, path: Path, rows: Iterable[Mapping[str, object]]) -> None:
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        if not data:
            return
        num = len(self.known)
        comfort = f"; the {num} runs before are kept, and the same command goes on"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(handle).st_size
        try:
            with files.reporting_write_errors(path, comfort=comfort):
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
                os.fsync(handle)
        except ValueError:
            os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)
