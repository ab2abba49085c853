"""Traces of runs by a page manager in plain Python, for tests of the viewer."""

import collections
from typing import Any

import numpy as np

from jaxkv.engine import StepInfo, StepPages
from jaxkv.report.viewer import RunTrace, TraceRequest

HOSTILE = "<script>document.title = 'changed'</script><!-- & \u2028 </p> \"'"
"""A prompt that a page must show as text."""
ENDED = 2
"""Index of "length" in `FINISH_REASONS`."""


class PlainSlot:
    """A running sequence: request, sample, pages in order, tokens with K and V."""

    def __init__(self, request: int, sample: int, pages: list[int], length: int):
        self.request = request
        self.sample = sample
        self.pages = pages
        self.length = length


def plain_run(
    *,
    num_steps: int = 40,
    num_slots: int = 4,
    num_pages: int = 16,
    page_size: int = 4,
    answer: int = 9,
) -> RunTrace:
    """Returns a run of forked requests: shared pages, copies and preemptions.

    The first slot of a request feeds its prompt in one step, and a second sequence is
    forked from it with all pages. With too few pages, the last request is preempted.
    """
    rng = np.random.default_rng(0)
    width = num_pages // 2
    num_places = num_slots + 2
    free = [*range(num_pages)]
    ref: collections.Counter[int] = collections.Counter()
    slots: list[PlainSlot | None] = [None] * num_slots
    prompts: dict[int, int] = {}
    queue: list[int] = []
    steps: dict[str, list] = collections.defaultdict(list)

    def release(request: int) -> None:
        for i, slot in enumerate(slots):
            if slot is not None and slot.request == request:
                for page in slot.pages:
                    ref[page] -= 1
                    free.extend([page] * (ref[page] == 0))
                slots[i] = None

    def take() -> int:
        page = free.pop()
        ref[page] += 1
        return page

    for _ in range(num_steps):
        while len(queue) < 2:
            queue.append(len(prompts))
            prompts[len(prompts)] = int(rng.integers(2, 3 * page_size))
        rows = np.zeros(num_slots, int)
        copies = np.full((2, num_slots), -1)
        num_preempted = 0
        # Every running sequence may need a page, for growth or for a copy.
        while len(free) < sum(x is not None for x in slots):
            victim = max(x.request for x in slots if x is not None)
            num_preempted += sum(x is not None and x.request == victim for x in slots)
            release(victim)
            queue.insert(0, victim)
        for i, slot in enumerate(slots):
            if slot is None:
                continue
            rows[i] = 1
            last = slot.pages[-1]
            if slot.length % page_size == 0:
                slot.pages.append(take())
            elif ref[last] > 1:
                ref[last] -= 1
                slot.pages[-1] = take()
                copies[:, i] = last, slot.pages[-1]
        need = -(-prompts[queue[0]] // page_size)
        empty = [i for i, slot in enumerate(slots) if slot is None]
        if len(empty) > 1 and len(free) >= need + num_slots and not num_preempted:
            request = queue.pop(0)
            own = [take() for _ in range(need)]
            ref.update(own)
            slots[empty[0]] = PlainSlot(request, 0, own, 0)
            slots[empty[1]] = PlainSlot(request, 1, [*own], 0)
            rows[empty[0]] = prompts[request]
        table = np.full((num_slots, width), -1)
        names = np.full((2, num_slots), -1)
        lengths = np.zeros(num_slots, int)
        reasons = np.zeros(num_slots, int)
        for i, slot in enumerate(slots):
            if slot is not None:
                table[i, : len(slot.pages)] = slot.pages
                names[:, i] = slot.request, slot.sample
                lengths[i] = slot.length
        counts = [ref[page] for page in range(num_pages)]
        fed = rows > 0
        for slot in filter(None, slots):
            slot.length += prompts[slot.request] if slot.length == 0 else 1
        ends = {
            x.request
            for x in filter(None, slots)
            if x.length >= prompts[x.request] + answer or len(x.pages) == width
        }
        for i, slot in enumerate(slots):
            reasons[i] = ENDED if slot is not None and slot.request in ends else 0
        for request in ends:
            release(request)
        columns = {
            "request_id": names[0],
            "sample": np.maximum(names[1], 0),
            "sequence": names[0],
            "num_rows": rows,
            "num_emitted": fed.astype(int),
            "tokens": 65 + names[1:].T,
            "logprobs": np.zeros((num_slots, 1)),
            "reason": reasons,
            "held": np.zeros(num_slots, bool),
            "num_waiting": len(queue),
            "num_preempted": num_preempted,
            "num_swapped_out": 0,
            "num_swapped_in": 0,
            "num_admitted": 0,
            "num_copied": int((copies[1] >= 0).sum()),
            "used_pages": sum(count > 0 for count in counts),
            "used_places": 0,
            "asks_host": False,
            "enough": True,
            "pages.page_ids": table,
            "pages.length": lengths,
            "pages.ref": counts,
            "pages.is_cached": np.zeros(num_pages, bool),
            "pages.copied_from": copies[0],
            "pages.copied_to": copies[1],
            "pages.num_cached": np.zeros(num_slots, int),
            "pages.queue": (queue + [-1] * num_places)[:num_places],
            "pages.queue_swapped": np.zeros(num_places, int),
        }
        for name, value in columns.items():
            steps[name].append(value)
    arrays: dict[str, Any] = {name: np.array(x) for name, x in steps.items()}
    pages = StepPages(*(arrays.pop(f"pages.{name}") for name in StepPages._fields))
    info = StepInfo(**arrays, violations=None, pages=pages)
    requests = tuple(
        TraceRequest(i, 0.0, num, HOSTILE if i == 0 else f"prompt {i}", ["A", "B"])
        for i, num in prompts.items()
    )
    return RunTrace(np.arange(num_steps) * 0.01, info, page_size, requests)
