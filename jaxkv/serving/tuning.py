"""Measures what steps with drafts cost, so that `Adaptive` speculation knows.

The engine's own program runs with the number of drafts forced, on sequences that are
withdrawn afterwards: nothing is compiled for it, and nothing is left behind.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine import EngineConfig, EngineState
from jaxkv.sampling import Sampling
from jaxkv.serving import outputs
from jaxkv.speculation.adaptive import Costs, Learned, with_costs

_ROUNDS, _ENOUGH_S = 3, 10.0
"""Each step is measured so often, unless that takes longer."""


class Programs(NamedTuple):
    """What an engine runs; each consumes the state."""

    run: Callable[[EngineState], EngineState]
    """Steps of one call."""
    submit: Callable[..., EngineState]
    """`submit(state, requests)`."""
    withdraw: Callable[..., EngineState]
    """`withdraw(state, request_ids)`."""


def check(state: EngineState, config: EngineConfig) -> None:
    """Checks that there are costs to be measured.

    Raises:
      ValueError: the drafter is not `Adaptive`, or answers have no room for two calls.
    """
    if not isinstance(state.memory, Learned):
        raise ValueError("only a drafter that is Adaptive has costs to be measured")
    longest = 2 + 2 * config.steps_per_call * config.emit_width
    if config.max_length < longest:
        raise ValueError(
            f"{config.max_length=} must be at least {longest}, two calls of "
            f"{config.steps_per_call=} with {config.max_drafts=}"
        )


def tune(state: EngineState, programs: Programs, config: EngineConfig) -> EngineState:
    """Measures steps of every batch and length, and has `Adaptive` decide by them.

    Args:
      state: of an idle engine, consumed.
      programs: what the engine runs, compiled.
      config: its bounds.

    Returns:
      The state, idle again.
    """
    check(state, config)
    memory = state.memory
    assert isinstance(memory, Learned)
    batches = np.asarray(memory.costs.batches)
    shape = np.asarray(memory.costs.steps).shape
    found, start = np.full((_ROUNDS, *shape), np.inf), time.perf_counter()
    for table in found:
        for row, column in np.ndindex(shape):
            num = int(batches[row])
            state, table[row, column] = _measure(state, programs, config, num, column)
        if time.perf_counter() - start > _ENOUGH_S:
            break
    assert isinstance(state.memory, Learned)
    costs = Costs(state.memory.costs.batches, jnp.asarray(found.min(axis=0), "float32"))
    # What the drafter remembers of these sequences means nothing to others.
    return state._replace(memory=with_costs(state.memory, costs))


def _measure(
    state: EngineState, programs: Programs, config: EngineConfig, num: int, length: int
) -> tuple[EngineState, float]:
    """Seconds of a step in which `num` sequences decode with a length of drafts."""
    ask = Sampling(
        temperature=0.0, max_tokens=config.max_length - 1, prefix_cache=False
    )
    names = np.full(config.max_sequences, -1, np.int32)
    names[:num] = np.arange(num)
    width = max(config.submit_width, config.max_slots)
    requests = outputs.make_requests(
        [[0]] * num, [ask] * num, config=config, width=width
    )
    memory = state.memory
    assert isinstance(memory, Learned)
    forced = jnp.full_like(memory.forced, length)
    state = state._replace(memory=memory._replace(forced=forced))
    # The first call reads the prompts.
    state = programs.run(programs.submit(state, requests))
    jax.block_until_ready(state.clock)
    start = time.perf_counter()
    state = jax.block_until_ready(programs.run(state))
    seconds = (time.perf_counter() - start) / config.steps_per_call
    return programs.withdraw(state, names), seconds
