"""The lectures' two pictures of batching, as workloads and as tables of what was drawn.

Sequences S1 to S7 in four slots: each slot's tokens one behind the other, T1 to T8, as
static batching leaves them and as continuous batching does. Requests R1 to R5 under a
limit of three: who is in the batch in each iteration.

In both a step takes a second, so that times are iterations, and a page holds a whole
sequence, so that pages are slots.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv.workloads import arrivals

NUM_SLOTS, LIMIT, PLACES = 4, 3, 8
IDLE, PROMPT, TOKEN, END = range(4)
"""What a cell is: nothing, a token of the prompt, one drawn, the last one drawn."""

FIGURE = (
    "Daniel et al. 2023 (Anyscale), How continuous batching enables 23x throughput in "
    "LLM inference, figures of static and continuous batching, as lectures draw them"
)
FROM_MEMORY = (
    "Set down from memory of the picture, not from its file; the numbers of iterations "
    "that its caption gives agree."
)
STATIC = (
    "S1 S1 S1 S1 S1 END -- --",
    "S2 S2 S2 S2 S2 S2 S2 END",
    "S3 S3 S3 S3 END -- -- --",
    "S4 S4 S4 S4 S4 S4 END --",
)
"""Slots against T1 to T8."""
CONTINUOUS = (
    "S1 S1 S1 S1 S1 END S6 S6",
    "S2 S2 S2 S2 S2 S2 S2 END",
    "S3 S3 S3 S3 END S5 S5 S5",
    "S4 S4 S4 S4 S4 S4 END S7",
)
_PROMPTS, _OUTPUTS = (3, 2, 3, 4, 2, 3, 2), (3, 6, 2, 3, 4, 3, 3)
"""Of S1 to S7. The third ends after two iterations, the second after six, as is written
there; of the last three no ends are drawn."""

STEPS = "lecture on serving LLMs: continuous batching step by step (after Orca)"
BATCHES = ("R1 R2", "R1 R2 R3", "R1 R3 R4")
"""Of the first three iterations. R2 ends in the second; R5 waits."""
_TURNS = ((0.0, 3, 4), (0.0, 2, 2), (0.5, 3, 4), (1.4, 2, 3), (1.5, 3, 2))
"""Arrival, prompt and output of R1 to R5: R3 comes during the first iteration, R4 and
R5 during the second."""


class Grid(NamedTuple):
    """Each slot's tokens, one behind the other."""

    request: Int[np.ndarray, "slots places"]
    """Whose each is, -1 for nobody's."""
    kind: Int[np.ndarray, "slots places"]
    """`IDLE`, `PROMPT`, `TOKEN` or `END`."""
    step: Int[np.ndarray, "slots places"]
    """Iteration that fed or drew it, from 1; of an idle one, that it was idle in."""


class Times(NamedTuple):
    """When requests drew their first and their last token, in iterations from 1."""

    first: Int[np.ndarray, " requests"]
    last: Int[np.ndarray, " requests"]


def sequences() -> arrivals.Workload:
    """S1 to S7, all there from the start."""
    return arrivals.make(np.zeros(7), np.array(_PROMPTS), np.array(_OUTPUTS))


def requests() -> arrivals.Workload:
    """R1 to R5."""
    arrival_s, prompt, output = zip(*_TURNS, strict=True)
    return arrivals.make(np.array(arrival_s), np.array(prompt), np.array(output))


def times(
    first_s: Float[np.ndarray, " requests"], finish_s: Float[np.ndarray, " requests"]
) -> Times:
    """Turns ends of steps, in seconds, into iterations."""
    return Times(first_s.round().astype(np.int64), finish_s.round().astype(np.int64))


def grid(found: Times) -> Grid:
    """Lays the tokens of S1 to S7 out by slot.

    The free slot of the lowest number goes to the next request. A slot is idle in the
    iterations in which it has nobody, or one who has ended.
    """
    owner = np.full(NUM_SLOTS, -1)
    cells: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_SLOTS)]
    for step in range(1, int(found.last.max()) + 1):
        for slot in range(NUM_SLOTS):
            if owner[slot] >= 0 and found.last[owner[slot]] < step:
                owner[slot] = -1
        for request in np.flatnonzero(found.first == step):
            slot = int(np.flatnonzero(owner < 0)[0])
            owner[slot] = request
            cells[slot] += [(int(request), PROMPT, step)] * _PROMPTS[request]
        for slot, request in enumerate(owner.tolist()):
            kind = IDLE if request < 0 else TOKEN
            if request >= 0 and found.last[request] == step:
                kind = END
            cells[slot].append((request, kind, step))
    rows = np.array([row[:PLACES] for row in cells])
    return Grid(*np.moveaxis(rows, 2, 0))


def words(shown: Grid) -> list[str]:
    """Writes a grid as `STATIC` and `CONTINUOUS` are."""
    names = {IDLE: "--", END: "END"}
    return [
        " ".join(names.get(k, f"S{r + 1}") for r, k in zip(*row, strict=True))
        for row in zip(shown.request.tolist(), shown.kind.tolist(), strict=True)
    ]


def num_equal(shown: Grid, drawn: tuple[str, ...]) -> int:
    """Counts the cells that are as they were drawn."""
    pairs = zip(words(shown), drawn, strict=True)
    return sum(
        ours == theirs
        for row, other in pairs
        for ours, theirs in zip(row.split(), other.split(), strict=True)
    )


def batches(found: Times) -> list[str]:
    """Names who is in the batch, iteration by iteration."""
    return [
        " ".join(f"R{r + 1}" for r in np.flatnonzero(_runs(found, step)))
        for step in range(1, int(found.last.max()) + 1)
    ]


def num_joined(found: Times) -> int:
    """Counts requests let in while somebody of the first batch still ran."""
    first = found.first == found.first.min()
    return int((~first & (found.first <= found.last[first].max())).sum())


def _runs(found: Times, step: int) -> np.ndarray:
    return (found.first <= step) & (step <= found.last)
