"""Branches: one state of an engine, continued under several policies and rules.

All branches begin with the same arrays, random keys of the requests included, so they
draw from common random numbers: a token depends on its request, never on the schedule.
They differ in the order of the work, and so in the times of the tokens.

The type of a policy is static and its parameters are arrays, so branches whose policies
and eviction rules have the same types are mapped, and share one compiled loop. Branches
of other types follow in the same program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.clock import advance, is_past, latest
from jaxkv.engine.state import EngineConfig, EngineState, init
from jaxkv.engine.steps import StepInfo
from jaxkv.memory import Eviction
from jaxkv.scheduling import Policy, check_policy

_NEVER = np.iinfo(np.int32).max


@runtime_checkable
class CallTime(Protocol):
    """Duration of a call of `run_steps`: a function, or a pytree that can be called."""

    def __call__(self, info: StepInfo) -> Float[Array, ""]:
        """Returns the seconds of a call from the information about its steps."""
        ...


type CallRunner = Callable[..., tuple[EngineState, StepInfo]]
"""`run_steps` with its static arguments."""


@validation.checks_numbers()
def branch(
    params: PyTree[ArrayOrShape],
    state: EngineState,
    clock: Int32[Array, " 2"],
    *,
    run: CallRunner,
    policies: Sequence[Policy],
    evictions: Sequence[Eviction | None] | None = None,
    call_time: CallTime | None = None,
    num_calls: int = 1,
    batch_size: int = 1,
    keep_pages: bool = True,
) -> tuple[EngineState, StepInfo]:
    """Continues one state under each of several policies, as one program.

    Requests of the future are submitted to the state before, with their arrival times;
    they are admitted when the clock of a branch has reached them, see `widen`.

    Args:
      params: parameters of the model, shared by all branches.
      state: the state that all branches begin with; not donated.
      clock: seconds and microseconds at the first call.
      run: `functools.partial(run_steps, config=..., forward=...)`, with speculation and
        other static arguments of all branches. Branches of another drafter are another
        call of `branch`, on a state with the memory of that drafter.
      policies: policy of each branch.
      evictions: eviction rule of each branch; None means the default rule for all. A
        rule ranks pages when they become idle, so pages that are idle in `state` keep
        their ranks.
      call_time: duration of a call, by which the clock of a branch advances; without
        work, the clock moves to the next arrival. None keeps the clock.
      num_calls: calls of `run` in each branch.
      batch_size: branches that run at the same time, by `vmap`; 1 runs one after
        another, which takes the memory of one branch and changes no bit of it.
      keep_pages: False to return states without pages, so that the memory of finished
        branches does not grow with the pool.

    Returns:
      The states and the `StepInfo` of all steps, with a leading axis of branches, in
      the order of `policies`.

    Raises:
      ValueError: there are no policies, one of them is not a policy, `evictions` has
        another length, or a number is below 1.
    """
    if not policies:
        raise ValueError("policies=[] must have at least one policy")
    for i, policy in enumerate(policies):
        check_policy(policy, f"policies[{i}]")
    evictions = [None] * len(policies) if evictions is None else evictions
    if len(evictions) != len(policies):
        raise ValueError(f"{len(evictions)=} must be {len(policies)=}")
    params, state, clock = arrays.to_jax_arrays((params, state, clock))

    def continue_under(
        rules: tuple[Policy, Eviction | None],
    ) -> tuple[EngineState, StepInfo]:
        policy, eviction = rules

        def call(
            carry: tuple[EngineState, Array], _: None
        ) -> tuple[tuple[EngineState, Array], StepInfo]:
            state, now = carry
            state, info = run(params, state, now, policy=policy, eviction=eviction)
            if call_time is not None:
                now = advance_clock(state, now, info, call_time)
            return (state, now), info

        (end, _), infos = lax.scan(call, (state, clock), None, length=num_calls)
        infos = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), infos)
        if not keep_pages:
            no_pages: Any = None
            end = end._replace(pages=no_pages)
        return end, infos

    # Branches of equal types are mapped together.
    rules = [*zip(policies, evictions, strict=True)]
    groups: dict[object, list[int]] = {}
    for i, rule in enumerate(rules):
        leaves, structure = jax.tree.flatten(rule)
        groups.setdefault((structure, *map(jax.typeof, leaves)), []).append(i)
    results = [
        _map_branches(continue_under, [rules[i] for i in members], batch_size)
        for members in groups.values()
    ]
    if len(results) == 1:
        return results[0]
    order = [i for members in groups.values() for i in members]
    place = jnp.asarray([order.index(i) for i in range(len(order))], jnp.int32)
    return jax.tree.map(lambda *x: jnp.concatenate(x)[place], *results)


def _map_branches[T](
    function: Callable[..., T], rules: Sequence[PyTree], batch_size: int
) -> T:
    """Returns the stacked results of a function of rules that have the same types."""
    num = len(rules)
    if not jax.tree.leaves(rules[0]):  # rules without parameters are equal
        result = function(rules[0])
        return jax.tree.map(lambda x: jnp.repeat(x[None], num, axis=0), result)
    size = min(batch_size, num)
    # The last branch is repeated to fill the last batch. `lax.map` has a `batch_size`,
    # but takes no empty arrays.
    rows = [*rules, *[rules[-1]] * (-num % size)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    if size == 1:
        return lax.map(function, stacked)
    batches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), stacked)
    result = lax.map(jax.vmap(function), batches)
    return jax.tree.map(lambda x: x.reshape(len(rows), *x.shape[2:])[:num], result)


def advance_clock(
    state: EngineState, now: Int32[Array, " 2"], info: StepInfo, call_time: CallTime
) -> Int32[Array, " 2"]:
    """Returns the clock after a call; without work, the time of the next arrival.

    Args:
      state: the state after the call.
      now: clock of the call.
      info: information about its steps.
      call_time: duration of a call.
    """
    later, _ = advance(now, jnp.asarray(call_time(info), jnp.float32))
    queue = state.ledger.queue
    arrival = arrays.take(state.sequences.arrival, queue, fill=0)
    waits = (queue >= 0) & ~is_past(arrival, now[None])
    seconds = jnp.where(waits, arrival[:, 0], _NEVER)
    first = jnp.min(seconds)
    micros = jnp.where(waits & (seconds == first), arrival[:, 1], _NEVER)
    next_arrival = jnp.stack([first, jnp.min(micros)])
    is_idle = ~jnp.any(info.num_rows > 0) & jnp.any(waits)
    return jnp.where(is_idle, latest(now, next_arrival), later)


def widen(
    state: EngineState, config: EngineConfig, num_rows: int
) -> tuple[EngineState, EngineConfig]:
    """Adds rows of sequences and places of the queue, for requests of the future.

    Args:
      state: the state.
      config: its configuration.
      num_rows: number of rows and of places to add, at least 0.

    Returns:
      The state, and its configuration with more `max_sequences` and `queue_capacity`.
    """
    num_rows = validation.integer("num_rows", num_rows)
    config = dataclasses.replace(
        config,
        max_sequences=config.max_sequences + num_rows,
        queue_capacity=config.queue_capacity + num_rows,
    )
    wide = init(config, state.pages, state.memory)

    def grow(old: Array, new: Array) -> Array:
        if old.shape == new.shape:
            return old
        return new.at[tuple(map(slice, old.shape))].set(old)

    return jax.tree.map(grow, state, wide), config
