"""Detection of policies that make no progress.

A compiled step cannot raise an error, and a faulty policy may never admit a request, or
preempt each request right after its admission. The host therefore counts steps without
progress. A step makes progress if it emits a token or ends a sequence. A step that
feeds rows also counts as progress, unless the rows fed since the last token exceed the
tokens of all requests, in which case the same K and V are being written again.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from jaxkv.scheduling.interface import Policy

MAX_STALLED_STEPS = 64
"""Consecutive steps without progress, while a request waits, that raise an error."""


class StallError(RuntimeError):
    """The policy makes no progress; the message names it and a waiting request."""

    request_id: int | None = None
    """Id of that request; None in a simulation."""


class StepCounter:
    """Counts consecutive steps without progress of one engine."""

    def __init__(self) -> None:
        """Starts at 0."""
        self.num_steps = 0
        """Consecutive steps without progress."""
        self._num_rows = 0  # since the last token

    def reset(self) -> None:
        """Records progress."""
        self.num_steps = self._num_rows = 0

    def count(
        self,
        draws: Bool[np.ndarray, " steps"],
        num_rows: Int[np.ndarray, " steps"],
        *,
        num_tokens: Callable[[], int],
        waits: Bool[np.ndarray, " steps"] | None = None,
    ) -> None:
        """Records the next steps.

        Args:
          draws: True for steps that emit a token or end a sequence.
          num_rows: rows fed in each step.
          num_tokens: returns the number of tokens of all unfinished requests.
          waits: True for steps that only wait for the next arrival, which is progress.
        """
        if draws.any():
            self.reset()
            begin = int(np.flatnonzero(draws)[-1]) + 1
            num_rows = num_rows[begin:]
            waits = None if waits is None else waits[begin:]
        if not num_rows.size:
            return
        total = self._num_rows + np.cumsum(num_rows)
        self._num_rows = int(total[-1])
        moves = num_rows > 0
        if moves.any():
            moves &= total <= num_tokens()
        if waits is not None:
            moves |= waits
        places = np.flatnonzero(moves)
        if places.size:
            self.num_steps = num_rows.size - 1 - int(places[-1])
        else:
            self.num_steps += num_rows.size


def stall_error(
    policy: Policy,
    request: str,
    *,
    has_pages: bool,
    preempts: bool,
    request_id: int | None = None,
) -> StallError:
    """Makes the error, which names the field of `Plan` that prevents progress.

    Args:
      policy: the policy.
      request: description of a waiting request.
      has_pages: False if the last plan needed more pages than the pool has.
      preempts: True if plans since the last progress preempted sequences.
      request_id: id of the request, in an engine.
    """
    cause = "it must admit requests and feed rows, Plan.admit and Plan.num_rows"
    if preempts:
        cause = "Plan.preempt returns its running sequences to the queue"
    if not has_pages:
        cause = "its plan needs more pages than there are, Plan.places"
    error = StallError(
        f"policy {type(policy).__name__} made no progress for {MAX_STALLED_STEPS} "
        f"steps while {request} waits: {cause}"
    )
    error.request_id = request_id
    return error
