"""Draws frames of paged memory: logical pages, page table and physical pages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments import lab
from experiments.serving.page_tables import beam_drawing
from experiments.serving.page_tables.frames import Frames

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.4, 15.35)

type Scene = tuple[str, Frames, tuple[str, ...]]
"""Title, frames, and the name of each slot."""

_FIGURE_MARGIN = 0.1
_COLUMN = 3.5
_BOX_GAP = 0.2
_ROW_HEIGHT = 0.24
_THIN = 0.09
"""Heights: of a page with 2 lines of text, and of a page that is never used."""
_PAGE_WIDTH = 1.22
"""Width of a page with 2 words a line."""
_LEGEND = (
    "Colour: sequence.   Black frame: shared page.   Number in a pill: references.   "
    "Bold: just written.   Italic: to be written next.   Pale: left in a free page."
)


def draw_scenes(ax: "Axes", scenes: Sequence[Scene]) -> None:
    """Draws scenes from top to bottom, with 2 frames per row.

    Args:
      ax: axes, resized to fill the figure.
      scenes: scenes of requests, then one whose slots are the beams of one request.
    """
    width, bottom = SIZE_INCHES
    ax.set_position((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(-_FIGURE_MARGIN, width - _FIGURE_MARGIN), ylim=(bottom, 0))
    lab.draw_text(ax, 0, 0.1, _LEGEND, 5.8, color=lab.BOX_GREY, va="top")
    y = 0.36
    for number, (title, frames, names) in enumerate(scenes, 1):
        is_beams = number == len(scenes)
        ax.plot([0, 2 * _COLUMN + _BOX_GAP], [y - 0.09] * 2, color="0.8", linewidth=0.5)
        lab.draw_text(ax, 0, y, f"{number}  {title}", 8.5, fontweight="bold", va="top")
        y += 0.24
        height = beam_drawing.HEIGHT
        if not is_beams:
            # Height of the taller of sequences and pool over all frames.
            pool = sum(_ROW_HEIGHT if used else _THIN for used in frames.ever_used())
            pages = -(-frames.length.max(axis=0) // frames.held.shape[2])
            sequences = 0.05 + sum(num * _ROW_HEIGHT + 0.17 for num in pages if num)
            height = 0.46 + max(pool, sequences)
        for i, caption in enumerate(frames.caption):
            x = (i % 2) * (_COLUMN + _BOX_GAP)
            top = y + height * (i // 2)
            lab.draw_text(ax, x, top, f"{'abcd'[i]}   {caption}", 6.8, va="top")
            if is_beams:
                beam_drawing.draw_beams(
                    ax, x, top + 0.22, frames, i, names, width=_COLUMN
                )
            else:
                _draw_frame(ax, x, top + 0.31, frames, i, names)
        y += height * -(-len(frames.caption) // 2)


def _draw_frame(
    ax: "Axes", x: float, y: float, frames: Frames, i: int, names: Sequence[str]
) -> None:
    """Draws a frame: pages and table of each sequence, lines to the pool, the pool."""
    table_x = x + _PAGE_WIDTH + 0.11
    pool_x = x + _COLUMN - _PAGE_WIDTH - 0.2
    for place, head in (
        (x + _PAGE_WIDTH / 2, "logical pages"),
        (table_x + 0.04, "page"),
        (table_x + 0.3, "filled"),
        (pool_x + _PAGE_WIDTH / 2, "physical pages"),
    ):
        look = {"color": lab.BOX_GREY, "ha": "center", "va": "baseline"}
        lab.draw_text(ax, place, y - 0.04, head, lab.SMALL_FONT, **look)
    pool = {}
    top = y
    for page, used in enumerate(frames.ever_used()):
        box = lab.Box(pool_x, top, _PAGE_WIDTH, (_ROW_HEIGHT if used else _THIN) - 0.03)
        _draw_page(ax, box, frames, i, page)
        pool[page] = box
        top += box.height + 0.03
    for slot, name in enumerate(names):
        if frames.length[:, slot].any():
            y = _draw_slot(ax, x, y, frames, i, slot, name, pool)


def _draw_slot(
    ax: "Axes",
    x: float,
    y: float,
    frames: Frames,
    i: int,
    slot: int,
    name: str,
    pool: dict[int, lab.Box],
) -> float:
    """Draws a sequence's logical pages and table rows; returns the lower edge."""
    color = lab.slot_color(slot)
    size = frames.held.shape[2]
    table_x = x + _PAGE_WIDTH + 0.11
    length = int(frames.length[i, slot])
    texts = frames.words_of(frames.tokens[i, slot])
    if length:
        look = {"fontweight": "bold", "va": "center"}
        lab.draw_text(ax, x, y + 0.075, name, 6.5, color=color, **look)
        if texts[length]:
            look = {"style": "italic", "color": lab.BOX_GREY, "ha": "right"}
            where = (
                x + _PAGE_WIDTH,
                y + 0.075,
                f"next: {texts[length]}",
                lab.SMALL_FONT,
            )
            lab.draw_text(ax, *where, va="center", **look)
    y += 0.15
    before = int(frames.length[i - 1, slot]) if i else 0
    pages = zip(frames.pages(i, slot), frames.filled(i, slot), strict=True)
    for start, (page, filled) in zip(range(0, length, size), pages, strict=True):
        box = lab.Box(x, y, _PAGE_WIDTH, _ROW_HEIGHT - 0.03)
        lab.draw_rectangle(ax, box, facecolor=lab.lighten(color), edgecolor=color)
        old = min(max(before - start, 0), size)
        words = texts[start : start + filled]
        lab.draw_words(ax, box, words, bold=range(old, filled) if i else ())
        middle = y + box.height / 2
        lab.draw_text(ax, table_x + 0.04, middle, str(page), 6.6, ha="center")
        grew = f"{old} → {filled}" if old and old != filled else str(filled)
        lab.draw_text(ax, table_x + 0.3, middle, grew, 6, ha="center")
        end = pool[page]
        # Lines to a shared page end at different heights.
        offset = 0.035 * (slot - 0.5) if frames.ref[i, page] > 1 else 0
        end_y = end.y + end.height / 2 + offset
        lab.draw_arrow(ax, (table_x + 0.46, middle), (end.x - 0.14, end_y), color)
        y += _ROW_HEIGHT
    return y + 0.02


def _draw_page(ax: "Axes", box: lab.Box, frames: Frames, i: int, page: int) -> None:
    """Draws a physical page in its owners' colours, with the words read from K."""
    count = int(frames.ref[i, page])
    copied = int(frames.copied[i, page])
    owners = frames.owners(i, page)
    held = frames.held[i, page]
    middle = box.y + box.height / 2
    color = lab.TEXT_COLOR if count else lab.GHOST
    lab.draw_text(ax, box.x - 0.03, middle, str(page), 6, color=color, ha="right")
    lab.fill_stripes(ax, box, owners)
    lab.draw_frame(ax, box, owners, copied=copied >= 0)
    old = frames.held[max(i - 1, 0), page if copied < 0 else copied]
    bold = np.flatnonzero(held != old).tolist() if owners else ()
    lab.draw_words(ax, box, frames.words_of(held), bold=bold, color=color)
    if not owners:
        return
    before = int(frames.ref[i - 1, page]) if i else 0
    right = box.x + box.width + (0.12 if before > count else 0.09)
    lab.draw_reference_count(ax, right, middle, before, count)
    if copied >= 0:
        lab.draw_tag(ax, box, f"copy of {copied}")
