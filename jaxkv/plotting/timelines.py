"""Timelines of a batch: slots against steps, in the colours of the requests."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxkv import validation
from jaxkv.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD = "0.82"
"""Grey of a slot that is held by a finished request."""

_NUMBER_ALIGNMENT = {"ha": "center", "va": "center_baseline"}


class SlotSpan(NamedTuple):
    """A range of steps in which a slot had one value.

    Attributes:
      slot: slot index.
      value: request id, or truth value.
      start: first step.
      end: step after the last.
    """

    slot: int
    value: int
    start: int
    end: int


def split_into_spans(values: Int[np.ndarray, "steps slots"]) -> Iterator[SlotSpan]:
    """Yields the ranges of equal values of every slot."""
    for slot, column in enumerate(np.asarray(values).T):
        cuts = np.flatnonzero(np.diff(column)) + 1
        edges = [0, *cuts.tolist(), len(column)]
        for start, end in itertools.pairwise(edges):
            if end > start:
                yield SlotSpan(slot, int(column[start]), start, end)


@validation.checks_numbers(first=0)
def draw_slots(
    ax: Any,
    request_id: Int[np.ndarray, "steps slots"],
    held: Bool[np.ndarray, "steps slots"],
    num_rows: Int[np.ndarray, "steps slots"],
    *,
    num_steps: int,
    first: int = 1,
) -> None:
    """Draws a batch: a bar per request with its number; prefill is darker.

    A slot that is held by a finished request is grey and hatched; an idle slot is
    white.

    Args:
      ax: axes; the first slot is at the top, and one step is one unit wide.
      request_id: request in each slot; -1 for none.
      held: True for slots held by a finished request.
      num_rows: tokens fed to each slot; more than one means prefill.
      num_steps: end of the x axis.
      first: number of slot 0 and of request 0 in the figure.
    """
    colors = style.colors()[1:]
    held = held & (request_id < 0)
    for span in split_into_spans(held.astype(np.int32)):
        if span.value:
            _bar(ax, span, facecolor="white", edgecolor=HELD, hatch="//////")
    for span in split_into_spans(request_id):
        if span.value >= 0:
            color = colors[span.value % len(colors)]
            _bar(ax, span, facecolor=color, edgecolor="white")
            text = str(span.value + first)
            if span.end - span.start > 0.016 * len(text) * num_steps:
                # Luminance in [0, 1]: Rec. 709 weights, with gamma 2.
                weights = zip((0.213, 0.715, 0.072), color, strict=True)
                ink = "black" if sum(w * x * x for w, x in weights) > 0.35 else "white"
                center = ((span.start + span.end) / 2, span.slot + 1)
                ax.text(*center, text, color=ink, **_NUMBER_ALIGNMENT)
    reads = np.where((request_id >= 0) & (num_rows > 1), request_id, -1)
    for span in split_into_spans(reads):
        if span.value >= 0:
            _bar(ax, span, facecolor="black", alpha=0.4, linewidth=0)
    num_slots = request_id.shape[1]
    ax.set_xlim(0, num_steps)
    ax.set_ylim(num_slots + 0.6, 0.4)
    ticks = range(1, num_slots + 1) if num_slots <= 16 else [1, num_slots]
    ax.set_yticks(ticks, [str(tick - 1 + first) for tick in ticks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylabel("slot [1]")
    for label, look in (
        ("prefill", {"facecolor": "0.35"}),
        ("decode (colour and number: request)", {"facecolor": colors[0]}),
        (
            "ended, slot held",
            {"facecolor": "white", "edgecolor": HELD, "hatch": "//////"},
        ),
    ):
        if label[0] != "e" or held.any():
            ax.fill_between([], [], label=label, **look)
    ax.legend()


def _bar(ax: "Axes", span: SlotSpan, **look: Any) -> None:
    place = [(span.start, span.end - span.start)]
    look = {"linewidth": 0.4} | look
    ax.broken_barh(place, (span.slot + 0.56, 0.88), **look)
