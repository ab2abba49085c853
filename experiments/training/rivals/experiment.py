"""Compares the transformer with other models by compute at equal loss.

LSTM against transformer, SGD against Adam, 1, 4 and 6 layers against 2, learned against
rotary positions: all with equal parameters outside embeddings, the same text in the
same order, and equal numbers of learning rates and seeds at every size. For each side,
a curve is fitted to the best runs by compute, so that the verdict is a ratio of compute
with an interval instead of the result of two runs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import lab
from experiments.harness import (
    RATE_HEADS,
    direction_verdict,
    format_interval,
    format_rates,
    judge_direction,
)
from experiments.training.rivals import runs, settings
from experiments.training.rivals.runs import COMPUTE, Differences, Result
from experiments.training.rivals.settings import (
    PUBLISHED_PAIRS,
    RECURRENT,
    REFERENCE,
    Published,
)
from scaling.frontiers import find_best_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIGS = settings.CONFIGS


def published_direction(low: float, high: float, published: Published) -> str:
    """Returns the verdict on a published direction, which needs the whole interval."""
    if published.claim == "more":
        return judge_direction(low, high)
    if low > 1 or high < 1:
        return f"does not show: {'more' if low > 1 else 'less'} is needed"
    # Without an interval there is no verdict.
    return "is not contradicted" if low <= 1 <= high else "is not decided"


class ComputeRatios(lab.ResultTable):
    """Ratios of compute at equal loss by side; NaN if there is none.

    The ratio is read at the lowest loss for which it has an interval. If it has none,
    it is read at the lowest loss that both sides reached, and `low` and `high` are NaN.
    """

    side: lab.Texts = lab.column("side, compared with the reference")
    compute: lab.Texts = lab.column("way to count compute")
    ratio: lab.Floats = lab.column("ratio of compute", form="{:.2f}")
    low: lab.Floats = lab.column("lower end of its interval")
    high: lab.Floats = lab.column("upper end of its interval")
    loss: lab.Floats = lab.column("loss of the ratio", heading="at loss", form="{:.3f}")
    first_ratio: lab.Floats = lab.column(
        "ratio at the highest loss of both", heading="at the highest", form="{:.2f}"
    )
    last_ratio: lab.Floats = lab.column(
        "ratio at the lowest loss of both", heading="at the lowest", form="{:.2f}"
    )
    last_loss: lab.Floats = lab.column(
        "lowest loss", heading="the lowest", form="{:.3f}"
    )
    reason: lab.Texts = lab.column("reason for a missing ratio", is_reported=False)

    @property
    @lab.computed_column(heading="90 %", is_reported=False)
    def interval(self) -> np.ndarray:
        """Interval as text."""
        ends = zip(self.low, self.high, strict=True)
        return np.array([format_interval(low, high) for low, high in ends])

    @property
    @lab.computed_column(heading="the published direction", is_reported=False)
    def direction(self) -> np.ndarray:
        """Verdict on the published direction, or the reason why there is none."""
        rows = zip(self.side, self.low, self.high, self.reason, strict=True)
        return np.array(
            [
                why or published_direction(*ends, PUBLISHED_PAIRS[x])
                for x, *ends, why in rows
            ]
        )

    @property
    def published(self) -> np.ndarray:
        """Published ratio as text."""
        words = {"more": "at least 1", "one_trend": "1"}
        return np.array([words[PUBLISHED_PAIRS[side].claim] for side in self.side])


def read_ratios(result: Result) -> ComputeRatios:
    """Returns the ratios of every side for both ways to count compute."""
    rows = []
    for i, compute in enumerate(COMPUTE):
        for j, side in enumerate(result.sides[1:], 1):
            *parts, reason = (np.asarray(part)[i, j] for part in result.ratios)
            loss, ratio, low, high = parts
            finite = np.flatnonzero(np.isfinite(ratio))
            bounded = np.flatnonzero(np.isfinite([ratio, low, high]).all(0))
            if not finite.size:
                rows.append((side, compute, *[np.nan] * 7, reason))
                continue
            at = (bounded if bounded.size else finite)[-1]
            first = finite[0]
            last = finite[-1]
            selected = (ratio[at], low[at], high[at], loss[at])
            rows.append(
                (
                    side,
                    compute,
                    *selected,
                    ratio[first],
                    ratio[last],
                    loss[last],
                    reason,
                )
            )
    return ComputeRatios.of(rows)


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares each published direction with the ratios of `ComputeRatios`."""
    ratios = read_ratios(result).where(compute="exact")
    names = ("side", "ratio", "loss", "interval", "direction")
    for row in ratios.at(np.isfinite(ratios.ratio)).rows(*names):
        name = row.pop("side")
        shown = row.pop("direction")
        published = PUBLISHED_PAIRS[name]
        row["direction"] = direction_verdict(shown)
        words: dict[str, Any] = row | {"name": name, "source": published.source}
        words["shown"] = shown
        yield lab.measured(published.claim, row["ratio"], **words)
    for row in _gains(result).rows():
        name = row["side"]
        lead = row["lead"]
        se = row["lead_se"]
        if name in RECURRENT and np.isfinite(lead):
            shown = judge_direction(lead - 2 * se, lead + 2 * se, above=0)
            words = {"name": name, "source": PUBLISHED_PAIRS[name].source}
            words |= {
                "se": se,
                "shown": shown,
                "direction": direction_verdict(shown),
            }
            yield lab.measured("late_context", lead, **words)


class Gains(lab.ResultTable):
    """Loss reduction at the end of the window by side, see `PositionLosses`."""

    side: lab.Texts = lab.column("side")
    gain: lab.Floats = lab.column("mean gain", heading="nats", form="{:.4f}")
    gain_se: lab.Floats = lab.column("of gain", heading="standard error", form="{:.4f}")
    lead: lab.Floats = lab.column(
        "the reference's gain less this one",
        heading="transformer's lead",
        form="{:+.4f}",
    )
    lead_se: lab.Floats = lab.column("of lead", heading="standard error", form="{:.4f}")


def _gains(result: Result) -> Gains:
    x = result.places
    return Gains(result.sides, x.gain, x.gain_se, x.lead, x.lead_se)


def _differences(result: Result) -> Differences:
    """Returns the differences with the names of the sides."""
    differences = result.differences
    names = result.sides[differences.side.astype(int)]
    return Differences(
        names,
        differences.size,
        differences.difference,
        differences.se,
        differences.by_seed,
    )


def metrics(result: Result) -> dict[str, object]:
    """Returns ratios, differences, and gains at the end of the window."""
    ratios = read_ratios(result)
    return {
        "ratios": ratios.at(np.isfinite(ratios.ratio)).rows(),
        "differences": _differences(result).rows(),
        "late_gain": _gains(result).rows(),
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of ratios, curves, differences, gains and learning rates."""
    read = ("ratio", "interval", "loss", "first_ratio", "last_ratio", "last_loss")
    names = ("side", "compute", "published", *read, "direction")
    # Residual of each curve from the runs on its frontier.
    curves = []
    rates = []
    for i, name in enumerate(result.sides):
        subset = result.runs.where(side=i)
        residual = result.curves.residual[i]
        best = find_best_runs(subset.flops, subset.loss)
        shown = f"{residual:.3f}" if np.isfinite(residual) else "not fitted"
        curves.append((str(name), str(len(subset)), str(len(best)), shown))
    trials = result.trials
    for side, size in dict.fromkeys(zip(trials.side, trials.size, strict=True)):
        subset = trials.where(side=side, size=size)
        best = subset.learning_rate[np.argmin(np.nan_to_num(subset.loss, nan=np.inf))]
        cells = format_rates(subset.learning_rate, subset.loss, best)
        rates.append((str(result.sides[side]), f"{size:,}", *cells))
    return [
        read_ratios(result).sheet(
            f"compute to equal loss, over that of the {REFERENCE}",
            *names,
            note="Read off curves through the best runs by compute, at the lowest loss "
            "with an interval. Intervals resample trunks, each a size with a seed. "
            "Without an interval, the ratio is read at the lowest loss that both sides "
            "reached. Trunks are few, so intervals are rough.",
        ),
        lab.Sheet(
            "curves through the frontier, exact compute",
            ("side", "runs", "on the frontier", "residual, nats"),
            curves,
        ),
        _differences(result).sheet(
            "loss less the transformer's at equal parameters and tokens, longest runs",
            note="The standard error is that of the held-out text; the last column "
            "shows the variation over seeds.",
        ),
        _gains(result).sheet(
            "second quarter of the window less the last, largest models",
            note="The lead is computed window by window, which cancels the difficulty "
            "of the text.",
        ),
        lab.Sheet(
            "learning rates tried, short runs",
            ("side", "parameters", *RATE_HEADS),
            rates,
        ),
    ]


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws a result on 4 axes."""
    _draw_curves(axes[0], result)
    _draw_places(axes[1], result)
    _draw_ratios(axes[2], result)
    _draw_differences(axes[3], result)


LOSS_LABEL = "held-out loss [nats/byte]"


def _draw_curves(ax: "Axes", result: Result) -> None:
    """Draws the runs of each side's frontier, and the curve through them."""
    lowest = {}
    for i, name in enumerate(result.sides.tolist()):
        subset = result.runs.where(side=i)
        best = subset.at(find_best_runs(subset.flops, subset.loss))
        lab.draw_curve(ax, best.flops, best.loss, name, linestyle="", markersize=4)
        curve = result.curves.flops[i], result.curves.loss[i]
        lab.draw_curve(ax, *curve, name, marker="")
        ax.plot([], [], label=name, **lab.system_style(name).line)
        if len(best):
            lowest[name] = float(np.nanmin(best.loss))
    title = "Held-out loss by training compute"
    if lowest:
        name = min(lowest, key=lambda name: lowest[name])
        title = f"{name} reaches the lowest loss, {lowest[name]:.2f} nats/byte"
    lab.set_labels(
        ax, title, "training compute, exact [FLOP]", LOSS_LABEL, xscale="log"
    )
    lab.label_wide_log_axis(ax.xaxis)
    ax.legend()


def _draw_places(ax: "Axes", result: Result) -> None:
    places = result.places.place
    losses = result.places.loss
    for i, name in enumerate(result.sides.tolist()):
        mark = lab.system_style(name).marker
        lab.draw_curve(ax, places, losses[i], name, name, marker=mark, markersize=3)
    title = "Largest models: loss by position"
    ends = losses[:, -1] if losses.size else np.array([np.nan])
    if np.isfinite(ends).any():
        gains = losses[:, 0] - losses[:, -1]
        best = result.sides.tolist()[int(np.nanargmax(gains))]
        title = f"Largest models: {best} gains most from context, "
        title += f"{np.nanmax(gains):.2f} nats/byte"
    x_label = "position in the window [bytes]"
    lab.set_labels(ax, title, x_label, LOSS_LABEL, xscale="log")
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    ax.legend()


def _draw_ratios(ax: "Axes", result: Result) -> None:
    """Draws the ratio of each side with its interval, a line per side."""
    ratios = read_ratios(result).where(compute="exact")
    ratios = ratios.at(np.isfinite(ratios.ratio))
    names = ratios.side.tolist()
    rows = zip(names, ratios.ratio, ratios.low, ratios.high, strict=True)
    for i, (name, ratio, low, high) in enumerate(rows):
        color = lab.system_style(name).color
        ax.hlines(i, low, high, color=color, linewidth=3, alpha=0.5)
        lab.draw_curve(ax, [ratio], [i], name, markersize=7)
        lab.annotate(ax, f"{ratio:.2g}", (high, i), (6, 0), va="center_baseline")
    lab.draw_reference_line(ax, 1, "as much as the transformer", along="y")
    title = "Compute to equal loss: none identified"
    if names:
        index = int(np.nanargmax(ratios.ratio))
        title = f"For equal loss {names[index]} needs {ratios.ratio[index]:.1f} times "
        title += "the compute (bars: 90 %)"
        ax.legend()
    lab.set_labels(ax, title, "compute / transformer's [ratio]", "", xscale="log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.7)
    ax.set_xlim(*np.clip(ax.get_xlim(), 0.05, 50))
    lab.label_log_axis(ax.xaxis)


def _draw_differences(ax: "Axes", result: Result) -> None:
    """Draws mean differences over seeds, with a vertical line for their range."""
    worst = ("", 0.0)
    names = result.sides.tolist()
    for i, name in enumerate(names[1:], 1):
        subset = result.differences.where(side=i)
        if len(subset):
            # Points of equal size are shifted, so that they do not overlap.
            sizes = subset.size * 1.04 ** (i - len(names) / 2)
            lab.draw_curve(ax, sizes, subset.difference, name, name)
            ends = subset.by_seed.min(1), subset.by_seed.max(1)
            ax.vlines(sizes, *ends, color=lab.system_style(name).color, linewidth=1)
            last = float(subset.difference[-1])
            worst = (name, last) if last > worst[1] else worst
    lab.draw_reference_line(ax, 0, "the transformer")
    title = "Loss at equal parameters and tokens"
    if worst[0]:
        title = f"At equal size {worst[0]} is worst, by {worst[1]:.2f} nats "
        title += "(lines: seeds)"
    less = "loss - transformer's [nats/byte]"
    size = "parameters outside embeddings [1]"
    lab.set_labels(ax, title, size, less, xscale="log")
    shown = result.differences.distinct("size")
    ax.set_xticks(shown, [f"{size:,}" for size in shown])
    ax.minorticks_off()
    ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    runs.run,
    plot,
    claims,
    summary,
    metrics,
    panels=lab.Panels(4, 1, 2.9),
)
