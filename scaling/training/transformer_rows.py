"""A transformer over whole sequences with activations as rows, for training.

The layers and parameters are those of serving (`jaxkv.models.layers`). In training, the
gradient of a weight is a product of two activations, which is faster with rows than
with the columns that suit decoding.

With a `Layout` the orientation is that of one device of a mesh, inside `jax.shard_map`,
with its part of parameters and tokens.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkv import models, parallel
from jaxkv.models import (
    TENSOR,
    Activations,
    Angles,
    Function,
    LatentProjection,
    LayerAttention,
    Linear,
    ModelConfig,
    Orientation,
    Params,
    Projected,
    QueryProjection,
    RecurrentProjection,
    RoutedExperts,
    Routing,
    balance_loss,
    embed_own_tokens,
    empty_kv,
    expand_latent,
    expert_load,
    load_as_gradient,
    merge_ahead,
    rotate_queries,
    run_batch,
)
from jaxkv.parallel import (
    gather_rows,
    ring_attention,
    token_positions,
    ulysses_attention,
)
from scaling.costs import Layout
from scaling.training import meshes

ONE = Layout()
"""A single device."""


class ForwardOutput(NamedTuple):
    """Output of a forward pass."""

    logits: Float[Array, "batch seq vocab"]
    """Logits of the next token, at least float32."""
    auxiliary: Float[Array, ""]
    """Weighted auxiliary loss in nats, which training adds to the mean loss; zero for
    models without one."""


def run_transformer(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    layout: Layout = ONE,
) -> ForwardOutput:
    """Runs a model over sequences, each from its beginning.

    Parameters are those of `transformer.init_params`. With a `layout` the tokens are
    those of this device, in the order of `sequence.zigzag_order`, and the logits those
    of its part of the vocabulary.

    Raises:
      ValueError: the model has fewer learned positions than `seq`.
    """
    return run_with_ahead(params, tokens, config=config, layout=layout, num_ahead=0)[0]


class Activity(NamedTuple):
    """Activations of a forward pass, by place in the model.

    Attributes:
      residual: input of the first layer, and the sum that each layer adds to it.
      logits: logits of the next token.
    """

    residual: list[Float[Array, "rows hidden"]]
    logits: Float[Array, "rows vocab"]


def layer_activity(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig
) -> Activity:
    """Returns the activations of a model over sequences, each from its beginning."""
    model = models.merge(config, params)
    rows = RowOrientation(config=config, shape=tokens.shape)
    positions = rows.positions()
    token = tokens.reshape(-1)
    x = model.embedded(token, positions, rows)
    rows = model.add_layer_inputs(rows, token, x)
    kv = empty_kv(config, tokens.shape, x.dtype)
    states = model.run(x, positions, rows.attend, kv, rows)
    streams = [*states.taps, states.last]
    residual = [streams[0], *(y - x for x, y in itertools.pairwise(streams))]
    logits = model.logits(model.final_norm(states.last, rows.axis), rows)
    return Activity(residual, logits)


def run_with_ahead(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    layout: Layout = ONE,
    num_ahead: int,
) -> list[ForwardOutput]:
    """Runs a model and its first modules for multi-token prediction over sequences.

    Row p of every module has token p and a state of token p - 1: the model's after the
    final norm in module 1, that of module k - 1 in module k. Its logits are those of
    token p + 1; the model itself has read the tokens up to p - k. The paper's module k
    has rows from k on only. Here earlier rows exist too, with zeros for the missing
    states, as in drafting, where every row has K and V.

    Args:
      params: as in `run_transformer`.
      tokens: as in `run_transformer`.
      config: shape of the model.
      layout: as in `run_transformer`; with modules, each device has whole sequences and
        all of their rows.
      num_ahead: number of modules to run, at most `config.num_ahead_layers`.

    Returns:
      The output of the model, then those of its modules. The auxiliary losses of all
      modules add up to the weighted mean over them.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23.
    """
    config.check_length(tokens.shape[1] * layout.context, "seq")
    model = models.merge(config, params)
    rows = RowOrientation(config=config, shape=tokens.shape, layout=layout)
    positions = rows.positions()
    token = tokens.reshape(-1)
    outputs = []
    only = None
    x = model.embedded(token, positions, rows)
    rows = model.add_layer_inputs(rows, token, x)
    kv = empty_kv(config, tokens.shape, x.dtype)
    for index in range(1 + num_ahead):
        layer_states = model.run(x, positions, rows.attend, kv, rows, only=only)
        states = model.final_norm(layer_states.last, rows.axis)
        logits = model.logits(states, rows)
        auxiliary = rows.auxiliary(layer_states.routings, logits.dtype)
        output = ForwardOutput(logits.reshape(*tokens.shape, -1), auxiliary)
        outputs.append(output)
        if index == num_ahead:
            break
        module, model = merge_ahead(config, params, index)
        rows = dataclasses.replace(rows, config=model.config)
        only = (index,)
        before = states.reshape(*tokens.shape, -1)[:, :-1]
        before = jnp.pad(before, ((0, 0), (1, 0), (0, 0))).reshape(states.shape)
        embeddings = rows.embed(model.embed.weight[...], token, config.vocab_size)
        x = module.inputs(embeddings, before, rows)
        x = model.embedded(token, positions, rows, x)
    return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrientation(Orientation):
    """Activations as `[rows, features]`, token by token of each sequence."""

    config: ModelConfig
    """Config of the whole model."""
    shape: tuple[int, ...]
    """Numbers of sequences and of tokens of each, on this device."""
    layout: Layout = ONE
    """Division of the model."""
    axis: ClassVar[int] = -1

    def positions(self) -> Int32[Array, " seq"]:
        """Returns the positions of this device's tokens of each sequence."""
        size = self.shape[1] * self.layout.context
        ring = self.layout.ring
        return token_positions(size, ring=ring, ulysses=self.layout.ulysses)

    def embed(self, table: Array, tokens: Array, num_words: int) -> Activations:
        """Looks up tokens; with sequence parallelism, the rows of this device."""
        if not self.layout.sequence:
            return super().embed(table, tokens, num_words)
        rows = embed_own_tokens(table, tokens)
        return lax.psum_scatter(rows, TENSOR, tiled=True)

    def look_up_positions(self, table: Array, places: Array) -> Activations:
        """Looks up the positions of one sequence, and repeats them for all."""
        if self.layout.sequence:
            # Otherwise gradients would be summed for each sequence, not each row.
            table = lax.pcast(table, TENSOR, to="varying")
        rows = jnp.tile(table[places], (self.shape[0], 1))
        if not self.layout.sequence:
            return rows
        part = rows.shape[0] // self.layout.tensor
        start = lax.axis_index(TENSOR).astype(jnp.int32) * part
        return lax.dynamic_slice_in_dim(rows, start, part)

    def product(self, linear: Linear, x: Activations) -> Activations:
        """Multiplies rows by a matrix."""
        return self.matmul(linear.matrix, x)

    def expand(self, linear: Any, x: Activations, then: Function | None = None) -> Any:
        """Multiplies all rows by this device's columns of a matrix.

        With sequence parallelism rows are gathered, and gathered again for the weights'
        gradient instead of kept (Korthikanti et al. 2022, arXiv:2205.05198, section
        4.2.2).
        """
        if self.layout.sequence:
            y = jax.checkpoint(lambda x: linear(self.gather(x), self))(x)
        else:
            y = linear(x, self)
        # XLA may fuse GELU into oneDNN's product, and then reads its result where the
        # gradient needs GELU's input (jaxlib 0.11.2).
        return y if then is None else then(lax.optimization_barrier(y), -1)

    def add_up(self, x: Activations, *, part: int, full_size: int) -> Activations:
        """Sums partial products; with sequence parallelism, of this device's rows."""
        if part < full_size and self.layout.sequence:
            return lax.psum_scatter(x, TENSOR, tiled=True)
        return super().add_up(x, part=part, full_size=full_size)

    def split_heads(self, x: Activations, shape: tuple[int, ...]) -> Array:
        """Reshapes to `[batch, seq, kv_heads, group + 2, head_dim]`, as `shape`."""
        return x.reshape(*self.shape, *shape)

    def fuse(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Returns Q, K and V separately: products of rows do not gain from fusion."""
        return q, k, v

    def join_heads(self, x: Array) -> Activations:
        """Reshapes from `[batch, seq, heads, head_dim]`."""
        return x.reshape(math.prod(self.shape), -1)

    def gather(self, x: Activations) -> Activations:
        """Gathers all rows, which sequence parallelism divides."""
        return lax.all_gather(x, TENSOR, tiled=True) if self.layout.sequence else x

    def share(self, x: Activations) -> Activations:
        """Makes gradients sum over devices once for all uses of `x`."""
        if self.layout.tensor == 1 or self.layout.sequence:
            return x
        return lax.pcast(x, TENSOR, to="varying")

    def mix(
        self, mixture: RoutedExperts, x: Activations, routing: Routing
    ) -> Activations:
        """Computes the outputs of experts for rows, across devices."""
        if self.layout.expert == 1:
            return super().mix(mixture, x, routing)
        if self.layout.capacity is None:
            num_own = mixture.down.weight.shape[0]
            return gather_rows(x, routing, mixture.answer, num_own=num_own)
        num_rows, top_k = routing.expert.shape
        num_experts = routing.probs.shape[1]
        places = self.layout.places(num_rows, top_k=top_k, num_experts=num_experts)
        return parallel.exchange(x, routing, mixture.answer, capacity=places)

    def unembed(
        self, table: Array, x: Activations, num_words: int
    ) -> Float[Array, "rows words"]:
        """Returns the logits of this device's part of the vocabulary."""
        wide = np.promote_types(x.dtype, np.float32)
        return self.matmul(table, self.gather(x), dtype=wide)

    def attend(
        self,
        layer: LayerAttention,
        qkv: Projected | RecurrentProjection,
        angles: Angles | None,
        carry: dict[int, tuple[Array, Array]],
    ) -> tuple[Float[Array, "..."], dict[int, tuple[Array, Array]]]:
        """Attends within each sequence: a `transformer.Attend`.

        The carry has the K and V that later layers read, see `models.empty_kv`.
        """
        if isinstance(qkv, RecurrentProjection):
            return run_batch(qkv, self.shape, axis=self.axis), carry
        source = self.config.kv_source(layer.kind)
        if isinstance(qkv, QueryProjection):
            q = rotate_queries(qkv, angles, self.axis)
            k, v = carry[source]
        elif isinstance(qkv, LatentProjection):
            q, k, v = expand_latent(qkv, angles, self.axis)
        else:
            split = isinstance(qkv, tuple)
            q, k, v = qkv if split else models.split_heads(qkv, self.axis)
            if angles is not None:
                q, k = models.rotate_pair(q, k, angles, self.axis)
        heads = [x.reshape(*self.shape, -1, x.shape[-1]) for x in (q, k, v)]
        if source in carry:
            carry = {**carry, source: (heads[1], heads[2])}
        attend = functools.partial(
            ring_attention,
            degree=self.layout.ring,
            window=layer.kind.window,
            scale=layer.scoring.scale,
            softcap=layer.scoring.softcap,
            sinks=layer.scoring.sinks,
        )
        if layer.scoring.sinks is not None and self.layout.ulysses > 1:
            raise ValueError(f"sinks need ulysses=1, not {self.layout.ulysses}")
        return ulysses_attention(*heads, attend, degree=self.layout.ulysses), carry

    def auxiliary(
        self, routings: Sequence[Routing], dtype: DTypeLike
    ) -> Float[Array, ""]:
        """Returns the mean auxiliary loss of the mixtures of experts, weighted.

        With selection biases, their gradient is the load: see `moe.load_as_gradient`.
        """
        every = self.config.experts
        if every is None or not routings:
            return jnp.zeros((), dtype)
        copies = meshes.batch_axes(self.layout)
        balance = []
        carried = []
        for routing in routings:
            loads = expert_load(routing)
            loads = lax.stop_gradient(lax.pmean(loads, copies) if copies else loads)
            balance.append(balance_loss(routing, loads))
            if every.gate_bias:
                carried.append(load_as_gradient(routing, loads))
        terms = [
            functools.reduce(jnp.add, parts) for parts in (balance, carried) if parts
        ]
        if self.layout.sequence:  # equal on every device
            terms = [lax.pmean(term, TENSOR) for term in terms]
        terms[0] = terms[0] * (every.balance_weight / self.config.num_mixtures)
        return functools.reduce(jnp.add, terms).astype(dtype)
