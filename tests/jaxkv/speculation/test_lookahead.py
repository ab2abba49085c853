"""Lookahead decoding: n-gram pools against Python lists, the token tree, and the
window.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import EngineConfig, drafting
from jaxkv.speculation import Lookahead, lookahead
from tests.support import engines

SIZES = Lookahead(columns=3, ngram=4, candidates=2, entries=5)


def test_pools_equal_lists() -> None:
    """A duplicate becomes the latest entry; the oldest entries are overwritten."""
    rng = np.random.default_rng(0)
    slots = 3
    columns = 2
    pool = jnp.full((slots, 6, 3), -1, jnp.int32)
    num = jnp.zeros(slots, jnp.int32)
    write = jax.jit(lookahead.store_ngrams)
    look = jax.jit(lookahead.find_ngrams, static_argnames="num")
    lists: list[list[tuple[int, ...] | None]] = [[] for _ in range(slots)]
    hits = 0
    for _ in range(30):
        # No duplicates in one call, since either could then be the last.
        ngrams = np.array(
            [rng.permutation(9)[:columns, None].repeat(3, axis=1) for _ in lists]
        )
        ngrams[:, :, 0] %= 3
        pool, num = write(pool, num, jnp.asarray(ngrams, "int32"))
        for slot_ngrams, new in zip(lists, ngrams.tolist(), strict=True):
            fresh = [tuple(ngram) for ngram in new]
            slot_ngrams[:] = [
                None if ngram in fresh else ngram for ngram in slot_ngrams
            ] + fresh
            slot_ngrams[:] = slot_ngrams[-6:]
        last = rng.integers(0, 3, slots)
        continuations = look(pool, num, jnp.asarray(last, "int32"), num=2)
        for slot, slot_ngrams in enumerate(lists):
            matches = [
                x[1:] for x in slot_ngrams[::-1] if x is not None and x[0] == last[slot]
            ]
            wanted = [*matches, (-1, -1), (-1, -1)][:2]
            assert [tuple(ngram) for ngram in continuations[slot].tolist()] == wanted
            hits += matches != []
    assert hits > 40


def test_chains_with_equal_beginnings_share_nodes() -> None:
    chains = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 8, 9], [5, 6, 7]]
    flat_parents = lookahead._trie_parents(jnp.asarray([chains], "int32"))
    parents = np.asarray(flat_parents).reshape(5, 3).tolist()
    assert parents == [[0, 1, 2], [0, 1, 2], [0, 7, 8], [0, 1, 11], [0, 7, 8]]


def test_columns_have_the_positions_that_they_guess() -> None:
    """State l of column i is l + i + 1 places after the root, and attends to its
    ancestors.
    """
    before = SIZES.candidates * (SIZES.ngram - 1)
    chains = jnp.arange(before, dtype=jnp.int32)[None, :]
    parents = jnp.concatenate([chains, SIZES._window_parents(1)], axis=1)
    assert parents.shape == (1, SIZES.num_drafts)
    depth, ancestors = map(np.asarray, drafting.tree(parents))
    for state, column in np.ndindex(SIZES.ngram - 1, SIZES.columns):
        node = before + state * SIZES.columns + column
        assert depth[0, node] == 1 + state + column
        kin = [before + i for i in range(column + 1)]
        kin += [before + s * SIZES.columns + column for s in range(1, state + 1)]
        assert np.flatnonzero(ancestors[0, node]).tolist() == kin


@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_a_window_moves_on_with_the_text(accepted: int) -> None:
    config = EngineConfig(
        max_drafts=SIZES.num_drafts, max_slots=2, token_budget=64, max_length=64
    )
    state = engines.start(config)
    state = state.with_slots(state.slots._replace(sequence=jnp.asarray([7, -1])))
    memory = SIZES.init(config)
    window = jnp.arange(9, dtype=jnp.int32).reshape(3, 3) + 10
    memory = memory._replace(
        window=memory.window.at[7].set(window), iterates=jnp.asarray([True, False])
    )
    num = SIZES.num_drafts
    follows = jnp.arange(1 + num, dtype=jnp.int32)[None, :] + 100
    verified = drafting.VerifyOutput(
        num_drafts=jnp.asarray([num, 0]),
        accepted=jnp.asarray([accepted, 0]),
        path=jnp.zeros((2, num), jnp.int32),
        follows=jnp.concatenate([follows, follows]),
        emits=jnp.asarray([True, False]),
    )
    after = jax.tree.map(np.asarray, SIZES.learn(memory, state, verified))
    # The last state occupies the last three places.
    newest = np.arange(3) + 100 + num - 2
    states = np.stack([*np.asarray(window), newest])
    assert after.pool[7, :3].tolist() == states.T.tolist()
    moved = [min(i + accepted, 2) for i in range(3)]
    assert after.window[7].tolist() == states[1:, moved].tolist()
    assert after.num_written.sum() == 3
    assert (np.delete(after.window, 7, axis=0) == 0).all()


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="ngram=1 must be"):
        Lookahead(ngram=1)
    with pytest.raises(ValueError, match="entries=2 must be"):
        Lookahead(columns=3, entries=2)
    with pytest.raises(ValueError, match=r"config.max_drafts=14 must be at least 15"):
        SIZES.init(EngineConfig(max_drafts=14))
