"""Measures step costs with drafts, for the choice of `Adaptive` speculation.

The engine's own programs run with a forced draft length, on sequences that are
withdrawn afterwards: no program is compiled for it, and no state remains.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv import validation
from jaxkv.engine import EngineConfig, EngineState
from jaxkv.sampling import Sampling
from jaxkv.serving import request_batch
from jaxkv.speculation import AdaptiveState, StepCosts, set_costs

_MIN_ROUNDS = 3
_MOST_ROUNDS = 9
"""Measurements of every length: least and largest number."""
_MIN_SECONDS = 1.0
"""Seconds per batch size after which only the least number of measurements follows."""


class TuningPrograms(NamedTuple):
    """Functions of an engine; each consumes the state."""

    run: Callable[[EngineState, bool], EngineState]
    """`run(state, may_draft)`: steps of one call."""
    submit: Callable[..., EngineState]
    """`submit(state, requests)`."""
    withdraw: Callable[..., EngineState]
    """`withdraw(state, request_ids)`."""


class MeasurementPlan(NamedTuple):
    """Size of a measurement."""

    context: int
    """Tokens of every sequence at the start."""
    rounds: int
    """Measurements of every length that fit into a sequence, at least 1."""


def plan_measurement(
    state: EngineState, config: EngineConfig, context: int | None
) -> MeasurementPlan:
    """Checks that costs can be measured, and that sequences have room.

    `context` None means half of `config.max_length`.

    Raises:
      ValueError: the drafter is not `Adaptive`, or sequences have no room for a call of
        every length after `context` tokens.
    """
    if not isinstance(state.memory, AdaptiveState):
        raise ValueError("only a drafter that is Adaptive has costs to be measured")
    min_room = _tokens_of_calls(config)

    def room(context: int) -> int:
        """Returns the tokens left for the calls of all lengths."""
        return config.max_length - context - _steps_of_reading(context, config) - 1

    fits = [num for num in range(1, config.max_length) if room(num) >= min_room]
    if not fits:
        raise ValueError(
            f"{config.max_length=} leaves no room for calls of {config.steps_per_call=}"
            f" with up to {config.max_drafts=}: {_remedy(config)}"
        )
    if context is None:
        context = min(config.max_length // 2, fits[-1])
    context = validation.integer("context", context, low=1)
    if context not in fits:
        raise ValueError(
            f"{context=} must be in [1, {fits[-1]}], to leave room for answers"
        )
    return MeasurementPlan(context, room(context) // min_room)


def _tokens_of_calls(config: EngineConfig) -> int:
    """Returns the tokens of a sequence in one call of every length."""
    return config.steps_per_call * sum(
        1 + length for length in (0, 0, *config.draft_buckets)
    )


def _remedy(config: EngineConfig) -> str:
    """Describes settings with which the smallest measurement fits."""

    def needed(config: EngineConfig) -> int:
        return _tokens_of_calls(config) + _steps_of_reading(1, config) + 2

    advice = f"adaptive=True needs max_length={needed(config)} or more"
    for steps in range(config.steps_per_call - 1, 0, -1):
        shorter = dataclasses.replace(config, steps_per_call=steps)
        if needed(shorter) <= config.max_length:
            return f"{advice}, or steps_per_call={steps} or less"
    return advice


def _steps_of_reading(context: int, config: EngineConfig) -> int:
    """Returns the steps, in whole calls, in which all slots read their prompts."""
    free = max(config.token_budget - config.max_slots, 1)
    steps = -(-config.max_slots * context // free) + config.max_slots
    return -(-steps // config.steps_per_call) * config.steps_per_call


def tune(
    state: EngineState,
    programs: TuningPrograms,
    config: EngineConfig,
    plan: MeasurementPlan,
) -> EngineState:
    """Measures steps at every batch size and length, and updates `Adaptive`.

    Args:
      state: of an idle engine; consumed.
      programs: compiled functions of the engine.
      config: the engine's bounds.
      plan: result of `plan_measurement`.

    Returns:
      The state, idle again.
    """
    assert isinstance(state.memory, AdaptiveState)
    batches = np.asarray(state.memory.costs.batches)
    table = []
    for num in batches:
        state, step_s = _measure(state, programs, config, plan, int(num))
        table.append(step_s)
    assert isinstance(state.memory, AdaptiveState)
    undrafted, *steps = np.asarray(table, np.float32).T
    costs = StepCosts(
        jnp.asarray(batches), jnp.stack(steps, axis=1), jnp.asarray(undrafted)
    )
    return state._replace(memory=set_costs(state.memory, costs))


def _measure(
    state: EngineState,
    programs: TuningPrograms,
    config: EngineConfig,
    plan: MeasurementPlan,
    num: int,
) -> tuple[EngineState, Float[np.ndarray, " ways"]]:
    """Returns the seconds of a step in which `num` sequences decode.

    The first value is without drafts in the program that may draft, the second in the
    plain program, then one for each length. Medians are robust against slow first calls
    and disturbances.
    """
    names = np.arange(config.max_sequences, dtype=np.int32)
    rounds = []
    names = np.where(names < num, names, -1)
    begun = time.perf_counter()
    max_tokens = config.max_length - plan.context
    ask = Sampling(temperature=0.0, max_tokens=max_tokens, prefix_cache=False)
    requests = request_batch.make_requests(
        [[0] * plan.context] * num,
        [ask] * num,
        config=config,
        width=max(config.submit_width, config.max_slots),
    )
    steps_of_reading = _steps_of_reading(plan.context, config)
    while len(rounds) < _MOST_ROUNDS:
        if len(rounds) >= _MIN_ROUNDS and time.perf_counter() - begun > _MIN_SECONDS:
            break
        if len(rounds) % plan.rounds == 0:
            state = programs.withdraw(state, names)
            state = programs.submit(_force_length(state, 0), requests)
            for _ in range(steps_of_reading // config.steps_per_call):
                state = programs.run(state, False)
                if np.sum(np.asarray(state.table.length) > plan.context) == num:
                    break
        durations = []
        for length in (0, *range(1 + len(config.draft_buckets))):
            state = jax.block_until_ready(_force_length(state, length))
            may_draft = length > 0 or not durations
            start = time.perf_counter()
            state = jax.block_until_ready(programs.run(state, may_draft))
            durations.append(time.perf_counter() - start)
        rounds.append(durations)
    state = programs.withdraw(state, names)
    return state, np.median(rounds, axis=0) / config.steps_per_call


def _force_length(state: EngineState, length: int) -> EngineState:
    """Forces the drafter to a draft length, for any drafts."""
    assert isinstance(state.memory, AdaptiveState)
    forced = jnp.full_like(state.memory.forced, length)
    return state._replace(memory=state.memory._replace(forced=forced))
