"""The viewer's page: one HTML file that replays a run, without network.

`page.html` is the template. Arrays are integers of the smallest type in base64, either
whole or as differences between steps, whichever is smaller. Texts of users are JSON in
a script element of type `application/json`, with `<` escaped, and are shown by
`textContent` only.
"""

import base64
import html
import json
from collections.abc import Sequence
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


def render_viewer(
    *traces: RunTrace, title: str = "jaxkv run", names: Sequence[str] = ()
) -> str:
    """Returns the HTML page of runs; `#step=N` in its address selects a step.

    Args:
      traces: the runs; several are shown in columns that step together.
      title: title of the page.
      names: headings of the columns; needed for several runs.

    Raises:
      ValueError: there is no trace, a trace has more than `MAX_PAGE_STEPS` steps, or
        the names are not one for each of several runs.
    """
    if not traces or len(names) != len(traces) * (len(traces) > 1):
        raise ValueError(
            f"names={[*names]} must be one for each of {len(traces)} runs, or none for "
            "one run"
        )
    for trace in traces:
        if trace.num_steps > MAX_PAGE_STEPS:
            raise ValueError(
                f"num_steps={trace.num_steps} must be in [1, {MAX_PAGE_STEPS}]: choose "
                "a part of the trace"
            )
    document = {
        "title": title,
        "colors": OWNER_COLORS,
        "lifeStates": LIFE_STATES,
        "eventTexts": [*EVENT_TEXTS.values()],
        "eventKinds": [*EVENT_TEXTS],
        "runs": [
            _describe_run(trace, name)
            for trace, name in zip(traces, names or ("",), strict=True)
        ],
    }
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files("jaxkv.report.viewer").joinpath("page.html")
    head, _, tail = template.read_text(encoding="utf-8").partition("{{data}}")
    return head.replace("{{title}}", html.escape(title)) + text + tail


def _describe_run(trace: RunTrace, name: str) -> dict[str, object]:
    """Returns the part of the page's document that describes one run."""
    info = trace.info
    pages = trace.pages
    drafts = trace.num_drafts
    accepted = np.maximum(info.num_emitted - 1, 0) * (drafts > 0)
    columns = {
        "request": info.request_id,
        "sample": info.sample,
        "rows": info.num_rows,
        "emitted": info.num_emitted,
        "drafts": drafts,
        "drafted": np.cumsum(drafts.sum(1)),
        "accepted": np.cumsum(accepted.sum(1)),
        "held": info.held,
        "length": pages.length,
        "pageIds": pages.page_ids,
        "ref": pages.ref,
        "isCached": pages.is_cached,
        "queue": pages.queue,
        "swappedPages": pages.queue_swapped,
        "onHost": pages.is_on_host,
        "windowIds": pages.window_ids,
        "stateIds": pages.state_ids,
        "statePage": pages.state_page,
        "draftTokens": pages.draft_tokens,
        "draftParents": pages.draft_parents,
        "draftPath": pages.draft_path,
        "experts": trace.expert_loads,
        "lives": trace_lives(trace),
        "waiting": info.num_waiting,
        "used": info.used_pages,
        "startMs": np.round((trace.start_s - trace.start_s[0]) * 1e3),
    }
    kinds = [*EVENT_TEXTS]
    return {
        "name": name,
        "pageSize": trace.page_size,
        "numPages": trace.num_pages,
        "numSteps": trace.num_steps,
        "numMixtures": 0 if pages.routes is None else pages.routes.shape[2],
        "tokenTexts": trace.token_texts,
        "events": [
            [x.step, kinds.index(x.kind), x.request, x.slot, x.a, x.b]
            for x in list_events(trace)
        ],
        "requests": [
            x._asdict() | {"prompt": _cut(x.prompt), "answers": [*map(_cut, x.answers)]}
            for x in trace.requests
        ],
        "columns": {
            key: encode_column(np.reshape(x, (trace.num_steps, -1)))
            for key, x in columns.items()
            if x is not None
        },
    }


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
