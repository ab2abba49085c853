"""Scaling laws by name, published constants, and the compute optimum.

N is the number of parameters, D of training tokens, C of FLOPs, L the loss in nats per
token. The convention for counting parameters is that of the data, not of the law.
"""

import difflib
import math
from typing import Any, NamedTuple

from jaxkv import validation
from scaling.laws.base import AMOUNTS, Amount, Coefficients, Law, TwoPowers
from scaling.laws.forms import FORMS
from scaling.laws.powers import CHINCHILLA as CHINCHILLA
from scaling.laws.powers import POWER_SUMS

LAWS = {law.name: law for law in (*POWER_SUMS, *FORMS)}

CONSTANTS: dict[str, dict[str, float]] = {
    # The course's slides.
    "lecture": dict(A=406.4, B=410.7, E=1.69, alpha=0.34, beta=0.29),
    # Hoffmann et al. 2022, arXiv:2203.15556, equation 10.
    "hoffmann": dict(A=406.4, B=410.7, E=1.69, alpha=0.34, beta=0.28),
    # The same fit with the digits in a comment of the paper's TeX source.
    "hoffmann-tex": dict(
        A=math.exp(6.0073404),
        B=math.exp(6.0179186),
        E=math.exp(0.5267228),
        alpha=0.33917084,
        beta=0.2849083,
    ),
    # Besiroglu et al. 2024, arXiv:2404.10102, from the points of Hoffmann's figure 4.
    "epoch": dict(A=482.01, B=2085.43, E=1.8172, alpha=0.3478, beta=0.3658),
}
"""Published coefficients of the Chinchilla law."""


class Exponents(NamedTuple):
    """Exponents of the compute optimum: `N* ~ C^a`, `D* ~ C^b`; a + b = 1."""

    a: Amount
    b: Amount


class Optimum(NamedTuple):
    """The compute-optimal division of a budget.

    Attributes:
      num_params: optimal number of parameters.
      num_tokens: optimal number of training tokens.
      loss: predicted loss.
    """

    num_params: Any
    num_tokens: Any
    loss: Any


def find_law(name: str) -> Law:
    """Returns a law by name.

    Raises:
      ValueError: there is no law of this name.
    """
    if name not in LAWS:
        near = difflib.get_close_matches(name, LAWS)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no law {name!r}; there are {', '.join(LAWS)}{meant}")
    return LAWS[name]


def optimal_exponents(law: Law, coefficients: Coefficients) -> Exponents:
    """Returns the exponents of a law's compute optimum.

    Args:
      law: a law with `two_powers`.
      coefficients: coefficients by name.

    Raises:
      ValueError: the law has no compute optimum.
    """
    powers = loss_powers(law, coefficients)
    total = powers.alpha + powers.beta
    return Exponents(powers.beta / total, powers.alpha / total)


@validation.checks_numbers(flops=AMOUNTS)
def compute_optimum(law: Law, coefficients: Coefficients, flops: Amount) -> Optimum:
    """Divides a compute budget between parameters and tokens by a law.

    Args:
      law: a law with `two_powers`.
      coefficients: coefficients by name.
      flops: the budget, a number or an array.

    Raises:
      ValueError: the law has no compute optimum.
    """
    return divide_budget(loss_powers(law, coefficients), flops)


@validation.checks_numbers(flops=AMOUNTS)
def divide_budget(powers: TwoPowers, flops: Amount) -> Optimum:
    """Divides a compute budget between parameters and tokens, `flops = 6 N D`.

    Closed form: `N* = G (C/6)^a`, `G = (alpha A / (beta B))^(1 / (alpha + beta))`,
    `a = beta / (alpha + beta)`. With the `hoffmann-tex` constants, 5.76e23 FLOPs give
    4.036e10 parameters and 2.379e12 tokens.

    Args:
      powers: terms of the loss.
      flops: the budget, a number or an array.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, equation 4.
    """
    total = powers.alpha + powers.beta
    ratio = (powers.alpha * powers.A) / (powers.beta * powers.B)
    num_params = ratio ** (1 / total) * (flops / 6) ** (powers.beta / total)
    num_tokens = flops / (6 * num_params)
    inner = powers.A * num_params**-powers.alpha + powers.B * num_tokens**-powers.beta
    return Optimum(num_params, num_tokens, powers.floor + inner**powers.outer)


def loss_powers(law: Law, coefficients: Coefficients) -> TwoPowers:
    """Returns a law's dependence on parameters and tokens.

    Raises:
      ValueError: the law has no such form.
    """
    if law.two_powers is None:
        raise ValueError(
            f"{law.name} does not define how loss falls with parameters and with tokens"
        )
    return law.two_powers(coefficients)
