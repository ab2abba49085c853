"""Time of a serving step as a function of arrays: a cost model.

`serving` computes one size; a simulator evaluates millions of steps, under `jit` and
`vmap`, with chunks of prompts and decoding in the same step. So the counts of a model
are reduced to a few coefficients, a pytree of scalars, and a step is a few sums over
its slots. A `StepCost` is a cost model of `jaxkv.simulation`; `step_work` takes the
lengths of each slot instead of their sums.
"""

from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import validation
from jaxkv.simulation import Work
from scaling.costs import parameters, serving
from scaling.costs.devices import Device, Precision
from scaling.costs.flops import decode_terms
from scaling.shapes import ModelShape


class StepCost(NamedTuple):
    """Coefficients of a model on devices; every leaf may be batched by `vmap`.

    Attributes:
      flops_per_token: products of a token, without attention scores and the head.
      flops_per_logit: products of the head.
      flops_per_key: scores and values of a query and a key, in a mean layer.
      weight_bytes: bytes of weights that every step reads.
      expert_bytes: bytes of all routed experts; 0 without experts.
      expert_share: k / e, the share of experts that a token uses.
      kv_bytes: bytes of keys and values of one token that a mean layer reads.
      state_bytes: bytes of the states of a sequence in all recurrent layers.
      window: window of each kind of layer; a huge number without one.
      layers: number of layers of each kind, in layers of mean `flops_per_key`.
      read_layers: the same, in layers of mean `kv_bytes`.
      written_share: 0 for layers that read K and V of other layers, else 1.
      flops_per_s: operations per second of all devices.
      bytes_per_s: memory bandwidth of all devices.
      overhead_s: fixed time of a step.
    """

    flops_per_token: Float[Array, ""]
    flops_per_logit: Float[Array, ""]
    flops_per_key: Float[Array, ""]
    weight_bytes: Float[Array, ""]
    expert_bytes: Float[Array, ""]
    expert_share: Float[Array, ""]
    kv_bytes: Float[Array, ""]
    state_bytes: Float[Array, ""]
    window: Float[Array, " kinds"]
    layers: Float[Array, " kinds"]
    read_layers: Float[Array, " kinds"]
    written_share: Float[Array, " kinds"]
    flops_per_s: Float[Array, ""]
    bytes_per_s: Float[Array, ""]
    overhead_s: Float[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a simulated step in s; 0 for a step without tokens.

        Sums over the batch do not give the tokens within a window, so each row is
        counted with at most its window: exact if no context or every context exceeds
        it, and an upper bound otherwise. Copies and swaps of pages take no time.
        """
        w: Work = jax.tree.map(lambda x: x.astype(jnp.float32), work)
        tokens = w.num_decode_rows + w.num_prompt_rows
        # Queries of a chunk attend to earlier tokens and to themselves.
        chunk_pairs = (w.prompt_squares + w.num_prompt_rows) / 2
        decoded = w.num_decode_rows * self.window
        prompted = w.num_prompt_rows * self.window
        pairs = jnp.minimum(w.decode_pairs, decoded) + jnp.minimum(
            chunk_pairs, prompted
        )
        num_read = jnp.minimum(w.decode_context, decoded) + jnp.minimum(
            w.prompt_context, prompted
        )
        flops = (
            tokens * self.flops_per_token
            + w.num_logits * self.flops_per_logit
            + jnp.sum(pairs * self.layers, dtype=jnp.float32) * self.flops_per_key
        )
        moved_rows = num_read + tokens * self.written_share
        num_read = jnp.sum(moved_rows * self.read_layers, dtype=jnp.float32)
        met = 1.0 - (1.0 - self.expert_share) ** tokens
        moved = self.weight_bytes + self.expert_bytes * met + self.kv_bytes * num_read
        # Each sequence reads and writes its states once.
        moved += 2 * self.state_bytes * (w.num_decodes + w.num_prompts)
        seconds = jnp.maximum(flops / self.flops_per_s, moved / self.bytes_per_s)
        return jnp.where(tokens > 0, seconds + self.overhead_s, 0.0)


class StepWork(NamedTuple):
    """Work and time of a step.

    Attributes:
      flops: operations.
      bytes: bytes of weights, keys and values read and written.
      time_s: the larger of compute and memory time, plus the overhead; 0 for a step
        without tokens.
    """

    flops: Float[Array, ""]
    bytes: Float[Array, ""]
    time_s: Float[Array, ""]


@validation.checks_numbers(
    compute_share="(0, 1]",
    bandwidth_share="(0, 1]",
    overhead_s=validation.SECONDS,
)
def step_cost(
    model: ModelShape,
    device: Device,
    *,
    num_devices: int = 1,
    precision: Precision = "bfloat16",
    weight_bytes: int = 2,
    kv_bytes: int = 2,
    compute_share: float = 1.0,
    bandwidth_share: float = 1.0,
    overhead_s: float = 0.0,
) -> StepCost:
    """Computes the coefficients of a model on devices.

    Latent attention is counted as in decoding, on the latents. States of recurrent
    layers are read and written once per sequence and step, as by `serving`.

    Args:
      model: shape of the model.
      device: the device.
      num_devices: devices that share the work evenly, without waiting.
      precision: precision of the products.
      weight_bytes: bytes of a weight.
      kv_bytes: bytes of a number of K or V.
      compute_share: reached share of the device's rate, in (0, 1].
      bandwidth_share: reached share of the device's bandwidth, in (0, 1].
      overhead_s: fixed time of a step, at least 0.

    Raises:
      ValueError: a share or count is out of range.
    """
    terms = decode_terms(model, context=1)
    head = sum(x.flops for x in terms if x.part == "head")
    keys = sum(x.flops for x in terms if x.growth == "s^2")
    keys /= model.num_attention_layers
    routed = 0
    if (experts := model.experts) is not None:
        routed = sum(
            x.size * x.stored * parameters.place_counts(model)[x.place]
            for x in parameters.list_weights(model)
            if x.stored > 1 and x.place != "ahead"
        )
    read_bytes = serving.weight_bytes_read(model, 1, weight_bytes=weight_bytes)
    share = experts.top_k / experts.num_experts if experts else 0.0
    kinds = Counter(model.attention_layers)
    num_layers = model.num_attention_layers
    widths = model.over_layers(lambda _, shape: shape.num_q_heads * shape.key_dim)
    read = model.over_layers(lambda _, shape: shape.read_numbers)
    numbers = {
        "flops_per_token": sum(x.flops for x in terms if x.growth == "s") - head,
        "flops_per_logit": head,
        "flops_per_key": keys,
        "weight_bytes": read_bytes - share * routed * weight_bytes,
        "expert_bytes": routed * weight_bytes,
        "expert_share": share,
        "kv_bytes": read / num_layers * kv_bytes,
        "state_bytes": serving.sequence_state_bytes(model, kv_bytes=kv_bytes),
        "window": [float(window or _ALL) for window, _ in kinds],
        "layers": [
            count * shape.num_q_heads * shape.key_dim * num_layers / widths
            for (_, shape), count in kinds.items()
        ],
        "read_layers": [
            count * shape.read_numbers * num_layers / read
            for (_, shape), count in kinds.items()
        ],
        "written_share": [
            shape.cached_numbers / shape.read_numbers for _, shape in kinds
        ],
        "flops_per_s": device.rate(precision) * compute_share * num_devices,
        "bytes_per_s": device.bandwidth * bandwidth_share * num_devices,
        "overhead_s": overhead_s,
    }
    return StepCost(**{name: jnp.float32(value) for name, value in numbers.items()})


_ALL = 1 << 24
"""More tokens than any sequence has; exact in float32."""


def step_work(
    cost: StepCost,
    new: Int[Array, " slots"],
    past: Int[Array, " slots"],
    num_logits: Int[Array, ""],
) -> StepWork:
    """Computes work and time of one step.

    Args:
      cost: the coefficients.
      new: new tokens of each slot: 1 in decoding, a chunk of a prompt, or 0.
      past: tokens of each slot in the KV cache.
      num_logits: number of tokens that need logits.

    Returns:
      Operations, bytes and time. A query of a chunk attends to earlier tokens and to
      its own, within the layer's window.
    """
    fed = new.astype(jnp.float32)
    before = past.astype(jnp.float32)
    after = before + fed
    window = cost.window[:, None]
    met = _keys_below(after[None, :], window) - _keys_below(before[None, :], window)
    keys = jnp.sum(met * cost.layers[:, None], dtype=jnp.float32)
    tokens = jnp.sum(fed, dtype=jnp.float32)
    flops = (
        tokens * cost.flops_per_token
        + num_logits.astype(jnp.float32) * cost.flops_per_logit
        + keys * cost.flops_per_key
    )
    cached_keys = jnp.minimum(after[None, :], window) * cost.read_layers[:, None]
    read = jnp.sum(jnp.where(fed[None, :] > 0, cached_keys, 0.0), dtype=jnp.float32)
    written_layers = cost.read_layers * cost.written_share
    written = tokens * jnp.sum(written_layers, dtype=jnp.float32)
    met_experts = 1.0 - (1.0 - cost.expert_share) ** tokens
    num_fed = jnp.sum(new > 0, dtype=jnp.float32)
    moved = (
        cost.weight_bytes
        + cost.expert_bytes * met_experts
        + cost.kv_bytes * (read + written)
        + 2 * cost.state_bytes * num_fed
    )
    time_s = jnp.maximum(flops / cost.flops_per_s, moved / cost.bytes_per_s)
    is_idle = tokens == 0
    return StepWork(
        flops=flops,
        bytes=jnp.where(is_idle, 0.0, moved),
        time_s=jnp.where(is_idle, 0.0, time_s + cost.overhead_s),
    )


def _keys_below(
    length: Float[Array, "1 slots"], window: Float[Array, "kinds 1"]
) -> Float[Array, "kinds slots"]:
    """Returns the keys of queries before `length`: the sum of min(position, window)."""
    inside = jnp.minimum(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window
