"""Checks of a sweep and of a design against a law that the solution does not see."""

import random
from typing import Any

MAX_RUNS = 100
MAX_EXCESS = 0.01
"""Largest part by which the loss of a design may exceed the lowest one."""
MAX_ERROR = 0.03
"""Largest relative error of a predicted loss."""


def check_design(
    process: Any,
    law: dict[str, float],
    allowance: float,
    budget: float,
    subject: str,
) -> str:
    """Answers the runs of a sweep by a law, and judges one aspect of the design.

    Args:
      process: the process of the solution.
      law: `E`, `A`, `B`, `alpha`, `beta`, relative `noise`, `seed`, and the lowest
        loss for the budget, `best_loss`, and its `best_params`.
      allowance: FLOPs of the sweep.
      budget: FLOPs of the design.
      subject: `allowance`, `design` or `prediction`.
    """
    rng = random.Random(law["seed"])
    history: list[list[float]] = []
    remaining = allowance
    while (run := process.call("choose_run", history, remaining)) is not None:
        num_params, num_tokens = map(float, run)
        flops = 6 * num_params * num_tokens
        number = len(history) + 1
        if not (num_params >= 1 and num_tokens >= 1):
            return f"Run {number} has N={num_params:g} and D={num_tokens:g}; both >= 1"
        if flops > remaining * (1 + 1e-9):
            return (
                f"Run {number} with N={num_params:.3g} and D={num_tokens:.3g} costs "
                f"6 N D = {flops:.3g} FLOPs, but only {remaining:.3g} of the allowance "
                f"of {allowance:.3g} remain: return None before it is overspent"
            )
        if number > MAX_RUNS:
            return f"The sweep has more than {MAX_RUNS} runs"
        remaining -= flops
        noise = 1 + law["noise"] * rng.gauss(0.0, 1.0)
        history.append([num_params, num_tokens, true_loss(law, *run) * noise])
    if subject == "allowance":
        return "" if history else "The sweep has no run"
    design = process.call("choose_size", history, budget)
    num_params, num_tokens = float(design["num_params"]), float(design["num_tokens"])
    setting = f"For {budget:.3g} FLOPs, N={num_params:.3g} and D={num_tokens:.3g}"
    spent = 6 * num_params * num_tokens
    if not 0 < spent <= budget * 1.001:
        return f"{setting} cost 6 N D = {spent:.3g} FLOPs: the budget is exceeded"
    loss = true_loss(law, num_params, num_tokens)
    excess = loss / law["best_loss"] - 1
    if subject == "design" and excess > MAX_EXCESS:
        side = "many" if num_params > law["best_params"] else "few"
        unused = "" if spent > 0.9 * budget else ", and part of the budget is unused"
        return (
            f"{setting} have a true loss of {loss:.4f}; {law['best_loss']:.4f} is "
            f"possible, {excess:.1%} less (allowed: {MAX_EXCESS:.0%}). These are "
            f"too {side} parameters{unused}: the ratio D / N depends on the law, so "
            "fit it to the sweep"
        )
    error = float(design["loss"]) / loss - 1
    if subject == "prediction" and not abs(error) <= MAX_ERROR:
        return (
            f"{setting} have a true loss of {loss:.4f}, but {design['loss']:.4g} was "
            f"predicted, {error:+.1%} (allowed: {MAX_ERROR:.0%}): a power law "
            "needs its irreducible loss to extrapolate"
        )
    return ""


def true_loss(law: dict[str, float], num_params: float, num_tokens: float) -> float:
    """Returns `E + A / N^alpha + B / D^beta`."""
    return (
        law["E"]
        + law["A"] * num_params ** -law["alpha"]
        + law["B"] * num_tokens ** -law["beta"]
    )
