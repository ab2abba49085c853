"""The figure of a plan: loss along budgets and over the plane, tokens per parameter."""

from typing import Any

import numpy as np

from experiments.cli.plan.case import Case
from experiments.cli.plan.find import Found
from experiments.plotting import style
from scaling.laws import published
from scaling.plan import budgets

PANELS = (1, 3)
_GREY, _DARK = "0.6", "0.3"
_SPAN = 30.0
"""How far the panels reach around the optimum's parameters."""
_CONTOURS = (0.9, 1.0, 1.15, 1.4, 1.8)
"""Of the loss above its floor, in those of the optimum."""


def render(case: Case, found: Found) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""
    return style.render(lambda axes: draw(axes, case, found), panels=PANELS)


def draw(axes: Any, case: Case, found: Found) -> None:
    """Draws on an array of three axes."""
    _draw_budgets(axes[0], case, found)
    _draw_plane(axes[1], case, found)
    _draw_ratios(axes[2], case, found)


def _draw_budgets(ax: Any, case: Case, found: Found) -> None:
    """Loss against parameters for a few budgets, and the optimum of each."""
    best = found.optimum
    sizes = best.num_params * np.geomspace(1 / _SPAN, _SPAN, 301)
    colors = [style.colors()[i] for i in (2, 3, 5, 1)]
    highest = best.loss
    for color, times in zip(colors, (0.01, 0.1, 1.0, 10.0), strict=True):
        flops = case.flops * times
        tokens = budgets.tokens_left(flops, sizes, case.served)
        there = tokens > 0
        if not there.any():
            continue
        losses = case.loss(sizes[there], tokens[there])
        is_ours = times == 1
        ax.plot(sizes[there], losses, color=color, linewidth=1.4 if is_ours else 0.8)
        least = int(np.argmin(losses))
        at = (sizes[there][least], float(losses[least]))
        ax.annotate(
            f"{flops:.3g} FLOPs",
            at,
            xytext=(0, -7),
            textcoords="offset points",
            ha="center",
            fontsize=5,
            color=color,
        )
        highest = max(highest, at[1])
    _mark(ax, best.num_params, best.loss)
    floor = case.belief.powers.floor
    low = max(floor, best.loss - 0.8 * (highest - best.loss))
    ax.set_ylim(low, highest + 1.2 * (highest - best.loss))
    if floor > low - 0.1 * (best.loss - low):
        ax.axhline(floor, color=_GREY, linewidth=0.6, linestyle=":")
    ax.set(xscale="log", xlabel=f"parameters, {case.family.count}")
    ax.set_ylabel("loss [nats per token]")
    ax.set_title(f"along a budget ({case.options.law.rpartition('/')[2]})")


def _draw_plane(ax: Any, case: Case, found: Found) -> None:
    """Lines of equal loss, the budget, and the optima of all budgets."""
    best, powers = found.optimum, case.belief.powers
    sizes = best.num_params * np.geomspace(1 / _SPAN, _SPAN, 121)
    tokens = best.num_tokens * np.geomspace(1 / _SPAN, _SPAN, 121)
    losses = case.loss(sizes[None, :], tokens[:, None])
    levels = [powers.floor + x * (best.loss - powers.floor) for x in _CONTOURS]
    lines = ax.contour(*(sizes, tokens, losses), levels, colors=_GREY, linewidths=0.7)
    ax.clabel(lines, fmt="%.3f", fontsize=5)
    left = budgets.tokens_left(case.flops, sizes, case.served)
    color = style.colors()[5]
    ax.plot(sizes[left > 0], left[left > 0], color=color, label="the budget")
    path = [
        budgets.allocate(powers, found.free[0] * found.free[1] * 6 * times)
        for times in np.geomspace(_SPAN**-2, _SPAN**2, 61)
    ]
    ax.plot(
        [x.num_params for x in path],
        [x.num_tokens for x in path],
        "--",
        color=_DARK,
        linewidth=0.8,
        label="cheapest to train",
    )
    if found.spread is not None:
        bar = {"color": style.colors()[6], "linewidth": 2, "alpha": 0.6}
        ax.plot(found.spread.params, [best.num_tokens] * 2, **bar)
        ax.plot([best.num_params] * 2, found.spread.tokens, **bar)
    _mark(ax, best.num_params, best.num_tokens)
    unique = case.options.unique_tokens
    if unique is not None:
        color = style.colors()[1]
        ax.axhline(unique, color=color, linewidth=0.8)
        at = (sizes[-1], unique)
        ax.annotate("all unique tokens", at, ha="right", va="bottom", color=color)
    ax.set(xscale="log", yscale="log", xlim=sizes[[0, -1]], ylim=tokens[[0, -1]])
    ax.set(xlabel=f"parameters, {case.family.count}", ylabel="tokens")
    ax.set_title("equal loss, and the budget")
    ax.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none")


def _draw_ratios(ax: Any, case: Case, found: Found) -> None:
    """Tokens per parameter against the budget, by law."""
    from matplotlib import ticker

    flops = case.flops * np.geomspace(1e-4, 1e2, 61)
    for name, constants in published.CONSTANTS.items():
        if name == case.belief.name:
            continue
        powers = budgets.two_powers(published.CHINCHILLA, constants)
        _draw_ratio(ax, flops, powers, name, color=_GREY, linewidth=0.7)
    ours = case.belief.powers
    name = case.options.law.rpartition("/")[2]
    _draw_ratio(ax, flops, ours, name, color=style.colors()[5])
    if case.served:
        served = {"inference_tokens": case.served}
        color = style.colors()[6]
        _draw_ratio(ax, flops, ours, "with serving", served, color=color)
    best = found.optimum
    _mark(ax, case.flops, best.num_tokens / best.num_params)
    ax.set(xscale="log", yscale="log", xlabel="budget [FLOP]")
    ax.set_ylabel("tokens per parameter")
    ax.set_title("tokens per parameter")
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def _draw_ratio(
    ax: Any,
    flops: np.ndarray,
    powers: published.TwoPowers,
    name: str,
    served: dict[str, float] | None = None,
    **look: Any,
) -> None:
    """One law's line, its name on the right."""
    optima = [budgets.allocate(powers, x, **(served or {})) for x in flops.tolist()]
    ratios = [x.num_tokens / x.num_params for x in optima]
    ax.plot(flops, ratios, **look)
    ax.annotate(
        f" {name}",
        (flops[-1], ratios[-1]),
        fontsize=5,
        color=look["color"],
        va="center",
        annotation_clip=False,
    )


def _mark(ax: Any, x: float, y: float) -> None:
    ax.plot([x], [y], "*", color=style.colors()[6], markersize=7, zorder=5)
