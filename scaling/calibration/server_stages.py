"""A load stage of a vLLM server, simulated for many draws of coefficients at once.

A short window stands for a stage: the requests that arrive in `window_s` seconds after
`warm_up_s` seconds of load. The load continues after the window, and every request is
served to its end.

The prefix cache holds whole prompts. A prompt that came before is cached except for the
tokens after its last full block before its last token; the first prompt of a system
prompt's users fills the cache with it. Blocks of the distinct prompts stay in memory
(`Workload.context`), which is right if requests repeat them in turn and the cache has
room for all of them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import vllm_scheduler
from jaxkv.simulation import Capacity, SimulationMember, pad_workload, simulate
from jaxkv.workloads import Workload, make_workload
from scaling import shapes
from scaling.calibration.measurements import LatencySummary, MeasuredStage
from scaling.calibration.server_cost import ServerCoefficients, make_server_cost
from scaling.costs import (
    Device,
    count_parameters,
    find_device,
    kv_bytes_per_token,
)
from scaling.shapes import HeadAttention, ModelShape

WARM_UP_S, WINDOW_S = 8.0, 25.0
"""Seconds of load before the window, and length of the window."""
_JITTER_S = 5e-3
"""Largest delay of an arrival of a "constant" load, in s."""
_TAIL_S_PER_TOKEN, _MAX_TAIL_S = 0.02, 30.0
"""Load after the window: seconds per token of an answer, and limit in s."""


class StageLatencies(NamedTuple):
    """Predicted latencies of a stage, with an element for each draw."""

    end_to_end_s: LatencySummary
    """From a request to its last token."""
    first_token_s: LatencySummary
    """From a request to its first token."""
    inter_token_s: LatencySummary
    """Mean time between the tokens of a request."""


class StageLoad(NamedTuple):
    """Requests of a stage, and those of them in the window."""

    workload: Workload
    resident_blocks: int
    """Blocks of the prompts in the prefix cache."""
    is_measured: Bool[np.ndarray, " requests"]
    """True for requests that arrive in the window."""


def num_kv_blocks(
    model: ModelShape,
    device: Device,
    *,
    tensor_parallel: int = 1,
    block_size: int = 16,
    memory_share: int | float = 0.9,
    reserved_bytes: int | float = 2e9,
) -> int:
    """Returns the blocks of the KV cache of a vLLM server in 16 bits.

    Each device has `memory_share` of its memory for its part of the weights, for
    activations and runtime, and for blocks of all layers. Llama-2-7B on an H100: (72 -
    13.5 - 2) GB / 8.4 MB = 6,738 blocks.

    Args:
      model: shape of the model.
      device: accelerator.
      tensor_parallel: number of devices.
      block_size: tokens of a block.
      memory_share: vLLM's `gpu_memory_utilization`, in (0, 1].
      reserved_bytes: activations of the largest step and runtime, per device; vLLM
        measures them when it starts.

    Raises:
      ValueError: the weights do not fit, or a share is out of range.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"{memory_share=} must be in (0, 1]")
    heads = 1
    if isinstance(model.attention, HeadAttention):
        heads = min(tensor_parallel, model.attention.num_kv_heads)
    weights = 2 * count_parameters(model).total / tensor_parallel
    left = memory_share * device.memory_bytes - weights - reserved_bytes
    blocks = int(left // (block_size * kv_bytes_per_token(model) / heads))
    if blocks < 1:
        raise ValueError(
            f"{model.name} does not fit into {tensor_parallel} {device.name}: "
            f"{weights / 1e9:.1f} GB of weights each"
        )
    return blocks


def make_stage_load(
    stage: MeasuredStage,
    *,
    warm_up_s: int | float = WARM_UP_S,
    window_s: int | float = WINDOW_S,
    seed: int = 0,
) -> StageLoad:
    """Makes the requests of a stage up to some seconds after its window.

    Lengths of the distinct prompts are drawn once, around their measured mean. Stages
    after the first of a run begin with all prompts in the prefix cache.

    Args:
      stage: the stage.
      warm_up_s: start of the window in s, at least 0.
      window_s: length of the window in s, above 0.
      seed: random seed of lengths and arrivals.

    Raises:
      ValueError: a number is out of range.
    """
    warm_up_s = validation.seconds("warm_up_s", warm_up_s)
    window_s = validation.seconds("window_s", window_s)
    rng = np.random.default_rng(seed)
    tail_s = min(_TAIL_S_PER_TOKEN * stage.answer_tokens, _MAX_TAIL_S)
    num = math.ceil(stage.rate_per_s * (warm_up_s + window_s + tail_s))
    spread = max(0, stage.max_prompt_tokens - round(stage.prompt_tokens))
    distinct = round(stage.prompt_tokens) + rng.integers(
        -spread, spread + 1, stage.num_prompts
    )
    index = np.arange(num)
    prompt = np.maximum(distinct, 1)[index % stage.num_prompts]
    if stage.arrivals == "poisson":
        arrival_s = np.cumsum(rng.exponential(1 / stage.rate_per_s, num))
    else:
        arrival_s = np.sort(index / stage.rate_per_s + _JITTER_S * rng.random(num))
    cached = np.zeros(num, int)
    resident = 0
    if stage.prefix_caching:
        known = prompt - 1  # the last token is always fed
        if stage.stage == 0:
            system = stage.system_prompt_tokens * (index >= stage.system_prompts)
            is_new = index < stage.num_prompts
            known = np.where(is_new, np.minimum(known, system), known)
        cached = known // stage.block_size * stage.block_size
        system = stage.system_prompt_tokens // stage.block_size
        shared = (stage.num_prompts - stage.system_prompts) * system
        resident = int(np.sum(distinct // stage.block_size)) - shared
    outputs = np.full(num, stage.answer_tokens)
    workload = make_workload(arrival_s, prompt - cached, outputs, context=cached)
    end_s = warm_up_s + window_s
    is_measured = (arrival_s >= warm_up_s) & (arrival_s < end_s)
    if not is_measured.any():
        raise ValueError(f"{window_s=} must be longer: no request arrives in it")
    return StageLoad(workload, resident, is_measured)


def simulate_stage(
    stage: MeasuredStage,
    coefficients: ServerCoefficients,
    *,
    warm_up_s: int | float = WARM_UP_S,
    window_s: int | float = WINDOW_S,
    seed: int = 0,
    num_slots: int = 32,
    progress: Progress = QUIET,
) -> StageLatencies:
    """Predicts the latencies of a stage for each draw of the coefficients.

    All draws are members of one mapped program, and see the same requests. Stages with
    about the same number of requests share a program for equal numbers of draws.

    Args:
      stage: the stage; its measured latencies are not read.
      coefficients: draws, with one leading axis on every leaf.
      warm_up_s: as for `make_stage_load`.
      window_s: as for `make_stage_load`.
      seed: as for `make_stage_load`.
      num_slots: sequences of the first program, doubled up to `max_num_seqs` while any
        draw has more requests in the system. It changes the time, not the result.
      progress: progress bar.

    Raises:
      ValueError: the model or device is unknown, the model or its prompts do not fit
        into memory, or the coefficients have no draws.
    """
    if np.ndim(coefficients.step_s) != 1:
        raise ValueError("coefficients must have one leading axis, of draws")
    num_draws = len(np.asarray(coefficients.step_s))
    num_slots = validation.integer("num_slots", num_slots, low=1)
    num_slots = min(num_slots, stage.max_num_seqs)
    load = make_stage_load(stage, warm_up_s=warm_up_s, window_s=window_s, seed=seed)
    member = SimulationMember(
        workload=pad_workload(
            load.workload, -(-load.is_measured.size // _REQUESTS) * _REQUESTS
        ),
        capacity=_capacity(stage, load.resident_blocks),
        policy=vllm_scheduler(max_num_seqs=stage.max_num_seqs),
        cost=make_server_cost(
            shapes.describe_checkpoint(stage.model),
            find_device(stage.device),
            jax.tree.map(lambda _: jnp.float32(0), coefficients),
            tensor_parallel=stage.tensor_parallel,
            max_length=stage.max_model_len,
        ),
    )
    members: Any = jax.tree.map(
        lambda x: np.broadcast_to(np.asarray(x), (num_draws, *np.shape(x))), member
    )
    members = members._replace(cost=members.cost._replace(coefficients=coefficients))
    while True:
        found = simulate(members, max_slots=num_slots, head=_HEAD, progress=progress)
        arrival, first, finish = (
            x[:, : load.is_measured.size]
            for x in (found.arrival_s, found.first_s, found.finish_s)
        )
        most = max(map(_max_in_system, arrival, finish))
        if most <= num_slots or num_slots == stage.max_num_seqs:
            break
        num_slots = min(2 * num_slots, stage.max_num_seqs)
    # The delays of a request change no schedule, so they are added here.
    f: Any = jax.tree.map(lambda x: np.asarray(x, np.float64)[:, None], coefficients)
    arrival, first, finish = (x[:, load.is_measured] for x in (arrival, first, finish))
    gaps = max(stage.answer_tokens - 1, 1)
    late_s = f.ingest_s + f.delivery_lag * (finish - first) / gaps
    first_s = first - arrival + late_s + f.first_token_s
    end_s = finish - arrival + late_s + f.stream_s
    return StageLatencies(
        *(_summarise(x) for x in (end_s, first_s, (end_s - first_s) / gaps))
    )


_REQUESTS = 256
"""Workloads are padded to a multiple, so that stages share programs."""
_HEAD = 16
"""Waiting requests that the scheduler sees in a step; a larger head is slower and
admits no more requests unless more than 16 arrive in a step."""


def _capacity(stage: MeasuredStage, resident: int) -> Capacity:
    """Returns the bounds of a server, without the blocks of cached prompts."""
    blocks = stage.num_blocks
    if blocks is None:
        blocks = num_kv_blocks(
            shapes.describe_checkpoint(stage.model),
            find_device(stage.device),
            tensor_parallel=stage.tensor_parallel,
            block_size=stage.block_size,
        )
    longest = stage.max_prompt_tokens + stage.answer_tokens
    needed = resident + -(-longest // stage.block_size)
    if needed > blocks:
        raise ValueError(
            f"{stage.name}: {stage.num_prompts} prompts in the prefix cache and one "
            f"request need {needed} blocks, and there are {blocks}"
        )
    return Capacity.of(
        num_pages=blocks - resident,
        page_size=stage.block_size,
        max_length=stage.max_model_len,
        token_budget=stage.max_num_batched_tokens,
    )


def _max_in_system(
    arrival_s: Float[np.ndarray, " requests"], finish_s: Float[np.ndarray, " requests"]
) -> int:
    """Returns the largest number of requests that wait or run at the same time."""
    arrived = np.arange(1, arrival_s.size + 1)
    ended = np.searchsorted(np.sort(finish_s), arrival_s, side="right")
    return int(np.max(arrived - ended))


def _summarise(values: Float[np.ndarray, "draws requests"]) -> LatencySummary:
    return LatencySummary(
        mean=values.mean(axis=1),
        median=np.median(values, axis=1),
        p99=np.quantile(values, 0.99, axis=1),
    )


def compare_stage(stage: MeasuredStage, predicted: StageLatencies) -> str:
    """Returns lines with the mean and P99 of each latency and the measured values.

    Of several draws the median is shown, with the interval of 90 % of them.
    """
    lines = [f"{stage.name}  {stage.rate_per_s:g} requests/s"]
    for name, found in predicted._asdict().items():
        real = getattr(stage, name)
        for statistic, values in found._asdict().items():
            low, middle, high = 1e3 * np.quantile(values, [0.05, 0.5, 0.95])
            label = f"{name.removesuffix('_s').replace('_', '-')} {statistic}"
            line = f"  {label:20} {middle:9.2f} ms"
            if len(values) > 1:
                line += f" [{low:.2f}, {high:.2f}]"
            if real is not None:
                measured = 1e3 * getattr(real, statistic)
                error = 100 * (middle / measured - 1)
                line += f"   measured {measured:9.2f} ms {error:+6.1f} %"
            lines.append(line)
    return "\n".join(lines)
