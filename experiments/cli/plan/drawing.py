"""The figure of a plan: loss along budgets and over the plane, tokens per parameter."""

from typing import Any

import numpy as np

from experiments.cli.plan.command import Options
from experiments.plotting import style
from scaling.laws import TwoPowers, published
from scaling.plan import Case, budgets

_GREY = "0.6"
_SPAN = 30.0
"""How far the panels reach around the optimum's parameters."""
_CONTOURS = (0.9, 1.0, 1.15, 1.4, 1.8)
"""Of the loss above its floor, in those of the optimum."""


def render(options: Options, case: Case, told: dict[str, Any]) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""
    law = options.law.rpartition("/")[2]

    def draw(axes: Any) -> None:
        _draw_budgets(axes[0], case, told, law)
        _draw_plane(axes[1], case, told)
        _draw_ratios(axes[2], case, told, law)

    return style.render(draw, panels=(1, 3))


def _draw_budgets(ax: Any, case: Case, told: dict[str, Any], law: str) -> None:
    """Loss against parameters for a few budgets, and the optimum of each."""
    num_params, loss = told["num_params"], told["loss"]
    highest = loss
    for color, times in ((2, 0.01), (3, 0.1), (5, 1.0), (1, 10.0)):
        flops = case.flops * times
        sizes = num_params * np.geomspace(1 / _SPAN, _SPAN, 301)
        tokens = budgets.tokens_left(flops, sizes, case.served)
        sizes, tokens = sizes[tokens > 0], tokens[tokens > 0]
        if not sizes.size:
            continue
        losses, look = case.loss(sizes, tokens), {"color": style.colors()[color]}
        ax.plot(sizes, losses, linewidth=1.4 if times == 1 else 0.8, **look)
        least = int(np.argmin(losses))
        highest = max(highest, float(losses[least]))
        at, look = (sizes[least], losses[least]), {"ha": "center", **look}
        style.note(ax, f"{flops:.3g} FLOPs", at, (0, -7), fontsize=5, **look)
    _mark(ax, num_params, loss)
    floor = case.belief.powers.floor
    low = max(floor, loss - 0.8 * (highest - loss))
    ax.set_ylim(low, highest + 1.2 * (highest - loss))
    if floor > low - 0.1 * (loss - low):
        ax.axhline(floor, color=_GREY, linewidth=0.6, linestyle=":")
    ax.set(xscale="log", xlabel=f"parameters, {case.family.count}")
    ax.set(ylabel="loss [nats per token]", title=f"along a budget ({law})")


def _draw_plane(ax: Any, case: Case, told: dict[str, Any]) -> None:
    """Lines of equal loss, the budget, and the optima of all budgets."""
    num_params, num_tokens = told["num_params"], told["num_tokens"]
    powers, colors = case.belief.powers, style.colors()
    sizes = num_params * np.geomspace(1 / _SPAN, _SPAN, 121)
    tokens = num_tokens * np.geomspace(1 / _SPAN, _SPAN, 121)
    losses = case.loss(sizes[None, :], tokens[:, None])
    levels = [powers.floor + x * (told["loss"] - powers.floor) for x in _CONTOURS]
    lines = ax.contour(sizes, tokens, losses, levels, colors=_GREY, linewidths=0.7)
    ax.clabel(lines, fmt="%.3f", fontsize=5)
    left = budgets.tokens_left(case.flops, sizes, case.served)
    ax.plot(sizes[left > 0], left[left > 0], color=colors[5], label="the budget")
    free = told["compute_optimum"]
    flops = free["num_params"] * free["num_tokens"] * 6
    path = [
        budgets.allocate(powers, flops * times, repeating=case.repeating)[:2]
        for times in np.geomspace(_SPAN**-2, _SPAN**2, 61)
    ]
    look = {"color": "0.3", "linewidth": 0.8, "label": "cheapest to train"}
    ax.plot(*zip(*path, strict=True), "--", **look)
    if told["num_params_interval"] is not None:
        bar = {"color": colors[6], "linewidth": 2, "alpha": 0.6}
        ax.plot(told["num_params_interval"], [num_tokens] * 2, **bar)
        ax.plot([num_params] * 2, told["num_tokens_interval"], **bar)
    _mark(ax, num_params, num_tokens)
    if (unique := case.unique_tokens) is not None:
        ax.axhline(unique, color=colors[1], linewidth=0.8)
        where = {"ha": "right", "va": "bottom", "color": colors[1]}
        ax.annotate("all unique tokens", (sizes[-1], unique), **where)
    ax.set(xscale="log", yscale="log", xlim=sizes[[0, -1]], ylim=tokens[[0, -1]])
    ax.set(xlabel=f"parameters, {case.family.count}", ylabel="tokens")
    ax.set_title("equal loss, and the budget")
    ax.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none")


def _draw_ratios(ax: Any, case: Case, told: dict[str, Any], law: str) -> None:
    """Tokens per parameter against the budget, by law; each name on the right."""
    from matplotlib import ticker

    colors = style.colors()
    flops = case.flops * np.geomspace(1e-4, 1e2, 61)

    def line(powers: TwoPowers, name: str, how: Any, **look: Any) -> None:
        optima = [budgets.allocate(powers, x, **how) for x in flops.tolist()]
        ratios = [x.num_tokens / x.num_params for x in optima]
        ax.plot(flops, ratios, **look)
        look = {"fontsize": 5, "color": look["color"], "va": "center"}
        at = flops[-1], ratios[-1]
        ax.annotate(f" {name}", at, annotation_clip=False, **look)

    for name, constants in published.CONSTANTS.items():
        if name != case.belief.name:
            powers = budgets.two_powers(published.CHINCHILLA, constants)
            line(powers, name, {}, color=_GREY, linewidth=0.7)
    limit = {"repeating": case.repeating}
    line(case.belief.powers, law, limit, color=colors[5])
    if case.served:
        both = limit | {"inference_tokens": case.served}
        line(case.belief.powers, "with serving", both, color=colors[6])
    _mark(ax, case.flops, told["tokens_per_param"])
    ax.set(xscale="log", yscale="log", xlabel="budget [FLOP]")
    ax.set(ylabel="tokens per parameter", title="tokens per parameter")
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def _mark(ax: Any, x: float, y: float) -> None:
    ax.plot([x], [y], "*", color=style.colors()[6], markersize=7, zorder=5)
