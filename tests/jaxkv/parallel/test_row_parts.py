"""Division of the rows of mixed passes: which rows, their cost and stored states."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import parallel
from jaxkv.memory import Rows
from jaxkv.models.layers import row_parts
from jaxkv.parallel import REPLICATED, make_mesh, map_over_mesh
from scaling.costs import Layout, prefill_traffic
from scaling.shapes import describe_config
from tests.support import engines, meshes

MIXED = meshes.chunk(*meshes.CHUNKS[0])
"""16 packed rows."""
EVENLY = MIXED._replace(
    position=jnp.asarray([*range(8), *range(5), -1, -1, -1], jnp.int32), slot=None
)
"""Eight rows for each slot, as in verification of drafts."""
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def dots(text: str) -> list[int]:
    """Returns the multiplications of each product in a compiled program."""
    sizes: dict[str, tuple[int, ...]] = {}
    products = []
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\w+\[[\d,]*\])", line)
        if match is None:
            continue
        name, shape = match.groups()
        inside = SHAPE.match(shape)
        assert inside is not None
        sizes[name] = tuple(int(x) for x in inside[1].split(",") if x)
        if (dot := re.search(r" dot\(.*?%([\w.-]+)[,)]", line)) is not None:
            along = re.search(r"lhs_contracting_dims=\{(\d+)\}", line)
            assert along is not None
            products.append(math.prod(sizes[name]) * sizes[dot[1]][int(along[1])])
    return products


@pytest.mark.parametrize(
    ("num", "rows", "rows_per_device"),
    [(4, MIXED, 4), (4, EVENLY, 16)],
    ids=["mixed", "verified"],
)
def test_products_of_a_mixed_pass_are_divided(
    num: int, rows: Rows, rows_per_device: int
) -> None:
    """Only attention has all rows on all devices."""
    c = dataclasses.replace(engines.MODEL, num_q_heads=8, mlp_size=44)
    run, *operands = meshes.divided(c, engines.params(c), make_mesh(context=num))
    products = dots(run.lower(*operands, rows).compile().as_text())
    qkv = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
    out = c.num_q_heads * c.head_dim * c.hidden_size
    up = 2 * c.mlp_size * c.hidden_size
    down = c.mlp_size * c.hidden_size
    for weight in (qkv, out, up, down):
        for num_rows in (4, 16):
            wanted = c.num_layers if num_rows == rows_per_device else 0
            assert products.count(weight * num_rows) == wanted


@pytest.mark.thorough
def test_stored_states_equal_one_device() -> None:
    """Keys, values, and features for drafting heads, at their places; and bytes."""
    c = engines.MODEL
    taps = (0, 2, 1)
    how = Layout(pages=2)
    outputs_by_mesh = []
    for mesh in (make_mesh(), make_mesh(context=how.pages)):
        run, *operands = meshes.divided(c, engines.params(c), mesh, taps=taps)
        program = run.lower(*operands, MIXED).compile()
        outputs_by_mesh.append(program(*operands, MIXED)[1])
    assert np.any(np.asarray(outputs_by_mesh[0].features))
    for one, other in zip(*map(jax.tree.leaves, outputs_by_mesh), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    formula = prefill_traffic(
        describe_config(c),
        how,
        rows=16,
        logit_rows=16,
        num_taps=len(taps),
        number_bytes=4,
    )
    sent = parallel.find_collectives(program.as_text())
    total = sum(collective.sent(rank=2) for collective in sent)
    assert total == sum(term.forward for term in formula) > 0


@pytest.mark.parametrize("num", [2, 4])
def test_rows_are_divided_and_gathered(num: int) -> None:
    """Rows are divided in order if they are packed, fast and divisible."""

    def part(x: Any) -> Any:
        def rows(num: int, slot: Any) -> Rows:
            return Rows(x[0, :num], x[0, :num], slot, x[:1], x[0, :1])

        packed = rows(8, x[0])
        wholes = (
            row_parts.divide_rows(rows(8, None)),
            row_parts.divide_rows(packed, "reproducible"),
            row_parts.divide_rows(rows(7, x[0, :7])),
        )
        assert {*wholes} == {row_parts.ALL_ROWS}
        parts = row_parts.divide_rows(packed)
        wide = x.astype(jnp.bfloat16)
        assert parts.num == num
        local_rows = parts.shard(wide)
        picked = parts.pick(local_rows, jnp.asarray([7, 0, 2, 2], jnp.int32))
        same = [row_parts.ALL_ROWS.shard(x), row_parts.ALL_ROWS.gather(x)]
        return local_rows, [parts.gather(local_rows), picked, *same]

    x = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    by_row = jax.sharding.PartitionSpec(None, "context")
    out_specs = by_row, REPLICATED
    run = map_over_mesh(part, make_mesh(context=num), (REPLICATED,), out_specs)
    local_rows, (full_rows, picked, *same) = jax.jit(run)(x)
    for gathered_rows in (local_rows, full_rows, *same):
        np.testing.assert_array_equal(gathered_rows.astype(x.dtype), x)
    np.testing.assert_array_equal(picked.astype(x.dtype), x[:, [7, 0, 2, 2]])
    assert picked.dtype == jnp.bfloat16
