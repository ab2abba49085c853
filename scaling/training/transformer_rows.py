"""A transformer over whole sequences with activations as rows: for training.

The layers are those that are served (`jaxkv.models.layers`), with the same parameters.
In training the gradient of a weight is a product of two activations, and processors
make it faster of rows than of the columns that suit decoding.

Under a `Layout` an orientation does what one device of a mesh does, inside
`jax.shard_map`, with its part of parameters and tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkv.models import ModelConfig, Params, moe, partition, rotary, transformer
from jaxkv.models.layers import Activations, Function, Linear, Mixture, Orientation
from jaxkv.models.partition import TENSOR
from jaxkv.parallel import experts, sequence
from scaling.costs.parallelism import Layout
from scaling.training import meshes

ONE = Layout()
"""A single device."""


class ForwardOutput(NamedTuple):
    """What a forward pass gives."""

    logits: Float[Array, "batch seq vocab"]
    """Of the token after each, at least float32."""
    auxiliary: Float[Array, ""]
    """Nats that training adds to the mean loss, weighted already; zero for models that
    ask for nothing."""


def run_transformer(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    layout: Layout = ONE,
) -> ForwardOutput:
    """Runs a model over sequences, each from its beginning.

    Parameters are as `transformer.init_params` returns them. Under a `layout` the
    tokens are those of this device, which `sequence.order` says, and the logits those
    of its words.

    Raises:
      ValueError: the model has fewer learned positions than `seq`.
    """
    config.check_length(tokens.shape[1] * layout.context, "seq")
    model = transformer.merge(config, params)
    rows = RowOrientation(config=config, shape=tokens.shape, layout=layout)
    x = model.embedded(tokens.reshape(-1), rows.positions(), rows)
    found = model.run(x, rows.positions(), rows.attend, (), rows)
    logits = model.logits(model.final_norm(found.last, rows.axis), rows)
    auxiliary = rows.auxiliary(found.routings, logits.dtype)
    return ForwardOutput(logits.reshape(*tokens.shape, -1), auxiliary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrientation(Orientation):
    """Activations are `[rows, features]`: of each sequence one token after another."""

    config: ModelConfig
    """The whole model."""
    shape: tuple[int, ...]
    """Sequences, and the tokens of each, that this device has."""
    layout: Layout = ONE
    """How the model is divided."""
    axis: ClassVar[int] = -1

    def positions(self) -> Int32[Array, " seq"]:
        """Those of this device's tokens of each sequence."""
        size, ring = self.shape[1] * self.layout.context, self.layout.ring
        return sequence.positions(size, ring=ring, ulysses=self.layout.ulysses)

    def embed(self, table: Array, tokens: Array, num_words: int) -> Activations:
        """Looks tokens up; with sequence parallelism for the rows of this device."""
        if not self.layout.sequence:
            return super().embed(table, tokens, num_words)
        found = partition.look_up_own(table, tokens)
        return lax.psum_scatter(found, TENSOR, tiled=True)

    def learned(self, table: Array, places: Array) -> Activations:
        """Looks the positions of one sequence up, for all."""
        if self.layout.sequence:
            # Or gradients would be added up for each sequence, not each row.
            table = lax.pcast(table, TENSOR, to="varying")
        found = jnp.tile(table[places], (self.shape[0], 1))
        if not self.layout.sequence:
            return found
        part = found.shape[0] // self.layout.tensor
        start = lax.axis_index(TENSOR).astype(jnp.int32) * part
        return lax.dynamic_slice_in_dim(found, start, part)

    def product(self, linear: Linear, x: Activations) -> Activations:
        """A product with the rows first."""
        return self.matmul(linear.matrix, x)

    def expand(
        self, linear: Linear, x: Activations, then: Function | None = None
    ) -> Activations:
        """A product that gives this device's features of all rows.

        Rows that are kept in parts are gathered, and once more for the weights'
        gradient rather than kept (Korthikanti et al. 2022, arXiv:2205.05198, section
        4.2.2).
        """
        if self.layout.sequence:
            y = jax.checkpoint(lambda x: linear(self.gather(x), self))(x)
        else:
            y = linear(x, self)
        return y if then is None else then(y, -1)

    def add_up(self, x: Activations, *, part: int, whole: int) -> Activations:
        """Adds sums up; with sequence parallelism those of this device's rows."""
        if part < whole and self.layout.sequence:
            return lax.psum_scatter(x, TENSOR, tiled=True)
        return super().add_up(x, part=part, whole=whole)

    def split_heads(self, x: Activations, shape: tuple[int, ...]) -> Array:
        """As `[batch, seq, kv_heads, group + 2, head_dim]`."""
        return x.reshape(*self.shape, *shape)

    def fuse(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Keeps the parts, since products with rows first cost no more in parts."""
        return q, k, v

    def join_heads(self, x: Array) -> Activations:
        """From `[batch, seq, heads, head_dim]`."""
        return x.reshape(math.prod(self.shape), -1)

    def gather(self, x: Activations) -> Activations:
        """All rows, of which sequence parallelism leaves each device a part."""
        return lax.all_gather(x, TENSOR, tiled=True) if self.layout.sequence else x

    def share(self, x: Activations) -> Activations:
        """Sums gradients over devices once, for everything that reads `x`."""
        if self.layout.tensor == 1 or self.layout.sequence:
            return x
        return lax.pcast(x, TENSOR, to="varying")

    def mix(
        self, mixture: Mixture, x: Activations, routing: moe.Routing
    ) -> Activations:
        """Has rows answered by experts, on whichever device these are."""
        if self.layout.expert == 1:
            return super().mix(mixture, x, routing)
        if self.layout.capacity is None:
            num_own = mixture.down.weight.shape[0]
            return experts.gather(x, routing, mixture.answer, num_own=num_own)
        num_rows, top_k = routing.expert.shape
        num_experts = routing.probs.shape[1]
        places = self.layout.places(num_rows, top_k=top_k, num_experts=num_experts)
        return experts.exchange(x, routing, mixture.answer, capacity=places)

    def unembed(
        self, table: Array, x: Activations, num_words: int
    ) -> Float[Array, "rows words"]:
        """Gives the logits of this device's words."""
        wide = np.promote_types(x.dtype, np.float32)
        return self.matmul(table, self.gather(x), dtype=wide)

    def attend(
        self, _: Any, qkv: rotary.Projected, angles: rotary.Angles | None, carry: Any
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
        """Attends within each sequence: a `transformer.Attend`."""
        q, k, v = qkv if isinstance(qkv, tuple) else rotary.split_heads(qkv, self.axis)
        if angles is not None:
            q, k = (rotary.rotate(x, *angles, self.axis) for x in (q, k))
        heads = [x.reshape(*self.shape, -1, x.shape[-1]) for x in (q, k, v)]
        how: Any = {"degree": self.layout.ring, "window": self.config.window}
        attend = functools.partial(sequence.in_a_ring, **how)
        return sequence.by_heads(*heads, attend, degree=self.layout.ulysses), carry

    def auxiliary(
        self, routings: Sequence[moe.Routing], dtype: DTypeLike
    ) -> Float[Array, ""]:
        """What mixtures add to the mean loss: of all of them the mean, weighted."""
        every = self.config.experts
        if every is None or not routings:
            return jnp.zeros((), dtype)
        copies, balance = meshes.batch_axes(self.layout), []
        for routing in routings:
            loads = moe.load(routing)
            loads = lax.stop_gradient(lax.pmean(loads, copies) if copies else loads)
            balance.append(moe.balance_loss(routing, loads))
        total = functools.reduce(jnp.add, balance)
        if self.layout.sequence:  # equal on every device
            total = lax.pmean(total, TENSOR)
        num_mixtures = self.config.num_layers - every.num_dense_layers
        return (total * (every.balance_weight / num_mixtures)).astype(dtype)
