"""Figure of `jaxkv cost`: breakdown of operations and memory, and rooflines."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from jaxkv import plotting
from jaxkv.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    draw_curve,
    draw_reference_line,
    draw_ridge,
    label_log_axis,
    render_figure,
    set_labels,
)
from scaling.cli.cost.case import CostCase
from scaling.costs import decode_work, forward_terms, prefill_work, training_memory

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

_RECOMPUTE_POLICIES = ("none", "selective", "boundary")
_CONTEXT_LENGTHS = (128, 1024, 8192)


def render_cost_figure(case: CostCase) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""

    def draw(axes: "np.ndarray") -> None:
        _flops(axes[0, 0], case)
        _memory(axes[0, 1], case)
        _decode(axes[1, 0], case)
        _prefill(axes[1, 1], case)

    return render_figure(draw, panels=(2, 2), size_inches=(3.4, 3.7))


def _flops(ax: "Axes", case: CostCase) -> None:
    """Draws the operations per token against the sequence length, stacked by part."""
    lengths = [2**x for x in range(8, 18)]
    parts: dict[str, list[float]] = {}
    for length in lengths:
        sums: Counter[str] = Counter()
        for term in case.evaluate(forward_terms, batch=1, sequence=length):
            part = "scores, values" if term.growth == "s^2" else _PART_NAMES[term.part]
            sums[part] += term.flops / length / 1e9
        for part, value in sums.items():
            parts.setdefault(part, []).append(value)
    order = [name for name in _PART_STYLES if name in parts]
    areas = ax.stackplot(
        lengths,
        [parts[name] for name in order],
        labels=order,
        colors=[plotting.colors()[_PART_STYLES[name][0]] for name in order],
        edgecolor="white",
        linewidth=0.5,
    )
    for area, name in zip(areas, order, strict=True):
        area.set_hatch(_PART_STYLES[name][1])
    draw_reference_line(ax, case.sequence, f"{case.sequence:,} tokens", along="y")
    ax.set_xscale("log", base=2)
    ax.set_xlim(lengths[0], lengths[-1])
    share = parts.get("scores, values", [0.0])[-1] / sum(x[-1] for x in parts.values())
    title = f"{case.model.name}: scores are {100 * share:.0f} % of the operations at "
    title += f"{lengths[-1]:,} tokens"
    set_labels(ax, title, "sequence [tokens]", "forward [GFLOP/token]")
    ax.legend(reverse=True)


_PART_NAMES = {
    "attention": "projections",
    "mlp": "FFN",
    "experts": "experts",
    "head": "head",
    "ahead": "ahead",
}
_PART_STYLES = {
    "head": (PURPLE, ""),
    "projections": (BLUE, ""),
    "FFN": (GREEN, "//"),
    "experts": (ORANGE, ".."),
    "scores, values": (RED, "\\\\"),
}
"""Colour and hatch of the parts."""


def _memory(ax: "Axes", case: CostCase) -> None:
    """Draws the training memory of the fullest device by checkpointing policy."""
    memories = [
        case.evaluate(training_memory, checkpointing=policy)
        for policy in _RECOMPUTE_POLICIES
    ]
    bottom = [0.0] * len(memories)
    groups = {
        "weights": ("weights",),
        "gradients": ("gradients",),
        "optimizer": ("master", "moments"),
        "activations": ("activations", "recomputed", "ends"),
        "logits": ("logits", "logits_gradient"),
    }
    looks = zip((1, 2, 3, 6, 7), ("", "//", "..", "\\\\", "xx"), strict=True)
    for (label, names), (color, hatch) in zip(groups.items(), looks, strict=True):
        heights = [sum(getattr(x, name) for name in names) / 1e9 for x in memories]
        look: dict[str, Any] = {"color": plotting.colors()[color], "hatch": hatch}
        look |= {"label": label, "width": 0.64, "edgecolor": "white"}
        ax.bar(_RECOMPUTE_POLICIES, heights, bottom=bottom, **look)
        bottom = [x + y for x, y in zip(bottom, heights, strict=True)]
    limit = case.device.memory_bytes / 1e9
    draw_reference_line(ax, limit, f"{case.device.name}, {limit:.0f} GB")
    number = case.layout.num_devices
    devices = "one device" if number == 1 else f"the fullest of {number:,} devices"
    title = f"{case.batch} x {case.sequence:,} tokens: {bottom[0]:,.0f} GB on {devices}"
    set_labels(ax, title, "checkpointing", "training memory [GB]")
    ax.legend()


def _decode(ax: "Axes", case: CostCase) -> None:
    """Draws the intensity of decoding against the batch, by context length."""
    batches = [2**x for x in range(13)]
    bound = []
    looks = zip(_CONTEXT_LENGTHS, (5, 1, 6), "osv", strict=True)
    for context, color, mark in looks:
        works = [case.evaluate(decode_work, batch=x, context=context) for x in batches]
        intensities = [work.intensity for work in works]
        look = {"marker": mark, "markevery": 2}
        draw_curve(ax, batches, intensities, color, f"context {context:,}", **look)
        bound += [context] if max(intensities) < case.ridge else []
    title = "Decoding by batch and context"
    if bound:
        title = f"Decoding at {min(bound):,} tokens is memory-bound at every batch"
    _roof(ax, case, batches, title, "batch [sequences]")


def _prefill(ax: "Axes", case: CostCase) -> None:
    """Draws the intensity of prefill against the prompt length."""
    lengths = [2**x for x in range(14)]
    works = [case.evaluate(prefill_work, batch=1, prompt=x) for x in lengths]
    intensities = [work.intensity for work in works]
    draw_curve(ax, lengths, intensities, 5, "one prompt", markevery=2)
    free = [x for x, y in zip(lengths, intensities, strict=True) if y > case.ridge]
    title = "Prefill is memory-bound at every length"
    if free:
        title = f"Prefill is compute-bound from {free[0]:,} tokens"
    _roof(ax, case, lengths, title, "prompt [tokens]")


def _roof(ax: "Axes", case: CostCase, sizes: list[int], title: str, x: str) -> None:
    """Draws the ridge: steps above it are compute-bound, below it memory-bound."""
    draw_ridge(ax, case.device.name, case.ridge)
    ax.set_xscale("log", base=2)
    y = "intensity [FLOP/byte]"
    set_labels(ax, title, x, y, yscale="log", xlim=(sizes[0], sizes[-1]))
    low, high = ax.get_ylim()
    ax.set_ylim(low, max(high, 3 * case.ridge))
    label_log_axis(ax.yaxis)
    ax.legend()
