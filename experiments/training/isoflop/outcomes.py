"""Results of `isoflop` as stored in a run folder."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import lab
from scaling.cli import LogFits
from scaling.frontiers import Frontier, PowerLaw

_NO_LAW = PowerLaw(np.nan, np.nan)


class CurvePoints(lab.ResultTable):
    """Training curves of several runs, one after another."""

    run: lab.Ints = lab.column("number of the run")
    num_params: lab.Floats = lab.column("parameters")
    num_tokens: lab.Floats = lab.column("tokens trained so far")
    flops: lab.Floats = lab.column("FLOPs spent so far")
    loss: lab.Floats = lab.column("training loss in nats per token")


class ComputePowers(lab.ResultRecord):
    """Power laws of compute, `coefficient C^exponent`; NaN if unknown."""

    coefficient: np.ndarray = lab.column("by method")
    exponent: np.ndarray = lab.column("by method")


class BudgetOptima(lab.ResultRecord):
    """Optima of budgets by method, and power laws through them."""

    methods: np.ndarray = lab.column("names of the methods")
    flops: np.ndarray = lab.column("budgets")
    num_params: np.ndarray = lab.column("by method and budget, NaN without a minimum")
    num_tokens: np.ndarray = lab.column("by method and budget")
    loss: np.ndarray = lab.column("by method and budget")
    num_params_power: ComputePowers = lab.column("through the sizes")
    num_tokens_power: ComputePowers = lab.column("through the tokens")
    loss_power: ComputePowers = lab.column("through the losses")


class LawOptima(lab.ResultTable):
    """Optimum of the fitted law by budget."""

    flops: lab.Floats = lab.column("budget")
    num_params: lab.Floats = lab.column("optimal parameters")
    num_tokens: lab.Floats = lab.column("optimal tokens")
    loss: lab.Floats = lab.column("predicted loss")


class BestRates(lab.ResultTable):
    """Best learning rates of cells whose best rate is not at the end of the grid."""

    width: lab.Floats = lab.column("hidden size")
    num_tokens: lab.Floats = lab.column("trained tokens")
    learning_rate: lab.Floats = lab.column("best rate")


class Result(lab.ResultRecord):
    """Runs, fits, prediction and held-out run."""

    runs: str = lab.column("lines of `runs.jsonl`")
    header: str = lab.column("`sweep.json`")
    prediction: str = lab.column("`prediction.json`")
    held_out: str = lab.column("record of the held-out run; empty if it did not end")
    held_out_flops: np.ndarray = lab.column("FLOPs of its training curve")
    held_out_loss: np.ndarray = lab.column("training loss at each")
    fit: LogFits = lab.column("result of `jaxkv fit` for the folder")
    cosine: str = lab.column(
        "`cosine.json`, results of the runs under a cosine schedule"
    )
    curves: CurvePoints = lab.column("training curves of these runs")
    optima: BudgetOptima = lab.column("approach 2, constant rates that then decay")
    envelope: BudgetOptima = lab.column("approach 1, from `curves`; no axis of methods")
    surface: LawOptima = lab.column("approach 3")
    rates: BestRates = lab.column("by cell")

    @functools.cached_property
    def predicted(self) -> dict[str, Any]:
        """Content of `prediction.json`."""
        return json.loads(self.prediction)

    @functools.cached_property
    def truth(self) -> dict[str, Any]:
        """Record of the held-out run; empty if it has no loss."""
        record = json.loads(self.held_out) if self.held_out else {}
        return {} if record.get("loss") is None else record


def stack_frontiers(
    frontiers: Sequence[Frontier], *, is_one: bool = False
) -> BudgetOptima:
    """Stacks the frontiers of several methods over the same budgets.

    Args:
      frontiers: frontiers, at least 1.
      is_one: True for a single frontier without an axis of methods.
    """

    def by_method(rows: Sequence[float | np.ndarray]) -> np.ndarray:
        return np.asarray(rows[0] if is_one else np.stack(rows))

    def power(name: str) -> ComputePowers:
        laws = [getattr(frontier, name) or _NO_LAW for frontier in frontiers]
        return ComputePowers(
            by_method([law.coefficient for law in laws]),
            by_method([law.exponent for law in laws]),
        )

    def minima(name: str) -> np.ndarray:
        return by_method([getattr(frontier.minima, name)[0] for frontier in frontiers])

    return BudgetOptima(
        np.array([frontier.method for frontier in frontiers]),
        frontiers[0].flops,
        num_params=minima("num_params"),
        num_tokens=minima("num_tokens"),
        loss=minima("loss"),
        num_params_power=power("num_params"),
        num_tokens_power=power("num_tokens"),
        loss_power=power("loss"),
    )
