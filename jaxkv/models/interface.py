"""Interface between the engine and a model, and the attention call of a layer.

A forward pass takes the packed rows of one step, writes their K and V to pages, and
returns logits. The engine serves any function with this signature: `Forward` is a
protocol, and `attend` computes the paged attention of a layer.
"""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.memory import Pages, Rows
from pallas_kernels.layered import Layer
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import StepPlan

type Params = PyTree[ArrayOrShape]
"""A pytree of arrays: nested dicts, as `init_params` and `checkpoints` return them."""


EndTokens = Literal["union", "generation_config"]
"""Source of the tokens that end a text, see `checkpoints.load_model`."""


class ForwardResult(NamedTuple):
    """Result of a forward pass."""

    logits: Float[Array, "logit_rows vocab"]
    """Next-token logits of `rows.logit_rows`, arbitrary numbers on unused rows. An
    infinity or NaN ends the request with the reason "nan", so apply masks in a
    `logits_fn`."""
    pages: Pages
    """The pages with K and V of every row."""
    hidden: Float[Array, "logit_rows hidden"] | None = None
    """Last hidden states of the same rows, for drafting heads."""


@runtime_checkable
class Forward(Protocol):
    """A model for the engine: hashable, and equal to models that compute the same."""

    def __call__(self, params: Params, pages: Pages, rows: Rows) -> ForwardResult:
        """Runs the model on the rows.

        Args:
          params: any pytree of arrays.
          pages: K and V arrays; the result has them updated, in the same shapes.
          rows: tokens, positions and slots; `rows.logit_rows` has the rows whose logits
            are returned, -1 for unused entries.

        Returns:
          The logits and the updated pages.
        """
        ...


@validation.checks_numbers(layer=0)
def attend(
    pages: Pages,
    layer: Layer,
    q: Float[Array, "rows q_heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads value_width"] | None,
    rows: Rows,
    *,
    scale: float | None = None,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    plan: StepPlan | None = None,
) -> tuple[Float[Array, "rows q_heads value_width"], Pages]:
    """Writes one layer's K and V of the rows, and computes attention over the pages.

    Args:
      pages: K and V arrays, carried.
      layer: index of the layer, in [0, layers).
      q: queries with encoded positions.
      k: keys with encoded positions.
      v: values; None if the layout of the pages keeps them in the keys.
      rows: the packed rows.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: number of latest keys that a row sees; None means all.
      numerics: "reproducible" gives a row the same bits in any batch.
      plan: result of `pages.layout.plan` for these rows, made once for all layers; None
        makes one in each layer that needs it.

    Returns:
      The attention output of every row, 0 on padding rows; and the pages.
    """
    layout = pages.layout
    pages = layout.write(pages, layer, k, v, rows)
    scoring = None if scale is None else ScoreTransform(scale)
    out = layout.attend(
        pages,
        layer,
        q,
        rows,
        scoring=scoring,
        window=window,
        numerics=numerics,
        plan=plan,
    )
    return out, pages
