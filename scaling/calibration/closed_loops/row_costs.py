"""Work of a measured server: counts of its model in the format of its weights.

The time of a step is that of `server_cost`; here its counts are made for servers with
weights in 8 and 4 bits, ranks of data-parallel attention, and experts on few devices.
Counts are scalars, so that many servers are stacked and mapped over.

Assumed, since tables do not tell: weights in 4 bits are those of the routed experts in
a mixture, and all matrices of the layers in a dense model; embedding, head and norms
have 16 bits. Products run at the rate of the format where the device has one, else at
that of 16 bits. Unless a row has `cache_bytes`, K and V have 8 bits with weights below
16 bits on TensorRT-LLM, and on SGLang in mixtures; else 16, the default of vLLM.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scaling.calibration.closed_loops.measured_servers import (
    MeasuredServer,
    WeightFormat,
)
from scaling.costs import MEMORY_SHARE, Device, StepCost, list_weights, place_counts
from scaling.shapes import HeadAttention, ModelShape

FORMAT_BYTES: dict[WeightFormat, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 1 / 16,
}
"""Bytes of a weight with its scales: NVFP4 has one of 8 bits for 16 weights, MXFP4 for
32, and groups of 32 integers have one of 16 bits."""
STATE_NUMBER_BYTES = 4
"""Bytes of a number of a recurrent state."""
WORKSPACE_BYTES = 2e9
"""Memory of a device without weights, K and V: activations and runtime."""


class RowWork(NamedTuple):
    """Counts of a server; leaves are scalars, or stacked along a leading axis."""

    counts: StepCost
    """Work in operations of 16 bits: those of other formats are scaled by the rates."""
    expert_flops: Float[Array, "..."]
    """Operations of the routed experts of a token, which `counts` excludes."""
    is_float8: Float[Array, "..."]
    """1 if the products of the layers have 8 bits, else 0."""
    is_4_bits: Float[Array, "..."]
    """1 if weights have 4 bits, else 0."""
    has_expert_ranks: Float[Array, "..."]
    """1 if devices divide whole experts, else 0."""
    kv_copies: Float[Array, "..."]
    token_link_s: Float[Array, "..."]
    num_reduces: Float[Array, "..."]
    other_devices: Float[Array, "..."]
    num_layers: Float[Array, "..."]
    num_mixture_layers: Float[Array, "..."]
    num_launches: Float[Array, "..."]
    """Weights of the layers with experts: each has kernels that a step launches."""
    kv_capacity: Float[Array, "..."]
    """Tokens whose K and V fit into memory, at least 1."""
    state_tokens: Float[Array, "..."]
    """State of the recurrent layers of a sequence, in tokens of K and V."""
    prefill_pairs: Float[Array, "..."]
    """Cost of a query-key pair in prefill over that in decoding: windows, and latents
    that are expanded to keys and values."""
    concurrency: Float[Array, "..."]
    prompt_tokens: Float[Array, "..."]
    answer_tokens: Float[Array, "..."]
    poll_steps: Float[Array, "..."]
    streamed_tokens: Float[Array, "..."]
    is_median_step: Float[Array, "..."]
    """1 for a median time between tokens, see `MeasuredServer`."""


def stack_work(servers: Sequence[MeasuredServer]) -> RowWork:
    """Returns the counts of servers, stacked along a leading axis, in float32."""
    return jax.tree.map(
        lambda *x: np.asarray(x, np.float32), *map(count_server, servers)
    )


@functools.lru_cache(maxsize=8192)
def count_server(server: MeasuredServer) -> RowWork:
    """Returns the counts of a server as numbers."""
    model = server.model
    device = server.device
    num = server.num_devices
    weights = _count_weights(model, device, server.weight_format, server.data_parallel)
    attention = model.attention
    heads = attention.num_kv_heads if isinstance(attention, HeadAttention) else 1
    ranks = server.tensor_parallel
    kv_copies = ranks / min(ranks, heads)
    kv_bytes = _kv_number_bytes(server) * attention.cached_numbers
    length = server.prompt_tokens + server.answer_tokens
    # Windowed layers attend to a share of the mean context.
    decode_share = _window_share(model, server.prompt_tokens + server.answer_tokens / 2)
    prompt_share = _window_share(model, server.prompt_tokens / 2)
    pair_flops = _pair_flops(model, is_absorbed=True) * decode_share
    prefill_flops = _pair_flops(model, is_absorbed=False) * prompt_share
    token_bytes = model.num_attention_layers * kv_bytes * kv_copies
    state_bytes = 0
    if model.recurrent is not None:
        numbers = model.recurrent.state_numbers * model.num_recurrent_layers
        state_bytes = STATE_NUMBER_BYTES * numbers
    room = num * (MEMORY_SHARE * device.memory_bytes - WORKSPACE_BYTES)
    room -= weights.bytes + weights.expert_bytes
    if not model.tie_embeddings:  # a tied head is among the weights
        room -= FORMAT_BYTES["bf16"] * model.vocab_size * model.hidden_size
    exchanged = 4 * model.hidden_size * (num - 1) / num
    num_reduces = 2 * model.num_layers if num > 1 else 0
    experts = model.experts
    numbers = {
        "flops_per_token": weights.flops,
        "flops_per_logit": weights.head_flops,
        "flops_per_key": pair_flops,
        "weight_bytes": weights.bytes,
        "expert_bytes": weights.expert_bytes,
        "expert_share": experts.top_k / experts.num_experts if experts else 0.0,
        "kv_bytes": kv_bytes * decode_share,
        "state_bytes": 0.0,  # counted as context, see `state_tokens`
        "window": 0.0,
        "layers": model.num_attention_layers,
        "read_layers": model.num_attention_layers,
        "written_share": 1.0,
        "flops_per_s": device.bfloat16 * num,
        "bytes_per_s": device.bandwidth * num,
        "overhead_s": 0.0,
    }
    counts = StepCost(**{name: jnp.float32(x) for name, x in numbers.items()})
    scalars = {
        "expert_flops": weights.expert_flops,
        "is_float8": float(server.weight_format == "fp8"),
        "is_4_bits": float(server.weight_format in ("fp4", "mxfp4", "int4")),
        "has_expert_ranks": float(server.expert_parallel > 1),
        "kv_copies": kv_copies,
        "token_link_s": num_reduces * exchanged / device.link,
        "num_reduces": num_reduces,
        "other_devices": max(num - 1, 1),
        "num_layers": model.num_layers,
        "num_mixture_layers": model.num_mixture_layers,
        "num_launches": _count_launches(model),
        "kv_capacity": max(room / (token_bytes * _window_share(model, length)), 1.0),
        "state_tokens": state_bytes / (token_bytes * decode_share),
        "prefill_pairs": prefill_flops / pair_flops,
        "concurrency": server.concurrency,
        "prompt_tokens": server.prompt_tokens,
        "answer_tokens": server.answer_tokens,
        "poll_steps": server.poll_steps,
        "streamed_tokens": server.streamed_tokens,
        "is_median_step": float(server.is_median_step),
    }
    return RowWork(
        counts=counts, **{name: jnp.float32(x) for name, x in scalars.items()}
    )


def find_peak_share(server: MeasuredServer) -> float:
    """Returns the share of the peak of products that the measured times imply.

    All operations of the prompts and answers, over the seconds of a request and the
    rate of the format of the weights; above 1 a row is wrong.

    Args:
      server: a server with a measured time per token.
    """
    assert server.token_s is not None
    work = count_server(server)
    counts = work.counts
    tokens = server.prompt_tokens + server.answer_tokens
    flops = tokens * float(counts.flops_per_token + work.expert_flops)
    flops += server.answer_tokens * float(counts.flops_per_logit)
    request_s = server.answer_tokens * server.token_s + (server.first_token_s or 0.0)
    return server.concurrency * flops / request_s / float(counts.flops_per_s)


class _WeightCounts(NamedTuple):
    bytes: float
    expert_bytes: float
    flops: float
    expert_flops: float
    head_flops: float


@functools.lru_cache(maxsize=256)
def _count_weights(
    model: ModelShape, device: Device, weight_format: WeightFormat, attention_ranks: int
) -> _WeightCounts:
    """Counts bytes, and operations of a token in units of 16-bit operations."""
    places = place_counts(model)
    only_experts = model.experts is not None and weight_format not in ("bf16", "fp8")
    slow_rate = device.bfloat16
    fast_rate = {
        "fp8": device.float8,
        "fp4": device.float4,
        "mxfp4": device.float4,
    }.get(weight_format, 0.0) or slow_rate
    dense = routed = flops = expert_flops = head_flops = 0.0
    for weight in list_weights(model):
        if weight.place == "ahead" or weight.part in ("embedding", "positions"):
            continue
        number = weight.size * places[weight.place]
        is_routed = weight.stored > 1
        is_quantized = bool(weight.applied) and weight.part != "head"
        is_quantized &= is_routed or not only_experts
        num_bytes = FORMAT_BYTES[weight_format if is_quantized else "bf16"]
        operations = 2 * number * weight.applied
        operations *= slow_rate / (fast_rate if is_quantized else slow_rate)
        if is_routed:
            routed += number * weight.stored * num_bytes
            expert_flops += operations
        elif weight.part == "head":
            dense += number * num_bytes
            head_flops += operations
        else:
            copies = attention_ranks if weight.part == "attention" else 1
            dense += number * num_bytes * copies
            flops += operations
    return _WeightCounts(dense, routed, flops, expert_flops, head_flops)


def _count_launches(model: ModelShape) -> float:
    """Returns the weights of the layers with experts."""
    places = place_counts(model)
    outside = ("embedding", "positions", "head")
    weights = [x for x in list_weights(model) if x.part not in outside]
    in_layers = sum(places[x.place] for x in weights if x.place != "ahead")
    return in_layers * model.num_mixture_layers / model.num_layers


def _kv_number_bytes(server: MeasuredServer) -> int:
    if server.cache_bytes is not None:
        return server.cache_bytes
    if server.weight_format == "bf16" or server.engine == "vllm":
        return 2
    return 1 if server.engine == "trtllm" or server.model.experts is not None else 2


def _window_share(model: ModelShape, context: float) -> float:
    """Returns the tokens that layers attend to, over layers times the context."""
    if not context:
        return 1.0
    windows = model.attention_windows
    shares = [min(1.0, (window or context) / context) for window in windows]
    return sum(shares) / len(windows)


def _pair_flops(model: ModelShape, *, is_absorbed: bool) -> int:
    """Returns the operations of a query and a key in one layer."""
    attention = model.attention
    if isinstance(attention, HeadAttention) or not is_absorbed:
        width = attention.key_dim + attention.value_dim
    else:
        width = attention.cached_numbers + attention.kv_rank
    return 2 * attention.num_q_heads * width
