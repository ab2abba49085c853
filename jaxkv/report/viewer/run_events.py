"""Events of a run: admission, preemption, copies and ends, from the steps of a trace.

Events follow from the differences between steps, so that pages, pictures and Perfetto
files report the same ones.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxkv.engine import FINISH_REASONS
from jaxkv.report.viewer.run_trace import RunTrace

EVENT_TEXTS = {
    "admitted": "request {request} admitted to slot {slot}",
    "prefix": "request {request}: {a} prompt tokens from the prefix cache",
    "resumed": "request {request} admitted again to slot {slot}, recomputes K and V",
    "swapped in": "request {request} swapped in to slot {slot}",
    "preempted": "request {request} preempted, its pages are released",
    "swapped out": "request {request} preempted, {a} pages swapped out",
    "to host": "request {request}: {a} swapped pages move to host memory",
    "to buffer": "request {request}: {a} swapped pages move to the staging buffer",
    "released": "request {request}, slot {slot}: pages released behind the window: {a}",
    "checkpoint": "state {a} becomes the checkpoint of cached page {b}",
    "copied": "page {a} copied to page {b} for request {request} (copy-on-write)",
    "cancelled": "request {request} cancelled between steps",
} | {
    f"ended: {reason}": f"request {{request}}, answer {{a}}, ended: {reason}"
    for reason in FINISH_REASONS
    if reason
}
"""Text of each kind of event; `{a}` and `{b}` are its values."""
LIFE_STATES = ("absent", "waiting", "swapped", "prefill", "decode")
"""States of a request in a step, in the order of their codes."""


class RunEvent(NamedTuple):
    """An event of a step."""

    step: int
    kind: str
    """A key of `EVENT_TEXTS`."""
    request: int
    """Request id; -1 of a checkpoint."""
    slot: int = -1
    a: int = 0
    b: int = 0

    @property
    def text(self) -> str:
        """The event as a phrase."""
        return EVENT_TEXTS[self.kind].format(**self._asdict())


def list_events(trace: RunTrace) -> list[RunEvent]:
    """Returns all events in the order of their steps."""
    info = trace.info
    pages = trace.pages
    events = []
    swapped: dict[int, int] = {}  # pages of the preempted requests
    before: dict[int, int] = {}
    ended: set[int] = set()
    for step in range(trace.num_steps):
        running = {}  # first slot of each request
        for slot, request in reversed([*enumerate(info.request_id[step].tolist())]):
            if request >= 0:
                running[request] = slot
        queue = dict(
            zip(
                pages.queue[step].tolist(),
                pages.queue_swapped[step].tolist(),
                strict=True,
            )
        )
        for request in before.keys() - running.keys():
            if request in queue:
                num = swapped[request] = queue[request]
                kind = "swapped out" if num else "preempted"
                events.append(RunEvent(step, kind, request, a=num))
            elif request not in ended:
                events.append(RunEvent(step, "cancelled", request))
        for request, slot in running.items():
            if request in before:
                continue
            kind = "admitted"
            if request in swapped:
                kind = "swapped in" if swapped.pop(request) else "resumed"
            events.append(RunEvent(step, kind, request, slot))
            num = int(pages.num_cached[step, slot])
            if num and kind == "admitted":
                events.append(RunEvent(step, "prefix", request, slot, num))
        events += _list_page_events(trace, step)
        ended = set()
        for slot in np.flatnonzero(info.reason[step] > 0).tolist():
            request = int(info.request_id[step, slot])
            sample = int(info.sample[step, slot])
            kind = f"ended: {FINISH_REASONS[info.reason[step, slot]]}"
            events.append(RunEvent(step, kind, request, slot, sample))
            ended.add(request)
        before = running
    return events


def _list_page_events(trace: RunTrace, step: int) -> Iterator[RunEvent]:
    """Lists what happens to pages and states in a step, by slots and places."""
    info = trace.info
    pages = trace.pages
    request_id = info.request_id[step].tolist()
    for slot in np.flatnonzero(pages.copied_to[step] >= 0).tolist():
        source = int(pages.copied_from[step, slot])
        target = int(pages.copied_to[step, slot])
        yield RunEvent(step, "copied", request_id[slot], slot, source, target)
    if (states := pages.state_page) is not None:
        is_new = (states[step] >= 0) & (not step or states[step] != states[step - 1])
        for state in np.flatnonzero(is_new).tolist():
            page = int(states[step, state])
            yield RunEvent(step, "checkpoint", -1, a=state, b=page)
    if not step:
        return
    if (windows := pages.window_ids) is not None:
        slot_before = {x: i for i, x in enumerate(info.sequence[step - 1].tolist())}
        for slot, sequence in enumerate(info.sequence[step].tolist()):
            if sequence < 0 or sequence not in slot_before:
                continue
            is_behind = np.logical_and.accumulate(windows[step, slot] < 0)
            ids = windows[step - 1, slot_before[sequence]]
            if num := int((is_behind & (ids >= 0)).sum()):
                yield RunEvent(step, "released", request_id[slot], slot, num)
    if (on_host := pages.is_on_host) is not None:
        before = pages.queue[step - 1].tolist()
        for place, request in enumerate(pages.queue[step].tolist()):
            num = int(pages.queue_swapped[step, place])
            is_out = bool(on_host[step, place])
            if not num or request not in before:
                continue
            if is_out != on_host[step - 1, before.index(request)]:
                kind = "to host" if is_out else "to buffer"
                yield RunEvent(step, kind, request, a=num)


def trace_lives(trace: RunTrace) -> Int[np.ndarray, "steps requests"]:
    """Returns the state of each request in each step, an index into `LIFE_STATES`."""
    info = trace.info
    pages = trace.pages
    lives = np.zeros((trace.num_steps, len(trace.requests)), np.int8)
    for column, request in enumerate(x.request_id for x in trace.requests):
        waits = pages.queue == request
        runs = info.request_id == request
        lives[waits.any(1), column] = LIFE_STATES.index("waiting")
        is_swapped = (waits & (pages.queue_swapped > 0)).any(1)
        lives[is_swapped, column] = LIFE_STATES.index("swapped")
        lives[runs.any(1), column] = LIFE_STATES.index("decode")
        lives[(runs & trace.is_prefill).any(1), column] = LIFE_STATES.index("prefill")
    return lives
