"""Results of `isoflop` as stored in a run folder."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.report import Floats, Ints, ResultRecord, ResultTable, column
from scaling.cli import LogFits
from scaling.frontiers import Frontier, PowerLaw

_NO_LAW = PowerLaw(np.nan, np.nan)


class CurvePoints(ResultTable):
    """Training curves of several runs, one after another."""

    run: Ints = column("number of the run")
    num_params: Floats = column("parameters")
    num_tokens: Floats = column("tokens trained so far")
    flops: Floats = column("FLOPs spent so far")
    loss: Floats = column("training loss in nats per token")


class ComputePowers(ResultRecord):
    """Power laws of compute, `coefficient C^exponent`; NaN if unknown."""

    coefficient: np.ndarray = column("by method")
    exponent: np.ndarray = column("by method")


class BudgetOptima(ResultRecord):
    """Optima of budgets by method, and power laws through them."""

    methods: np.ndarray = column("names of the methods")
    flops: np.ndarray = column("budgets")
    num_params: np.ndarray = column("by method and budget, NaN without a minimum")
    num_tokens: np.ndarray = column("by method and budget")
    loss: np.ndarray = column("by method and budget")
    num_params_power: ComputePowers = column("through the sizes")
    num_tokens_power: ComputePowers = column("through the tokens")
    loss_power: ComputePowers = column("through the losses")


class LawOptima(ResultTable):
    """Optimum of the fitted law by budget."""

    flops: Floats = column("budget")
    num_params: Floats = column("optimal parameters")
    num_tokens: Floats = column("optimal tokens")
    loss: Floats = column("predicted loss")


class BestRates(ResultTable):
    """Best learning rates of cells whose best rate is not at the end of the grid."""

    width: Floats = column("hidden size")
    num_tokens: Floats = column("trained tokens")
    learning_rate: Floats = column("best rate")


class Result(ResultRecord):
    """Runs, fits, prediction and held-out run."""

    runs: str = column("lines of `runs.jsonl`")
    header: str = column("`sweep.json`")
    prediction: str = column("`prediction.json`")
    held_out: str = column("record of the held-out run; empty if it did not end")
    held_out_flops: np.ndarray = column("FLOPs of its training curve")
    held_out_loss: np.ndarray = column("training loss at each")
    fit: LogFits = column("result of `jaxkv fit` for the folder")
    cosine: str = column("`cosine.json`, results of the runs under a cosine schedule")
    curves: CurvePoints = column("training curves of these runs")
    optima: BudgetOptima = column("approach 2, constant rates that then decay")
    envelope: BudgetOptima = column("approach 1, from `curves`; no axis of methods")
    surface: LawOptima = column("approach 3")
    rates: BestRates = column("by cell")

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
