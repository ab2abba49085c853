"""Synthetic runs on a known Chinchilla surface: sound ones, and ill-posed ones."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxkv import validation
from scaling.laws.base import AMOUNTS, Amount

Noise = Literal["normal", "student"]
COEFFICIENTS = {"A": 420.0, "B": 1500.0, "E": 1.8, "alpha": 0.34, "beta": 0.36}
LOSS_NOISE = 0.005
"""Scale of the noise of the log loss, a factor on the standard distribution."""

SOUND = "sound"
ILL_POSED = {
    "collinear: D = 20 N": "two terms in one variable",
    "nearly collinear": "D within 5 % of 20 N",
    "few points": "5 to 8 runs",
    "outliers": "a tenth of the losses 5 to 65 % too high",
    "one wild outlier": "one loss 4.5 times as high",
    "floor near zero": "E = 0.001",
    "vanishing term": "A = 0.001",
    "weak term": "A = 20: 1 % of the loss",
    "one budget": "all runs within a factor of 2 in compute, 1.6 in size",
}
"""Ill-posed kinds of data, with their defects."""


@validation.checks_numbers(seed=validation.SEEDS)
def simulate_isoflop_runs(
    num: int = 240, *, seed: int = 0, noise: Noise = "student"
) -> dict[str, np.ndarray]:
    """Simulates runs at nine budgets from 6e18 to 3e21 FLOPs, around the optimum.

    The default is a surface whose robust optimum is known to many digits: Huber's
    objective is 0.00122400645673 there, with delta 0.001.

    Args:
      num: number of runs, at least 1.
      seed: seed of sizes and noise.
      noise: distribution of log noise: Student's t with 3 degrees of freedom, or
        normal.

    Returns:
      Columns `num_params`, `num_tokens` and `loss`.
    """
    return simulate_runs(SOUND, num, seed=seed, noise=noise)[0]


@validation.checks_numbers(seed=validation.SEEDS)
def simulate_runs(
    kind: str, num: int, *, seed: int, noise: Noise = "student"
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Simulates sound or ill-posed runs.

    Args:
      kind: `SOUND`, or a key of `ILL_POSED`.
      num: number of runs, unless the kind has its own.
      seed: seed of sizes and noise.
      noise: see `simulate_isoflop_runs`.

    Returns:
      Columns, and the surface's coefficients.
    """
    rng = np.random.default_rng(seed)
    flops = np.repeat(np.geomspace(6e18, 3e21, 9), -(-num // 9))[:num]
    params = 0.1 * flops**0.5 * 10 ** rng.uniform(-0.7, 0.7, num)
    tokens = flops / (6 * params)
    truth = dict(COEFFICIENTS)
    if kind == "collinear: D = 20 N":
        tokens = 20 * params
    elif kind == "nearly collinear":
        tokens = 20 * params * 10 ** rng.uniform(-0.02, 0.02, num)
    elif kind == "few points":
        indices = rng.choice(num, rng.integers(5, 9), replace=False)
        params = params[indices]
        tokens = tokens[indices]
    elif kind == "one budget":
        flops = np.geomspace(1e20, 2e20, num)
        params = 0.1 * flops**0.5 * 10 ** rng.uniform(-0.1, 0.1, num)
        tokens = flops / (6 * params)
    elif kind == "floor near zero":
        truth["E"] = 1e-3
    elif kind == "vanishing term":
        truth["A"] = 1e-3
    elif kind == "weak term":
        truth["A"] = 20.0
    size = len(params)
    deviates = rng.normal(size=size) if noise == "normal" else rng.standard_t(3, size)
    error = LOSS_NOISE * deviates
    if kind == "outliers":
        wild = rng.random(num) < 0.1
        error = error + wild * rng.uniform(0.05, 0.5, num)
    elif kind == "one wild outlier":
        error[rng.integers(num)] += 1.5
    loss = surface_loss(params, tokens, truth) * np.exp(error)
    return {"num_params": params, "num_tokens": tokens, "loss": loss}, truth


@validation.checks_numbers(params=AMOUNTS, tokens=AMOUNTS)
def surface_loss(
    params: Amount, tokens: Amount, coefficients: Mapping[str, float] = COEFFICIENTS
) -> Any:
    """Returns the loss of a run without noise."""
    A, B, E, alpha, beta = (coefficients[x] for x in COEFFICIENTS)
    return E + A / params**alpha + B / tokens**beta
