"""Swap space in host memory: what the staging buffer has no room for, or need not hold.

Between two calls of the compiled steps the host takes the pages of swapped requests out
of the staging buffer, and brings them back when their turn comes. It decides where
pages are, never who runs: that a request's pages are away keeps it waiting, and no
token depends on it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.engine import NOBODY, EngineState
from jaxkv.memory import NO_PAGE, Pages, Staging, kv_pages, swap_buffer


class Moves(NamedTuple):
    """What moves between the buffer and the host, besides the pages that leave."""

    leaves: Bool[Array, " sequences"]
    """Requests whose pages the host has taken, by the row of their first sequence."""
    lost: Bool[Array, " sequences"]
    """Requests whose pages it gives up: their tokens will be fed again."""
    arrives: Int32[Array, ""]
    """Request whose pages it brings, or NOBODY."""
    place: Int32[Array, " places"]
    """New place of the page that came from each place, or `NO_PAGE`."""
    pages: Pages
    """Content that it brings, in the place that it came from."""


def move(staging: Staging, group: Int32[Array, " sequences"], moves: Moves) -> Staging:
    """Notes in the buffer what the host took, and puts what it brings there.

    `group` is the request of each sequence.
    """
    s = swap_buffer.forget(staging, group, moves.lost)
    left = arrays.take(moves.leaves, s.owner, fill=False)
    owner = jnp.where(left, NOBODY, s.owner)
    owner = arrays.put(owner, moves.place, moves.arrives)
    mine = (group == moves.arrives) & (moves.arrives >= 0)
    page_ids = arrays.take(moves.place, s.page_ids, fill=NO_PAGE)
    at_home = jnp.arange(group.shape[0], dtype=jnp.int32) == moves.arrives
    return s._replace(
        pages=kv_pages.scatter_pages(s.pages, moves.place, moves.pages),
        owner=owner,
        page_ids=jnp.where(mine[:, None], page_ids, s.page_ids),
        on_host=(s.on_host | moves.leaves) & ~at_home,
    )


class HostSpace:
    """Pages of swapped requests in the memory of the host."""

    def __init__(self, num_pages: int, move: Any):
        """Makes an empty space for at most `num_pages` pages.

        `move` is the function of that name, compiled.
        """
        self.num_pages, self._move = num_pages, move
        self._kept: dict[int, tuple[np.ndarray, Pages]] = {}
        self._is_compiled = False

    def copy(self) -> "HostSpace":
        """Returns a space with the same pages, which are never changed in place."""
        other = HostSpace(self.num_pages, self._move)
        other._kept, other._is_compiled = {**self._kept}, self._is_compiled
        return other

    @property
    def num_used(self) -> int:
        """Pages that are here."""
        return sum(len(places) for places, _ in self._kept.values())

    def compile(self, state: EngineState) -> None:
        """Makes the program that `exchange` runs, once; moves nothing."""
        s = state.staging
        if s is not None and not self._is_compiled:
            self._move.lower(s, state.sequences.group, no_moves(s)).compile()
            self._is_compiled = True

    def exchange(self, state: EngineState) -> EngineState:
        """Moves pages so that the request that comes back next is in the buffer.

        All others that are swapped out leave the buffer as far as there is room here.
        If the next one finds no room in the buffer, its pages are given up.

        Args:
          state: the engine, at rest; consumed.

        Returns:
          The new state.
        """
        s = state.staging
        assert s is not None
        owner, on_host = np.asarray(s.owner), np.asarray(s.on_host)
        # What the device no longer knows of was cancelled.
        self._kept = {row: kept for row, kept in self._kept.items() if on_host[row]}
        staged = set(owner[owner >= 0].tolist())
        queue = np.asarray(state.queue.sequence).tolist()
        out = [row for row in queue if row in staged or row in self._kept]
        moves = no_moves(s)
        if not out:
            return state
        first, rest = out[0], out[1:]
        comes = self._kept.pop(first, None)
        for row in rest:
            places = np.flatnonzero(owner == row)
            if row in staged and self.num_used + len(places) <= self.num_pages:
                self._kept[row] = places, kv_pages.to_host(s.pages, places)
                moves.leaves[row] = True
        if comes is not None:
            places, pages = comes
            free = np.flatnonzero((owner < 0) | moves.leaves[np.maximum(owner, 0)])
            if len(free) < len(places):
                moves.lost[first] = True
            else:
                moves.arrives[...] = first
                moves.place[places] = free[: len(places)]
                content = kv_pages.expand_pages(pages, len(owner), places)
                moves = moves._replace(pages=content)
        return state._replace(staging=self._move(s, state.sequences.group, moves))


def no_moves(staging: Staging) -> Any:
    """Moves of nothing, as NumPy arrays to be filled in."""
    s = staging
    (num_sequences,), (num_places,) = s.on_host.shape, s.owner.shape
    blank: Any = Moves  # of NumPy arrays, not of JAX ones
    return blank(
        leaves=np.zeros(num_sequences, bool),
        lost=np.zeros(num_sequences, bool),
        arrives=np.full((), NOBODY, np.int32),
        place=np.full(num_places, NO_PAGE, np.int32),
        pages=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), s.pages),
    )
