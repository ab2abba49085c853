"""Adaptive draft length: none, some or all drafts, chosen in every step.

A step with drafts costs more than one without, by a factor that depends on the number
of decoding sequences; its gain depends on the acceptance rate. Both are known on the
device: recent acceptance is counted, and step costs are a table. The draft length is
the entry of `EngineConfig.draft_buckets`, or 0, with the most tokens per second. Where
no drafts pay, a few are tried from time to time, since the text may have changed.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 3 (tokens and cost of a step);
Liu et al. 2024, arXiv:2406.14066 (a length chosen by goodput).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import Drafter, Drafts, EngineConfig, EngineState, VerifyOutput
from jaxkv.memory import Pages

_ROWS_FREE = 32.0
"""Rows that cost as much as the first one, before costs are measured."""


_PLAIN_ADVANTAGE = 0.05
"""Share of the speed of plain decoding by which drafts must be expected to be
faster."""


class StepCosts(NamedTuple):
    """Table of step costs, interpolated linearly between batch sizes."""

    batches: Float32[Array, " batches"]
    """Batch sizes (decoding sequences), ascending."""
    steps: Float32[Array, "batches lengths"]
    """Cost of a step at each batch size without drafts, then with each of
    `EngineConfig.draft_buckets`, in any unit."""
    undrafted: Float32[Array, " batches"]
    """Cost of a step without drafts, in the program that may draft, at each batch size:
    about the cost of a step in which the drafter finds no drafts."""


class AdaptiveState(NamedTuple):
    """State of `Adaptive`: acceptance counts with exponential decay, costs, choices."""

    inner: PyTree[Array]
    """State of the wrapped drafter."""
    lengths: Int32[Array, " lengths"]
    """Draft lengths to choose from: 0, then `EngineConfig.draft_buckets`."""
    costs: StepCosts
    accepted: Float32[Array, " drafts"]
    """Accepted drafts, by their position in the draft: in repetitive text the first is
    uncertain, while those after an accepted one are not."""
    judged: Float32[Array, " drafts"]
    """Drafts that the verifier judged, by position: up to the first rejected one."""
    found: Float32[Array, ""]
    """Sequences for which the drafter found drafts."""
    asked: Float32[Array, ""]
    """Sequences for which drafts were requested."""
    granted: Bool[Array, " slots"]
    """Slots that were granted drafts in this step."""
    best: Int32[Array, " numbers"]
    """Index into `lengths` of the best draft length for each number of sequences, from
    0 on. Updated only by steps with drafts, so that steps without drafts do not pay for
    it."""
    idle: Int32[Array, ""]
    """Steps since drafts were last requested."""
    forced: Int32[Array, ""]
    """Index into `lengths` that is used regardless of its gain, to measure its cost; -1
    chooses freely."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Adaptive(Drafter):
    """Limits another drafter to the draft length that pays.

    With `SharedNoiseVerifier` the tokens do not depend on the length.
    """

    drafter: Drafter
    """The drafter that proposes tokens."""
    half_life: float = 64.0
    """Observations after which the weight of an observation is halved, above 0."""
    patience: int = 128
    """Steps without drafts after which drafts are tried again, at least 1."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range; the message shows it.
        """
        validation.check_fields(self)

    @property
    def width(self) -> int:
        """Width of the wrapped drafter."""
        return self.drafter.width

    @property
    def reuses_draws(self) -> bool:
        """`reuses_draws` of the wrapped drafter."""
        return self.drafter.reuses_draws

    def init(self, config: EngineConfig) -> AdaptiveState:
        """Returns a state with optimistic counts and assumed costs, see `set_costs`."""
        lengths = jnp.asarray((0, *config.draft_buckets), jnp.int32)
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

    def requested_draft_lengths(
        self, memory: AdaptiveState, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """Returns the best draft length, or the wrapped drafter's if that is less."""
        num = jnp.sum(state.slots.sequence >= 0, dtype=jnp.int32)
        best = memory.best[num]
        tries = (best == 0) & (memory.idle >= self.patience)
        chosen = jnp.where(tries, 1, best)
        chosen = jnp.where(memory.forced >= 0, memory.forced, chosen)
        wanted = self.drafter.requested_draft_lengths(memory.inner, state, config)
        wanted = jnp.where(memory.forced >= 0, config.max_drafts, wanted)
        return jnp.minimum(wanted, memory.lengths[chosen])

    def is_disabled(
        self, memory: AdaptiveState, state: EngineState, config: EngineConfig
    ) -> Bool[Array, ""]:
        """Returns True if no drafts pay for the running and the queued requests.

        False in steps in which drafts are tried.
        """
        running = jnp.sum(state.slots.sequence >= 0, dtype=jnp.int32)
        soon = jnp.minimum(running + state.ledger.num_waiting, config.max_slots)
        now = jnp.where(running > 0, running, soon)
        pays = (memory.best[now] > 0) | (memory.best[soon] > 0)
        chosen = ~pays & (memory.idle < self.patience)
        return jnp.where(memory.forced >= 0, memory.forced == 0, chosen)

    def on_skipped(self, memory: AdaptiveState, num_steps: int) -> AdaptiveState:
        """Adds skipped steps to the count after which drafts are tried again."""
        return memory._replace(idle=memory.idle + num_steps)

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: AdaptiveState,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[AdaptiveState, Pages, Drafts]:
        """Calls the wrapped drafter.

        While costs are measured, all granted drafts are fed, found or not.
        """
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
        self, memory: AdaptiveState, state: EngineState, verified: VerifyOutput
    ) -> AdaptiveState:
        """Counts drafted and accepted tokens."""
        inner = self.drafter.learn(memory.inner, state, verified)
        memory = memory._replace(inner=inner)
        # A measurement is no observation.
        observes = jnp.any(memory.granted) & (memory.forced < 0)
        return arrays.update_if(observes, self._observe, memory, verified)

    def _observe(self, memory: AdaptiveState, verified: VerifyOutput) -> AdaptiveState:
        """Decays earlier counts, adds those of this step, updates best lengths."""
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
    """Returns the length with the most tokens per second for `num` sequences.

    A draft is accepted with the probability of its position if all drafts before it are
    (Leviathan et al., eq. 1, has one probability for all positions). Drafts must be
    faster by a margin, since probabilities and costs are estimates.

    Returns:
      Index into `AdaptiveState.lengths`.
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
    chance = 1 - (1 - finds) ** num
    nothing = jnp.interp(num, costs.batches, costs.undrafted)
    is_plain = memory.lengths == 0
    cost = jnp.where(is_plain, cost, chance * cost + (1 - chance) * nothing)
    plain = 1 + _PLAIN_ADVANTAGE * is_plain.astype(jnp.float32)
    return jnp.argmax(plain * (1 + finds * gain) / cost).astype(jnp.int32)


def _update_best(memory: AdaptiveState) -> AdaptiveState:
    """Chooses the best length for every number of sequences."""
    numbers = jnp.arange(memory.best.shape[0], dtype=jnp.float32)
    return memory._replace(
        best=jax.vmap(lambda num: choose_draft_length(memory, num))(numbers)
    )


def set_costs(memory: AdaptiveState, costs: StepCosts) -> AdaptiveState:
    """Replaces the assumed costs by measured ones."""
    memory = memory._replace(costs=costs, forced=jnp.full_like(memory.forced, -1))
    return _update_best(memory)


def _batches(config: EngineConfig) -> tuple[int, ...]:
    """Returns the batch sizes of the cost table: 1, 2, 4, ... and `max_slots`."""
    max_slots = config.max_slots
    powers = {2**i for i in range(max_slots.bit_length())}
    return tuple(sorted({n for n in powers if n < max_slots} | {max_slots}))
