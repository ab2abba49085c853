"""What `rivals` says: verdicts beside the published directions, numbers, tables."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.claims import Claim, judge
from experiments.reporting import Part, Sheet
from experiments.rivals_fits import SIZES, frontier
from experiments.rivals_sides import PAIRS, REFERENCE

if TYPE_CHECKING:
    from experiments.rivals import Result

_SMALL = (
    "Ours are byte-level models of thousands of parameters and minutes, the source's "
    "of millions and days; only the direction can be compared."
)


def claims(result: "Result") -> list[Claim]:
    """Holds each direction against ours, at the lowest loss that both sides reached."""
    found = [
        judge(
            f"{name}: needs at least the transformer's compute to equal loss",
            source=PAIRS[name],
            published=1,
            ours=ending["ratio"],
            unit="1",
            relation="at_least",
            differs=_SMALL,
            note=f"At {ending['loss']:.3f} nats; 90 % interval {_interval(ending)}: "
            f"the direction {_direction(ending)}.",
        )
        for name, ending in _endings(result, 0).items()
        if ending
    ]
    places, sides = result.places, list(result.sides)
    for name in ("lstm", "gru"):
        if name not in sides or not np.isfinite(places.gain[sides.index(name)]):
            continue
        i = sides.index(name)
        apart = places.gain[0] - places.gain[i]
        se = float(np.hypot(places.gain_se[0], places.gain_se[i]))
        found.append(
            judge(
                f"from the second quarter of the window to the last the transformer's "
                f"loss falls by more than that of the {name}, which levels off",
                source=PAIRS[name],
                published=0,
                ours=float(apart),
                unit="nats",
                relation="at_least",
                differs=_SMALL,
                note=f"Transformer {places.gain[0]:.4f}, {name} {places.gain[i]:.4f}; "
                f"standard error of the difference at most {se:.4f}.",
            )
        )
    return found


def _endings(result: "Result", convention: int) -> dict[str, dict[str, float]]:
    """The ratio at the lowest loss that both reached, by side; empty if there is none.

    Without an interval `low` and `high` are not numbers.
    """
    found = {}
    for i, name in list(enumerate(result.sides))[1:]:
        loss, ratio, low, high = (
            np.asarray(part)[convention, i] for part in result.ratios[:4]
        )
        known = np.flatnonzero(np.isfinite(ratio))
        last = known[-1] if known.size else None
        found[str(name)] = (
            {}
            if last is None
            else {
                "ratio": float(ratio[last]),
                "low": float(low[last]),
                "high": float(high[last]),
                "loss": float(loss[last]),
                "first_ratio": float(ratio[known[0]]),
            }
        )
    return found


def _interval(ending: dict[str, float]) -> str:
    if not np.isfinite([ending["low"], ending["high"]]).all():
        return "not identified"
    return f"{ending['low']:.2f} to {ending['high']:.2f}"


def _direction(ending: dict[str, float]) -> str:
    """Whether the ratio is above or below one, with its whole interval."""
    if ending["low"] > 1:
        return "shows"
    if ending["high"] < 1:
        return "does not show: the other way"
    return "is not decided"


def metrics(result: "Result") -> dict[str, Any]:
    """Gives ratios by convention, differences, and gains from late context."""
    apart = result.differences
    return {
        "ratios": [
            {"side": name, "compute": convention} | ending
            for i, convention in enumerate(SIZES)
            for name, ending in _endings(result, i).items()
            if ending
        ],
        "differences": [
            {
                "side": str(result.sides[int(side)]),
                "size": int(size),
                "difference": float(difference),
                "se": float(se),
            }
            for side, size, difference, se in zip(*apart, strict=True)
        ],
        "late_gain": [
            {"side": str(name), "gain": float(gain), "se": float(se)}
            for name, gain, se in zip(
                *(result.sides, result.places.gain, result.places.gain_se), strict=True
            )
        ],
    }


def summary(result: "Result") -> list[Part]:
    """Puts the verdicts in tables: ratios, differences, rates that were best."""
    found = metrics(result)
    ratios = [
        _told(str(name), i, result)
        for i in range(len(SIZES))
        for name in result.sides[1:]
    ]
    heads = ("side", "compute", "ratio", "90 %", "at loss", "at the highest loss")
    heads = (*heads, "transformer needs less")
    differences = [
        (
            *(row["side"], f"{row['size']:,}"),
            *(f"{row['difference']:+.4f}", f"{row['se']:.4f}"),
        )
        for row in found["differences"]
    ]
    gains = [
        (row["side"], f"{row['gain']:.4f}", f"{row['se']:.4f}")
        for row in found["late_gain"]
    ]
    return [
        Sheet(
            f"compute to equal loss, over that of the {REFERENCE}",
            heads,
            ratios,
            "Read off curves through the best runs by compute, at the lowest loss that "
            "both reached; intervals by drawing whole trunks anew. Few trunks and one "
            "seed a side: an interval is of sizes left out, not of another seed.",
        ),
        _curves(result),
        Sheet(
            "loss less the transformer's at equal parameters and tokens, longest runs",
            ("side", "parameters", "nats", "standard error"),
            differences,
            "The standard error is of the held-out text, not of another seed.",
        ),
        Sheet(
            "second quarter of the window less the last, largest models",
            ("side", "nats", "standard error"),
            gains,
        ),
        _rates(result),
    ]


def _told(name: str, convention: int, result: "Result") -> tuple[str, ...]:
    """A row of the table of ratios; where there is none, the reason."""
    row = _endings(result, convention)[name]
    if not row:
        reasons = np.asarray(result.ratios.reason)
        reason = reasons[convention, list(result.sides).index(name)]
        return (name, SIZES[convention], "not identified", "", "", "", str(reason))
    return (
        *(name, SIZES[convention], f"{row['ratio']:.2f}", _interval(row)),
        *(f"{row['loss']:.3f}", f"{row['first_ratio']:.2f}", _direction(row)),
    )


def _curves(result: "Result") -> Sheet:
    """How well each curve goes through the runs that it stands for."""
    rows = []
    for i, name in enumerate(result.sides):
        mine = result.runs.side == i
        best = frontier(result.runs.flops[mine], result.runs.loss[mine])
        residual = float(result.curves.residual[i])
        shown = f"{residual:.3f}" if np.isfinite(residual) else "not fitted"
        rows.append((str(name), str(mine.sum()), str(len(best)), shown))
    heads = ("side", "runs", "on the frontier", "residual, nats")
    return Sheet("curves through the frontier, exact compute", heads, rows)


def _rates(result: "Result") -> Sheet:
    """Every rate tried, with its loss, and which was taken."""
    trials, rows = result.trials, []
    for i, name in enumerate(result.sides):
        for size in np.unique(trials.size[trials.side == i]):
            mine = (trials.side == i) & (trials.size == size)
            tried = sorted(
                zip(trials.learning_rate[mine], trials.loss[mine], strict=True)
            )
            best = min(tried, key=lambda trial: trial[1])
            edge = best in (tried[0], tried[-1])
            shown = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in tried)
            rows.append((str(name), f"{int(size):,}", shown, "yes" if edge else "no"))
    heads = ("side", "parameters", "rate: loss", "best at the edge")
    return Sheet("learning rates tried, short runs", heads, rows)
