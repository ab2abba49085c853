"""What comes out of `isoflop`, as a run folder keeps it, and how it is laid out."""

from typing import Any, NamedTuple

import numpy as np

from experiments.cli.fit import Result as Fit


class Points(NamedTuple):
    """Training curves of some runs, one after another.

    Attributes:
      run: a number for the run of each point.
      num_params: its size.
      num_tokens: trained on so far.
      flops: spent so far.
      loss: of training, nats per token.
    """

    run: np.ndarray
    num_params: np.ndarray
    num_tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray


class Powers(NamedTuple):
    """Powers of the compute, `coefficient C^exponent`; not numbers where unknown."""

    coefficient: np.ndarray
    exponent: np.ndarray


class Optima(NamedTuple):
    """Optima at some budgets by some methods, and the powers through them.

    Attributes:
      methods: their names.
      flops: the budgets.
      num_params: by method and budget, not a number where there is no minimum.
      num_tokens: alike.
      loss: alike.
      num_params_power: by method.
      num_tokens_power: alike.
      loss_power: alike.
    """

    methods: np.ndarray
    flops: np.ndarray
    num_params: np.ndarray
    num_tokens: np.ndarray
    loss: np.ndarray
    num_params_power: Powers
    num_tokens_power: Powers
    loss_power: Powers


class Line(NamedTuple):
    """The law's optimum at some budgets."""

    flops: np.ndarray
    num_params: np.ndarray
    num_tokens: np.ndarray
    loss: np.ndarray


class Rates(NamedTuple):
    """Best learning rates, of the cells that have one between others."""

    width: np.ndarray
    num_tokens: np.ndarray
    learning_rate: np.ndarray


class Result(NamedTuple):
    """What came out.

    Attributes:
      runs: the lines of `runs.jsonl`.
      header: `sweep.json`.
      prediction: `prediction.json`.
      held_out: the record of the run that was foreseen; empty if it did not end.
      held_out_flops: its training curve.
      held_out_loss: of training, at each.
      fit: what `jaxkv fit` makes of the folder.
      cosine: `cosine.json`, what every size at several lengths says, its rate a cosine.
      curves: training curves of those.
      optima: approach 2, from the runs whose rate was constant and then fell.
      envelope: approach 1, from `curves`; its arrays have no axis of methods.
      surface: approach 3.
      rates: of the cells.
    """

    runs: str
    header: str
    prediction: str
    held_out: str
    held_out_flops: np.ndarray
    held_out_loss: np.ndarray
    fit: Fit
    cosine: str
    curves: Points
    optima: Optima
    envelope: Optima
    surface: Line
    rates: Rates


def optima(found: list[Any]) -> Optima:
    """Puts frontiers of equal budgets side by side."""

    def power(name: str) -> Powers:
        laws = [getattr(each, name) for each in found]
        numbers = [(x.coefficient, x.exponent) if x else (np.nan,) * 2 for x in laws]
        return Powers(*np.array(numbers, float).T)

    def minima(name: str) -> np.ndarray:
        return np.stack([getattr(each.minima, name)[0] for each in found])

    return Optima(
        np.array([each.method for each in found]),
        found[0].flops,
        num_params=minima("num_params"),
        num_tokens=minima("num_tokens"),
        loss=minima("loss"),
        num_params_power=power("num_params"),
        num_tokens_power=power("num_tokens"),
        loss_power=power("loss"),
    )


def only(several: Optima) -> Optima:
    """Takes the axis of methods away, where there is one method."""

    def first(value: Any) -> Any:
        return Powers(*(x[0] for x in value)) if isinstance(value, Powers) else value[0]

    fields = several._asdict()
    return Optima(
        **{k: v if k in ("methods", "flops") else first(v) for k, v in fields.items()}
    )
