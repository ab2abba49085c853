"""Swap space in host memory, beyond the staging buffer on the device.

Between two calls of the compiled steps, the host copies pages of swapped requests out
of the staging buffer, and copies them back when the requests are to run again. It
decides where pages are stored, not which request runs: a request waits while its pages
are on the host, and no token depends on that.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, memory
from jaxkv.engine import EngineState, clear_swapped
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import NO_PAGE, Pages, Staging, expand_pages, scatter_pages, to_host


class HostTransfer(NamedTuple):
    """Pages to move between staging buffer and host."""

    leaves: Bool[Array, " sequences"]
    """Requests whose pages were copied to the host, by the row of their first
    sequence."""
    lost: Bool[Array, " sequences"]
    """Requests whose pages are dropped; their tokens will be fed again."""
    arrives: Int32[Array, ""]
    """Request whose pages are copied back, or `NO_SEQUENCE`."""
    place: Int32[Array, " places"]
    """New place of the page from each place, or `NO_PAGE`."""
    pages: Pages
    """Page contents to copy back, each at its old place."""


def apply_transfer(
    staging: Staging, group: Int32[Array, " sequences"], moves: HostTransfer
) -> Staging:
    """Updates the staging buffer after a copy to the host, and writes copied pages.

    `group` is the request of each sequence.
    """
    s = memory.forget(staging, group, moves.lost)
    left = arrays.take(moves.leaves, s.owner, fill=False)
    owner = jnp.where(left, NO_SEQUENCE, s.owner)
    owner = arrays.put(owner, moves.place, moves.arrives)
    is_arriving = (group == moves.arrives) & (moves.arrives >= 0)
    page_ids = arrays.take(moves.place, s.page_ids, fill=NO_PAGE)
    is_first = jnp.arange(group.shape[0], dtype=jnp.int32) == moves.arrives
    return s._replace(
        pages=scatter_pages(s.pages, moves.place, moves.pages),
        owner=owner,
        page_ids=jnp.where(is_arriving[:, None], page_ids, s.page_ids),
        on_host=(s.on_host | moves.leaves) & ~is_first,
    )


class HostSpace:
    """Pages of swapped requests in host memory."""

    def __init__(self, num_pages: int, move: jax.stages.Wrapped):
        """Makes an empty space for at most `num_pages` pages.

        `move` is the compiled function `apply_transfer`.
        """
        self.num_pages = num_pages
        self._move = move
        self._kept: dict[int, tuple[np.ndarray, Pages]] = {}
        self._is_compiled = False

    def copy(self) -> "HostSpace":
        """Returns a space with the same pages, which are never modified in place."""
        other = HostSpace(self.num_pages, self._move)
        other._kept = {**self._kept}
        other._is_compiled = self._is_compiled
        return other

    @property
    def num_used(self) -> int:
        """Pages in host memory."""
        return sum(len(places) for places, _ in self._kept.values())

    def compile(self, state: EngineState) -> None:
        """Compiles the program of `exchange`, once; moves no pages."""
        s = state.staging
        if s is not None and not self._is_compiled:
            self._move.lower(s, state.sequences.group, empty_transfer(s)).compile()
            self._is_compiled = True

    def exchange(self, state: EngineState) -> EngineState:
        """Moves pages so that the next swapped request is in the staging buffer.

        All other swapped requests leave the buffer while host memory has room. If the
        next request does not fit into the buffer, its pages are dropped.

        Args:
          state: engine state between two calls; consumed.

        Returns:
          The new state.
        """
        s = state.staging
        assert s is not None
        owner = np.asarray(s.owner)
        on_host = np.asarray(s.on_host)
        # A request that the device no longer has was cancelled.
        self._kept = {
            row: host_copy for row, host_copy in self._kept.items() if on_host[row]
        }
        staged = set(owner[owner >= 0].tolist())
        queue = np.asarray(state.ledger.queue).tolist()
        out = [row for row in queue if row in staged or row in self._kept]
        moves = empty_transfer(s)
        if not out:
            return state
        first = out[0]
        rows = out[1:]
        comes = self._kept.pop(first, None)
        for row in rows:
            places = np.flatnonzero(owner == row)
            if row in staged and self.num_used + len(places) <= self.num_pages:
                self._kept[row] = places, to_host(s.pages, places)
                moves.leaves[row] = True
        if comes is not None:
            places, pages = comes
            free = np.flatnonzero((owner < 0) | moves.leaves[np.maximum(owner, 0)])
            if len(free) < len(places):
                moves.lost[first] = True
            else:
                moves.arrives[...] = first
                moves.place[places] = free[: len(places)]
                content = expand_pages(pages, len(owner), places)
                moves = moves._replace(pages=content)
        if moves.lost.any():
            lost = moves.lost[np.asarray(state.sequences.group)]
            state = state._replace(ledger=clear_swapped(state.ledger, lost))
        return state._replace(staging=self._move(s, state.sequences.group, moves))


def empty_transfer(staging: Staging) -> Any:
    """Returns a transfer without pages, as NumPy arrays to fill in."""
    s = staging
    (num_sequences,), (num_places,) = s.on_host.shape, s.owner.shape
    blank: Any = HostTransfer  # of NumPy arrays, not of JAX ones
    return blank(
        leaves=np.zeros(num_sequences, bool),
        lost=np.zeros(num_sequences, bool),
        arrives=np.full((), NO_SEQUENCE, np.int32),
        place=np.full(num_places, NO_PAGE, np.int32),
        pages=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), s.pages),
    )
