"""What a fit returns, and the file that keeps it."""

import json
import math
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from scaling.fits.levenberg_marquardt import Loss, Space
from scaling.laws import Law, evaluation, published

SCHEMA = 1
_MAX_SAMPLES, _MAX_RESIDUALS = 1_000, 10_000


class HeldOut(NamedTuple):
    """How well larger runs were predicted.

    Attributes:
      num_points: how many there are.
      mean_error: mean of |ln(predicted / seen)| over them.
      worst_error: the largest.
      last_error: ln(predicted / seen) of the run with the most compute.
      covered: the share of runs inside their 90 % prediction interval; nothing where
        the fit has no resamples.
    """

    num_points: int
    mean_error: float
    worst_error: float
    last_error: float
    covered: float | None


class FitResult(NamedTuple):
    """A fitted law, with its doubts.

    Attributes:
      law: its name.
      inputs: the columns it was fitted to.
      coefficients: in natural units, by name.
      objective: the sum of the losses at the optimum.
      status: of the best start.
      statuses: of every start: `converged`; `bound_hit`, converged at the wall of the
        box; `max_iter`; or `abnormal`, where no step was finite.
      distinct_minima: number of different optima that starts converged to.
      covariance: of the coefficients, in their order, from the curvature; huge
        where the curvature vanishes.
      intervals: of the coefficients, at `level`; with resamples from them, else from
        the covariance.
      samples: centred coordinates of the resamples, or nothing.
      condition_number: of the curvature, coordinates scaled to unit curvature: 1 is
        perfect, beyond some 1e6 some directions are free.
      flat_directions: directions in which the data says nothing, each the change of
        coordinates by name, of length one.
      bounds_hit: coefficients at the wall of the box.
      warnings: doubts in words; none where the fit is sound.
      num_points: how many observations were fitted.
      residuals: of the logarithm of the target, predicted minus seen.
      exponents: `a` and `b` of the compute optimum `N* ~ C^a`, `D* ~ C^b`, for laws
        that have one.
      exponent_intervals: of these.
      held_out: the score on runs left out, where there is one.
      loss: what was minimised: `huber`, `lad` or `mse`.
      delta: of `huber`.
      space: of the residuals: `log` or `linear`.
      level: probability of the intervals.
      coordinates: the optimum in centred coordinates.
      centre: logarithms of what the inputs were divided by.
      noise: residuals to add to a prediction, widened for the coefficients fitted.
      ranges: the least and the largest value of every input, of the target, and of
        `flops` = 6 N D where there are both.
      fixed: coefficients that were given, not fitted, by name.
      bounds: the least and the largest value of those that were bounded.
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

    @property
    def num_free(self) -> int:
        """Number of coefficients that were fitted."""
        return len(self.coefficients) - len(self.fixed)

    def find_law(self) -> Law:
        """Returns the law, of the columns that it was fitted to."""
        return published.find_law(self.law).over(*self.inputs)

    def sampled(self) -> Float[np.ndarray, "resamples k"]:
        """Returns the resamples' coefficients in natural units; none, if none."""
        law = self.find_law()
        if self.samples is None:
            return np.zeros((0, len(law.coefficients)))
        return evaluation.coefficients(law, self.samples, self.centre)


def to_json(result: FitResult) -> dict[str, Any]:
    """Turns a result into what `fit.json` holds: plain numbers, lists and dicts.

    Of more than 1,000 resamples, or 10,000 residuals, an even selection is kept.
    Numbers that JSON has not become null.
    """
    fields = result._replace(
        samples=None if result.samples is None else _some(result.samples, _MAX_SAMPLES),
        residuals=_some(result.residuals, _MAX_RESIDUALS),
        noise=_some(result.noise, _MAX_RESIDUALS),
    )._asdict()
    if result.held_out is not None:
        fields["held_out"] = result.held_out._asdict()
    return {"schema": SCHEMA} | _plain(fields)


def from_json(document: Any) -> FitResult:
    """Reads what `to_json` wrote.

    Args:
      document: the text of a `fit.json`, or what is in it.

    Raises:
      ValueError: it is no such object, or has another schema.
    """
    try:
        fields = json.loads(document) if isinstance(document, str) else {**document}
        if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA}")
        fields = FitResult._field_defaults | fields
        fields = {name: fields[name] for name in FitResult._fields}
        for name, (is_so, what) in _KINDS.items():
            if not is_so(fields[name]):
                raise ValueError(f"its {name} must be {what}")
        for name, choices in (("loss", Loss), ("space", Space)):
            if fields[name] not in typing.get_args(choices):
                known = ", ".join(typing.get_args(choices))
                raise ValueError(f"its {name} must be one of {known}")
        for name in ("distinct_minima", "num_points"):
            if type(fields[name]) is not int or fields[name] < 1:
                raise ValueError(f"its {name} must be a count")
        if not 0 < (fields["level"] or 0) < 1:
            raise ValueError("its level must be in (0, 1)")
        law = published.find_law(fields["law"])
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
        open_ends = np.array([-math.inf, math.inf])
        for name, ends in fields["bounds"].items():
            low, high = np.where(np.isnan(ends), open_ends, ends).tolist()
            fields["bounds"][name] = low, high
        if not {*fields["fixed"], *fields["bounds"]} <= {*law.coefficients}:
            raise ValueError(f"what is fixed is no coefficient of {law.name}")
        if fields["held_out"] is not None:
            fields["held_out"] = HeldOut(**fields["held_out"])
        return FitResult(**fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"not a fit.json: {what}") from None


def _some(rows: np.ndarray, most: int) -> np.ndarray:
    """Selects at most so many rows, evenly by their place."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).round().astype(int)]


def _is_number(value: Any) -> bool:
    """Whether it is a number, or null for one that is not finite."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NUMBERS = (
    "objective",
    "condition_number",
    "delta",
    "level",
    "distinct_minima",
    "num_points",
)
_KINDS = {
    **dict.fromkeys(("law", "status", "loss", "space"), (_is_text, "text")),
    **dict.fromkeys(
        ("inputs", "statuses", "bounds_hit", "warnings"),
        (
            lambda x: isinstance(x, list | tuple) and all(map(_is_text, x)),
            "a list of texts",
        ),
    ),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(
        ("coefficients", "exponents", "fixed"),
        (
            lambda x: isinstance(x, Mapping) and all(map(_is_number, x.values())),
            "numbers by name",
        ),
    ),
}
"""What a field of a fit.json must be."""


def _array(values: Any) -> np.ndarray:
    """Reads numbers; null is not a number."""
    return np.asarray(values, np.float64)


def _pair(values: Any) -> tuple[float, float]:
    low, high = (math.nan if x is None else float(x) for x in values)
    return low, high


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
