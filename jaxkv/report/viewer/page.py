"""The viewer's page: one HTML file that replays a run, without network.

`page.html` is the template. Arrays are integers of the smallest type in base64, either
whole or as differences between steps, whichever is smaller. Texts of users are JSON in
a script element of type `application/json`, with `<` escaped, and are shown by
`textContent` only.
"""

import base64
import html
import json
from importlib import resources

import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxkv.report.viewer.run_events import (
    EVENT_TEXTS,
    LIFE_STATES,
    list_events,
    trace_lives,
)
from jaxkv.report.viewer.run_trace import RunTrace

MAX_PAGE_STEPS = 5000
"""Largest number of steps of a page; a browser decodes them all at the start."""
MAX_TEXT = 600
"""Characters of a prompt or of an answer in a page."""
OWNER_COLORS = (
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442"),
    *("#d55e00", "#cc79a7", "#bbbbbb"),
)
"""Colours of requests, of Okabe and Ito, with a contrast to black of at least 5."""


def render_viewer(trace: RunTrace, *, title: str = "jaxkv run") -> str:
    """Returns the HTML page of a run; `#step=N` in its address selects a step.

    Raises:
      ValueError: the trace has more than `MAX_PAGE_STEPS` steps.
    """
    if trace.num_steps > MAX_PAGE_STEPS:
        raise ValueError(
            f"num_steps={trace.num_steps} must be in [1, {MAX_PAGE_STEPS}]: choose a "
            "part of the trace"
        )
    info = trace.info
    pages = trace.pages
    kinds = [*EVENT_TEXTS]
    events = [
        [x.step, kinds.index(x.kind), x.request, x.slot, x.a, x.b]
        for x in list_events(trace)
    ]
    start_us = np.round((trace.start_s - trace.start_s[0]) * 1e6)
    columns = {
        "request": info.request_id,
        "sample": info.sample,
        "rows": info.num_rows,
        "emitted": info.num_emitted,
        "drafts": trace.num_drafts,
        "held": info.held,
        "length": pages.length,
        "pageIds": pages.page_ids.reshape(trace.num_steps, -1),
        "ref": pages.ref,
        "isCached": pages.is_cached,
        "queue": pages.queue,
        "swappedPages": pages.queue_swapped,
        "lives": trace_lives(trace),
        "waiting": info.num_waiting[:, None],
        "used": info.used_pages[:, None],
        "start": start_us[:, None],
    }
    document = {
        "title": title,
        "pageSize": trace.page_size,
        "numPages": trace.num_pages,
        "numSteps": trace.num_steps,
        "colors": OWNER_COLORS,
        "lifeStates": LIFE_STATES,
        "eventTexts": [EVENT_TEXTS[kind] for kind in kinds],
        "eventKinds": kinds,
        "events": events,
        "requests": [
            x._asdict() | {"prompt": _cut(x.prompt), "answers": [*map(_cut, x.answers)]}
            for x in trace.requests
        ],
        "columns": {name: encode_column(x) for name, x in columns.items()},
    }
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files("jaxkv.report.viewer").joinpath("page.html")
    head, _, tail = template.read_text(encoding="utf-8").partition("{{data}}")
    return head.replace("{{title}}", html.escape(title)) + text + tail


def encode_column(
    values: Shaped[Array | np.ndarray, "steps n"],
) -> dict[str, object]:
    """Returns an array as base64: whole, or the changes between steps if smaller.

    The first step of changes is relative to zeros.
    """
    wide = np.asarray(values).astype(np.int32)
    whole = _pack(wide)
    before = np.concatenate([np.zeros_like(wide[:1]), wide[:-1]])
    steps, places = np.nonzero(wide != before)
    counts = np.bincount(steps, minlength=len(wide))
    parts = [_pack(x) for x in (counts, places, wide[steps, places])]
    is_whole = len(whole[1]) <= sum(len(x[1]) for x in parts)
    fields = {"whole": whole} if is_whole else {"changes": parts}
    return {"width": wide.shape[1]} | fields


def _pack(values: Int[np.ndarray, "..."]) -> tuple[str, str]:
    """Returns the name of the smallest type, and the bytes in base64."""
    low = int(values.min(initial=0))
    high = int(values.max(initial=0))
    name = next(
        name
        for name, bits in (("i1", 7), ("i2", 15), ("i4", 31))
        if -(1 << bits) <= low and high < 1 << bits
    )
    return name, base64.b64encode(values.astype(f"<{name}").tobytes()).decode()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."
