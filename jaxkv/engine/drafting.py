"""What the engine asks of speculation: drafted tokens, and a verdict on each.

A step of plain decoding feeds one token of a sequence and draws one. With speculation a
drafter guesses tokens that may follow, the step feeds those, too, and a verifier says
which of them the model itself would have drawn; the sequence advances by as many, and
one more. The words:

  draft     a guessed token; rejected ones leave no trace
  place     of a slot in one step: 0 is the sequence's last known token, k the k-th
            draft; a place has logits of its own
  children  of a place: the drafts that may follow it. In a chain each place has one;
            several make a tree, of which one path from the root is accepted

Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318;
Miao et al. 2024, arXiv:2305.09781 (trees).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays
from jaxkv.engine import groups
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages
from jaxkv.sampling import Params
from jaxkv.scheduling import interface

REPRODUCIBLE_TREES = (
    "numerics='reproducible' takes chains of drafts, no token trees: what moves to "
    "another token place would not have the bits that are computed there"
)


class Tree(NamedTuple):
    """The drafts of each slot by descent."""

    depth: Int32[Array, "slots drafts"]
    """Steps from the root to each."""
    ancestors: Bool[Array, "slots drafts drafts"]
    """Which drafts lie on the way to each, itself among them."""


class Drafts(NamedTuple):
    """What a drafter guesses for every slot."""

    num: Int32[Array, " slots"]
    """Drafts of each slot, at most as many as it was granted."""
    tokens: Int32[Array, "slots drafts"]
    """The drafts; meaningless from `num` on."""
    draft_probs: Float[Array, "slots places vocab"] | None = None
    """Probabilities from which the children of each place were drawn; None where they
    were chosen, which is a law that is certain of them."""
    parents: Int32[Array, "slots drafts"] | None = None
    """Place of each one's parent, which stands before it; None in a chain."""
    tree: Tree | None = None
    """Descent, which `propose` computes from `parents`."""


class VerifyOutput(NamedTuple):
    """What became of the drafts, for the drafter to learn from."""

    num_drafts: Int32[Array, " slots"]
    """Drafts of each slot."""
    accepted: Int32[Array, " slots"]
    """How many of them were accepted; without meaning where nothing was drawn."""
    path: Int32[Array, "slots drafts"]
    """Places of the accepted ones, in order; meaningless from `accepted` on."""
    follows: Int32[Array, "slots places"]
    """The token that the verifier drew behind each place, children apart; meaningless
    beyond the drafts. A drafter that reads it sets `Drafter.reuses_draws`."""
    emits: Bool[Array, " slots"]
    """Slots that drew anything."""


class AcceptResult(NamedTuple):
    """What follows each row, a place of some slot."""

    accept: Float[Array, "rows width"]
    """Probability with which each child is accepted, if those before it were not; 0
    where there is no child."""
    token: Int32[Array, " rows"]
    """The token that follows if no child is accepted."""
    invalid: Bool[Array, " rows"]
    """Rows from which nothing can be drawn, as `sampler.Draw` has it; no child of
    theirs is accepted."""


@runtime_checkable
class Verifier(Protocol):
    """A rule of acceptance: hashable, and equal where it computes the same.

    Every row is judged by itself, so a ruling depends on no batch.
    """

    @property
    def is_lossless(self) -> bool:
        """Whether tokens come out under the model's own law, whatever is drafted."""
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
        """Judges the children of every row, and draws what follows without them.

        Args:
          logits: next-token logits after penalties and other changes.
          children: drafts that may follow, in the order in which they are tried; -1
            where there is none. Siblings are different tokens, unless they were drawn
            with replacement; of equal ones that were chosen only the first counts.
          draft_probs: probabilities of their draws; None if they were chosen.
          params: how each row draws; penalties are already applied.
          positions: where the token that follows will stand in its sequence.
          raw: the model's own logits, as `sampler.sample` takes them.

        Returns:
          The ruling.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """A way to guess: hashable, and equal where it computes the same.

    What it remembers between steps is its memory, a pytree of arrays in the state. Who
    inherits from this remembers nothing, and guesses as much as it may.
    """

    @property
    def width(self) -> int:
        """Children that a place has at most; more are never tried. Above 1: trees."""
        return 1

    @property
    def reuses_draws(self) -> bool:
        """True if drafts depend on `Verified.follows`, and so on the verifier's noise.

        A rejected draft is then correlated with the noise that draws its replacement,
        which only a verifier with `shares_noise` allows for.
        """
        return False

    def init(self, config: EngineConfig) -> Any:
        """The memory of an idle engine of this configuration."""
        return ()

    def requested_draft_lengths(
        self, memory: Any, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """How many drafts each slot would like, before anybody knows what is granted.

        Only slots that decode get any, and never more than `EngineConfig.max_drafts`.
        """
        return jnp.full(state.slots.sequence.shape, config.max_drafts, jnp.int32)

    def is_disabled(
        self, memory: Any, state: EngineState, config: EngineConfig
    ) -> Bool[Array, ""] | None:
        """Whether nobody would be drafted for in the steps that follow.

        They can then be those of an engine that never drafts. None: never.
        """
        return None

    def on_skipped(self, memory: Any, num_steps: int) -> Any:
        """Takes note of so many steps without drafts, whose verdicts were not told."""
        return memory

    def propose(
        self,
        params: Any,
        memory: Any,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[Any, Pages, Drafts]:
        """Guesses up to `granted` tokens for every slot.

        The pages of as many token places beyond the known tokens are reserved; what it
        writes there is overwritten.

        Returns:
          The memory; the pages of the state, whether it wrote to them or not; and the
          drafts.
        """
        ...

    def learn(self, memory: Any, state: EngineState, verified: VerifyOutput) -> Any:
        """Takes note of a verdict; the tokens that it gave are in the state.

        Slots change hands, rows of `Sequences` do only when a request is drained: what
        is remembered of a sequence belongs there. Whoever decodes has drawn before.

        Returns:
          The memory.
        """
        return memory


class _Pair(NamedTuple):
    """The fields of `Speculation`."""

    drafter: Drafter
    verifier: Verifier


class Speculation(_Pair):
    """A way to speculate: who guesses, and who judges; static.

    Raises:
      ValueError: the drafter reuses the verifier's draws, and the verifier would not
        keep the model's distribution then.
    """

    __slots__ = ()

    def __new__(cls, drafter: Drafter, verifier: Verifier) -> "Speculation":
        """Checks that the two may be combined."""
        # A `Verifier` need not have this one: False is the safe reading.
        shares_noise = getattr(verifier, "shares_noise", False)
        is_exact = getattr(verifier, "is_lossless", False) and not shares_noise
        if is_exact and getattr(drafter, "reuses_draws", False):
            raise ValueError(
                f"{verifier=} must share the sampler's noise, as Coupled() does, with "
                f"{drafter=}: it drafts tokens that the verifier drew"
            )
        return super().__new__(cls, drafter, verifier)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Speculation":
        """Makes one of its fields, checked; `_replace` calls it."""
        return cls(*iterable)


def requested_draft_lengths(
    state: EngineState, drafter: Drafter, config: EngineConfig
) -> Int32[Array, " slots"]:
    """How many drafts each slot would feed behind its last known token.

    None where it is not the last known token that is fed next, where a beam is, and
    where the answer would end before them.
    """
    s, sequence = state.sequences, state.slots.sequence
    with jax.named_scope("draft_lengths"):
        wanted = drafter.requested_draft_lengths(state.memory, state, config)
    alone = ~groups.fork_of(state).reads & ~groups.is_beam(state)
    return interface.limit_draft_lengths(
        jnp.where(alone, jnp.minimum(wanted, config.max_drafts), 0),
        num_tokens=groups.num_tokens_to_feed(state),
        length=state.table.length,
        known=state.slots.num_tokens,
        limit=arrays.take(s.limit, sequence, fill=0),
    )


@jax.named_scope("draft")
def propose(
    params: Any,
    state: EngineState,
    granted: Int32[Array, " slots"],
    drafter: Drafter,
    config: EngineConfig,
) -> tuple[EngineState, Drafts]:
    """Has the drafter guess, and writes the drafts behind the known tokens.

    There they are read like known tokens, which they are not: `num_tokens` is as it
    was.
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
    s, sequence = state.sequences, state.slots.sequence
    index = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    known = state.slots.num_tokens
    place = jnp.where(index < drafts.num[:, None], known[:, None] + index, -1)
    tokens = arrays.put(s.tokens, (sequence[:, None], place), drafts.tokens)
    s = s._replace(tokens=tokens)
    return state._replace(sequences=s, pages=pages, memory=memory), drafts


def tree(parents: Int32[Array, "slots drafts"]) -> Tree:
    """Finds who descends from whom; parents stand before their children."""
    num = parents.shape[1]
    place = jnp.arange(1, num + 1, dtype=jnp.int32)
    steps = parents[:, :, None] == place[None, None, :]
    ancestors = steps | (place[:, None] == place[None, :])[None]
    # Ways of up to 1, 2, 4, ... steps.
    for _ in range((num - 1).bit_length()):
        one = ancestors.astype(jnp.float32)
        ancestors = jnp.einsum("sij,sjk->sik", one, one) > 0
    return Tree(jnp.sum(ancestors, axis=2, dtype=jnp.int32), ancestors)


def find_children(drafts: Drafts, width: int) -> Int32[Array, "slots places each"]:
    """Places of the first children of every place, in order; -1 where there is none."""
    num_slots, num = drafts.tokens.shape
    place = jnp.arange(num + 1, dtype=jnp.int32)
    if drafts.parents is None:
        is_parent = place[None, :] < drafts.num[:, None]
        return jnp.where(is_parent, place[None, :] + 1, -1)[:, :, None]
    if not num:
        return jnp.full((num_slots, 1, width), -1, jnp.int32)
    there = place[None, 1:] <= drafts.num[:, None]
    is_child = drafts.parents[:, None, :] == place[None, :, None]
    is_child &= there[:, None, :]
    rank = jnp.cumsum(is_child, axis=2, dtype=jnp.int32) - 1
    wanted = jnp.arange(width, dtype=jnp.int32)[None, None, :, None]
    found = is_child[:, :, None, :] & (rank[:, :, None, :] == wanted)
    return jnp.max(jnp.where(found, place[None, None, None, 1:], -1), axis=3)
