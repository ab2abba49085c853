"""Training of runs of one model: a trunk at a constant rate, and cooldown branches.

Until its learning rate falls, a run is the beginning of every longer one, so runs that
differ in length share a trunk; with a cosine schedule the trunk is the warm-up. A
branch equals the separately trained run bit for bit.

Source: Hägele et al. 2024, arXiv:2405.18392, section 4.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxkv.models import Params
from scaling.corpora import Corpus
from scaling.training import (
    LearningRateSchedule,
    TrainConfig,
    TrainState,
    compiled_steps,
    init_train_state,
)

Status = Literal["done", "diverged", "failed"]
SPACING = 1.1
"""Ratio of successive steps at which the training loss is recorded."""
_FIRST_REPORT = 10


type Scorer = Callable[[TrainConfig, Params], Any]
"""Scores the final parameters of a run. The result has a `loss` on held-out text, in
nats per token, which is not finite if the run diverged."""


class FinishedRun(NamedTuple):
    """A completed run.

    Attributes:
      run: config of the run.
      status: done, diverged or failed.
      score: result of the scorer; None unless done.
      curve: pairs of the middle of a range of steps and its mean loss.
      seconds: training time, shared parts included.
      params: parameters as NumPy arrays; None unless done.
      error: error message of a failed run.
    """

    run: TrainConfig
    status: Status
    score: Any
    curve: list[tuple[float, float]]
    seconds: float
    params: Params | None
    error: str | None = None

    @property
    def loss(self) -> float:
        """Held-out loss in nats per token; NaN unless done."""
        return math.nan if self.score is None else self.score.loss


class BatchedRuns(NamedTuple):
    """State of a batch of runs after `step` steps."""

    state: TrainState
    step: int
    alive: np.ndarray
    curves: tuple[tuple[tuple[float, float], ...], ...]
    seconds: float


class PausedRuns(NamedTuple):
    """State of stopped runs, from which a later call continues.

    Attributes:
      horizon: index of the length in progress.
      trunk: state of the trunk.
      branch: state of the current branch; None before its start.
    """

    horizon: int
    trunk: BatchedRuns
    branch: BatchedRuns | None


class StopRequested(Exception):
    """Raised when `advance` requests a stop.

    Attributes:
      half: state of the runs.
    """

    def __init__(self, half: PausedRuns):
        super().__init__()
        self.half = half


def train_branches(
    horizons: Sequence[Sequence[TrainConfig]],
    corpus: Corpus,
    *,
    is_vmapped: bool,
    score: Scorer,
    advance: Callable[[int], bool] = lambda steps: True,
    half: PausedRuns | None = None,
) -> Iterator[FinishedRun]:
    """Trains runs of one model that differ in rate, seed and length.

    Args:
      horizons: runs of each length, lengths rising: the same rates and seeds for every
        length, in the same order; one run per length unless vmapped.
      corpus: the corpus, with its stream on the device.
      is_vmapped: True if the runs of a length are one vmapped program.
      score: scores each run that did not diverge in training.
      advance: called with the number of steps taken, over all runs; returns False to
        stop.
      half: state of an earlier stopped call with the same runs.

    Yields:
      The runs, length by length, from the length in progress.

    Raises:
      StopRequested: `advance` returned False.
    """
    trunk = horizons[-1]
    if len(trunk) > 1 and not is_vmapped:
        raise ValueError("several runs are side by side only under vmap")
    done = 0 if half is None else len(trunk) * half.horizon
    try:
        half = half or PausedRuns(0, init_runs(trunk, is_vmapped), None)
        lanes = half.trunk
        end = half.branch
        schedules = [_schedules(runs, is_vmapped) for runs in horizons]
        call = _call(trunk, corpus, is_vmapped)
        # Compiled before any time is measured.
        jax.block_until_ready(call(lanes.state, schedules[-1], jnp.int32(0)))
        for i, runs in enumerate(horizons[half.horizon :], half.horizon):
            branch_at = runs[0].num_steps - runs[0].cooldown_steps
            lanes, goes_on = _go(call, lanes, schedules[-1], branch_at, advance)
            if not goes_on:
                raise StopRequested(PausedRuns(i, lanes, None))
            end, goes_on = _go(
                call, end or lanes, schedules[i], runs[0].num_steps, advance
            )
            if not goes_on:
                raise StopRequested(PausedRuns(i, lanes, end))
            for j, run in enumerate(runs):
                scored = params = None
                if end.alive[j]:
                    params = end.state.params
                    if is_vmapped:
                        params = jax.tree.map(lambda x, j=j: x[j], params)
                    scored = score(run, params)
                    params = jax.tree.map(np.asarray, params)
                if scored is None or not math.isfinite(scored.loss):
                    status = "diverged"
                    scored = None
                    params = None
                else:
                    status = "done"
                curve = [*end.curves[j]]
                yield FinishedRun(run, status, scored, curve, end.seconds, params)
                done += 1
            end = None
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        # Mostly out of memory: smaller models of a sweep may still fit.
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        for run in [run for runs in horizons for run in runs][done:]:
            yield FinishedRun(run, "failed", None, [], 0.0, None, line)


def measure_speed(
    runs: Sequence[TrainConfig], corpus: Corpus, *, is_vmapped: bool, patience_s: float
) -> float:
    """Measures the steps per second, over all runs, in a short trial.

    Excludes compilation, which a sweep pays once for a model.
    """
    call = _call(runs, corpus, is_vmapped)
    schedules = _schedules(runs, is_vmapped)
    lanes = init_runs(runs, is_vmapped)
    num_steps = 4
    _go(call, lanes, schedules, 1)

    def spend() -> float:
        started = time.monotonic()
        _go(call, lanes, schedules, num_steps)
        return time.monotonic() - started

    while True:
        spent_s = min(spend(), spend())  # one of two may have been interrupted
        if spent_s > patience_s / 2 or num_steps > 1_000_000:
            return num_steps * len(runs) / spent_s
        num_steps *= 2


def init_runs(runs: Sequence[TrainConfig], is_vmapped: bool) -> BatchedRuns:
    """Returns the initial state of runs of one model."""
    model = runs[0].model
    optimizer = runs[0].optimizer
    states = [
        init_train_state(model, optimizer, jnp.int32(x.seed), x.hidden_rate)
        for x in runs
    ]
    return BatchedRuns(
        _stack(states, is_vmapped), 0, np.ones(len(runs), bool), ((),) * len(runs), 0.0
    )


def _go(
    call: Callable[..., tuple[TrainState, Any]],
    lanes: BatchedRuns,
    schedule: LearningRateSchedule,
    until: int,
    advance: Callable[[int], bool] = lambda steps: True,
) -> tuple[BatchedRuns, bool]:
    """Trains up to a step and records losses; returns the state and False to stop."""
    num_runs = len(lanes.alive)
    if not lanes.alive.any():
        return lanes._replace(step=max(until, lanes.step)), True
    for end in _reports(lanes.step, until):
        started = time.monotonic()
        num_steps = end - lanes.step
        state, info = call(lanes.state, schedule, jnp.int32(num_steps))
        losses = np.atleast_1d(np.asarray(info.loss, np.float64))
        middle = (lanes.step + end + 1) / 2
        alive = lanes.alive & np.isfinite(losses)
        lanes = BatchedRuns(
            state,
            end,
            alive,
            tuple(
                (*curve, (middle, float(x))) if good else curve
                for curve, x, good in zip(lanes.curves, losses, alive, strict=True)
            ),
            lanes.seconds + (time.monotonic() - started) / num_runs,
        )
        if not alive.any():
            lanes = lanes._replace(step=until)
        if not advance(num_steps * num_runs):
            return lanes, False
        if not alive.any():
            break
    return lanes, True


def _call(
    runs: Sequence[TrainConfig], corpus: Corpus, is_vmapped: bool
) -> Callable[..., tuple[TrainState, Any]]:
    """Returns the program as a function of state, schedule and number of steps."""
    first = runs[0]
    program = _program(
        first.scaled_model,
        first.optimizer,
        first.batch_size,
        first.seq_len,
        first.hidden_rate,
        is_vmapped,
    )
    seeds = _stack([jnp.int32(x.seed) for x in runs], is_vmapped)
    return lambda state, schedule, num_steps: program(
        state, corpus.stream, schedule, seeds, num_steps
    )


def _reports(step: int, until: int) -> Iterator[int]:
    """Yields the steps at which the loss is recorded, equal for runs of any length."""
    at = float(_FIRST_REPORT)
    while (end := math.ceil(at)) < until:
        if end > step:
            yield end
        at = max(at * SPACING, at + 1)
    if until > step:
        yield until


def _schedules(runs: Sequence[TrainConfig], is_vmapped: bool) -> LearningRateSchedule:
    return _stack([LearningRateSchedule.of(run) for run in runs], is_vmapped)


def _stack[T: PyTree[Array]](trees: Sequence[T], is_vmapped: bool) -> T:
    if not is_vmapped:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@functools.cache
def _program(model, optimizer, batch_size, seq_len, hidden_rate, is_vmapped):
    """Returns the program of a model, for any rates, seeds and numbers of steps."""
    call = compiled_steps(
        model, optimizer, batch_size, seq_len, hidden_rate=hidden_rate
    )
    if not is_vmapped:
        return call
    # A program with compiler options cannot be part of another one.
    return jax.jit(jax.vmap(call.__wrapped__, (0, None, 0, 0, None)))
