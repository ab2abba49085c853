"""Proposals of `jaxkv next`: the question, a fit to the log, and the chosen runs."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv.cli import MAX_SECONDS, describe_default
from jaxkv.validation import PositiveInt, Range
from scaling.cli.runs.options import LogOptions, read_runs
from scaling.fits import FitResult, bootstrap, fit, predict_samples
from scaling.laws import Law, compute_optimum, find_law, optimal_exponents
from scaling.logs import Log
from scaling.plan import RunChoice, choose_next_runs, evidence_variance

Question = Literal["loss", "exponent", "size"]
FARTHER = 10.0
"""Compute of the target by default, over that of the largest run."""
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
    train: Annotated[str, describe_default("no run is trained")] = ""
    """Config of a sweep, as for `jaxkv sweep`: its cells are trained one after another
    in the folder LOG, each chosen by a new fit, until all runs of the folder have taken
    the budget. The same command continues."""
    max_seconds: Annotated[float, describe_default("no limit", MAX_SECONDS)] = math.inf


class RunProposal(NamedTuple):
    """Runs that lower the variance of an answer most, by a fit to a log.

    Attributes:
      choice: the chosen candidates.
      answer: median of the answer over the resamples.
      standard_error: its standard deviation.
      num_resamples: resamples that have the answer.
      warnings: those of the fit.
    """

    choice: RunChoice
    answer: float
    standard_error: float
    num_resamples: int
    warnings: list[str]


def propose_runs(
    runs: Log,
    law: Law,
    options: NextOptions,
    candidates: Mapping[str, Float[np.ndarray, " candidates"]],
    *,
    budget: float,
    target: float,
) -> RunProposal:
    """Fits a log, and chooses candidates within a budget.

    Args:
      runs: the log.
      law: a law with an optimum of N and D alone.
      options: the question and the resamples.
      candidates: `num_params`, `num_tokens`, and `flops`, their cost.
      budget: compute of the chosen candidates together.
      target: compute of the target.

    Raises:
      ValueError: the law cannot be fitted, or most resamples have no answer.
    """
    clusters = runs.labels()
    result = fit(law, runs.columns, cluster=clusters, level=options.level)
    result = bootstrap(
        result,
        runs.columns,
        num_resamples=options.bootstrap,
        seed=options.seed,
        cluster=clusters,
    )
    answers = ask_resamples(result, options.ask, target)
    usable = np.isfinite(answers)
    if usable.sum() < 0.5 * len(answers):
        raise ValueError(f"--ask {options.ask}: most resamples have no such answer")
    answers = answers[usable]
    noise = max(float(np.mean(result.noise**2)), _MIN_NOISE**2)
    flops = 6 * candidates["num_params"] * candidates["num_tokens"]
    choice = choose_next_runs(
        answers,
        np.log(predict_samples(result, candidates))[usable],
        evidence_variance(noise, flops, target),
        candidates["flops"],
        budget=budget,
        max_runs=options.max_runs,
    )
    return RunProposal(
        choice,
        float(np.median(answers)),
        float(answers.std()),
        len(answers),
        result.warnings,
    )


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


def read_optimum_log(log: str, options: NextOptions) -> tuple[Log, Law]:
    """Reads the rows of a log for a law with an optimum.

    Raises:
      ValueError: the law has no optimum, or the log cannot be used.
    """
    law = find_optimum_law(options)
    return read_runs(log, options, law.name)[0], law


def find_optimum_law(options: NextOptions) -> Law:
    """Returns the law.

    Raises:
      ValueError: it has no optimum of N and D alone.
    """
    law = find_law(options.law)
    if law.two_powers is None or len(law.inputs) != 2:
        raise ValueError(f"--law {law.name}: must have an optimum of N and D alone")
    return law


def describe_question(options: NextOptions, target: float) -> str:
    """Returns the question in words."""
    return {
        "loss": f"ln(loss) of the optimum for {target:.3g} FLOP",
        "exponent": "exponent a of N* ~ C^a",
        "size": f"ln(N*) for {target:.3g} FLOP",
    }[options.ask]
