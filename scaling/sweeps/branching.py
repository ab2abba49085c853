"""Carries out runs of one model: a trunk at a constant rate, and branches that cool it.

Until its rate falls, a run of so many steps is the beginning of every longer one, so
runs that differ in their length share a trunk; under a cosine that is the warm-up. A
branch is bit for bit the run that would have been trained alone.

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

from jaxkv.models import transformer
from scaling.corpora import Corpus
from scaling.training import LearningRateSchedule, TrainConfig
from scaling.training.step import TrainState, compiled_steps, init_train_state

Status = Literal["done", "diverged", "failed"]
SPACING = 1.1
"""Ratio of the steps at which the training loss is noted."""
_FIRST_REPORT = 10


type Scorer = Callable[[TrainConfig, transformer.Params], Any]
"""Scores the parameters that a run ended with. What it returns has a `loss` of held-out
text, in nats per token, not finite if the run broke down."""


class FinishedRun(NamedTuple):
    """A run that is over.

    Attributes:
      run: what it was.
      status: what became of it.
      score: what the scorer made of it; None unless done.
      curve: middle of a stretch of steps, and the mean loss of the stretch.
      seconds: of training, what it shares with other runs included.
      params: as NumPy arrays; None unless done.
      error: why it failed.
    """

    run: TrainConfig
    status: Status
    score: Any
    curve: list[tuple[float, float]]
    seconds: float
    params: transformer.Params | None
    error: str | None = None

    @property
    def loss(self) -> float:
        """Of held-out text, in nats per token; not a number unless done."""
        return math.nan if self.score is None else self.score.loss


class BatchedRuns(NamedTuple):
    """Where some runs side by side stand, after `step` steps."""

    state: TrainState
    step: int
    alive: np.ndarray
    curves: tuple[tuple[tuple[float, float], ...], ...]
    seconds: float


class PausedRuns(NamedTuple):
    """Where runs stand that were stopped, for another call to go on from.

    Attributes:
      horizon: index of the length that was under way.
      trunk: where the trunk stands.
      branch: where the branch off it stands; None if it is not begun.
    """

    horizon: int
    trunk: BatchedRuns
    branch: BatchedRuns | None


class StopRequested(Exception):
    """Somebody asked to stop.

    Attributes:
      half: where the runs stand.
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
      horizons: for each length, rising, the runs of that length: the same rates and
        seeds every time, in the same order. Runs that are not to be side by side come
        one at a time.
      corpus: the text, its stream on the device.
      is_vmapped: whether the runs of a length are one program over all of them.
      score: is asked what each run is worth that did not diverge in training.
      advance: is told how many steps were taken, over all runs, and says whether to
        go on.
      half: where an earlier call with the same runs was stopped.

    Yields:
      The runs, length by length, from that on which was under way.

    Raises:
      Stopped: `advance` said so.
    """
    trunk = horizons[-1]
    if len(trunk) > 1 and not is_vmapped:
        raise ValueError("several runs are side by side only under vmap")
    done = 0 if half is None else len(trunk) * half.horizon
    try:
        half = half or PausedRuns(0, init_runs(trunk, is_vmapped), None)
        lanes, end = half.trunk, half.branch
        schedules = [_schedules(runs, is_vmapped) for runs in horizons]
        call = _call(trunk, corpus, is_vmapped)
        # Compiled before a clock runs.
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
            for j, each in enumerate(runs):
                scored = params = None
                if end.alive[j]:
                    params = end.state.params
                    if is_vmapped:
                        params = jax.tree.map(lambda x, j=j: x[j], params)
                    scored = score(each, params)
                    params = jax.tree.map(np.asarray, params)
                if scored is None or not math.isfinite(scored.loss):
                    status, scored, params = "diverged", None, None
                else:
                    status = "done"
                curve = [*end.curves[j]]
                yield FinishedRun(each, status, scored, curve, end.seconds, params)
                done += 1
            end = None
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        # Out of memory, mostly: the other models of a sweep may still fit.
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        for each in [each for runs in horizons for each in runs][done:]:
            yield FinishedRun(each, "failed", None, [], 0.0, None, line)


def measure_speed(
    runs: Sequence[TrainConfig], corpus: Corpus, *, is_vmapped: bool, patience_s: float
) -> float:
    """Measures steps of a run per second, over all runs, for a moment.

    Without compilation, which a sweep pays once for a model.
    """
    call, schedules = _call(runs, corpus, is_vmapped), _schedules(runs, is_vmapped)
    lanes, num_steps = init_runs(runs, is_vmapped), 4
    _go(call, lanes, schedules, 1)

    def spend() -> float:
        started = time.monotonic()
        _go(call, lanes, schedules, num_steps)
        return time.monotonic() - started

    while True:
        spent_s = min(spend(), spend())  # a machine that paused decides nothing
        if spent_s > patience_s / 2 or num_steps > 1_000_000:
            return num_steps * len(runs) / spent_s
        num_steps *= 2


def init_runs(runs: Sequence[TrainConfig], is_vmapped: bool) -> BatchedRuns:
    """Where runs of one model stand before their first step."""
    model, optimizer = runs[0].model, runs[0].optimizer
    states = [init_train_state(model, optimizer, jnp.int32(x.seed)) for x in runs]
    return BatchedRuns(
        _stack(states, is_vmapped), 0, np.ones(len(runs), bool), ((),) * len(runs), 0.0
    )


def _go(
    call: Callable[..., Any],
    lanes: BatchedRuns,
    schedule: LearningRateSchedule,
    until: int,
    advance: Callable[[int], bool] = lambda steps: True,
) -> tuple[BatchedRuns, bool]:
    """Trains up to a step, noting the loss on the way; and whether to go on."""
    num_runs = len(lanes.alive)
    if not lanes.alive.any():
        return lanes._replace(step=max(until, lanes.step)), True
    for end in _reports(lanes.step, until):
        started = time.monotonic()
        num_steps = end - lanes.step
        state, loss = call(lanes.state, schedule, jnp.int32(num_steps))
        losses = np.atleast_1d(np.asarray(loss, np.float64))
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
) -> Callable[..., Any]:
    """The program, as a function of the state, the schedule and the number of steps."""
    first = runs[0]
    program = _program(
        first.model, first.optimizer, first.batch_size, first.seq_len, is_vmapped
    )
    seeds = _stack([jnp.int32(x.seed) for x in runs], is_vmapped)
    return lambda state, schedule, num_steps: program(
        state, corpus.stream, schedule, seeds, num_steps
    )


def _reports(step: int, until: int) -> Iterator[int]:
    """The steps at which the loss is noted, the same ones for runs of any length."""
    at = float(_FIRST_REPORT)
    while (end := math.ceil(at)) < until:
        if end > step:
            yield end
        at = max(at * SPACING, at + 1)
    if until > step:
        yield until


def _schedules(runs: Sequence[TrainConfig], is_vmapped: bool) -> LearningRateSchedule:
    return _stack([LearningRateSchedule.of(run) for run in runs], is_vmapped)


def _stack(trees: Sequence[Any], is_vmapped: bool) -> Any:
    if not is_vmapped:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@functools.cache
def _program(model, optimizer, batch_size, seq_len, is_vmapped):
    """One program for a model, whatever the rates, seeds and numbers of steps."""
    call = compiled_steps(model, optimizer, batch_size, seq_len)
    return jax.jit(jax.vmap(call, (0, None, 0, 0, None))) if is_vmapped else call
