"""Draws frames of beams that share pages, and the page pool below."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import lab
from experiments.serving.page_tables.frames import Frames
from jaxkv.memory import NO_PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL = 0.55
_THIN = 0.06
"""Widths: of the labels before the pages, and of a page that is never used."""
_BEAM_HEIGHT = 0.39
_TEXT_LINE = 0.08
"""Heights: of a beam, and of a line of text."""

HEIGHT = 4 * _BEAM_HEIGHT + 0.83
"""Height of a frame of 4 beams in inches."""


def draw_beams(
    ax: "Axes",
    x: float,
    y: float,
    frames: Frames,
    i: int,
    names: Sequence[str],
    *,
    width: float,
) -> None:
    """Draws a frame of beams; a shared physical page spans its beams.

    Args:
      ax: axes in inches, y downwards.
      x: left edge.
      y: upper edge.
      frames: states whose slots are the beams of one request.
      i: index of the frame.
      names: names of the beams.
      width: width in inches.
    """
    for slot, name in enumerate(names):
        middle = y + (slot + 0.5) * _BEAM_HEIGHT
        color = lab.slot_color(slot)
        look = {"color": color, "fontweight": "bold"}
        lab.draw_text(ax, x, middle - 0.07, f"beam {name}", 6.2, **look)
        following = frames.tokens[i, slot, frames.length[i, slot]]
        look = {"style": "italic", "color": lab.BOX_GREY}
        lab.draw_text(
            ax, x, middle + 0.06, frames.words[following], lab.SMALL_FONT, **look
        )
    num_columns = int((frames.page_ids != NO_PAGE).any((0, 1)).sum())
    page_width = (width - _LABEL) / num_columns
    for column in range(num_columns):
        top = y
        # Beams that share a page are adjacent.
        for page, run in itertools.groupby(frames.page_ids[i, :, column].tolist()):
            height = _BEAM_HEIGHT * len([*run])
            left = x + _LABEL + column * page_width
            if page != NO_PAGE:
                box = lab.Box(left, top, page_width - 0.05, height - 0.05)
                _draw_page(ax, box, frames, i, page, column)
            top += height
    _draw_pool(ax, x, y + len(names) * _BEAM_HEIGHT + 0.08, frames, i, width)


def _draw_page(
    ax: "Axes", box: lab.Box, frames: Frames, i: int, page: int, column: int
) -> None:
    """Draws a physical page across the rows of its beams."""
    slots = frames.owners(i, page)
    height = box.height / len(slots)
    size = frames.held.shape[2]
    for k, slot in enumerate(slots):
        band = box._replace(y=box.y + k * height, height=height)
        lab.draw_rectangle(
            ax, band, facecolor=lab.lighten(lab.slot_color(slot)), linewidth=0
        )
    lab.draw_frame(ax, box, slots)
    # Places beyond the length hold tokens of the page's last owner.
    held = frames.held[i, page, : frames.filled(i, slots[0])[column]]
    newest = int(frames.length[i, slots[0]]) - 1 - column * size
    y = box.y + box.height / 2 - (len(held) - 1) / 2 * _TEXT_LINE
    for k, word in enumerate(frames.words_of(held)):
        weight = "bold" if k == newest else "normal"
        lab.draw_text(
            ax, box.x + 0.03, y + k * _TEXT_LINE, word, 5.3, fontweight=weight
        )
    look = {"fontweight": "bold", "ha": "right", "va": "top", "color": lab.BOX_GREY}
    lab.draw_text(ax, box.x + box.width - 0.03, box.y + 0.03, str(page), 5.6, **look)


def _draw_pool(
    ax: "Axes", x: float, y: float, frames: Frames, i: int, total: float
) -> None:
    """Draws all physical pages in a row: id, colours and reference count."""
    used = frames.ever_used()
    num = sum(used)
    width = (total - _LABEL - (len(used) - num) * _THIN) / num
    for label, line in (("pool", y + 0.1), ("uses", y + 0.32)):
        lab.draw_text(ax, x, line, label, lab.SMALL_FONT, color=lab.BOX_GREY)
    left = x + _LABEL
    for page, is_used in enumerate(used):
        box = lab.Box(left, y, (width if is_used else _THIN) - 0.05, 0.2)
        left += box.width + 0.05
        count = int(frames.ref[i, page])
        owners = frames.owners(i, page)
        lab.fill_stripes(ax, box, owners)
        lab.draw_frame(ax, box, owners)
        if not is_used:
            continue
        middle = box.x + box.width / 2
        color = lab.TEXT_COLOR if count else lab.GHOST
        lab.draw_text(ax, middle, y + 0.1, str(page), 6, color=color, ha="center")
        before = int(frames.ref[i - 1, page]) if i else count
        if count:
            lab.draw_reference_count(ax, middle, y + 0.32, before, count)
        else:
            change = f"{before}→0" if before else "free"
            color = lab.COPY if before else lab.GHOST
            lab.draw_text(ax, middle, y + 0.32, change, 5.4, color=color, ha="center")
