"""Sweeps: many training runs from one config, in a folder that can be resumed.

`run_sweep` gets the missing runs from `planning`, executes them with `executors`, and
stores each with `folder`. A further call with the same folder continues the sweep;
existing runs are not repeated.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.models import ModelConfig, save_model
from jaxkv.progress import QUIET, Progress
from jaxkv.text import ByteTokenizer
from scaling.corpora import Corpus, CorpusConfig, check_lengths
from scaling.sweeps import executors, grid, planning
from scaling.sweeps.executors import ExecutionMode, RunRecord
from scaling.sweeps.folder import RecordRow, SweepFolder
from scaling.sweeps.grid import RunGroup, SweepConfig

# Fields that all runs of a folder share; the remaining fields may change.
_COMMON = (
    "corpus",
    "optimizer",
    "base_width",
    "rate_exponent",
    "batch_size",
    "seq_len",
    "warmup_steps",
    "schedule",
    "cooldown",
    "parametrization",
    "num_eval_windows",
)

MODELS_FOLDER = "models"
"""Subfolder of a sweep with the trained models."""
PAUSED = "paused"
"""Subfolder of a sweep with the state of stopped runs."""


class SweepOutcome(NamedTuple):
    """Result of a call of `run_sweep`.

    Attributes:
      log: folder of the sweep.
      records: records of all runs in it, in the order of completion.
      skipped: number of runs that existed before.
      is_stopped: True if the sweep was stopped before its end.
      duration_s: duration of this call.
    """

    log: Path
    records: list[RecordRow]
    skipped: int
    is_stopped: bool
    duration_s: float

    def num(self, status: str) -> int:
        """Returns the number of runs with a status."""
        return sum(record["status"] == status for record in self.records)


def run_sweep(
    config: SweepConfig,
    out: Path,
    *,
    commit: str = "",
    environment: Mapping[str, object] | None = None,
    progress: Progress = QUIET,
    report: Callable[[list[RecordRow]], None] = lambda records: None,
) -> SweepOutcome:
    """Runs a sweep, or its missing runs.

    A killed sweep loses its unfinished runs, and repeats them bit for bit. A sweep that
    `progress` stops keeps its completed runs, and on the local executor also the state
    of unfinished ones, from which the next call continues.

    Args:
      config: the sweep.
      out: its folder, as described in `folder`.
      commit: commit of the program, for the records.
      environment: further fields of the folder's header.
      progress: receives the progress, and may stop the sweep.
      report: called with all records after each new one.

    Returns:
      The result, with all records of the folder.

    Raises:
      ValueError: the corpus cannot be read or is too short, the folder cannot be
        written or holds a sweep of another config, or ray is missing. Completed runs
        are kept.
    """
    started = time.monotonic()
    executors.connect_ray(config)  # before JAX starts threads, which a fork may break
    corpus = executors.open_on_device(config.corpus)
    for run in grid.list_cells(config)[:1]:  # validates the training config
        lane = grid.Lane(config.learning_rates[0], config.seeds[0])
        grid.train_config(config, run, lane)
    check_lengths(corpus, config.seq_len)
    folder = SweepFolder(out)
    try:
        header: dict[str, Any] = {
            **_header(folder, config, corpus),
            **(environment or {}),
        }
        skipped = len(folder.known)
        is_stopped = False
        paused = folder.path / PAUSED
        report([*folder.known.values()])
        failed_round = -1
        while groups := planning.next_groups(config, folder.known, corpus.digest):
            if is_stopped := progress.stopped:
                break
            if len(folder.known) == failed_round:
                raise RuntimeError("a round of runs left no record")
            failed_round = len(folder.known)
            if "mode" in header:  # fixed at the start: other modes round differently
                choice = ExecutionMode(header["mode"], header["reason"])
            else:
                choice = executors.choose_mode(config, groups, corpus)
            folder.write_header(header | choice._asdict())
            header |= choice._asdict()
            if choice.mode == "loop" or config.executor == "ray":
                groups = planning.unfinished(
                    config, groups, folder.known, corpus.digest
                )
            for run_record in _run_groups(
                config, groups, corpus, choice, paused, progress
            ):
                _keep(config, folder, run_record, commit)
                progress.log(len(folder.known), _numbers(run_record.record))
                report([*folder.known.values()])
        else:
            shutil.rmtree(paused, ignore_errors=True)
    finally:
        folder.close()
    duration_s = time.monotonic() - started
    records = [*folder.known.values()]
    return SweepOutcome(folder.path, records, skipped, is_stopped, duration_s)


def run_model_folder(out: Path, run_id: str) -> Path:
    """Returns the folder of a run's model in a sweep's folder."""
    return Path(out) / MODELS_FOLDER / run_id


def _numbers(record: Mapping[str, object]) -> dict[str, int | float]:
    """Returns the numbers of a record, by column."""
    return {name: x for name, x in record.items() if isinstance(x, int | float)}


def _header(folder: SweepFolder, config: SweepConfig, corpus: Corpus) -> dict[str, Any]:
    """Returns the header of the sweep, and checks it against that of the folder."""
    described = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    before = folder.header()
    if before:
        old = {"parametrization": "standard"} | before["config"]
        if old.get("schedule") == "stable":
            old = old | {"schedule": "wsd"}
        differing = [name for name in _COMMON if old.get(name) != described[name]]
        if before["corpus_digest"] != corpus.digest:
            differing.append("the text itself")
        if differing:
            raise ValueError(
                f"{folder.path}: holds another sweep; differs in {differing}"
            )
    return before | {
        "config": described,
        "corpus": corpus.name,
        "corpus_digest": corpus.digest,
        "bytes_per_token": corpus.bytes_per_token,
        "floor": corpus.floor,
        "executor": config.executor,
    }


def _run_groups(
    config: SweepConfig,
    groups: list[RunGroup],
    corpus: Corpus,
    choice: ExecutionMode,
    paused: Path,
    progress: Progress,
) -> Iterator[RunRecord]:
    """Executes a round of groups with a progress bar in GFLOP."""
    total = sum(grid.group_flops(config, groups))
    update = progress.bar("runs", total / 1e9, "GFLOP")
    done = 0.0

    def advance(steps: int, group: RunGroup) -> bool:
        nonlocal done
        per_token = grid.count_cost(group.model, config.seq_len).flops_per_token
        done += steps * group.setting.batch_size * config.seq_len * per_token / 1e9
        if steps:
            update(min(done, total / 1e9))
        return not progress.stopped

    if config.executor == "ray":
        return executors.run_on_ray(config, groups, advance)
    return executors.run_local(config, groups, corpus, choice.mode, advance, paused)


def _keep(
    config: SweepConfig, folder: SweepFolder, run_record: RunRecord, commit: str
) -> None:
    record: RecordRow = {**run_record.record, "commit": commit}
    if record["run_id"] in folder.known:
        return
    model = run_record.model
    # Recurrent models, which the engine does not serve, are not written.
    if (
        config.keep_models
        and run_record.params is not None
        and isinstance(model, ModelConfig)
    ):
        text = config.corpus
        is_bytes = isinstance(text, CorpusConfig) and text.tokenizer == "bytes"
        save_model(
            run_model_folder(folder.path, record["run_id"]),
            model,
            run_record.params,
            tokenizer=ByteTokenizer(model.vocab_size) if is_bytes else None,
            overwrite=True,
        )
    folder.add(record, run_record.curve)
