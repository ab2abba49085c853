"""The lectures' two pictures of batching, as workloads and as drawn.

The first picture lists the tokens of sequences S1 to S7 in 4 slots, columns T1 to T8,
under static and under continuous batching. The second lists the batch of each iteration
for requests R1 to R5 with a limit of 3.

A simulated step takes 1 s, so that times are iterations, and a page holds a whole
sequence, so that pages are slots.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from experiments import lab
from jaxkv.workloads import Workload, make_workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_SLOTS = 4
MAX_BATCH = 3
PLACES = 8
IDLE, PROMPT_TOKEN, GENERATED_TOKEN, LAST_TOKEN = range(4)
"""Kinds of cells: idle, a prompt token, a generated token, the last generated token."""

STATIC = (
    "S1 S1 S1 S1 S1 END -- --",
    "S2 S2 S2 S2 S2 S2 S2 END",
    "S3 S3 S3 S3 END -- -- --",
    "S4 S4 S4 S4 S4 S4 END --",
)
"""One row per slot, columns T1 to T8, static batching."""
CONTINUOUS = (
    "S1 S1 S1 S1 S1 END S6 S6",
    "S2 S2 S2 S2 S2 S2 S2 END",
    "S3 S3 S3 S3 END S5 S5 S5",
    "S4 S4 S4 S4 S4 S4 END S7",
)
_PROMPTS = (3, 2, 3, 4, 2, 3, 2)
_OUTPUTS = (3, 6, 2, 3, 4, 3, 3)
"""Prompt and output tokens of S1 to S7. The lecture states that S3 ends after 2
iterations and S2 after 6; it draws no end for the last 3 sequences."""

BATCH_CONTENTS = ("R1 R2", "R1 R2 R3", "R1 R3 R4")
"""Batch of each of the first 3 iterations. R2 ends in the second; R5 waits."""
_TURNS = ((0.0, 3, 4), (0.0, 2, 2), (0.5, 3, 4), (1.4, 2, 3), (1.5, 3, 2))
"""Arrival, prompt tokens and output tokens of R1 to R5. R3 arrives during the first
iteration, R4 and R5 during the second."""


class IterationSpans(lab.ResultTable):
    """First and last iteration in which each request generated a token, from 1."""

    first: lab.Ints = lab.column("iteration of the first token")
    last: lab.Ints = lab.column("iteration of the last token")

    def runs(self, step: int) -> np.ndarray:
        """Returns a mask of the requests in the batch of an iteration."""
        return (self.first <= step) & (step <= self.last)


def lecture_sequences() -> Workload:
    """Returns S1 to S7, all of which arrive at 0 s."""
    return make_workload(np.zeros(7), np.array(_PROMPTS), np.array(_OUTPUTS))


def lecture_requests() -> Workload:
    """Returns the five requests of the lecture, R1 to R5."""
    return make_workload(*map(np.array, zip(*_TURNS, strict=True)))


def slot_grid(spans: IterationSpans) -> Int[np.ndarray, "slots places 3"]:
    """Arranges the tokens of S1 to S7 by slot.

    The next request takes the free slot of the lowest number. A slot is idle in
    iterations in which it is empty or its sequence has ended.

    Returns:
      For each cell: the sequence, -1 if none; `IDLE`, `PROMPT_TOKEN`,
      `GENERATED_TOKEN` or `LAST_TOKEN`; and the iteration.
    """
    owner = np.full(NUM_SLOTS, -1)
    cells: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_SLOTS)]
    for step in range(1, int(spans.last.max()) + 1):
        owner[(owner >= 0) & (spans.last[owner] < step)] = -1
        for request in np.flatnonzero(spans.first == step):
            slot = int(np.flatnonzero(owner < 0)[0])
            owner[slot] = request
            cells[slot] += [(int(request), PROMPT_TOKEN, step)] * _PROMPTS[request]
        for slot, request in enumerate(owner.tolist()):
            kind = LAST_TOKEN if spans.last[request] == step else GENERATED_TOKEN
            cells[slot].append((request, kind if request >= 0 else IDLE, step))
    return np.array([row[:PLACES] for row in cells])


def grid_rows(spans: IterationSpans) -> list[str]:
    """Formats the grid in the notation of `STATIC` and `CONTINUOUS`."""
    names = {IDLE: "--", LAST_TOKEN: "END"}
    return [
        " ".join(names.get(kind, f"S{request + 1}") for request, kind, _ in row)
        for row in slot_grid(spans).tolist()
    ]


def count_equal_cells(spans: IterationSpans, picture: tuple[str, ...]) -> int:
    """Counts the cells that equal those of the drawn picture."""
    ours, reference = (" ".join(rows).split() for rows in (grid_rows(spans), picture))
    return sum(x == y for x, y in zip(ours, reference, strict=True))


def batch_names(spans: IterationSpans) -> list[str]:
    """Returns the names of the requests in each iteration's batch."""
    return [
        " ".join(f"R{r + 1}" for r in np.flatnonzero(spans.runs(step)))
        for step in range(1, int(spans.last.max()) + 1)
    ]


def count_joined(spans: IterationSpans) -> int:
    """Counts requests that were admitted while the first batch still ran."""
    first = spans.first == spans.first.min()
    return int((~first & (spans.first <= spans.last[first].max())).sum())


def draw_grid(ax: "Axes", spans: IterationSpans, title: str) -> None:
    """Draws S1 to S7; the number below a sequence is the iteration."""
    names = [f"slot {i + 1}" for i in range(NUM_SLOTS)]
    _frame(ax, PLACES, names, title, "place in the slot [tokens]")
    for slot, row in enumerate(slot_grid(spans).tolist()):
        for place, (request, kind, step) in enumerate(row):
            if kind != IDLE:
                text = f"S{request + 1}" + (f"\n{step}" if kind != PROMPT_TOKEN else "")
                _cell(ax, place, slot, kind, text)
    _key(ax, (PROMPT_TOKEN, GENERATED_TOKEN, LAST_TOKEN))


def draw_iterations(
    ax: "Axes", spans: IterationSpans, title: str, *, is_static: bool
) -> None:
    """Draws R1 to R5 by iteration."""
    num_steps = int(spans.last.max())
    names = [f"R{i + 1}" for i in range(len(spans))]
    _frame(ax, num_steps, names, title, "time [iterations]")
    for row, step in np.ndindex(len(spans), num_steps + 1):
        first = spans.first[row]
        last = spans.last[row]
        batch_end = spans.last[spans.first == first].max()
        if first <= step <= last:
            kind = (
                LAST_TOKEN
                if step == last
                else PROMPT_TOKEN
                if step == first
                else GENERATED_TOKEN
            )
            _cell(ax, step - 1, row, kind, "")
        elif is_static and last < step <= batch_end:
            _cell(ax, step - 1, row, RESERVED, "")
        elif int(_TURNS[row][0]) < step < first:
            _cell(ax, step - 1, row, WAITS, "")
    _key(
        ax,
        (
            PROMPT_TOKEN,
            GENERATED_TOKEN,
            LAST_TOKEN,
            WAITS,
            *((RESERVED,) if is_static else ()),
        ),
    )


RESERVED = 4
WAITS = 5
"""Further kinds of cells: a slot kept by a finished request, and a waiting request."""
_CELL_NAMES = {
    PROMPT_TOKEN: "prompt",
    GENERATED_TOKEN: "token",
    LAST_TOKEN: "last token",
    RESERVED: "slot kept",
}
_CELL_NAMES[WAITS] = "waits"


def _fill(kind: int) -> dict[str, Any]:
    """Returns the colour and hatch of a kind of cell."""
    palette = lab.colors()
    fills = {
        PROMPT_TOKEN: palette[4],
        GENERATED_TOKEN: lab.lighten(palette[5]),
        LAST_TOKEN: palette[6],
    }
    look = {"facecolor": fills.get(kind, "0.6"), "edgecolor": "white"}
    waits = {"facecolor": "white", "edgecolor": "0.7", "hatch": "/////"}
    return waits if kind == WAITS else look


def _key(ax: "Axes", kinds: tuple[int, ...]) -> None:
    for kind in kinds:
        ax.fill_between([], [], label=_CELL_NAMES[kind], **_fill(kind))
    ax.legend(handlelength=1.2)


def _cell(ax: "Axes", x: int, y: int, kind: int, text: str) -> None:
    """Draws a cell with upper left corner (x, y)."""
    lab.draw_rectangle(ax, lab.Box(x, y, 1, 1), **_fill(kind))
    ax.text(
        x + 0.5,
        y + 0.5,
        text,
        va="center",
        ha="center",
        linespacing=1.0,
        color="white" if kind == LAST_TOKEN else lab.TEXT_COLOR,
    )


def _frame(ax: "Axes", columns: int, names: list[str], title: str, label: str) -> None:
    lab.set_labels(ax, title, label, "", xlim=(0, columns), ylim=(len(names), 0))
    ax.set_xticks(np.arange(columns) + 0.5, [str(x + 1) for x in range(columns)])
    ax.set_yticks(np.arange(len(names)) + 0.5, names)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
