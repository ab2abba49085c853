"""Policies that make no progress, as the host of an engine or a simulation sees them.

A compiled step cannot raise, and a policy of the caller's own may admit no request, or
preempt what it has just admitted, for ever. So the host counts steps without progress.
A step makes progress if it draws a token or ends a sequence. It also does if it feeds
rows, as long as those fed since the last token are no more than the tokens of all
requests: beyond that, the same K and V are written again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

MAX_STEPS = 64
"""Steps without progress, while a request that has arrived waits, until an error."""


class StallError(RuntimeError):
    """The policy makes no progress; the message names it and a request that waits."""

    request_id: int | None = None
    """Name of that request; None in a simulation."""


class StepCounter:
    """Counts the latest steps without progress, of one engine."""

    def __init__(self) -> None:
        """Begins with none."""
        self.num_steps = 0
        """Steps in a row without progress."""
        self._num_rows = 0  # since the last token

    def reset(self) -> None:
        """Notes progress."""
        self.num_steps = self._num_rows = 0

    def count(
        self,
        draws: Bool[np.ndarray, " steps"],
        num_rows: Int[np.ndarray, " steps"],
        *,
        num_tokens: Callable[[], int],
        waits: Bool[np.ndarray, " steps"] | None = None,
    ) -> None:
        """Notes the next steps.

        Args:
          draws: whether each draws a token or ends a sequence.
          num_rows: rows that each feeds.
          num_tokens: returns the tokens of all requests that are not complete.
          waits: steps that only wait for the next arrival, which is progress.
        """
        if draws.any():
            self.reset()
            begin = int(np.flatnonzero(draws)[-1]) + 1
            num_rows = num_rows[begin:]
            waits = None if waits is None else waits[begin:]
        if not num_rows.size:
            return
        total = self._num_rows + np.cumsum(num_rows)
        self._num_rows, moves = int(total[-1]), num_rows > 0
        if moves.any():
            moves &= total <= num_tokens()
        if waits is not None:
            moves |= waits
        places = np.flatnonzero(moves)
        if places.size:
            self.num_steps = num_rows.size - 1 - int(places[-1])
        else:
            self.num_steps += num_rows.size


def error(
    policy: Any, request: str, *, has_pages: bool, request_id: int | None = None
) -> StallError:
    """Makes the error.

    Args:
      policy: the policy.
      request: name and size of a request that waits.
      has_pages: False if the last plan asked for more pages than there are.
      request_id: its name, in an engine.
    """
    name = type(policy).__name__
    cause = "it must admit requests and feed rows"
    if not has_pages:
        cause = "its plan needs more pages than there are"
    found = StallError(
        f"policy {name} made no progress for {MAX_STEPS} steps while {request} waits: "
        f"{cause}"
    )
    found.request_id = request_id
    return found
