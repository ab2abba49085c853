"""Laws say what their papers say, in whatever units fitting counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaling.laws import published

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
    "clark": [-0.082, -0.108, 0.009, 1.1, 1.85, 314.0],
    "broken": [1.5, 120.0, 0.1, 0.08, 1e20, 0.5],
    "learning-rate": [1.79, -0.713, 0.307],
    "batch-size": [0.58, 0.571],
}


def plainly(name: str, coefficients: list[float], data: dict) -> np.ndarray:
    """The laws as their papers print them, in NumPy."""
    N, D, C = data["num_params"], data["num_tokens"], data["flops"]
    U, S, G = data["num_unique_tokens"], data["steps"], data["granularity"]
    n, experts = data["num_samples"], data["num_experts"]

    def constrained(A, B, E, alpha, beta, R_D, R_N):
        best = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
        R, UN = D / U - 1, np.minimum(N, (U * best) ** (beta / alpha) * best)
        RN = N / UN - 1
        Dp = U + U * R_D * (1 - np.exp(-R / R_D))
        Np = UN + UN * R_N * (1 - np.exp(-RN / R_N))
        return A / Np**alpha + B / Dp**beta + E

    def clark(a, b, c, d, start, end):
        effective = 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / end)) + 1 / end)
        x, y = np.log10(N), np.log10(effective)
        return 10 ** (a * x + b * y + c * x * y + d)

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
        "clark": clark,
        "broken": lambda a, b, c0, c1, d1, f1: (
            a + b * C**-c0 * (1 + (C / d1) ** (1 / f1)) ** (-c1 * f1)
        ),
        "learning-rate": lambda c, a, b: c * N**a * D**b,
        "batch-size": lambda c, b: c * D**b,
    }
    return forms[name](*coefficients)


def test_every_law_has_an_example() -> None:
    assert set(EXAMPLES) == set(published.LAWS)


@pytest.mark.parametrize("name", published.LAWS)
def test_a_law_in_any_units(name: str) -> None:
    law, data = published.LAWS[name], COLUMNS
    expected = plainly(name, EXAMPLES[name], data)
    logs = np.log([data[column] for column in law.inputs])
    centre = law.centre(logs)

    @jax.jit
    def compute(x, centre):
        y = law.shift(law.encode(x), centre)
        centred = jnp.asarray(logs) - centre[:, None]
        value, rows = law.derivatives(y, centred)
        slow = jax.jacfwd(law.log_loss)(y, centred).T
        back = law.decode(law.encode(x))
        return y, law.predict(x, data), value, jnp.stack(rows), slow, back

    with jax.enable_x64(True):
        x = jnp.array(EXAMPLES[name])
        computed = compute(x, jnp.asarray(centre))
    y, found, value, rows, slow, back = map(np.asarray, computed)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(back, EXAMPLES[name], rtol=1e-12)
    np.testing.assert_allclose(value, np.log(expected), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(rows, slow, rtol=1e-9, atol=1e-12)
    # Where fits may go holds the example, and every start.
    low, high = law.box(float(np.median(np.log(expected))))
    assert np.all((low < y) & (y < high))
    starts = law.starts(float(np.median(np.log(expected))))
    assert np.all((low < starts) & (starts < high))


def test_float32_without_the_switch() -> None:
    law = published.CHINCHILLA
    found = law.predict(jnp.array(EXAMPLES["chinchilla"]), COLUMNS)
    assert found.dtype == jnp.float32
    expected = plainly("chinchilla", EXAMPLES["chinchilla"], COLUMNS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [x for x in EXAMPLES if published.LAWS[x].two_powers is not None]
)
def test_the_optimum_is_where_a_search_finds_it(name: str) -> None:
    law = published.LAWS[name]
    coefficients = dict(zip(law.coefficients, EXAMPLES[name], strict=True))
    flops = 5.76e23
    best = published.optimum(law, coefficients, flops)
    sizes = best.num_params * np.exp(np.linspace(-0.5, 0.5, 2001))
    data = COLUMNS | {"num_params": sizes, "num_tokens": flops / 6 / sizes}
    data["flops"] = np.full(2001, flops)
    losses = plainly(name, EXAMPLES[name], {**data, **_fill(2001)})
    assert abs(int(np.argmin(losses)) - 1000) <= 1
    np.testing.assert_allclose(best.loss, losses[1000], rtol=1e-12)
    larger = published.optimum(law, coefficients, np.array([100 * flops]))
    a, b = published.exponents(law, coefficients)
    np.testing.assert_allclose(larger.num_params / best.num_params, 100**a)
    np.testing.assert_allclose(larger.num_tokens / best.num_tokens, 100**b)


def _fill(n: int) -> dict[str, np.ndarray]:
    names = ("num_unique_tokens", "steps", "granularity", "num_samples", "num_experts")
    return {name: np.ones(n) for name in names}


def test_published_optimum() -> None:
    # Hoffmann et al.: 5.76e23 FLOPs and 59 tokens per parameter from the digits in the
    # source, 93 after rounding.
    for name, ratio in (("hoffmann-tex", 59), ("hoffmann", 93)):
        best = published.optimum(
            published.CHINCHILLA, published.CONSTANTS[name], 5.76e23
        )
        assert round(best.num_tokens / best.num_params) == ratio


def test_refusals() -> None:
    said = r"no law 'chinchila'; there are mean-.*; did you mean chinchilla or"
    with pytest.raises(ValueError, match=said):
        published.find("chinchila")
    with pytest.raises(ValueError, match="power does not say how loss falls"):
        published.exponents(published.find("power"), {"a": 1.0, "b": 0.1})
    with pytest.raises(ValueError, match="chinchilla needs a column num_tokens"):
        published.CHINCHILLA.predict(jnp.ones(5), {"num_params": [1.0]})
    assert published.find("power").over("num_tokens").inputs == ("num_tokens",)
    with pytest.raises(ValueError, match="power takes 1 columns"):
        published.find("power").over("num_params", "num_tokens")


def test_every_law_names_its_source() -> None:
    assert all(law.source and law.formula for law in published.LAWS.values())
