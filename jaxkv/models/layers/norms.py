"""Norms of a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxkv.models import nonlinear, partition
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers.linear import Activations


class Norm(nnx.Module):
    """A norm over the features, see `nonlinear.norm`."""

    def __init__(self, size, config: ModelConfig, *, kind, dtype=jnp.float32, eps=None):
        form = nonlinear.NORMS[kind]
        one = jnp.full((size,), 1 - form.offset, dtype)
        zero = jnp.zeros((size,), dtype)
        self.scale = nnx.Param(one, axes=(None,)) if form.has_scale else None
        self.bias = nnx.Param(zero, axes=(None,)) if form.has_bias else None
        self.kind = kind
        self.eps = eps or config.norm_eps

    def __call__(self, x: Activations, axis: int) -> Activations:
        """Normalises every row."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return nonlinear.norm(x, scale, bias, kind=self.kind, eps=self.eps, axis=axis)


class Scale(nnx.Module):
    """Factors, 1 at first: of a layer's output, of features, or of experts."""

    def __init__(self, size, *, axis=None, dtype):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(axis,))


class HeadsNorm(nnx.Module):
    """An RMS norm over all heads of a row, which devices may divide."""

    def __init__(self, config: ModelConfig, heads_per_kv: int, *, dtype):
        c = config
        shape = c.num_kv_heads, heads_per_kv, c.head_dim
        axes = "kv_heads", None, "head_dim"
        one = jnp.full(shape, 1 - nonlinear.NORMS[c.norm].offset, dtype)
        self.scale = nnx.Param(one, axes=axes)
        self.config = c

    def __call__(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Normalises heads, as the axes `kv_heads, heads, head_dim` up to `axis`."""
        c = self.config
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        total = jnp.sum(wide * wide, (axis - 2, axis - 1, axis), keepdims=True)
        part = x.shape[axis - 2]
        total = partition.sum_parts(total, part=part, full_size=c.num_kv_heads)
        size = c.num_kv_heads * x.shape[axis - 1] * x.shape[axis]
        y = wide * jax.lax.rsqrt(total / size + c.norm_eps)
        scale = self.scale[...]
        return nonlinear.scale_norm(
            y,
            scale,
            kind=c.norm,
            dtype=x.dtype,
            along=functools.partial(
                jnp.reshape,
                shape=(*(1,) * (x.ndim + axis - 2), *scale.shape, *(1,) * (-axis - 1)),
            ),
        )
