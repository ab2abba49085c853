"""Who was preempted, who came back and how: read off the trace of an engine.

The trace says who was in which slot and how many tokens it fed. A request that is in a
slot and then is not, though it has not ended, was preempted. When it is back it either
has its pages, and then feeds nothing in its first step, or it feeds from the beginning.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxkv.engine import StepInfo


def read(
    request_id: Int[np.ndarray, "steps slots"],
    num_rows: Int[np.ndarray, "steps slots"],
    ended: Bool[np.ndarray, "steps slots"],
    *,
    page_size: int,
) -> dict[str, int]:
    """Follows every request, each of one sequence, through a trace.

    Args:
      request_id: of the request in each slot, -1 for none.
      num_rows: tokens fed.
      ended: where the request ended in this step.
      page_size: token places in a page.

    Returns:
      What became of them, named as columns of `serving.Servings`.
    """
    preempted = returned = moved = lost = overtaken = 0
    written: dict[int, int] = {}  # tokens with K and V, by request
    running: set[int] = set()
    away: set[int] = set()
    owed: set[int] = set()  # preempted, and have not completed
    for ids, rows_fed, ends in zip(request_id, num_rows, ended, strict=True):
        slots = np.flatnonzero(ids >= 0)
        here = dict(zip(ids[slots].tolist(), slots, strict=True))
        gone = running - here.keys()
        preempted += len(gone)
        away |= gone
        owed |= gone
        for name, slot in here.items():
            rows = int(rows_fed[slot])
            if name not in written:
                overtaken += bool(owed)
            elif name in away:
                away.remove(name)
                if rows == 0:
                    returned += 1
                    moved += 2 * -(-written[name] // page_size)
                else:
                    lost += written[name]
                    written[name] = 0
            written[name] = written.get(name, 0) + rows
        done = {name for name, slot in here.items() if ends[slot]}
        running = here.keys() - done
        owed -= done
    return {
        "num_preempted": preempted,
        "num_returned": returned,
        "pages_moved": moved,
        "num_fed": int(num_rows.sum()),
        "num_recomputed": lost,
        "num_overtaken": overtaken,
        "steps": int((request_id >= 0).any(1).sum()),
    }


def read_trace(
    trace: Sequence[StepInfo], *, num_recomputed: int, page_size: int
) -> dict[str, int]:
    """Reads a whole run, and compares with what the engine counted itself.

    Args:
      trace: step infos of all calls of a run that came to its end.
      num_recomputed: tokens that the engine says were computed again.
      page_size: token places in a page.

    Raises:
      RuntimeError: trace and engine disagree.
    """
    columns = [
        np.concatenate([getattr(info, name) for info in trace])
        for name in ("request_id", "num_rows", "reason")
    ]
    found = read(columns[0], columns[1], columns[2] > 0, page_size=page_size)
    counted = {
        "num_preempted": sum(int(info.num_preempted.sum()) for info in trace),
        "num_returned": sum(int(info.num_swapped_in.sum()) for info in trace),
        "num_recomputed": num_recomputed,
    }
    for name, count in counted.items():
        if found[name] != count:
            raise RuntimeError(f"{name}: {found[name]} in trace, not {count}")
    return found
