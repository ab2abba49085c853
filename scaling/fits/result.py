"""The result of a fit, and its JSON file."""

import json
import math
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from scaling import laws
from scaling.fits.levenberg_marquardt import Loss, Space
from scaling.laws import Law

SCHEMA = 1
_MAX_SAMPLES = 1_000
_MAX_RESIDUALS = 10_000


class HeldOut(NamedTuple):
    """Errors of the predictions of held-out runs.

    Attributes:
      num_points: number of runs.
      mean_error: mean of |ln(predicted / seen)|.
      worst_error: largest |ln(predicted / seen)|.
      last_error: ln(predicted / seen) of the run with the most compute.
      covered: share of runs inside their 90 % prediction interval; None if the fit has
        no resamples.
    """

    num_points: int
    mean_error: float
    worst_error: float
    last_error: float
    covered: float | None


class FitResult(NamedTuple):
    """A fitted law, with its intervals and warnings.

    Attributes:
      law: name of the law.
      inputs: columns of the inputs.
      coefficients: coefficients in natural units, by name.
      objective: sum of the losses at the optimum.
      status: status of the best start.
      statuses: status of every start: `converged`; `bound_hit`, converged at a bound of
        the box; `max_iter`; or `abnormal`, without a finite step.
      distinct_minima: number of different optima of the converged starts.
      covariance: covariance of the coefficients, in their order, from the curvature;
        huge along flat directions.
      intervals: intervals of the coefficients at `level`; from resamples if there are
        some, else from the covariance.
      samples: centred coordinates of the resamples, or None.
      condition_number: condition number of the curvature, coordinates scaled to unit
        curvature: 1 is ideal, beyond about 1e6 some directions are flat.
      flat_directions: directions that the data does not identify, each the change of
        coordinates by name, of length one.
      bounds_hit: coefficients at a bound of the box.
      warnings: problems of the fit in words; empty for a sound fit.
      num_points: number of fitted observations.
      residuals: log predicted minus log observed target.
      exponents: `a` and `b` of the compute optimum `N* ~ C^a`, `D* ~ C^b`, for laws
        that have one.
      exponent_intervals: intervals of `a` and `b`.
      held_out: score on held-out runs, or None.
      loss: loss of a residual: `huber`, `lad` or `mse`.
      delta: threshold of `huber`.
      space: space of the residuals: `log` or `linear`.
      level: probability of the intervals.
      coordinates: the optimum in centred coordinates.
      centre: logarithms of the units of the inputs.
      noise: residuals to add to a prediction, widened for the fitted coefficients.
      ranges: smallest and largest value of every input, of the target, and of
        `flops` = 6 N D if there are both.
      fixed: fixed coefficients, by name.
      bounds: smallest and largest value of bounded coefficients, by name.
      forecast_variance: variance of the log error of runs with more compute than the
        fitted ones, in addition to `noise`: a constant, and the growth with every
        factor e of compute; see `forecasts`.
      optimum: the optimum in the coordinates of the fitted form of the law
        (`restrictions.restrict_law`), from which resamples start; not in a file.
    """

    law: str
    inputs: tuple[str, ...]
    coefficients: dict[str, float]
    objective: float
    status: str
    statuses: list[str]
    distinct_minima: int
    covariance: Float[np.ndarray, "k k"]
    intervals: dict[str, tuple[float, float]]
    samples: Float[np.ndarray, "resamples k"] | None
    condition_number: float
    flat_directions: list[dict[str, float]]
    bounds_hit: list[str]
    warnings: list[str]
    num_points: int
    residuals: Float[np.ndarray, " n"]
    exponents: dict[str, float]
    exponent_intervals: dict[str, tuple[float, float]]
    held_out: HeldOut | None
    loss: Loss
    delta: float
    space: Space
    level: float
    coordinates: Float[np.ndarray, " k"]
    centre: Float[np.ndarray, " inputs"]
    noise: Float[np.ndarray, " n"]
    ranges: dict[str, tuple[float, float]]
    fixed: Mapping[str, float] = MappingProxyType({})
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    forecast_variance: tuple[float, float] = (0.0, 0.0)
    optimum: Float[np.ndarray, " k"] | None = None

    @property
    def num_free(self) -> int:
        """Number of fitted coefficients."""
        return len(self.coefficients) - len(self.fixed)

    def find_law(self) -> Law:
        """Returns the law, with the columns of the fit."""
        return laws.find_law(self.law).over(*self.inputs)

    def sampled(self) -> Float[np.ndarray, "resamples k"]:
        """Returns the resamples' coefficients in natural units, or an empty array."""
        law = self.find_law()
        if self.samples is None:
            return np.zeros((0, len(law.coefficients)))
        return laws.coefficients(law, self.samples, self.centre)


def to_json(result: FitResult) -> dict[str, Any]:
    """Turns a result into the content of `fit.json`: plain numbers, lists and dicts.

    Of more than 1,000 resamples, or 10,000 residuals, an even selection is kept.
    Numbers that JSON does not have become null.
    """
    fields = result._replace(
        samples=None
        if result.samples is None
        else _select_rows(result.samples, _MAX_SAMPLES),
        residuals=_select_rows(result.residuals, _MAX_RESIDUALS),
        noise=_select_rows(result.noise, _MAX_RESIDUALS),
    )._asdict()
    del fields["optimum"]
    if result.held_out is not None:
        fields["held_out"] = result.held_out._asdict()
    return {"schema": SCHEMA} | {name: _plain(x) for name, x in fields.items()}


def from_json(document: str | Mapping[str, Any]) -> FitResult:
    """Reads the output of `to_json`.

    Args:
      document: text of a `fit.json`, or its parsed content.

    Raises:
      ValueError: the document is no such object, or has another schema.
    """
    try:
        fields = json.loads(document) if isinstance(document, str) else {**document}
        if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA}")
        fields = FitResult._field_defaults | fields
        fields["optimum"] = None
        fields = {name: fields[name] for name in FitResult._fields}
        for name, (is_so, what) in _FIELD_KINDS.items():
            if not is_so(fields[name]):
                raise ValueError(f"its {name} must be {what}")
        for name, choices in (("loss", Loss), ("space", Space)):
            if fields[name] not in typing.get_args(choices):
                choice_names = ", ".join(typing.get_args(choices))
                raise ValueError(f"its {name} must be one of {choice_names}")
        for name in ("distinct_minima", "num_points"):
            if type(fields[name]) is not int or fields[name] < 1:
                raise ValueError(f"its {name} must be a count")
        if not 0 < (fields["level"] or 0) < 1:
            raise ValueError("its level must be in (0, 1)")
        law = laws.find_law(fields["law"])
        k = len(law.coordinates)
        if set(fields["coefficients"]) != set(law.coefficients):
            raise ValueError(f"its coefficients are not those of {law.name}")
        arrays = ("coordinates", "centre", "noise", "residuals")
        fields |= {name: _array(fields[name]) for name in arrays}
        for name in arrays:
            if fields[name].ndim != 1 or not fields[name].size:
                raise ValueError(f"its {name} must be a list of numbers")
        fields["covariance"] = _array(fields["covariance"]).reshape(k, k)
        if fields["samples"] is not None:
            fields["samples"] = _array(fields["samples"]).reshape(-1, k)
        fields["coordinates"].reshape(k)
        fields["inputs"] = tuple(fields["inputs"])
        for name in ("intervals", "exponent_intervals", "ranges", "bounds"):
            pairs = fields[name].items()
            fields[name] = {key: _pair(value) for key, value in pairs}
        fields["forecast_variance"] = _pair(fields["forecast_variance"])
        if not all(x >= 0 for x in fields["forecast_variance"]):
            raise ValueError("its forecast_variance must be two numbers of at least 0")
        open_ends = np.array([-math.inf, math.inf])
        for name, ends in fields["bounds"].items():
            low, high = np.where(np.isnan(ends), open_ends, ends).tolist()
            fields["bounds"][name] = low, high
        if not {*fields["fixed"], *fields["bounds"]} <= {*law.coefficients}:
            raise ValueError(f"a fixed name is no coefficient of {law.name}")
        if fields["held_out"] is not None:
            fields["held_out"] = HeldOut(**fields["held_out"])
        return FitResult(**fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"not a fit.json: {what}") from None


def _select_rows(rows: np.ndarray, max_rows: int) -> np.ndarray:
    """Returns at most `max_rows` rows, evenly selected."""
    if len(rows) <= max_rows:
        return rows
    return rows[np.linspace(0, len(rows) - 1, max_rows).round().astype(int)]


def _is_number(value: object) -> bool:
    """True for a number, or for null, which replaces a number that is not finite."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_NUMBER_FIELDS = (
    "objective",
    "condition_number",
    "delta",
    "level",
    "distinct_minima",
    "num_points",
)
_FIELD_KINDS = {
    **dict.fromkeys(("law", "status", "loss", "space"), (_is_text, "text")),
    **dict.fromkeys(
        ("inputs", "statuses", "bounds_hit", "warnings"),
        (
            lambda x: isinstance(x, list | tuple) and all(map(_is_text, x)),
            "a list of texts",
        ),
    ),
    **dict.fromkeys(_NUMBER_FIELDS, (_is_number, "a number")),
    **dict.fromkeys(
        ("coefficients", "exponents", "fixed"),
        (
            lambda x: isinstance(x, Mapping) and all(map(_is_number, x.values())),
            "numbers by name",
        ),
    ),
}
"""Checks of the fields of a fit.json, with descriptions."""


def _array(values: object) -> np.ndarray:
    """Reads numbers; null becomes NaN."""
    return np.asarray(values, np.float64)


def _pair(values: Any) -> tuple[float, float]:
    low, high = (math.nan if x is None else float(x) for x in values)
    return low, high


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
