"""Parts of paged-memory figures: boxes, words, reference counts, arrows.

Coordinates are inches on one axis, y downwards. Each slot has a colour; a page has the
colours of the slots that read it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxkv import validation
from jaxkv.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_HEIGHT = 0.097
HALF_WIDTH = 0.47
"""Height of a line of text, and width of the first of two words in it."""
TEXT = 5.9
SMALL_FONT = 5.3
"""Font sizes of words in pages, and of small notes."""
GHOST = "0.72"
BOX_GREY = "0.45"
TEXT_COLOR = "0.1"
COPY = (0.835, 0.369, 0.0)  # the palette's vermilion


class Box(NamedTuple):
    """A rectangle in inches, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float


def draw_text(
    ax: "Axes", x: float, y: float, words: str, size: float, **look: Any
) -> None:
    """Writes dark text, vertically centred on a point; `look` overrides the style."""
    look.setdefault("color", TEXT_COLOR)
    look.setdefault("va", "center_baseline")
    ax.text(x, y, words, fontsize=size, **look)


def draw_reference_count(
    ax: "Axes", x: float, y: float, before: int, count: int
) -> None:
    """Draws the reference count of a page, with the previous one if it decreased."""
    fell = before > count > 0
    face = TEXT_COLOR if count > 1 else COPY if fell else "0.6"
    label = f"{before}→{count}" if fell else str(count)
    pad = {"boxstyle": "round,pad=0.22,rounding_size=0.6", "linewidth": 0}
    look = {"fontweight": "bold", "ha": "center", "color": "white"}
    draw_text(ax, x, y, label, 5.4, bbox=pad | {"facecolor": face}, **look)


def draw_tag(ax: "Axes", box: Box, words: str) -> None:
    """Draws a small flag on the upper edge of a page."""
    pad = {"boxstyle": "round,pad=0.15", "facecolor": COPY, "linewidth": 0}
    look = {"color": "white", "ha": "right", "va": "center", "bbox": pad}
    draw_text(ax, box.x + box.width - 0.05, box.y, words, 4.6, **look)


@validation.checks_numbers(slot=0)
def slot_color(slot: int) -> tuple[float, float, float]:
    """Returns the colour of a slot; the colours repeat after four slots."""
    palette = style.colors()
    return [palette[5], palette[3], palette[7], palette[1]][slot % 4]


def lighten(color: tuple[float, float, float]) -> tuple[float, ...]:
    """Lightens a colour for the background of text."""
    return tuple(0.8 + 0.2 * part for part in color)


def draw_rectangle(ax: "Axes", box: Box, **look: Any) -> None:
    """Draws a box; `look` has keywords of matplotlib patches."""
    from matplotlib.patches import Rectangle

    look = {"linewidth": 0.6} | look
    ax.add_patch(Rectangle((box.x, box.y), box.width, box.height, **look))


def fill_stripes(ax: "Axes", box: Box, slots: Sequence[int]) -> None:
    """Fills a box with the colours of several slots, in vertical stripes."""
    width = box.width / max(1, len(slots))
    for k, slot in enumerate(slots):
        band = box._replace(x=box.x + k * width, width=width)
        draw_rectangle(ax, band, facecolor=lighten(slot_color(slot)), linewidth=0)


def draw_frame(
    ax: "Axes", box: Box, slots: Sequence[int], *, copied: bool = False
) -> None:
    """Draws the edge of a page by its reading slots; a fresh copy is highlighted."""
    edge: object = (
        TEXT_COLOR if len(slots) > 1 else slot_color(slots[0]) if slots else "0.85"
    )
    strong = copied or len(slots) > 1
    look = {"linewidth": 1.1 if strong else 0.6 if slots else 0.5}
    draw_rectangle(
        ax, box, facecolor="none", edgecolor=COPY if copied else edge, **look
    )


def draw_words(
    ax: "Axes",
    box: Box,
    words: Sequence[str],
    *,
    bold: Sequence[int] = (),
    color: str = TEXT_COLOR,
) -> None:
    """Writes four words in two lines."""
    for k, word in enumerate(words):
        line, half = divmod(k, 2)
        x = box.x + 0.04 + half * HALF_WIDTH
        y = box.y + box.height / 2 + (line - 0.5) * LINE_HEIGHT
        weight = "bold" if k in bold else "normal"
        draw_text(ax, x, y, word, TEXT, color=color, fontweight=weight)


def draw_arrow(ax: "Axes", start: tuple, end: tuple, color: tuple) -> None:
    """Draws a curved arrow with horizontal ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    bend = (end[0] - start[0]) * 0.55
    control = [start, (start[0] + bend, start[1]), (end[0] - bend, end[1]), end]
    path = Path(control, [Path.MOVETO, *[Path.CURVE4] * 3])
    look = {"facecolor": "none", "edgecolor": color, "linewidth": 0.8, "alpha": 0.8}
    ax.add_patch(PathPatch(path, **look))
    ax.plot(*end, marker=">", markersize=2.2, color=color)
