"""What `rivals` says: verdicts beside the published directions, numbers, tables."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge
from experiments.training.rivals.fits import SIZES, frontier
from experiments.training.rivals.sides import PAIRS, REFERENCE, Published

if TYPE_CHECKING:
    from experiments.training.rivals.outcomes import Result

_SMALL = (
    "Ours are byte-level models of thousands of parameters and minutes, the source's "
    "of millions and days; only the direction can be compared."
)


def claims(result: "Result") -> list[Claim]:
    """Holds each direction against ours, see `_endings` for where it is read."""
    found = [
        judge(
            f"{name}, to equal loss: {said.statement}",
            source=said.source,
            published=1,
            ours=ending["ratio"],
            unit="1",
            relation=said.relation,
            differs=_SMALL,
            note=f"At {ending['loss']:.3f} nats; 90 % interval {_interval(ending)}: "
            f"the direction {_direction(ending, said)}.",
        )
        for name, ending in _endings(result, 0).items()
        if ending and (said := PAIRS[name])
    ]
    places, sides = result.places, list(result.sides)
    for name in ("lstm", "gru"):
        if name not in sides or not np.isfinite(places.lead[sides.index(name)]):
            continue
        i = sides.index(name)
        found.append(
            judge(
                f"from the second quarter of the window to the last the transformer's "
                f"loss falls by more than that of the {name}, which levels off",
                source=PAIRS[name].source,
                published=0,
                ours=float(places.lead[i]),
                unit="nats",
                relation="at_least",
                differs=_SMALL,
                note=f"Standard error {places.lead_se[i]:.4f}, by windows that both "
                f"have scored: the direction {_sign(places.lead[i], places.lead_se[i])}"
                ".",
            )
        )
    return found


def _sign(lead: float, se: float) -> str:
    """Whether a lead is above zero by more than two standard errors."""
    if abs(lead) <= 2 * se:
        return "is not decided"
    return "shows" if lead > 0 else "does not show: the other way"


def _endings(result: "Result", convention: int) -> dict[str, dict[str, float]]:
    """The ratio where it is read, by side; empty if there is none.

    It is read at the lowest loss where it has an interval, so that the number and its
    interval are of one loss. Nowhere having one, it is read at the lowest loss that
    both sides reached, and `low` and `high` are not numbers.
    """
    found = {}
    for i, name in list(enumerate(result.sides))[1:]:
        loss, ratio, low, high = (
            np.asarray(part)[convention, i] for part in result.ratios[:4]
        )
        known = np.flatnonzero(np.isfinite(ratio))
        bounded = known[np.isfinite(low[known]) & np.isfinite(high[known])]
        if not known.size:
            found[str(name)] = {}
            continue
        at = bounded[-1] if bounded.size else known[-1]
        found[str(name)] = {
            "ratio": float(ratio[at]),
            "low": float(low[at]),
            "high": float(high[at]),
            "loss": float(loss[at]),
            "first_ratio": float(ratio[known[0]]),
            "last_ratio": float(ratio[known[-1]]),
            "last_loss": float(loss[known[-1]]),
        }
    return found


def _interval(ending: dict[str, float]) -> str:
    if not np.isfinite([ending["low"], ending["high"]]).all():
        return "not identified"
    return f"{ending['low']:.2f} to {ending['high']:.2f}"


def _direction(ending: dict[str, float], said: Published) -> str:
    """What becomes of the published direction; a verdict needs the whole interval."""
    low, high = ending["low"], ending["high"]
    if said.relation == "equal":
        if low > 1 or high < 1:
            return f"does not show: {'more' if low > 1 else 'less'} is needed"
        # Of no interval nothing is said.
        return "is not contradicted" if low <= 1 <= high else "is not decided"
    if low > 1:
        return "shows"
    return "does not show: the other way" if high < 1 else "is not decided"


_GAINS = ("gain", "gain_se", "lead", "lead_se")


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
                "by_seed": [float(each) for each in by_seed],
            }
            for side, size, difference, se, by_seed in zip(*apart, strict=True)
        ],
        "late_gain": [
            {
                "side": str(name),
                **{key: float(getattr(result.places, key)[i]) for key in _GAINS},
            }
            for i, name in enumerate(result.sides)
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
    heads = ("side", "compute", "published", "ratio", "90 %", "at loss")
    heads = (*heads, "at the highest", "at the lowest", "the published direction")
    differences = [
        (
            *(row["side"], f"{row['size']:,}"),
            *(f"{row['difference']:+.4f}", f"{row['se']:.4f}"),
            ", ".join(f"{each:+.4f}" for each in row["by_seed"]),
        )
        for row in found["differences"]
    ]
    gains = [
        (
            *(row["side"], f"{row['gain']:.4f}", f"{row['gain_se']:.4f}"),
            # The transformer has none over itself.
            *((f"{row['lead']:+.4f}", f"{row['lead_se']:.4f}") if i else ("", "")),
        )
        for i, row in enumerate(found["late_gain"])
    ]
    return [
        Sheet(
            f"compute to equal loss, over that of the {REFERENCE}",
            heads,
            ratios,
            "Read off curves through the best runs by compute, at the lowest loss with "
            "an interval: by drawing whole trunks anew, each a size with a seed. If no "
            "loss has one, at the lowest that both sides reached. Trunks are few, so "
            "intervals are rough.",
        ),
        _curves(result),
        Sheet(
            "loss less the transformer's at equal parameters and tokens, longest runs",
            ("side", "parameters", "nats", "standard error", "seed by seed"),
            differences,
            "The standard error is of the held-out text alone; what another seed is "
            "worth is seen in the last column.",
        ),
        Sheet(
            "second quarter of the window less the last, largest models",
            ("side", "nats", "standard error", "transformer's lead", "standard error"),
            gains,
            "The lead is by windows that both have scored, so how hard their text is "
            "drops out.",
        ),
        _rates(result),
    ]


def _told(name: str, convention: int, result: "Result") -> tuple[str, ...]:
    """A row of the table of ratios; where there is none, the reason."""
    row, said = _endings(result, convention)[name], PAIRS[name]
    published = "1" if said.relation == "equal" else "at least 1"
    heads = (name, SIZES[convention], published)
    if not row:
        reasons = np.asarray(result.ratios.reason)
        reason = reasons[convention, list(result.sides).index(name)]
        return (*heads, "not identified", "", "", "", "", str(reason))
    return (
        *(*heads, f"{row['ratio']:.2f}", _interval(row)),
        *(f"{row['loss']:.3f}", f"{row['first_ratio']:.2f}"),
        *(f"{row['last_ratio']:.2f} ({row['last_loss']:.3f})", _direction(row, said)),
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
