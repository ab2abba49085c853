"""A picture of one step as SVG: slots with their page tables, pool, queue, events."""

from html import escape

import numpy as np

from jaxkv import validation
from jaxkv.report.viewer.page import OWNER_COLORS
from jaxkv.report.viewer.run_events import list_events
from jaxkv.report.viewer.run_trace import RunTrace

CELL_WIDTH = 46
CELL_HEIGHT = 28
_CHIPS = 8
"""Pages in a line of a slot."""
_COLUMNS = 12
"""Pages in a line of the pool."""
_POOL_X = 640
_TOTAL_WIDTH = _POOL_X + _COLUMNS * CELL_WIDTH + 20
_NOT_CACHED = "#ffffff"
_CACHED = "#dddddd"
_TIMES = "\N{MULTIPLICATION SIGN}"


@validation.checks_numbers(step=(0, 2**31))
def draw_step(trace: RunTrace, step: int) -> str:
    """Returns the SVG text of a step.

    Each page has the colour of its owner; the pool shows the request of a page, `×n`
    where n slots share it, and `c` where only the prefix cache holds it.

    Raises:
      ValueError: the trace has no such step.
    """
    validation.integer("step", step, below=trace.num_steps)
    info = trace.info
    pages = trace.pages
    color_of = {
        x.request_id: OWNER_COLORS[i % len(OWNER_COLORS)]
        for i, x in enumerate(trace.requests)
    }
    owners: dict[int, list[int]] = {}
    parts = []
    y = 84
    for slot, request in enumerate(info.request_id[step].tolist()):
        ids = pages.page_ids[step, slot]
        ids = ids[ids >= 0].tolist()
        label = f"slot {slot}: " + ("empty" if request < 0 else f"request {request}")
        parts.append(_text(20, y + 20, label))
        if request >= 0:
            note = f"{pages.length[step, slot]} tokens + {info.num_rows[step, slot]}"
            parts.append(_text(160, y + 20, note))
        for place, page in enumerate(ids):
            owners.setdefault(page, []).append(request)
            line, column = divmod(place, _CHIPS)
            x = 290 + column * 42
            color = color_of.get(request, _NOT_CACHED)
            parts.append(_cell(x, y + line * (CELL_HEIGHT + 2), 40, str(page), color))
        y += max(1, -(-len(ids) // _CHIPS)) * (CELL_HEIGHT + 2) + 6
    for page in range(trace.num_pages):
        line, column = divmod(page, _COLUMNS)
        place = _POOL_X + column * CELL_WIDTH, 84 + line * (CELL_HEIGHT + 2)
        uses = owners.get(page, [])
        label = f"{_TIMES}{len(uses)}" if len(uses) > 1 else "".join(map(str, uses))
        color = color_of.get(uses[0], _NOT_CACHED) if uses else _NOT_CACHED
        if not uses and pages.is_cached[step, page]:
            label = "c"
            color = _CACHED
        parts.append(_cell(*place, CELL_WIDTH - 2, label, color))
    num_lines = -(-trace.num_pages // _COLUMNS)
    y = max(y, 84 + num_lines * (CELL_HEIGHT + 2)) + 26
    queue = pages.queue[step]
    names = ", ".join(map(str, queue[queue >= 0])) or "empty"
    lines = [f"queue: {names}", *(x.text for x in list_events(trace) if x.step == step)]
    parts += [_text(20, y + 24 * i, line) for i, line in enumerate(lines)]
    running = int(np.sum(info.request_id[step] >= 0))
    title = (
        f"step {step}: {running} running, {info.num_waiting[step]} waiting, "
        f"{len(owners)} of {trace.num_pages} pages in use"
    )
    height = y + 24 * len(lines)
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {_TOTAL_WIDTH} {height}" '
            f'font-family="sans-serif" role="img" aria-label="{escape(title)}">',
            f'<rect width="{_TOTAL_WIDTH}" height="{height}" fill="white"/>',
            _text(20, 30, title, bold=True),
            _text(20, 66, "slots and page tables", bold=True),
            _text(_POOL_X, 66, "page pool: owner of each page", bold=True),
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="16"{weight}>{escape(words)}</text>'


def _cell(x: float, y: float, width: float, label: str, color: str) -> str:
    """Returns a page: a box with its label in the middle."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{CELL_HEIGHT - 2}" rx="3" '
        f'fill="{color}" stroke="#333"/><text x="{x + width / 2}" y="{y + 19}" '
        f'font-size="16" text-anchor="middle">{escape(label)}</text>'
    )
