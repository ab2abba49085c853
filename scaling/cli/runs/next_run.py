"""`jaxkv next LOG --budget FLOPS`: which training runs should follow these?"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float

from jaxkv.cli import CommandOutput, describe_default, parse_subject
from jaxkv.report import Sheet, numbered_list
from jaxkv.validation import PositiveInt, Range
from scaling.cli.runs.options import LogOptions, read_runs
from scaling.fits import FitResult, bootstrap, fit, predict_samples
from scaling.laws import compute_optimum, optimal_exponents
from scaling.plan import choose_next_runs, evidence_variance

Question = Literal["loss", "exponent", "size"]
_STEP = 2.0
"""Ratio of neighbouring candidates' parameters, and of their tokens."""
_MARGIN = 4.0
"""Factor beyond the fitted parameters and tokens within which candidates lie."""
_MIN_NOISE = 1e-4
"""Smallest noise of a log loss."""


class NextOptions(LogOptions):
    """A budget, the question that the runs should answer, and the law."""

    budget: Annotated[float, describe_default("the compute of the log")] = 0.0
    """Compute of the next runs together, in FLOPs."""
    ask: Question = "loss"
    """Answer whose variance the runs lower: the least loss of the target's compute, the
    exponent a of its size N* ~ C^a, or that size."""
    target: Annotated[float, describe_default("10 times the largest run")] = 0.0
    """Compute of the target in FLOPs."""
    law: str = "chinchilla"
    """Law with an optimum."""
    max_runs: Annotated[PositiveInt, Range(1, 100)] = 5
    """Largest number of runs."""


def main(args: list[str]) -> CommandOutput:
    """Runs `next LOG [OPTIONS]`.

    Raises:
      ValueError: LOG is missing, an option is invalid, or the law cannot be fitted.
    """
    log, options = parse_subject(
        args,
        NextOptions,
        "jaxkv next LOG",
        "LOG is missing: a table of runs, or the folder of a sweep",
        "Chooses the runs that lower the variance of an answer most, within a budget "
        "and over resampled fits.",
    )
    return choose_runs(log, options)


def choose_runs(log: str, options: NextOptions) -> CommandOutput:
    """Fits a log, and chooses the next runs."""
    for name in ("budget", "target"):
        if not 0 <= getattr(options, name) < np.inf:
            raise ValueError(f"--{name} {getattr(options, name):g}: must be above 0")
    runs, law = read_runs(log, options, options.law)
    if law.two_powers is None or len(law.inputs) != 2:
        raise ValueError(f"--law {law.name}: must have an optimum of N and D alone")
    result = fit(law, runs.columns, cluster=runs.labels(), level=options.level)
    result = bootstrap(
        result,
        runs.columns,
        num_resamples=options.bootstrap,
        seed=options.seed,
        cluster=runs.labels(),
    )
    compute = 6 * runs.columns["num_params"] * runs.columns["num_tokens"]
    budget = options.budget or float(compute.sum())
    target = options.target or 10 * float(compute.max())
    answers = ask_resamples(result, options.ask, target)
    num_params, num_tokens = _candidates(runs.columns, budget)
    candidates = {"num_params": num_params, "num_tokens": num_tokens}
    usable = np.isfinite(answers)
    if usable.sum() < 0.5 * len(answers):
        raise ValueError(f"--ask {options.ask}: most resamples have no such answer")
    log_losses = np.log(predict_samples(result, candidates))[usable]
    flops = 6 * num_params * num_tokens
    noise = max(float(np.mean(result.noise**2)), _MIN_NOISE**2)
    choice = choose_next_runs(
        answers[usable],
        log_losses,
        evidence_variance(noise, flops, target),
        flops,
        budget=budget,
        max_runs=options.max_runs,
    )
    places = np.array(choice.places, int)
    spread = float(answers[usable].std())
    document: dict[str, Any] = {
        "log": log,
        "law": law.name,
        "ask": options.ask,
        "target_flops": target,
        "budget_flops": budget,
        "answer": float(np.median(answers[usable])),
        "standard_error": spread,
        "runs": [
            {
                "num_params": float(num_params[i]),
                "num_tokens": float(num_tokens[i]),
                "flops": float(flops[i]),
                "standard_error_after": spread * variance**0.5,
            }
            for i, variance in zip(places, choice.variance, strict=True)
        ],
        "warnings": result.warnings,
    }
    names = {
        "loss": f"ln(loss) of the optimum for {target:.3g} FLOP",
        "exponent": "exponent a of N* ~ C^a",
        "size": f"ln(N*) for {target:.3g} FLOP",
    }
    rows = [
        (
            f"{run['num_params']:.3g}",
            f"{run['num_tokens']:.3g}",
            f"{run['flops']:.3g}",
            f"{run['standard_error_after']:.3g}",
        )
        for run in document["runs"]
    ]
    used = sum(choice.flops)
    sheet = Sheet(
        "next runs",
        ("N", "D", "FLOPs", "standard error after"),
        rows,
        f"Asked: {names[options.ask]}, {document['answer']:.4g} with a standard error "
        f"of {spread:.3g} over {usable.sum():,} resamples. The runs take {used:.3g} of "
        f"{budget:.3g} FLOP. Errors after the runs assume that {law.name} holds.",
    )
    sheets = [sheet]
    if result.warnings:
        sheets.append(numbered_list("warnings", result.warnings))
    return CommandOutput(document, sheets, [])


def ask_resamples(
    result: FitResult, ask: Question, target: float
) -> Float[np.ndarray, " resamples"]:
    """Returns an answer by each resample of a fit.

    Args:
      result: fit with resamples of a law with an optimum.
      ask: the question.
      target: compute of the target in FLOPs.
    """
    law = result.find_law()
    columns = dict(zip(law.coefficients, result.sampled().T, strict=True))
    if ask == "exponent":
        return np.asarray(optimal_exponents(law, columns).a)
    best = compute_optimum(law, columns, target)
    return np.log(np.asarray(best.loss if ask == "loss" else best.num_params))


def _candidates(
    columns: Mapping[str, Float[np.ndarray, " runs"]], budget: float
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns a grid around the fitted runs, with their tokens per parameter."""
    axes = []
    for name in ("num_params", "num_tokens"):
        low = float(columns[name].min())
        high = float(columns[name].max())
        num = int(np.log(_MARGIN * high / low) / np.log(_STEP)) + 1
        axes.append(low * _STEP ** np.arange(num))
    num_params, num_tokens = (x.reshape(-1) for x in np.meshgrid(*axes))
    ratio = columns["num_tokens"] / columns["num_params"]
    is_usual = (num_tokens / num_params >= ratio.min() / _STEP) & (
        num_tokens / num_params <= ratio.max() * _STEP
    )
    flops = 6 * num_params * num_tokens
    is_within = is_usual & (flops <= budget)
    if not is_within.any():
        raise ValueError(
            f"--budget {budget:.3g}: below the smallest candidate, "
            f"{flops[is_usual].min():.3g} FLOP"
        )
    return num_params[is_within], num_tokens[is_within]
