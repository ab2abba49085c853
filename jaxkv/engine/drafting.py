"""Interfaces of speculative decoding: drafters, drafts and verifiers.

A decode step without speculation feeds one token of a sequence and samples one. With
speculation, a drafter proposes tokens that may follow, the step feeds them as well, and
a verifier accepts or rejects each (speculative sampling, a form of rejection sampling).
The sequence advances by the accepted drafts and one more token. Terms:

  draft     a proposed token; its K and V are discarded if it is rejected
  place     a row of a slot in a step: 0 is the sequence's last known token, k the k-th
            draft; each place has its own logits
  children  the drafts that may follow a place. In a chain each place has one child;
            in a token tree it has several, and one path from the root is accepted

Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318;
Miao et al. 2024, arXiv:2305.09781 (trees).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import arrays
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import groups
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages
from jaxkv.sampling import Params
from jaxkv.scheduling import limit_draft_lengths

REPRODUCIBLE_TREES = (
    "numerics='reproducible' takes chains of drafts, no token trees: K and V that move "
    "to another token place differ in their bits from those computed there"
)


class Tree(NamedTuple):
    """Token trees of the slots."""

    depth: Int32[Array, "slots drafts"]
    """Distance of each draft from the root."""
    ancestors: Bool[Array, "slots drafts drafts"]
    """Mask of the ancestors of each draft, itself included (tree attention mask)."""


class Drafts(NamedTuple):
    """Drafts of every slot."""

    num: Int32[Array, " slots"]
    """Draft length of each slot, at most the granted length."""
    tokens: Int32[Array, "slots drafts"]
    """The drafts; arbitrary from `num` on."""
    draft_probs: Float[Array, "slots places vocab"] | None = None
    """Probabilities from which the children of each place were sampled; None if the
    drafts are deterministic (probability 1)."""
    parents: Int32[Array, "slots drafts"] | None = None
    """Place of the parent of each draft, which has a lower index; None in a chain."""
    tree: Tree | None = None
    """The token trees, computed by `propose` from `parents`."""
    grammar_state: Int32[Array, "slots places"] | None = None
    """State of the grammar at each place, the root included; None if the engine has no
    grammars."""


class VerifyOutput(NamedTuple):
    """Results of verification, for the drafter to learn from."""

    num_drafts: Int32[Array, " slots"]
    """Draft length of each slot."""
    accepted: Int32[Array, " slots"]
    """Number of accepted drafts; arbitrary unless `emits`."""
    path: Int32[Array, "slots drafts"]
    """Places of the accepted drafts in order; arbitrary from `accepted` on."""
    follows: Int32[Array, "slots places"]
    """Token that the verifier sampled after each place in case its children are
    rejected; arbitrary beyond the drafts. A drafter that reads it sets
    `Drafter.reuses_draws`."""
    emits: Bool[Array, " slots"]
    """Slots that emit tokens in this step."""


class AcceptResult(NamedTuple):
    """Verdict of a verifier on each row, a place of a slot."""

    accept: Float[Array, "rows width"]
    """Probability that each child is accepted, given that all children before it were
    rejected; 0 where there is no child."""
    token: Int32[Array, " rows"]
    """Token that follows if no child is accepted."""
    invalid: Bool[Array, " rows"]
    """Rows without a valid token, as in `sampler.Draw`; their children are rejected."""


type DrafterMemory = PyTree[ArrayOrShape]
"""State of a drafter between steps."""


@runtime_checkable
class Verifier(Protocol):
    """A rule for the acceptance of drafts.

    Verifiers are hashable, and equal if they compute the same. Each row is judged on
    its own, independent of the batch.
    """

    @property
    def is_lossless(self) -> bool:
        """True if emitted tokens have the model's distribution for any drafts."""
        ...

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        draft_probs: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> AcceptResult:
        """Judges the children of each row, and samples a token if all are rejected.

        Args:
          logits: next-token logits after penalties and other changes.
          children: drafts that may follow, in the order in which they are tried; -1
            where there is none. Siblings are distinct unless they were sampled with
            replacement; of equal deterministic siblings only the first counts.
          draft_probs: probabilities from which the children were sampled; None if they
            are deterministic.
          params: sampling parameters of each row; penalties are already applied.
          positions: position of the following token in its sequence.
          raw: the model's logits, as for `sampler.sample`.

        Returns:
          The verdict on each row.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts.

    Drafters are hashable, and equal if they compute the same. A drafter keeps state
    between steps in its memory, a pytree of arrays in `EngineState.memory`. The default
    methods keep no memory and request the longest drafts.
    """

    @property
    def width(self) -> int:
        """Largest number of children of a place; above 1 for token trees."""
        return 1

    @property
    def reuses_draws(self) -> bool:
        """True if drafts read the verifier's noise in `VerifyOutput.follows`.

        A rejected draft is then correlated with the noise that draws its replacement,
        which only a verifier with `shares_noise` allows for.
        """
        return False

    def init(self, config: EngineConfig) -> DrafterMemory:
        """Returns the memory of an idle engine."""
        return ()

    def requested_draft_lengths(
        self, memory: DrafterMemory, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """Returns the requested draft length of each slot.

        The engine grants drafts only to slots that decode, at most
        `EngineConfig.max_drafts` of them.
        """
        return jnp.full(state.slots.sequence.shape, config.max_drafts, jnp.int32)

    def is_disabled(
        self, memory: DrafterMemory, state: EngineState, config: EngineConfig
    ) -> Bool[Array, ""] | None:
        """Returns True if the drafter is disabled for the next steps.

        These steps then run a program without speculation. None means never disabled.
        """
        return None

    def on_skipped(self, memory: DrafterMemory, num_steps: int) -> DrafterMemory:
        """Updates the memory after `num_steps` steps without speculation."""
        return memory

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: DrafterMemory,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[DrafterMemory, Pages, Drafts]:
        """Proposes up to `granted` tokens for each slot.

        Pages are reserved for `granted` token places after the known tokens. The
        drafter may write K and V there; the step overwrites them.

        Returns:
          The new memory, the pages, changed or not, and the drafts.
        """
        ...

    def learn(
        self, memory: DrafterMemory, state: EngineState, verified: VerifyOutput
    ) -> DrafterMemory:
        """Updates the memory after verification; the state has the emitted tokens.

        A slot can change its sequence in any step, but a row of `Sequences` is reused
        only after its request is drained. Memory of a sequence should be indexed by
        its row. A sequence that decodes has emitted at least one token.

        Returns:
          The new memory.
        """
        return memory


class _Pair(NamedTuple):
    """The fields of `Speculation`."""

    drafter: Drafter
    verifier: Verifier


class Speculation(_Pair):
    """A drafter and a verifier; static.

    Raises:
      ValueError: the drafter reuses the verifier's draws, and the verifier would then
        not keep the model's distribution.
    """

    __slots__ = ()

    def __new__(cls, drafter: Drafter, verifier: Verifier) -> "Speculation":
        """Checks that drafter and verifier can be combined."""
        # `Verifier` does not require the attribute; False is the safe default.
        shares_noise = getattr(verifier, "shares_noise", False)
        is_exact = getattr(verifier, "is_lossless", False) and not shares_noise
        if is_exact and getattr(drafter, "reuses_draws", False):
            raise ValueError(
                f"{verifier=} must share the sampler's noise, as SharedNoiseVerifier "
                f"does, with {drafter=}: it drafts tokens that the verifier sampled"
            )
        return super().__new__(cls, drafter, verifier)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Speculation":
        """Makes a checked pair of its fields; `_replace` calls it."""
        return cls(*iterable)


def requested_draft_lengths(
    state: EngineState, drafter: Drafter, config: EngineConfig
) -> Int32[Array, " slots"]:
    """Returns the draft length of each slot, see `interface.limit_draft_lengths`.

    It is 0 in slots with a beam, and in slots that prefill for a whole group.
    """
    s = state.sequences
    sequence = state.slots.sequence
    with jax.named_scope("draft_lengths"):
        wanted = drafter.requested_draft_lengths(state.memory, state, config)
    can_draft = ~groups.fork_of(state).reads & ~groups.is_beam(state)
    return limit_draft_lengths(
        jnp.where(can_draft, jnp.minimum(wanted, config.max_drafts), 0),
        target_length=groups.tokens_to_feed(state),
        length=state.table.length,
        num_tokens=state.slots.num_tokens,
        limit=arrays.take(s.limit, sequence, fill=0),
    )


@jax.named_scope("draft")
def propose(
    params: PyTree[ArrayOrShape],
    state: EngineState,
    granted: Int32[Array, " slots"],
    drafter: Drafter,
    config: EngineConfig,
) -> tuple[EngineState, Drafts]:
    """Calls the drafter, and writes the drafts after the known tokens.

    `num_tokens` of the slots does not change, since drafts are not known tokens.

    Raises:
      ValueError: the drafts have another shape than (slots, max_drafts), or are token
        trees under reproducible numerics.
    """
    memory, pages, drafts = drafter.propose(
        params, state.memory, state, granted, config
    )
    shape = granted.shape[0], config.max_drafts
    if drafts.tokens.shape != shape:
        raise ValueError(f"{drafts.tokens.shape=} must be {shape}: (slots, max_drafts)")
    if drafts.parents is not None and config.numerics == "reproducible":
        raise ValueError(REPRODUCIBLE_TREES)
    drafts = drafts._replace(
        num=jnp.clip(drafts.num, 0, granted),
        tree=None if drafts.parents is None else tree(drafts.parents),
    )
    s = state.sequences
    sequence = state.slots.sequence
    index = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    num_tokens = state.slots.num_tokens
    place = jnp.where(index < drafts.num[:, None], num_tokens[:, None] + index, -1)
    tokens = arrays.put(s.tokens, (sequence[:, None], place), drafts.tokens)
    s = s._replace(tokens=tokens)
    return state._replace(sequences=s, pages=pages, memory=memory), drafts


def tree(parents: Int32[Array, "slots drafts"]) -> Tree:
    """Returns depths and ancestors; a parent has a lower index than its children."""
    num = parents.shape[1]
    place = jnp.arange(1, num + 1, dtype=jnp.int32)
    steps = parents[:, :, None] == place[None, None, :]
    ancestors = steps | (place[:, None] == place[None, :])[None]
    # Paths of up to 1, 2, 4, ... edges.
    for _ in range((num - 1).bit_length()):
        one = ancestors.astype(jnp.float32)
        ancestors = jnp.einsum("sij,sjk->sik", one, one) > 0
    return Tree(jnp.sum(ancestors, axis=2, dtype=jnp.int32), ancestors)


def find_children(drafts: Drafts, width: int) -> Int32[Array, "slots places each"]:
    """Returns the first `width` children of every place, in order; -1 for none."""
    num_slots, num = drafts.tokens.shape
    place = jnp.arange(num + 1, dtype=jnp.int32)
    if drafts.parents is None:
        is_parent = place[None, :] < drafts.num[:, None]
        return jnp.where(is_parent, place[None, :] + 1, -1)[:, :, None]
    if not num:
        return jnp.full((num_slots, 1, width), -1, jnp.int32)
    is_draft = place[None, 1:] <= drafts.num[:, None]
    is_child = drafts.parents[:, None, :] == place[None, :, None]
    is_child &= is_draft[:, None, :]
    rank = jnp.cumsum(is_child, axis=2, dtype=jnp.int32) - 1
    wanted = jnp.arange(width, dtype=jnp.int32)[None, None, :, None]
    is_match = is_child[:, :, None, :] & (rank[:, :, None, :] == wanted)
    return jnp.max(jnp.where(is_match, place[None, None, None, 1:], -1), axis=3)
