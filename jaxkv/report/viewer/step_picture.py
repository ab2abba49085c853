"""Pictures of a run as SVG: slots with their page tables, pool, queue.

A picture of one step is still. A picture of a run is animated by SMIL, without script,
and repeats: it moves in a Markdown page. Both follow the reader's colour scheme.
"""

from collections.abc import Sequence
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
_QUEUE_PLACES = (_TOTAL_WIDTH - 110) // CELL_WIDTH
"""Requests of the queue that are drawn; the title has the number of all."""
_FREE_FILL = "transparent"
_CACHED_FILL = "#dddddd"
_TIMES = "\N{MULTIPLICATION SIGN}"
_STYLE_SHEET = (
    "<style>.ground{fill:#fff}.words{fill:#111}.cell{fill:#000}"
    "@media(prefers-color-scheme:dark){.ground{fill:#161b22}.words{fill:#f0f6fc}}"
    "</style>"
)


@validation.checks_numbers(step=(0, 2**31))
def draw_step(trace: RunTrace, step: int) -> str:
    """Returns the SVG text of a step.

    Each page has the colour of its owner; the pool shows the request of a page, `×n`
    where n slots share it, and `c` where only the prefix cache holds it.

    Raises:
      ValueError: the trace has no such step, or no page tables.
    """
    validation.integer("step", step, below=trace.num_steps)
    lines = [x.text for x in list_events(trace) if x.step == step]
    return _draw(trace.part(step, step), first=step, lines=lines)


def draw_run(trace: RunTrace) -> str:
    """Returns the SVG text of an animation, 3 steps per second, see `draw_step`.

    Raises:
      ValueError: the trace has no page tables.
    """
    return _draw(trace)


def _draw(trace: RunTrace, *, first: int = 0, lines: Sequence[str] = ()) -> str:
    """Draws the steps of a trace, of which `first` is the number of the first one."""
    if not trace.has_tables:
        raise ValueError("a trace of counted pages has no page tables to draw")
    info = trace.info
    pages = trace.pages
    request_id = info.request_id.tolist()
    color_of = {
        x.request_id: OWNER_COLORS[i % len(OWNER_COLORS)]
        for i, x in enumerate(trace.requests)
    }
    steps = range(trace.num_steps)
    owners: list[dict[int, list[int]]] = [{} for _ in steps]
    parts = []
    y = 84
    for slot in range(info.request_id.shape[1]):
        requests = [row[slot] for row in request_id]
        names = ["empty" if x < 0 else f"request {x}" for x in requests]
        labels = [f"slot {slot}: {name}" for name in names]
        parts.append(_text(20, y + 20, labels))
        notes = [_phase(trace, step, slot) for step in steps]
        parts.append(_text(170, y + 20, notes))
        num_places = max(1, int((pages.page_ids[:, slot] >= 0).sum(1).max()))
        for place in range(num_places):
            ids = pages.page_ids[:, slot, place].tolist()
            for step, page in enumerate(ids):
                if page >= 0:
                    owners[step].setdefault(page, []).append(requests[step])
            line, column = divmod(place, _CHIPS)
            x = 290 + column * 42
            looks = [
                None if page < 0 else (str(page), color_of.get(request, _CACHED_FILL))
                for page, request in zip(ids, requests, strict=True)
            ]
            top = y + line * (CELL_HEIGHT + 2)
            parts.append(_cell(x, top, 40, looks))
        y += -(-num_places // _CHIPS) * (CELL_HEIGHT + 2) + 6
    for page in range(trace.num_pages):
        line, column = divmod(page, _COLUMNS)
        place = _POOL_X + column * CELL_WIDTH, 84 + line * (CELL_HEIGHT + 2)
        looks = []
        for step in steps:
            uses = owners[step].get(page, [])
            look = "", _FREE_FILL
            if pages.is_cached[step, page]:
                look = "c", _CACHED_FILL
            if uses:
                name = f"{_TIMES}{len(uses)}" if len(uses) > 1 else str(uses[0])
                look = name, color_of.get(uses[0], _CACHED_FILL)
            looks.append(look)
        parts.append(_cell(*place, CELL_WIDTH - 2, looks))
    num_lines = -(-trace.num_pages // _COLUMNS)
    y = max(y, 84 + num_lines * (CELL_HEIGHT + 2)) + 26
    parts.append(_text(20, y, ["queue:"]))
    queue = pages.queue[:, : min(_QUEUE_PLACES, (pages.queue >= 0).sum(1).max())]
    for place, requests in enumerate(queue.T.tolist()):
        looks = [
            None if x < 0 else (str(x), color_of.get(x, _CACHED_FILL)) for x in requests
        ]
        x = 90 + place * CELL_WIDTH
        parts.append(_cell(x, y - 19, CELL_WIDTH - 2, looks))
    parts += [_text(20, y + 24 * i, [x]) for i, x in enumerate(lines, 1)]
    titles = [
        f"step {first + step}: {np.sum(info.request_id[step] >= 0)} running, "
        f"{info.num_waiting[step]} waiting, {len(owners[step])} of {trace.num_pages} "
        "pages in use"
        for step in steps
    ]
    height = y + 16 + 24 * len(lines)
    label = titles[0] if len(titles) == 1 else f"{trace}"
    heads = ("slots and page tables", 20), ("page pool: owner of each page", _POOL_X)
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {_TOTAL_WIDTH} {height}" '
            f'font-family="sans-serif" role="img" aria-label="{escape(label)}">',
            f"{_STYLE_SHEET}"
            f'<rect class="ground" width="{_TOTAL_WIDTH}" height="{height}" rx="8"/>',
            f'<g font-weight="bold">{_text(20, 30, titles)}',
            *(_text(x, 66, [head]) for head, x in heads),
            "</g>",
            *parts,
            "</svg>\n",
        ]
    )


def _phase(trace: RunTrace, step: int, slot: int) -> str:
    """Returns what a slot does in a step."""
    info = trace.info
    num_drafts = int(trace.num_drafts[step, slot])
    num_rows = int(info.num_rows[step, slot]) - num_drafts
    if info.request_id[step, slot] < 0 or not num_rows:
        return ""
    if num_rows > 1:
        return f"prefill {num_rows}"
    num_accepted = max(int(info.num_emitted[step, slot]) - 1, 0)
    return f"{num_accepted} of {num_drafts} drafts" if num_drafts else "decode"


def _animate(attribute: str, values: Sequence[str | int]) -> str:
    """Returns the attribute with its first value, and its changes over the steps."""
    starts = [i for i, x in enumerate(values) if not i or x != values[i - 1]]
    if len(starts) == 1:
        return ">"
    times = ";".join(f"{i / len(values):.5f}".rstrip("0").rstrip(".") for i in starts)
    shown = ";".join(str(values[i]) for i in starts)
    return (
        f'><animate attributeName="{attribute}" dur="{len(values) / 3:.3f}s" '
        f'calcMode="discrete" repeatCount="indefinite" keyTimes="{times}" '
        f'values="{shown}"/>'
    )


def _text(
    x: float,
    y: float,
    values: Sequence[str],
    style: str = 'class="words"',
) -> str:
    """Returns a text that changes over the steps: an element for each value."""
    parts = []
    for value in dict.fromkeys(filter(None, values)):
        shows = [int(other == value) for other in values]
        hidden = "" if shows[0] else ' opacity="0"'
        parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="16" {style}{hidden}'
            f"{_animate('opacity', shows)}{escape(value)}</text>"
        )
    return "".join(parts)


def _cell(
    x: float,
    y: float,
    width: float,
    looks: Sequence[tuple[str, str] | None],
) -> str:
    """Returns a page: a box with its label in the middle, which may be absent."""
    shows = [int(look is not None) for look in looks]
    labels = [look[0] if look else "" for look in looks]
    fills = [look[1] if look else _FREE_FILL for look in looks]
    style = 'class="cell" text-anchor="middle"'
    return (
        f'<g opacity="{shows[0]}"{_animate("opacity", shows)}'
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL_HEIGHT - 2}" '
        f'rx="3" fill="{fills[0]}" stroke="#888"{_animate("fill", fills)}'
        f"</rect>{_text(x + width / 2, y + 19, labels, style)}</g>"
    )
