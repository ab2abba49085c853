"""Draws frames of beams that share pages, and the pool below."""

from collections.abc import Sequence
from typing import Any

from experiments.plotting import Box, boxes
from experiments.serving.page_tables.frames import Frames
from jaxkv.memory import NO_PAGE

_LABEL, _THIN = 0.55, 0.06
"""Widths: of what stands before the pages, of a page in the pool that is never used."""
_ROW, _LINE = 0.39, 0.08
"""Heights: of a beam, of a line of text."""

HEIGHT = 4 * _ROW + 0.83
"""Of a frame of four beams, in inches."""


def draw(
    ax: Any,
    x: float,
    y: float,
    frames: Frames,
    i: int,
    names: Sequence[str],
    *,
    width: float,
) -> None:
    """Draws a frame of beams; each physical page once, across those that share it.

    Args:
      ax: where to, in inches, y downwards.
      x: left edge.
      y: upper edge, where the caption stands.
      frames: states whose slots are the beams of one request.
      i: which of them.
      names: names of the beams.
      width: inches to fill.
    """
    top, left = y + 0.22, x + _LABEL
    num = frames.length.shape[1]
    num_columns = int((frames.page_ids != NO_PAGE).any((0, 1)).sum())
    page_width = (width - _LABEL) / num_columns
    for slot in range(num):
        look = {"fontsize": 6.2, "fontweight": "bold", "va": "center_baseline"}
        middle = top + (slot + 0.5) * _ROW
        name = f"beam {names[slot]}"
        ax.text(x, middle - 0.07, name, color=boxes.colors(slot), **look)
        word = frames.words[frames.tokens[i, slot, frames.length[i, slot]]]
        look = {"style": "italic", "color": boxes.GREY, "va": "center_baseline"}
        ax.text(x, middle + 0.06, word, fontsize=boxes.SMALL, **look)
    for column in range(num_columns):
        first = 0
        for slot in range(1, num + 1):
            ids = frames.page_ids[i, :, column]
            if slot < num and ids[slot] == ids[first]:
                continue
            height = (slot - first) * _ROW - 0.05
            if ids[first] != NO_PAGE:
                place = (left + column * page_width, top + first * _ROW)
                _beam_page(
                    ax,
                    Box(*place, page_width - 0.05, height),
                    *(frames, i, int(ids[first]), range(first, slot)),
                )
            first = slot
    _pool_strip(ax, x, top + num * _ROW + 0.08, frames, i, width)


def _beam_page(
    ax: Any, box: Box, frames: Frames, i: int, page: int, slots: range
) -> None:
    """A physical page across the rows of the beams that read it."""
    for k, slot in enumerate(slots):
        height = box.height / len(slots)
        band = box._replace(y=box.y + k * height, height=height)
        boxes.rectangle(ax, band, facecolor=boxes.pale(boxes.colors(slot)), linewidth=0)
    boxes.frame(ax, box, slots)
    held = [t for t in frames.held[i, page] if t >= 0]
    # What stands beyond the length was left by the last owner of the page.
    first = slots[0]
    column = frames.page_ids[i, first].tolist().index(page)
    held = held[: frames.filled(i, first)[column]]
    middle = box.y + box.height / 2
    start = middle - (len(held) - 1) / 2 * _LINE
    newest = int(frames.length[i, first]) - 1 - column * frames.held.shape[2]
    for k, token in enumerate(held):
        look = {"fontsize": 5.3, "va": "center_baseline", "color": boxes.INK}
        look |= {"fontweight": "bold"} if k == newest else {}
        place = (box.x + 0.03, start + k * _LINE)
        ax.text(*place, str(frames.words[token]), **look)
    corner = {"fontsize": 5.6, "fontweight": "bold", "ha": "right", "color": boxes.GREY}
    ax.text(box.x + box.width - 0.03, box.y + 0.03, str(page), va="top", **corner)


def _pool_strip(
    ax: Any, x: float, y: float, frames: Frames, i: int, total: float
) -> None:
    """All physical pages in a row: id, colours, reference count."""
    used = frames.ever_used()
    num = sum(used)
    width = (total - _LABEL - (len(used) - num) * _THIN) / num
    look = {"fontsize": boxes.SMALL, "color": boxes.GREY, "va": "center_baseline"}
    ax.text(x, y + 0.1, "pool", **look)
    ax.text(x, y + 0.32, "uses", **look)
    left = x + _LABEL
    for page, is_used in enumerate(used):
        box = Box(left, y, (width if is_used else _THIN) - 0.05, 0.2)
        left += box.width + 0.05
        if not is_used:
            boxes.rectangle(ax, box, facecolor="none", edgecolor="0.85", linewidth=0.5)
            continue
        count = int(frames.ref[i, page])
        owners = frames.owners(i, page)
        boxes.stripes(ax, box, owners)
        boxes.frame(ax, box, owners)
        middle = box.x + box.width / 2
        ink = {"ha": "center", "va": "center_baseline", "fontsize": 6}
        color = boxes.INK if count else boxes.GHOST
        ax.text(middle, y + 0.1, str(page), color=color, **ink)
        before = int(frames.ref[i - 1, page]) if i else count
        if count:
            boxes.badge(ax, middle, y + 0.32, before, count)
        else:
            said = f"{before}→0" if before else "free"
            color = boxes.COPY if before else boxes.GHOST
            ax.text(middle, y + 0.32, said, color=color, **ink | {"fontsize": 5.4})
