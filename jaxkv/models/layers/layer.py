"""A layer: attention or a recurrence, then an MLP or a mixture of experts, or one.

A layer is one implementation for serving and training.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxkv.models import nonlinear, rotary
from jaxkv.models.config import AttentionKind, LatentConfig, ModelConfig
from jaxkv.models.layers.experts import Mixture
from jaxkv.models.layers.linear import (
    Activations,
    Linear,
    Orientation,
    Vector,
    make_mlp,
    out_std,
)
from jaxkv.models.layers.mixer import RecurrentMixer
from jaxkv.models.layers.norms import HeadsNorm, Norm, Scale
from jaxkv.models.layers.recurrence import RecurrentProjection, RecurrentRows
from pallas_kernels.online_softmax import ScoreTransform


class LayerAttention(NamedTuple):
    """What attention takes from a layer besides its projection."""

    index: int | Int[Array, ""]
    """Number of the layer."""
    kind: AttentionKind
    """Its window and positions."""
    scoring: ScoreTransform
    """From products of queries and keys to scores."""


class Layer(nnx.Module):
    """Attention, then an MLP or a mixture, added to the residual stream.

    A layer with one branch lacks the other one, see `ModelConfig.residual`.
    """

    def __init__(
        self, config: ModelConfig, index: int, *, rngs, dtype, with_transposed=False
    ):
        kind = config.attention_kinds[config.kind_of(index)]
        c = config.of_kind(kind)
        make = functools.partial(
            Linear, rngs=rngs, dtype=dtype, with_transposed=with_transposed
        )
        norm = functools.partial(Norm, c.hidden_size, c, kind=c.norm, dtype=dtype)
        places = kind.norm_places or c.norm_places
        is_before = places != "after"
        is_after = places != "before"
        self.shares_kv = kind.shares_kv
        self.has_mixer = kind.feed_forward is None
        self.has_feed_forward = c.has_feed_forward(index)
        self.attention_norm = norm() if is_before and self.has_mixer else None
        self.mlp_norm = norm() if is_before and self.has_feed_forward else None
        self.attention_out_norm = norm() if is_after and self.has_mixer else None
        self.mlp_out_norm = norm() if is_after and self.has_feed_forward else None
        recurrence = c.recurrence if kind.is_recurrent else None
        self.recurrence = recurrence
        if not self.has_mixer:
            pass
        elif recurrence is not None:
            self.mixer = RecurrentMixer(c, recurrence, rngs=rngs, dtype=dtype)
        elif kind.shares_kv:
            self.q = make(
                c.num_kv_heads,
                c.group_size,
                c.head_dim,
                c.hidden_size,
                axes=("kv_heads", None, "head_dim", "hidden"),
                bias=c.qkv_bias,
            )
        elif c.latent is None:
            # Fused by KV head: queries of the group, key, value.
            self.qkv = make(
                c.num_kv_heads,
                c.group_size + 2 - c.keys_are_values,
                c.head_dim,
                c.hidden_size,
                axes=("kv_heads", None, "head_dim", "hidden"),
                bias=c.qkv_bias,
            )
        else:
            self._make_latent(c, c.latent, make, dtype)
        if self.has_mixer:
            self.out = make(
                c.hidden_size,
                c.num_q_heads * c.value_dim
                if recurrence is None
                else recurrence.num_outputs,
                axes=("hidden", "heads"),
                std=out_std(c),
                bias=c.out_bias if recurrence is None else recurrence.projection_bias,
            )
        self.is_mixture = c.is_mixture(index)
        if self.is_mixture:
            self.mixture = Mixture(c, rngs=rngs, dtype=dtype)
        self.has_both = c.experts is not None and c.experts.beside_mlp
        if self.has_both:
            self.dense_out_norm = norm()
            self.experts_norm = norm()
            self.experts_out_norm = norm()
        if self.has_feed_forward and (self.has_both or not self.is_mixture):
            self.up, self.down = make_mlp(c, c.mlp_size, make)
        has_heads = kind.has_attention and c.latent is None
        if has_heads and c.qk_norm and c.qk_norm_over == "head":
            form = "rms" if c.norm == "layer" else c.norm
            head_norm = functools.partial(Norm, c.head_dim, c, kind=form, dtype=dtype)
            self.q_norm = head_norm()
            if not kind.shares_kv:
                self.k_norm = head_norm()
        elif has_heads and c.qk_norm:
            self.q_norm, self.k_norm = (
                HeadsNorm(c, num, dtype=dtype) for num in (c.group_size, 1)
            )
        if has_heads and c.out_gate:
            self.gate = make(
                c.num_q_heads * c.head_dim,
                c.hidden_size,
                axes=("heads", "hidden"),
                bias=c.qkv_bias,
            )
        if c.sinks and kind.has_attention:
            self.sinks = Vector(c.num_q_heads, axis="heads", dtype=dtype)
        if p := c.layer_input_size:
            hidden = c.hidden_size
            self.input_gate = make(p, hidden, axes=(None, "hidden"))
            self.input_up = make(hidden, p, axes=("hidden", None), std=out_std(c))
            self.input_norm = Norm(hidden, c, kind=c.norm, dtype=dtype)
        if c.layer_scale:
            self.layer_scale = Scale(1, dtype=dtype)
        self.config = c

    def _make_latent(self, config: ModelConfig, latent: LatentConfig, make, dtype):
        """Makes the projections of latent attention.

        Queries are divided over devices by heads, and so are keys and values; every
        device computes the compressed query and the latent.
        """
        c = config
        x = latent
        width = c.hidden_size
        if x.q_rank is not None:
            width = x.q_rank
            self.q_down = make(width, c.hidden_size, axes=(None, "hidden"))
            self.q_norm = Norm(width, c, kind="rms", dtype=dtype, eps=x.latent_eps)
        q = make(c.num_q_heads, c.head_dim, width, axes=("heads", None, None))
        if x.q_rank is None:
            self.q = q
        else:
            self.q_up = q
        # The latent, then the rotary key.
        self.kv_down = make(
            x.kv_rank + x.rope_dim, c.hidden_size, axes=(None, "hidden")
        )
        self.kv_norm = Norm(x.kv_rank, c, kind="rms", dtype=dtype, eps=x.latent_eps)
        # Of each head the keys without positions, then the values.
        self.kv_up = make(
            c.num_q_heads,
            x.nope_dim + x.value_dim,
            x.kv_rank,
            axes=("heads", None, None),
        )

    def _project_latent(self, x: Activations, orientation: Orientation):
        """Returns queries, normed latents and rotary keys of every row."""
        o = orientation
        latent = self.config.latent
        assert latent is not None
        if latent.q_rank is None:
            q = self.q(x, o)
        else:
            q = self.q_up(self.q_norm(self.q_down(x, o), o.axis), o)
        rank = latent.kv_rank
        kv_latent, key = jnp.split(self.kv_down(x, o), [rank], o.axis)
        return q, self.kv_norm(kv_latent, o.axis), key

    def _project(
        self, x: Activations, orientation: Orientation
    ) -> tuple[rotary.Projected | RecurrentRows, Activations | None]:
        """Returns the projection of every row, and the gate of the output, if any."""
        c = self.config
        o = orientation
        if self.attention_norm is not None:
            x = self.attention_norm(x, o.axis)
        if self.recurrence is not None:
            return self.mixer.project(x, o)
        if c.latent is not None:
            q, latent, key = o.expand(self._project_latent, x)
            q = o.split_heads(q, (-1, c.head_dim))
            latent, key = (o.split_heads(y, (y.shape[o.axis],)) for y in (latent, key))
            up = self.kv_up.weight[...]
            return rotary.LatentProjection(q, latent, key, up), None
        if self.shares_kv:
            q = o.split_heads(o.expand(self.q, x), self.q.weight.shape[:-1])
            q = self.q_norm(q, o.axis) if c.qk_norm else q
            return rotary.QueryProjection(q), None
        qkv = o.split_heads(o.expand(self.qkv, x), self.qkv.weight.shape[:-1])
        if c.keys_are_values:
            k = jax.lax.slice_in_dim(qkv, -1, None, axis=o.axis - 1)
            qkv = jnp.concatenate([qkv, k], o.axis - 1)
        if c.qk_norm:
            q, k, v = rotary.split_heads(qkv, o.axis)
            if c.value_norm:
                v = nonlinear.norm(
                    v, None, kind="rms_plain", eps=c.norm_eps, axis=o.axis
                )
            qkv = o.fuse(self.q_norm(q, o.axis), self.k_norm(k, o.axis), v)
        return qkv, o.expand(self.gate, x) if c.out_gate else None

    def __call__(self, index, kind, x, angles, attend, carry, orientation):
        """Runs layer `index`, with a kind of attention, on every row.

        `carry` is passed through `attend`.
        """
        x, carry, routing = self._run(
            index, kind, x, angles, attend, carry, orientation
        )
        if self.config.layer_input_size:
            inputs = orientation.layer_inputs
            assert inputs is not None  # of a model with embeddings for each layer
            x = orientation.map_tiles(self._add_layer_input, x, inputs[index])
        if self.config.layer_scale:
            # A constant of the published model.
            x = x * jax.lax.stop_gradient(self.layer_scale.scale[...].reshape(()))
        return x, carry, routing

    def _run(self, index, kind, x, angles, attend, carry, orientation):
        """Runs the branches of the layer."""
        o = orientation
        c = self.config
        y = None
        if self.has_mixer:
            y, carry = self._mix(index, kind, x, angles, attend, carry, o)
        if not self.has_feed_forward:
            return o.map_tiles(self._add_mixed, x, y), carry, None
        if not self.is_mixture:
            rows = (x,) if y is None else (x, y)
            return o.map_tiles(self._add_mlp, *rows), carry, None
        if y is not None:
            x = self._add_mixed(x, y, o)
        replayed = o.routes
        if replayed is not None:
            mixtures = [x for x in range(c.num_layers) if c.is_mixture(x)]
            number = index - mixtures[0]
            if mixtures != [*range(mixtures[0], c.num_layers)]:
                every = np.arange(c.num_layers, dtype=np.int32)
                numbers = np.searchsorted(mixtures, every).astype(np.int32)
                number = jnp.asarray(numbers)[index]
            replayed = replayed[:, number]
        if self.has_both:
            dense = o.map_tiles(self._run_dense, x)
            inputs = self.experts_norm(x, o.axis)
            y, routing = self.mixture(inputs, o, replayed, residual=x)
            y = dense + self.experts_out_norm(y, o.axis)
        else:
            y, routing = self.mixture(self._mlp_inputs(x, o), o, replayed)
        return x + self._scale_branch(self.mlp_out_norm, y, o), carry, routing

    def _mix(self, index, kind, x, angles, attend, carry, orientation):
        """Returns the output of attention or the recurrence, gated, and the carry."""
        o = orientation
        c = self.config
        if self.recurrence is None and c.latent is not None:
            projected, gate = self._project(x, o)
        else:
            projected, gate = o.map_tiles(self._project, x)
        if self.recurrence is not None:
            assert isinstance(projected, RecurrentRows)
            projected = RecurrentProjection(
                self.recurrence, projected, self.mixer.weights
            )
        has_sinks = c.sinks and self.recurrence is None
        sinks = self.sinks.bias[...] if has_sinks else None
        scoring = ScoreTransform(c.score_scale, c.score_cap, sinks=sinks)
        layer = LayerAttention(index, kind, scoring)
        y, carry = attend(layer, projected, angles, carry)
        y = o.join_heads(y).astype(x.dtype)
        if gate is not None:
            y = o.map_tiles(self._gate_output, y, gate)
        return y, carry

    def _gate_output(
        self, y: Activations, gate: Activations, orientation: Orientation
    ) -> Activations:
        """Applies the gate to the output of attention or of the recurrence."""
        if self.recurrence is not None:
            return self.mixer.normalize(y, gate, orientation)
        return y * jax.nn.sigmoid(gate)

    def _add_mixed(
        self, x: Activations, y: Activations, orientation: Orientation
    ) -> Activations:
        """Adds the projected output of attention."""
        y = self.out(y, orientation)
        return x + self._scale_branch(self.attention_out_norm, y, orientation)

    def _add_mlp(
        self,
        x: Activations,
        y: Activations | None = None,
        *,
        orientation: Orientation,
    ) -> Activations:
        """Adds the projected output of attention, if any, and that of the MLP."""
        o = orientation
        before = x
        if y is not None:
            x = self._add_mixed(x, y, o)
        inputs = before if self.config.residual == "parallel" else x
        return x + self._scale_branch(self.mlp_out_norm, self._run_mlp(inputs, o), o)

    def _run_mlp(self, x: Activations, orientation: Orientation) -> Activations:
        """Returns the output of the MLP, before a norm after it."""
        activate = functools.partial(nonlinear.activate, self.config)
        hidden = orientation.expand(self.up, self._mlp_inputs(x, orientation), activate)
        return self.down(hidden, orientation)

    def _run_dense(self, x: Activations, orientation: Orientation) -> Activations:
        """Returns the output of the MLP in addition to experts, after its norm."""
        y = self._run_mlp(x, orientation)
        return self.dense_out_norm(y, orientation.axis)

    def _add_layer_input(
        self, x: Activations, layer_input: Activations, orientation: Orientation
    ) -> Activations:
        """Adds the gated projection of the embedding for this layer."""
        o = orientation
        gate = nonlinear.ACTIVATIONS[self.config.activation](self.input_gate(x, o))
        y = self.input_up(gate * layer_input, o)
        return x + self.input_norm(y, o.axis)

    def _mlp_inputs(self, x: Activations, orientation: Orientation) -> Activations:
        return x if self.mlp_norm is None else self.mlp_norm(x, orientation.axis)

    def _scale_branch(
        self, norm: Norm | None, y: Activations, orientation: Orientation
    ) -> Activations:
        """Returns the output of attention or MLP as it is added to the residual."""
        if norm is not None:
            y = norm(y, orientation.axis)
        scale = self.config.residual_scale
        return y if scale == 1 else y * jnp.asarray(scale, y.dtype)
