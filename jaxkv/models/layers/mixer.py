"""The recurrent part of a layer: its projections, and the norm of its output."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.models import nonlinear
from jaxkv.models.config import ModelConfig, RecurrenceConfig
from jaxkv.models.layers.linear import Activations, Linear, Orientation
from jaxkv.models.layers.recurrence import RecurrentRows, RecurrentWeights

_DECAY_RATES = 1.0, 16.0
_STEP_SIZES = 1e-3, 0.1
"""Initial ranges over the heads, as in Mamba 2's published code."""

DELTA_KINDS = "gdn", "kda"
"""Kinds of `RecurrenceConfig` with a delta rule, and thus a strength."""


class RecurrentMixer(nnx.Module):
    """What a recurrent layer has in place of the projections of attention."""

    def __init__(
        self, config: ModelConfig, recurrence: RecurrenceConfig, *, rngs, dtype
    ):
        r = recurrence
        make = functools.partial(Linear, rngs=rngs, dtype=dtype)
        hidden = config.hidden_size
        bias = r.projection_bias
        self.mixed = make(r.num_channels, hidden, axes=(None, "hidden"), bias=bias)
        if r.kind == "conv":
            outputs = functools.partial(make, r.num_outputs, hidden, bias=bias)
            self.input_gate = outputs(axes=(None, "hidden"))
            self.gate = outputs(axes=(None, "hidden"))
        elif r.kind == "kda":
            # Both have a narrow layer between.
            for name, size in (("gate", r.num_outputs), ("decay", r.num_decays)):
                down = make(r.value_dim, hidden, axes=(None, "hidden"))
                setattr(self, f"{name}_down", down)
                setattr(self, name, make(size, r.value_dim, axes=(None, None)))
        else:
            self.gate = make(r.num_outputs, hidden, axes=(None, "hidden"), bias=bias)
            self.decay = make(r.num_decays, hidden, axes=(None, "hidden"), bias=bias)
        if r.kind in DELTA_KINDS:
            self.strength = make(r.num_value_heads, hidden, axes=(None, "hidden"))
        kernel = rngs.params.normal((r.num_channels, r.kernel_size), dtype)
        scale = jnp.asarray(r.kernel_size**-0.5, dtype)
        self.kernel = nnx.Param(kernel * scale, axes=(None, None))
        zeros = jnp.zeros((r.num_channels,), dtype)
        self.kernel_bias = nnx.Param(zeros, axes=(None,)) if r.conv_bias else None
        self.recurrence = r
        if r.kind == "conv":
            return
        rates = np.linspace(*_DECAY_RATES, r.num_value_heads)
        self.decay_rate = nnx.Param(jnp.asarray(np.log(rates), dtype), axes=(None,))
        steps = np.geomspace(*_STEP_SIZES, r.num_decays)
        # The inverse of softplus.
        steps = steps + np.log(-np.expm1(-steps))
        self.decay_bias = nnx.Param(jnp.asarray(steps, dtype), axes=(None,))
        skip = jnp.ones((r.num_value_heads,), dtype)
        self.skip = nnx.Param(skip, axes=(None,)) if r.kind == "mamba2" else None
        size = r.num_outputs if r.kind == "mamba2" else r.value_dim
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(None,))

    @property
    def weights(self) -> RecurrentWeights:
        """The weights that are applied token by token."""
        bias = None if self.kernel_bias is None else self.kernel_bias[...]
        if self.recurrence.kind == "conv":
            return RecurrentWeights(self.kernel[...], bias, None, None, None)
        return RecurrentWeights(
            self.kernel[...],
            bias,
            self.decay_rate[...],
            self.decay_bias[...],
            None if self.skip is None else self.skip[...],
        )

    def project(
        self, x: Activations, orientation: Orientation
    ) -> tuple[RecurrentRows, Activations]:
        """Returns the projections of every row, and the gate of its output."""
        o = orientation

        def narrow(name: str) -> Activations:
            if self.recurrence.kind != "kda":
                return x
            return getattr(self, f"{name}_down")(x, o)

        if self.recurrence.kind == "conv":
            mixed = self.input_gate(x, o) * self.mixed(x, o)
            return RecurrentRows(mixed, None, None), self.gate(x, o)
        has_strength = self.recurrence.kind in DELTA_KINDS
        rows = RecurrentRows(
            self.mixed(x, o),
            self.decay(narrow("decay"), o),
            self.strength(x, o) if has_strength else None,
        )
        return rows, self.gate(narrow("gate"), o)

    def normalize(
        self, y: Activations, gate: Activations, orientation: Orientation
    ) -> Activations:
        """Returns the gated norm of the recurrence's output.

        It is over each value head, then gated; or in Mamba 2 gated, then over the heads
        that share a key. Short convolutions have the gate alone.
        """
        r = self.recurrence
        if r.kind == "conv":
            return y * gate
        wide = np.promote_types(y.dtype, np.float32)
        rows = orientation.transpose(gate).astype(wide)
        heads = r.num_key_heads if r.kind == "mamba2" else r.num_value_heads
        split = functools.partial(jnp.reshape, shape=(len(rows), heads, -1))
        x = split(orientation.transpose(y).astype(wide))
        norm = functools.partial(
            nonlinear.norm, scale=None, kind="rms_plain", eps=r.norm_eps
        )
        if r.kind == "mamba2":
            x = norm(x * split(jax.nn.silu(rows))).astype(y.dtype)
            x = x.reshape(len(rows), -1) * self.scale[...][None]
            return orientation.transpose(x.astype(y.dtype))
        x = norm(x).astype(y.dtype) * self.scale[...][None, None]
        gate_function = jax.nn.sigmoid if r.kind == "kda" else jax.nn.silu
        x = x.astype(wide) * split(gate_function(rows))
        return orientation.transpose(x.reshape(len(rows), -1).astype(y.dtype))
