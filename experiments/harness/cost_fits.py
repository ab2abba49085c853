"""Cost models fitted to what `jaxkv bench decode` measured on a machine."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import optimize

from experiments.framework import registry, run_folder
from experiments.harness import cost_models


def measured(folder: Path, *, implementation: str = "jaxkv") -> cost_models.CostModel:
    """Fits a run folder's rows: a step and its tokens to read, a step and its batch.

    Args:
      folder: of a run of `bench decode`.
      implementation: whose rows.

    Raises:
      ValueError: the folder is no such run, or has no rows of the implementation.
    """
    ran = run_folder.read(folder, registry.load("bench_decode"))
    rows = [
        row
        for row in ran.result
        if row["implementation"] == implementation and not row["absent"]
    ]
    if not rows:
        raise ValueError(f"{folder}: no rows of {implementation}")
    budget = ran.config.token_budget
    prefill, off_prefill = _nonnegative(*_prefill(rows, budget))
    decode, off_decode = _nonnegative(*_decode(rows))
    batches = ", ".join(str(row["batch"]) for row in rows)
    asked = rows[0]
    return cost_models.CostModel(
        name=f"measured:{folder}",
        cost=cost_models.linear((*prefill, 0.0), tuple(decode), scale=1.0),
        source=f"{implementation}, {ran.config.model}, on {ran.env['cpu']}, "
        f"{', '.join(ran.env['devices'])}",
        validity=f"batches of {batches}, prompts of {asked['prompt_tokens']} and "
        f"answers of {asked['output_tokens']} tokens; {len(rows)} rows",
        error=max(off_prefill, off_decode),
    )


def _prefill(
    rows: list[dict[str, Any]], budget: int
) -> tuple[Float[np.ndarray, "rows 2"], Float[np.ndarray, " rows"]]:
    """Steps and tokens of each row's prefill, and its seconds."""
    tokens = np.array([row["batch"] * row["prompt_tokens"] for row in rows], float)
    rates = np.array([row["prefill_tokens_per_s"] for row in rows])
    return np.stack([np.ceil(tokens / budget), tokens], 1), tokens / rates


def _decode(
    rows: list[dict[str, Any]],
) -> tuple[Float[np.ndarray, "rows 3"], Float[np.ndarray, " rows"]]:
    """A step, its mean tokens attended to and its batch; and the step's seconds."""
    batch = np.array([row["batch"] for row in rows], float)
    each = [row["prompt_tokens"] + row["output_tokens"] / 2 for row in rows]
    features = np.stack([np.ones_like(batch), batch * np.array(each), batch], 1)
    return features, np.array([row["step_s"] for row in rows])


def _nonnegative(
    features: Float[np.ndarray, "rows features"], seconds: Float[np.ndarray, " rows"]
) -> tuple[Float[np.ndarray, " features"], float]:
    """Fits relative errors by least squares, with coefficients of at least 0.

    Features that the rows cannot tell apart, as context and batch where all prompts are
    equally long, are not used together: the last ones count.

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
    found, _ = optimize.nnls(scaled[:, apart] / norms[apart], np.ones(len(seconds)))
    best[apart] = found / norms[apart]
    return best, float(np.abs(scaled @ best - 1).max())
