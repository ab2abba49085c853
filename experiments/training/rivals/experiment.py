"""Does the transformer win over its rivals, and at what compute to equal loss?

LSTM against transformer, SGD against Adam, one, four and six layers against two,
learned against rotary positions: all at equal parameters outside embeddings, on the
same text in the same order, with as many learning rates tried on each side at every
size and as many seeds. Each side is a curve through the best of its runs by compute, so
the verdict is a ratio of compute with its interval, not the outcome of two runs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.framework import (
    Floats,
    Ours,
    Part,
    Sheet,
    Table,
    Texts,
    beside,
    column,
    ours,
    table,
)
from experiments.harness import sweep_tables
from experiments.plotting import style
from experiments.training.rivals import runs, settings
from experiments.training.rivals.runs import COMPUTE, Differences, Result
from experiments.training.rivals.settings import PAIRS, RECURRENT, REFERENCE, Published
from scaling.frontiers import best_runs

CONFIGS, PANELS = settings.CONFIGS, (2, 2)
run = runs.run


def direction(low: float, high: float, said: Published) -> str:
    """What becomes of a published direction; a verdict needs the whole interval."""
    if said.claim == "more":
        return sweep_tables.direction(low, high)
    if low > 1 or high < 1:
        return f"does not show: {'more' if low > 1 else 'less'} is needed"
    # Of no interval nothing is said.
    return "is not contradicted" if low <= 1 <= high else "is not decided"


class Readings(Table):
    """The ratio of compute where it is read, by side; not numbers if there is none.

    It is read at the lowest loss where it has an interval, so that the number and its
    interval are of one loss. Nowhere having one, it is read at the lowest loss that
    both sides reached, and `low` and `high` are not numbers.
    """

    side: Texts = column("whose compute is divided by the reference's")
    compute: Texts = column("how it is counted")
    ratio: Floats = column("where it is read", form="{:.2f}")
    low: Floats = column("where its interval begins")
    high: Floats = column("where it ends")
    loss: Floats = column("where it is read", heading="at loss", form="{:.3f}")
    first_ratio: Floats = column(
        "at the highest loss of both", heading="at the highest", form="{:.2f}"
    )
    last_ratio: Floats = column("at the lowest", heading="at the lowest", form="{:.2f}")
    last_loss: Floats = column("the lowest", heading="the lowest", form="{:.3f}")
    reason: Texts = column("why there is none", is_told=False)

    @property
    @table.shown(heading="90 %", is_told=False)
    def interval(self) -> np.ndarray:
        """The interval in words."""
        ends = zip(self.low, self.high, strict=True)
        return np.array([sweep_tables.interval(low, high) for low, high in ends])

    @property
    @table.shown(heading="the published direction", is_told=False)
    def direction(self) -> np.ndarray:
        """What becomes of it, or why nothing is known."""
        rows = zip(self.side, self.low, self.high, self.reason, strict=True)
        return np.array([why or direction(*ends, PAIRS[x]) for x, *ends, why in rows])

    @property
    def published(self) -> np.ndarray:
        """What was published of the ratio."""
        words = {"more": "at least 1", "one_trend": "1"}
        return np.array([words[PAIRS[side].claim] for side in self.side])


def readings(result: Result) -> Readings:
    """Reads every ratio off, by both ways to count compute."""
    rows = []
    for i, compute in enumerate(COMPUTE):
        for j, side in enumerate(result.sides[1:], 1):
            *parts, reason = (np.asarray(part)[i, j] for part in result.ratios)
            loss, ratio, low, high = parts
            known = np.flatnonzero(np.isfinite(ratio))
            bounded = np.flatnonzero(np.isfinite([ratio, low, high]).all(0))
            if not known.size:
                rows.append((side, compute, *[np.nan] * 7, reason))
                continue
            at = (bounded if bounded.size else known)[-1]
            first, last = known[0], known[-1]
            here = (ratio[at], low[at], high[at], loss[at])
            rows.append(
                (side, compute, *here, ratio[first], ratio[last], loss[last], reason)
            )
    return Readings.of(rows)


@beside(__file__).judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds each direction against ours, see `Readings` for where it is read."""
    told = readings(result).where(compute="exact")
    names = ("side", "ratio", "loss", "interval", "direction")
    for row in told.at(np.isfinite(told.ratio)).rows(*names):
        name, shown = row.pop("side"), row.pop("direction")
        said, row["direction"] = PAIRS[name], sweep_tables.verdict(shown)
        words: dict[str, Any] = row | {"name": name, "source": said.source}
        words["shown"] = shown
        yield ours(said.claim, row["ratio"], **words)
    for row in _gains(result).rows():
        name, lead, se = row["side"], row["lead"], row["lead_se"]
        if name in RECURRENT and np.isfinite(lead):
            shown = sweep_tables.direction(lead - 2 * se, lead + 2 * se, above=0)
            words = {"name": name, "source": PAIRS[name].source}
            words |= {
                "se": se,
                "shown": shown,
                "direction": sweep_tables.verdict(shown),
            }
            yield ours("late_context", lead, **words)


class Gains(Table):
    """What the end of the window is worth to each side, see `Places`."""

    side: Texts = column("who")
    gain: Floats = column("of all", heading="nats", form="{:.4f}")
    gain_se: Floats = column("its", heading="standard error", form="{:.4f}")
    lead: Floats = column(
        "the reference's", heading="transformer's lead", form="{:+.4f}"
    )
    lead_se: Floats = column("its", heading="standard error", form="{:.4f}")


def _gains(result: Result) -> Gains:
    x = result.places
    return Gains(result.sides, x.gain, x.gain_se, x.lead, x.lead_se)


def _differences(result: Result) -> Differences:
    """The differences, with the names of the sides."""
    found = result.differences
    names = result.sides[found.side.astype(int)]
    return Differences(names, found.size, found.difference, found.se, found.by_seed)


def metrics(result: Result) -> dict[str, Any]:
    """Gives ratios by convention, differences, and gains from late context."""
    told = readings(result)
    return {
        "ratios": told.at(np.isfinite(told.ratio)).rows(),
        "differences": _differences(result).rows(),
        "late_gain": _gains(result).rows(),
    }


def summary(result: Result) -> list[Part]:
    """Puts the directions in tables: ratios, differences, rates that were best."""
    read = ("ratio", "interval", "loss", "first_ratio", "last_ratio", "last_loss")
    names = ("side", "compute", "published", *read, "direction")
    return [
        readings(result).sheet(
            f"compute to equal loss, over that of the {REFERENCE}",
            *names,
            note="Read off curves through the best runs by compute, at the lowest loss "
            "with an interval: by drawing whole trunks anew, each a size with a seed. "
            "If no loss has one, at the lowest that both sides reached. Trunks are "
            "few, so intervals are rough.",
        ),
        _curves(result),
        _differences(result).sheet(
            "loss less the transformer's at equal parameters and tokens, longest runs",
            note="The standard error is of the held-out text alone; what another seed "
            "is worth is seen in the last column.",
        ),
        _gains(result).sheet(
            "second quarter of the window less the last, largest models",
            note="The lead is by windows that both have scored, so how hard their text "
            "is drops out.",
        ),
        _rates(result),
    ]


def _curves(result: Result) -> Sheet:
    """How well each curve goes through the runs that it stands for."""
    rows = []
    for i, name in enumerate(result.sides):
        mine, residual = result.runs.where(side=i), result.curves.residual[i]
        best = best_runs.find(mine.flops, mine.loss)
        shown = f"{residual:.3f}" if np.isfinite(residual) else "not fitted"
        rows.append((str(name), str(len(mine)), str(len(best)), shown))
    heads = ("side", "runs", "on the frontier", "residual, nats")
    return Sheet("curves through the frontier, exact compute", heads, rows)


def _rates(result: Result) -> Sheet:
    """Every rate tried, with its loss, and whether the best is an edge."""
    trials, rows = result.trials, []
    for side, size in dict.fromkeys(zip(trials.side, trials.size, strict=True)):
        mine = trials.where(side=side, size=size)
        rates = mine.learning_rate
        best = rates[np.argmin(np.nan_to_num(mine.loss, nan=np.inf))]
        cells = sweep_tables.tried(rates, mine.loss, best)
        rows.append((str(result.sides[side]), f"{size:,}", *cells))
    heads = ("side", "parameters", *sweep_tables.TRIED)
    return Sheet("learning rates tried, short runs", heads, rows)


def plot(axes: Any, result: Result) -> None:
    """Draws a result on two rows of two axes, under one legend."""
    _draw_curves(axes[0, 0], result)
    _draw_places(axes[0, 1], result)
    _draw_ratios(axes[1, 0], result)
    _draw_differences(axes[1, 1], result)
    lines, names = axes[0, 1].get_lines(), result.sides.tolist()
    place = {"ncols": 4, "loc": "outside upper center"}
    axes[0, 0].figure.legend(lines[: len(names)], names, **place)


def _look(side: int) -> dict[str, Any]:
    """Black and wide for the reference, wide for its first rival, dashed past seven."""
    # Yellow, too light for a line, is left out.
    usable = [style.colors()[i] for i in (0, 6, 5, 3, 1, 7, 2)]
    return {
        "color": usable[side % 7],
        "linestyle": "-" if side < 7 else "--",
        "linewidth": 1.4 if side < 2 else 0.8,
    }


LOSS = "held-out loss [nats per byte]"


def _draw_curves(ax: Any, result: Result) -> None:
    """Every finished run, small; those of a side's frontier large, with its curve."""
    for i in range(len(result.sides)):
        mine, look = result.runs.where(side=i), _look(i)
        best = mine.at(best_runs.find(mine.flops, mine.loss))
        if i < 2:
            ax.plot(mine.flops, mine.loss, "o", color=look["color"], markersize=1.2)
        size = 3.5 if i < 2 else 2
        ax.plot(best.flops, best.loss, "o", color=look["color"], markersize=size)
        ax.plot(result.curves.flops[i], result.curves.loss[i], **look)
    title, compute = (
        "best runs by compute, and a curve",
        "training compute, exact [FLOP]",
    )
    style.titled(ax, title, compute, LOSS, xscale="log")
    style.wide_log(ax.xaxis)


def _draw_places(ax: Any, result: Result) -> None:
    for i in range(len(result.sides)):
        ax.plot(result.places.place, result.places.loss[i], **_look(i))
    ax.axvline(100, color="0.8", linewidth=0.6, zorder=0)
    seen = "bytes seen before and with the place"
    style.titled(ax, "loss by place, largest models", seen, LOSS, xscale="log")
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])


def _draw_ratios(ax: Any, result: Result) -> None:
    seen = [0.5, 2.0]
    for i in range(1, len(result.sides)):
        loss, ratio, low, high = (np.asarray(part)[0, i] for part in result.ratios[:4])
        if np.isfinite(ratio).any():
            look = _look(i)
            ax.plot(loss, ratio, **look)
            style.band(ax, loss, low, high, look["color"], 0.12)
            seen += [np.nanmin(ratio), np.nanmax(ratio)]
    if len(seen) == 2:
        ax.text(0.5, 0.6, "none identified", transform=ax.transAxes, ha="center")
    ax.axhline(1, color="0.6", linewidth=0.6, zorder=0)
    title, reached = (
        "compute to equal loss, 90 %",
        "loss reached by both [nats per byte]",
    )
    style.titled(ax, title, reached, "compute / transformer's", yscale="log")
    ax.set_ylim(max(5e-3, min(seen) / 2), min(300.0, 2 * max(seen)))
    style.plain_log(ax.yaxis)
    ax.invert_xaxis()


def _draw_differences(ax: Any, result: Result) -> None:
    """Means over the seeds, joined; each seed a dash."""
    for i in range(1, len(result.sides)):
        mine, look = result.differences.where(side=i), _look(i)
        if len(mine):
            # Side by side, where sizes are equal.
            sizes = mine.size * 1.025 ** (i - len(result.sides) / 2)
            ax.plot(sizes, mine.difference, marker="o", markersize=2, **look)
            ax.plot(sizes, mine.by_seed, "_", color=look["color"], markersize=4)
            ends = mine.by_seed.min(1), mine.by_seed.max(1)
            ax.vlines(sizes, *ends, color=look["color"], linewidth=0.6)
    ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
    title = "equal parameters and tokens; dashes: seeds"
    less, size = "loss less transformer's [nats]", "parameters outside embeddings"
    style.titled(ax, title, size, less, xscale="log")
    shown = result.differences.distinct("size")
    ax.set_xticks(shown, [f"{size:,}" for size in shown])
    ax.minorticks_off()
