"""Costs of serving a model: KV cache, work of a step, time on a device.

A step reads every weight once, for any number of tokens, and the KV cache of each
sequence. So operations per byte grow with the number of tokens, and decide whether
products or memory take the time: the roofline model of Williams et al. 2009
(doi:10.1145/1498765.1498785), for decoding as in Pope et al. 2022, arXiv:2211.05102,
sections 2 and 3. Activations are not counted: they stay in caches.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxkv import validation
from scaling.costs import flops as costs_flops
from scaling.costs import parameters
from scaling.costs.devices import Device, Precision
from scaling.costs.flops import Attention, forward_terms, total_flops
from scaling.shapes import AttentionShape, ModelShape

NUMBER_BYTES_RANGE = "[0.01, 100]"
"""Interval of the bytes of a weight or of a number of K or V."""


class ServingWork(NamedTuple):
    """Work of one serving step.

    Attributes:
      flops: operations of matrix products.
      weight_bytes: bytes of weights read.
      kv_bytes: bytes of keys, values and states read and written.
    """

    flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


class Roofline(NamedTuple):
    """Least time of a step on a device.

    Attributes:
      compute_s: time of the products at the device's peak rate.
      memory_s: time of reads and writes at the device's bandwidth.
      time_s: the larger of the two, assuming full overlap.
      bound: the resource that takes the larger time.
    """

    compute_s: float
    memory_s: float
    time_s: float
    bound: Literal["compute", "memory"]


@validation.checks_numbers(kv_bytes=NUMBER_BYTES_RANGE)
def kv_bytes_per_token(model: ModelShape, *, kv_bytes: int | float = 2) -> int | float:
    """Returns the bytes of keys and values of one token in all layers with attention.

    Llama-2-7B in 16 bits: 524,288. Latent attention caches a latent and a rotary key
    instead: DeepSeek-V3 70,272.

    Args:
      model: shape of the model.
      kv_bytes: bytes of one number.
    """
    return model.over_layers(lambda _, shape: shape.cached_numbers) * kv_bytes


@validation.checks_numbers(tokens=(0, 2**63), kv_bytes=NUMBER_BYTES_RANGE)
def sequence_kv_bytes(
    model: ModelShape, tokens: int, *, kv_bytes: int | float = 2
) -> int | float:
    """Returns the KV cache bytes of a sequence; windowed layers keep their window only.

    Pages that are not released behind windows hold `tokens` times
    `kv_bytes_per_token`.
    """
    numbers = model.over_layers(
        lambda window, shape: min(tokens, window or tokens) * shape.cached_numbers
    )
    return numbers * kv_bytes


def _read_kv_bytes(
    model: ModelShape, tokens: int, kv_bytes: int | float
) -> int | float:
    """Returns the KV cache bytes that all layers read, shared K and V once a layer."""
    numbers = model.over_layers(
        lambda window, shape: min(tokens, window or tokens) * shape.read_numbers
    )
    return numbers * kv_bytes


@validation.checks_numbers(
    num_pages=(0, 2**63), num_window_pages=(0, 2**63), kv_bytes=NUMBER_BYTES_RANGE
)
def pool_kv_bytes(
    model: ModelShape,
    *,
    num_pages: int,
    page_size: int = 16,
    num_window_pages: int = 0,
    kv_bytes: int | float = 2,
) -> int | float:
    """Returns the bytes of the keys and values of an engine's pages.

    Args:
      model: shape of the model.
      num_pages: pages of the pool.
      page_size: tokens of a page.
      num_window_pages: pages of the layers with a window, if they return behind it, see
        `EngineConfig.num_window_pages`; 0 if they have the pages of the pool.
      kv_bytes: bytes of one number.
    """

    def count(window: int | None, shape: AttentionShape) -> int:
        pages = num_window_pages if window and num_window_pages else num_pages
        return pages * shape.cached_numbers

    return model.over_layers(count) * page_size * kv_bytes


@validation.checks_numbers(kv_bytes=NUMBER_BYTES_RANGE)
def sequence_state_bytes(
    model: ModelShape, *, kv_bytes: int | float = 2
) -> int | float:
    """Returns the bytes of a sequence's states in all recurrent layers.

    States are float32 for any weights. Qwen3-Next-80B-A3B in 16 bits: 77,266,944.

    Args:
      model: shape of the model.
      kv_bytes: bytes of one number of the latest inputs of the convolution.
    """
    if (r := model.recurrent) is None:
        return 0
    layer_bytes = 4 * r.state_numbers + r.conv_numbers * kv_bytes
    return model.num_recurrent_layers * layer_bytes


def weight_bytes_read(
    model: ModelShape,
    tokens: int,
    *,
    weight_bytes: int | float = 2,
    weights: str = "model",
) -> int | float:
    """Returns the bytes of weights that a step on some tokens reads.

    Of embeddings, only the rows of the tokens are read. Of e experts, a step of x
    tokens reads e (1 - (1 - k/e)^x) on average, if they are drawn with equal
    probability. `weights` is the format of the layers' weights, see
    `parameters.bytes_of_weight`.
    """
    places = parameters.place_counts(model)
    rows = {"embedding": model.vocab_size, "positions": model.position_rows}
    num_bytes = 0.0
    for weight in parameters.list_weights(model):
        if weight.place == "ahead":
            continue
        size = parameters.bytes_of_weight(weight, weights, weight_bytes)
        copies = weight.size * places[weight.place]
        if weight.part in rows:
            num_bytes += size * tokens * (weight.size // rows[weight.part])
        elif weight.stored > 1:
            missed = (1 - weight.active / weight.stored) ** tokens
            num_bytes += size * copies * weight.stored * (1 - missed)
        else:
            num_bytes += size * copies * max(weight.stored, weight.applied)
    return num_bytes


@validation.checks_numbers(
    batch=validation.SIZES,
    context=validation.SIZES,
    weight_bytes=NUMBER_BYTES_RANGE,
    kv_bytes=NUMBER_BYTES_RANGE,
)
def decode_work(
    model: ModelShape,
    *,
    batch: int,
    context: int,
    weight_bytes: int | float = 2,
    weights: str = "model",
    kv_bytes: int | float = 2,
) -> ServingWork:
    """Returns the work of a decoding step: one token of each sequence.

    Args:
      model: shape of the model.
      batch: sequences, at least 1.
      context: keys of each query, its own included, at least 1.
      weight_bytes: bytes of one weight.
      weights: format of the layers' weights, see `parameters.bytes_of_weight`.
      kv_bytes: bytes of one number of K or V.
    """
    terms = costs_flops.decode_terms(model, batch=batch, context=context)
    return ServingWork(
        flops=total_flops(terms),
        weight_bytes=weight_bytes_read(
            model, batch, weight_bytes=weight_bytes, weights=weights
        ),
        # The context is read; the key of the newest token was written just before.
        kv_bytes=batch * _read_kv_bytes(model, context, kv_bytes)
        + batch * kv_bytes_per_token(model, kv_bytes=kv_bytes)
        + 2 * batch * sequence_state_bytes(model, kv_bytes=kv_bytes),
    )


@validation.checks_numbers(
    batch=validation.SIZES,
    prompt=validation.SIZES,
    past=(0, 2**63),
    weight_bytes=NUMBER_BYTES_RANGE,
    kv_bytes=NUMBER_BYTES_RANGE,
)
def prefill_work(
    model: ModelShape,
    *,
    batch: int,
    prompt: int,
    past: int = 0,
    attention: Attention = "causal",
    weight_bytes: int | float = 2,
    weights: str = "model",
    kv_bytes: int | float = 2,
) -> ServingWork:
    """Returns the work of prompts, or chunks of them, with logits of the last token.

    Args:
      model: shape of the model.
      batch: sequences, at least 1.
      prompt: new tokens of each sequence, at least 1.
      past: earlier tokens of each sequence in the KV cache.
      attention: convention for pairs of query and key.
      weight_bytes: bytes of one weight.
      weights: format of the layers' weights, see `parameters.bytes_of_weight`.
      kv_bytes: bytes of one number of K or V.
    """
    sizes = {"batch": batch, "sequence": prompt, "past": past}
    terms = forward_terms(model, **sizes, attention=attention, logits="last")
    # K and V are written once and read once; further reads of tiles depend on the
    # kernel.
    written = batch * prompt * kv_bytes_per_token(model, kv_bytes=kv_bytes)
    read = batch * _read_kv_bytes(model, past + prompt, kv_bytes)
    return ServingWork(
        flops=total_flops(terms),
        weight_bytes=weight_bytes_read(
            model, batch * prompt, weight_bytes=weight_bytes, weights=weights
        ),
        kv_bytes=written
        + read
        + 2 * batch * sequence_state_bytes(model, kv_bytes=kv_bytes),
    )


@validation.checks_numbers()
def roofline(
    work: ServingWork,
    device: Device,
    *,
    precision: Precision = "bfloat16",
    num_devices: int = 1,
) -> Roofline:
    """Returns the least time of work, divided evenly over devices without waiting."""
    compute_s = work.flops / device.rate(precision) / num_devices
    memory_s = work.bytes / device.bandwidth / num_devices
    bound = "compute" if compute_s > memory_s else "memory"
    return Roofline(compute_s, memory_s, max(compute_s, memory_s), bound)


@validation.checks_numbers(max_size=validation.SIZES)
def find_compute_bound_size(
    is_compute_bound: Callable[[int], bool], *, max_size: int = 1 << 24
) -> int | None:
    """Returns the smallest size, such as a batch, that is compute-bound.

    Args:
      is_compute_bound: predicate of a size; monotone, true from some size on.
      max_size: largest size to try.

    Returns:
      The size, or None if none up to `max_size` is compute-bound: each further sequence
      then adds more bytes of keys and values than its products can hide.
    """
    high = 1
    while not is_compute_bound(high):
        if high > max_size:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high


@validation.checks_numbers(
    context=validation.SIZES,
    weight_bytes=NUMBER_BYTES_RANGE,
    kv_bytes=NUMBER_BYTES_RANGE,
    memory_share="(0, 1]",
)
def max_batch(
    model: ModelShape,
    device: Device,
    *,
    context: int,
    num_devices: int = 1,
    weight_bytes: int | float = 2,
    weights: str = "model",
    kv_bytes: int | float = 2,
    memory_share: float = 1.0,
) -> int:
    """Returns the largest batch whose KV cache and states fit next to the weights.

    With a context of 1 this is the number of tokens that fit, with a context of 16 the
    number of pages of 16.

    Args:
      model: shape of the model.
      device: the device.
      context: tokens of each sequence.
      num_devices: devices that share weights, keys and values evenly.
      weight_bytes: bytes of each parameter.
      weights: format of the layers' weights, see `parameters.bytes_of_weight`.
      kv_bytes: bytes of each number in the KV cache.
      memory_share: usable share of the devices' memory, in (0, 1].

    Returns:
      The number of sequences; 0 if the weights do not fit.
    """
    places = parameters.place_counts(model)
    stored_bytes = sum(
        weight.size
        * places[weight.place]
        * weight.stored
        * parameters.bytes_of_weight(weight, weights, weight_bytes)
        for weight in parameters.list_weights(model)
        if weight.place != "ahead"
    )
    left = memory_share * device.memory_bytes * num_devices - stored_bytes
    sequence = sequence_kv_bytes(model, context, kv_bytes=kv_bytes)
    sequence += sequence_state_bytes(model, kv_bytes=kv_bytes)
    return max(0, int(left // sequence))
