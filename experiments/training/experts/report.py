"""What `experts` says: verdicts, numbers, and tables for a person."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.training.experts.runs import Run
from jaxkv.models import moe

if TYPE_CHECKING:
    from experiments.training.experts.experiment import Result

_FEDUS = "Fedus et al. 2021, arXiv:2101.03961, abstract and section 3.2"
_BALANCING = ("with", "without")


def claims(result: "Result") -> list[Claim]:
    """Holds routing, gain and balance against what was said of them."""
    low, high = result.ratio[1:]
    found = [
        judge(
            "a token's shares are the softmax over its experts, renormalised",
            source="the lectures; Jiang et al. 2024, arXiv:2401.04088, section 2.1",
            published=0.0,
            ours=result.routing_error,
            unit="largest difference",
            tolerance=1e-6,
        ),
        judge(
            "a mixture needs a seventh of the dense model's compute for equal loss",
            source=_FEDUS,
            published=7.0,
            ours=float(result.ratio[0]),
            unit="ratio of compute",
            differs="there T5 of 220 M parameters with up to 128 times as many FFNs, "
            "one expert a token, compared by time; here small models of bytes with "
            "8 experts of half the FFN's width, two a token, compared by FLOPs;",
            note=f"90 % interval {_cells(low, (low, high), 2)[1]}: the direction "
            f"{_direction(low, high)}",
        ),
    ]
    if result.loads.size:
        balanced, free = result.loads.max(axis=2).mean(axis=1)
        found.append(
            judge(
                "the load-balancing loss makes the busiest expert less busy",
                source="Fedus et al. 2021, arXiv:2101.03961, section 2.2",
                published=float(free),
                ours=float(balanced),
                unit="load over the mean",
                relation="at_most",
                note="published: ours, trained without that loss",
            )
        )
    return found


def _direction(low: float, high: float) -> str:
    """Whether dense models need more compute, with the whole interval."""
    if low > 1:
        return "shows"
    return "does not show: the other way" if high < 1 else "is not decided"


def metrics(result: "Result") -> dict[str, Any]:
    """Gives laws, the ratio of compute, the imbalance, and every run."""
    ends = ("low", "high")
    laws = [
        {
            "kind": kind,
            "exponent": float(slope[0]),
            **dict(zip(ends, slope[1:].tolist(), strict=True)),
            "runs": int((result.is_fitted & (result.kind == kind)).sum()),
        }
        for kind, slope in zip(("dense", "mixture"), result.slope, strict=True)
    ]
    imbalance = []
    for name, loads in zip(_BALANCING, result.loads, strict=True):
        if not loads.size:
            continue  # ended before both were trained
        one = moe.imbalance(jnp.asarray(loads, jnp.float32))
        for layer, row in enumerate(zip(*one, strict=True), 1):
            values = dict(zip(one._fields, map(float, row), strict=True))
            imbalance.append({"balancing": name, "layer": layer} | values)
    rows = zip(*(getattr(result, name) for name in Run._fields[:-1]), strict=True)
    runs = [
        dict(zip(Run._fields[:-1], [x.item() for x in row], strict=True))
        for row in rows
    ]
    return {
        "routing_error": result.routing_error,
        "ratio": float(result.ratio[0]),
        "ratio_low": float(result.ratio[1]),
        "ratio_high": float(result.ratio[2]),
        "laws": laws,
        "imbalance": imbalance,
        "runs": [
            run | {"is_fitted": bool(fitted)}
            for run, fitted in zip(runs, result.is_fitted, strict=True)
        ],
    }


def summary(result: "Result") -> list[Part]:
    """Puts the laws, the gain, the imbalance and the runs in tables."""
    found = metrics(result)
    laws = [
        (
            *(row["kind"], str(row["runs"])),
            *_cells(row["exponent"], (row["low"], row["high"]), 3),
        )
        for row in found["laws"]
    ]
    low, high = found["ratio_low"], found["ratio_high"]
    gain = (*_cells(found["ratio"], (low, high), 2), _direction(low, high))
    imbalance = [
        (
            *(row["balancing"], str(row["layer"]), f"{row['busiest']:.2f}"),
            *(f"{row['variation']:.2f}", units.share(row["idle"])),
        )
        for row in found["imbalance"]
    ]
    sheets: list[Part] = [
        Sheet(
            "laws of loss by active compute, factor * FLOP ^ exponent",
            ("kind", "runs", "exponent", "90 %"),
            laws,
            "Fitted to the runs at the rate that was best for their kind; intervals by "
            "resampling runs, seeds among them.",
        ),
        Sheet(
            "compute of dense models over the mixtures', to equal loss",
            ("ratio", "90 %", "mixtures need less"),
            [gain],
            "In the middle of the losses that both reached. Active compute: experts "
            "that a token does not meet are not counted.",
        ),
        Sheet(
            "load of the experts, held-out tokens",
            ("balancing loss", "layer", "busiest", "variation", "idle experts"),
            imbalance,
            "The busiest and the standard deviation, over the mean; of one pair of "
            "runs. A token's shares differ from the formula by "
            f"{result.routing_error:.1e} at most.",
        ),
    ]
    rates = _rates(result)
    return [*sheets, *([rates] if rates.rows else []), _runs(found["runs"])]


def _cells(value: float, interval: tuple[float, float], digits: int) -> tuple[str, str]:
    """A number and its interval; of an early end there may be neither."""
    low, high = (f"{end:.{digits}f}" for end in interval)
    return (
        f"{value:.{digits}f}" if np.isfinite(value) else "not known",
        f"{low} to {high}" if np.isfinite(interval).all() else "not known",
    )


def _rates(result: "Result") -> Sheet:
    """Every rate tried with the first seed, where there were several."""
    rows = []
    for kind in ("dense", "mixture"):
        for width in np.unique(result.width):
            mine = (result.kind == kind) & (result.width == width) & (result.seed == 0)
            if mine.sum() < 2:
                continue
            tried = sorted(
                zip(result.learning_rate[mine], result.loss[mine], strict=True)
            )
            shown = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in tried)
            taken = result.learning_rate[mine & result.is_fitted]
            edge = taken[0] in (tried[0][0], tried[-1][0])
            rows.append(
                (kind, str(width), shown, f"{taken[0]:.2g}", "yes" if edge else "no")
            )
    heads = ("kind", "width", "rate: loss", "taken", "at the edge")
    note = (
        "The rate taken is best on average over the widths that tried several; other "
        "widths have it in inverse proportion to their size."
    )
    return Sheet("learning rates tried", heads, rows, note)


def _runs(runs: list[dict[str, Any]]) -> Sheet:
    heads = ("kind", "width", "rate", "seed", "parameters", "active", "tokens")
    heads = (*heads, "compute", "loss", "standard error", "time", "fitted")
    rows = [
        (
            *(run["kind"], str(run["width"]), f"{run['learning_rate']:.2g}"),
            *(str(run["seed"]), f"{run['num_params']:,}", f"{run['num_active']:,}"),
            *(f"{run['num_tokens']:,}", units.flops(run["flops"])),
            *(f"{run['loss']:.3f}", f"{run['loss_se']:.3f}"),
            *(units.seconds(run["seconds"]), "yes" if run["is_fitted"] else "no"),
        )
        for run in runs
    ]
    note = "The standard error is of the held-out text, which all runs share."
    return Sheet("runs", heads, rows, note)
