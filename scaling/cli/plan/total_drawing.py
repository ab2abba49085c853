"""Figure of a plan with servers: curves of equal cost, and cost by size."""

from typing import TYPE_CHECKING

import numpy as np

from jaxkv import plotting
from jaxkv.plotting import draw_curve, render_figure, set_labels, shade_band
from scaling.calibration import JOULES_PER_KWH
from scaling.cli.plan.total import TotalPlan
from scaling.laws import TwoPowers
from scaling.plan import budget_loss, ladder_cost, tokens_for_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Costs of the curves, relative to that of the plan."""
_SIZE_SPAN = 12.0
"""Range of sizes around the optimum, as a factor."""
_GREY = "0.6"


def render_total_figure(plan: TotalPlan, powers: TwoPowers) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""

    def draw(axes: np.ndarray) -> None:
        draw_iso_costs(axes[0], plan, powers)
        draw_costs(axes[1], plan, powers)

    return render_figure(draw, panels=(2, 1), size_inches=(6.8, 3.6))


def _unit(plan: TotalPlan) -> tuple[str, float]:
    return ("USD", 1.0) if plan.unit == "usd" else ("kWh", 1 / JOULES_PER_KWH)


def _sizes(plan: TotalPlan) -> np.ndarray:
    low = max(plan.optimum.num_params / _SIZE_SPAN, plan.sizes.num_params[0])
    high = min(plan.optimum.num_params * _SIZE_SPAN, plan.sizes.num_params[-1])
    return np.geomspace(low, high, 301)


def draw_iso_costs(ax: "Axes", plan: TotalPlan, powers: TwoPowers) -> None:
    """Draws N and D of equal cost of training and serving, and of equal loss."""
    best = plan.optimum
    unit, scale = _unit(plan)
    sizes = _sizes(plan)
    serving = ladder_cost(plan.ladders[0], sizes)
    looks = zip(_FACTORS, (2, 3, 5, 1), ("-.", "-", "--", ":"), strict=True)
    low, high = best.num_tokens / 8, best.num_tokens * 8
    for factor, color, dash in looks:
        tokens = (factor * best.cost - serving) / (6 * plan.flop_cost * sizes)
        is_possible = tokens > 0
        draw_curve(
            ax,
            sizes[is_possible],
            tokens[is_possible],
            color,
            f"{factor * best.cost * scale:.3g} {unit}",
            marker="",
            linestyle=dash,
            linewidth=2.2 if factor == 1 else 1.4,
        )
    grid = np.geomspace(low, high, 121)
    losses = budget_loss(powers, sizes[None, :], grid[:, None])
    levels = powers.floor + (best.loss - powers.floor) * np.array([0.9, 1.0, 1.15, 1.4])
    ax.set(xscale="log", yscale="log", xlim=sizes[[0, -1]], ylim=(low, high))
    lines = ax.contour(sizes, grid, losses, levels, colors=_GREY, linewidths=1)
    ax.clabel(lines, fmt="%.2f", fontsize=plotting.FONT_POINTS)
    ax.plot([], [], color=_GREY, linewidth=1, label="equal loss [nats/token]")
    _mark(ax, best.num_params, best.num_tokens)
    free = plan.chinchilla
    _mark_free(ax, free.num_params, free.num_tokens)
    document = plan.document
    if document["num_params_interval"] is not None:
        color = plotting.colors()[6]
        for x, y in (
            (document["num_params_interval"], [best.num_tokens] * 2),
            ([best.num_params] * 2, document["num_tokens_interval"]),
        ):
            ax.plot(x, y, color=color, linewidth=3, alpha=0.6)
    set_labels(
        ax,
        f"Equal cost of training and serving: best at {best.num_params:.3g} parameters",
        f"parameters, {document['count']} [1]",
        "training data [tokens]",
    )
    ax.legend()


def draw_costs(ax: "Axes", plan: TotalPlan, powers: TwoPowers) -> None:
    """Draws the costs of all sizes that reach the loss of the plan."""
    best = plan.optimum
    unit, scale = _unit(plan)
    sizes = _sizes(plan)
    tokens = tokens_for_loss(powers, sizes, best.loss)
    training = scale * 6 * plan.flop_cost * sizes * tokens
    serving = scale * ladder_cost(plan.ladders[0], sizes)
    is_shown = np.isfinite(training) & (training < 30 * best.cost * scale)
    names = ("training", "serving", "both")
    looks = zip(names, (training, serving, training + serving), (2, 3, 5), strict=True)
    for name, values, color in looks:
        dash = {"training": "--", "serving": "-.", "both": "-"}[name]
        draw_curve(
            ax,
            sizes[is_shown],
            values[is_shown],
            color,
            name,
            marker="",
            linestyle=dash,
        )
    draws = [
        scale * ladder_cost(x, sizes[is_shown])
        for x in plan.ladders[1:]
        if np.isfinite(x.cost).any()
    ]
    if len(draws) > 1 and best.serving_cost > 0:
        tail = (1 - plan.document["level"]) / 2
        ends = np.quantile(draws, [tail, 1 - tail], axis=0)
        shade_band(ax, sizes[is_shown], *ends, plotting.colors()[3], 0.2)
    _mark(ax, best.num_params, best.cost * scale)
    free = plan.chinchilla
    ax.set(xscale="log", yscale="log")
    top = float((training + serving)[is_shown].max())
    ax.set_ylim(max(best.cost * scale / 100, 1e-30), top)
    nearest = int(np.argmin(np.abs(sizes[is_shown] - free.num_params)))
    _mark_free(ax, free.num_params, float((training + serving)[is_shown][nearest]))
    set_labels(
        ax,
        f"Least cost at a loss of {best.loss:.3f}: {best.cost * scale:,.3g} {unit}",
        f"parameters, {plan.document['count']} [1]",
        f"cost of the model's life [{unit}]",
    )
    ax.legend()


def _mark(ax: "Axes", x: float, y: float) -> None:
    color = plotting.colors()[6]
    ax.plot([x], [y], "*", label="the plan", color=color, markersize=11, zorder=5)


def _mark_free(ax: "Axes", x: float, y: float) -> None:
    name = "cheapest to train"
    ax.plot([x], [y], "s", label=name, color="0.2", markersize=6, zorder=5)
