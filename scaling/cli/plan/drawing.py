"""Figure of a plan: loss by budget, contours over N and D, tokens per parameter."""

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv import plotting
from jaxkv.plotting import (
    FONT_POINTS,
    draw_curve,
    draw_reference_line,
    label_log_axis,
    render_figure,
    set_labels,
)
from scaling.cli.plan.options import PlanOptions
from scaling.laws import CHINCHILLA, CONSTANTS, Optimum, TwoPowers
from scaling.plan import PlanCase, allocate_budget, law_two_powers, tokens_left

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "0.6"
_SPAN = 30.0
"""Range of the panels around the optimum's parameters, as a factor."""
_CONTOURS = (0.9, 1.0, 1.15, 1.4, 1.8)
"""Contour levels of the loss above its floor, relative to the optimum."""


def render_plan_figure(
    options: PlanOptions, case: PlanCase, document: dict[str, Any]
) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""
    law = options.law.rpartition("/")[2]

    def draw(axes: np.ndarray) -> None:
        _draw_budgets(axes[0], case, document, law)
        _draw_plane(axes[1], case, document)
        _draw_ratios(axes[2], case, document, law)

    return render_figure(draw, panels=(3, 1), size_inches=(6.8, 3.2))


def _draw_budgets(
    ax: "Axes", case: PlanCase, document: dict[str, Any], law: str
) -> None:
    """Draws loss against parameters for a few budgets, and the optimum."""
    num_params = document["num_params"]
    loss = document["loss"]
    highest = loss
    looks = zip((0.01, 0.1, 1.0, 10.0), (2, 3, 5, 1), "s^od", strict=True)
    for times, color, mark in looks:
        flops = case.flops * times
        sizes = num_params * np.geomspace(1 / _SPAN, _SPAN, 301)
        tokens = tokens_left(flops, sizes, case.served)
        sizes = sizes[tokens > 0]
        tokens = tokens[tokens > 0]
        if not sizes.size:
            continue
        losses = case.loss(sizes, tokens)
        look = {
            "marker": mark,
            "markevery": 60,
            "linewidth": 2.2 if times == 1 else 1.2,
        }
        draw_curve(ax, sizes, losses, color, f"{flops:.3g} FLOP", **look)
        highest = max(highest, float(losses.min()))
    _mark(ax, num_params, loss)
    floor = float(case.loss_model.powers.floor)
    low = max(floor, loss - 0.8 * (highest - loss))
    ax.set_ylim(low, highest + 1.2 * (highest - loss))
    if floor > low - 0.1 * (loss - low):
        draw_reference_line(ax, floor, "floor of the law")
    title = f"{case.flops:.3g} FLOP are best spent on {num_params:.3g} parameters "
    title += f"({law}): {loss:.3f} nats/token"
    x = f"parameters, {case.family.count} [1]"
    y = "loss [nats/token]"
    set_labels(ax, title, x, y, xscale="log")
    ax.legend()


def _draw_plane(ax: "Axes", case: PlanCase, document: dict[str, Any]) -> None:
    """Draws contours of the loss, the budget, and the optima of all budgets."""
    num_params = document["num_params"]
    num_tokens = document["num_tokens"]
    powers = case.loss_model.powers
    colors = plotting.colors()
    sizes = num_params * np.geomspace(1 / _SPAN, _SPAN, 121)
    tokens = num_tokens * np.geomspace(1 / _SPAN, _SPAN, 121)
    losses = case.loss(sizes[None, :], tokens[:, None])
    levels = [powers.floor + x * (document["loss"] - powers.floor) for x in _CONTOURS]
    # Set the scales first, because the contour labels depend on them.
    ax.set(xscale="log", yscale="log", xlim=sizes[[0, -1]], ylim=tokens[[0, -1]])
    lines = ax.contour(sizes, tokens, losses, levels, colors=_GREY, linewidths=1)
    ax.clabel(lines, fmt="%.2f", fontsize=FONT_POINTS)
    ax.plot([], [], color=_GREY, linewidth=1, label="equal loss [nats/token]")
    left = tokens_left(case.flops, sizes, case.served)
    draw_curve(ax, sizes[left > 0], left[left > 0], 5, "the budget", marker="")
    free = document["compute_optimum"]
    flops = free["num_params"] * free["num_tokens"] * 6
    path = [
        allocate_budget(powers, flops * times, repeating=case.repeating)[:2]
        for times in np.geomspace(_SPAN**-2, _SPAN**2, 61)
    ]
    ax.plot(
        *zip(*path, strict=True),
        "--",
        color="0.2",
        linewidth=1.2,
        label="cheapest to train",
    )
    if document["num_params_interval"] is not None:
        for x, y in (
            (document["num_params_interval"], [num_tokens] * 2),
            ([num_params] * 2, document["num_tokens_interval"]),
        ):
            ax.plot(x, y, color=colors[6], linewidth=3, alpha=0.6)
    _mark(ax, num_params, num_tokens)
    if (unique := case.unique_tokens) is not None:
        ax.axhline(unique, color=colors[1], linewidth=1.2, label="all unique tokens")
    ax.set(xlim=sizes[[0, -1]], ylim=tokens[[0, -1]])
    title = f"The optimum: {num_params:.3g} parameters, {num_tokens:.3g} tokens"
    x = f"parameters, {case.family.count} [1]"
    y = "training data [tokens]"
    set_labels(ax, title, x, y)
    ax.legend()


def _draw_ratios(
    ax: "Axes", case: PlanCase, document: dict[str, Any], law: str
) -> None:
    """Draws tokens per parameter against the budget, by law."""
    flops = case.flops * np.geomspace(1e-4, 1e2, 61)

    def line(
        powers: TwoPowers,
        name: str,
        color: int,
        allocate: Callable[..., Optimum] = allocate_budget,
        **look: Any,
    ) -> None:
        optima = [allocate(powers, x) for x in flops.tolist()]
        ratios = [x.num_tokens / x.num_params for x in optima]
        draw_curve(ax, flops, ratios, color, name, markevery=15, **look)

    looks = itertools.cycle(
        zip((0, 1, 3, 7, 2), "v^sdP", ("--", "-.", ":", "--", "-."), strict=True)
    )
    for name, constants in CONSTANTS.items():
        if name != case.loss_model.name:
            powers = law_two_powers(CHINCHILLA, constants)
            color, mark, dash = next(looks)
            line(powers, name, color, marker=mark, linestyle=dash, linewidth=1.2)
    limit = functools.partial(allocate_budget, repeating=case.repeating)
    line(case.loss_model.powers, law, 5, limit, linewidth=2.2, marker="o")
    if case.served:
        both = functools.partial(limit, inference_tokens=case.served)
        line(case.loss_model.powers, "with serving", 6, both, marker="X")
    _mark(ax, case.flops, document["tokens_per_param"])
    ratio = document["tokens_per_param"]
    title = f"{ratio:.3g} tokens per parameter at {case.flops:.3g} FLOP"
    x = "budget [FLOP]"
    y = "data / size [tokens per parameter]"
    set_labels(ax, title, x, y, xscale="log", yscale="log")
    label_log_axis(ax.yaxis)
    ax.legend()


def _mark(ax: "Axes", x: float, y: float) -> None:
    ax.plot(
        [x],
        [y],
        "*",
        label="the plan",
        color=plotting.colors()[6],
        markersize=11,
        zorder=5,
    )
