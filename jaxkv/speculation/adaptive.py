"""As many drafts as pay: none, some or all, from step to step.

A step with drafts costs more than one without, and how much more depends on how many
sequences decode; what it brings depends on how many drafts are accepted. Both are known
on the device: what drafts brought of late is counted, and what steps cost is a table.
The number of drafts is that of `EngineConfig.lengths` whose tokens per second are the
most, or none. Where none pay, a few are tried now and then, in case the text changed.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 3 (tokens and cost of a step);
Liu et al. 2024, arXiv:2406.14066 (a length chosen by goodput).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxkv import arrays, validation
from jaxkv.engine.drafting import Drafter, Drafts, Verified
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages

_ROWS_FREE = 32.0
"""Rows that cost as much as the first one, where nobody has measured."""


_MARGIN = 0.05
"""By which share of a plain step's speed drafts must be expected to be faster."""


class StepCosts(NamedTuple):
    """What steps cost: a table, linear between batches."""

    batches: Float32[Array, " batches"]
    """Sequences that decode together, ascending."""
    steps: Float32[Array, "batches lengths"]
    """Of each batch without drafts, and with each of `EngineConfig.lengths`, in any
    unit."""
    undrafted: Float32[Array, " batches"]
    """Of each batch in the program that may draft, without any: about what one costs in
    which nothing is found."""


class AdaptiveState(NamedTuple):
    """What is remembered; chances are sums of late observations, the latest most."""

    inner: Any
    """Memory of the drafter that guesses."""
    lengths: Int32[Array, " lengths"]
    """No drafts, and `EngineConfig.lengths`: what there is to choose from."""
    costs: StepCosts
    accepted: Float32[Array, " drafts"]
    """Drafts that were accepted, by their place among a sequence's: of text that
    repeats itself the first is in doubt, and those behind an accepted one are not."""
    judged: Float32[Array, " drafts"]
    """Drafts of which that was asked: up to the first that was not."""
    found: Float32[Array, ""]
    """Sequences for which something was drafted."""
    asked: Float32[Array, ""]
    """Sequences for which something might have been."""
    granted: Bool[Array, " slots"]
    """Slots that were granted drafts in this step."""
    best: Int32[Array, " numbers"]
    """Which of `lengths` to take for each number of sequences, from 0 on, by all that
    is above. Computed where something is learnt alone, so that steps without drafts are
    spared it."""
    idle: Int32[Array, ""]
    """Steps since anything was asked."""
    forced: Int32[Array, ""]
    """Which length to take whatever it brings, to measure its cost; -1 to choose."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Adaptive(Drafter):
    """Has another drafter guess, as much as pays.

    With `SharedNoiseVerifier` the tokens are the same whatever is chosen.
    """

    drafter: Drafter
    """Who guesses."""
    half_life: float = 64.0
    """Observations after which one counts half, above 0."""
    patience: int = 128
    """Steps without drafts after which some are tried, at least 1."""

    def __post_init__(self) -> None:
        """Refuses numbers out of range.

        Raises:
          ValueError: says which.
        """
        validation.settle(self)

    @property
    def width(self) -> int:
        """That of the drafter."""
        return self.drafter.width

    @property
    def reuses_draws(self) -> bool:
        """As the drafter does."""
        return self.drafter.reuses_draws

    def init(self, config: EngineConfig) -> AdaptiveState:
        """Expects much, and costs that nobody has measured: see `set_costs`."""
        lengths = jnp.asarray((0, *config.lengths), jnp.int32)
        batches = jnp.asarray(_batches(config), jnp.float32)
        rows = batches[:, None] * (1 + lengths.astype(jnp.float32))[None, :]
        steps = 1 + rows / _ROWS_FREE

        def number(value: float) -> Array:
            return jnp.full((), value, jnp.float32)

        memory = AdaptiveState(
            inner=self.drafter.init(config),
            lengths=lengths,
            costs=StepCosts(batches, steps, steps[:, 0]),
            accepted=jnp.full((config.max_drafts,), 6.0, jnp.float32),
            judged=jnp.full((config.max_drafts,), 8.0, jnp.float32),
            found=number(8.0),
            asked=number(8.0),
            granted=jnp.zeros((config.max_slots,), bool),
            best=jnp.zeros((1 + config.max_slots,), jnp.int32),
            idle=jnp.zeros((), jnp.int32),
            forced=jnp.full((), -1, jnp.int32),
        )
        return _update_best(memory)

    def wishes(
        self, memory: AdaptiveState, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """At most as many drafts as pay, for all slots the same."""
        num = jnp.sum(state.slots.sequence >= 0, dtype=jnp.int32)
        best = memory.best[num]
        tries = (best == 0) & (memory.idle >= self.patience)
        chosen = jnp.where(tries, 1, best)
        chosen = jnp.where(memory.forced >= 0, memory.forced, chosen)
        wanted = self.drafter.wishes(memory.inner, state, config)
        wanted = jnp.where(memory.forced >= 0, config.max_drafts, wanted)
        return jnp.minimum(wanted, memory.lengths[chosen])

    def rests(
        self, memory: AdaptiveState, state: EngineState, config: EngineConfig
    ) -> Bool[Array, ""]:
        """Where no drafts pay, for who runs and for who may come; nor are any tried."""
        running = jnp.sum(state.slots.sequence >= 0, dtype=jnp.int32)
        soon = jnp.minimum(running + state.queue.length, config.max_slots)
        now = jnp.where(running > 0, running, soon)
        pays = (memory.best[now] > 0) | (memory.best[soon] > 0)
        chosen = ~pays & (memory.idle < self.patience)
        return jnp.where(memory.forced >= 0, memory.forced == 0, chosen)

    def rested(self, memory: AdaptiveState, num_steps: int) -> AdaptiveState:
        """Counts them, as drafts are tried again after many."""
        return memory._replace(idle=memory.idle + num_steps)

    def propose(
        self,
        params: Any,
        memory: AdaptiveState,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[AdaptiveState, Pages, Drafts]:
        """Has the drafter guess; where a cost is measured, anything is fed."""
        inner, pages, drafts = self.drafter.propose(
            params, memory.inner, state, granted, config
        )
        forced = memory.forced >= 0
        drafts = drafts._replace(num=jnp.where(forced, granted, drafts.num))
        any_asked = jnp.any(granted > 0)
        memory = memory._replace(
            inner=inner,
            granted=granted > 0,
            idle=jnp.where(any_asked, 0, memory.idle + 1),
        )
        return memory, pages, drafts

    def learn(
        self, memory: AdaptiveState, state: EngineState, verified: Verified
    ) -> AdaptiveState:
        """Counts what was drafted and accepted."""
        inner = self.drafter.learn(memory.inner, state, verified)
        memory = memory._replace(inner=inner)
        # A measurement is no observation.
        observes = jnp.any(memory.granted) & (memory.forced < 0)
        return arrays.when(observes, self._observe, memory, verified)

    def _observe(self, memory: AdaptiveState, verified: Verified) -> AdaptiveState:
        """Has what was seen before fade, adds what is seen now, and chooses anew."""
        v = verified
        drafted = v.emits & (v.num_drafts > 0)
        judged = jnp.where(drafted, jnp.minimum(v.accepted + 1, v.num_drafts), 0)
        accepted = jnp.where(drafted, v.accepted, 0)
        place = jnp.arange(memory.accepted.shape[0], dtype=jnp.int32)[None, :]
        new = {
            "accepted": (accepted[:, None] > place).astype(jnp.int32),
            "judged": (judged[:, None] > place).astype(jnp.int32),
            "found": drafted.astype(jnp.int32),
            "asked": (memory.granted & v.emits).astype(jnp.int32),
        }
        sums = {name: jnp.sum(x, axis=0).astype(jnp.float32) for name, x in new.items()}
        half = jnp.float32(0.5)
        fades = half ** (sums["judged"] / self.half_life)
        fades_asked = half ** (sums["asked"] / self.half_life)
        memory = memory._replace(
            accepted=memory.accepted * fades + sums["accepted"],
            judged=memory.judged * fades + sums["judged"],
            found=memory.found * fades_asked + sums["found"],
            asked=memory.asked * fades_asked + sums["asked"],
        )
        return _update_best(memory)


def choose_draft_length(
    memory: AdaptiveState, num: Float32[Array, ""]
) -> Int32[Array, ""]:
    """Finds what gives the most tokens per second to `num` sequences.

    A draft is accepted with the chance of its place, if all before it are (Leviathan et
    al., eq. 1, has one chance for all). Drafts must pay by a margin: what is known of
    chances and costs is not exact.

    Returns:
      Which of `AdaptiveState.lengths`.
    """
    finds = memory.found / memory.asked
    reached = jnp.cumprod(memory.accepted / memory.judged)
    gain = jnp.pad(jnp.cumsum(reached), (1, 0))
    gain = gain[memory.lengths]
    costs = memory.costs
    cost = jnp.stack(
        [
            jnp.interp(num, costs.batches, costs.steps[:, column])
            for column in range(costs.steps.shape[1])
        ]
    )
    some = 1 - (1 - finds) ** num
    nothing = jnp.interp(num, costs.batches, costs.undrafted)
    is_plain = memory.lengths == 0
    cost = jnp.where(is_plain, cost, some * cost + (1 - some) * nothing)
    plain = 1 + _MARGIN * is_plain.astype(jnp.float32)
    return jnp.argmax(plain * (1 + finds * gain) / cost).astype(jnp.int32)


def _update_best(memory: AdaptiveState) -> AdaptiveState:
    """Chooses for every number of sequences."""
    numbers = jnp.arange(memory.best.shape[0], dtype=jnp.float32)
    return memory._replace(
        best=jax.vmap(lambda num: choose_draft_length(memory, num))(numbers)
    )


def set_costs(memory: AdaptiveState, costs: StepCosts) -> AdaptiveState:
    """Has measured costs decide."""
    memory = memory._replace(costs=costs, forced=jnp.full_like(memory.forced, -1))
    return _update_best(memory)


def _batches(config: EngineConfig) -> tuple[int, ...]:
    """Batches of which costs are told: 1, 2, 4, ... and the largest."""
    most = config.max_slots
    powers = {2**i for i in range(most.bit_length())}
    return tuple(sorted({n for n in powers if n < most} | {most}))
