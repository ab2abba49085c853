"""Cost models fitted to what `jaxkv bench decode` measured on a machine."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

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
    equally long, are not used together: of sets that fit alike the last ones count.

    Returns:
      The coefficients, and the largest relative error.
    """
    scaled = features / seconds[:, None]
    num, candidates = features.shape[1], []
    for size in range(1, num + 1):
        for columns in map(list, itertools.combinations(range(num), size)):
            chosen = scaled[:, columns]
            norms = np.linalg.norm(chosen, axis=0)
            found, _, rank, _ = np.linalg.lstsq(chosen / norms, np.ones(len(seconds)))
            if rank == size and (found >= 0).all():
                full = np.zeros(num)
                full[columns] = found / norms
                misfit = float(np.sum((scaled @ full - 1) ** 2))
                candidates.append((round(misfit, 9), size, -len(candidates), full))
    best = min(candidates, key=lambda candidate: candidate[:3])[-1]
    return best, float(np.abs(scaled @ best - 1).max())
