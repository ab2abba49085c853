"""Formulas of the laws as printed in their papers, with coefficients and data."""

import numpy as np

RNG = np.random.default_rng(0)


COLUMNS = {
    "num_params": 10 ** RNG.uniform(7, 10, 40),
    "num_tokens": 10 ** RNG.uniform(9, 11, 40),
    "flops": 10 ** RNG.uniform(17, 22, 40),
    "num_samples": 10 ** RNG.uniform(0, 4, 40),
    "steps": 10 ** RNG.uniform(3, 6, 40),
    "granularity": RNG.choice([1.0, 2.0, 4.0, 8.0], 40),
    "num_experts": RNG.choice([1.0, 8.0, 64.0, 512.0], 40),
}


COLUMNS["num_unique_tokens"] = COLUMNS["num_tokens"] / RNG.choice([1.0, 4.0, 30.0], 40)


EXAMPLES = {
    "mean-estimation": [2.5],
    "power": [30.0, 0.05],
    "power-floor": [2e3, 0.154, 1.7],
    "chinchilla": [406.4, 410.7, 1.69, 0.34, 0.29],
    "chinchilla-tied": [406.4, 710.7, 1.69, 0.32],
    "rosenfeld": [406.4, 410.7, 1.69, 0.34, 0.29],
    "rosenfeld-error": [40.0, 90.0, 0.2, 0.34, 0.29, 0.9],
    "over-training": [113.69, 189.52, -0.24247, 1.50825],
    "krajewski": [12.0, 0.6, 18.1, 0.115, 30.8, 0.147, 0.47],
    "kaplan-n": [8.8e13, 0.076],
    "kaplan-d": [5.4e13, 0.095],
    "kaplan-c": [1.6e7, 0.057],
    "kaplan": [6.4e13, 1.8e13, 0.076, 0.103],
    "kaplan-steps": [11.5, 40.0, 0.077, 0.76],
    "data-constrained": [521.0, 1488.0, 1.87, 0.35, 0.35, 15.4, 5.3],
    "overfitting": [60.0, 400.0, 2e-3, 0.34, 0.36, 0.8, 0.9, 1.8, 9.0],
    "joint-experts": [30.0, 40.0, 1.6, -0.2, -0.22, 0.1, 0.2, -0.01, -0.005, 1.8, 300],
    "clark": [-0.082, -0.108, 0.009, 1.1, 1.85, 314.0],
    "broken": [1.5, 120.0, 0.1, 0.08, 1e20, 0.5],
    "learning-rate": [1.79, -0.713, 0.307],
    "batch-size": [0.58, 0.571],
}


def plainly(name: str, coefficients: list[float], data: dict) -> np.ndarray:
    """Returns the laws as printed in their papers, in NumPy."""
    N = data["num_params"]
    D = data["num_tokens"]
    C = data["flops"]
    U = data["num_unique_tokens"]
    S = data["steps"]
    G = data["granularity"]
    n = data["num_samples"]
    experts = data["num_experts"]

    def constrained(A, B, E, alpha, beta, R_D, R_N):
        best = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
        R = D / U - 1
        UN = np.minimum(N, (U * best) ** (beta / alpha) * best)
        RN = N / UN - 1
        Dp = U + U * R_D * (1 - np.exp(-R / R_D))
        Np = UN + UN * R_N * (1 - np.exp(-RN / R_N))
        return A / Np**alpha + B / Dp**beta + E

    def clark(a, b, c, d, start, end):
        effective = 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / end)) + 1 / end)
        x = np.log10(N)
        y = np.log10(effective)
        return 10 ** (a * x + b * y + c * x * y + d)

    def overfitting(a, b, c, alpha, beta, gamma, delta, E, L0):
        h = a / N**alpha + b / D**beta + c * N**gamma / U**delta
        return E + (L0 - E) * h / (1 + h)

    def joint(a, b, c, alpha, beta, delta, omega, gamma, zeta, start, end):
        effective = 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / end)) + 1 / end)
        e = np.log(effective)
        size = a * effective**delta * N ** (alpha + gamma * e)
        return size + b * effective**omega * D ** (beta + zeta * e) + c

    def error(a, b, c, alpha, beta, e0):
        x = a / N**alpha + b / D**beta + c
        return e0 * abs(x / (x - 1j))

    forms = {
        "mean-estimation": lambda v: v / n,
        "power": lambda a, b: a * C**-b,
        "power-floor": lambda a, b, E: a * C**-b + E,
        "chinchilla": lambda A, B, E, a, b: E + A / N**a + B / D**b,
        "chinchilla-tied": lambda A, B, E, a: E + A / N**a + B / D**a,
        "rosenfeld": lambda a, b, c, p, q: a * N**-p + b * D**-q + c,
        "rosenfeld-error": error,
        "over-training": lambda a, b, h, E: (
            E + a * N**h + b * 6 ** (h / 2) * (D / N * N) ** h
        ),
        "krajewski": lambda g, gamma, a, alpha, b, beta, c: (
            c + (g / G**gamma + a) * N**-alpha + b * D**-beta
        ),
        "kaplan-n": lambda Nc, a: (Nc / N) ** a,
        "kaplan-d": lambda Dc, a: (Dc / D) ** a,
        "kaplan-c": lambda Cc, a: (Cc / C) ** a,
        "kaplan": lambda Nc, Dc, a, b: ((Nc / N) ** (a / b) + Dc / D) ** b,
        "kaplan-steps": lambda a, s, p, q: a / N**p + s / S**q,
        "data-constrained": constrained,
        "overfitting": overfitting,
        "joint-experts": joint,
        "clark": clark,
        "broken": lambda a, b, c0, c1, d1, f1: (
            a + b * C**-c0 * (1 + (C / d1) ** (1 / f1)) ** (-c1 * f1)
        ),
        "learning-rate": lambda c, a, b: c * N**a * D**b,
        "batch-size": lambda c, b: c * D**b,
    }
    return forms[name](*coefficients)
