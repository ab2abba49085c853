"""Draws frames of paged memory: logical pages, page table, physical pages."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.plotting import Box, boxes
from experiments.serving.page_tables import beam_drawing
from experiments.serving.page_tables.frames import Frames
from jaxkv.memory import NO_PAGE

SIZE_INCHES = (7.4, 15.35)

type Scene = tuple[str, Frames, tuple[str, ...]]
"""A title, the frames, and a name for each slot."""

_MARGIN = 0.1
_COLUMN, _GAP = 3.5, 0.2
_ROW, _THIN = 0.24, 0.09
"""Heights: of a page of two lines of text, of one that is never used."""
_PAGE = 1.22
"""Width of a page of two words a line."""
_LEGEND = (
    "Colour: sequence.   Black frame: shared page.   Number in a pill: references.   "
    "Bold: just written.   Italic: to be written next.   Pale: left in a free page."
)


def draw(ax: Any, scenes: Sequence[Scene], beams: Scene) -> None:
    """Draws scenes of requests, then one of beams, below each other.

    Args:
      ax: where to; it is made to fill the figure.
      scenes: one after the other, two frames side by side.
      beams: frames whose slots are the beams of one request.
    """
    total, bottom = SIZE_INCHES
    ax.set_position((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(-_MARGIN, total - _MARGIN)
    ax.set_ylim(bottom, 0)
    look = {"fontsize": 5.8, "color": boxes.GREY, "va": "top"}
    ax.text(0, 0.1, _LEGEND, **look)
    y = 0.36
    for number, (title, frames, names) in enumerate(scenes, 1):
        y = _title(ax, y, f"{number}  {title}")
        height = _scene_height(frames)
        for i, x, top in _grid(frames, y, height):
            _caption(ax, x, top, frames, i)
            _draw_tables(ax, x, top, frames, i, names)
        y += height * -(-len(frames.caption) // 2)
    title, frames, names = beams
    y = _title(ax, y, f"{len(scenes) + 1}  {title}")
    for i, x, top in _grid(frames, y, beam_drawing.HEIGHT):
        _caption(ax, x, top, frames, i)
        beam_drawing.draw(ax, x, top, frames, i, names, width=_COLUMN)


def _grid(
    frames: Frames, y: float, height: float
) -> Iterator[tuple[int, float, float]]:
    for i in range(len(frames.caption)):
        yield i, (i % 2) * (_COLUMN + _GAP), y + height * (i // 2)


def _title(ax: Any, y: float, text: str) -> float:
    ends = [0, 2 * _COLUMN + _GAP]
    ax.plot(ends, [y - 0.09] * 2, color="0.8", linewidth=0.5)
    ax.text(0, y, text, fontsize=8.5, fontweight="bold", va="top", color=boxes.INK)
    return y + 0.24


def _caption(ax: Any, x: float, y: float, frames: Frames, i: int) -> None:
    text = f"{chr(ord('a') + i)}   {frames.caption[i]}"
    ax.text(x, y, text, fontsize=6.8, va="top", color=boxes.INK)


def _scene_height(frames: Frames) -> float:
    pool = sum(_ROW if used else _THIN for used in frames.ever_used())
    slots = [s for s in range(frames.length.shape[1]) if frames.length[:, s].any()]
    rows = sum((frames.page_ids[:, s] != NO_PAGE).any(0).sum() for s in slots)
    return 0.34 + max(pool, rows * _ROW + len(slots) * 0.17 + 0.05) + 0.12


def _draw_tables(
    ax: Any, x: float, y: float, frames: Frames, i: int, names: Sequence[str]
) -> None:
    """One frame: each sequence's pages and table, lines to the pool, and the pool."""
    table_x, pool_x = x + _PAGE + 0.11, x + _COLUMN - _PAGE - 0.2
    top = y + 0.31
    heads = ((x + _PAGE / 2, "logical pages"), (table_x + 0.04, "page"))
    heads += ((table_x + 0.3, "filled"), (pool_x + _PAGE / 2, "physical pages"))
    for place, head in heads:
        look = {"fontsize": boxes.SMALL, "color": boxes.GREY, "ha": "center"}
        ax.text(place, top - 0.04, head, **look)
    places = _draw_pool(ax, pool_x, top, frames, i)
    at = top
    for slot, name in enumerate(names):
        if not frames.length[:, slot].any():
            continue
        at = _draw_slot(ax, x, table_x, at, frames, i, slot, name, places)


def _draw_slot(
    ax: Any,
    x: float,
    table_x: float,
    y: float,
    frames: Frames,
    i: int,
    slot: int,
    name: str,
    places: dict[int, tuple[float, float]],
) -> float:
    """A sequence's logical pages, and the table's rows beside them."""
    color, size = boxes.colors(slot), frames.held.shape[2]
    length, tokens = int(frames.length[i, slot]), frames.tokens[i, slot]
    if length:
        look = {"fontsize": 6.5, "fontweight": "bold", "va": "center"}
        ax.text(x, y + 0.075, name, color=color, **look)
        if tokens[length] >= 0:
            said = f"next: {frames.words[tokens[length]]}"
            look = {"fontsize": boxes.SMALL, "style": "italic", "color": boxes.GREY}
            ax.text(x + _PAGE, y + 0.075, said, ha="right", va="center", **look)
    y += 0.15
    before = frames.filled(i - 1, slot) if i else []
    rows = zip(frames.pages(i, slot), frames.filled(i, slot), strict=True)
    for column, (page, filled) in enumerate(rows):
        box = Box(x, y, _PAGE, _ROW - 0.03)
        boxes.rectangle(ax, box, facecolor=boxes.pale(color), edgecolor=color)
        start = column * size
        old = before[column] if column < len(before) else 0
        words = [str(frames.words[t]) for t in tokens[start : start + filled]]
        boxes.words(ax, box, words, bold=range(old, filled) if i else ())
        middle = y + box.height / 2
        look = {"va": "center_baseline", "ha": "center", "color": boxes.INK}
        ax.text(table_x + 0.04, middle, str(page), fontsize=6.6, **look)
        grew = f"{old} → {filled}" if old and old != filled else str(filled)
        ax.text(table_x + 0.3, middle, grew, fontsize=6, **look)
        end_x, end_y = places[page]
        # Lines to a shared page end side by side.
        end_y += 0.035 * (slot - 0.5) if frames.ref[i, page] > 1 else 0
        boxes.arrow(ax, (table_x + 0.46, middle), (end_x - 0.14, end_y), color)
        y += _ROW
    return y + 0.02


def _draw_pool(
    ax: Any, x: float, y: float, frames: Frames, i: int
) -> dict[int, tuple[float, float]]:
    """All physical pages; returns where the line to each one ends."""
    places = {}
    for page, used in enumerate(frames.ever_used()):
        height = (_ROW if used else _THIN) - 0.03
        box = Box(x, y, _PAGE, height)
        places[page] = (x, y + height / 2)
        _draw_page(ax, box, frames, i, page)
        number = {"ha": "right", "va": "center_baseline", "fontsize": 6}
        color = boxes.INK if frames.ref[i, page] else boxes.GHOST
        ax.text(x - 0.03, y + height / 2, str(page), color=color, **number)
        y += _ROW if used else _THIN
    return places


def _draw_page(ax: Any, box: Box, frames: Frames, i: int, page: int) -> None:
    """A physical page in the colours of its owners, its words read from K."""
    owners = frames.owners(i, page)
    boxes.stripes(ax, box, owners)
    held = frames.held[i, page]
    words = [str(frames.words[t]) if t >= 0 else "" for t in held]
    copied = int(frames.copied[i, page])
    if not owners:
        boxes.rectangle(ax, box, facecolor="none", edgecolor="0.85", linewidth=0.5)
        boxes.words(ax, box, words, color=boxes.GHOST)
        return
    boxes.frame(ax, box, owners, copied=copied >= 0)
    old = frames.held[max(i - 1, 0), page if copied < 0 else copied]
    bold = (held != old).nonzero()[0].tolist()
    boxes.words(ax, box, words, bold=bold)
    before = int(frames.ref[i - 1, page]) if i else 0
    count = int(frames.ref[i, page])
    right = box.x + box.width + (0.12 if before > count else 0.09)
    boxes.badge(ax, right, box.y + box.height / 2, before, count)
    if copied >= 0:
        boxes.tag(ax, box, f"copy of {copied}")
