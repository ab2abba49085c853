"""KV layouts of one leaf: a subclass, and values that are the first part of the keys.

The latter has a model, whose query heads share a row per token; in 8 bits a row has one
scale.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.memory import DEFAULT_LAYOUT, KVLayout, Pages, Rows
from jaxkv.models import ForwardResult

VOCAB = 61
WIDTH = 12
VALUE_WIDTH = 8
Q_HEADS = 4


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class JoinedLayout(KVLayout):
    """Key and value of a token and head side by side: `[..., 2 * head_dim]`."""

    def make(self, shape: tuple[int, ...], dtype: Any) -> Pages:
        return Pages(jnp.zeros((*shape[:4], 2 * shape[4]), dtype), None, self)

    def write(self, pages: Pages, layer: Any, k: Any, v: Any, rows: Rows) -> Pages:
        row = jnp.concatenate([k, v], axis=-1)
        one_leaf = KVLayout(value_width=k.shape[-1])
        return one_leaf.write(pages, layer, row, None, rows)

    def read(self, pages: Pages, layer: Any, page_ids: Any) -> tuple[Any, Any]:
        return DEFAULT_LAYOUT.read(_split(pages), layer, page_ids)

    def plan(self, *args: Any, **options: Any) -> None:
        """Prepares nothing: `attend` makes its plan."""

    def attend(
        self, pages: Pages, layer: Any, q: Any, rows: Rows, **options: Any
    ) -> jax.Array:
        return DEFAULT_LAYOUT.attend(_split(pages), layer, q, rows, **options)


def _split(pages: Pages) -> Pages:
    k, v = jnp.split(pages.k, 2, axis=-1)
    return Pages(k, v, DEFAULT_LAYOUT)


def make_pages(config: Any, *, num_layers: int = 2) -> Pages:
    """Makes pages for `forward` in the configured `kv_dtype`."""
    layout = KVLayout(config.kv_dtype, VALUE_WIDTH)
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
