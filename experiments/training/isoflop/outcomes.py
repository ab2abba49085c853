"""What comes out of `isoflop`, as a run folder keeps it, and how it is laid out."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.fitting import Result as Fit
from experiments.framework import Floats, Ints, Record, Table, column
from scaling.frontiers import Frontier
from scaling.frontiers.frontier import PowerLaw

_UNKNOWN = PowerLaw(np.nan, np.nan)


class CurvePoints(Table):
    """Training curves of some runs, one after another."""

    run: Ints = column("a number for the run of each point")
    num_params: Floats = column("its size")
    num_tokens: Floats = column("trained on so far")
    flops: Floats = column("spent so far")
    loss: Floats = column("of training, nats per token")


class ComputePowers(Record):
    """Powers of the compute, `coefficient C^exponent`; not numbers where unknown."""

    coefficient: np.ndarray = column("by method")
    exponent: np.ndarray = column("by method")


class BudgetOptima(Record):
    """Optima at some budgets by some methods, and the powers through them."""

    methods: np.ndarray = column("their names")
    flops: np.ndarray = column("the budgets")
    num_params: np.ndarray = column(
        "by method and budget, not a number where there is no minimum"
    )
    num_tokens: np.ndarray = column("by method and budget")
    loss: np.ndarray = column("by method and budget")
    num_params_power: ComputePowers = column("through the sizes")
    num_tokens_power: ComputePowers = column("through the tokens")
    loss_power: ComputePowers = column("through the losses")


class LawOptima(Table):
    """The law's optimum at some budgets."""

    flops: Floats = column("the budgets")
    num_params: Floats = column("the best size")
    num_tokens: Floats = column("the tokens to train it on")
    loss: Floats = column("that the law predicts")


class BestRates(Table):
    """Best learning rates, of the cells that have one between others."""

    width: Floats = column("of the model")
    num_tokens: Floats = column("trained on")
    learning_rate: Floats = column("the best")


class Result(Record):
    """What came out."""

    runs: str = column("the lines of `runs.jsonl`")
    header: str = column("`sweep.json`")
    prediction: str = column("`prediction.json`")
    held_out: str = column("the record of the held-out run; empty if it did not end")
    held_out_flops: np.ndarray = column("its training curve")
    held_out_loss: np.ndarray = column("of training, at each")
    fit: Fit = column("what `jaxkv fit` makes of the folder")
    cosine: str = column(
        "`cosine.json`, what every size at several lengths says, its rate a cosine"
    )
    curves: CurvePoints = column("training curves of those")
    optima: BudgetOptima = column(
        "approach 2, from the runs whose rate was constant and then fell"
    )
    envelope: BudgetOptima = column(
        "approach 1, from `curves`; without an axis of methods"
    )
    surface: LawOptima = column("approach 3")
    rates: BestRates = column("of the cells")

    @functools.cached_property
    def predicted(self) -> dict[str, Any]:
        """What `prediction.json` holds."""
        return json.loads(self.prediction)

    @functools.cached_property
    def truth(self) -> dict[str, Any]:
        """The record of the held-out run; empty if it has no loss."""
        record = json.loads(self.held_out) if self.held_out else {}
        return {} if record.get("loss") is None else record


def stack_frontiers(found: Sequence[Frontier], *, is_one: bool = False) -> BudgetOptima:
    """Puts frontiers of equal budgets side by side.

    Args:
      found: the frontiers, at least one.
      is_one: whether there is but one, which needs no axis of methods.
    """

    def by_method(rows: list[Any]) -> np.ndarray:
        return np.asarray(rows[0] if is_one else np.stack(rows))

    def power(name: str) -> ComputePowers:
        laws = [getattr(each, name) or _UNKNOWN for each in found]
        return ComputePowers(
            by_method([law.coefficient for law in laws]),
            by_method([law.exponent for law in laws]),
        )

    def minima(name: str) -> np.ndarray:
        return by_method([getattr(each.minima, name)[0] for each in found])

    return BudgetOptima(
        np.array([each.method for each in found]),
        found[0].flops,
        num_params=minima("num_params"),
        num_tokens=minima("num_tokens"),
        loss=minima("loss"),
        num_params_power=power("num_params"),
        num_tokens_power=power("num_tokens"),
        loss_power=power("loss"),
    )
