"""Cost models: pytrees of arrays that map the work of a step to seconds.

Their leaves can be swept by `vmap`. Each model states its range of validity and its
error on the data that it was fitted to.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.simulation import Cost, Work
from scaling.costs.devices import Device, find_device
from scaling.costs.serving import max_batch
from scaling.costs.steps import StepCost, step_cost
from scaling.shapes import ModelShape

PAGE_SIZE = 16
"""Tokens per page: the default of vLLM."""
MEMORY_SHARE = 0.9
"""Share of GPU memory for weights and pages together: the default of vLLM."""


@validation.checks_numbers()
def max_kv_pages(model: ModelShape, device: str, num_devices: int) -> int:
    """Returns the number of pages that fit in memory in addition to the weights.

    Memory is that of the data sheet, as papers count it. OPT-13B on an A100: (0.9 * 80
    GB - 25.7 GB) / 819,200 bytes = 56,500 tokens.
    """
    chip = find_device(device)
    return max_batch(
        model,
        chip._replace(memory_bytes=chip.sheet_bytes),
        context=PAGE_SIZE,
        num_devices=num_devices,
        memory_share=MEMORY_SHARE,
    )


@dataclasses.dataclass(frozen=True)
class CostModel[C: Cost]:
    """A cost function with its source, validity and error.

    Attributes:
      name: name of the model, such as a key of `DISTSERVE`.
      cost: function from the work of a step to seconds.
      source: source of the coefficients.
      validity: steps for which the model was made.
      error: largest relative error on the data that it was fitted to; None if that data
        is not published.
    """

    name: str
    cost: C
    source: str
    validity: str
    error: float | None


class LinearCost(NamedTuple):
    """Time of a step, linear in counts, with different coefficients for large batches.

    A step that only runs prefill costs `prefill`. A step with decodes costs `decode`,
    plus the slopes of `prefill` if it also runs prefill: the constant is paid once. A
    draft token costs as much as one more sequence and attends to the context of its
    sequence.
    """

    prefill: Float[Array, " 3"]
    """Seconds per step, per token, and per squared token."""
    decode: Float[Array, " 3"]
    """Seconds per step, per attended token, and per sequence."""
    decode_large: Float[Array, " 3"]
    """Like `decode`, for at least `large` sequences and drafts."""
    large: Float[Array, ""]
    copy_s: Float[Array, ""]
    """Seconds per page copied within the pool."""
    swap_s: Float[Array, ""]
    """Seconds per page swapped out or in."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the seconds of a step."""
        w = counts_as_floats(work)
        small = w.num_decode_rows < self.large
        decode = jnp.where(small, self.decode, self.decode_large)
        context = w.decode_context + w.prompt_context
        decodes = decode[0] + decode[1] * context + decode[2] * w.num_decode_rows
        reads = self.prefill[1] * w.num_prompt_rows
        reads += self.prefill[2] * w.prompt_squares
        feeds = jnp.where(w.num_decodes > 0, decodes, self.prefill[0]) + reads
        feeds = jnp.where(w.num_decodes + w.num_prompt_rows > 0, feeds, 0.0)
        return feeds + self.copy_s * w.num_copied + self.swap_s * w.num_swapped


class RooflineCost(NamedTuple):
    """Time of a step by a `StepCost`, and the time of page copies and swaps."""

    step: StepCost
    copy_s: Float[Array, ""]
    """Seconds per page copied within the pool."""
    swap_s: Float[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the seconds of a step."""
        w = counts_as_floats(work)
        feeds = self.step(work)
        return feeds + self.copy_s * w.num_copied + self.swap_s * w.num_swapped


def counts_as_floats(work: Work) -> Work:
    """Converts the counts to float32, which is exact up to 16 million."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), work)


@validation.checks_numbers(scale="[1e-9, 1e9]")
def linear_cost(
    prefill: tuple[float, ...],
    decode: tuple[float, ...],
    decode_large: tuple[float, ...] | None = None,
    *,
    scale: float = 1e-3,
) -> LinearCost:
    """Makes a `LinearCost` from coefficients times `scale`; by default they are in ms.

    Args:
      prefill: values per step, token and squared token, before scaling.
      decode: values per step, attended token and sequence, before scaling.
      decode_large: the same as `decode`, from 95 sequences; None means `decode`.
      scale: factor on all coefficients.
    """

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


@validation.checks_numbers(scale="[1e-3, 1e3]")
def figure_12_cost(*, scale: float = 1.31) -> CostModel[LinearCost]:
    """Returns the cost model of OPT-13B on one A100 of 40 GB.

    The paper prints no step times for it. Decode: the fit of DistServe on 80 GB, times
    the ratio of the memory bandwidths, 2.04 / 1.555 = 1.31. Prefill: the slope only,
    because a mixed step pays the constant once. By Little's law, figure 13 of the paper
    implies 30.42 / (2 * 338) = 45.0 ms per step at 2 requests/s; this model gives 47.6
    ms.

    Args:
      scale: ratio of the memory bandwidths.
    """
    small = (23.475, 5.93e-4, 0.0607)
    large = (20.206, 4.91e-4, 0.120)
    cost = linear_cost((small[0], 0.1405, 0.0), small, large, scale=scale * 1e-3)
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
"""Fits of vLLM's times on A100s of 80 GB by model and tensor-parallel degree.

Source: github.com/LLMServe/DistServe, Apache-2.0, state of April 2025,
simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json; Zhong et al. 2024,
arXiv:2401.09670, appendix A."""


def distserve_cost(name: str) -> CostModel[LinearCost]:
    """Returns one of the published fits of DistServe, a key of `DISTSERVE`.

    Their simulator adds 1 ms for each pipeline stage, which is not included.
    """
    return CostModel(
        name=name,
        cost=linear_cost(*DISTSERVE[name]),
        source="LLMServe/DistServe, profiler-a100-80g.vllm.json, April 2025",
        validity="OPT in 16 bits on A100s of 80 GB; fitted to steps of prefill only or "
        "decode only; a mixed step is the sum of both",
        error=None,
    )


@validation.checks_numbers()
def make_roofline_cost(
    model: ModelShape,
    device: Device,
    *,
    num_devices: int = 1,
    name: str = "roofline",
    **how: Any,
) -> CostModel[RooflineCost]:
    """Returns the cost model of a data sheet: weights, KV cache, products, overhead.

    Args:
      model: shape of the model.
      device: accelerator.
      num_devices: number of devices, as for `steps.step_cost`.
      name: name of the cost model.
      how: achieved shares of the device's rates, as for `steps.step_cost`.

    Raises:
      ValueError: the model has layers with sliding windows, whose attended tokens do
        not follow from sums over the batch; or a number is out of range.
    """
    if any(model.windows):
        raise ValueError(
            f"{model.name}: sliding windows are not supported, since the counts of a "
            "step do not give the attended tokens"
        )
    step = step_cost(model, device, num_devices=num_devices, **how)
    return CostModel(
        name=name,
        cost=RooflineCost(step, jnp.float32(0.0), jnp.float32(0.0)),
        source=device.source,
        validity="a lower bound if all shares are 1: no device waits, and kernels "
        "reach the rates of the data sheet",
        error=None,
    )
