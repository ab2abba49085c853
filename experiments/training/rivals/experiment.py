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
from experiments.plotting import style, systems
from experiments.training.rivals import runs, settings
from experiments.training.rivals.runs import COMPUTE, Differences, Result
from experiments.training.rivals.settings import PAIRS, RECURRENT, REFERENCE, Published
from scaling.frontiers import best_runs

CONFIGS = settings.CONFIGS
PANELS, PANEL_SIZE_INCHES = (4, 1), (6.8, 2.9)
run = runs.run


def published_direction(low: float, high: float, said: Published) -> str:
    """What becomes of a published direction; a verdict needs the whole interval."""
    if said.claim == "more":
        return sweep_tables.direction(low, high)
    if low > 1 or high < 1:
        return f"does not show: {'more' if low > 1 else 'less'} is needed"
    # Of no interval nothing is said.
    return "is not contradicted" if low <= 1 <= high else "is not decided"


class ComputeRatios(Table):
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
        return np.array(
            [why or published_direction(*ends, PAIRS[x]) for x, *ends, why in rows]
        )

    @property
    def published(self) -> np.ndarray:
        """What was published of the ratio."""
        words = {"more": "at least 1", "one_trend": "1"}
        return np.array([words[PAIRS[side].claim] for side in self.side])


def read_ratios(result: Result) -> ComputeRatios:
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
    return ComputeRatios.of(rows)


@beside(__file__).judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds each direction against ours, see `ComputeRatios` for where it is read."""
    told = read_ratios(result).where(compute="exact")
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
    told = read_ratios(result)
    return {
        "ratios": told.at(np.isfinite(told.ratio)).rows(),
        "differences": _differences(result).rows(),
        "late_gain": _gains(result).rows(),
    }


def summary(result: Result) -> list[Part]:
    """Puts the directions in tables: ratios, differences, rates that were best."""
    read = ("ratio", "interval", "loss", "first_ratio", "last_ratio", "last_loss")
    names = ("side", "compute", "published", *read, "direction")
    # How well each curve goes through the runs that it stands for.
    curves, rates = [], []
    for i, name in enumerate(result.sides):
        mine, residual = result.runs.where(side=i), result.curves.residual[i]
        best = best_runs.find(mine.flops, mine.loss)
        shown = f"{residual:.3f}" if np.isfinite(residual) else "not fitted"
        curves.append((str(name), str(len(mine)), str(len(best)), shown))
    trials = result.trials
    for side, size in dict.fromkeys(zip(trials.side, trials.size, strict=True)):
        mine = trials.where(side=side, size=size)
        best = mine.learning_rate[np.argmin(np.nan_to_num(mine.loss, nan=np.inf))]
        cells = sweep_tables.tried(mine.learning_rate, mine.loss, best)
        rates.append((str(result.sides[side]), f"{size:,}", *cells))
    return [
        read_ratios(result).sheet(
            f"compute to equal loss, over that of the {REFERENCE}",
            *names,
            note="Read off curves through the best runs by compute, at the lowest loss "
            "with an interval: by drawing whole trunks anew, each a size with a seed. "
            "If no loss has one, at the lowest that both sides reached. Trunks are "
            "few, so intervals are rough.",
        ),
        Sheet(
            "curves through the frontier, exact compute",
            ("side", "runs", "on the frontier", "residual, nats"),
            curves,
        ),
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
        Sheet(
            "learning rates tried, short runs",
            ("side", "parameters", *sweep_tables.TRIED),
            rates,
        ),
    ]


def plot(axes: Any, result: Result) -> None:
    """Draws a result on four axes."""
    _draw_curves(axes[0], result)
    _draw_places(axes[1], result)
    _draw_ratios(axes[2], result)
    _draw_differences(axes[3], result)


LOSS = "held-out loss [nats/byte]"


def _draw_curves(ax: Any, result: Result) -> None:
    """The runs of each side's frontier, and the curve through them."""
    lowest = {}
    for i, name in enumerate(result.sides.tolist()):
        mine = result.runs.where(side=i)
        best = mine.at(best_runs.find(mine.flops, mine.loss))
        style.curve(ax, best.flops, best.loss, name, linestyle="", markersize=4)
        curve = result.curves.flops[i], result.curves.loss[i]
        style.curve(ax, *curve, name, marker="")
        ax.plot([], [], label=name, **systems.look(name).line)
        if len(best):
            lowest[name] = float(np.nanmin(best.loss))
    title = "Held-out loss by training compute"
    if lowest:
        name = min(lowest, key=lambda name: lowest[name])
        title = f"{name} reaches the lowest loss, {lowest[name]:.2f} nats/byte"
    style.titled(ax, title, "training compute, exact [FLOP]", LOSS, xscale="log")
    style.wide_log(ax.xaxis)
    ax.legend()


def _draw_places(ax: Any, result: Result) -> None:
    places, losses = result.places.place, result.places.loss
    for i, name in enumerate(result.sides.tolist()):
        mark = systems.look(name).marker
        style.curve(ax, places, losses[i], name, name, marker=mark, markersize=3)
    title = "Largest models: loss by position"
    ends = losses[:, -1] if losses.size else np.array([np.nan])
    if np.isfinite(ends).any():
        gains = losses[:, 0] - losses[:, -1]
        best = result.sides.tolist()[int(np.nanargmax(gains))]
        title = f"Largest models: {best} gains most from context, "
        title += f"{np.nanmax(gains):.2f} nats/byte"
    seen = "position in the window [bytes]"
    style.titled(ax, title, seen, LOSS, xscale="log")
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    ax.legend()


def _draw_ratios(ax: Any, result: Result) -> None:
    """The ratio of each side and its interval, where it is read, a line each."""
    told = read_ratios(result).where(compute="exact")
    told = told.at(np.isfinite(told.ratio))
    names = told.side.tolist()
    rows = zip(names, told.ratio, told.low, told.high, strict=True)
    for i, (name, ratio, low, high) in enumerate(rows):
        color = systems.look(name).color
        ax.hlines(i, low, high, color=color, linewidth=3, alpha=0.5)
        style.curve(ax, [ratio], [i], name, markersize=7)
        style.note(ax, f"{ratio:.2g}", (high, i), (6, 0), va="center_baseline")
    style.reference(ax, 1, "as much as the transformer", along="y")
    title = "Compute to equal loss: none identified"
    if names:
        most = int(np.nanargmax(told.ratio))
        title = f"For equal loss {names[most]} needs {told.ratio[most]:.1f} times "
        title += "the compute (bars: 90 %)"
        ax.legend()
    style.titled(ax, title, "compute / transformer's [ratio]", "", xscale="log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.7)
    ax.set_xlim(*np.clip(ax.get_xlim(), 0.05, 50))
    style.plain_log(ax.xaxis)


def _draw_differences(ax: Any, result: Result) -> None:
    """Means over the seeds, joined; a line from seed to seed."""
    worst = ("", 0.0)
    names = result.sides.tolist()
    for i, name in enumerate(names[1:], 1):
        mine = result.differences.where(side=i)
        if len(mine):
            # Next to each other, where sizes are equal.
            sizes = mine.size * 1.04 ** (i - len(names) / 2)
            style.curve(ax, sizes, mine.difference, name, name)
            ends = mine.by_seed.min(1), mine.by_seed.max(1)
            ax.vlines(sizes, *ends, color=systems.look(name).color, linewidth=1)
            last = float(mine.difference[-1])
            worst = (name, last) if last > worst[1] else worst
    style.reference(ax, 0, "the transformer")
    title = "Loss at equal parameters and tokens"
    if worst[0]:
        title = f"At equal size {worst[0]} is worst, by {worst[1]:.2f} nats "
        title += "(lines: seeds)"
    less, size = "loss - transformer's [nats/byte]", "parameters outside embeddings [1]"
    style.titled(ax, title, size, less, xscale="log")
    shown = result.differences.distinct("size")
    ax.set_xticks(shown, [f"{size:,}" for size in shown])
    ax.minorticks_off()
    ax.legend()
