"""Report of a fit: keys of its document, tables and sentences."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.report import ReportPart, Sheet, format_number, format_percent, numbered_list
from scaling.cli.fit.result import LogFits
from scaling.fits import FitResult, percentages
from scaling.frontiers import (
    CORRECTED,
    ENVELOPE,
    PARABOLA,
    Frontier,
    FrontierSet,
    vertex_shift,
)

MAX_TABLE_ROWS = 25
"""Largest number of held-out runs in a table; the largest runs by compute are
listed."""

MAX_TABLE_LAWS = 5
"""Largest number of laws in that table."""

FIT_KEYS = (
    "law",
    "coefficients",
    "intervals",
    "exponents",
    "exponent_intervals",
    "objective",
    "num_points",
    "status",
    "distinct_minima",
    "condition_number",
    "bounds_hit",
    "warnings",
    "held_out",
    "residual_sizes",
)
"""Keys of each fit in the metrics; `fit.json` has more."""


OPTIONAL = ("group", "fixed", "bounds")
"""Keys that are included if they are not empty."""


def metrics(result: LogFits) -> dict[str, Any]:
    """Returns the keys of the first fit; `fits` has all fits if there are several."""
    document = json.loads(result.document)
    fits = [_keys(document)] + [_keys(fit) for fit in document["others"]]
    by = {"by": document["by"]} if "by" in document else {}
    return {
        **fits[0],
        "warnings": fits[0]["warnings"] + document.get("log_warnings", []),
        **by,
        **({"fits": fits} if len(fits) > 1 or by else {}),
        "count": document["count"],
        "notes": document["notes"],
        "frontiers": document["frontiers"],
        "frontier_warnings": document["frontier_warnings"],
    }


def summary(result: LogFits) -> list[ReportPart]:
    """Returns tables of coefficients, laws, frontiers and held-out runs; warnings."""
    document = json.loads(result.document)
    fits = [document, *document["others"]]
    parts: list[ReportPart] = [_coefficients(fit) for fit in fits]
    parts.append(_laws(fits, document["scored"]))
    if document["frontiers"]:
        parts.append(_frontiers(document))
    if not result.is_fitted.all():
        parts.append(_held_out(result))
    names: dict[str, list[str]] = {}
    for fit in fits:
        for line in fit["warnings"]:
            names.setdefault(line, []).append(_name(fit))
    warnings = [f"{', '.join(several)}: {line}" for line, several in names.items()]
    warnings = document.get("log_warnings", []) + warnings
    parts.append(numbered_list("warnings", warnings + document["frontier_warnings"]))
    return [*parts, numbered_list("how the log was read", document["notes"])]


def _keys(fit: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fit[key] for key in FIT_KEYS} | {
        key: fit[key] for key in OPTIONAL if fit.get(key)
    }


def _name(fit: dict[str, Any]) -> str:
    """Returns the law, and the group that it was fitted to."""
    return f"{fit['law']}, {fit['group']}" if "group" in fit else fit["law"]


def _coefficients(fit: dict[str, Any]) -> Sheet:
    fixed_values = fit.get("fixed", {})
    intervals = fit["intervals"]
    rows = [
        (x, _short(y), "given" if x in fixed_values else _interval(intervals.get(x), y))
        for x, y in fit["coefficients"].items()
    ]
    intervals = fit["exponent_intervals"]
    rows += [
        (_OPTIMA[x], _short(y), _interval(intervals.get(x), share=True))
        for x, y in fit["exponents"].items()
    ]
    level = f"{fit['level']:.0%} interval"
    note = f"{fit['formula']}. {fit['source']}."
    return Sheet(_name(fit), ("coefficient", "value", level), rows, note)


_OPTIMA = {"a": "a: N* ~ C^a", "b": "b: D* ~ C^b"}


def _laws(fits: Sequence[dict[str, Any]], scored: str) -> Sheet:
    pairs = [(fit, fit["held_out"] or {}) for fit in fits]
    rows = [
        (
            _name(fit),
            format_number(fit["num_points"]),
            format_number(fit["objective"]),
            percentages([*fit["residual_sizes"].values()]),
            fit["status"],
            format_number(fit["distinct_minima"]),
            format_number(fit["condition_number"]),
            format_number(held.get("num_points")),
            _percent(held.get("mean_error")),
            _percent(held.get("worst_error")),
            _percent(held.get("last_error"), "+"),
            format_percent(held.get("covered")),
        )
        for fit, held in pairs
    ]
    heads = (
        "law",
        "runs",
        "objective",
        "error: median, 90 %, max",
        "status",
        "minima",
        "condition",
        "held-out runs",
        "mean error",
        "worst",
        "largest run",
        "inside 90 %",
    )
    note = (
        f"{scored} Errors are ln(fitted / observed), with the sign of the largest run. "
        "`error` gives the median, the 90 % quantile and the maximum over the fitted "
        "runs."
    )
    return Sheet("laws", heads, rows, note)


def _frontiers(document: dict[str, Any]) -> Sheet:
    rows = [
        (
            ", ".join(filter(None, (frontier["method"], frontier.get("group")))),
            f"{frontier['num_minima']} of {frontier['num_budgets']}",
            format_number(frontier["a"]),
            _interval(frontier["a_interval"], share=True),
            format_number(frontier["b"]),
            format_number(frontier["loss_exponent"]),
        )
        for frontier in document["frontiers"]
    ]
    heads = ("method", "minima", "a", "interval of a", "b", "of L*")
    note = "N* ~ C^a, D* ~ C^b, by least squares through the minima. "
    return Sheet("optima", heads, rows, note + document["shift"])


def _held_out(result: LogFits) -> Sheet:
    held = np.flatnonzero(~result.is_fitted)
    shown = held[np.argsort(-result.flops[held], kind="stable")][:MAX_TABLE_ROWS]
    rows = []
    names = result.laws[:MAX_TABLE_LAWS]
    for i in shown:
        cells = [format_number(int(result.row[i]))]
        sizes = (result.num_params, result.num_tokens, result.flops)
        cells += [f"{x[i]:.3g}" if np.isfinite(x[i]) else "-" for x in sizes]
        cells.append(format_number(float(result.loss[i])))
        for predicted in result.predicted[: len(names)]:
            off = float(np.log(predicted[i] / result.loss[i]))
            cells.append(f"{predicted[i]:.4g} ({_percent(off, '+')})")
        rows.append(cells)
    left = len(held) - len(shown)
    note = f"{left} smaller runs are not listed." if left else ""
    heads = ("row", "N", "D", "C", "seen", *(str(law) for law in names))
    return Sheet("held-out runs", heads, rows, note)


def _interval(
    pair: Sequence[float | None] | None,
    value: float | None = None,
    *,
    share: bool = False,
) -> str:
    """Returns an interval as text; "unknown" if it excludes almost no value.

    Args:
      pair: ends; None without an interval.
      value: estimate.
      share: True if the number can only be in (0, 1).
    """
    if pair is None:
        return "-"
    low, high = (math.nan if x is None else x for x in pair)
    if not is_informative(low, high, value) or (
        share and high - low > _MAX_SHARE_WIDTH
    ):
        return "unknown"
    return f"{_short(low)} to {_short(high)}"


_MAX_SHARE_WIDTH = 0.9
"""Width from which an interval of an exponent in (0, 1) is uninformative."""
_MAX_INTERVAL_RATIO = 1e4
"""Ratio of an interval's end to the estimate from which the interval is
uninformative."""


def is_informative(low: float, high: float, value: float | None = None) -> bool:
    """Returns True if an interval has finite ends at a plausible distance."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    bound = max(abs(low), abs(high))
    return value is None or bound <= _MAX_INTERVAL_RATIO * max(abs(value), 1e-3)


def _short(value: float | None) -> str:
    """Formats a number with four digits; unlike counts, not in full."""
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f} %"


def frontier_json(frontier: Frontier) -> dict[str, object]:
    """Returns a frontier as JSON values."""
    laws = {
        "a": frontier.num_params,
        "b": frontier.num_tokens,
        "loss_exponent": frontier.loss,
    }
    return {
        "method": frontier.method,
        **{name: law and law.exponent for name, law in laws.items()},
        **{f"{name}_interval": law and law.interval for name, law in laws.items()},
        "num_minima": int((frontier.minima.reason[0] == 0).sum()),
        "num_budgets": len(frontier.flops),
        "num_resamples": frontier.num_resamples,
    }


def expected_shift(frontier_set: FrontierSet) -> str:
    """Returns a sentence about the bias of parabola vertices.

    The bias is relative to the minima of the fitted surface.

    Returns:
      The sentence; empty without a parabola or a correction.
    """
    by_name = {frontier.method: frontier.minima for frontier in frontier_set.frontiers}
    if frontier_set.exponents is None:
        return ""
    with np.errstate(invalid="ignore"):
        ratio = by_name[PARABOLA].num_params[0] / by_name[CORRECTED].num_params[0]
    ratio = ratio[np.isfinite(ratio)]
    if not ratio.size:
        return ""
    alpha, beta = frontier_set.exponents
    off = 100 * (np.exp(np.log(ratio).mean()) - 1)
    centred = 100 * (10 ** vertex_shift(alpha, beta, 1.0, 9) - 1)
    return (
        f"The projected surface has alpha {alpha:.3f} and beta {beta:.3f}. On it, "
        f"parabolas through these sizes bias N* by {off:+.1f} % ({centred:+.1f} % "
        "with 9 centred sizes over two decades); `parabola, corrected` removes the "
        "bias."
    )


def disjoint_intervals(
    fits: Sequence[FitResult], frontier_set: FrontierSet
) -> list[str]:
    """Warns about methods whose intervals of the optimum's growth do not overlap.

    Args:
      fits: fits of laws; a law without an optimum, or at a bound, is not compared.
      frontier_set: frontiers with intervals; an envelope, whose runs are not decayed,
        is not compared. Contradictions among the frontiers have their own warning.
    """
    laws = [
        (fit.law, fit.exponents["a"], fit.exponent_intervals["a"])
        for fit in fits
        if "a" in fit.exponent_intervals and not fit.bounds_hit
    ]
    methods = [
        (frontier.method, frontier.num_params.exponent, frontier.num_params.interval)
        for frontier in frontier_set.frontiers
        if frontier.num_params
        and frontier.num_params.interval
        and frontier.method != ENVELOPE
    ]
    if any("contradict each other" in line for line in frontier_set.doubts):
        pairs = [*itertools.combinations(laws, 2), *itertools.product(laws, methods)]
    else:
        pairs = [*itertools.combinations([*laws, *methods], 2)]
    apart = [
        pair
        for pair in pairs
        if abs(pair[0][1] - pair[1][1]) > _EXPONENT_DIFFERENCE
        and max(pair[0][2][0], pair[1][2][0]) > min(pair[0][2][1], pair[1][2][1])
    ]
    if not apart:
        return []
    listed = "; ".join(
        f"{name} {value:.3f} ({low:.3f} to {high:.3f})"
        for name, value, (low, high) in dict.fromkeys(x for pair in apart for x in pair)
    )
    return [f"intervals of a, N* ~ C^a, do not overlap: {listed}"]


_EXPONENT_DIFFERENCE = 0.02
"""Largest difference of exponents that is ignored."""
