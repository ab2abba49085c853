"""What serving a model costs: keys and values kept, work of a step, time on a device.

A step reads every weight once however many tokens it works on, and of each sequence the
keys and values kept. So operations per byte grow with the tokens of a step, and what
decides the time, products or memory, with them: the roofline of Williams et al. 2009
(doi:10.1145/1498765.1498785), for decoding as in Pope et al. 2022, arXiv:2211.05102,
sections 2 and 3. Activations are left out: they stay near the products.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from scaling.costs import flops as costs_flops
from scaling.costs import parameters
from scaling.costs.devices import Device, Precision
from scaling.costs.flops import Attention, forward_terms, total_flops
from scaling.shapes import ModelShape


class ServingWork(NamedTuple):
    """One step of serving.

    Attributes:
      flops: operations of its products.
      weight_bytes: weights read.
      kv_bytes: keys and values read and written.
    """

    flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def bytes(self) -> float:
        """All that is read and written."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


class Roofline(NamedTuple):
    """What work takes on a device at best.

    Attributes:
      compute_s: time of the products at the device's peak.
      memory_s: time to read and write at its bandwidth.
      time_s: the longer of the two, as if they overlapped wholly.
      bound: which it is.
    """

    compute_s: float
    memory_s: float
    time_s: float
    bound: Literal["compute", "memory"]


def kv_bytes_per_token(model: ModelShape, *, kv_bytes: int | float = 2) -> int | float:
    """Bytes of keys and values that one more token takes in all layers.

    Llama-2-7B in 16 bits: 524,288. Latent attention keeps a latent and a rotary key
    instead: DeepSeek-V3 70,272.

    Args:
      model: its shape.
      kv_bytes: of one number.
    """
    return model.num_layers * model.attention.cached_numbers * kv_bytes


def sequence_kv_bytes(
    model: ModelShape, tokens: int, *, kv_bytes: int | float = 2
) -> int | float:
    """Bytes that a sequence holds; a layer with a window forgets what is behind it.

    (A pool that does not give pages behind windows back holds more.)
    """
    kept = model.over_layers(lambda window: min(tokens, window or tokens))
    return kept * model.attention.cached_numbers * kv_bytes


def weight_bytes_read(
    model: ModelShape, tokens: int, *, weight_bytes: int | float = 2
) -> int | float:
    """Bytes of weights that a step on some tokens reads.

    Tables are read where they are looked up alone. Of a mixture's e experts a step of x
    tokens meets e (1 - (1 - k/e)^x) on average, if they are drawn alike.
    """
    places, numbers = parameters.place_counts(model), 0.0
    for weight in parameters.list_weights(model):
        if weight.place == "ahead":
            continue
        copies = weight.size * places[weight.place]
        if weight.part in ("embedding", "positions"):
            numbers += tokens * model.hidden_size
        elif weight.stored > 1:
            missed = (1 - weight.active / weight.stored) ** tokens
            numbers += copies * weight.stored * (1 - missed)
        else:
            numbers += copies * max(weight.stored, weight.applied)
    return numbers * weight_bytes


def decode_work(
    model: ModelShape,
    *,
    batch: int,
    context: int,
    weight_bytes: int | float = 2,
    kv_bytes: int | float = 2,
) -> ServingWork:
    """A step of decoding: one token of each sequence.

    Args:
      model: its shape.
      batch: sequences, at least 1.
      context: keys that each meets, its own included, at least 1.
      weight_bytes: of one weight.
      kv_bytes: of one number of K or V.
    """
    terms = costs_flops.decode_terms(model, batch=batch, context=context)
    return ServingWork(
        flops=total_flops(terms),
        weight_bytes=weight_bytes_read(model, batch, weight_bytes=weight_bytes),
        # The context is read, its newest token was written just before.
        kv_bytes=batch * sequence_kv_bytes(model, context, kv_bytes=kv_bytes)
        + batch * kv_bytes_per_token(model, kv_bytes=kv_bytes),
    )


def prefill_work(
    model: ModelShape,
    *,
    batch: int,
    prompt: int,
    past: int = 0,
    attention: Attention = "causal",
    weight_bytes: int | float = 2,
    kv_bytes: int | float = 2,
) -> ServingWork:
    """Reads prompts, or chunks of them, with the logits of each last token.

    Args:
      model: its shape.
      batch: sequences, at least 1.
      prompt: new tokens of each, at least 1.
      past: tokens before them that are kept already.
      attention: how pairs of query and key are counted.
      weight_bytes: of one weight.
      kv_bytes: of one number of K or V.
    """
    sizes = {"batch": batch, "sequence": prompt, "past": past}
    terms = forward_terms(model, **sizes, attention=attention, logits="last")
    # Written once and read once; how often tiles of K and V are read again is a
    # matter of the kernel.
    written = batch * prompt * kv_bytes_per_token(model, kv_bytes=kv_bytes)
    read = batch * sequence_kv_bytes(model, past + prompt, kv_bytes=kv_bytes)
    return ServingWork(
        flops=total_flops(terms),
        weight_bytes=weight_bytes_read(
            model, batch * prompt, weight_bytes=weight_bytes
        ),
        kv_bytes=written + read,
    )


def roofline(
    work: ServingWork,
    device: Device,
    *,
    precision: Precision = "bfloat16",
    num_devices: int = 1,
) -> Roofline:
    """Time that work takes at least, divided evenly over devices that never wait."""
    compute_s = work.flops / device.rate(precision) / num_devices
    memory_s = work.bytes / device.bandwidth / num_devices
    bound = "compute" if compute_s > memory_s else "memory"
    return Roofline(compute_s, memory_s, max(compute_s, memory_s), bound)


def find_compute_bound_size(
    is_compute_bound: Callable[[int], bool], *, most: int = 1 << 24
) -> int | None:
    """The smallest size, such as a batch, from which on products take the time.

    Args:
      is_compute_bound: whether they do at a size; once true it stays so.
      most: the largest size tried.

    Returns:
      The size, or None if they do not up to `most`: each more sequence then brings more
      bytes of keys and values than its products can hide.
    """
    high = 1
    while not is_compute_bound(high):
        if high > most:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high


def max_batch(
    model: ModelShape,
    device: Device,
    *,
    context: int,
    num_devices: int = 1,
    weight_bytes: int | float = 2,
    kv_bytes: int | float = 2,
    memory_share: float = 1.0,
) -> int:
    """Sequences whose keys and values fit beside the weights, nothing else kept there.

    With a context of 1 these are the tokens that fit, with one of 16 the pages of 16.

    Args:
      model: its shape.
      device: one of those that share it.
      context: tokens of each sequence.
      num_devices: how many share weights, keys and values evenly.
      weight_bytes: of each parameter.
      kv_bytes: of each number kept.
      memory_share: of the devices' memory that is used at all, in (0, 1].

    Returns:
      0 if the weights themselves do not fit.
    """
    weights = parameters.count_parameters(model).total * weight_bytes
    left = memory_share * device.memory_bytes * num_devices - weights
    return max(0, int(left // sequence_kv_bytes(model, context, kv_bytes=kv_bytes)))
