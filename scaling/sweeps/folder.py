"""The folder of a sweep: one line for each run that is over, and the training curves.

    sweep.json      what was asked, the text, and how the runs are carried out
    runs.jsonl      a line for each run, see `RECORD`
    curves.jsonl    run_id, step, num_tokens, flops, loss: the mean training loss of a
                    stretch of steps, at the middle of it
    models/RUN_ID   the trained model, where it was to be kept

A run's curve is written before its record, and the record in one piece: what a killed
sweep leaves behind a curve without a record or half a line, and opening the folder
takes both away. Lines are never changed.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxkv import files
from scaling import locking
from scaling.logs import files as logs_files

HEADER = "sweep.json"

RECORD = {
    "run_id": "digest of all that decides the record",
    "cell": "the same without the learning rate and the seed",
    "status": "done, diverged (a loss was not finite) or failed (see error)",
    "architecture": "family of the model",
    "hidden_size": "its width",
    "num_layers": "its depth",
    "num_params": "its parameters",
    "num_params_non_embedding": "of these without embeddings and head",
    "num_params_matmul": "those that a token is multiplied with",
    "num_params_active": "those that a token uses",
    "num_steps": "steps of training",
    "num_tokens": "tokens trained on",
    "num_unique_tokens": "different ones among them",
    "epochs": "passes over the text",
    "flops": "of training, exact, attention counted causally",
    "flops_6nd": "6 num_params num_tokens",
    "loss": "of held-out text, nats per token; null unless done",
    "loss_se": "its standard error over windows, which all runs share",
    "bits_per_byte": "the same per byte of text; null where there are none",
    "decayed": "whether the learning rate had fallen to zero",
    "learning_rate": "the peak",
    "batch_tokens": "tokens per step",
    "seq_len": "tokens per window",
    "seed": "of the initial parameters and the order of the text",
    "seconds": "spent on this run, what it shares with others included",
    "device": "what it ran on",
    "commit": "of the program",
    "error": "why it failed; null unless it did",
}
"""The columns of runs.jsonl."""


def shared_shape(folder: Path) -> dict[str, int | bool]:
    """Reads off a sweep's header what all of its models have in common.

    Returns:
      `vocab_size`, `tie_embeddings` and `sequence`, the tokens of a window; without
      those in which models differ, and empty where there is no header of a sweep.
    """
    try:
        config = json.loads((folder / HEADER).read_text("utf-8"))["config"]
        found = {"sequence": {config["seq_len"]}}
        for name in ("vocab_size", "tie_embeddings"):
            found[name] = {model.get(name) for model in config["models"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    only = {name: values.pop() for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in only.items() if isinstance(value, int)}


class SweepFolder:
    """Opens a sweep's folder for writing, making it where it is missing.

    Args:
      out: the folder; one process at a time.

    Attributes:
      known: the records in it, by run_id.

    Raises:
      ValueError: it cannot be written, another process writes there, or it holds
        something else.
    """

    def __init__(self, out: Path):
        self.path = Path(out).absolute()
        self.known: dict[str, dict[str, Any]] = {}
        self._runs = self.path / logs_files.RUNS
        self._curves = self.path / logs_files.CURVES
        self._lock = locking.WriterLock(out)
        try:
            with files.writing(out):
                for row in self._read(self._runs):
                    self.known.setdefault(row["run_id"], row)
                # What a killed sweep left half done is taken away.
                rows = self._read(self._curves)
                kept = [row for row in rows if row["run_id"] in self.known]
                if len(kept) < len(rows):
                    text = "".join(json.dumps(row) + "\n" for row in kept)
                    files.write_aside(self._curves, text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process in."""
        self._lock.close()

    def header(self) -> dict[str, Any]:
        """Reads sweep.json; empty if there is none.

        Raises:
          ValueError: it is not as `write_header` leaves it.
        """
        path = self.path / HEADER
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

    def write_header(self, header: dict[str, Any]) -> None:
        """Replaces sweep.json, in one piece."""
        text = json.dumps(header, indent=2, default=str)
        files.write_aside(self.path / HEADER, text + "\n")

    def add(self, record: dict[str, Any], curve: Iterable[dict[str, Any]]) -> None:
        """Writes a run that is over, unless it is there already.

        Raises:
          ValueError: there is no room; the folder is as it was.
        """
        if record["run_id"] in self.known:
            return
        self._append(self._curves, curve)
        self._append(self._runs, [record])
        self.known[record["run_id"]] = record

    def _read(self, path: Path) -> list[dict[str, Any]]:
        """Reads a file's whole lines, and cuts off the last one if it is not whole."""
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        rows = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                row["run_id"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: line {number}: no run of a sweep") from None
            rows.append(row)
        return rows

    def _append(self, path: Path, rows: Iterable[dict[str, Any]]) -> None:
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        if not data:
            return
        num = len(self.known)
        comfort = f"; the {num} runs before are kept, and the same command goes on"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(handle).st_size
        try:
            with files.writing(path, comfort=comfort):
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
                os.fsync(handle)
        except ValueError:
            os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)
