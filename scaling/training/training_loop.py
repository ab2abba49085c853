"""Training of a language model, in memory or in a folder that can be resumed.

Together with `jaxkv.engine.snapshots` the only module that imports Orbax; `step` has
the steps. A killed run continues when `train` is called again with the same folder, and
ends with the bits of an uninterrupted run.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv import files, models, parallel, validation
from jaxkv.models import Params
from jaxkv.parallel import (
    broadcast_from_first,
    check_all_used,
    gather_numbers,
    is_first,
)
from jaxkv.progress import QUIET, Progress
from scaling.corpora import Corpus, open_corpus, windows_per_epoch
from scaling.training import meshes, objectives, run_folder, step
from scaling.training.recipes import LearningRateSchedule, TrainConfig
from scaling.training.step import TrainState, compiled_steps, init_train_state

__all__ = [
    "TrainResult",
    "TrainState",
    "init_train_state",
    "restore_checkpoint",
    "save_checkpoint",
    "train",
    "train_in_memory",
]


STATE = "state"
"""Subfolder of a checkpoint with Orbax's arrays."""
_ALONE = ocp.options.MultiprocessingOptions(active_processes={0})
"""Only the first process reads and writes."""


class TrainResult(NamedTuple):
    """Result of a training run.

    Attributes:
      state: final state; its parameters are float32.
      curve: one dict per report: `step`; `tokens` and `epoch` of this run so far;
        `loss` (mean nats per token since the last report, or the reported loss of
        another objective); `learning_rate`; `duration_s`, training time of this run so
        far; for models with selection biases `busiest`, the largest load of an expert
        over the mean load, as the mean over layers.
      checkpoint: folder of the last checkpoint, from which another run can start; None
        for a run in memory.
      status: `done`; `stopped`, by request; or `diverged`, if a loss was not finite:
        the parameters are then those before the last report.
    """

    state: TrainState
    curve: list[dict[str, int | float]]
    checkpoint: Path | None
    status: Literal["done", "stopped", "diverged"]

    @property
    def params(self) -> Params:
        """The final parameters."""
        return self.state.params


def train(
    config: TrainConfig,
    out: Path,
    *,
    start: Path | None = None,
    objective: objectives.TrainingObjective = objectives.NEXT_TOKEN,
    progress: Progress = QUIET,
    resume: Literal["last", "previous"] = "last",
) -> TrainResult:
    """Trains a model in a folder, or resumes the run of the folder.

    A checkpoint is written under another name and renamed, with the SHA-256 of each of
    its files. A killed run loses at most `checkpoint_every` steps; after Ctrl-C, or
    `progress.stopped` in any process, the run saves and returns, and loses at most
    `report_every` steps.

    A run can resume with any layout and number of processes: parameters are restored
    bit for bit, and later losses agree to `run_folder.TOLERANCE`. If a layout changes
    more than rounding, with `capacity` or for experts with accumulation, it must stay
    the same.

    Args:
      config: the run.
      out: its folder, as described in `run_folder`; created if missing.
      start: checkpoint of another run of the same model and optimizer, whose state and
        step count continue with this run's schedule and corpus.
      objective: the training objective.
      progress: receives the progress.
      resume: `last`: from the last checkpoint; `previous`: from the newest undamaged
        one, with a warning; later damaged ones are deleted.

    Returns:
      The result.

    Raises:
      ValueError: the folder holds another run, another process writes to it, the corpus
        is missing or too short, `start` is missing, or the checkpoint to resume from is
        damaged.
    """
    check_all_used(config.how.layout.num_devices)
    corpus = open_corpus(config.corpus)
    windows_per_epoch(len(corpus.stream), config.seq_len)
    state = _initial_state(config)
    if not is_first():
        # Only the first process has the folder; all processes gather the state.
        state, first_step = broadcast_from_first((state, 0))
        run = _Run(config, corpus, state, int(first_step), objective, progress)
        for line in run.reports():
            if line["step"] % config.checkpoint_every == 0:
                _ = run.state
        return TrainResult(run.state, run.curve, None, run.status)
    if start is not None:
        state = restore_checkpoint(start, state)
    described = dataclasses.asdict(config) | {"corpus_sha256": corpus.digest}
    if objective != objectives.NEXT_TOKEN:
        described["objective"] = repr(objective)
    folder = run_folder.RunFolder(out, described, int(state.step))
    with contextlib.closing(folder):
        last = folder.newest_checkpoint(resume)
        if last is not None:
            state = _read_arrays(last, state)
        layout = dataclasses.asdict(config.how.layout)
        curve = folder.go_on(last, int(state.step), parallel.num_processes(), layout)
        state, first_step = broadcast_from_first((state, folder.first_step))
        run = _Run(config, corpus, state, int(first_step), objective, progress)
        run.curve = curve
        try:
            for line in run.reports():
                folder.report(line)
                run.record_report(line)
                if line["step"] % config.checkpoint_every == 0:
                    _save(folder, run.state)
        except KeyboardInterrupt:
            if parallel.num_processes() > 1:  # other processes do not see the interrupt
                raise
            run.status = "stopped"
        state = run.state
        return TrainResult(state, run.curve, _save(folder, state), run.status)


def train_in_memory(
    config: TrainConfig,
    corpus: Corpus,
    *,
    start: TrainState | None = None,
    objective: objectives.TrainingObjective = objectives.NEXT_TOKEN,
    progress: Progress = QUIET,
) -> TrainResult:
    """Trains a model in memory.

    Args:
      config: the run; `corpus` and `checkpoint_every` are ignored.
      corpus: the opened corpus, from `corpora.open_corpus`, which runs can share.
      start: final state of another run of the same model and optimizer; its step count
        continues with this run's schedule and corpus. None for a new run.
      objective: the training objective.
      progress: receives the progress.

    Returns:
      The result, equal to that of `train` bit for bit if both report at the same steps.
      Ctrl-C is passed on.

    Raises:
      ValueError: the corpus is too short.
    """
    state = start
    if state is None:
        state = _initial_state(config)
    endless = dataclasses.replace(config, checkpoint_every=config.num_steps)
    run = _Run(endless, corpus, state, int(state.step), objective, progress)
    for line in run.reports():
        run.record_report(line)
    return TrainResult(run.state, run.curve, None, run.status)


def _initial_state(config: TrainConfig) -> TrainState:
    seed = jnp.int32(config.seed)
    return init_train_state(config.model, config.optimizer, seed, config.hidden_rate)


class _Run:
    """A run in progress: its state and curve, consistent after every report.

    Args:
      config: the run.
      corpus: its corpus.
      state: state to start from.
      first_step: first step of this run.
      objective: the training objective.
      progress: receives the progress.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        state: TrainState,
        first_step: int,
        objective: objectives.TrainingObjective,
        progress: Progress,
    ):
        if corpus.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"{config.model.vocab_size=} must be at least {corpus.vocab_size=}"
            )
        self._state = step.divide_train_state(state, config.model, config.how.layout)
        self.curve: list[dict[str, int | float]] = []
        self.status: Literal["done", "stopped", "diverged"] = "done"
        self._config = config
        self._first = first_step
        self._progress = progress
        self._objective = objective
        self._stream = corpus.stream
        self._per_epoch = windows_per_epoch(len(corpus.stream), config.seq_len)
        total = (config.num_steps - first_step) * config.batch_size * config.seq_len
        self._update = progress.bar("training", total, "tokens")

    @property
    def state(self) -> TrainState:
        """Current state, gathered."""
        return meshes.gather_tree(
            self._config.model, self._config.how.layout, self._state
        )

    def reports(self) -> Iterator[dict[str, int | float]]:
        """Trains to the end; yields a line of the curve after each report interval."""
        config = self._config
        schedule = LearningRateSchedule.of(self._config)
        call = compiled_steps(
            config.scaled_model,
            config.optimizer,
            config.batch_size,
            config.seq_len,
            config.how,
            self._objective,
            config.hidden_rate,
        )
        tokens = jnp.asarray(self._stream)
        seed = jnp.int32(config.seed)
        before_s = self.curve[-1]["duration_s"] if self.curve else 0.0
        started = time.monotonic()
        while (taken := int(self._state.step)) < config.num_steps:
            if any(gather_numbers(int(self._progress.stopped))):
                self.status = "stopped"
                return
            every = (config.report_every, config.checkpoint_every)
            end = min(config.num_steps, *((taken // n + 1) * n for n in every))
            # Not donated: an interrupt during the call keeps the state before it.
            new, info = call(
                self._state, tokens, schedule, seed, jnp.int32(end - taken)
            )
            if not math.isfinite(loss := float(info.loss)):
                self.status = "diverged"
                return
            self._state = new
            num_steps = end - self._first
            line = {
                "step": end,
                "tokens": num_steps * config.batch_size * config.seq_len,
                "epoch": num_steps * config.batch_size / self._per_epoch,
                "loss": loss,
                "learning_rate": float(schedule.at(jnp.int32(end - 1))),
                "duration_s": before_s + time.monotonic() - started,
            }
            if info.loads is not None:
                line["busiest"] = float(models.imbalance(info.loads).busiest.mean())
            self.curve.append(line)
            yield line

    def record_report(self, line: Mapping[str, int | float]) -> None:
        """Updates the progress display, and logs the numbers."""
        self._progress.log(int(line["step"]), line)
        self._update(line["tokens"])
        self._progress.show(f"step {line['step']}: {line['loss']:.3f} nats a token")


def restore_checkpoint(
    checkpoint: str | os.PathLike[str], like: TrainState
) -> TrainState:
    """Reads a checkpoint of a model and optimizer with states like `like`.

    Raises:
      ValueError: the checkpoint is missing, of another model or optimizer, or one of
        its files is damaged, missing or not listed.
    """
    checkpoint = validation.path("checkpoint", checkpoint).absolute()
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such checkpoint")
    files.verify_checksums(checkpoint)
    return _read_arrays(checkpoint, like)


def _read_arrays(checkpoint: Path, like: TrainState) -> TrainState:
    """Reads the arrays of an undamaged checkpoint."""
    if parallel.num_processes() > 1:  # read by one process, not over the mesh
        like = jax.tree.map(np.asarray, like)
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        with (
            files.silencing_orbax(),
            ocp.StandardCheckpointer(multiprocessing_options=_ALONE) as reader,
        ):
            return reader.restore(checkpoint / STATE, shapes)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{checkpoint}: cannot be continued: {reason}") from error


def save_checkpoint(
    checkpoint: Path, state: TrainState, texts: Mapping[str, str] | None = None
) -> None:
    """Writes a checkpoint for `restore_checkpoint`, atomically.

    The list of its files with their SHA-256 is written last, before the folder is
    renamed.

    Args:
      checkpoint: the folder; its parent must exist.
      state: the state.
      texts: further files of the checkpoint, by name.

    Raises:
      ValueError: the disk is full, or the folder is not writable.
    """
    advice = "; earlier checkpoints are kept, and the same command continues"
    with files.replace_folder(
        Path(checkpoint).absolute(), ValueError, comfort=advice
    ) as new:
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        files.check_disk_space(new, num_bytes)
        if parallel.num_processes() > 1:
            state = jax.tree.map(np.asarray, state)
        with (
            files.silencing_orbax(),
            ocp.StandardCheckpointer(multiprocessing_options=_ALONE) as writer,
        ):
            writer.save(new / STATE, state)
        for name, text in (texts or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        files.write_checksums(new)


def _save(folder: run_folder.RunFolder, state: TrainState) -> Path:
    """Writes a checkpoint unless it exists."""
    path = folder.checkpoint(int(state.step))
    if not path.exists():
        save_checkpoint(path, state, folder.texts())
    folder.prune()
    return path
