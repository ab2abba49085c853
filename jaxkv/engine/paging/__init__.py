"""Pages and states of sequences: prefix cache, swapping, recurrences, windows."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.engine.paging.prefix_caching import (
        PrefixMatch,
        evict_until_free,
        insert_filled_pages,
        is_pinned,
        match_prefixes,
        num_idle,
        num_used,
        pinned_pages,
        release_slots,
        start_on_cached_pages,
    )
    from jaxkv.engine.paging.recurrent_states import (
        StatePlan,
        advance_states,
        forget_checkpoints,
        forget_swapped_states,
        fork_states,
        locate_states,
        move_states,
        plan_states,
    )
    from jaxkv.engine.paging.swapping import (
        asks_host,
        clear_swapped,
        discard_ended,
        is_on_host,
        num_free_swap_pages,
        num_to_move,
        swap_in,
        swap_out,
    )
    from jaxkv.engine.paging.token_eviction import (
        end_rows_at_eviction,
        evict_tokens,
        move_queries,
    )
    from jaxkv.engine.paging.window_pages import (
        continue_windows,
        count_window_violations,
        forget_swapped_windows,
        forget_windows_of_prefixes,
        map_windows,
        move_windows,
        num_used_window_pages,
        trim_windows,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
