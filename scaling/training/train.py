"""Trains a language model: in memory, or in a folder that survives anything.

With `jaxkv.snapshots` the door to Orbax; the steps themselves are in `stepping`. A run
that was killed is taken up by calling `train` again with the same folder, and ends bit
for bit where the unbroken run would have.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv import files
from jaxkv.models import transformer
from jaxkv.parallel import processes
from jaxkv.progress import QUIET, Progress
from scaling.corpora import corpora, streams
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
"""Where in a checkpoint Orbax's arrays are."""
_ALONE = ocp.options.MultiprocessingOptions(active_processes={0})
"""The first process reads and writes."""


class TrainResult(NamedTuple):
    """What a run left.

    Attributes:
      state: where the run stands; its parameters are float32.
      curve: one dict per report: `step`; `tokens` and `epoch`, trained on by this run
        so far; `loss` (nats per token, mean over the steps since the last report; what
        another objective says it shows);
        `learning_rate`; `duration_s`, spent in training by this run so far.
      checkpoint: folder of the last checkpoint, which another run can start from; None
        of a run in memory.
      status: `done`; `stopped`, because it was asked to; or `diverged`, if a loss was
        not finite: the parameters are then those before the last report.
    """

    state: TrainState
    curve: list[dict[str, Any]]
    checkpoint: Path | None
    status: Literal["done", "stopped", "diverged"]

    @property
    def params(self) -> transformer.Params:
        """The parameters that were reached."""
        return self.state.params


def train(
    config: TrainConfig,
    out: Path,
    *,
    start: Path | None = None,
    objective: objectives.Objective = objectives.NEXT_TOKEN,
    progress: Progress = QUIET,
    resume: Literal["last", "previous"] = "last",
) -> TrainResult:
    """Trains a model in a folder, or takes up the run that the folder holds.

    A checkpoint is written aside and renamed, with the SHA-256 of each of its files. A
    killed run loses at most `checkpoint_every` steps; Ctrl-C, or `progress.stopped` in
    any process, loses at most `report_every`: the run then saves and returns.

    A run goes on under any layout and in any number of processes: parameters are taken
    up bit for bit, and later losses agree to `run_folder.TOLERANCE`. Where a layout
    decides more than rounding, with `capacity` or for a mixture of experts with
    accumulation, it must be the same.

    Args:
      config: the run.
      out: its folder, as `runs` describes it, made where it is missing.
      start: a checkpoint of another run of the same model and optimizer, whose state
        and step count are continued under this run's schedule and text.
      objective: what is minimised.
      progress: who is told.
      resume: `last`: from the last checkpoint; `previous`: from the newest one that is
        whole, damaged ones after it being removed, with a warning.

    Returns:
      What was reached.

    Raises:
      ValueError: the folder holds another run, another process is writing there, the
        text is missing or too short, there is nothing to start from, or the checkpoint
        to go on from is damaged.
    """
    processes.check_all_used(config.how.layout.num_devices)
    corpus = corpora.open_corpus(config.corpus)
    corpora.windows_per_epoch(len(corpus.stream), config.seq_len)
    state = init_train_state(config.model, config.optimizer, jnp.int32(config.seed))
    if not processes.is_first():
        # The first process has the folder; the state is put together by all.
        state, first_step = processes.agree((state, 0))
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
        curve = folder.go_on(last, int(state.step), processes.num(), layout)
        state, first_step = processes.agree((state, folder.first_step))
        run = _Run(config, corpus, state, int(first_step), objective, progress)
        run.curve = curve
        try:
            for line in run.reports():
                folder.report(line)
                run.record_report(line)
                if line["step"] % config.checkpoint_every == 0:
                    _save(folder, run.state)
        except KeyboardInterrupt:
            if processes.num() > 1:  # the others are where they cannot be told
                raise
            run.status = "stopped"
        state = run.state
        return TrainResult(state, run.curve, _save(folder, state), run.status)


def train_in_memory(
    config: TrainConfig,
    corpus: streams.Corpus,
    *,
    start: TrainState | None = None,
    objective: objectives.Objective = objectives.NEXT_TOKEN,
    progress: Progress = QUIET,
) -> TrainResult:
    """Trains a model without leaving anything on disk.

    Args:
      config: the run; `corpus` and `checkpoint_every` do not matter.
      corpus: what `corpora.open_corpus` made of its corpus, so that many runs can share
      it.
      start: where another run of the same model and optimizer ended, if not anew; its
        step count is continued under this run's schedule and text.
      objective: what is minimised.
      progress: who is told.

    Returns:
      What was reached, bit for bit what `train` reaches if it reports at the same
      steps. Ctrl-C is passed on.

    Raises:
      ValueError: the text is too short.
    """
    state = start
    if state is None:
        state = init_train_state(config.model, config.optimizer, jnp.int32(config.seed))
    endless = dataclasses.replace(config, checkpoint_every=config.num_steps)
    run = _Run(endless, corpus, state, int(state.step), objective, progress)
    for line in run.reports():
        run.record_report(line)
    return TrainResult(run.state, run.curve, None, run.status)


class _Run:
    """A run under way: its state and curve, whole whenever a report is out.

    Args:
      config: the run.
      corpus: what it learns.
      state: where it stands.
      first_step: the step that its own tokens are counted from.
      objective: what is minimised.
      progress: who is told.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: streams.Corpus,
        state: TrainState,
        first_step: int,
        objective: objectives.Objective,
        progress: Progress,
    ):
        if corpus.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"{config.model.vocab_size=} must be at least {corpus.vocab_size=}"
            )
        self._state = step.divide_train_state(state, config.model, config.how.layout)
        self.curve: list[dict[str, Any]] = []
        self.status: Literal["done", "stopped", "diverged"] = "done"
        self._config, self._first, self._progress = config, first_step, progress
        self._objective = objective
        self._stream = corpus.stream
        self._per_epoch = corpora.windows_per_epoch(len(corpus.stream), config.seq_len)
        total = (config.num_steps - first_step) * config.batch_size * config.seq_len
        self._update = progress.bar("training", total, "tokens")

    @property
    def state(self) -> TrainState:
        """Where the run stands, whole."""
        return meshes.gather_tree(
            self._config.model, self._config.how.layout, self._state
        )

    def reports(self) -> Iterator[dict[str, Any]]:
        """Trains to the end, and gives a line of the curve after each stretch of it."""
        config, schedule = self._config, LearningRateSchedule.of(self._config)
        call = compiled_steps(
            config.model,
            config.optimizer,
            config.batch_size,
            config.seq_len,
            config.how,
            self._objective,
        )
        tokens, seed = jnp.asarray(self._stream), jnp.int32(config.seed)
        before_s = self.curve[-1]["duration_s"] if self.curve else 0.0
        started = time.monotonic()
        while (taken := int(self._state.step)) < config.num_steps:
            if any(processes.gather(int(self._progress.stopped))):
                self.status = "stopped"
                return
            every = (config.report_every, config.checkpoint_every)
            end = min(config.num_steps, *((taken // n + 1) * n for n in every))
            # Not donated: an interrupt in here leaves the state before it whole.
            new, loss = call(
                self._state, tokens, schedule, seed, jnp.int32(end - taken)
            )
            if not math.isfinite(loss := float(loss)):
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
            self.curve.append(line)
            yield line

    def record_report(self, line: dict[str, Any]) -> None:
        """Shows who watches how far the run is."""
        self._update(line["tokens"])
        self._progress.show(f"step {line['step']}: {line['loss']:.3f} nats a token")


def restore_checkpoint(checkpoint: Path, like: TrainState) -> TrainState:
    """Reads a checkpoint, for a state of the same model and optimizer.

    Raises:
      ValueError: it is missing, of another model or optimizer, or a file of it is
        damaged, missing or not listed.
    """
    checkpoint = Path(checkpoint).absolute()
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such checkpoint")
    files.check_seal(checkpoint)
    return _read_arrays(checkpoint, like)


def _read_arrays(checkpoint: Path, like: TrainState) -> TrainState:
    """Reads the arrays of a checkpoint that is known to be whole."""
    if processes.num() > 1:  # of a process alone, not of the mesh
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
    """Writes a checkpoint that `restore_checkpoint` will read, whole or not at all.

    The list of its files with their SHA-256 is written last, before the folder gets its
    name.

    Args:
      checkpoint: the folder; the one it is in is there.
      state: the state.
      texts: further files of the checkpoint, by name.

    Raises:
      ValueError: there is no room, or it must not be written.
    """
    comfort = "; what was saved before is kept, and the same command goes on"
    with files.aside(Path(checkpoint).absolute(), ValueError, comfort=comfort) as new:
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        files.make_sure_of_room(new, num_bytes)
        if processes.num() > 1:
            state = jax.tree.map(np.asarray, state)
        with (
            files.silencing_orbax(),
            ocp.StandardCheckpointer(multiprocessing_options=_ALONE) as writer,
        ):
            writer.save(new / STATE, state)
        for name, text in (texts or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        files.seal(new)


def _save(folder: run_folder.RunFolder, state: TrainState) -> Path:
    """Writes a checkpoint unless it is there."""
    path = folder.checkpoint(int(state.step))
    if not path.exists():
        save_checkpoint(path, state, folder.texts())
    folder.prune()
    return path
