"""What the engine asks of a model, and the one call that its layers need.

A forward pass takes the packed rows of one step, writes their K and V to pages, and
returns logits. Any function with this signature can be served: `Forward` is a protocol,
and `attend` does the paged part of a layer.
"""

import functools
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv.memory import kv_pages, page_parts
from jaxkv.models.row_parts import WHOLE, RowParts
from pallas_kernels import quantizing
from pallas_kernels.layered import Layer
from pallas_kernels.paged_attention import api, dispatch

type Params = Any
"""A pytree of arrays: nested dicts, as `init_params` and `checkpoints` return them."""


class ForwardResult(NamedTuple):
    """What a forward pass returns."""

    logits: Float[Array, "logit_rows vocab"]
    """Next-token logits of `rows.logit_rows`, any numbers on unused ones. An infinity
    or NaN ends the request with the reason "nan", so masks belong into a `logits_fn`.
    """
    pages: kv_pages.Pages
    """The pages with K and V of every row written."""
    hidden: Float[Array, "logit_rows hidden"] | None = None
    """Last hidden states of the same rows, for drafting heads."""


@runtime_checkable
class Forward(Protocol):
    """A model as the engine sees it: hashable, and equal where it computes the same."""

    def __call__(
        self, params: Any, pages: kv_pages.Pages, rows: kv_pages.Rows
    ) -> ForwardResult:
        """Feeds the rows.

        Args:
          params: any pytree of arrays.
          pages: K and V arrays; return them updated, never a copy of another shape.
          rows: tokens, positions and slots; `rows.logit_rows` says whose logits to
            return, -1 where a logit row is unused.

        Returns:
          The logits and the written pages.
        """
        ...


def attend(
    pages: kv_pages.Pages,
    layer: Layer,
    q: Float[Array, "rows q_heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    rows: kv_pages.Rows,
    *,
    scale: float | None = None,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    plan: dispatch.StepPlan | None = None,
) -> tuple[Float[Array, "rows q_heads head_dim"], kv_pages.Pages]:
    """Writes one layer's K and V of the rows, then attends over the pages.

    Args:
      pages: K and V arrays, carried.
      layer: which layer of them, in [0, layers).
      q: queries, positions already encoded in them.
      k: keys, positions already encoded in them.
      v: values.
      rows: the packed rows.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: latest keys a row sees; None means all.
      numerics: "reproducible" gives a row the same bits in any batch.
      plan: what `plan_attention` returns for these rows, made once for all layers; None
        makes one in each layer where one is needed.

    Returns:
      The attention output of every row, 0 on padding rows; and the pages.
    """
    pages = kv_pages.write(pages, layer, k, v, rows)
    features: Any = dict(scale=scale, window=window, numerics=numerics, plan=plan)
    return attend_written(pages, layer, q, rows, **features), pages


def attend_written(
    pages: kv_pages.Pages,
    layer: Layer,
    q: Float[Array, "rows q_heads head_dim"],
    rows: kv_pages.Rows,
    *,
    window: int | None = None,
    parts: RowParts = WHOLE,
    **features: Any,
) -> Float[Array, "own q_heads head_dim"]:
    """Attends over the pages of a layer that has the rows' K and V, as `attend` does.

    Arguments are those of `attend`, and how rows are divided. Of pages in parts each
    device attends over its own, and the states are merged.

    Returns:
      The attention output of every row that the device has, 0 on padding rows.
    """
    (k_pages, k_scales), (v_pages, v_scales) = map(
        quantizing.parts, kv_pages.flat(pages)[:2]
    )
    rows = _seen_here(pages, rows)
    state = api.paged_attention(
        q,
        k_pages,
        v_pages,
        rows.page_ids,
        rows.position,
        rows.slot,
        context=rows.context,
        ancestors=rows.ancestors,
        k_scales=k_scales,
        v_scales=v_scales,
        layer=layer,
        num_layers=pages.num_layers,
        window=page_parts.window(window, part=pages.part),
        **features,
    )
    if page_parts.degree() > 1:
        merge = api.merge_devices if parts.num == 1 else api.merge_own_rows
        state = merge(state, page_parts.CONTEXT)
    return state.out


def _seen_here(pages: kv_pages.Pages, rows: kv_pages.Rows) -> kv_pages.Rows:
    """The rows with what they see of this device's parts of the pages."""
    if page_parts.degree() == 1:
        return rows
    last = functools.partial(page_parts.last, part=pages.part)
    position = last(rows.position)
    if rows.context is None or rows.ancestors is None:
        return rows._replace(position=position)
    # A tree's places that are here are columns side by side again, if fewer.
    start = jnp.where(rows.context >= 0, last(rows.context - 1) + 1, -1)
    column = jnp.arange(rows.ancestors.shape[1], dtype=jnp.int32)
    column = page_parts.whole(start[:, None] + column[None, :], part=pages.part)
    slot = jnp.maximum(kv_pages.slots_of(rows), 0)
    column = (column - rows.context[:, None])[slot]
    inside = (column >= 0) & (column < rows.ancestors.shape[1])
    kin = jnp.take_along_axis(rows.ancestors, jnp.where(inside, column, 0), axis=1)
    in_tree = rows.context[slot] >= 0
    # Of a row in a tree the position says no more than that it is no padding.
    is_row = in_tree & (rows.position >= 0)
    return rows._replace(
        position=jnp.where(is_row, jnp.maximum(position, 0), position),
        context=start,
        ancestors=kin & inside & in_tree[:, None],
    )


def plan_attention(
    pages: kv_pages.Pages,
    rows: kv_pages.Rows,
    *,
    num_q_heads: int,
    dtype: DTypeLike,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
) -> dispatch.StepPlan | None:
    """Prepares attention over the rows, for all layers; None where there is no need.

    `dtype` is that of the queries; window and numerics are those of `attend`.
    """
    head_dim, num_rows = pages.k.shape[-1], rows.position.shape[0]
    rows = _seen_here(pages, rows)
    return api.make_plan(
        jax.ShapeDtypeStruct((num_rows, num_q_heads, head_dim), dtype),
        jax.ShapeDtypeStruct(pages.k.shape[1:], pages.k.dtype),
        rows.page_ids,
        rows.position,
        rows.slot,
        context=rows.context,
        ancestors=rows.ancestors,
        window=page_parts.window(window, part=pages.part),
        numerics=numerics,
    )
