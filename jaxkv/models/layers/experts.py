"""A mixture of experts as part of a layer; `moe` has its arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.models import moe, nonlinear
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers.linear import (
    Activations,
    ExpertLinear,
    Linear,
    Numerics,
    Orientation,
    Vector,
    make_mlp,
    out_std,
)
from jaxkv.models.layers.norms import Scale


class Mixture(nnx.Module):
    """A mixture of experts in place of an MLP: routed experts and shared ones."""

    def __init__(self, config: ModelConfig, *, rngs, dtype):
        c = config
        x = config.experts
        assert x is not None  # only models with experts have such layers
        make = functools.partial(Linear, rngs=rngs, dtype=dtype)
        make_linear = functools.partial(ExpertLinear, rngs=rngs, dtype=dtype)
        # The bias is for selection only, see `moe.route`. It is at least float32 for
        # any weights, since training changes it by thousandths.
        self.router = make(
            x.num_experts,
            c.hidden_size,
            axes=("experts", "hidden"),
            bias=x.gate_bias,
            bias_dtype=np.promote_types(dtype, np.float32),
        )
        if x.beside_mlp:
            self.router_scale = Scale(c.hidden_size, dtype=dtype)
            self.expert_scale = Scale(x.num_experts, axis="experts", dtype=dtype)
        if x.router_bias:
            self.logit_bias = Vector(x.num_experts, axis="experts", dtype=dtype)
        width = x.latent_size or c.hidden_size
        if x.latent_size is not None:
            self.latent_down = make(width, c.hidden_size, axes=(None, "hidden"))
            self.latent_up = make(c.hidden_size, width, axes=("hidden", None))
        # Gate and up are one matrix, so that one product computes both.
        self.up = make_linear(
            x.num_experts,
            width,
            (1 + c.gated) * x.size,
            axes=("experts", "hidden", "mlp"),
            bias=x.expert_bias,
        )
        self.down = make_linear(
            x.num_experts,
            x.size,
            width,
            axes=("experts", "mlp", "hidden"),
            std=out_std(c),
            bias=x.expert_bias,
        )
        if x.shared_size:
            self.shared_up, self.shared_down = make_mlp(c, x.shared_size, make)
        if x.shared_gate:
            self.shared_gate = make(1, c.hidden_size, axes=(None, "hidden"))
        self.config = config

    def __call__(
        self,
        x: Activations,
        orientation: Orientation,
        replayed: Int[Array, "rows top_k"] | None = None,
        residual: Activations | None = None,
    ) -> tuple[Activations, moe.Routing]:
        """Sums the outputs of every row's experts; returns the routing, too.

        The router reads `x`, or with `Experts.beside_mlp` the residual stream.
        """
        experts = self.config.experts
        axis = orientation.axis
        assert experts is not None
        x = orientation.gather(x)
        # At least float32 for any weights: two experts may have nearly equal
        # probabilities.
        wide = np.promote_types(x.dtype, np.float32)
        routed_by = x if residual is None else self._router_inputs(residual, axis)
        scores = orientation.matmul(
            self.router.weight[...].astype(wide),
            routed_by.astype(wide),
            precision=jax.lax.Precision.HIGHEST,
        )
        if experts.router_bias:
            shift = self.logit_bias.bias[...].astype(wide)
            scores = scores + shift.reshape((1, -1) if axis == -1 else (-1, 1))
        bias = None if self.router.bias is None else self.router.bias[...].astype(wide)
        routing = moe.route(orientation.transpose(scores), experts, bias, replayed)
        if experts.beside_mlp:
            factor = self.expert_scale.scale[...].astype(routing.share.dtype)
            factors = factor.at[routing.expert].get(mode="fill", fill_value=jnp.nan)
            routing = routing._replace(share=routing.share * factors)
        gate = None
        if experts.shared_gate:
            gate = jax.nn.sigmoid(self.shared_gate(x, orientation))
        x = orientation.share(x)
        if experts.latent_size is None:
            y = orientation.mix(self, x, routing)
        else:
            latent = orientation.product(self.latent_down, x)
            latent = orientation.mix(self, latent, routing)
            y = orientation.product(self.latent_up, latent)
        if experts.shared_size:
            hidden = self.shared_up(x, orientation)
            hidden = nonlinear.activate(self.config, hidden, axis)
            shared = orientation.product(self.shared_down, hidden)
            y = y + (shared if gate is None else shared * gate)
        part = self.down.weight.shape[1]
        return orientation.add_up(y, part=part, full_size=experts.size), routing

    def _router_inputs(self, residual: Activations, axis: int) -> Activations:
        """Returns the scaled norm of the residual stream."""
        c = self.config
        scale = self.router_scale.scale[...]
        y = nonlinear.norm(residual, scale, kind="rms", eps=c.norm_eps, axis=axis)
        return y * jnp.asarray(c.hidden_size**-0.5, y.dtype)

    def answer(
        self,
        x: Float[Array, "*experts rows hidden"],
        sizes: Int[Array, " experts"] | None = None,
        numerics: Numerics = "fast",
    ) -> Float[Array, "*experts rows hidden"]:
        """Returns the experts' outputs for their rows.

        Rows are sorted by expert, with the number of each in `sizes`; without `sizes`,
        experts have equal numbers of rows on an axis of their own.
        """
        hidden = self.up(x.astype(self.up.weight[...].dtype), sizes, numerics)
        hidden = nonlinear.activate(self.config, hidden, -1)
        experts = self.config.experts
        assert experts is not None
        # Devices that divide an expert add up their outputs, and so their biases.
        share = hidden.shape[-1] / experts.size
        return self.down(hidden, sizes, numerics, share=share)
