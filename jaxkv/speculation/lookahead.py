"""Lookahead decoding: a Jacobi window collects n-grams that become drafts.

A window of guesses of the next tokens is iterated as in Jacobi decoding, and the last
few states of each of its columns are stored. Read in order they form an n-gram that the
model itself produced; n-grams that begin with the last known token are drafted. Both
are branches of one token tree and use tree attention, without a mask of their own:

  candidates  each is a chain after the root; chains with equal beginnings share nodes
  window      state 0 is a chain after the root; a column's next state is a child of
              the previous one

The window's branches are drafts too, but rarely right.

Source: Fu et al. 2024, arXiv:2402.02057, section 3 and figure 5.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import Drafter, Drafts, EngineConfig, EngineState, VerifyOutput
from jaxkv.memory import Pages


class LookaheadState(NamedTuple):
    """State of `Lookahead`, one row per sequence."""

    window: Int32[Array, "sequences states columns"]
    """Recent states of the iteration, the oldest first."""
    pool: Int32[Array, "sequences entries ngram"]
    """Ring buffer of n-grams; -1 where an entry is empty."""
    num_written: Int32[Array, " sequences"]
    """N-grams written so far."""
    iterates: Bool[Array, " slots"]
    """Slots whose whole window is fed in this step."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookahead(Drafter):
    """Drafts n-grams from a lookahead window.

    Needs (columns + candidates) * (ngram - 1) drafts; slots that are granted fewer feed
    candidates only and do not iterate the window.
    """

    columns: int = 5
    """Tokens of the window that are guessed in parallel, W in the paper; at least 1."""
    ngram: int = 4
    """Tokens of an n-gram, N in the paper; at least 2."""
    candidates: int = 5
    """N-grams that are drafted, G in the paper; at least 1."""
    entries: int = 128
    """N-grams that are stored for a sequence, at least `columns`."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range; the message shows it.
        """
        validation.check_fields(self, ngram=2)
        validation.integer("entries", self.entries, low=self.columns)

    @property
    def width(self) -> int:
        """Children of the root: the candidates and the window."""
        return self.candidates + 1

    @property
    def reuses_draws(self) -> bool:
        """True: window and n-grams consist of the verifier's samples."""
        return True

    @property
    def num_drafts(self) -> int:
        """Drafts of a step with candidates and window."""
        return (self.columns + self.candidates) * (self.ngram - 1)

    def init(self, config: EngineConfig) -> LookaheadState:
        """Returns a state without n-grams.

        Raises:
          ValueError: `config.max_drafts` is below `num_drafts`.
        """
        if config.max_drafts < self.num_drafts:
            raise ValueError(
                f"{config.max_drafts=} must be at least {self.num_drafts}: "
                f"(columns={self.columns} + candidates={self.candidates}) * "
                f"(ngram={self.ngram} - 1)"
            )
        num = config.max_sequences
        return LookaheadState(
            window=jnp.zeros((num, self.ngram - 1, self.columns), jnp.int32),
            pool=jnp.full((num, self.entries, self.ngram), -1, jnp.int32),
            num_written=jnp.zeros((num,), jnp.int32),
            iterates=jnp.zeros((config.max_slots,), bool),
        )

    def requested_draft_lengths(
        self, memory: LookaheadState, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """Returns the size of the tree."""
        return jnp.full(state.slots.sequence.shape, self.num_drafts, jnp.int32)

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: LookaheadState,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[LookaheadState, Pages, Drafts]:
        """Packs candidates and window as a tree; new sequences get a new window."""
        s = state.sequences
        sequence = state.slots.sequence
        row = jnp.maximum(sequence, 0)
        num_tokens = state.slots.num_tokens
        tokens = s.tokens[row]
        begins = (granted > 0) & (num_tokens == s.prompt_length[row] + 1)
        target = jnp.where(begins, sequence, -1)
        # A new window holds the last tokens of the text, with an empty pool.
        place = _count(self.ngram - 1)[:, None] + _count(self.columns)[None, :]
        first = num_tokens - self.columns - self.ngram + 2
        place = first[:, None, None] + place[None]
        slot = _count(num_tokens.shape[0])[:, None, None]
        at = jnp.broadcast_to(slot, place.shape), jnp.maximum(place, 0)
        memory = memory._replace(
            window=arrays.put(memory.window, target, arrays.take(tokens, at, fill=0)),
            num_written=arrays.put(memory.num_written, target, 0),
        )
        last = arrays.take(tokens, (_count(row.shape[0]), num_tokens - 1), fill=-2)
        candidates = find_ngrams(
            memory.pool[row], memory.num_written[row], last, num=self.candidates
        )
        window = memory.window[row]
        num_slots = row.shape[0]
        above = self._window_parents(num_slots)
        parents = jnp.concatenate([_trie_parents(candidates), above], axis=1)
        drafted = jnp.concatenate(
            [candidates.reshape(num_slots, -1), window.reshape(num_slots, -1)], axis=1
        )
        padding = ((0, 0), (0, config.max_drafts - self.num_drafts))
        memory = memory._replace(iterates=granted >= self.num_drafts)
        drafts = Drafts(
            num=jnp.minimum(granted, self.num_drafts),
            tokens=jnp.pad(jnp.maximum(drafted, 0), padding),
            parents=jnp.pad(parents, padding),
        )
        return memory, state.pages, drafts

    def learn(
        self, memory: LookaheadState, state: EngineState, verified: VerifyOutput
    ) -> LookaheadState:
        """Iterates the window, and stores the n-grams of its columns.

        A column belongs to one position of the text, so the window shifts by the
        accepted tokens.
        """
        v = verified
        row = jnp.maximum(state.slots.sequence, 0)
        window = memory.window[row]
        columns = _count(self.columns)
        first = 1 + self.num_drafts - self.columns
        newest = v.follows[:, first : first + self.columns]
        # For each column: its states, and the model's output after the last one.
        ngrams = jnp.concatenate([window, newest[:, None]], axis=1)
        index = jnp.minimum(columns[None, :] + v.accepted[:, None], self.columns - 1)
        moved = jnp.take_along_axis(ngrams[:, 1:], index[:, None, :], axis=2)
        learns = memory.iterates & v.emits & (v.num_drafts == self.num_drafts)
        target = jnp.where(learns, state.slots.sequence, arrays.NONE)
        pool, num = store_ngrams(
            memory.pool[row], memory.num_written[row], ngrams.swapaxes(1, 2)
        )
        return memory._replace(
            window=arrays.put(memory.window, target, moved),
            pool=arrays.put(memory.pool, target, pool),
            num_written=arrays.put(memory.num_written, target, num),
        )

    def _window_parents(self, num_slots: int) -> Int32[Array, "slots drafts"]:
        """Returns the parent places of the window, which follows the candidates."""
        before = self.candidates * (self.ngram - 1)
        place = before + 1 + np.arange(self.columns * (self.ngram - 1))
        parents = place - self.columns
        parents[: self.columns] = place[: self.columns] - 1
        parents[0] = 0
        one = jnp.asarray(parents, jnp.int32)[None, :]
        return jnp.broadcast_to(one, (num_slots, parents.size))


def build_lookahead(max_drafts: int) -> Lookahead:
    """Builds a drafter with at most `max_drafts` drafts, half of them for the window.

    Raises:
      ValueError: `max_drafts` is below 2.
    """
    ngram = 4 if max_drafts >= 18 else 3 if max_drafts >= 8 else 2
    if (half := max_drafts // (2 * (ngram - 1))) < 1:
        raise ValueError(f"{max_drafts=} must be at least 2 to look ahead")
    return Lookahead(columns=half, ngram=ngram, candidates=half)


def find_ngrams(
    pool: Int32[Array, "slots entries ngram"],
    num_written: Int32[Array, " slots"],
    last: Int32[Array, " slots"],
    *,
    num: int,
) -> Int32[Array, "slots {num} followers"]:
    """Returns the latest n-grams that begin with a token, without it; -1 if absent.

    Args:
      pool: ring buffer of n-grams for each slot.
      num_written: n-grams written so far.
      last: the first token to match.
      num: n-grams to return, static.
    """
    entries = pool.shape[1]
    place = _count(entries)[None, :]
    newest = num_written[:, None] - 1
    written = newest - (newest - place) % entries
    matches = (pool[:, :, 0] == last[:, None]) & (written >= 0)
    age, entry = lax.top_k(jnp.where(matches, written, -1), min(num, entries))
    ngrams = jnp.take_along_axis(pool[:, :, 1:], entry[:, :, None], axis=1)
    ngrams = jnp.where((age >= 0)[:, :, None], ngrams, -1)
    return jnp.pad(
        ngrams, ((0, 0), (0, num - ngrams.shape[1]), (0, 0)), constant_values=-1
    )


def store_ngrams(
    pool: Int32[Array, "slots entries ngram"],
    num_written: Int32[Array, " slots"],
    ngrams: Int32[Array, "slots columns ngram"],
) -> tuple[Int32[Array, "slots entries ngram"], Int32[Array, " slots"]]:
    """Writes n-grams over the oldest entries; duplicates move to the newest entry.

    Returns:
      The pool, and the number of n-grams written.
    """
    is_equal = jnp.all(pool[:, None] == ngrams[:, :, None], axis=3)
    pool = jnp.where(jnp.any(is_equal, axis=1)[:, :, None], -1, pool)
    entries = pool.shape[1]
    columns = ngrams.shape[1]
    place = (num_written[:, None] + _count(columns)[None, :]) % entries
    slot = jnp.broadcast_to(_count(pool.shape[0])[:, None], place.shape)
    return arrays.put(pool, (slot, place), ngrams), num_written + columns


def _trie_parents(
    candidates: Int32[Array, "slots num followers"],
) -> Int32[Array, "slots _"]:
    """Returns the parent places of chains after the root that share their beginnings.

    A chain that begins like an earlier one continues from its nodes; equal siblings are
    tried once.
    """
    num_slots, num, followers = candidates.shape
    same = candidates[:, :, None] == candidates[:, None]
    shares = jnp.cumprod(same.astype(jnp.int32), axis=3) > 0
    # The first chain with the same beginning, up to each token.
    first = jnp.argmax(shares, axis=2).astype(jnp.int32)
    place = 1 + first * followers + _count(followers)[None, None, :]
    parents = jnp.pad(place[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    return parents.reshape(num_slots, num * followers)


def _count(num: int) -> Int32[Array, " {num}"]:
    return jnp.arange(num, dtype=jnp.int32)
