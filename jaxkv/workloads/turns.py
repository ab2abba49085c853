"""Turns of sessions: which answers a request of a trace waited for, and how long after.

A trace has the times at which requests were sent. A request that is a turn of a session
was sent after earlier answers, and a replay sends it after its own answers: `after` has
the indices of these requests, and `delay_s` the time between the last answer and the
request, in which a user thinks or a tool runs.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Int64


class TurnLinks(NamedTuple):
    """Sessions and waits of requests."""

    session: Int32[np.ndarray, " requests"]
    """Session of each request, numbered from 0 in order of first appearance."""
    after: Int32[np.ndarray, "requests width"]
    """Requests that are answered before each request is sent; -1 in unused columns."""
    delay_s: Float[np.ndarray, " requests"]
    """Time in s between the last of these answers and the request; 0 without any."""


def number_in_order(values: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
    """Numbers distinct values from 0, in order of first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(first.size, np.int32)
    rank[np.argsort(first)] = np.arange(first.size, dtype=np.int32)
    return rank[inverse]


def link_sessions(
    session: Int64[np.ndarray, " requests"],
    sent_s: Float[np.ndarray, " requests"],
    answer_s: Float[np.ndarray, " requests"],
) -> TurnLinks:
    """Links the turns of each session: a turn waits for the one before it.

    A turn that was sent before that answer was there did not wait for it. It waits for
    the latest turn that was answered by then, if there is one.

    Args:
      session: session of each request; -1 for a request without one.
      sent_s: times at which the requests were sent, ascending.
      answer_s: time in s from each request to its answer.
    """
    num = session.size
    alone = np.flatnonzero(session < 0)
    session_ids = session.copy()
    session_ids[alone] = session.max(initial=-1) + 1 + np.arange(alone.size)
    order = np.argsort(session_ids, kind="stable")
    previous = np.full(num, -1)
    same = session_ids[order[1:]] == session_ids[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    end_s = sent_s + answer_s
    after = previous.copy()
    early = (previous >= 0) & (sent_s < end_s[previous])
    # Sessions with such turns: the turn that was answered last, and open turns by end.
    open_turns: dict[int, list[tuple[float, int]]] = {
        x: [] for x in set(session_ids[early])
    }
    latest: dict[int, int] = {}
    for turn in np.flatnonzero(np.isin(session_ids, [*open_turns])).tolist():
        name = int(session_ids[turn])
        while open_turns[name] and open_turns[name][0][0] <= sent_s[turn]:
            latest[name] = heapq.heappop(open_turns[name])[1]
        after[turn] = latest.get(name, -1)
        heapq.heappush(open_turns[name], (float(end_s[turn]), turn))
    return TurnLinks(
        number_in_order(session_ids),
        after[:, None].astype(np.int32),
        np.where(after >= 0, sent_s - end_s[after], 0.0),
    )


def link_parents(
    chat: Int64[np.ndarray, " requests"],
    parent: Int64[np.ndarray, " requests"],
    sent_s: Float[np.ndarray, " requests"],
    answer_s: Float[np.ndarray, " requests"],
) -> TurnLinks:
    """Links each request to its parent; a tree of requests is a session.

    Requests whose parent is not in the trace start sessions; those of one such parent
    share theirs.

    Args:
      chat: id of each request, all different.
      parent: id of the parent of each request, negative for none.
      sent_s: times at which the requests were sent, ascending.
      answer_s: time in s from each request to its answer. A request sent before the
        answer of its parent has a delay of 0.

    Raises:
      ValueError: a request comes before its parent; the message begins with its index.
    """
    order = np.argsort(chat, kind="stable")
    place = np.searchsorted(chat, parent, sorter=order)
    candidate = order[np.minimum(place, chat.size - 1)]
    is_here = (parent >= 0) & (chat[candidate] == parent)
    after = np.where(is_here, candidate, -1)
    index = np.arange(chat.size)
    if (late := after >= index).any():
        raise ValueError(f"{int(np.argmax(late))} comes before its parent")
    root = np.where(is_here, after, index)
    while (root != root[root]).any():
        root = root[root]
    key = np.where(parent[root] >= 0, parent[root], chat[root])
    delay_s = np.maximum(sent_s - (sent_s + answer_s)[after], 0.0)
    return TurnLinks(
        number_in_order(key),
        after[:, None].astype(np.int32),
        np.where(is_here, delay_s, 0.0),
    )


def pad_rows(rows: Sequence[Sequence[int]]) -> Int32[np.ndarray, "rows width"]:
    """Returns rows of different lengths as one array, filled with -1."""
    width = max(map(len, rows), default=0)
    padded = np.full((len(rows), max(width, 1)), -1, np.int32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
