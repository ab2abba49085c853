"""Draws what is shared at the lengths of the paper, as simulated."""

from typing import Any

import numpy as np

from experiments.plotting import style
from experiments.serving.sharing.counted import Counted
from experiments.serving.sharing.published import DATA, SAMPLES, SPEED_UPS
from experiments.serving.sharing.translated import AT_MOST_S, SYSTEMS, Translated

GREY = "0.55"


def draw(ax: Any, counted: Counted, translated: Translated) -> None:
    """Draws figure 15a above, figure 16 below; `ax` gives way to them."""
    grid = ax.get_subplotspec().subgridspec(2, 2)
    figure = ax.figure
    ax.remove()
    for i, name in enumerate(dict.fromkeys(counted.lengths.tolist())):
        _draw_savings(figure.add_subplot(grid[0, i]), counted, name)
    for i in range(len(translated.prefix_tokens)):
        _draw_latency(figure.add_subplot(grid[1, min(i, 1)]), translated, i)


def _draw_savings(ax: Any, counted: Counted, name: str) -> None:
    """Bars of ours beside the paper's in grey; lines: what lengths alone say."""
    here = counted.lengths == name
    num, ours = counted.num_sequences[here], 100 * counted.saved_share[here]
    theirs = [100 * SAMPLES.get((name, n), np.nan) for n in num.tolist()]
    color = style.colors()[5 if name == "short" else 6]
    place = np.arange(len(num))
    bars = ((place - 0.2, theirs, GREY), (place + 0.2, ours, color))
    for x, height, fill in bars:
        ax.bar(x, height, 0.36, color=fill)
        for at, y in zip(x, height, strict=True):
            if np.isfinite(y):
                ax.text(at, y, f"{y:.1f}", ha="center", va="bottom", color=fill)
    expected = 100 * counted.expected_share[here]
    ax.plot(place + 0.2, expected, "_", color="black", markersize=14)
    ax.set_xticks(place, [str(n) for n in num])
    ax.margins(y=0.15)
    ax.set_xlabel("answers of a request")
    ax.set_ylabel("pages saved, %")
    ax.set_title(f"{DATA[name]}: the paper's, ours; dash: lengths alone", loc="left")


def _draw_latency(ax: Any, translated: Translated, i: int) -> None:
    """Latency against rate, as figure 16 has it."""
    colors = [style.colors()[k] for k in (1, 5)]
    for k, name in enumerate(SYSTEMS):
        curve, at_most = translated.latency_s[i, k], translated.at_most[i, k]
        rate = translated.rate[i]
        ax.plot(rate, curve, color=colors[k])
        ax.plot(at_most, AT_MOST_S, "o", color=colors[k])
        # The slower system's curve rises on the left, the other one's on the right.
        look: dict[str, Any] = {"xytext": (5, -9), "ha": "left"}
        if k:
            look = {"xytext": (-5, 4), "ha": "right"}
        said = f"{name}: {at_most:.1f}/s"
        place = (at_most, AT_MOST_S)
        ax.annotate(said, place, textcoords="offset points", color=colors[k], **look)
    ax.axhline(AT_MOST_S, color="0.8", linewidth=0.8, zorder=0)
    ax.set_ylim(0, 1)
    ax.set_xlabel("requests per second")
    ax.set_ylabel("latency, s a token")
    num = int(translated.prefix_tokens[i])
    title = f"{num} tokens in common: {translated.ratio[i]:.2f} times"
    if num in SPEED_UPS:
        title += f", the paper's {SPEED_UPS[num]}"
    ax.set_title(title, loc="left")
