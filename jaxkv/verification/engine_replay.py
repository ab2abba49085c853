"""An engine that takes the steps of a simulation, with the same clock.

The engine gets each request when the simulation does, those of sessions after the
answers that they wait for, and runs one step for each simulated step. If its schedule
is that of the simulation, all counts of all steps are equal.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxkv import validation
from jaxkv.engine import (
    EngineConfig,
    EngineState,
    Requests,
    Speculation,
    StepInfo,
    init,
    run_steps,
    submit,
)
from jaxkv.memory import Eviction, Pages
from jaxkv.models import Forward, Params
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy, RequestAttributes
from jaxkv.serving import make_requests
from jaxkv.simulation import SimulatedStep
from jaxkv.workloads import Workload

_run = jax.jit(
    run_steps,
    static_argnames=("config", "forward", "speculation", "num_steps"),
    donate_argnames="state",
)
_submit = jax.jit(submit, static_argnames="config", donate_argnames="state")


class EngineReplay(NamedTuple):
    """The engine, and its steps with an axis of steps."""

    state: EngineState
    infos: StepInfo


@validation.checks_numbers(seed=validation.SEEDS)
def engine_requests(
    w: Workload, config: EngineConfig, *, seed: int, vocab_size: int
) -> Requests:
    """Returns the requests of a workload, with random prompts, for one submission.

    Args:
      w: the workload.
      config: the engine's bounds, with `submit_width` rows for all sequences.
      seed: seed of the prompts.
      vocab_size: largest token id plus 1.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in np.asarray(w.prompt)]
    asks = [
        Sampling(n=int(n), max_tokens=int(max_tokens), temperature=1.0)
        for n, max_tokens in zip(
            np.asarray(w.samples), np.asarray(w.output), strict=True
        )
    ]
    attributes = None
    if w.attributes is not None:
        rows = zip(*(np.asarray(x).tolist() for x in w.attributes), strict=True)
        attributes = [RequestAttributes(*row) for row in rows]
    requests = make_requests(
        prompts, asks, config=config, attributes=attributes, width=config.submit_width
    )
    arrival = np.repeat(np.asarray(w.arrival), np.asarray(w.samples), axis=0)
    short = config.submit_width - len(arrival)
    return requests._replace(arrival=jnp.asarray(np.pad(arrival, [(0, short), (0, 0)])))


def replay_in_engine(
    w: Workload,
    steps: Iterable[SimulatedStep],
    policy: Policy,
    config: EngineConfig,
    *,
    requests: Requests,
    model: tuple[Params, Forward, Pages],
    speculation: Speculation | None = None,
    eviction: Eviction | None = None,
) -> EngineReplay:
    """Runs a step of an engine for each step of a simulation.

    Args:
      w: the workload of the simulation.
      steps: its steps, in parts with an axis of steps, as NumPy arrays.
      policy: its policy.
      config: its bounds.
      requests: `engine_requests` of the workload.
      model: parameters, forward pass and pages. The pages are donated.
      speculation: drafter and verifier; None means no speculation.
      eviction: the simulation's rule of eviction.
    """
    params, forward, pages = model
    state = init(config, pages)
    client = None
    if w.dependencies is None:
        state, _ = _submit(state, requests, config=config)
    else:
        client = _SessionClient(w, requests, config)
    # Left out if None, so that the program is that of other calls.
    rules = {"speculation": speculation, "eviction": eviction}
    more: Any = {name: x for name, x in rules.items() if x is not None}
    infos = []
    for part in steps:
        for start, micros in zip(part.start, part.micros, strict=True):
            if client is not None:
                state = client.submit_due(state, start)
            state, info = _run(
                params,
                state,
                jnp.asarray(start),
                config=config,
                forward=forward,
                policy=policy,
                num_steps=1,
                **more,
            )
            infos.append(info)
            if client is not None:
                client.read_answers(info, start, int(micros))
    return EngineReplay(state, jax.tree.map(lambda *x: np.concatenate(x), *infos))


def find_difference(simulated: SimulatedStep, replay: EngineReplay) -> str | None:
    """Returns the first difference between the steps of both, or None.

    Violated invariants of an engine in debug mode count as differences.
    """
    work = simulated.work
    infos = replay.infos
    is_present = infos.sequence >= 0
    drafts = 0 if work.num_drafts is None else work.num_drafts
    # The engine counts after ended sequences have released their pages.
    stay = (simulated.num_finished == 0) & ~infos.held.any(axis=1)
    columns: dict[str, tuple[Any, Any]] = {
        "rows": (
            work.num_decodes + work.num_prompt_rows + drafts,
            infos.num_rows.sum(axis=1),
        ),
        "emitted tokens": (
            work.num_drawn,
            np.where(is_present, infos.num_emitted, 0).sum(axis=1),
        ),
        "finished sequences": (
            simulated.num_finished,
            (infos.reason > 0).sum(axis=1),
        ),
        "copied pages": (work.num_copied, infos.num_copied),
        "used places": (
            np.where(stay, simulated.split.tokens, 0),
            np.where(stay, infos.used_places, 0),
        ),
        "admitted requests": (simulated.num_admitted, infos.num_admitted),
        "preempted sequences": (simulated.num_preempted, infos.num_preempted),
        "used pages": (simulated.used_pages, infos.used_pages),
        "granted plan": (simulated.enough, infos.enough),
    }
    if infos.used_window_pages is not None:
        columns["used pages of windows"] = (
            simulated.used_window_pages,
            infos.used_window_pages,
        )
    if infos.num_drafts is not None:
        columns["drafts"] = work.num_drafts, infos.num_drafts.sum(axis=1)
    differences = []
    for name, (ours, real) in columns.items():
        if (differs := np.asarray(ours) != np.asarray(real)).any():
            step = int(np.argmax(differs))
            values = f"{int(ours[step])} in the simulation, {int(real[step])} in the"
            differences.append((step, f"step {step}: {name}: {values} engine"))
    if infos.violations is not None:
        for name, violated in infos.violations._asdict().items():
            if np.any(violated):
                step = int(
                    np.argmax(np.asarray(violated).reshape(len(stay), -1).any(1))
                )
                differences.append((step, f"step {step}: the engine violates {name}"))
    return min(differences)[1] if differences else None


class _SessionClient:
    """Sends requests to an engine when those that they wait for are answered."""

    def __init__(self, w: Workload, requests: Requests, config: EngineConfig) -> None:
        assert w.dependencies is not None
        self._arrival = np.asarray(w.arrival)
        self._requests = requests
        self._config = config
        self._samples = np.asarray(w.samples)
        self._ends = np.cumsum(self._samples)
        self._num_open = self._samples.copy()
        self._rows: list[int] = []
        """Request of each sequence of the engine, in order of submission."""
        self._due: list[tuple[int, int]] = []
        """Arrival times in us, and requests, that were not submitted yet."""
        self._unsent = set(range(self._samples.size))
        self._after = np.asarray(w.dependencies.after)
        self._chain = None if w.chains is None else np.asarray(w.chains.index)
        self._outputs = np.asarray(w.output)
        delay = np.asarray(w.dependencies.delay)
        self._delay_us = delay.astype(np.int64) @ [1_000_000, 1]
        self._release(None)

    def _release(self, now_us: int | None) -> None:
        """Gives arrival times to requests whose predecessors are answered."""
        for i in sorted(self._unsent):
            before = self._after[i][self._after[i] >= 0]
            if (self._num_open[before] == 0).all():
                self._unsent.remove(i)
                at_us = self._arrival[i].astype(np.int64) @ [1_000_000, 1]
                if before.size:
                    assert now_us is not None
                    at_us = now_us + self._delay_us[i]
                self._due.append((int(at_us), i))

    def submit_due(
        self, state: EngineState, start: Int[np.ndarray, " 2"]
    ) -> EngineState:
        """Submits the requests that have arrived, in order of arrival."""
        start_us = int(start.astype(np.int64) @ [1_000_000, 1])
        requests = self._requests
        for at_us, i in sorted(x for x in self._due if x[0] <= start_us):
            self._due.remove((at_us, i))
            row = np.arange(requests.prompt_length.shape[0])
            is_mine = (row >= self._ends[i] - self._samples[i]) & (row < self._ends[i])
            length = np.where(is_mine, requests.prompt_length, 0)
            arrival = np.where(is_mine[:, None], divmod(at_us, 1_000_000), 0)
            one = requests._replace(
                prompt_length=jnp.asarray(length, jnp.int32),
                arrival=jnp.asarray(arrival, jnp.int32),
                tokens=self._tokens(state, i),
            )
            state, was_accepted = _submit(state, one, config=self._config)
            assert int(was_accepted.sum()) == self._samples[i]
            self._rows += [i] * int(self._samples[i])
        return state

    def _tokens(self, state: EngineState, i: int) -> jax.Array:
        """Returns the prompts; that of a chain starts with the request before it."""
        tokens = jnp.asarray(self._requests.tokens)
        if self._chain is None:
            return tokens
        before = [k for k in self._rows if self._chain[k] == self._chain[i]]
        if before:
            row = self._rows.index(before[-1])
            num = int(self._requests.prompt_length[self._ends[before[-1]] - 1])
            num += int(self._outputs[before[-1]])
            prefix = np.asarray(state.sequences.tokens)[row, :num]
            tokens = tokens.at[self._ends[i] - 1, :num].set(prefix)
            self._requests = self._requests._replace(tokens=tokens)
        return tokens

    def read_answers(
        self, info: StepInfo, start: Int[np.ndarray, " 2"], micros: int
    ) -> None:
        """Counts sequences that ended in a step, and releases requests."""
        ended = np.asarray(info.sequence)[np.asarray(info.reason) > 0]
        np.subtract.at(self._num_open, [self._rows[k] for k in ended], 1)
        if ended.size:
            self._release(int(start.astype(np.int64) @ [1_000_000, 1]) + int(micros))
