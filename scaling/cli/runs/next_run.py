"""`jaxkv next LOG --budget FLOPS`: which training runs should follow these?

With `--train CONFIG` they are trained one after another, each chosen by a new fit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv.cli import CommandOutput, parse_subject
from jaxkv.report import Sheet, numbered_list
from scaling.cli.runs.proposals import (
    FARTHER,
    NextOptions,
    describe_question,
    propose_runs,
    read_optimum_log,
)

_STEP = 2.0
"""Ratio of neighbouring candidates' parameters, and of their tokens."""
_MARGIN = 4.0
"""Factor beyond the fitted parameters and tokens within which candidates lie."""


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
    """Fits a log, and chooses the next runs; with `train`, also trains them."""
    for name in ("budget", "target"):
        if not 0 <= getattr(options, name) < np.inf:
            raise ValueError(f"--{name} {getattr(options, name):g}: must be above 0")
    if options.train:
        # The training programs take seconds to import.
        from scaling.cli.runs.train_next import train_runs

        return train_runs(log, options)
    runs, law = read_optimum_log(log, options)
    compute = 6 * runs.columns["num_params"] * runs.columns["num_tokens"]
    budget = options.budget or float(compute.sum())
    target = options.target or FARTHER * float(compute.max())
    num_params, num_tokens = _candidates(runs.columns, budget)
    flops = 6 * num_params * num_tokens
    candidates = {"num_params": num_params, "num_tokens": num_tokens, "flops": flops}
    proposal = propose_runs(
        runs, law, options, candidates, budget=budget, target=target
    )
    choice = proposal.choice
    places = np.array(choice.places, int)
    spread = proposal.standard_error
    document: dict[str, Any] = {
        "log": log,
        "law": law.name,
        "ask": options.ask,
        "target_flops": target,
        "budget_flops": budget,
        "answer": proposal.answer,
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
        "warnings": proposal.warnings,
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
        f"Asked: {describe_question(options, target)}, {proposal.answer:.4g} with a "
        f"standard error of {spread:.3g} over {proposal.num_resamples:,} resamples. "
        f"The runs take {used:.3g} of {budget:.3g} FLOP. Errors after the runs assume "
        f"that {law.name} holds.",
    )
    sheets = [sheet]
    if proposal.warnings:
        sheets.append(numbered_list("warnings", proposal.warnings))
    return CommandOutput(document, sheets, [])


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
