"""Merged partial states, against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import merging

ROWS = 8
HEAD_DIM = 4


def merged(out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """State over the keys of all states along axis 0, in base 2."""
    total = np.exp2(lse).sum(0)
    weights = np.exp2(lse)[..., None] / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return (weights * out).sum(0), np.log2(total)


@pytest.mark.parametrize("num_parts", [0, 2, 3, 5, 12])
def test_parts_of_cut_items(num_parts: int) -> None:
    """Items of a line of programs, one of them over `num_parts`; the rest is NaN."""
    rng = np.random.default_rng(num_parts)
    programs = 13
    blocks = 3
    heads = 2
    items = blocks * heads
    out = np.full((blocks, heads, ROWS, HEAD_DIM), np.nan)
    lse = np.full((blocks, heads, ROWS), np.nan)
    part_out = np.full((programs, 2, ROWS, HEAD_DIM), np.nan)
    part_lse = np.full((programs, 2, ROWS), np.nan)
    parts = np.tile([0, 0], (items, 1))
    holders = np.full((programs, 2), -1)
    # Item 4 begins in program 0 and ends in a later one; item 1 is cut after it.
    if num_parts:
        parts[4] = (0, num_parts - 1)
        parts[1] = (num_parts - 1, num_parts)
        holders[0, 1] = 4
        holders[1:num_parts, 0] = 4
        holders[num_parts - 1, 1] = 1
        holders[num_parts, 0] = 1
    expected = {}
    for item in range(items):
        where = np.argwhere(holders == item)
        shape = (max(len(where), 1), ROWS)
        state = rng.standard_normal((*shape, HEAD_DIM)), 9 * rng.standard_normal(shape)
        # A row without keys in some part, and one without keys in any.
        state[1][0, 0] = -np.inf
        state[1][:, 1] = -np.inf
        state[0][:, 1] = 0
        expected[item] = merged(*state)
        block, head = divmod(item, heads)
        if len(where) == 0:
            out[block, head] = state[0][0]
            lse[block, head] = state[1][0]
            expected[item] = state[0][0], state[1][0]
        for i, (program, side) in enumerate(where):
            part_out[program, side] = state[0][i]
            part_lse[program, side] = state[1][i]
    states = (jnp.asarray(x, jnp.float32) for x in (out, lse, part_out, part_lse))
    got_out, got_lse = merging.merge_parts(
        merging.PartialStates(*states), jnp.asarray(parts, jnp.int32)
    )
    for item, (wanted_out, expected_lse) in expected.items():
        place = divmod(item, heads)
        np.testing.assert_allclose(got_out[place], wanted_out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_lse[place], expected_lse, rtol=1e-6, atol=1e-6)


def test_sinks() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 2, 5))
    values = rng.standard_normal((3, 2, 5, 4))
    sinks = np.asarray([-1.0, 2.0])
    total = np.exp(scores).sum(-1)
    out = (np.exp(scores)[..., None] * values).sum(2) / total[..., None]
    lse = np.log(total)
    out[0] = 0
    lse[0] = -np.inf
    got_out, got_lse = merging.add_sinks(
        *(jnp.asarray(x, jnp.float32) for x in (out, lse, sinks))
    )
    share = total / (total + np.exp(sinks))
    np.testing.assert_allclose(got_out, out * share[..., None], rtol=1e-5)
    np.testing.assert_allclose(
        got_lse[1:], np.log(total + np.exp(sinks))[1:], rtol=1e-5
    )
    assert (np.asarray(got_lse[0]) == -np.inf).all()
