"""First come, first served in plain Python: the peer of `bench simulate`.

It takes the same decisions as `fcfs` for requests of one sequence and, on request,
records the same step statistics as `simulation.step`, with lists, counts and a deque,
like a scheduler on the host.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class SimpleRequest(NamedTuple):
    """Arrival time and lengths of a request."""

    arrival_us: int
    prompt: int
    output: int


class SchedulerLimits(NamedTuple):
    """Fields of `Capacity`, and the number of slots."""

    num_pages: int
    page_size: int
    token_budget: int
    max_slots: int
    head: int
    """Waiting requests that are considered in a step."""


class SchedulerStep(NamedTuple):
    """Statistics of a step, as in `simulation.SimulatedStep`."""

    start_us: int
    micros: int
    num_decodes: int
    num_prompt_rows: int
    decode_context: int
    prompt_context: int
    num_running: int
    num_preempted: int
    used_pages: int
    tokens: int
    reserved: int


type Price = Callable[[int, int, int, int], float]
"""Seconds for decodes, prompt rows, and the attended tokens of both."""


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    index: int
    prompt: int
    limit: int
    num_tokens: int
    length: int = 0
    pages: int = 0


class ScheduleResult(NamedTuple):
    """Times of the requests, and counts."""

    first_us: list[int]
    finish_us: list[int]
    num_preempted: int
    num_steps: int
    """Steps with work."""


def run_scheduler(
    requests: Sequence[SimpleRequest],
    bounds: SchedulerLimits,
    price: Price,
    note: Callable[[SchedulerStep], None] | None = None,
    max_steps: int = 2**62,
) -> ScheduleResult:
    """Serves requests to their end.

    Args:
      requests: requests in order of arrival; each must fit on its own.
      bounds: limits of the machine.
      price: cost of a step.
      note: called with the statistics of every step.
      max_steps: largest number of steps.
    """
    num_pages, size, budget, max_slots, head = bounds
    first = [-1] * len(requests)
    finish = [-1] * len(requests)
    running: list[_Sequence] = []
    waiting: deque[_Sequence] = deque()
    clock = 0
    num_arrived = 0
    free = num_pages
    preempted = 0
    num_steps = 0
    while (running or waiting or num_arrived < len(requests)) and num_steps < max_steps:
        while (
            len(waiting) < head
            and num_arrived < len(requests)
            and requests[num_arrived].arrival_us <= clock
        ):
            _, prompt, output = requests[num_arrived]
            waiting.append(_Sequence(num_arrived, prompt, prompt + output, prompt))
            num_arrived += 1
        # Running sequences grow in order; from the first failure on, all are preempted.
        num_running = len(running)
        for place, sequence in enumerate(running):
            more = -(-sequence.num_tokens // size) - sequence.pages
            if more > 0:
                while more > free and num_running > place:
                    num_running -= 1
                    free += running[num_running].pages
                if num_running <= place:
                    break
                free -= more
                sequence.pages += more
        lost = running[num_running:]
        if lost:
            del running[num_running:]
            preempted += len(lost)
            for sequence in reversed(lost):
                sequence.length = sequence.pages = 0
                waiting.appendleft(sequence)
        # One row per decode; then running prompts and new requests share the rest.
        rows_read = decode_context = prompt_context = 0
        scheduled: list[tuple[_Sequence, int]] = []
        left = budget
        for sequence in running:
            if sequence.num_tokens - sequence.length == 1:
                left -= 1
        for sequence in running:
            rows = sequence.num_tokens - sequence.length
            if rows == 1:
                scheduled.append((sequence, 1))
            elif left > 0:
                rows = min(rows, left)
                left -= rows
                scheduled.append((sequence, rows))
        if not lost:
            while waiting and left > 0 and len(running) < max_slots:
                sequence = waiting[0]
                pages = -(-sequence.num_tokens // size)
                if pages > free:
                    break
                waiting.popleft()
                free -= pages
                sequence.pages = pages
                rows = min(sequence.num_tokens, left)
                left -= rows
                running.append(sequence)
                scheduled.append((sequence, rows))
        if not running and not waiting:
            if num_arrived < len(requests):
                clock = max(clock, requests[num_arrived].arrival_us)
            continue
        num_steps += 1
        ended = []
        for sequence, rows in scheduled:
            length = sequence.length + rows
            sequence.length = length
            if rows == 1 and length == sequence.num_tokens and length > sequence.prompt:
                decode_context += length
            else:
                rows_read += rows
                prompt_context += length
            if length == sequence.num_tokens:
                ended.append(sequence)
        num_decodes = sum(rows for _, rows in scheduled) - rows_read
        took = price(num_decodes, rows_read, decode_context, prompt_context)
        micros = round(took * 1e6)
        start = clock
        clock += micros
        if note is not None:
            tokens = useful = 0
            for sequence in running:
                tokens += sequence.length
                useful += min(
                    max(sequence.limit - 1, sequence.length), sequence.pages * size
                )
            note(
                SchedulerStep(
                    start,
                    micros,
                    num_decodes,
                    rows_read,
                    decode_context,
                    prompt_context,
                    len(running),
                    len(lost),
                    num_pages - free,
                    tokens,
                    useful - tokens,
                )
            )
        done = False
        for sequence in ended:
            sequence.num_tokens += 1
            if sequence.num_tokens == sequence.prompt + 1:
                first[sequence.index] = clock
            if sequence.num_tokens == sequence.limit:
                finish[sequence.index] = clock
                free += sequence.pages
                done = True
        if done:
            running = [x for x in running if x.num_tokens < x.limit]
    return ScheduleResult(first, finish, preempted, num_steps)
