"""A transformer for the engine: its pages, and its forward pass over packed rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkv import memory, validation
from jaxkv.memory import (
    Pages,
    Rows,
    WindowLayers,
    can_rotate_and_write,
    make_pages,
    query_places,
    rotate_and_write,
    write_features,
    write_queries,
    write_routes,
)
from jaxkv.models import interface, rotary, transformer
from jaxkv.models.config import AttentionKind, ModelConfig
from jaxkv.models.interface import Params
from jaxkv.models.layers import (
    Numerics,
    RecurrentProjection,
    divide_rows,
    run_recurrent_rows,
    zero_state,
)
from pallas_kernels.page_ops import RotaryCosSin, query_rows
from pallas_kernels.paged_attention import StepPlan


@runtime_checkable
class PageConfig(Protocol):
    """The fields of an `EngineConfig` that determine the size of the pages."""

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
        """Largest length of a sequence in tokens."""
        ...

    @property
    def num_states(self) -> int:
        """States of recurrent layers."""
        ...

    @property
    def release_window_pages(self) -> bool:
        """True if layers with a window have pages of their own."""
        ...

    @property
    def max_slots(self) -> int:
        """Largest number of running sequences."""
        ...

    @property
    def evict(self) -> memory.EvictionRule | None:
        """Rule of KV eviction; None if there is none."""
        ...

    @property
    def evict_budget(self) -> int:
        """Tokens that each head keeps or reads."""
        ...

    @property
    def evict_window(self) -> int:
        """Last tokens whose queries the rule reads."""
        ...

    def num_window_pages(self, window: int) -> int:
        """Returns the pages of layers with a window."""
        ...

    @property
    def kv_dtype(self) -> Literal["model", "int8", "fp8"]:
        """Dtype of K and V, as in `kv_layout.make_pages`."""
        ...


def make_model_pages(
    config: ModelConfig,
    engine: PageConfig,
    *,
    dtype: DTypeLike = "float32",
    taps: tuple[int, ...] = (),
    record_routes: bool = False,
) -> Pages:
    """Makes the K and V arrays of a model for an engine, and features for `taps`.

    With `record_routes`, the experts of every token are stored as well.

    Recurrent layers have `num_states` states, and no pages. With the engine's
    `release_window_pages`, layers with a window have `Pages.windowed`.

    With latent attention a token has one row of `kv_rank + rope_dim` numbers per layer,
    whose first `kv_rank` numbers are the values of all query heads.

    Warns if the engine's `max_length` exceeds the model's rotary positions.

    Raises:
      ValueError: `max_length` exceeds the model's learned positions, a model without
        experts is to record routes, or one without windows to release pages; or tokens
        cannot be evicted from the cache of the model.
    """
    if engine.evict is not None:
        _check_eviction(config, engine.evict)
    config.check_length(engine.max_length, "max_length")
    experts = config.experts
    if record_routes and experts is None:
        raise ValueError(f"{record_routes=} must be False for a model without experts")
    heads = config.num_kv_heads
    width = config.head_dim
    latent = config.latent
    if latent is not None:
        heads = 1
        width = latent.kv_rank + latent.rope_dim
    if len(config.kv_groups) > 2:
        raise ValueError(
            f"{len(config.kv_groups)} sizes of KV heads in a model must be at most 2"
        )
    if not config.attention_layers:
        raise ValueError("a model must have a layer with attention to be served")
    windowed = None
    if engine.release_window_pages:
        windows = [x for x in config.windows if x is not None]
        missing = None
        if not windows:
            missing = "without windows"
        elif config.recurrence is not None:
            missing = "with recurrent layers"
        elif config.has_special_layers:
            missing = "whose layers have sizes of their own or share K and V"
        if missing is not None:
            raise ValueError(
                f"release_window_pages=True must be False for a model {missing}"
            )
        window = max(windows)
        num_pages = engine.num_window_pages(window)
        windowed = WindowLayers(len(windows), num_pages, window)
    first, *second = config.kv_groups
    if latent is None:
        sizes = config.of_kind(config.attention_kinds[config.kind_of(first[0])])
        heads = sizes.num_kv_heads
        width = sizes.head_dim
    make = functools.partial(
        make_pages,
        num_pages=engine.num_pages,
        page_size=engine.page_size,
        dtype=dtype,
        kv_dtype=engine.kv_dtype,
    )
    pages = make(
        num_layers=len(first),
        num_kv_heads=heads,
        head_dim=width,
        value_width=None if latent is None else latent.kv_rank,
        num_features=len(taps) * config.hidden_size,
        num_mixtures=config.num_mixtures if record_routes else 0,
        top_k=0 if experts is None else experts.top_k,
        windowed=windowed,
    )
    for layers in second:
        sizes = config.of_kind(config.attention_kinds[config.kind_of(layers[0])])
        other = make(
            num_layers=len(layers),
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
        )
        pages = pages._replace(other_heads=other)
    if engine.evict in memory.READS_QUERIES:
        size = config.num_layers, engine.max_slots, engine.evict_window
        pages = pages._replace(
            queries=jnp.zeros((*size, config.num_q_heads, width), dtype)
        )
    if engine.evict == "h2o":
        size = config.num_layers, engine.num_pages, heads, engine.page_size
        pages = pages._replace(attention=jnp.zeros(size, jnp.float32))
    if engine.evict == "quest":
        size = config.num_layers, engine.num_pages, heads, 2, width
        num_selected = engine.evict_budget // engine.page_size
        pages = pages._replace(
            layout=memory.PageSelection(num_selected=num_selected),
            key_bounds=jnp.zeros(size, dtype),
        )
    if config.recurrence is None:
        return pages
    shape = len(config.recurrent_layers), engine.num_states
    return pages._replace(states=zero_state(config.recurrence, shape, dtype))


def _check_eviction(config: ModelConfig, rule: memory.EvictionRule) -> None:
    """Raises a ValueError if tokens cannot be evicted from the cache of a model."""
    obstacle = None
    if config.recurrence is not None:
        obstacle = "with recurrent layers"
    elif config.latent is not None:
        obstacle = "with latent attention, whose heads share one row"
    elif any(window is not None for window in config.windows):
        obstacle = "with sliding windows"
    elif config.has_special_layers:
        obstacle = "whose layers have sizes of their own or share K and V"
    elif rule in (*memory.READS_QUERIES, "quest") and (
        config.sinks or config.score_cap is not None
    ):
        obstacle = "with sinks or capped scores"
    if obstacle is not None:
        raise ValueError(f"evict={rule!r} must be None for a model {obstacle}")


@dataclasses.dataclass(frozen=True)
class PagedForward:
    """The engine's forward pass of a `ModelConfig`: packed rows over pages.

    An instance is hashable and equal to instances of the same config, so as a static
    argument it never causes a second compilation.
    """

    config: ModelConfig
    numerics: Numerics = "fast"
    layers: tuple[int, ...] | None = None
    """Layers to run, as for drafts of self-speculation; None runs all."""
    taps: tuple[int, ...] = ()
    """Layers whose inputs are stored for every row in `Pages.features`, concatenated;
    `num_layers` means the last hidden state after its norm."""
    attend: Callable[..., Float[Array, "rows q_heads value_width"]] | None = None
    """Replacement of `KVLayout.attend`, such as one with `long_runs`; None uses the
    layout's."""

    def __post_init__(self) -> None:
        """Checks that the model has the layers and taps.

        Raises:
          ValueError: a layer or tap does not exist; the message has the values.
        """
        validation.check_fields(self)
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
        if self.layers is not None and self.config.recurrence is not None:
            raise ValueError(
                f"layers={self.layers!r} must be None for a model with recurrent layers"
            )
        shares_kv = any(kind.shares_kv for kind in self.config.other_attention)
        if self.layers is not None and shares_kv:
            raise ValueError(
                f"layers={self.layers!r} must be None for a model whose layers share K "
                "and V"
            )
        if self.taps and self.layers is not None:
            raise ValueError(
                f"taps={self.taps!r} needs all layers, not layers={self.layers!r}"
            )

    def __call__(
        self, params: Params, pages: Pages, rows: Rows
    ) -> interface.ForwardResult:
        """Writes the rows' K and V, runs the layers, and returns the requested logits.

        Args:
          params: parameters as returned by `init_params`.
          pages: K and V arrays of `num_layers` layers, with features if there are taps.
          rows: the packed rows of one step.

        Returns:
          Logits of `rows.logit_rows`, the updated pages, and the hidden states of the
          same rows.
        """
        windows = [x for x in self.config.windows if x is not None]
        if rows.ancestors is not None and self.config.recurrence is not None:
            raise ValueError("recurrent layers take chains of drafts, no token trees")
        if (kin := rows.ancestors) is not None and windows:
            # With a larger window, places and positions exclude the same keys.
            if (window := min(windows)) <= (num_drafts := kin.shape[1]):
                raise ValueError(f"{window=} must be above {num_drafts=} of a tree")
        model = transformer.merge(self.config, params)
        parts = divide_rows(rows, self.numerics)
        layer_pass = self.states(model, pages, rows)
        pages = layer_pass.carry
        if self.taps:
            tapped = parts.gather(jnp.concatenate(layer_pass.taps))
            pages = write_features(pages, tapped.T, rows)
        if pages.routes is not None and self.layers is None:
            routes = [routing.expert for routing in layer_pass.routings]
            routes = jnp.stack(routes, axis=1)
            columns = parts.gather(routes.reshape(routes.shape[0], -1).T)
            routes = columns.T.reshape(-1, *routes.shape[1:])
            pages = write_routes(pages, routes, rows)
        hidden = parts.pick(layer_pass.last, jnp.maximum(rows.logit_rows, 0))
        if self.numerics == "fast":
            return interface.ForwardResult(model.logits(hidden), pages, hidden.T)
        barrier = jax.lax.optimization_barrier
        hidden = barrier(hidden)
        logits = barrier(model.logits(hidden))
        return interface.ForwardResult(logits, pages, hidden.T)

    def states(
        self,
        model: transformer.Transformer,
        pages: Pages,
        rows: Rows,
        inputs: Float[Array, "hidden own"] | None = None,
        routes: Int32[Array, "rows mixtures top_k"] | None = None,
    ) -> transformer.States:
        """Runs the layers: writes K and V of the rows, and attends over the pages.

        If given, `routes` are the experts of the rows, see `moe.route`, on one device
        per row, and `inputs` replace the embeddings of the rows' tokens. They and the
        states belong to the rows that `divide_rows` assigns to this device;
        the carry of the result is the pages.
        """
        parts = divide_rows(rows, self.numerics)
        dtype = model.embed.weight[...].dtype
        config = self.config
        # Of this device.
        attention = next(
            x for x in model.layers if x.has_mixer and x.recurrence is None
        )
        num_q_heads = attention.out.weight.shape[-1] // attention.config.value_dim
        # Field of the pages of each kind of layers; None for `pages` itself.
        group_of: dict[AttentionKind, str | None] = {}
        groups: dict[str | None, list[int]] = {}
        for number, layers in enumerate(config.kv_groups):
            for layer in layers:
                kind = config.attention_kinds[config.kind_of(layer)]
                name = "other_heads" if number else None
                if kind.window is not None and pages.windowed is not None:
                    name = "windowed"
                group_of[kind] = name
                groups.setdefault(name, []).append(layer)
        for kind in config.attention_kinds:
            if kind.shares_kv:
                source = config.attention_kinds[config.kv_source(kind)]
                group_of[kind] = group_of[source]

        if pages.windowed is not None and rows.window_ids is None:
            raise ValueError("rows must have window_ids for pages with windowed pages")

        def select(name: str | None, pages: Pages) -> tuple[Pages, Rows]:
            """Returns the pages of a group, and rows with its page table."""
            if name is None:
                return pages, rows
            if name == "windowed":
                assert rows.window_ids is not None
                return getattr(pages, name), rows._replace(page_ids=rows.window_ids)
            return getattr(pages, name), rows

        def plan_for(name: str | None, window: int | None) -> StepPlan | None:
            group_pages, group_rows = select(name, pages)
            return group_pages.layout.plan(
                group_pages,
                group_rows,
                num_q_heads=num_q_heads,
                dtype=dtype,
                window=window,
                numerics=self.numerics,
            )

        ring = None
        if pages.queries is not None:
            ring = query_places(rows, window=pages.queries.shape[2])
        run = self.attend or pages.layout.attend
        positions = jnp.maximum(rows.position, 0)
        kinds = [*dict.fromkeys(x for x in config.attention_kinds if x in group_of)]
        plans = {
            place: plan_for(*place)
            for place in dict.fromkeys((group_of[x], x.window) for x in kinds)
        }
        writers = {
            kind: self._writer(
                *select(group_of[kind], pages),
                plans[group_of[kind], kind.window],
                dtype,
                kind,
            )
            for kind in kinds
        }
        turned = {
            kind: rotary.angles(config, positions, dtype, attention=kind)
            for kind in kinds
            if parts.num > 1
        }

        def attend(layer, qkv, angles, pages):
            kind = layer.kind
            name = group_of.get(kind)
            sort = config.recurrent_layers if kind.is_recurrent else groups[name]
            if len(sort) < config.num_layers:
                # The number of the layer, or of that with its K and V, in its sort.
                every = [config.kv_layer(x) for x in range(config.num_layers)]
                numbers = np.searchsorted(sort, every).astype(np.int32)
                layer = layer._replace(index=jnp.asarray(numbers)[layer.index])
            if isinstance(qkv, RecurrentProjection):
                y, states = run_recurrent_rows(
                    qkv, pages.states, layer.index, rows, numerics=self.numerics
                )
                return y, pages._replace(states=states)
            if parts.num > 1:  # every device encodes and writes all rows
                qkv = rotary.map_row_arrays(parts.gather, qkv)
                angles = turned[kind]
            group_pages, group_rows = select(name, pages)
            q, packed_q, group_pages = writers[kind](
                layer.index, qkv, angles, group_pages
            )
            pages = (
                group_pages if name is None else pages._replace(**{name: group_pages})
            )
            if ring is not None:
                scale = layer.scoring.scale
                pages = write_queries(pages, layer.index, q, ring, scale)
                group_pages = pages
            out = run(
                group_pages,
                layer.index,
                q,
                group_rows,
                scoring=layer.scoring,
                window=kind.window,
                numerics=self.numerics,
                packed_q=packed_q,
                plan=plans[name, kind.window],
                own_rows=parts.num > 1,
            )
            if isinstance(qkv, rotary.QueryProjection):
                q_shape = qkv.q.shape[:2]
            elif not isinstance(qkv, rotary.LatentProjection):
                q_shape = qkv[:, :-2].shape[:2]
            if isinstance(qkv, rotary.LatentProjection):
                return rotary.expand_mean_latents(qkv, out), pages
            by_head = *q_shape, -1, out.shape[0]
            return out.transpose(1, 2, 0).reshape(by_head), pages

        return model.hidden(
            parts.shard(rows.token),
            parts.shard(positions),
            attend,
            pages,
            inputs=inputs,
            live=parts.shard(rows.position) >= 0,
            numerics=self.numerics,
            only=self.layers,
            taps=self.taps,
            routes=routes,
            adapter=None if rows.adapter is None else parts.shard(rows.adapter),
        )

    def _writer(
        self,
        pages: Pages,
        rows: Rows,
        plan: StepPlan | None,
        dtype: DTypeLike,
        kind: AttentionKind,
    ) -> Callable:
        """Returns a function that encodes positions and writes K and V of a layer.

        It launches one kernel if `can_rotate_and_write`, else several. Queries of
        latent attention are absorbed in any pass, so that a row has the same bits in a
        pass of decoding and in one with chunks of prompts.
        """
        c = self.config.of_kind(kind)
        num_kv_heads = pages.num_kv_heads
        if kind.shares_kv:

            def rotate_only(layer, projection, angles, pages):
                q = rotary.rotate_queries(projection, angles)
                return q.reshape(-1, *q.shape[-2:]).transpose(2, 0, 1), None, pages

            return rotate_only
        if c.latent is not None:

            def absorb_then_write(layer, projection, angles, pages):
                q, row = rotary.absorb_latent(projection, angles)
                return q, None, pages.layout.write(pages, layer, row, None, rows)

            return absorb_then_write
        heads = num_kv_heads, c.group_size + 2, c.head_dim
        qkv = jax.ShapeDtypeStruct((rows.position.shape[0], *heads), dtype)
        num_rows = rows.position.shape[0]
        is_plain = kind.positions == "rope" and c.score_growth is None
        if not is_plain or not can_rotate_and_write(pages, qkv):

            def rotate_then_write(layer, qkv, angles, pages):
                q, k, v = (
                    x.reshape(-1, *x.shape[-2:]).transpose(2, 0, 1)
                    for x in rotary.split_and_rotate(qkv, angles)
                )
                return q, None, pages.layout.write(pages, layer, k, v, rows)

            return rotate_then_write
        # Computed once per pass, for all layers.
        page, offset = memory.locate(rows, page_size=pages.page_size)
        row = query_rows(num_rows, num_kv_heads * c.group_size)
        position = jnp.maximum(rows.position[row], 0)
        turned = rotary.angles(c, position, dtype, attention=kind)
        assert turned is not None
        shape = num_rows, num_kv_heads, c.group_size, -1
        cos_sin = RotaryCosSin(*(x.T.reshape(shape) for x in (turned.cos, turned.sin)))

        few = None if plan is None else plan.few
        places = page, offset, None if few is None else few.packing

        def write(layer, qkv, angles, pages):
            qkv = qkv.transpose(3, 0, 1, 2)
            rotated_rows, pages = rotate_and_write(pages, layer, qkv, cos_sin, *places)
            q = rotated_rows.q.reshape(
                rotated_rows.q.shape[0], -1, rotated_rows.q.shape[3]
            )
            return q, rotated_rows.packed_q, pages

        return write
