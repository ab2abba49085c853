"""A load stage of a vLLM server, simulated for many draws of coefficients at once.

A short window stands for a stage: the requests that arrive in `window_s` seconds after
`warm_up_s` seconds of load.

The prefix cache holds whole prompts. A prompt that came before is cached except for the
tokens after its last full block before its last token; the first prompt of a system
prompt's users fills the cache with it. Blocks of the distinct prompts stay in memory
(`Workload.context`), which is right if requests repeat them in turn and the cache has
room for all of them.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling import shapes
from scaling.calibration.measurements import LatencySummary, MeasuredStage
from scaling.calibration.server_cost import (
    PRIOR,
    ServerCoefficients,
    draw_coefficients,
)
from scaling.calibration.server_runs import simulate_server
from scaling.calibration.servers import (
    WARM_UP_S,
    WINDOW_S,
    ServerLoad,
    ServerSetup,
    choose_warm_up_s,
    draw_arrivals,
    load_duration_s,
    make_server_load,
)
from scaling.calibration.steady_state import SteadyLoad, find_steady_state
from scaling.costs import find_device


class StageLatencies(NamedTuple):
    """Predicted latencies of a stage, with an element for each draw."""

    end_to_end_s: LatencySummary
    """From a request to its last token."""
    first_token_s: LatencySummary
    """From a request to its first token."""
    inter_token_s: LatencySummary
    """Mean time between the tokens of a request."""


def make_stage_setup(stage: MeasuredStage) -> ServerSetup:
    """Returns the server of a stage.

    Raises:
      ValueError: the model or device is unknown.
    """
    return ServerSetup(
        model=shapes.describe_checkpoint(stage.model),
        device=find_device(stage.device),
        tensor_parallel=stage.tensor_parallel,
        max_model_len=stage.max_model_len,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        max_num_seqs=stage.max_num_seqs,
        block_size=stage.block_size,
        num_blocks=stage.num_blocks,
    )


@validation.checks_numbers(
    warm_up_s=validation.SECONDS, window_s=validation.SECONDS, seed=validation.SEEDS
)
def make_stage_load(
    stage: MeasuredStage,
    *,
    warm_up_s: int | float = WARM_UP_S,
    window_s: int | float = WINDOW_S,
    seed: int = 0,
) -> ServerLoad:
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
    rng = np.random.default_rng(seed)
    duration_s = load_duration_s(warm_up_s, window_s, stage.answer_tokens)
    num = math.ceil(stage.rate_per_s * duration_s)
    spread = max(0, stage.max_prompt_tokens - round(stage.prompt_tokens))
    distinct = round(stage.prompt_tokens) + rng.integers(
        -spread, spread + 1, stage.num_prompts
    )
    index = np.arange(num)
    prompt = np.maximum(distinct, 1)[index % stage.num_prompts]
    arrival_s = draw_arrivals(rng, stage.arrivals, rate_per_s=stage.rate_per_s, num=num)
    prefix_tokens = np.zeros(num, int)
    resident = 0
    if stage.prefix_caching:
        prefix_tokens = prompt
        if stage.stage == 0:
            system = stage.system_prompt_tokens * (index >= stage.system_prompts)
            is_new = index < stage.num_prompts
            prefix_tokens = np.where(
                is_new, np.minimum(prefix_tokens, system), prefix_tokens
            )
        system = stage.system_prompt_tokens // stage.block_size
        shared = (stage.num_prompts - stage.system_prompts) * system
        resident = int(np.sum(distinct // stage.block_size)) - shared
    return make_server_load(
        arrival_s,
        prompt,
        np.full(num, stage.answer_tokens),
        prefix_tokens=prefix_tokens,
        block_size=stage.block_size,
        warm_up_s=warm_up_s,
        window_s=window_s,
        resident_blocks=resident,
    )


@validation.checks_numbers(
    warm_up_s=validation.SECONDS, window_s=validation.SECONDS, seed=validation.SEEDS
)
def simulate_stage(
    stage: MeasuredStage,
    coefficients: ServerCoefficients,
    *,
    warm_up_s: int | float | None = None,
    window_s: int | float = WINDOW_S,
    seed: int = 0,
    num_slots: int = 32,
    progress: Progress = QUIET,
) -> StageLatencies:
    """Predicts the latencies of a stage for each draw of the coefficients.

    Each draw has a load of its own seed, so that the spread over draws has the noise of
    lengths and arrivals.

    Args:
      stage: the stage; its measured latencies are not read.
      coefficients: draws, with one leading axis on every leaf.
      warm_up_s: as for `make_stage_load`; None means that of `choose_warm_up_s` with
        the medians of `PRIOR`.
      window_s: as for `make_stage_load`.
      seed: seed of the first draw's load; that of draw i is `seed + i`.
      num_slots: as for `simulate_server`.
      progress: progress bar.

    Raises:
      ValueError: the model or device is unknown, the model or its prompts do not fit
        into memory, or the coefficients have no draws.
    """
    if np.ndim(coefficients.step_s) != 1:
        raise ValueError("coefficients must have one leading axis, of draws")
    setup = make_stage_setup(stage)
    if warm_up_s is None:
        cost = setup.cost(draw_coefficients(np.zeros(len(PRIOR))))
        steady = _find_steady_state(SteadyLoad.of(stage), cost)
        warm_up_s = choose_warm_up_s(float(steady.end_to_end_s))
    loads = [
        make_stage_load(stage, warm_up_s=warm_up_s, window_s=window_s, seed=seed + i)
        for i in range(len(np.asarray(coefficients.step_s)))
    ]
    try:
        runs = simulate_server(
            setup,
            loads,
            jax.tree.map(lambda x: np.asarray(x)[..., None], coefficients),
            num_slots=num_slots,
            progress=progress,
        )
    except ValueError as error:
        raise ValueError(f"{stage.name}: {error}") from None
    summaries = [StageLatencies(*map(_summarise, run.latencies())) for run in runs]
    return jax.tree.map(lambda *x: np.concatenate(x), *summaries)


_find_steady_state = jax.jit(find_steady_state)


def _summarise(values: Float[np.ndarray, "draws requests"]) -> LatencySummary:
    median, p99 = np.quantile(values, [0.5, 0.99], axis=1)
    return LatencySummary(mean=values.mean(axis=1), median=median, p99=p99)


def compare_stage(stage: MeasuredStage, predicted: StageLatencies) -> str:
    """Returns lines with the mean and P99 of each latency and the measured values.

    Of several draws the median is shown, with the interval of 90 % of them.
    """
    lines = [f"{stage.name}  {stage.rate_per_s:g} requests/s"]
    for name, summary in predicted._asdict().items():
        real = getattr(stage, name)
        for statistic, values in summary._asdict().items():
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
