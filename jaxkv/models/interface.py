"""What the engine asks of a model, and the one call that its layers need.

A forward pass takes the packed rows of one step, writes their K and V to pages, and
returns logits. Any function with this signature can be served: `Forward` is a protocol,
and `attend` does the paged part of a layer.
"""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxkv.memory import kv_pages
from pallas_kernels.layered import Layer
from pallas_kernels.paged_attention import dispatch

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
    v: Float[Array, "rows kv_heads value_width"] | None,
    rows: kv_pages.Rows,
    *,
    scale: float | None = None,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    plan: dispatch.StepPlan | None = None,
) -> tuple[Float[Array, "rows q_heads value_width"], kv_pages.Pages]:
    """Writes one layer's K and V of the rows, then attends over the pages.

    Args:
      pages: K and V arrays, carried.
      layer: which layer of them, in [0, layers).
      q: queries, positions already encoded in them.
      k: keys, positions already encoded in them.
      v: values; None if the layout of the pages keeps them in the keys.
      rows: the packed rows.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: latest keys a row sees; None means all.
      numerics: "reproducible" gives a row the same bits in any batch.
      plan: result of `pages.layout.plan` for these rows, made once for all layers; None
        makes one in each layer where one is needed.

    Returns:
      The attention output of every row, 0 on padding rows; and the pages.
    """
    layout = pages.layout
    pages = layout.write(pages, layer, k, v, rows)
    options: Any = dict(scale=scale, window=window, numerics=numerics, plan=plan)
    return layout.attend(pages, layer, q, rows, **options), pages
