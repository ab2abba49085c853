"""Decoder-only transformers, dense and mixtures: parameters and one forward pass.

Only this module and `layers` use flax. Every row of the activations is one token; only
`attend` knows the sequence of a row, so the same layers serve training (whole
sequences) and the engine (packed rows over pages). Activations are columns, `[features,
rows]`, unless an `Orientation` with rows is passed.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.models import initialization, moe, nonlinear, param_forms, rotary
from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Params
from jaxkv.models.layers import (
    Activations,
    Layer,
    LayerAttention,
    Linear,
    Norm,
    Numerics,
    Orientation,
    RecurrentProjection,
    run_batch,
)
from pallas_kernels.flash_attention import flash_attention

type Attend[C] = Callable[
    [LayerAttention, Any, rotary.Angles | None, C],
    tuple[Float[Array, "..."], C],
]
"""`attend(layer, qkv, angles, carry) -> (out, carry)`: the attention of a layer.

    It is the only function that combines rows. `qkv` is `[kv_heads, group + 2,
    head_dim, rows]`, or the form of an `Orientation` with rows: for each KV head the
    group's queries, the key and the value, without positions; or a
    `rotary.LatentProjection`. `angles` encode the positions; None if they are learned.
    `out` has the queries' outputs."""

BY_COLUMNS = Orientation()

SHARED_PARAMS = ("embed", "embed_positions", "head")
"""Parameters that drafting layers share with their model."""


type _Carried = tuple[Array, PyTree[Array]]
"""State of the layers, and the carry of `attend`."""


class States(NamedTuple):
    """Results of the layers."""

    last: Activations
    """The last hidden state, after its norm."""
    carry: PyTree[Array]
    """The final carry of `attend`."""
    routings: list[moe.Routing]
    """Routing of each mixture."""
    taps: list[Activations]
    """The requested states, in the requested order."""


class AheadModule(nnx.Module):
    """A multi-token prediction (MTP) module: one layer, with norms and a projection.

    A row is a token and a state of the token before it: the model's last hidden state
    after its final norm, or for a further module the state of the module before it,
    after that module's final norm. The layer maps both to a new state, and the model's
    output head maps that to logits of the next token. Embeddings and head are those of
    the model.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23. The order of
    the projection's inputs, the embedding first, and the use of the normalised state
    are those of the released weights, as read by vLLM's `deepseek_mtp.py` and SGLang's
    `deepseek_nextn.py`; the state between modules is that of SGLang and of Megatron's
    `multi_token_prediction.py`.
    """

    def __init__(self, config: ModelConfig, *, rngs, dtype, with_transposed=False):
        c = config
        norm = functools.partial(Norm, c.hidden_size, c, kind=c.norm, dtype=dtype)
        self.token_norm = norm()
        self.feature_norm = norm()
        self.final_norm = norm()
        sizes = c.hidden_size, 2 * c.hidden_size
        self.merge = Linear(*sizes, axes=("hidden", None), rngs=rngs, dtype=dtype)
        self.layer = Layer(
            c,
            c.num_layers - 1,
            rngs=rngs,
            dtype=dtype,
            with_transposed=with_transposed,
        )

    def inputs(
        self, embeddings: Activations, states: Activations, orientation: Orientation
    ) -> Activations:
        """Returns the input of the layer.

        Args:
          embeddings: embedding of each row's token.
          states: state of the token before each row's; zeros before the first token.
          orientation: arrangement of the activations.
        """
        axis = orientation.axis
        both = self.token_norm(embeddings, axis), self.feature_norm(states, axis)
        return self.merge(jnp.concatenate(both, axis), orientation)


class Transformer(nnx.Module):
    """Embeddings, layers, final norm and output head of a `ModelConfig`.

    Modules for multi-token prediction, if any, take no part in its forward pass.
    If `scanned`, it has one layer of each kind, whose parameters have a leading axis of
    layers: see `param_forms.stack_layers`. If `with_transposed`, layers store their
    weights twice: see `param_forms.add_transposed_weights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | initialization.ShapeRecorder | initialization.PredrawnNormals,
        dtype=jnp.float32,
        scanned=False,
        with_transposed=False,
    ):
        c = config
        table = functools.partial(Linear, rngs=rngs, dtype=dtype)
        self.embed = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        if c.positions == "learned":
            self.embed_positions = table(
                c.max_positions + c.position_offset,
                c.hidden_size,
                axes=(None, "hidden"),
            )
        if p := c.layer_input_size:
            self.layer_embed = table(c.vocab_size, c.num_layers * p, axes=(None, None))
            self.layer_project = table(
                c.num_layers * p, c.hidden_size, axes=(None, "hidden")
            )
            self.layer_norm = Norm(p, c, kind=c.norm, dtype=dtype)
        firsts = [layers.start for layers in param_forms.layer_runs(c)]
        wanted = firsts if scanned else range(c.num_layers)
        layer = functools.partial(
            Layer, rngs=rngs, dtype=dtype, with_transposed=with_transposed
        )
        self.layers = nnx.List([layer(c, index) for index in wanted])
        self.final_norm = Norm(c.hidden_size, c, kind=c.norm, dtype=dtype)
        if not c.tie_embeddings:
            self.head = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        if c.num_ahead_layers:
            layers = range(c.num_ahead_layers)
            module = functools.partial(AheadModule, c, rngs=rngs, dtype=dtype)
            self.ahead = nnx.List([module() for _ in layers])
        self.config = config
        self.scanned = scanned

    def hidden(
        self,
        tokens: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        attend: Attend,
        carry: PyTree[Array],
        *,
        inputs: Float[Array, "hidden rows"] | None = None,
        live: Bool[Array, " rows"] | None = None,
        numerics: Numerics = "fast",
        only: tuple[int, ...] | None = None,
        taps: tuple[int, ...] = (),
        routes: Int[Array, "rows mixtures top_k"] | None = None,
        adapter: Int[Array, " rows"] | None = None,
    ) -> States:
        """Runs the layers on every row, with activations as columns.

        Args:
          tokens: input tokens.
          positions: positions of the rows in their sequences.
          attend: the attention of a layer.
          carry: initial carry of `attend`.
          inputs: input of the first layer in place of embeddings.
          live: True for rows that are sent to experts; None means all.
          numerics: numerics of the experts' products.
          only: layers to run, skipping the remaining ones; None means all.
          taps: states to return: the input of layer i, or for `num_layers` the last
            state.
          routes: experts of every row in each mixture, see `moe.route`; None means the
            router's choice.
          adapter: adapter of each row, from 1 on, 0 for none; None means none.

        Returns:
          The last hidden states, the carry, routings and taps.

        Raises:
          ValueError: `only` is set, and the layers are stacked.
        """
        o = Orientation(numerics, live, routes, adapter=adapter)
        x = self.embedded(tokens, positions, o, inputs)
        o = self.add_layer_inputs(o, tokens, x)
        run_result = self.run(
            x, positions, attend, carry, o, only=only, tapped=bool(taps)
        )
        last = o.map_tiles(self._normalize, run_result.last)
        states = [*run_result.taps, last] if taps else []
        return run_result._replace(last=last, taps=[states[tap] for tap in taps])

    def _normalize(self, x: Activations, orientation: Orientation) -> Activations:
        return self.final_norm(x, orientation.axis)

    def embedded(
        self,
        tokens: Int[Array, " rows"],
        positions: Int[Array, " places"],
        orientation: Orientation,
        inputs: Activations | None = None,
    ) -> Activations:
        """Returns the input of the first layer: embeddings or `inputs`, and positions.

        Position embeddings are added if positions are learned.
        """
        c = self.config
        x = inputs
        if x is None:
            x = orientation.embed(self.embed.weight[...], tokens, c.vocab_size)
            x = self._scale_embeddings(x, orientation.axis)
        if c.positions != "learned":
            return x
        table = self.embed_positions.weight[...]
        return x + orientation.look_up_positions(table, positions + c.position_offset)

    def add_layer_inputs[O: Orientation](
        self, orientation: O, tokens: Int[Array, " rows"], x: Activations
    ) -> O:
        """Returns the orientation with the embeddings for each layer, if any.

        Args:
          orientation: arrangement of the activations.
          tokens: input tokens.
          x: their embeddings, the input of the first layer.
        """
        if not self.config.layer_input_size:
            return orientation
        o = orientation
        words = self.layer_embed.weight[...]
        words = o.transpose(words[tokens])
        inputs = o.map_tiles(self._join_layer_inputs, words, x)
        return dataclasses.replace(orientation, layer_inputs=inputs)

    def _join_layer_inputs(
        self, words: Activations, x: Activations, orientation: Orientation
    ) -> Activations:
        """Returns the scaled sums of embeddings and projected inputs by layer.

        Source: transformers' `Gemma4TextModel`.
        """
        c = self.config
        o = orientation
        p = c.layer_input_size

        def split(y: Activations) -> Activations:
            if o.axis == -2:
                return y.reshape(c.num_layers, p, -1)
            return jnp.moveaxis(y.reshape(-1, c.num_layers, p), 1, 0)

        scale = functools.partial(jnp.asarray, dtype=x.dtype)
        projected = split(self.layer_project(x, o) * scale(c.hidden_size**-0.5))
        projected = self.layer_norm(projected, o.axis)
        return (projected + split(words) * scale(p**0.5)) * scale(2**-0.5)

    def _scale_embeddings(self, x: Activations, axis: int) -> Activations:
        c = self.config
        if c.embed_scale != 1:
            x = x * jnp.asarray(c.embed_scale, x.dtype)
        if c.embed_norm:
            x = nonlinear.norm(x, None, kind="rms_plain", eps=c.norm_eps, axis=axis)
        return x

    def run(
        self,
        x: Activations,
        positions: Int[Array, " places"],
        attend: Attend,
        carry: PyTree[Array],
        orientation: Orientation,
        *,
        only: tuple[int, ...] | None = None,
        tapped: bool = False,
    ) -> States:
        """Runs the layers; arguments as in `hidden`.

        Returns:
          The last state before its norm, and as taps the inputs of all layers; for
          stacked layers only if `tapped`.

        Raises:
          ValueError: `only` is set, and the layers are stacked.
        """
        angles_by_kind = [
            rotary.angles(self.config, positions, x.dtype, orientation.axis, kind)
            for kind in self.config.attention_kinds
        ]

        def _run_layer(
            graph: Any,
            kind: int,
            carried: _Carried,
            indexed_weights: tuple[Array, PyTree[Array]],
        ) -> tuple[_Carried, moe.Routing | None]:
            """Runs one layer of a kind, with its number and its weights."""
            (index, weights), (x, carry) = indexed_weights, carried
            layer = nnx.merge(graph, weights)
            attention = self.config.attention_kinds[kind]
            with jax.named_scope("layer"):
                x = orientation.arrange(x)
                x, carry, routing = layer(
                    index,
                    attention,
                    x,
                    angles_by_kind[kind],
                    attend,
                    carry,
                    orientation,
                )
            return (x, carry), routing

        if not self.scanned:
            return self._unroll(_run_layer, x, carry, only)
        if only is not None:
            raise ValueError(f"{only=} must be None where layers are stacked")
        return self._scan(_run_layer, x, carry, tapped)

    def _unroll(
        self,
        run: Callable,
        x: Array,
        carry: PyTree[Array],
        only: tuple[int, ...] | None,
    ) -> States:
        """Runs one layer after another; layers of a kind are calls of one function."""
        routings = []
        before = []
        functions: dict[param_forms.LayerForm, Callable] = {}
        layers = range(self.config.num_layers)
        for index in layers if only is None else [i for i in layers if i in only]:
            form = param_forms.layer_form(self.config, index)
            graph, weights = nnx.split(self.layers[index])
            if form not in functions:
                functions[form] = jax.jit(functools.partial(run, graph, form.attention))
            before.append(x)
            (x, carry), routing = functions[form](
                (x, carry), (jnp.int32(index), weights)
            )
            routings += [] if routing is None else [routing]
        return States(x, carry, routings, before)

    def _scan(
        self, run: Callable, x: Array, carry: PyTree[Array], tapped: bool
    ) -> States:
        """Runs all layers of a kind as one loop, which compiles as one layer."""
        routings = []
        before = []
        for layers, layer in zip(
            param_forms.layer_runs(self.config), self.layers, strict=True
        ):
            graph, weights = nnx.split(layer)
            form = param_forms.layer_form(self.config, layers.start)

            def one(
                carried: _Carried,
                indexed_weights: tuple[Array, PyTree[Array]],
                graph: Any = graph,
                kind: int = form.attention,
            ) -> tuple[_Carried, tuple[moe.Routing | None, Array | None]]:
                new, routing = run(graph, kind, carried, indexed_weights)
                return new, (routing, carried[0] if tapped else None)

            indices = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
            with jax.named_scope("layers"):
                (x, carry), layer_routings = jax.lax.scan(
                    one, (x, carry), (indices, weights)
                )
            every = [
                param_forms.index_leaves(layer_routings, number)
                for number in range(len(layers))
            ]
            routings += [routing for routing, _ in every if routing is not None]
            before += [state for _, state in every]
        return States(x, carry, routings, before)

    def logits(
        self, hidden: Activations, orientation: Orientation = BY_COLUMNS
    ) -> Float[Array, "rows words"]:
        """Returns next-token logits in float32 (float64 if the weights are)."""
        c = self.config
        table = self.embed if c.tie_embeddings else self.head
        logits = orientation.unembed(table.weight[...], hidden, c.vocab_size)
        if c.logit_scale != 1:
            logits = logits * c.logit_scale
        if c.logit_cap is not None:
            logits = c.logit_cap * jnp.tanh(logits / c.logit_cap)
        return logits


def _split(
    config: ModelConfig,
    dtype: DTypeLike,
    rngs: initialization.ShapeRecorder | None = None,
    *,
    scanned: bool = False,
    with_transposed: bool = False,
    adapted: Mapping[int, tuple[str, ...]] | None = None,
) -> tuple[Any, PyTree[ArrayOrShape]]:
    """Returns the graph of a model, and the shapes of its parameters.

    Those of adapters, for a result of `param_forms.adapted_products`, have no shape.
    """
    rngs = initialization.ShapeRecorder() if rngs is None else rngs
    form = {"scanned": scanned, "with_transposed": with_transposed}

    def build() -> Transformer:
        model = Transformer(config, rngs=rngs, dtype=dtype, **form)
        for index, names in (adapted or {}).items():
            for name in names:
                getattr(model.layers[index], name).add_adapters()
        return model

    return nnx.split(nnx.eval_shape(build), nnx.Param)


def merge(config: ModelConfig, params: Params) -> Transformer:
    """Returns the model with these parameters, in any of their forms.

    Modules for multi-token prediction are left out, see `merge_ahead`.
    """
    config = dataclasses.replace(config, num_ahead_layers=0)
    params = {name: params[name] for name in params if name != "ahead"}
    scanned = param_forms.is_stacked(params)
    with_transposed = param_forms.has_transposed_weights(params)
    graph, _ = _split(
        config,
        jnp.float32,
        scanned=scanned,
        with_transposed=with_transposed,
        adapted=param_forms.adapted_products(params),
    )
    return nnx.merge(graph, nnx.State(params))


@validation.checks_numbers(index=0)
def merge_ahead(
    config: ModelConfig, params: Params, index: int
) -> tuple[AheadModule, Transformer]:
    """Returns a module for multi-token prediction, and a model that runs its layer.

    Args:
      config: shape of the model with the modules.
      params: the model's parameters; layers outside of "ahead" are not used.
      index: number of the module, from 0 on.

    Returns:
      The module, and a model of `config.ahead_config` with the embeddings and the head
      of the model, the layers of all modules, and the final norm of this one; run it
      with `only=(index,)`.
    """
    modules = params["ahead"]
    module_params = {
        "layers": {number: modules[number]["layer"] for number in modules},
        "final_norm": modules[index]["final_norm"],
    }
    shared = {name: params[name] for name in SHARED_PARAMS if name in params}
    build = functools.partial(
        AheadModule,
        config,
        rngs=initialization.ShapeRecorder(),
        dtype=jnp.float32,
        with_transposed=param_forms.has_transposed_weights(module_params),
    )
    graph, _ = nnx.split(nnx.eval_shape(build), nnx.Param)
    module = nnx.merge(graph, nnx.State(modules[index]))
    return module, merge(config.ahead_config, module_params | shared)


def init_params(config: ModelConfig, key: Array, *, dtype: DTypeLike = "float32"):
    """Returns random parameters, normal with standard deviation 0.02, as nested dicts.

    Compiled as one program per `config`; the bits are those of drawing each array with
    `nnx.Rngs(key)`.
    """
    recorder = initialization.ShapeRecorder()
    _split(config, jnp.dtype(dtype), recorder)
    index = [np.int32(place) for place in range(len(recorder.shapes))]
    return _init_params(key, index, config, tuple(recorder.shapes), jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("config", "shapes", "dtype"))
def _init_params(
    key: Array,
    index: list[Int32[Array, ""]],
    config: ModelConfig,
    shapes: tuple[initialization.Shape, ...],
    dtype: np.dtype,
) -> Params:
    normals = initialization.PredrawnNormals(key, shapes, dtype, index)
    model = Transformer(config, rngs=normals, dtype=dtype)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shapes(
    config: ModelConfig, *, dtype: DTypeLike = "float32", stacked: bool = False
) -> Params:
    """Returns the tree of parameters with `jax.ShapeDtypeStruct`s; allocates no memory.

    If `stacked`, the tree is that of `param_forms.stack_layers`.
    """
    shapes = nnx.to_pure_dict(_split(config, jnp.dtype(dtype))[1])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    if not stacked:
        return shapes
    return jax.eval_shape(functools.partial(param_forms.stack_layers, config), shapes)


def param_axes(
    config: ModelConfig,
    *,
    stacked: bool = False,
    adapted: Mapping[int, tuple[str, ...]] | None = None,
) -> Params:
    """Returns the tree of parameters with their logical axis names, for meshes.

    If `stacked`, the tree is that of `param_forms.stack_layers`, with the leading axis
    "layers". With a result of `param_forms.adapted_products`, it has adapters.
    """
    _, state = _split(config, jnp.float32, scanned=stacked, adapted=adapted)
    is_param = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda p: p.get_metadata("axes"), state, is_leaf=is_param)
    axes = nnx.to_pure_dict(axes)
    if not stacked:
        return axes
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    lead = lambda names: ("layers", *names)  # noqa: E731
    layers = jax.tree.map(lead, axes["layers"], is_leaf=is_axes)
    return {**axes, "layers": layers}


def logits(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    routes: Int[Array, "batch seq mixtures top_k"] | None = None,
    adapter: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch seq vocab"]:
    """Returns the logits of a causal forward pass over whole sequences.

    As `outputs`, without the results of mixtures.
    """
    return outputs(params, tokens, config=config, routes=routes, adapter=adapter).logits


class Outputs(NamedTuple):
    """Results of a forward pass over whole sequences."""

    logits: Float[Array, "batch seq vocab"]
    """Next-token logits, at least float32."""
    auxiliary: Float[Array, ""]
    """Term of the training loss: `balance_weight` times the mean load-balancing loss of
    the mixtures; 0 for a dense model."""
    loads: Float[Array, "mixtures experts"] | None
    """Fraction of the tokens that chose each expert, by mixture from the first layer
    on, see `moe.imbalance`; None for a dense model."""


def outputs(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    routes: Int[Array, "batch seq mixtures top_k"] | None = None,
    adapter: Int[Array, " batch"] | None = None,
) -> Outputs:
    """Runs a causal forward pass over whole sequences, with the results of mixtures.

    Warns at compile time if sequences exceed the model's rotary positions.

    Args:
      params: parameters of the model.
      tokens: whole sequences.
      config: the model, static.
      routes: experts of each token, for example those of a sampler, see `moe.route`;
        None means the router's choice.
      adapter: adapter of each sequence, from 1 on, 0 for none; None means none.

    Raises:
      ValueError: sequences exceed the model's learned positions, or as `check_routes`.
    """
    config.check_length(tokens.shape[1], "seq")
    if routes is not None:
        moe.check_routes(config, routes, tokens.shape)
    model = merge(config, params)
    sequences = run_sequences(model, tokens, routes=routes, adapter=adapter)
    logits = model.logits(sequences.last)
    routings = sequences.routings
    logits = logits.reshape(*tokens.shape, -1)
    if config.experts is None:
        return Outputs(logits, jnp.zeros((), logits.dtype), None)
    balance = jnp.mean(jnp.stack([moe.balance_loss(x) for x in routings]))
    loads = jnp.stack([moe.expert_load(x) for x in routings])
    return Outputs(logits, config.experts.balance_weight * balance, loads)


def empty_kv(
    config: ModelConfig, shape: tuple[int, ...], dtype: DTypeLike
) -> dict[int, tuple[Array, Array]]:
    """Returns zeros in place of the K and V that later layers read.

    Args:
      config: the model.
      shape: numbers of sequences and of tokens of each.
      dtype: dtype of the activations.

    Returns:
      K and V `[batch, seq, kv_heads, head_dim]` by the number of their kind of
      attention; none if no layer shares K and V.
    """
    kinds = config.attention_kinds
    result = {}
    for source in sorted({config.kv_source(x) for x in kinds if x.shares_kv}):
        sizes = config.of_kind(kinds[source])
        zeros = jnp.zeros((*shape, sizes.num_kv_heads, sizes.head_dim), dtype)
        result[source] = zeros, zeros
    return result


def run_sequences(
    model: Transformer,
    tokens: Int[Array, "batch seq"],
    *,
    taps: tuple[int, ...] = (),
    only: tuple[int, ...] | None = None,
    routes: Int[Array, "batch seq mixtures top_k"] | None = None,
    adapter: Int[Array, " batch"] | None = None,
) -> States:
    """Runs a model over a batch of whole sequences, each from its first token.

    There is no carry; `taps`, `only` and `routes` are those of `Transformer.hidden`,
    and `adapter` is that of each sequence.
    """
    config, (batch, seq) = model.config, tokens.shape
    position = jnp.tile(jnp.arange(seq, dtype=jnp.int32), batch)

    def attend(layer, qkv, angles, carry):
        if isinstance(qkv, RecurrentProjection):
            return run_batch(qkv, (batch, seq), axis=-2), carry
        source = config.kv_source(layer.kind)
        if isinstance(qkv, rotary.QueryProjection):
            split = (rotary.rotate_queries(qkv, angles),)
        else:
            split = rotary.split_and_rotate(qkv, angles)
        # To [batch, seq, heads, width] and back.
        q, *kv = (
            x.reshape(-1, x.shape[-2], batch, seq).transpose(2, 3, 0, 1) for x in split
        )
        k, v = kv or carry[source]
        if source in carry:
            carry = {**carry, source: (k, v)}
        scoring = layer.scoring
        y, _ = flash_attention(
            q,
            k,
            v,
            window=layer.kind.window,
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )
        y = y.transpose(2, 3, 0, 1)
        num_kv_heads = k.shape[2]
        return y.reshape(num_kv_heads, -1, v.shape[-1], batch * seq), carry

    if routes is not None:
        routes = jnp.asarray(routes, jnp.int32).reshape(-1, *routes.shape[2:])
    if adapter is not None:
        adapter = jnp.repeat(adapter, seq)
    return model.hidden(
        tokens.reshape(-1),
        position,
        attend,
        empty_kv(config, tokens.shape, model.embed.weight.dtype),
        taps=taps,
        only=only,
        routes=routes,
        adapter=adapter,
    )
