"""Compute-optimal parameters and tokens for budgets of training, serving and data.

The loss is `floor + (A / N^alpha + B / D^beta)^outer`, the form of most laws
(`laws.TwoPowers`). Training takes 6 N D operations, serving 2 N a token. Problems
without a closed form are a root in one unknown, or a search along one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxkv import validation
from scaling.laws import (
    AMOUNTS,
    AMOUNTS_FROM_0,
    CHINCHILLA,
    Amount,
    Law,
    Optimum,
    TwoPowers,
    divide_budget,
    loss_powers,
)

LOSSES = "(0, 1e9]"
"""Interval of a loss to reach."""


class HalfLives(NamedTuple):
    """Half-lives of repeated data, and of parameters beyond those optimal for it.

    Attributes:
      tokens: R_D*, in epochs after the first.
      params: R_N*, in multiples of the optimum for the unique tokens, after the first.
    """

    tokens: float
    params: float


MUENNIGHOFF = HalfLives(15.387756, 5.309743)
"""Muennighoff et al. 2023, arXiv:2305.16264, section 3.3, digits of their README."""


@dataclasses.dataclass(frozen=True)
class DataLimit:
    """A limit on unique training data.

    Attributes:
      unique_tokens: U, above 0; further training tokens repeat them.
      half_lives: half-lives of repeated data and excess parameters.
    """

    unique_tokens: float
    half_lives: HalfLives = MUENNIGHOFF

    def __post_init__(self) -> None:
        """Validates the fields."""
        validation.check_fields(self)
        for name, value in self.half_lives._asdict().items():
            validation.number(
                name, value, low=1e-100, high=1e100, hint="in [1e-100, 1e100]"
            )


def law_two_powers(law: Law, coefficients: Mapping[str, Amount]) -> TwoPowers:
    """Returns a law's dependence on parameters and tokens, and checks it.

    The data-constrained law is used without repetition.

    Raises:
      ValueError: the law has no such form, or the coefficients have no optimum.
    """
    is_repeating = law.name == "data-constrained"
    powers = loss_powers(CHINCHILLA if is_repeating else law, coefficients)
    for name in ("A", "B", "alpha", "beta", "outer"):
        value = getattr(powers, name)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{law.name} with {name}={value:g} has no compute optimum: it must be "
                "positive"
            )
    if not 0 <= powers.floor < math.inf:
        raise ValueError(f"{law.name} with a floor of {powers.floor:g}")
    return powers


@validation.checks_numbers(num_params=AMOUNTS, num_tokens=AMOUNTS)
def budget_loss(
    powers: TwoPowers,
    num_params: Amount,
    num_tokens: Amount,
    repeating: DataLimit | None = None,
) -> Any:
    """Returns the loss of a model and its training tokens, unique by default."""
    sizes, tokens = effective_sizes(powers, num_params, num_tokens, repeating)
    inner = powers.A * sizes**-powers.alpha + powers.B * tokens**-powers.beta
    return powers.floor + inner**powers.outer


@validation.checks_numbers(
    num_params=AMOUNTS, num_tokens=AMOUNTS_FROM_0, inference_tokens=AMOUNTS_FROM_0
)
def lifetime_flops(
    num_params: Amount, num_tokens: Amount, inference_tokens: float = 0.0
) -> Any:
    """Returns the operations of training and serving, 6 N D + 2 N D_inf."""
    return num_params * (6 * num_tokens + 2 * inference_tokens)


@validation.checks_numbers(flops=AMOUNTS, inference_tokens=AMOUNTS_FROM_0)
def allocate_budget(
    powers: TwoPowers,
    flops: float,
    *,
    inference_tokens: float = 0.0,
    repeating: DataLimit | None = None,
) -> Optimum:
    """Divides a budget between parameters and tokens, for the lowest loss.

    Without serving, the closed form: `N* = G (C/6)^a`, `D* = C / (6 N*)`, with
    `G = (alpha A / (beta B))^(1 / (alpha + beta))` and `a = beta / (alpha + beta)`.
    The constants of the lecture divide 5.616e23 FLOPs into 4.75e10 parameters and
    1.97e12 tokens.

    With serving, `min L(N, D)` subject to `6 N D + 2 N D_inf = C`: the Lagrange
    conditions give N for every D, see `_params_for`, and the budget gives a root in D.

    If that needs more than the unique tokens, a search along the budget's curve finds
    the number of epochs, to about 1e-8.

    Args:
      powers: loss for unique tokens.
      flops: budget C of training and serving together, above 0.
      inference_tokens: D_inf, tokens read and written in serving, at least 0.
      repeating: limit on unique tokens; no limit by default.

    Raises:
      ValueError: `powers` has another type; `law_two_powers` makes it from a fit.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, equation 4; Sardana et al. 2024,
    arXiv:2401.00448, section 2; Muennighoff et al. 2023, arXiv:2305.16264, section 5.
    """
    if not isinstance(powers, TwoPowers):
        raise ValueError(
            f"powers={validation.format_value(powers)} must be a TwoPowers, such as "
            "law_two_powers(law, fit.coefficients)"
        )
    if inference_tokens == 0:
        free = divide_budget(powers, flops)
    else:
        served = math.log(2 * inference_tokens)

        def excess(log_params: float, log_tokens: float) -> float:
            per_param = np.logaddexp(math.log(6) + log_tokens, served)
            return log_params + per_param - math.log(flops)

        free = _where_zero(powers, inference_tokens, excess)
    if repeating is None or free.num_tokens <= repeating.unique_tokens:
        return free
    num_params = search_params(powers, flops, inference_tokens, repeating)
    num_tokens = float(tokens_left(flops, num_params, inference_tokens))
    reached = budget_loss(powers, num_params, num_tokens, repeating)
    return Optimum(num_params, num_tokens, float(reached))


@validation.checks_numbers(target=LOSSES, inference_tokens=AMOUNTS_FROM_0)
def cheapest_model(
    powers: TwoPowers,
    target: float,
    *,
    inference_tokens: float = 0.0,
    repeating: DataLimit | None = None,
) -> Optimum:
    """Finds the model of a given loss with the lowest cost of training and serving.

    `min 6 N D + 2 N D_inf` subject to `L(N, D) = target`. It is smaller, and trained
    longer, than the model that is cheapest to train: to serve 2e12 tokens at the loss
    of an optimal 13B, it is a 7B with 2.16 times its tokens, for 17.4 % less (with the
    paper's constants; it prints 7B, 2.1 and 17 %).

    Args:
      powers: terms of the loss.
      target: the loss, above the floor.
      inference_tokens: D_inf, at least 0.
      repeating: limit on unique tokens; no limit by default. Under a limit the model
        is the best one of the smallest budget that reaches the loss (`needed_budget`).

    Raises:
      ValueError: the loss cannot be reached.

    Source: Sardana et al. 2024, arXiv:2401.00448, equation 3.
    """
    if not target > powers.floor:
        raise ValueError(f"{target=:g} must be above the floor, {powers.floor:.6g}")
    inner = math.log(target - powers.floor) / float(powers.outer)

    def excess(log_params: float, log_tokens: float) -> float:
        sizes = math.log(powers.A) - powers.alpha * log_params
        data = math.log(powers.B) - powers.beta * log_tokens
        return inner - float(np.logaddexp(sizes, data))

    free = _where_zero(powers, inference_tokens, excess)
    if repeating is None or free.num_tokens <= repeating.unique_tokens:
        return free
    flops = needed_budget(
        powers, target, inference_tokens=inference_tokens, repeating=repeating
    )
    return allocate_budget(
        powers, flops, inference_tokens=inference_tokens, repeating=repeating
    )


@validation.checks_numbers(target=LOSSES, inference_tokens=AMOUNTS_FROM_0)
def needed_budget(
    powers: TwoPowers,
    target: float,
    *,
    inference_tokens: float = 0.0,
    repeating: DataLimit | None = None,
) -> float:
    """Finds the smallest budget whose best division reaches a loss.

    With the lecture's constants a loss of 2 takes 4.249e22 FLOPs, and 1.9 5.117e23.

    Args:
      powers: loss for unique tokens.
      target: the loss.
      inference_tokens: tokens to serve from the same budget, at least 0.
      repeating: limit on unique tokens; no limit by default.

    Returns:
      FLOPs of training and serving together.

    Raises:
      ValueError: no budget reaches the loss.
    """
    optimum = cheapest_model(powers, target, inference_tokens=inference_tokens)
    flops = lifetime_flops(optimum.num_params, optimum.num_tokens, inference_tokens)
    if repeating is None or optimum.num_tokens <= repeating.unique_tokens:
        return flops

    def reached(log_flops: float) -> float:
        return allocate_budget(
            powers,
            math.exp(log_flops),
            inference_tokens=inference_tokens,
            repeating=repeating,
        ).loss

    # Repeated data never needs less than unique data.
    low = math.log(flops)
    high = math.log(flops) + _MOST_REPEATING
    if reached(high) > target:
        raise ValueError(
            f"{target=:g} cannot be reached with {repeating.unique_tokens:.4g} unique "
            f"tokens by any budget: {reached(high):.4f} can"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) <= target else (middle, high)
    return math.exp(high)


_MOST_REPEATING = 30.0
"""Largest log ratio of budgets with repeated and unique data: 13 decades."""


def _params_for(powers: TwoPowers, log_tokens: float, inference_tokens: float) -> float:
    """Returns the log of the optimal parameters for a number of tokens.

    At the optimum an operation lowers the loss equally, spent on parameters or on
    tokens: `alpha A N^-alpha / (beta B D^-beta) = 1 + D_inf / (3 D)`. N grows with D.
    """
    served = 0.0
    if inference_tokens:
        log_ratio = math.log(inference_tokens / 3) - log_tokens
        served = float(np.logaddexp(0.0, log_ratio))
    sizes = math.log(powers.alpha * powers.A) - math.log(powers.beta * powers.B)
    return float((sizes + powers.beta * log_tokens - served) / powers.alpha)


def _where_zero(
    powers: TwoPowers,
    inference_tokens: float,
    excess: Callable[[float, float], float],
) -> Optimum:
    """Bisects along the optima of all budgets, to the last bit.

    Args:
      powers: terms of the loss.
      inference_tokens: tokens to serve, at least 0.
      excess: function of log parameters and log tokens; rises, and is 0 at the result.
    """
    low = -700.0
    high = 700.0
    while (log_tokens := (low + high) / 2) not in (low, high):
        log_params = _params_for(powers, log_tokens, inference_tokens)
        is_below = excess(log_params, log_tokens) < 0
        low, high = (log_tokens, high) if is_below else (low, log_tokens)
    num_tokens = math.exp(log_tokens)
    num_params = math.exp(_params_for(powers, log_tokens, inference_tokens))
    return Optimum(num_params, num_tokens, budget_loss(powers, num_params, num_tokens))


def effective_sizes(
    powers: TwoPowers,
    num_params: Amount,
    num_tokens: Amount,
    repeating: DataLimit | None,
) -> tuple[Any, Any]:
    """Returns the effective parameters and tokens if tokens are repeated.

    With `R_D = D / U - 1` repetitions, `D' = U (1 + R_D* (1 - exp(-R_D / R_D*)))`; the
    same for parameters beyond the optimum for U, `U_N = (U G)^(beta / alpha) G`. 4
    epochs count as 3.73 of unique data, 16 as 10.6, and any number as at most 16.4.

    Args:
      powers: loss for unique tokens.
      num_params: N.
      num_tokens: D, over all epochs.
      repeating: limit on unique tokens, or None.

    Returns:
      N' and D', the arguments of the loss.

    Source: Muennighoff et al. 2023, arXiv:2305.16264, section 3.1.
    """
    if repeating is None:
        return num_params, num_tokens
    ratio = powers.alpha * powers.A / (powers.beta * powers.B)
    unique = np.minimum(repeating.unique_tokens, num_tokens)
    suited = ratio ** (1 / powers.alpha) * unique ** (powers.beta / powers.alpha)
    halves = repeating.half_lives
    return (
        _saturating(num_params, np.minimum(num_params, suited), halves.params),
        _saturating(num_tokens, unique, halves.tokens),
    )


def _saturating(total: Amount, unique: Amount, half_life: float) -> Any:
    repeats = total / unique - 1
    return unique * (1 - half_life * np.expm1(-repeats / half_life))


@validation.checks_numbers(
    flops=AMOUNTS, num_params=AMOUNTS, inference_tokens=AMOUNTS_FROM_0
)
def tokens_left(flops: float, num_params: Amount, inference_tokens: float = 0.0) -> Any:
    """Returns the training tokens of a budget, after the cost of serving."""
    return (flops / num_params - 2 * inference_tokens) / 6


@validation.checks_numbers(flops=AMOUNTS, inference_tokens=AMOUNTS_FROM_0)
def search_params(
    powers: TwoPowers,
    flops: float,
    inference_tokens: float = 0.0,
    repeating: DataLimit | None = None,
) -> float:
    """Finds the parameters of lowest loss along a budget's curve, by refined grids.

    Uses no closed form. Arguments are those of `allocate_budget`.

    Returns:
      The number of parameters, to about 1e-8, the precision of a flat minimum.
    """
    # Above this no training token is left.
    max_params = flops / max(2 * inference_tokens, 1.0)
    low = min(0.0, math.log(max_params) - 1)
    high = math.log(max_params) - 1e-6
    for _ in range(8):
        grid = np.linspace(low, high, 801)
        sizes = np.exp(grid)
        tokens = tokens_left(flops, sizes, inference_tokens)
        best = int(np.argmin(budget_loss(powers, sizes, tokens, repeating)))
        low = grid[max(best - 2, 0)]
        high = grid[min(best + 2, len(grid) - 1)]
    return math.exp((low + high) / 2)
