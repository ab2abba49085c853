"""Decoder-only transformers: their configuration, their parameters, one forward pass.

The only door to flax. Activations are columns, `[features, rows]`, and weights are
`[out, in]`: a product is then `weight @ x`, in which the large operand is read once and
in order. On CPUs this halves the time of small batches; accelerators do not mind.
Every row is one token; which sequence it belongs to is known to `attend` alone, so the
same layers serve training (whole sequences) and the engine (packed rows over pages).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkv import caching, forwarding, states
from pallas_kernels import flash

type Params = Any
"""A pytree of arrays: nested dicts, as `init_params` and `checkpoints` return them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's stretching of low rotary frequencies (its report, section 3.4.2)."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer; hashable, so a static argument."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    """Width of the gate and up projections, or of the only one if not gated."""
    max_positions: int
    """Longest sequence the model is meant for; a hard bound with learned positions."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    position_offset: int = 0
    """Rows of the learned position table that come before position 0 (OPT: 2)."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    """Whether the MLP multiplies the activation with a second projection (SwiGLU)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of every query and key head, before RoPE (Qwen3)."""
    tie_embeddings: bool = True
    window: int | None = None
    """Sliding window: a query sees this many latest tokens, itself included."""
    family: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"] = "llama"
    """Whose names a saved folder uses; only the other fields say what is computed."""

    def __post_init__(self):
        """Refuses shapes that cannot be."""
        for name in (
            *("vocab_size", "hidden_size", "num_layers", "num_q_heads"),
            *("num_kv_heads", "head_dim", "mlp_size", "max_positions"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_q_heads=} must be a multiple of {self.num_kv_heads=}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even for rotary positions")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{self.window=} must be at least 1, or None")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads


type Attend[C] = Callable[
    [
        int,
        Float[Array, "kv_heads group head_dim rows"],
        Float[Array, "kv_heads head_dim rows"],
        Float[Array, "kv_heads head_dim rows"],
        C,
    ],
    tuple[Float[Array, "kv_heads group head_dim rows"], C],
]
"""`attend(layer, q, k, v, carry) -> (out, carry)`: the only place where rows meet."""


class Linear(nnx.Module):
    """`weight @ x + bias` with the contracted axis last in the weight."""

    def __init__(self, *shape, axes, rngs, std=0.02, bias=False, dtype=jnp.float32):
        normal = jax.random.normal(rngs.params(), shape, dtype)
        self.weight = nnx.Param(normal * jnp.asarray(std, dtype), axes=axes)
        self.bias = (
            nnx.Param(jnp.zeros(shape[:-1], dtype), axes=axes[:-1]) if bias else None
        )

    def __call__(self, x: Float[Array, "inputs rows"]) -> Float[Array, "..."]:
        """Multiplies every column."""
        y = self.weight[...].reshape(-1, x.shape[0]) @ x
        if self.bias is not None:
            y = y + self.bias[...].reshape(-1, 1)
        return y.reshape(*self.weight.shape[:-1], x.shape[1])


class Norm(nnx.Module):
    """RMS or layer norm over the features (axis -2 of a column layout), in float32."""

    def __init__(self, size, config: ModelConfig, *, kind, dtype=jnp.float32):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(None,))
        centred = kind == "layer"
        self.bias = (
            nnx.Param(jnp.zeros((size,), dtype), axes=(None,)) if centred else None
        )
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*lead size rows"]) -> Float[Array, "..."]:
        """Norms every column."""
        y = x.astype(np.promote_types(x.dtype, np.float32))
        if self.bias is not None:
            y = y - y.mean(-2, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-2, keepdims=True) + self.eps)
        y = y.astype(x.dtype) * _column(self.scale[...], x.ndim)
        return y if self.bias is None else y + _column(self.bias[...], x.ndim)


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs, dtype):
        c = config
        make = functools.partial(Linear, rngs=rngs, dtype=dtype)
        norm = functools.partial(Norm, c.hidden_size, c, kind=c.norm, dtype=dtype)
        # The usual 1/sqrt(2 layers) keeps the residual stream's variance near one.
        out_std = 0.02 / (2 * c.num_layers) ** 0.5
        self.attention_norm, self.mlp_norm = norm(), norm()
        # Fused, KV head by KV head: the group's queries, the key, the value.
        self.qkv = make(
            *(c.num_kv_heads, c.group_size + 2, c.head_dim, c.hidden_size),
            axes=("kv_heads", None, "head_dim", "hidden"),
            bias=c.qkv_bias,
        )
        self.out = make(
            *(c.hidden_size, c.num_q_heads * c.head_dim),
            axes=("hidden", "heads"),
            std=out_std,
            bias=c.out_bias,
        )
        self.up = make(
            *(1 + c.gated, c.mlp_size, c.hidden_size),  # gate first
            axes=(None, "mlp", "hidden"),
            bias=c.mlp_bias,
        )
        self.down = make(
            *(c.hidden_size, c.mlp_size),
            axes=("hidden", "mlp"),
            std=out_std,
            bias=c.mlp_bias,
        )
        if c.qk_norm:
            self.q_norm, self.k_norm = (
                Norm(c.head_dim, c, kind="rms", dtype=dtype) for _ in range(2)
            )
        self.config = config

    def __call__(self, index, x, rope, attend, carry):
        """Runs layer `index` on every column; `carry` goes through `attend`."""
        c = self.config
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv[:, : c.group_size], qkv[:, c.group_size], qkv[:, c.group_size + 1]
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        y, carry = attend(index, q, k, v, carry)
        x = x + self.out(y.reshape(-1, x.shape[1]).astype(x.dtype))
        hidden = self.up(self.mlp_norm(x))
        active = _ACTIVATIONS[c.activation](hidden[0])
        return x + self.down(active * hidden[1] if c.gated else active), carry


class Transformer(nnx.Module):
    """Embeddings, layers, final norm and output head of a `ModelConfig`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config
        table = functools.partial(Linear, rngs=rngs, dtype=dtype)
        self.embed = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        if c.positions == "learned":
            self.embed_positions = table(
                *(c.max_positions + c.position_offset, c.hidden_size),
                axes=(None, "hidden"),
            )
        self.layers = nnx.List(
            [Layer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_layers)]
        )
        self.final_norm = Norm(c.hidden_size, c, kind=c.norm, dtype=dtype)
        if not c.tie_embeddings:
            self.head = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        self.config = config

    def hidden(
        self,
        tokens: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        attend: Attend,
        carry: Any,
    ) -> tuple[Float[Array, "hidden rows"], Any]:
        """The normed last hidden state of every row."""
        c = self.config
        x = self.embed.weight[...][tokens].T
        rope = None
        if c.positions == "learned":
            x = x + self.embed_positions.weight[...][positions + c.position_offset].T
        else:
            wide = np.promote_types(x.dtype, np.float32)
            angles = (
                _rope_frequencies(c, wide)[:, None] * positions.astype(wide)[None, :]
            )
            rope = jnp.cos(angles), jnp.sin(angles)
        for index, layer in enumerate(self.layers):
            x, carry = layer(index, x, rope, attend, carry)
        return self.final_norm(x), carry

    def logits(self, hidden: Float[Array, "hidden rows"]) -> Float[Array, "rows vocab"]:
        """Next-token logits in float32 (float64 if the weights are)."""
        table = (self.embed if self.config.tie_embeddings else self.head).weight[...]
        wide = np.promote_types(hidden.dtype, np.float32)
        columns = jnp.matmul(table, hidden, preferred_element_type=wide)
        # Else XLA turns the product round, and CPUs read the table half as fast.
        return jax.lax.optimization_barrier(columns).T


def _column(scale, ndim):
    return (
        scale.reshape(-1, 1) if ndim == 2 else scale.reshape(*(1,) * (ndim - 2), -1, 1)
    )


def _rope_frequencies(config: ModelConfig, dtype) -> Float[Array, " half"]:
    """Radians per position of every pair of features (Su et al. 2021, eq. 15)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if (s := config.rope_scaling) is None:
        return frequencies
    turns = s.original_max_positions * frequencies / (2 * jnp.pi)
    span = s.high_frequency_factor - s.low_frequency_factor
    keep = jnp.clip((turns - s.low_frequency_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / s.factor)


def _rotate(x: Float[Array, "*lead head_dim rows"], cos, sin):
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-2)
    lead = (1,) * (x.ndim - 2)
    cos, sin = (a.reshape(*lead, *a.shape) for a in (cos, sin))
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-2).astype(x.dtype)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def _split(config: ModelConfig, dtype) -> tuple[Any, Any]:
    build = functools.partial(Transformer, config, dtype=dtype)
    return nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))), nnx.Param)


def _merge(config: ModelConfig, params: Params) -> Transformer:
    graph, _ = _split(config, jnp.float32)
    return nnx.merge(graph, nnx.State(params))


def init_params(config: ModelConfig, key: Array, *, dtype: DTypeLike = "float32"):
    """Random parameters, normal with standard deviation 0.02, as nested dicts."""
    model = Transformer(config, rngs=nnx.Rngs(key), dtype=jnp.dtype(dtype))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shapes(config: ModelConfig, *, dtype: DTypeLike = "float32") -> Params:
    """The same tree holding `jax.ShapeDtypeStruct`s; allocates nothing."""
    shapes = nnx.to_pure_dict(_split(config, jnp.dtype(dtype))[1])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def param_axes(config: ModelConfig) -> Params:
    """The same tree holding each parameter's logical axis names, for meshes."""
    _, state = _split(config, jnp.float32)
    is_param = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda p: p.get_metadata("axes"), state, is_leaf=is_param)
    return nnx.to_pure_dict(axes)


def make_pages(
    config: ModelConfig, engine: states.EngineConfig, *, dtype: DTypeLike = "float32"
) -> caching.Pages:
    """K and V arrays of a model for an engine."""
    return caching.make_pages(
        num_layers=config.num_layers,
        num_pages=engine.num_pages,
        num_kv_heads=config.num_kv_heads,
        page_size=engine.page_size,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def logits(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig
) -> Float[Array, "batch seq vocab"]:
    """Plain causal forward pass over whole sequences: training, and the paged twin."""
    batch, seq = tokens.shape
    model = _merge(config, params)
    position = jnp.arange(seq, dtype=jnp.int32)

    def attend(layer, q, k, v, carry):
        # To [batch, seq, heads, head_dim] and back.
        q, k, v = (
            x.reshape(-1, config.head_dim, batch, seq).transpose(2, 3, 0, 1)
            for x in (q, k, v)
        )
        y, _ = flash.flash_attention(q, k, v, window=config.window)
        y = y.transpose(2, 3, 0, 1)
        return y.reshape(config.num_kv_heads, -1, config.head_dim, batch * seq), carry

    hidden, _ = model.hidden(tokens.reshape(-1), jnp.tile(position, batch), attend, ())
    return model.logits(hidden).reshape(batch, seq, -1)


@dataclasses.dataclass(frozen=True)
class Forward:
    """The engine's forward pass for a `ModelConfig`: packed rows over pages.

    An instance is hashable and equal to any other of the same config, so it is a static
    argument that never causes a second compilation.
    """

    config: ModelConfig
    numerics: Literal["fast", "reproducible"] = "fast"

    def __call__(
        self, params: Params, pages: caching.Pages, rows: caching.Rows
    ) -> forwarding.ForwardResult:
        """Writes the rows' K and V, attends over the pages, returns the wanted logits.

        Args:
          params: as `init_params` returns them.
          pages: K and V arrays of `num_layers` layers.
          rows: the packed rows of one step.

        Returns:
          Logits of `rows.logit_rows`, the written pages, and the hidden states of the
          same rows.
        """
        model = _merge(self.config, params)
        sees: Any = {"window": self.config.window, "numerics": self.numerics}
        plan = forwarding.make_plan(
            *(pages, rows),
            num_q_heads=self.config.num_q_heads,
            dtype=model.embed.weight[...].dtype,
            **sees,
        )

        def attend(layer, q, k, v, pages):
            out, pages = forwarding.attend(
                pages,
                layer,
                *(x.reshape(-1, *x.shape[-2:]).transpose(2, 0, 1) for x in (q, k, v)),
                rows,
                plan=plan,
                **sees,
            )
            return out.transpose(1, 2, 0).reshape(q.shape), pages

        positions = jnp.maximum(rows.position, 0)
        hidden, pages = model.hidden(rows.token, positions, attend, pages)
        wanted = jnp.maximum(rows.logit_rows, 0)
        hidden = hidden[:, wanted]
        return forwarding.ForwardResult(model.logits(hidden), pages, hidden.T)
