"""One serving of a list of requests: what every step did, and its numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.engine import StepInfo
from jaxkv.serving import Completion


class Served(NamedTuple):
    """What happened. Steps that fed nothing are left out.

    Attributes:
      request_id: of the request in each slot, -1 for none: [steps, slots].
      held: slots kept for a finished request: [steps, slots].
      num_rows: tokens fed: [steps, slots].
      used_pages: pages reserved: [steps].
      used_places: token places that hold K and V: [steps].
      page_size: token places in a page.
      latency_s: from each request's arrival until the host held its last token; not a
        number where it was not served to its end: [requests].
      num_tokens: tokens of each answer: [requests].
      text: the answers: [requests].
      reason: why each ended; empty where it did not: [requests].
      duration_s: from the first arrival until the host held the last token.
      compile_s: what compiling took before that, with a request to warm up.
    """

    request_id: np.ndarray
    held: np.ndarray
    num_rows: np.ndarray
    used_pages: np.ndarray
    used_places: np.ndarray
    page_size: int
    latency_s: np.ndarray
    num_tokens: np.ndarray
    text: np.ndarray
    reason: np.ndarray
    duration_s: float
    compile_s: float

    @property
    def is_done(self) -> np.ndarray:
        """Which requests were served to their end: [requests]."""
        return self.reason != ""


def gather(
    trace: list[StepInfo],
    answers: Mapping[int, Completion],
    *,
    num_requests: int,
    num_slots: int,
    page_size: int,
    compile_s: float,
) -> Served:
    """Lines up the steps of a trace, and the answers by request id.

    Args:
      trace: step infos of an engine's calls, in order; may be empty.
      answers: those that are complete; ids are in [0, num_requests).
      num_requests: how many there should be.
      num_slots: the engine's.
      page_size: the engine's.
      compile_s: seconds spent before the clock started.
    """
    none = np.zeros((0, num_slots), np.int32)
    fields = {"request_id": none, "held": none == 1, "num_rows": none}
    fields |= {"used_pages": none[:, 0], "used_places": none[:, 0]}
    if trace:
        infos = jax.tree.map(lambda *parts: np.concatenate(parts), *trace)
        fed = infos.num_rows.any(1)
        fields = {name: getattr(infos, name)[fed] for name in fields}
    latency_s = np.full(num_requests, np.nan)
    num_tokens = np.zeros(num_requests, np.int32)
    text, reason = [""] * num_requests, [""] * num_requests
    for i, answer in answers.items():
        latency_s[i] = answer.finish_s - answer.arrival_s
        num_tokens[i], reason[i] = len(answer.tokens), answer.reason
        text[i] = answer.text or ""
    start_s = min((answer.arrival_s for answer in answers.values()), default=0.0)
    end_s = max((answer.finish_s for answer in answers.values()), default=0.0)
    return Served(
        **fields,
        page_size=page_size,
        latency_s=latency_s,
        num_tokens=num_tokens,
        text=np.array(text),
        reason=np.array(reason),
        duration_s=end_s - start_s,
        compile_s=compile_s,
    )


def numbers(served: Served) -> dict[str, Any]:
    """Sums a serving up; `None` stands for a number of nothing.

    Returns:
      tokens_per_s: tokens of complete answers over `duration_s`.
      steps: that fed tokens.
      mean_latency_s, p95_latency_s: of complete answers.
      kv_utilisation: mean over steps of the share of reserved token places that hold
        one, finished sequences that keep their places included.
      slot_utilisation: mean over steps of the share of slots whose sequence is fed.
      duration_s, compile_s: as they are.
    """
    latency_s = served.latency_s[served.is_done]
    some, steps = latency_s.size > 0, len(served.num_rows)
    reserved = served.used_pages * served.page_size
    share = served.used_places / np.maximum(reserved, 1)
    return {
        "tokens_per_s": served.num_tokens.sum() / served.duration_s if some else None,
        "steps": steps,
        "mean_latency_s": latency_s.mean() if some else None,
        "p95_latency_s": np.percentile(latency_s, 95) if some else None,
        "kv_utilisation": share.mean() if steps else None,
        "slot_utilisation": (served.num_rows > 0).mean() if steps else None,
        "duration_s": served.duration_s,
        "compile_s": served.compile_s,
    }
