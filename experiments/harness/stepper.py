"""An engine that is run call by call, so that its state can be inspected in between.

`jaxkv.Engine` dispatches ahead of the host and does not expose its state. Here no call
is in flight between two iterations, and the step function can be replaced.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxkv import engine, scheduling
from jaxkv.clock import from_seconds
from jaxkv.engine import DrainedSequences, EngineConfig, EngineState, drain, init
from jaxkv.memory import Eviction, Pages
from jaxkv.models import Forward, LoadedModel, PagedForward, Params, make_model_pages
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy
from jaxkv.serving import LOCAL, make_requests

type Step = Callable[..., tuple[EngineState, PyTree[Array]]]
"""A step function as `engine.step`; its second result may be of any type."""


class StepperCall(NamedTuple):
    """Result of one call of several steps.

    Attributes:
      step_infos: second result of every step, as NumPy arrays with a leading axis of
        steps.
      state: engine state after the last step; the next call donates its arrays.
      ended: sequences that finished in the call, as NumPy arrays.
    """

    step_infos: PyTree[np.ndarray]
    state: EngineState
    ended: DrainedSequences


class ServingRecord(NamedTuple):
    """Record of a completed list of requests.

    Attributes:
      step_infos: step infos of all steps in order, as NumPy arrays.
      tokens: tokens of every answer, by request and sample.
      num_cached: prompt tokens found in the prefix cache, by request.
      duration_s: time from the first submission to the last answer.
    """

    step_infos: PyTree[np.ndarray]
    tokens: dict[tuple[int, int], list[int]]
    num_cached: Int[np.ndarray, " requests"]
    duration_s: float


class Stepper:
    """An engine with an accessible `state`, which may be replaced between two runs."""

    def __init__(
        self,
        config: EngineConfig,
        forward: Forward,
        make_pages: Callable[[], Pages],
        *,
        params: Params = None,
        eos_ids: tuple[int, ...] = (),
        step: Step = engine.step,
    ) -> None:
        """Makes an idle engine; all requests share one compiled program.

        Args:
          config: engine config.
          forward: forward pass of the model.
          make_pages: function that allocates the pages.
          params: parameters of the model.
          eos_ids: tokens that end an answer.
          step: step function.
        """
        self.config = config
        self._make_pages = make_pages
        self._params = params
        self._eos_ids = eos_ids
        self._static = {"config": config, "forward": forward, "step": step}
        self.clear()

    def clear(self) -> None:
        """Resets the engine, including the prefix cache."""
        self.state = init(self.config, self._make_pages())

    def calls(
        self,
        prompts: Sequence[Sequence[int]],
        asks: Sequence[Sampling],
        *,
        arrivals_s: Sequence[float] | None = None,
        policy: Policy | None = None,
        eviction: Eviction | None = None,
    ) -> Iterator[StepperCall]:
        """Submits requests as places become free, and runs until all are finished.

        A run that is abandoned must be followed by `clear`.

        Args:
          prompts: token ids of each request; the request id is the index.
          asks: sampling parameters of each request.
          arrivals_s: earliest admission of each request, ascending; a call takes 1 s.
            None means that all requests arrive at the start.
          policy: scheduling policy; None means first come, first served.
          eviction: eviction rule, as in `engine.step`.

        Yields:
          The result of each call.

        Raises:
          ValueError: a request does not fit the engine.
        """
        policy = scheduling.fcfs() if policy is None else policy
        rules = {"policy": policy, "eviction": eviction}
        arrivals_s = [0.0] * len(prompts) if arrivals_s is None else arrivals_s
        first = unfinished = 0
        for second in itertools.count():
            # `submit` accepts at most `submit_width` sequences per call.
            width = self.config.submit_width
            sizes = [ask.num_sequences for ask in asks[first : first + width]]
            num = int(np.searchsorted(np.cumsum(sizes), width, "right"))
            if batch := range(first, first + num):
                requests = make_requests(
                    [prompts[i] for i in batch],
                    [asks[i] for i in batch],
                    config=self.config,
                    request_ids=batch,
                    arrivals_s=[arrivals_s[i] for i in batch],
                    eos_ids=self._eos_ids,
                    width=width,
                )
                self.state, accepted = LOCAL.submit(
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
            self.state, step_infos = _steps(
                self._params, self.state, clock, rules, **self._static
            )
            self.state, drained = _drain(self.state)
            step_infos, drained = jax.tree.map(np.asarray, (step_infos, drained))
            ended = jax.tree.map(lambda x, rows=drained.is_final: x[rows], drained)
            unfinished -= int(drained.is_final.sum())
            yield StepperCall(step_infos, self.state, ended)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        asks: Sequence[Sampling],
        *,
        policy: Policy | None = None,
        eviction: Eviction | None = None,
        progress: Progress = QUIET,
    ) -> ServingRecord | None:
        """Serves requests that all arrive at the start; arguments are those of `calls`.

        Returns:
          The record; None if `progress` was stopped, in which case the engine is empty.
        """
        num_cached = np.zeros(len(prompts), int)
        step_infos = []
        tokens: dict[tuple[int, int], list[int]] = {}
        started = time.perf_counter()
        for call in self.calls(prompts, asks, policy=policy, eviction=eviction):
            ended = call.ended.sequences
            ends = call.ended.progress.num_tokens
            np.add.at(num_cached, ended.request_id, ended.num_cached)
            for row, name in enumerate(ended.request_id.tolist()):
                answer = slice(ended.prompt_length[row], ends[row])
                sample = int(ended.params.sample[row])
                tokens[name, sample] = ended.tokens[row, answer].tolist()
            step_infos.append(call.step_infos)
            if progress.stopped:
                self.clear()
                return None
        duration_s = time.perf_counter() - started
        step_infos = jax.tree.map(lambda *parts: np.concatenate(parts), *step_infos)
        return ServingRecord(step_infos, tokens, num_cached, duration_s)


def make_stepper(
    model: LoadedModel, config: EngineConfig, step: Step = engine.step
) -> Stepper:
    """Returns an idle engine for a text model."""
    return Stepper(
        config,
        PagedForward(model.config, config.numerics),
        functools.partial(make_model_pages, model.config, config),
        params=model.params,
        eos_ids=model.eos_ids,
        step=step,
    )


def slot_tokens(state: EngineState) -> Int[np.ndarray, "slots max_length"]:
    """Returns the tokens of the sequence in each slot, -1 after them.

    The tokens of beams, which are stored with the beam that chose them, are put in
    order.
    """
    running = state.slots.sequence, state.slots.num_tokens
    s, (slots, num_tokens) = jax.tree.map(np.asarray, (state.sequences, running))
    search = jax.tree.map(np.asarray, state.search)
    tokens = np.full((len(slots), s.tokens.shape[1]), -1, np.int32)
    for slot, row in enumerate(slots):
        num = 0 if row < 0 else int(num_tokens[slot])
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
    params: Params,
    state: EngineState,
    clock: Int[Array, " 2"],
    rules: dict[str, object],
    *,
    config: EngineConfig,
    forward: Forward,
    step: Step,
) -> tuple[EngineState, PyTree[Array]]:
    """Runs the steps of a call like `engine.run_steps`, with any step function."""

    def body(state: EngineState, _: None) -> tuple[EngineState, PyTree[Array]]:
        return step(params, state, config=config, forward=forward, **rules)

    state = state._replace(ledger=state.ledger._replace(clock=clock))
    return lax.scan(body, state, None, length=config.steps_per_call)


_drain = jax.jit(drain, donate_argnames="state")
