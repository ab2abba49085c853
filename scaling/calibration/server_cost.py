"""Time of a step of a server: work of the model, times fitted coefficients.

The work is counted from the model's shape (`costs.step_cost`) and divided by the rates
of the devices' data sheets. The coefficients are shares of these rates, and overheads
in s. They are scalars of a pytree, so `vmap` maps a cost over draws of them. A
`ServerCost` is a cost model of `jaxkv.simulation`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.simulation import Work
from scaling.costs import (
    Device,
    Layout,
    StepCost,
    Traffic,
    decode_traffic,
    step_cost,
)
from scaling.shapes import HeadAttention, ModelShape

COST_VERSION = 1
"""Version of the cost model: raised when a coefficient changes its meaning."""

type Scalar = Float[Array, "..."] | Float[np.ndarray, "..."] | float


class ServerCoefficients(NamedTuple):
    """Coefficients of a server; each leaf may be batched. All are above 0.

    Shares are of a data sheet's rate. Coefficients of a step come first; `ingest_s` and
    those after it are of a request.
    """

    product_share: Scalar
    """Share of the peak of matrix products."""
    weight_share: Scalar
    """Share of the memory bandwidth in reading weights."""
    overlap: Scalar
    """Exponent q of the smooth maximum (c^q + m^q)^(1/q) of the times of products and
    of weight reads: 1 is their sum, infinity their maximum."""
    attention_share: Scalar
    """Share of the peak of products in attention."""
    prompt_kv_share: Scalar
    """Share of the bandwidth for K and V in prefill."""
    decode_kv_ratio: Scalar
    """Bandwidth for K and V in decoding, over that for weights: `weight_share` times
    this is its share of the memory bandwidth."""
    link_share: Scalar
    """Share of the bandwidth of the link between devices."""
    reduce_s: Scalar
    """Latency of an all-reduce over 2 devices in s."""
    reduce_power: Scalar
    """Growth of that latency: over p devices it is `reduce_s (p - 1)^reduce_power`. 1
    is a ring; a tree or one exchange with all devices grows more slowly."""
    layer_s: Scalar
    """Overhead of a layer in s."""
    mixture_layer_s: Scalar
    """Overhead of a layer with experts in s, in addition to `layer_s`."""
    step_s: Scalar
    """Overhead of a step in s."""
    sequence_s: Scalar
    """Overhead of a sequence that samples in a step in s."""
    ingest_s: Scalar
    """Time from the client to the queue of the scheduler in s."""
    first_token_s: Scalar
    """Additional delay of a request's first token in s."""
    stream_s: Scalar
    """Additional delay of a request's last token in s: detokenising and streaming."""
    delivery_lag: Scalar
    """Fraction of a decoding step by which tokens are delivered late: about 1 if the
    server starts a step before it reads the tokens of the last one."""


PRIOR: Mapping[str, tuple[float, float]] = {
    "product_share": (0.70, 0.15),
    "weight_share": (0.80, 0.10),
    "overlap": (3.0, 0.5),
    "attention_share": (0.50, 0.3),
    "prompt_kv_share": (0.50, 0.5),
    "decode_kv_ratio": (1.0, 0.1),
    "link_share": (0.60, 0.3),
    "reduce_s": (12e-6, 0.5),
    "reduce_power": (0.5, 0.4),
    "layer_s": (15e-6, 0.5),
    "mixture_layer_s": (15e-6, 0.8),
    "step_s": (1e-3, 0.7),
    "sequence_s": (10e-6, 0.7),
    "ingest_s": (6e-3, 0.5),
    "first_token_s": (1e-3, 1.0),
    "stream_s": (2e-3, 1.0),
    "delivery_lag": (0.9, 0.3),
}
"""Median and standard deviation of the logarithm of each coefficient, before a fit.

Shares: the highest measured rates are 0.8 of the peak of an H100 in products
(`costs.devices`) and about 0.9 in reads; kernels of a server reach less. Decoding
streams K and V as it streams weights, so the rates are about equal: FlashMLA reads 3.0
of an H800's 3.35 TB/s. Overheads: of about ten kernels in a layer, six read no weights
and take 2 to 3 us each; about a millisecond of host work for a step, some milliseconds
of HTTP and tokenising for a request. The latency of an all-reduce grows at most as that
of a ring, and measurements on at most two devices do not determine its growth.

No value is the result of a fit, but four were chosen after a look at published
latencies of H100 servers: `ingest_s` and `delivery_lag` at first-token times, and
`decode_kv_ratio` and `layer_s` after predictions of left-out models had missed the bars
of `experiments/servers/calibration`. Before, K and V had a share of their own with the
median 0.70, which models with few KV heads hardly determine, and a layer took 5 us. So
predictions of left-out rows of that table are not free of it.

Source: github.com/deepseek-ai/FlashMLA, README (3000 GB/s)."""


DETERMINED_SPREAD = 0.5
"""Standard deviation, over that of the prior, below which data determine a value."""


def draw_coefficients(
    deviations: Float[np.ndarray, "*draws coefficients"],
) -> ServerCoefficients:
    """Returns the coefficients at standard deviations from the medians of `PRIOR`.

    Standard normal deviations are draws of the prior; 0 gives the medians.

    Args:
      deviations: in units of the prior's standard deviation, in the order of `PRIOR`.

    Raises:
      ValueError: the last axis does not have one number for each coefficient.
    """
    if deviations.shape[-1:] != (len(PRIOR),):
        raise ValueError(
            f"deviations of shape {deviations.shape} must have {len(PRIOR)} columns"
        )
    median, spread = (np.array(x) for x in zip(*PRIOR.values(), strict=True))
    values = median * np.exp(spread * deviations)
    return ServerCoefficients(*np.moveaxis(values, -1, 0).astype(np.float32))


def find_deviations(
    coefficients: ServerCoefficients,
) -> Float[np.ndarray, "*draws coefficients"]:
    """Returns the deviations of coefficients: the inverse of `draw_coefficients`."""
    median, spread = (np.array(x) for x in zip(*PRIOR.values(), strict=True))
    values = np.stack([np.asarray(x, np.float64) for x in coefficients], axis=-1)
    return np.log(values / median) / spread


class ServerCost(NamedTuple):
    """Time of a step of a server with tensor parallelism."""

    counts: StepCost
    """Work of the model, and rates of all devices together."""
    kv_copies: Scalar
    """Copies of K and V: above 1 if there are more devices than KV heads."""
    token_link_s: Scalar
    """Time of the link for the exchanges of a token, at the data sheet's rate, in s."""
    logit_link_s: Scalar
    """The same for a row of logits."""
    num_reduces: Scalar
    """All-reduces of a step; 0 on one device."""
    other_devices: Scalar
    """Devices other than the first, at least 1."""
    num_layers: Scalar
    num_mixture_layers: Scalar
    coefficients: ServerCoefficients

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s; 0 for a step without tokens."""
        w: Work = jax.tree.map(lambda x: x.astype(jnp.float32), work)
        c = self.counts
        f = self.coefficients
        layers = self.num_layers
        rows = w.num_decode_rows + w.num_prompt_rows
        flops = rows * c.flops_per_token + w.num_logits * c.flops_per_logit
        met = 1.0 - (1.0 - c.expert_share) ** rows
        weights = c.weight_bytes + c.expert_bytes * met
        products_s = smooth_maximum(
            flops / (c.flops_per_s * f.product_share),
            weights / (c.bytes_per_s * f.weight_share),
            f.overlap,
        )
        # Queries of a chunk attend to earlier tokens and to themselves.
        pairs = (w.prompt_squares + w.num_prompt_rows) / 2
        attention_layers = jnp.sum(c.layers, dtype=jnp.float32)
        pair_s = c.flops_per_key / (c.flops_per_s * f.attention_share)
        pair_s *= attention_layers
        kv_s = attention_layers * c.kv_bytes * self.kv_copies / c.bytes_per_s
        prompt_kv = w.prompt_context + w.num_prompt_rows
        decode_kv = w.decode_context + w.num_decode_rows
        decode_share = f.weight_share * f.decode_kv_ratio
        attention_s = pairs * pair_s + prompt_kv * kv_s / f.prompt_kv_share
        attention_s += jnp.maximum(
            w.decode_pairs * pair_s, decode_kv * kv_s / decode_share
        )
        # States of recurrent layers are streamed as K and V are in decoding.
        num_states = w.num_decodes + w.num_prompts
        attention_s += 2 * num_states * c.state_bytes / (c.bytes_per_s * decode_share)
        link_s = rows * self.token_link_s + w.num_logits * self.logit_link_s
        reduce_s = f.reduce_s * self.other_devices**f.reduce_power
        exchange_s = link_s / f.link_share + self.num_reduces * reduce_s
        overhead_s = (
            layers * f.layer_s
            + self.num_mixture_layers * f.mixture_layer_s
            + w.num_drawing * f.sequence_s
            + f.step_s
        )
        total_s = products_s + attention_s + exchange_s + overhead_s
        return jnp.where(rows > 0, total_s, 0.0)


def smooth_maximum(
    first: Float[Array, "..."], second: Float[Array, "..."], power: Scalar
) -> Float[Array, "..."]:
    """Returns (first^power + second^power)^(1 / power) of positive numbers.

    Computed relative to the larger one, so that no power underflows in float32.
    """
    large = jnp.maximum(first, second)
    small = jnp.minimum(first, second)
    ratio = small / jnp.maximum(large, jnp.finfo(jnp.float32).tiny)
    return large * (1.0 + ratio**power) ** (1.0 / power)


@validation.checks_numbers()
def make_server_cost(
    model: ModelShape,
    device: Device,
    coefficients: ServerCoefficients,
    *,
    tensor_parallel: int = 1,
    max_length: int | None = None,
) -> ServerCost:
    """Makes the cost of a step of a server in 16 bits.

    Args:
      model: shape of the model.
      device: accelerator.
      coefficients: the coefficients; leaves with leading axes are for `vmap`.
      tensor_parallel: number of devices that divide the model.
      max_length: largest length of a sequence; None means any.

    Raises:
      ValueError: the degree is below 1 or does not divide the model, or a layer has a
        window below `max_length`: the counts of a step do not give attended tokens.
    """
    window = min((x for x in model.windows if x), default=None)
    if window is not None and (max_length is None or window < max_length):
        raise ValueError(
            f"{max_length=} must be at most {window}, the window of {model.name}"
        )
    degree = tensor_parallel
    layout = Layout(tensor=tensor_parallel)
    traffic = decode_traffic(model, layout, batch=1)
    heads = 1
    if isinstance(model.attention, HeadAttention):
        heads = model.attention.num_kv_heads

    def link_s(*, is_logits: bool) -> float:
        sent = sum(x.forward for x in traffic if _is_of_logits(x) == is_logits)
        return sent / device.link

    numbers = {
        "kv_copies": degree / min(degree, heads),
        "token_link_s": link_s(is_logits=False),
        "logit_link_s": link_s(is_logits=True),
        # Two of each layer, and one of the embedding.
        "num_reduces": 2 * model.num_layers + 1 if degree > 1 else 0,
        "other_devices": max(degree - 1, 1),
        "num_layers": model.num_layers,
        "num_mixture_layers": model.num_mixture_layers,
    }
    return ServerCost(
        counts=step_cost(model, device, num_devices=degree),
        **{name: jnp.float32(value) for name, value in numbers.items()},
        coefficients=coefficients,
    )


def _is_of_logits(traffic: Traffic) -> bool:
    return traffic.name.startswith("logits")
