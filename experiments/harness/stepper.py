"""An engine run call by call, so that what it holds can be looked at on the way.

`jaxkv.Engine` runs ahead of the host and never looks into its state. Here nothing is
under way between two calls, and a step may be any function that takes one.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv.clock import from_seconds
from jaxkv.engine import EngineConfig, EngineState, drain, init
from jaxkv.engine import step as engine_step
from jaxkv.engine.state import FINISHED, Sequences
from jaxkv.memory import Eviction, Pages
from jaxkv.models import ForwardResult, checkpoints, paged
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface
from jaxkv.serving import programs, request_batch

type Step = Callable[..., tuple[EngineState, Any]]
"""A step as `engine.step.step`, in place of whose info it may say anything."""


class StepperCall(NamedTuple):
    """A call of some steps.

    Attributes:
      step_infos: what each step said, as NumPy arrays with a leading axis of steps.
      state: the engine after the last one; the next call takes its arrays.
      ended: the sequences that have just left, as NumPy arrays.
    """

    step_infos: Any
    state: EngineState
    ended: Sequences


class ServingRecord(NamedTuple):
    """Requests that were all answered.

    Attributes:
      step_infos: step infos of all steps in order, as NumPy arrays.
      tokens: every answer, by request and sample.
      num_cached: prompt tokens found in the prefix cache, by request.
      duration_s: time from the first submission to the last answer.
    """

    step_infos: Any
    tokens: dict[tuple[int, int], list[int]]
    num_cached: Int[np.ndarray, " requests"]
    duration_s: float


class Stepper:
    """An engine whose state is in reach: `state` may be replaced between two runs."""

    def __init__(
        self,
        config: EngineConfig,
        forward: Any,
        make_pages: Callable[[], Pages],
        *,
        params: Any = None,
        eos_ids: tuple[int, ...] = (),
        step: Step = engine_step.step,
    ) -> None:
        """Makes an idle engine; one program serves whatever it is given.

        Args:
          config: its bounds.
          forward: the model.
          make_pages: makes its K and V arrays.
          params: of the model.
          eos_ids: tokens that end an answer.
          step: what a step does.
        """
        self.config, self._make_pages = config, make_pages
        self._params, self._eos_ids = params, eos_ids
        self._static = {"config": config, "forward": forward, "step": step}
        self.clear()

    def clear(self) -> None:
        """Empties it, the prefix cache included."""
        self.state = init(self.config, self._make_pages())

    def calls(
        self,
        prompts: Sequence[Sequence[int]],
        asks: Sequence[Sampling],
        *,
        arrivals_s: Sequence[float] | None = None,
        policy: interface.Policy | None = None,
        eviction: Eviction | None = None,
    ) -> Iterator[StepperCall]:
        """Hands requests over as there is room, and runs until all are answered.

        A run that is left half-way must be followed by `clear`.

        Args:
          prompts: token ids of each request, whose id is its place.
          asks: how each one's answers are drawn.
          arrivals_s: when each may be admitted, in order; a call takes a second. None
            means that all are there from the start.
          policy: of the scheduler; None means first come, first served.
          eviction: as in `engine.step.step`.

        Raises:
          ValueError: a request does not fit the engine.
        """
        policy = fcfs.fcfs() if policy is None else policy
        rules = {"policy": policy, "eviction": eviction}
        arrivals_s = [0.0] * len(prompts) if arrivals_s is None else arrivals_s
        first = unfinished = 0
        for second in itertools.count():
            # A call of `submit` takes as many sequences as it is wide.
            width = self.config.submit_width
            sizes = [ask.num_sequences for ask in asks[first : first + width]]
            num = int(np.searchsorted(np.cumsum(sizes), width, "right"))
            if batch := range(first, first + num):
                requests = request_batch.make_requests(
                    [prompts[i] for i in batch],
                    [asks[i] for i in batch],
                    config=self.config,
                    request_ids=batch,
                    arrivals_s=[arrivals_s[i] for i in batch],
                    eos_ids=self._eos_ids,
                    width=width,
                )
                self.state, accepted = programs.LOCAL.submit(
                    self.state, requests, config=self.config
                )
                accepted = np.asarray(accepted)
                first += int((accepted & (requests.params.sample == 0)).sum())
                unfinished += int(accepted.sum())
            if not unfinished:
                if first < len(prompts):
                    raise ValueError(f"request {first} does not fit {self.config}")
                return
            clock = from_seconds(float(second))
            self.state, seen = _steps(
                self._params, self.state, clock, rules, **self._static
            )
            self.state, drained = _drain(self.state)
            seen, drained = jax.tree.map(np.asarray, (seen, drained))
            has_ended = drained.status == FINISHED
            ended = jax.tree.map(lambda x, rows=has_ended: x[rows], drained)
            unfinished -= int(has_ended.sum())
            yield StepperCall(seen, self.state, ended)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        asks: Sequence[Sampling],
        *,
        policy: interface.Policy | None = None,
        eviction: Eviction | None = None,
        progress: Progress = QUIET,
    ) -> ServingRecord | None:
        """Answers requests that are all there from the start, as `calls`.

        Returns:
          The answers; None if `progress` was stopped, and the engine is then empty.
        """
        num_cached, seen = np.zeros(len(prompts), int), []
        tokens: dict[tuple[int, int], list[int]] = {}
        started = time.perf_counter()
        for call in self.calls(prompts, asks, policy=policy, eviction=eviction):
            ended = call.ended
            np.add.at(num_cached, ended.request_id, ended.num_cached)
            for row, name in enumerate(ended.request_id.tolist()):
                answer = slice(ended.prompt_length[row], ended.num_tokens[row])
                sample = int(ended.params.sample[row])
                tokens[name, sample] = ended.tokens[row, answer].tolist()
            seen.append(call.step_infos)
            if progress.stopped:
                self.clear()
                return None
        duration_s = time.perf_counter() - started
        seen = jax.tree.map(lambda *parts: np.concatenate(parts), *seen)
        return ServingRecord(seen, tokens, num_cached, duration_s)


def make_stepper(
    model: checkpoints.Loaded, config: EngineConfig, step: Step = engine_step.step
) -> Stepper:
    """Returns an idle engine that serves a model of text."""
    return Stepper(
        config,
        paged.PagedForward(model.config, config.numerics),
        functools.partial(paged.make_pages, model.config, config),
        params=model.params,
        eos_ids=model.eos_ids,
        step=step,
    )


def slot_tokens(state: EngineState) -> Int[np.ndarray, "slots max_length"]:
    """Tokens of the sequence in each slot, -1 beyond.

    Those of a beam, which stand where they were chosen, are put in order.
    """
    s, slots = jax.tree.map(np.asarray, (state.sequences, state.slots.sequence))
    search = jax.tree.map(np.asarray, state.search)
    tokens = np.full((len(slots), s.tokens.shape[1]), -1, np.int32)
    for slot, row in enumerate(slots):
        num = 0 if row < 0 else int(s.num_tokens[row])
        tokens[slot, :num] = s.tokens[row, :num]
        if row < 0 or search is None or not search.width[s.group[row]]:
            continue
        mates = [x for x in slots if x >= 0 and s.group[x] == s.group[row]]
        beams = {s.params.sample[x]: x for x in mates}
        holder = row
        for place in reversed(range(num)):
            tokens[slot, place] = s.tokens[holder, place]
            holder = beams[search.parents[holder, place]]
    return tokens


@functools.partial(
    jax.jit, static_argnames=("config", "forward", "step"), donate_argnames="state"
)
def _steps(
    params: Any,
    state: EngineState,
    clock: Int[Array, " 2"],
    rules: dict[str, Any],
    *,
    config: EngineConfig,
    forward: Callable[..., ForwardResult],
    step: Step,
) -> tuple[EngineState, Any]:
    """As `engine.step.run_steps`, with any step."""

    def body(state: EngineState, _: None) -> tuple[EngineState, Any]:
        return step(params, state, config=config, forward=forward, **rules)

    state = state._replace(clock=clock)
    return lax.scan(body, state, None, length=config.steps_per_call)


_drain = jax.jit(drain, donate_argnames="state")
