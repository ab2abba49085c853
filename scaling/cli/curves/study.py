"""Fits laws of curves, predicts schedules, and finds the best one."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.report import (
    ReportPart,
    ResultRecord,
    Sheet,
    column,
    dumps,
    numbered_list,
)
from scaling.cli.curves.config import CurveFitConfig
from scaling.curves import (
    CurveFit,
    ScheduleFrame,
    best_schedule,
    constant_baseline,
    cosine_schedule,
    fit_curves,
    predict_curve,
    ratio_baseline,
    wsd_schedule,
)
from scaling.logs import MIN_LOSSES, CurveColumns, TrainingCurve, read_curves

FITTED = "fitted"
HELD_OUT = "held out"
PREDICTED = "predicted"
ROLES = (FITTED, HELD_OUT, PREDICTED)
RATIO = "ratio to constant"
CONSTANT = "constant curve"
"""Predictions without a law: `curves.ratio_baseline` and `curves.constant_baseline`."""


class RateCurve(NamedTuple):
    """Learning rates by step."""

    step: np.ndarray
    rate: np.ndarray


class CurveFits(ResultRecord):
    """All curves row by row, and the document."""

    document: str = column("content of `fit.json`")
    labels: np.ndarray = column("name and size of each curve")
    role: np.ndarray = column("role of each curve: fitted, held out or predicted")
    curve: np.ndarray = column("index of the curve of each row")
    step: np.ndarray = column("step of each row")
    rate: np.ndarray = column("learning rate of each row")
    loss: np.ndarray = column("loss of each row, NaN if unknown")
    predicted: np.ndarray = column("prediction of the first law for each row")
    low: np.ndarray = column("lower end of the band of each row")
    high: np.ndarray = column("upper end of the band of each row")
    best: RateCurve = column("best schedule by the first law")
    cosine: RateCurve = column("cosine schedule of the same length and rates")
    wsd: RateCurve = column("WSD schedule with 20 % decay")


def fit_curve_file(config: CurveFitConfig, progress: Progress = QUIET) -> CurveFits:
    """Reads curves, fits the laws, predicts, and finds the best schedule.

    Raises:
      ValueError: a file, a rule or a size cannot be used.
    """
    columns = CurveColumns(
        **{name: getattr(config, name) for name in CurveColumns.__annotations__}
    )
    log = read_curves(config.log, columns, hold_out=config.hold_out)
    pairs = list(zip(log.curves, log.is_held_out, strict=True))
    fitted = [curve for curve, is_held_out in pairs if not is_held_out]
    if not fitted:
        raise ValueError(f"{config.log}: the rule leaves no curve to fit")
    roles = [HELD_OUT if is_held_out else FITTED for _, is_held_out in pairs]
    curves = [*log.curves]
    if config.predict:
        targets = read_curves(config.predict, columns, needs_loss=False)
        curves += targets.curves
        roles += [PREDICTED] * len(targets.curves)
    sizes = {curve.size for curve in fitted}
    for curve in curves:
        if curve.size not in sizes:
            raise ValueError(
                f"{curve.label}: no curve of this size is fitted; sizes are "
                f"{', '.join(f'{x:g}' for x in sorted(sizes))}"
            )
    frame, size = _frame(config, fitted)
    fits = []
    for law in progress.track(config.laws, "laws of curves", "laws"):
        fits.append(fit_curves(law, fitted))
    first = fits[0]
    rows = []
    predictions = []
    for i, curve in enumerate(curves):
        prediction = predict_curve(
            first, curve.size, curve.schedule, level=config.level
        )
        predictions.append(prediction)
        rows.append(
            np.stack(
                [
                    np.full(curve.loss.size, float(i)),
                    np.asarray(curve.schedule.step),
                    np.asarray(curve.schedule.rate),
                    curve.loss,
                    *prediction,
                ]
            )
        )
    progress.show("best schedule")
    best = best_schedule(first.law, first.coefficients[size], frame)
    table = np.concatenate(rows, axis=1)
    document = _fit_json(fits[0], config.level) | {
        "others": [_fit_json(fit, config.level) for fit in fits[1:]],
        "log": config.log,
        "curves": [
            _curve_json(curve, role, fits, fitted, config.level)
            for curve, role in zip(curves, roles, strict=True)
        ],
        "best_schedule": {
            "size": size,
            **frame._asdict(),
            "loss": best.loss,
            "other_losses": best.other_losses,
            "decay_share": best.decay_share,
        },
    }
    return CurveFits(
        document=dumps(document),
        labels=np.array([curve.label for curve in curves]),
        role=np.array(roles),
        curve=table[0].astype(int),
        step=table[1],
        rate=table[2],
        loss=table[3],
        predicted=table[4],
        low=table[5],
        high=table[6],
        best=RateCurve(*map(np.asarray, best.schedule)),
        cosine=RateCurve(*map(np.asarray, cosine_schedule(frame))),
        wsd=RateCurve(*map(np.asarray, wsd_schedule(frame, 0.2))),
    )


def _frame(
    config: CurveFitConfig, fitted: Sequence[TrainingCurve]
) -> tuple[ScheduleFrame, float]:
    """Returns length and rates of the best schedule, and the size of its model."""
    size = config.best_size or max(curve.size for curve in fitted)
    schedules = [curve.schedule for curve in fitted if curve.size == size]
    if not schedules:
        sizes = sorted({curve.size for curve in fitted})
        listing = ", ".join(f"{x:g}" for x in sizes)
        raise ValueError(f"best_size={size:g} must be one of {listing}")
    rates = np.concatenate([np.asarray(curve.schedule.rate) for curve in fitted])
    frame = ScheduleFrame(
        num_steps=config.best_steps or max(float(x.step[-1]) for x in schedules),
        warmup_steps=min(float(x.step[0]) for x in schedules),
        peak=config.peak or float(rates.max()),
        lowest=config.lowest or float(rates[rates > 0].min()),
    )
    return frame, size


def _fit_json(fit: CurveFit, level: float) -> dict[str, Any]:
    """Returns a fit as JSON values; sizes are text."""
    return {
        "law": fit.law.name,
        "formula": fit.law.formula,
        "source": fit.law.source,
        "level": level,
        "coefficients": {f"{x:g}": y for x, y in fit.coefficients.items()},
        "spread": {f"{x:g}": y for x, y in fit.spread.items()},
        "objective": fit.objective,
        "num_starts": fit.num_starts[0],
        "num_starts_at_best": fit.num_starts[1],
        "hidden_errors": {f"{x:g}": y for x, y in fit.hidden_errors.items()},
        "warnings": fit.warnings,
    }


def _curve_json(
    curve: TrainingCurve,
    role: str,
    fits: Sequence[CurveFit],
    fitted: Sequence[TrainingCurve],
    level: float,
) -> dict[str, Any]:
    """Returns the losses at the end of a curve: predicted, seen, and of baselines."""

    def end(losses: np.ndarray) -> float | None:
        value = float(losses[-MIN_LOSSES:].mean())
        return value if math.isfinite(value) else None

    measured_end = end(curve.loss)
    prediction = predict_curve(fits[0], curve.size, curve.schedule, level=level)
    others = {
        fit.law.name: end(predict_curve(fit, curve.size, curve.schedule).loss)
        for fit in fits
    }
    if role != FITTED:
        step = np.asarray(curve.schedule.step)
        others[RATIO] = end(ratio_baseline(fitted, curve))
        others[CONSTANT] = end(constant_baseline(fitted, curve.size, step))
    return {
        "size": curve.size,
        "curve": curve.name,
        "role": role,
        "num_steps": float(curve.schedule.step[-1]),
        "end_loss": end(prediction.loss),
        "low": end(prediction.low),
        "high": end(prediction.high),
        "seen": measured_end,
        "errors": {
            name: None
            if measured_end is None or value is None
            else value / measured_end - 1
            for name, value in others.items()
        },
    }


def end_values(result: CurveFits, values: np.ndarray) -> np.ndarray:
    """Returns the mean of the last five rows of each curve."""
    return np.array(
        [
            values[result.curve == i][-MIN_LOSSES:].mean()
            for i in range(len(result.labels))
        ]
    )


def metrics(result: CurveFits) -> dict[str, Any]:
    """Returns the keys of the first law, all curves, and the best schedule."""
    document = json.loads(result.document)
    others = document.pop("others")
    return document | {"fits": others, "errors": _errors(document)}


def _errors(document: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns mean and worst error at the end of curves that were not fitted."""
    errors: dict[str, list[float]] = {}
    for curve in document["curves"]:
        if curve["role"] != FITTED:
            for name, error in curve["errors"].items():
                if error is not None:
                    errors.setdefault(name, []).append(abs(error))
    return {
        name: {"mean": sum(x) / len(x), "worst": max(x), "num_curves": len(x)}
        for name, x in errors.items()
    }


def summary(result: CurveFits) -> list[ReportPart]:
    """Returns tables of coefficients, laws, curves and schedules, and warnings."""
    document = json.loads(result.document)
    fits = [document, *document["others"]]
    parts: list[ReportPart] = [_coefficients(fit) for fit in fits]
    errors = _errors(document)
    if errors:
        rows = [
            (name, str(x["num_curves"]), _percent(x["mean"]), _percent(x["worst"]))
            for name, x in errors.items()
        ]
        parts.append(
            Sheet(
                "errors at the end of curves that were not fitted",
                ("prediction", "curves", "mean", "worst"),
                rows,
                "Mean of the last five losses. The constant curve is that of the size; "
                "the ratio multiplies it by the same schedule over the constant curve "
                "at other sizes.",
            )
        )
    parts.append(_curves(document))
    parts.append(_best(document["law"], document["best_schedule"]))
    warnings = [f"{fit['law']}: {line}" for fit in fits for line in fit["warnings"]]
    return [*parts, numbered_list("warnings", warnings)]


def _coefficients(fit: Mapping[str, Any]) -> Sheet:
    names = [*next(iter(fit["coefficients"].values()))]
    rows = []
    for size, values in fit["coefficients"].items():
        rows.append((size, *(f"{values[name]:.4g}" for name in names)))
        if spread := fit["spread"].get(size):
            for i, word in enumerate(("lowest", "highest")):
                ends = (f"{spread[name][i]:.4g}" for name in names)
                rows.append((f"{size}, {word}", *ends))
    starts = f"{fit['num_starts_at_best']} of {fit['num_starts']} starts"
    note = (
        f"{fit['formula']}. {fit['source']}. Objective {fit['objective']:.4g}, from "
        f"{starts}. Lowest and highest are those of the refits without some curves."
    )
    return Sheet(fit["law"], ("size", *names), rows, note)


def _curves(document: Mapping[str, Any]) -> Sheet:
    rows = [
        (
            f"{curve['curve']} at {curve['size']:g}",
            curve["role"],
            f"{curve['end_loss']:.4f}",
            f"{curve['low']:.4f} to {curve['high']:.4f}",
            "-" if curve["seen"] is None else f"{curve['seen']:.4f}",
            _percent(curve["errors"][document["law"]], "+"),
            _percent(curve["errors"].get(RATIO), "+"),
        )
        for curve in document["curves"]
    ]
    band = f"{document['level']:.0%} band"
    heads = ("curve", "role", "loss at the end", band, "seen", "error", RATIO)
    note = f"By {document['law']}; errors are relative to the seen loss."
    return Sheet("curves", heads, rows, note)


def _best(law: str, best: Mapping[str, Any]) -> Sheet:
    rows = [("best", f"{best['loss']:.4f}", "-")]
    rows += [
        (name, f"{loss:.4f}", f"{100 * (loss / best['loss'] - 1):+.2f} %")
        for name, loss in best["other_losses"].items()
    ]
    note = (
        f"Size {best['size']:g}, {best['num_steps']:,.0f} steps, peak {best['peak']:g},"
        f" lowest rate {best['lowest']:g}. The rate of the best schedule is below 90 % "
        f"of the peak for the last {best['decay_share']:.0%} of the steps. No run has "
        "tested it; its rates are in schedule.csv."
    )
    heads = ("schedule", "loss at the end", "above the best")
    return Sheet(f"schedules by {law}", heads, rows, note)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f} %"


def result_files(result: CurveFits) -> dict[str, str]:
    """Returns `fit.json`, the predictions, and the best schedule as tables."""
    document = json.loads(result.document)
    predictions = io.StringIO()
    table = csv.writer(predictions, lineterminator="\n")
    table.writerow(("size", "curve", "step", "lr", "loss", "low", "high", "seen"))
    for i, curve in enumerate(document["curves"]):
        for row in np.flatnonzero(result.curve == i):
            if curve["role"] != FITTED:
                measured_loss = result.loss[row]
                table.writerow(
                    (
                        f"{curve['size']:g}",
                        curve["curve"],
                        f"{result.step[row]:g}",
                        f"{result.rate[row]:.6g}",
                        *(
                            f"{x[row]:.5f}"
                            for x in (result.predicted, result.low, result.high)
                        ),
                        f"{measured_loss:g}" if np.isfinite(measured_loss) else "",
                    )
                )
    best = "step,lr\n" + "".join(
        f"{step:.1f},{rate:.6g}\n" for step, rate in zip(*result.best, strict=True)
    )
    return {
        "fit.json": result.document,
        "predictions.csv": predictions.getvalue(),
        "schedule.csv": best,
    }
