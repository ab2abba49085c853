"""Cost models by name: published fits, data sheets, and fits to measured runs.

opt-13b-a100-40gb              step of figures 2, 12 and 13 of PagedAttention
distserve:opt-13b:1            published fits: model, tensor-parallel degree
roofline:opt-13b:a100-80gb:2   data sheets: model, device, number of devices
calibrated:opt-13b:h100:2      fit to vLLM servers: model, device, number of devices
measured:FOLDER                fit to a run folder of `jaxkv bench decode`
"""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy import optimize

from experiments.framework import load_experiment
from jaxkv.report import read_run
from jaxkv.validation import format_unknown_name
from scaling import shapes
from scaling.calibration import make_calibrated_cost
from scaling.costs import (
    DISTSERVE,
    FIGURE_12,
    CostModel,
    distserve_cost,
    figure_12_cost,
    find_device,
    linear_cost,
    make_roofline_cost,
)


def find_cost_model(name: str) -> CostModel:
    """Returns the cost model of a name, as listed in the module docstring.

    Raises:
      ValueError: the name is unknown, or its folder cannot be read.
    """
    kind, *parts = name.split(":")
    fits = DISTSERVE
    if name == FIGURE_12:
        return figure_12_cost()
    if kind == "distserve" and len(parts) == 2:
        if name not in DISTSERVE:
            raise ValueError(format_unknown_name("cost model", name, DISTSERVE))
        return distserve_cost(name)
    shaped = {
        "roofline": make_roofline_cost,
        "calibrated": make_calibrated_cost,
    }
    if kind in shaped and len(parts) in (2, 3):
        num = parts[2] if len(parts) == 3 else "1"
        if not num.isdecimal() or int(num) < 1:
            raise ValueError(f"{name!r}: the number of devices must be at least 1")
        model = shapes.describe(parts[0])
        device = find_device(parts[1])
        return shaped[kind](model, device, num_devices=int(num), name=name)
    if kind == "measured" and parts:
        return fit_measured_steps(Path(name.removeprefix("measured:")))
    raise ValueError(
        f"unknown cost model {name!r}; one of: "
        f"{', '.join((FIGURE_12, *fits))}, "
        "roofline:MODEL:DEVICE[:NUM], calibrated:MODEL:DEVICE[:NUM], measured:FOLDER"
    )


def fit_measured_steps(folder: Path, *, implementation: str = "jaxkv") -> CostModel:
    """Fits a linear cost model to the rows of a run folder of `bench decode`.

    Prefill is linear in steps and tokens, decode in steps, context and batch. If
    prompts of several lengths were measured, their squares are fitted as well.

    Args:
      folder: run folder of `bench decode`.
      implementation: engine whose rows are fitted.

    Raises:
      ValueError: the folder is no such run, or has no rows of the implementation.
    """
    ran = read_run(folder, load_experiment("bench_decode"))
    rows = [
        row
        for row in ran.result
        if row["implementation"] == implementation and not row["absent"]
    ]
    if not rows:
        raise ValueError(f"{folder}: no rows of {implementation}")
    columns = ("batch", "prompt_tokens", "output_tokens", "prefill_tokens_per_s")
    batch, prompt, output, prefill_rate, step_s = (
        np.array([row[name] for row in rows], float) for name in (*columns, "step_s")
    )
    read = np.isfinite(prefill_rate)  # NaN: prefill of large batches is not timed
    tokens = (batch * prompt)[read]
    steps = np.ceil(tokens / ran.config.token_budget)
    (squares, *prefill), off_prefill = _nonnegative(
        np.stack([batch[read] * prompt[read] ** 2, steps, tokens], 1),
        tokens / prefill_rate[read],
    )
    # Per step: the constant, the mean number of attended tokens, the batch.
    context = batch * (prompt + output / 2)
    decode, off_decode = _nonnegative(
        np.stack([np.ones_like(batch), context, batch], 1), step_s
    )
    batches = ", ".join(f"{x:.0f}" for x in np.unique(batch))
    prompts = ", ".join(f"{x:.0f}" for x in np.unique(prompt))
    return CostModel(
        name=f"measured:{folder}",
        cost=linear_cost((*prefill, squares), tuple(decode), scale=1.0),
        source=f"{implementation}, {ran.config.model}, on {ran.env['cpu']}, "
        f"{', '.join(ran.env['devices'])}",
        validity=f"batches of {batches}, prompts of {prompts} and "
        f"answers of {rows[0]['output_tokens']} tokens; {len(rows)} rows",
        error=max(off_prefill, off_decode),
    )


def _nonnegative(
    features: Float[np.ndarray, "rows features"], seconds: Float[np.ndarray, " rows"]
) -> tuple[Float[np.ndarray, " features"], float]:
    """Fits relative errors by least squares, with coefficients of at least 0.

    Of linearly dependent features, such as context and batch if all prompts have one
    length, the last ones are used.

    Returns:
      The coefficients, and the largest relative error.
    """
    scaled = features / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    apart: list[int] = []
    for column in reversed(range(features.shape[1])):
        both = [column, *apart]
        if np.linalg.matrix_rank(scaled[:, both] / norms[both]) == len(both):
            apart = both
    best = np.zeros(features.shape[1])
    coefficients, _ = optimize.nnls(
        scaled[:, apart] / norms[apart], np.ones(len(seconds))
    )
    best[apart] = coefficients / norms[apart]
    return best, float(np.abs(scaled @ best - 1).max())
