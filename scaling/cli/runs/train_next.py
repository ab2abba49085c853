"""`jaxkv next LOG --train CONFIG`: trains each proposed run before the next one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.cli import CommandOutput, Terminal
from jaxkv.report import Sheet, numbered_list
from scaling.cli.runs.proposals import (
    FARTHER,
    NextOptions,
    RunProposal,
    describe_question,
    find_optimum_law,
    propose_runs,
    read_optimum_log,
)
from scaling.cli.train import find_config
from scaling.logs import RUNS
from scaling.sweeps import (
    SWEEPS,
    SweepCandidate,
    SweepConfig,
    TrainSweep,
    list_candidates,
    run_logged_sweep,
    train_in_sequence,
)

_MAX_AHEAD = 100
"""Largest number of runs planned before the first of them is trained."""


def train_runs(
    log: str, options: NextOptions, train: TrainSweep = run_logged_sweep
) -> CommandOutput:
    """Trains cells of a sweep in a folder, each chosen by a fit to those before.

    The cheapest cells come first, until there are twice as many runs as the law has
    coefficients, and as long as it cannot be fitted.

    Args:
      log: folder of the runs, new or with those of an earlier call.
      options: options with `train` and a budget.
      train: trains the runs of one cell.

    Returns:
      A row for each cell, and the last answer. The status is 130 if the sequence was
      ended early, 143 after SIGTERM, 75 after the time limit.

    Raises:
      ValueError: there is no budget, or the config or the folder cannot be used.
    """
    config = find_config(options.train, SweepConfig, SWEEPS)
    law = find_optimum_law(options)
    if not options.budget:
        raise ValueError("--train needs --budget, the compute of all runs of LOG")
    largest = max(6.0 * x.num_params * x.num_tokens for x in list_candidates(config))
    target = options.target or FARTHER * largest
    proposal: RunProposal | None = None
    rule = ""

    def propose(
        candidates: Sequence[SweepCandidate], remaining: float
    ) -> RunProposal | None:
        """Returns None if the law cannot be fitted yet."""
        if not (Path(log) / RUNS).exists():
            return None
        runs, _ = read_optimum_log(log, options)
        if len(runs.runs) < 2 * len(law.coefficients):
            return None
        columns = {
            name: np.array([getattr(x, name) for x in candidates], float)
            for name in ("num_params", "num_tokens", "flops")
        }
        try:
            return propose_runs(
                runs,
                law,
                dataclasses.replace(options, max_runs=_MAX_AHEAD),
                columns,
                budget=remaining,
                target=target,
            )
        except ValueError:
            return None

    def choose(candidates: Sequence[SweepCandidate], remaining: float) -> int | None:
        nonlocal proposal, rule
        proposal = propose(candidates, remaining)
        rule = "cheapest" if proposal is None else "next"
        places = [0] if proposal is None else proposal.choice.places
        return places[0] if places else None

    steps: list[dict[str, Any]] = []
    last_words = f"interrupted at once; the runs that ended are in {log}"
    with Terminal(lambda: last_words, max_seconds=options.max_seconds) as bars:
        for candidate in train_in_sequence(
            config,
            Path(log),
            choose,
            budget=options.budget,
            train=train,
            progress=bars,
        ):
            steps.append(
                {
                    "num_params": candidate.num_params,
                    "num_tokens": candidate.num_tokens,
                    "flops": candidate.flops,
                    "rule": rule or "continued",
                    "answer": None if proposal is None else proposal.answer,
                    "standard_error": proposal and proposal.standard_error,
                }
            )
            rule = ""
            proposal = None
        was_stopped = bars.has_stopped
        final = (
            None if was_stopped else propose(list_candidates(config), options.budget)
        )
    document: dict[str, Any] = {
        "log": log,
        "law": law.name,
        "ask": options.ask,
        "target_flops": target,
        "budget_flops": options.budget,
        "interrupted": was_stopped,
        "answer": final and final.answer,
        "standard_error": final and final.standard_error,
        "runs": steps,
        "warnings": final.warnings if final else [],
    }
    rows = [
        (
            f"{step['num_params']:,}",
            f"{step['num_tokens']:,}",
            f"{step['flops']:.3g}",
            step["rule"],
            "-" if step["answer"] is None else f"{step['answer']:.4g}",
            "-" if step["answer"] is None else f"{step['standard_error']:.3g}",
        )
        for step in steps
    ]
    question = describe_question(options, target)
    note = f"Asked: {question}; answers are those before the run."
    if final:
        note += (
            f" After all runs {final.answer:.4g} with a standard error of "
            f"{final.standard_error:.3g}."
        )
    heads = ("N", "D", "FLOPs", "rule", "answer", "standard error")
    sheets = [Sheet("trained runs", heads, rows, note)]
    if final and final.warnings:
        sheets.append(numbered_list("warnings", final.warnings))
    lines = [f"log: {log}; next: jaxkv fit {log}"]
    if was_stopped:
        lines.insert(0, f"{bars.reason}; run the same command to continue")
    return CommandOutput(document, sheets, lines, bars.status if was_stopped else 0)
