"""Draws what is shared: savings in charts, page tables as a picture."""

from typing import Any

import numpy as np

from experiments.plotting import Box, boxes, style
from experiments.serving.sharing.groups import Readings, Savings
from experiments.serving.sharing.picture import Picture
from experiments.serving.sharing.prefixes import Prefixes
from experiments.serving.sharing.published import BEAMS, SAMPLES
from jaxkv.memory import NO_PAGE

SIZE_INCHES = (7.2, 6.5)
GREY, INK = "0.55", "0.15"

_TITLE, _GAP = 0.95, 0.35
"""Heights above and below a scene, in rows."""
_MAX_CHARS = 18
"""Of a page's text; more would leave the page."""
_FIRST_FOREIGN = "\N{LATIN SMALL LETTER TURNED A}"
"""Beyond European letters a font may have no sign."""
_SHADES = ("#eef3f8", "#c6dcec", "#8fbfe0", "#0072b2")
"""Fills of pages of one reader, of two, of three, and of four."""


def draw(
    ax: Any,
    samples: Savings,
    beams: Savings,
    readings: Readings,
    prefixes: Prefixes,
    picture: Picture,
) -> None:
    """Draws charts above and page tables below; `ax` gives way to them."""
    del readings  # a count that is what it should be is no picture
    grid = ax.get_subplotspec().subgridspec(2, 3, height_ratios=(1, 2.05))
    figure = ax.figure
    ax.remove()
    left, middle, right = (figure.add_subplot(grid[0, i]) for i in range(3))
    _draw_savings(left, samples, SAMPLES)
    left.set_title("several answers: the prompt is shared", loc="left")
    left.set_xlabel("answers of a request")
    _draw_savings(middle, beams, BEAMS)
    _draw_bound(middle, beams)
    middle.set_title("beam search: answers, too", loc="left")
    middle.set_xlabel("beams of a request")
    _draw_prefixes(right, prefixes)
    right.set_title("common beginnings: found again", loc="left")
    _draw_tables(figure.add_subplot(grid[1, :]), picture)


def _draw_savings(
    ax: Any, savings: Savings, published: dict[tuple[str, int], float]
) -> None:
    """Ours in colour, what follows from lengths as a line, the paper's in grey."""
    palette = style.colors()
    labels: list[tuple[str, Any]] = [("the paper's", GREY)]
    for name, color in (("long", palette[6]), ("short", palette[5])):
        theirs = [(n, 100 * y) for (kind, n), y in published.items() if kind == name]
        look: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":", "zorder": 1}
        ax.plot(*zip(*theirs, strict=True), "D", color=GREY, markersize=2.6, **look)
        here = savings.lengths == name
        if not here.any():
            continue
        num, ours = savings.num_sequences[here], 100 * savings.saved_share[here]
        expected = 100 * savings.expected_share[here]
        is_drawn = bool(np.isfinite(expected).all())
        ax.plot(num, expected if is_drawn else ours, color=color, linewidth=0.9)
        ax.plot(num, ours, "o", color=color, markersize=4)
        tokens = savings.mean_prompt[here].mean(), savings.mean_answer[here].mean()
        text = f"{name}: {tokens[0]:.0f} + {tokens[1]:.0f} tokens"
        labels.append((text, color))
    if np.isfinite(savings.expected_share).any():
        look = {"transform": ax.transAxes, "fontsize": 6, "va": "top", "color": INK}
        ax.text(0.03, 0.98, "points: counted\nlines: what\nlengths alone say", **look)
    ax.margins(x=0.08)
    ax.set_ylim(0)
    ax.set_ylabel("pages saved, %")
    if savings.num_sequences.size:
        ax.set_xticks(sorted({*savings.num_sequences.tolist(), 2, 4, 6}))
    look = {"transform": ax.transAxes, "fontsize": 6, "ha": "right", "va": "bottom"}
    for i, (text, color) in enumerate(labels):
        ax.text(1, 0.015 + 0.068 * i, text, color=color, **look)


def _draw_bound(ax: Any, savings: Savings) -> None:
    """All pages but those of one sequence."""
    if savings.num_sequences.size:
        num = np.linspace(2, savings.num_sequences.max())
        ax.plot(num, 100 - 100 / num, color="0.8", linewidth=0.8, zorder=0)
        look = {"color": "0.65", "fontsize": 6, "ha": "right", "va": "bottom"}
        ax.set_ylim(0, 100)
        at = {"xytext": (0, 2), "textcoords": "offset points"}
        ax.annotate("at most (n - 1) / n", (num[-1], 100 - 100 / num[-1]), **at, **look)


def _draw_prefixes(ax: Any, prefixes: Prefixes) -> None:
    """What is left of pages, prompt tokens and steps, in per cent."""
    colors = [style.colors()[i] for i in (5, 3, 1)]
    ax.set_xlim(0, 100)
    ax.set_xlabel("with a prefix cache, % of without")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.set_yticks([])
    for i, num in enumerate(prefixes.prefix_tokens.tolist()):
        rows, steps = prefixes.prompt_rows[i], prefixes.steps[i]
        shares = {
            "pages": 1 - prefixes.saved_share[i],
            "prompt tokens computed": rows[1] / rows[0],
            "steps": steps[1] / steps[0],
        }
        top = 5 * i
        speed = f"{num} tokens: {prefixes.speed_ups[i, 1]:.2f} times the tokens/s"
        ax.text(0, top - 0.75, speed, va="center", color=INK)
        for k, (label, share) in enumerate(shares.items()):
            ax.barh(top + k, 100 * share, 0.86, color=colors[k])
            said = f" {100 * share:.0f}  {label}"
            inside = share > 0.45
            look = {"va": "center_baseline", "fontsize": 6}
            ink = "white" if inside else INK
            side = {"ha": "right" if inside else "left", "color": ink}
            said = f"{label}  {100 * share:.0f} " if inside else said
            ax.text(100 * share, top + k, said, **side, **look)
    ax.set_ylim(max(1, 5 * len(prefixes.prefix_tokens)) - 2.3, -1.4)


def _draw_tables(ax: Any, picture: Picture) -> None:
    """Sequences as rows, their pages in token order; a page is drawn once."""
    ax.set_axis_off()
    scenes, rows, columns = picture.page_ids.shape
    height = _TITLE + rows + _GAP
    ax.set_xlim(0, max(columns, 1))
    ax.set_ylim(max(scenes, 1) * height - _GAP, 0)
    for i in range(scenes):
        top = i * height + _TITLE
        logical, pages = picture.num_pages(i)
        look = {"va": "bottom", "fontsize": 8, "color": INK}
        ax.text(0, top - 0.16, str(picture.title[i]), **look)
        said = f"{logical} logical pages in {pages} physical ones"
        ax.text(columns, top - 0.16, said, ha="right", **look | {"fontsize": 7})
        # Those that share a page stand together: whoever shares one shares all before.
        order = sorted(range(rows), key=lambda row: picture.page_ids[i, row].tolist())
        for column in range(columns):
            _draw_column(ax, picture, i, order, column, top)


def _draw_column(
    ax: Any, picture: Picture, scene: int, order: list[int], column: int, top: float
) -> None:
    """One column of pages, those of several readers as high as these."""
    ids = picture.page_ids[scene, order, column].tolist()
    for page in dict.fromkeys(ids):
        if page == NO_PAGE:
            continue
        first, readers = ids.index(page), ids.count(page)
        row = order[first]
        filled = int(picture.num_filled[scene, order, column][first])
        size = int(picture.num_filled[scene].max())
        text = str(picture.text[scene, row, column])
        _draw_page(ax, column, top + first, readers, filled / size, text, page)


def _drawable(char: str) -> str:
    """Stands for a character: line ends show, and what the font may lack is a dot."""
    if char == "\n":
        return "↵"
    return char if char.isprintable() and char < _FIRST_FOREIGN else "·"


def _draw_page(
    ax: Any, x: float, y: float, readers: int, filled: float, text: str, page: int
) -> None:
    shade = _SHADES[min(readers, len(_SHADES)) - 1]
    left, top, width, height = x + 0.012, y + 0.05, 0.976, readers - 0.1
    box = Box(left, top, width, height)
    full = box._replace(width=width * filled)
    boxes.rectangle(ax, full, facecolor=shade, linewidth=0)
    look = {"facecolor": "none", "edgecolor": _SHADES[3], "linewidth": 0.5}
    boxes.rectangle(ax, box, **look)
    dark = readers >= len(_SHADES)
    shown = "".join(map(_drawable, text[:_MAX_CHARS]))
    middle = y + readers / 2
    words: dict[str, Any] = {
        "family": "DejaVu Sans Mono",
        "fontsize": 6.1,
        "va": "center_baseline",
    }
    ink = "white" if dark else INK
    ax.text(left + 0.02, middle - 0.14, shown, color=ink, **words)
    small = {"fontsize": 4.6, "va": "center_baseline", "ha": "right"}
    said = f"page {page}" if readers == 1 else f"page {page}, {readers} readers"
    ink = "white" if dark else GREY if readers == 1 else INK
    ax.text(left + width - 0.02, middle + 0.26, said, color=ink, **small)
