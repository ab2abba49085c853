"""A layout of one leaf, whose values are the first part of the keys, and a model of it.

No code outside this file knows it: it goes through an engine by `KVLayout` alone.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxkv.memory import page_parts
from jaxkv.memory.kv_layout import (
    attend_leaves,
    make_leaf,
    plan_leaves,
    read_leaf,
    write_leaf,
)
from jaxkv.memory.kv_pages import Pages, Rows, locate
from jaxkv.models import ForwardResult

VOCAB, WIDTH, VALUE_WIDTH, Q_HEADS = 61, 12, 8, 4


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RowLayout:
    """A row for each token, the same for all query heads; in 8 bits with its scale."""

    value_width: int = VALUE_WIDTH
    kv_dtype: Literal["model", "int8", "fp8"] = "model"

    def make(self, shape: tuple[int, ...], dtype: Any) -> Pages:
        return Pages(make_leaf(shape, dtype, self.kv_dtype), None, self)

    def write(self, pages: Pages, layer: Any, k: Any, v: Any, rows: Rows) -> Pages:
        assert v is None
        places = locate(rows, page_size=pages.page_size)
        return pages._replace(k=write_leaf(pages.k, layer, k, *places))

    def read(self, pages: Pages, layer: Any, page_ids: Any) -> tuple[Any, Any]:
        k = read_leaf(pages.k, layer, page_ids)
        return k, k[..., : self.value_width]

    def plan(self, pages: Pages, rows: Rows, **options: Any) -> Any:
        return plan_leaves(
            pages, rows, pages.k, value_width=self.value_width, **options
        )

    def attend(
        self, pages: Pages, layer: Any, q: Any, rows: Rows, **options: Any
    ) -> jax.Array:
        options = {"value_width": self.value_width, **options}
        return attend_leaves(pages, layer, q, rows, pages.k, None, **options)

    def specs(self, pages: Pages, *, heads: str) -> Any:
        spec = PartitionSpec(None, None, None, page_parts.CONTEXT)
        return pages._replace(k=spec)


def make_pages(config: Any, *, num_layers: int = 2) -> Pages:
    """Pages for `forward`, in the `kv_dtype` of the engine's bounds."""
    layout = RowLayout(kv_dtype=config.kv_dtype)
    shape = num_layers, config.num_pages, 1, config.page_size, WIDTH
    return layout.make(shape, "float32")


@functools.cache
def params() -> dict[str, jax.Array]:
    shapes = {
        "embed": (VOCAB, 16),
        "query": (2, 16, Q_HEADS * WIDTH),
        "row": (2, 16, WIDTH),
        "out": (2, Q_HEADS * VALUE_WIDTH, 16),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) * 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def forward(params: Any, pages: Pages, rows: Rows) -> ForwardResult:
    """Two layers of attention over rows; the first numbers encode the position."""
    x = params["embed"][rows.token]
    pace = jnp.arange(1, 17, dtype=jnp.float32)[None, :] / 7
    x = x + jnp.sin(jnp.maximum(rows.position, 0).astype(jnp.float32)[:, None] * pace)
    for layer in range(2):
        q = (x @ params["query"][layer]).reshape(-1, Q_HEADS, WIDTH)
        row = (x @ params["row"][layer])[:, None, :]
        pages = pages.layout.write(pages, layer, row, None, rows)
        out = pages.layout.attend(pages, layer, q, rows)
        x = x + out.reshape(len(x), -1) @ params["out"][layer]
    return ForwardResult(x[jnp.maximum(rows.logit_rows, 0)] @ params["embed"].T, pages)
