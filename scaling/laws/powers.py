"""Laws that are sums of powers: a size for each term, shared or separate exponents.

The logarithm of such a sum is a log-sum-exp of linear functions of the coordinates, so
its derivatives are the terms' shares of the sum, times log inputs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from scaling.laws.base import (
    Centre,
    Coefficients,
    Coordinate,
    Coordinates,
    Law,
    LogInputs,
    LogTarget,
    TwoPowers,
    exponent_coordinate,
    real_coordinate,
    scale_coordinate,
)


class Power(NamedTuple):
    """A factor `(factor * input) ** (sign * exponent)` of a term.

    Attributes:
      input: a column.
      exponent: a coefficient's name, or a fixed number.
      sign: -1 for a decay.
      factor: a constant.
    """

    input: str
    exponent: str | float
    sign: float = -1.0
    factor: float = 1.0


class PowerTerm(NamedTuple):
    """A size times powers; a floor has no powers."""

    scale: str
    powers: tuple[Power, ...] = ()


def power_sum(
    name: str,
    formula: str,
    inputs: tuple[str, ...],
    coordinates: tuple[Coordinate, ...],
    terms: tuple[PowerTerm, ...],
    source: str,
    *,
    target: str = "loss",
    two_powers: Callable[[Coefficients], TwoPowers] | None = None,
    same_as: str = "",
) -> Law:
    """Makes the law of a sum of terms; arguments after `source` are its fields."""
    place = {coordinate.name: i for i, coordinate in enumerate(coordinates)}
    row = {column: i for i, column in enumerate(inputs)}

    def slope(power: Power, x: Coordinates) -> float | Float[Array, ""]:
        if not isinstance(power.exponent, str):
            return power.sign * power.exponent
        return power.sign * x[place[power.exponent]]

    def forms(x: Coordinates, logs: LogInputs) -> list[Float[Array, "..."]]:
        log_terms = []
        for term in terms:
            form = x[place[term.scale]]
            for power in term.powers:
                argument = logs[row[power.input]] + math.log(power.factor)
                form = form + slope(power, x) * argument
            log_terms.append(form)
        return log_terms

    def log_loss(x: Coordinates, logs: LogInputs) -> LogTarget:
        total, *others = forms(x, logs)
        for form in others:
            total = jnp.logaddexp(total, jnp.broadcast_to(form, total.shape))
        return total

    def linearise(x: Coordinates, logs: LogInputs) -> tuple[LogTarget, list[LogTarget]]:
        # Fits stay in a box, so no term overflows without a common factor; a floor
        # takes one exponential for all points.
        sizes = [jnp.exp(form) for form in forms(x, logs)]
        total = sum(sizes[1:], sizes[0])
        rows = [jnp.zeros_like(total) for _ in coordinates]
        for term, size in zip(terms, sizes, strict=True):
            share = size / total
            rows[place[term.scale]] += share
            for power in term.powers:
                if isinstance(power.exponent, str):
                    argument = logs[row[power.input]] + math.log(power.factor)
                    rows[place[power.exponent]] += power.sign * share * argument
        return jnp.log(total), rows

    def shift(x: Coordinates, centre: Centre) -> Coordinates:
        moved = list(x)
        for term in terms:
            for power in term.powers:
                by = slope(power, x) * centre[row[power.input]]
                moved[place[term.scale]] = moved[place[term.scale]] + by
        return jnp.stack(moved)

    return Law(
        name=name,
        formula=formula,
        inputs=inputs,
        coordinates=coordinates,
        source=source,
        log_loss=log_loss,
        shift=shift,
        linearise=linearise,
        floor=next((term.scale for term in terms if not term.powers), None),
        target=target,
        two_powers=two_powers,
        same_as=same_as,
    )


_N = "num_params"
_D = "num_tokens"
_FLOOR = scale_coordinate("E", -2.0, -0.5, -0.1)
_HOFFMANN = "Hoffmann et al. 2022, arXiv:2203.15556, section 3.3"

MEAN_ESTIMATION = power_sum(
    "mean-estimation",
    "sigma_squared / n",
    ("num_samples",),
    (scale_coordinate("sigma_squared", 0.0),),
    (PowerTerm("sigma_squared", (Power("num_samples", 1.0),)),),
    "variance of a mean of n independent samples",
)

POWER = power_sum(
    "power",
    "a x^-b",
    ("flops",),
    (scale_coordinate("a", 0.0), real_coordinate("b", -4.0, 4.0, 0.1)),
    (PowerTerm("a", (Power("flops", "b"),)),),
    "Hestness et al. 2017, arXiv:1712.00409",
)

POWER_FLOOR = power_sum(
    "power-floor",
    "a x^-b + E",
    ("flops",),
    (scale_coordinate("a"), exponent_coordinate("b"), _FLOOR),
    (PowerTerm("a", (Power("flops", "b"),)), PowerTerm("E")),
    "Henighan et al. 2020, arXiv:2010.14701, equation 1.1",
)

CHINCHILLA = power_sum(
    "chinchilla",
    "A / N^alpha + B / D^beta + E",
    (_N, _D),
    (
        scale_coordinate("A"),
        scale_coordinate("B"),
        _FLOOR,
        exponent_coordinate("alpha"),
        exponent_coordinate("beta"),
    ),
    (
        PowerTerm("A", (Power(_N, "alpha"),)),
        PowerTerm("B", (Power(_D, "beta"),)),
        PowerTerm("E"),
    ),
    _HOFFMANN,
    two_powers=lambda c: TwoPowers(c["A"], c["B"], c["alpha"], c["beta"], c["E"]),
)
"""The parametric loss of Hoffmann et al. 2022, arXiv:2203.15556, equation 2."""

CHINCHILLA_TIED = power_sum(
    "chinchilla-tied",
    "A / N^alpha + B / D^alpha + E",
    (_N, _D),
    (
        scale_coordinate("A"),
        scale_coordinate("B"),
        _FLOOR,
        exponent_coordinate("alpha"),
    ),
    (
        PowerTerm("A", (Power(_N, "alpha"),)),
        PowerTerm("B", (Power(_D, "alpha"),)),
        PowerTerm("E"),
    ),
    f"{_HOFFMANN}, with one exponent",
    two_powers=lambda c: TwoPowers(c["A"], c["B"], c["alpha"], c["alpha"], c["E"]),
)

ROSENFELD = power_sum(
    "rosenfeld",
    "a / N^alpha + b / D^beta + c",
    (_N, _D),
    (
        scale_coordinate("a"),
        scale_coordinate("b"),
        scale_coordinate("c", -2.0, -0.5, -0.1),
        exponent_coordinate("alpha"),
        exponent_coordinate("beta"),
    ),
    (
        PowerTerm("a", (Power(_N, "alpha"),)),
        PowerTerm("b", (Power(_D, "beta"),)),
        PowerTerm("c"),
    ),
    "Rosenfeld et al. 2020, arXiv:1909.12673",
    two_powers=lambda c: TwoPowers(c["a"], c["b"], c["alpha"], c["beta"], c["c"]),
    same_as="chinchilla",
)

OVER_TRAINING = power_sum(
    "over-training",
    "a N^eta + b 6^(eta/2) D^eta + E",
    (_N, _D),
    (
        scale_coordinate("a"),
        scale_coordinate("b"),
        real_coordinate("eta", -2.0, -1e-3, -0.1, -0.3, -0.7),
        _FLOOR,
    ),
    (
        PowerTerm("a", (Power(_N, "eta", 1.0),)),
        PowerTerm("b", (Power(_D, "eta", 1.0, math.sqrt(6)),)),
        PowerTerm("E"),
    ),
    "Gadre et al. 2024, arXiv:2403.08540",
    two_powers=lambda c: TwoPowers(
        c["a"], c["b"] * 6 ** (c["eta"] / 2), -c["eta"], -c["eta"], c["E"]
    ),
    same_as="chinchilla-tied",
)

KRAJEWSKI = power_sum(
    "krajewski",
    "(g / G^gamma + a) / N^alpha + b / D^beta + c",
    (_N, _D, "granularity"),
    (
        scale_coordinate("g"),
        exponent_coordinate("gamma", 0.3, 0.8),
        scale_coordinate("a"),
        exponent_coordinate("alpha"),
        scale_coordinate("b"),
        exponent_coordinate("beta"),
        scale_coordinate("c", -1.0, -0.2),
    ),
    (
        PowerTerm("g", (Power("granularity", "gamma"), Power(_N, "alpha"))),
        PowerTerm("a", (Power(_N, "alpha"),)),
        PowerTerm("b", (Power(_D, "beta"),)),
        PowerTerm("c"),
    ),
    "Krajewski et al. 2024, arXiv:2402.07871",
)

KAPLAN_STEPS = power_sum(
    "kaplan-steps",
    "a / N^alpha + s / S^beta",
    (_N, "steps"),
    (
        scale_coordinate("a"),
        scale_coordinate("s"),
        exponent_coordinate("alpha"),
        exponent_coordinate("beta"),
    ),
    (PowerTerm("a", (Power(_N, "alpha"),)), PowerTerm("s", (Power("steps", "beta"),))),
    "Kaplan et al. 2020, arXiv:2001.08361, equation 1.6, with a = Nc^alpha, "
    "s = Sc^beta",
)

LEARNING_RATE = power_sum(
    "learning-rate",
    "c N^a D^b",
    (_N, _D),
    (
        scale_coordinate("c", 0.0),
        real_coordinate("a", -4.0, 4.0, -0.5),
        real_coordinate("b", -4.0, 4.0, 0.3),
    ),
    (PowerTerm("c", (Power(_N, "a", 1.0), Power(_D, "b", 1.0))),),
    "Li et al. 2025 (Step Law), arXiv:2503.04715",
    target="learning_rate",
)

BATCH_SIZE = power_sum(
    "batch-size",
    "c D^b",
    (_D,),
    (scale_coordinate("c", 0.0), real_coordinate("b", -4.0, 4.0, 0.5)),
    (PowerTerm("c", (Power(_D, "b", 1.0),)),),
    "Li et al. 2025 (Step Law), arXiv:2503.04715",
    target="batch_tokens",
)

POWER_SUMS = (
    MEAN_ESTIMATION,
    POWER,
    POWER_FLOOR,
    CHINCHILLA,
    CHINCHILLA_TIED,
    ROSENFELD,
    OVER_TRAINING,
    KRAJEWSKI,
    KAPLAN_STEPS,
    LEARNING_RATE,
    BATCH_SIZE,
)
