"""Pages of layers with a window in the engine: see `memory.window_pool`.

A step maps the pages that its rows write, and at its end releases those behind the
window of each slot's accepted tokens. Full pages are checkpoints of their pages in the
prefix cache; a request starts on cached pages up to the last one whose window is there.

Unless `EngineConfig.release_window_pages` is set, no function changes the engine.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, memory
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import (
    NO_PAGE,
    Violations,
    WindowPool,
    first_window_page,
    window_pages_of,
    window_table,
)


def window_of(state: EngineState) -> int:
    """Returns the largest window of the layers that release pages."""
    assert state.pages.windowed is not None
    window = state.pages.windowed.layout.window
    assert window is not None  # `make_pages` sets it
    return window


@jax.named_scope("windows")
def map_windows(
    state: EngineState, num_rows: Int32[Array, " slots"], config: EngineConfig
) -> EngineState:
    """Maps the pages that the rows of a step write, and copies shared ones.

    `num_rows` are the rows of each slot, granted drafts included.
    """
    if (windows := state.windows) is None:
        return state
    windows, copies = memory.map_window_pages(
        windows, state.table, num_rows, page_size=config.page_size
    )
    windowed = state.pages.windowed
    assert windowed is not None
    windowed = memory.copy(windowed, copies.source, copies.target)
    pages = state.pages._replace(windowed=windowed)
    return state._replace(pages=pages, windows=windows)


@jax.named_scope("windows")
def trim_windows(state: EngineState, config: EngineConfig) -> EngineState:
    """Releases the pages behind the windows, and those of rejected drafts."""
    if (windows := state.windows) is None:
        return state
    windows = memory.trim_window_pages(
        windows, state.table, window=window_of(state), page_size=config.page_size
    )
    return state._replace(windows=windows)


def attach_windows(
    state: EngineState,
    first: Int32[Array, " slots"],
    num_filled: Int32[Array, " slots"],
) -> EngineState:
    """Makes pages checkpoints of the cached pages that they were filled with.

    `num_filled` pages of each slot from its page `first` on were filled in this step.
    """
    if (windows := state.windows) is None or state.prefixes is None:
        return state
    column = jnp.arange(windows.page_ids.shape[1], dtype=jnp.int32)[None, :]
    is_filled = (column >= first[:, None]) & (column < (first + num_filled)[:, None])
    page_ids = jnp.where(is_filled, state.table.page_ids, NO_PAGE)
    windows = memory.attach_window_pages(windows, state.prefixes, page_ids)
    return state._replace(windows=windows)


def cut_to_windows(
    state: EngineState, page_ids: Int32[Array, "head pages_per_slot"]
) -> Int32[Array, "head pages_per_slot"]:
    """Returns the cached pages of requests up to the last one with its window."""
    return _find_windows(state, page_ids)[0]


def start_on_windows(
    state: EngineState,
    page_ids: Int32[Array, "head pages_per_slot"],
    slot: Int32[Array, " head"],
) -> EngineState:
    """Makes admitted requests continue from the windows at the ends of their prefixes.

    `page_ids` are the cached pages of each request, and `slot` is its first slot, -1 if
    it was not admitted.
    """
    if (windows := state.windows) is None:
        return state
    _, window_ids = _find_windows(state, page_ids)
    windows = memory.start_on_window_pages(windows, window_ids, slot)
    return state._replace(windows=windows)


def _find_windows(
    state: EngineState, page_ids: Int32[Array, "head pages_per_slot"]
) -> tuple[Array, Array]:
    """Returns the result of `window_pages_of`."""
    windows = state.windows
    cache = state.prefixes
    if windows is None or cache is None:
        return page_ids, page_ids
    return window_pages_of(
        windows, cache, page_ids, window=window_of(state), page_size=cache.page_size
    )


def continue_windows(state: EngineState, source: Int32[Array, " slots"]) -> EngineState:
    """Makes slots share the pages of other slots; -1 leaves a slot as it is.

    The page table is that before the change.
    """
    if (windows := state.windows) is None:
        return state
    windows = memory.continue_window_slots(windows, state.table, source)
    return state._replace(windows=windows)


def move_windows(state: EngineState, source: Int32[Array, " slots"]) -> EngineState:
    """Moves pages with their slots, see `page_table.move_slots`."""
    if (windows := state.windows) is None:
        return state
    page_ids = arrays.take(windows.page_ids, source, fill=NO_PAGE)
    return state._replace(windows=windows._replace(page_ids=page_ids))


def release_windows(state: EngineState, mask: Bool[Array, " slots"]) -> EngineState:
    """Releases the pages of masked slots."""
    if (windows := state.windows) is None:
        return state
    return state._replace(windows=memory.drop_window_slots(windows, mask))


def keep_if_room(
    state: EngineState, leaves: Bool[Array, " slots"]
) -> Bool[Array, " slots"]:
    """Returns the slots to swap out, none unless all can keep their pages meanwhile."""
    if (windows := state.windows) is None:
        return leaves
    is_out = jnp.any(windows.of_sequence != NO_PAGE, axis=1)
    num = jnp.sum(leaves, dtype=jnp.int32) + jnp.sum(is_out, dtype=jnp.int32)
    return leaves & (num <= leaves.shape[0])


def swap_windows_out(state: EngineState, mask: Bool[Array, " slots"]) -> EngineState:
    """Gives the pages of swapped slots to their sequences."""
    if (windows := state.windows) is None:
        return state
    row = jnp.where(mask, state.slots.sequence, -1)
    windows = windows._replace(
        of_sequence=arrays.put(windows.of_sequence, row, windows.page_ids),
        page_ids=jnp.where(mask[:, None], NO_PAGE, windows.page_ids),
    )
    return state._replace(windows=windows)


def swap_windows_in(
    state: EngineState, slots: Int32[Array, " sequences"]
) -> EngineState:
    """Gives the pages of sequences to their slots; -1 for sequences without one."""
    if (windows := state.windows) is None:
        return state
    comes = (slots >= 0)[:, None]
    windows = windows._replace(
        page_ids=arrays.put(windows.page_ids, slots, windows.of_sequence),
        of_sequence=jnp.where(comes, NO_PAGE, windows.of_sequence),
    )
    return state._replace(windows=windows)


def forget_swapped_windows(
    state: EngineState, mask: Bool[Array, " sequences"]
) -> EngineState:
    """Releases the pages of masked sequences that are swapped out."""
    if (windows := state.windows) is None:
        return state
    return state._replace(windows=memory.release_swapped_windows(windows, mask))


def forget_windows_of_prefixes(state: EngineState) -> EngineState:
    """Drops all checkpoints, for an emptied prefix cache."""
    if (windows := state.windows) is None:
        return state
    windows = windows._replace(page=jnp.full_like(windows.page, NO_PAGE))
    return state._replace(windows=windows)


def num_used_window_pages(state: EngineState) -> Int32[Array, ""] | None:
    """Counts the pages in use, those of swapped sequences included."""
    if (windows := state.windows) is None:
        return None
    return windows.pool.ref.shape[0] - windows.pool.num_free


def count_window_violations(
    state: EngineState, live: Bool[Array, " slots"], config: EngineConfig
) -> Violations | None:
    """Counts violations of I1, I2, I4 and I5 by the pages of layers with a window."""
    if (windows := state.windows) is None:
        return None
    return memory.violations(
        windows.pool,
        window_table(windows, state.table),
        live,
        page_size=config.page_size,
        pins=_swapped_uses(windows),
        first=first_window_page(
            state.table.length, window=window_of(state), page_size=config.page_size
        ),
    )


def _swapped_uses(windows: WindowPool) -> Int32[Array, " window_pages"]:
    """Returns the uses of each page by swapped sequences."""
    uses = jnp.zeros_like(windows.pool.ref)
    return arrays.put(uses, windows.of_sequence, 1, "add")
