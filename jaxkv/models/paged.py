"""A model for the engine: its pages, and its forward pass over packed rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.memory import features, kv_layout, kv_pages
from jaxkv.models import interface, rotary, row_parts, transformer
from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Params
from jaxkv.models.layers import Numerics
from pallas_kernels.page_ops import rotary_write
from pallas_kernels.paged_attention.dispatch import StepPlan


@runtime_checkable
class Bounds(Protocol):
    """What of an `EngineConfig` says how many K and V there are."""

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def page_size(self) -> int:
        """Token places in a page."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of a sequence at most."""
        ...

    @property
    def kv_dtype(self) -> Literal["model", "int8", "fp8"]:
        """As `kv_layout.make_pages` takes it."""
        ...


def make_pages(
    config: ModelConfig,
    engine: Bounds,
    *,
    dtype: DTypeLike = "float32",
    taps: tuple[int, ...] = (),
) -> kv_pages.Pages:
    """K and V arrays of a model for an engine, and features if its states are tapped.

    Warns where the engine's `max_length` is past a model's rotary positions.

    Raises:
      ValueError: it is past a model's learned positions.
    """
    config.check_length(engine.max_length, "max_length")
    return kv_layout.make_pages(
        num_layers=config.num_layers,
        num_pages=engine.num_pages,
        num_kv_heads=config.num_kv_heads,
        page_size=engine.page_size,
        head_dim=config.head_dim,
        dtype=dtype,
        kv_dtype=engine.kv_dtype,
        num_features=len(taps) * config.hidden_size,
    )


@dataclasses.dataclass(frozen=True)
class PagedForward:
    """The engine's forward pass for a `ModelConfig`: packed rows over pages.

    An instance is hashable and equal to any other of the same config, so it is a static
    argument that never causes a second compilation.
    """

    config: ModelConfig
    numerics: Numerics = "fast"
    layers: tuple[int, ...] | None = None
    """Layers that are run, as self-speculation drafts; None runs all."""
    taps: tuple[int, ...] = ()
    """Layers whose inputs are kept of every row in `Pages.features`, side by side;
    `num_layers` stands for the last hidden state, normed."""
    attend: Callable[..., Float[Array, "rows q_heads value_width"]] | None = None
    """Replaces `KVLayout.attend`, to time a step without it; None means that of the
    pages' layout."""

    def __post_init__(self) -> None:
        """Refuses layers and taps that the model does not have.

        Raises:
          ValueError: names them.
        """
        validation.settle(self)
        for layer in self.layers or ():
            if not 0 <= layer < self.config.num_layers:
                raise ValueError(
                    f"layers={self.layers!r} must be in [0, "
                    f"config.num_layers={self.config.num_layers})"
                )
        for tap in self.taps:
            if not 0 <= tap <= self.config.num_layers:
                raise ValueError(
                    f"taps={self.taps!r} must be in [0, "
                    f"config.num_layers={self.config.num_layers}]"
                )
        if self.taps and self.layers is not None:
            raise ValueError(
                f"taps={self.taps!r} needs all layers, not layers={self.layers!r}"
            )

    def __call__(
        self, params: Params, pages: kv_pages.Pages, rows: kv_pages.Rows
    ) -> interface.ForwardResult:
        """Writes the rows' K and V, attends over the pages, returns the wanted logits.

        Args:
          params: as `init_params` returns them.
          pages: K and V arrays of `num_layers` layers, with features if there are
            taps.
          rows: the packed rows of one step.

        Returns:
          Logits of `rows.logit_rows`, the written pages, and the hidden states of the
          same rows.
        """
        if (kin := rows.ancestors) is not None and self.config.window is not None:
            # So near, places say as much as positions do about who is too far back.
            if self.config.window <= (num_drafts := kin.shape[1]):
                window = self.config.window
                raise ValueError(f"{window=} must be above {num_drafts=} of a tree")
        model = transformer.merge(self.config, params)
        parts = row_parts.divide(rows, self.numerics)
        found = self.states(model, pages, rows)
        pages = found.carry
        if self.taps:
            tapped = parts.whole(jnp.concatenate(found.taps))
            pages = features.write(pages, tapped.T, rows)
        hidden = parts.pick(found.last, jnp.maximum(rows.logit_rows, 0))
        return interface.ForwardResult(model.logits(hidden), pages, hidden.T)

    def states(
        self,
        model: transformer.Transformer,
        pages: kv_pages.Pages,
        rows: kv_pages.Rows,
        inputs: Float[Array, "hidden own"] | None = None,
    ) -> transformer.States:
        """Runs the layers: writes K and V of the rows, and attends over the pages.

        `inputs` go into the first layer instead of the rows' tokens. These and the
        states are of the rows that `row_parts.divide` gives this device; what is
        carried is the pages.
        """
        parts = row_parts.divide(rows, self.numerics)
        dtype = model.embed.weight[...].dtype
        sees: Any = {"window": self.config.window, "numerics": self.numerics}
        plan = pages.layout.plan(
            pages,
            rows,
            num_q_heads=pages.num_kv_heads * self.config.group_size,
            dtype=dtype,
            **sees,
        )
        run, sees["own_rows"] = self.attend or pages.layout.attend, parts.num > 1
        positions = jnp.maximum(rows.position, 0)
        write = self._writer(pages, rows, plan, dtype)
        turned = rotary.angles(self.config, positions, dtype) if parts.num > 1 else None

        def attend(layer, qkv, angles, pages):
            if parts.num > 1:  # every device writes and encodes all rows
                qkv, angles = parts.whole(qkv), turned
            q, packed_q, pages = write(layer, qkv, angles, pages)
            out = run(pages, layer, q, rows, packed_q=packed_q, plan=plan, **sees)
            by_head = *qkv[:, :-2].shape[:2], -1, out.shape[0]
            return out.transpose(1, 2, 0).reshape(by_head), pages

        return model.hidden(
            parts.own(rows.token),
            parts.own(positions),
            attend,
            pages,
            inputs=inputs,
            live=parts.own(rows.position) >= 0,
            numerics=self.numerics,
            only=self.layers,
            taps=self.taps,
        )

    def _writer(
        self,
        pages: kv_pages.Pages,
        rows: kv_pages.Rows,
        plan: StepPlan | None,
        dtype: DTypeLike,
    ) -> Callable:
        """How a layer encodes positions and writes K and V: one kernel, or several."""
        c, num_kv_heads = self.config, pages.num_kv_heads
        heads = num_kv_heads, c.group_size + 2, c.head_dim
        qkv = jax.ShapeDtypeStruct((rows.position.shape[0], *heads), dtype)
        num_rows = rows.position.shape[0]
        if c.positions != "rope" or not kv_layout.can_rotate_and_write(pages, qkv):

            def write_apart(layer, qkv, angles, pages):
                q, k, v = (
                    x.reshape(-1, *x.shape[-2:]).transpose(2, 0, 1)
                    for x in rotary.parts(qkv, angles)
                )
                return q, None, pages.layout.write(pages, layer, k, v, rows)

            return write_apart
        # Once a pass, for all layers.
        page, offset = kv_pages.locate(rows, page_size=pages.page_size)
        row = rotary_write.query_rows(num_rows, num_kv_heads * c.group_size)
        turned = rotary.angles(c, jnp.maximum(rows.position[row], 0), dtype)
        assert turned is not None
        shape = num_rows, num_kv_heads, c.group_size, -1
        cos_sin = rotary_write.RotaryCosSin(*(x.T.reshape(shape) for x in turned))

        few = None if plan is None else plan.few
        places = page, offset, None if few is None else few.packing

        def write(layer, qkv, angles, pages):
            qkv = qkv.transpose(3, 0, 1, 2)
            found, pages = kv_layout.rotate_and_write(
                pages, layer, qkv, cos_sin, *places
            )
            q = found.q.reshape(found.q.shape[0], -1, found.q.shape[3])
            return q, found.packed_q, pages

        return write
