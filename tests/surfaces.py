"""Simulated runs on a known Chinchilla surface, for the tests of fitting."""

import numpy as np

COEFFICIENTS = {"A": 420.0, "B": 1500.0, "E": 1.8, "alpha": 0.34, "beta": 0.36}


def runs(num: int = 240, *, noise: float = 0.005, seed: int = 0) -> dict:
    """Runs at nine budgets, around the optimum, with noise of Student's t.

    The default is the public surface whose robust optimum is known to many digits.
    """
    rng = np.random.default_rng(seed)
    flops = np.repeat(np.geomspace(6e18, 3e21, 9), -(-num // 9))[:num]
    params = 0.1 * flops**0.5 * 10 ** rng.uniform(-0.7, 0.7, num)
    tokens = flops / (6 * params)
    loss = 1.8 + 420 / params**0.34 + 1500 / tokens**0.36
    loss = loss * np.exp(noise * rng.standard_t(3, num))
    return {"num_params": params, "num_tokens": tokens, "loss": loss}
