"""Cost models: pytrees of arrays that price the work of one step.

`vmap` may sweep their leaves. Each comes with the range where it holds and its error on
the data that it was fitted to; `named_costs.find` has them by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.simulation import Cost, Work
from scaling.costs import devices, serving, steps
from scaling.shapes import Description

PAGE_SIZE = 16
"""Token places in a page: vLLM's default."""
MEMORY_SHARE = 0.9
"""Of the GPUs' memory, weights and pages together: vLLM's default."""


def max_kv_pages(model: Description, device: str, num_devices: int) -> int:
    """Pages that fit beside the weights.

    OPT-13B on an A100: (0.9 * 80 GB - 25.7 GB) / 819,200 bytes = 56,500 tokens.
    """
    return serving.max_batch(
        model,
        devices.find(device),
        context=PAGE_SIZE,
        num_devices=num_devices,
        memory_share=MEMORY_SHARE,
    )


class CostModel[C: Cost](NamedTuple):
    """A cost, and what may be expected of it.

    Attributes:
      name: as `named_costs.find` takes it.
      cost: prices a step.
      source: where its numbers come from.
      validity: for which steps it was made.
      error: the largest relative error on the data it was fitted to; None if these
        are not published.
    """

    name: str
    cost: C
    source: str
    validity: str
    error: float | None


class LinearCost(NamedTuple):
    """Linear in counts, in other numbers for large batches.

    A step that only reads prompts costs `prefill`; one that decodes costs `decode` and,
    where it reads prompts too, the slopes of `prefill`: the constant is paid once. A
    draft costs what one sequence more does, and attends to what its sequence reads
    anyway.
    """

    prefill: Float[Array, " 3"]
    """Seconds of a step, of a token, and of the square of a token."""
    decode: Float[Array, " 3"]
    """Seconds of a step, of a token attended to, and of a sequence."""
    decode_large: Float[Array, " 3"]
    """The same from `large` sequences and drafts on."""
    large: Float[Array, ""]
    copy_s: Float[Array, ""]
    """Of a page copied in the pool."""
    swap_s: Float[Array, ""]
    """Of a page moved out of it, or back."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        w = as_floats(work)
        small = w.num_decode_rows < self.large
        decode = jnp.where(small, self.decode, self.decode_large)
        context = w.decode_context + w.prompt_context
        decodes = decode[0] + decode[1] * context + decode[2] * w.num_decode_rows
        reads = self.prefill[1] * w.num_prompt_rows
        reads += self.prefill[2] * w.prompt_squares
        feeds = jnp.where(w.num_decodes > 0, decodes, self.prefill[0]) + reads
        feeds = jnp.where(w.num_decodes + w.num_prompt_rows > 0, feeds, 0.0)
        return feeds + self.copy_s * w.num_copied + self.swap_s * w.num_swapped


class Roofline(NamedTuple):
    """The longer of the time of the products and the time of the memory."""

    step: steps.StepCost
    copy_s: Float[Array, ""]
    """As in `Linear`."""
    swap_s: Float[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step, as `steps.work` does from the slots apart."""
        w, c = as_floats(work), self.step
        tokens = w.num_decode_rows + w.num_prompt_rows
        layers = jnp.sum(c.layers, dtype=jnp.float32)
        # Queries of a chunk meet what is before them and themselves.
        pairs = w.decode_pairs + (w.prompt_squares + w.num_prompt_rows) / 2
        flops = (
            tokens * c.flops_per_token
            + w.num_logits * c.flops_per_logit
            + pairs * layers * c.flops_per_key
        )
        kept = (w.decode_context + w.prompt_context + tokens) * layers
        met = 1.0 - (1.0 - c.expert_share) ** tokens
        moved = c.weight_bytes + c.expert_bytes * met + c.kv_bytes * kept
        seconds = jnp.maximum(flops / c.flops_per_s, moved / c.bytes_per_s)
        feeds = jnp.where(tokens > 0, seconds + c.overhead_s, 0.0)
        return feeds + self.copy_s * w.num_copied + self.swap_s * w.num_swapped


def as_floats(work: Work) -> Work:
    """The counts in float32: exact up to 16 million."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), work)


def linear(
    prefill: tuple[float, ...],
    decode: tuple[float, ...],
    decode_large: tuple[float, ...] | None = None,
    *,
    scale: float = 1e-3,
) -> LinearCost:
    """Makes a `Linear` cost of coefficients, times `scale`: those of fits are in ms."""

    def scaled(values: tuple[float, ...]) -> Array:
        return jnp.asarray([x * scale for x in values], jnp.float32)

    return LinearCost(
        prefill=scaled(prefill),
        decode=scaled(decode),
        decode_large=scaled(decode_large or decode),
        large=jnp.float32(95.0),
        copy_s=jnp.float32(0.0),
        swap_s=jnp.float32(0.0),
    )


FIGURE_12 = "opt-13b-a100-40gb"


def figure_12(*, scale: float = 1.31) -> CostModel[LinearCost]:
    """The step of OPT-13B on one A100 of 40 GB, of which the paper prints no times.

    DistServe's fit of its decoding on 80 GB, times the ratio of the bandwidths,
    2.04 / 1.555 = 1.31; of prefill the slope only, since a mixed step pays the constant
    once. By Little's law the paper's own figure 13 asks for 30.42 / (2 * 338) = 45.0 ms
    a step at 2 requests/s; this gives 47.6. `scale` is the ratio.
    """
    small, large = (23.475, 5.93e-4, 0.0607), (20.206, 4.91e-4, 0.120)
    cost = linear((small[0], 0.1405, 0.0), small, large, scale=scale * 1e-3)
    return CostModel(
        name=FIGURE_12,
        cost=cost,
        source="DistServe's fit for OPT-13B, A100-80GB, times 1.31",
        validity="OPT-13B in 16 bits on one A100 of 40 GB, prompts of some hundreds",
        error=None,
    )


# Milliseconds: prefill; decode; decode from 95 sequences on.
DISTSERVE: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "distserve:opt-13b:1": (
        (22.05, 0.1405, 8.08e-6),
        (23.48, 5.93e-4, 0.0607),
        (20.21, 4.91e-4, 0.120),
    ),
    "distserve:opt-13b:2": (
        (27.44, 0.0905, 8.45e-6),
        (24.54, 2.24e-4, 0.0872),
        (17.95, 4.57e-4, 0.112),
    ),
    "distserve:opt-13b:4": (
        (30.54, 0.0515, 4.2e-7),
        (25.90, 7.75e-5, 0.0553),
        (23.88, 2.84e-4, 0.0628),
    ),
    "distserve:opt-66b:4": (
        (42.97, 0.2129, 4.60e-5),
        (39.58, 6.95e-4, 0.1358),
        (40.86, 4.26e-4, 0.195),
    ),
    "distserve:opt-66b:8": (
        (38.93, 0.1574, 4.5e-6),
        (31.18, 2.76e-4, 0.0680),
        (29.09, 6.03e-4, 0.139),
    ),
}
"""Fits of vLLM's times on A100s of 80 GB by model and tensor ways.

Source: github.com/LLMServe/DistServe, Apache-2.0, state of April 2025,
simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json; Zhong et al. 2024,
arXiv:2401.09670, appendix A.
"""


def distserve(name: str) -> CostModel[LinearCost]:
    """One of DistServe's published fits, a key of `DISTSERVE`.

    Their simulator adds 1 ms for each pipeline stage, which is not in here.
    """
    return CostModel(
        name=name,
        cost=linear(*DISTSERVE[name]),
        source="LLMServe/DistServe, profiler-a100-80g.vllm.json, April 2025",
        validity="OPT in 16 bits on A100s of 80 GB; steps that read prompts or decode, "
        "made for either apart; a mixed step is our sum of both",
        error=None,
    )


def roofline(
    model: Description,
    device: devices.Device,
    *,
    num_devices: int = 1,
    name: str = "roofline",
    **how: Any,
) -> CostModel[Roofline]:
    """What a data sheet promises: weights, keys and values, products, an overhead.

    Args:
      model: its shape.
      device: what it runs on.
      num_devices: as for `steps.step_cost`.
      name: what to call it.
      how: what is reached of the device, as for `steps.step_cost`.

    Raises:
      ValueError: the model's layers have windows, so sums over the batch do not tell
        what they attend to; or a number is out of range.
    """
    if any(model.windows):
        raise ValueError(
            f"{model.name}: layers with windows attend to less than the counts of a "
            "step tell"
        )
    step = steps.step_cost(model, device, num_devices=num_devices, **how)
    return CostModel(
        name=name,
        cost=Roofline(step, jnp.float32(0.0), jnp.float32(0.0)),
        source=device.source,
        validity="a lower bound where all shares are 1: devices never wait, kernels "
        "reach the data sheet",
        error=None,
    )
