"""Paged memory: pool, page tables, sharing, prefix cache, swap, pages and layouts."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.memory.demand import (
        Size,
        first_window_page,
        max_pages,
        max_window_pages,
        missing_pages,
        own_tokens,
        pages_for,
        pages_to_resume,
        pages_to_start,
    )
    from jaxkv.memory.features import (
        parent_places,
        read_features,
        read_routes,
        write_features,
        write_routes,
    )
    from jaxkv.memory.invariants import (
        InvariantError,
        Violations,
        raise_if_violated,
        shared_writes,
        violations,
    )
    from jaxkv.memory.kv_eviction import (
        CONTINUES,
        EVICTION_RULES,
        NUM_SINKS,
        READS_QUERIES,
        CachedTokens,
        EvictionRule,
        PageSelection,
        evict_kv,
        eviction_due,
        feeding_end,
        query_places,
        quest,
        write_queries,
    )
    from jaxkv.memory.kv_layout import (
        DEFAULT_LAYOUT,
        KVLayout,
        WindowLayers,
        can_rotate_and_write,
        change_layout,
        make_pages,
        rotate_and_write,
    )
    from jaxkv.memory.kv_pages import (
        NO_STATE,
        Pages,
        Rows,
        StateRows,
        check_content,
        copy,
        expand_pages,
        gather_pages,
        locate,
        move_tokens,
        scatter_pages,
        state_rows,
        to_host,
    )
    from jaxkv.memory.page_parts import (
        CONTEXT,
        broadcast_from_owner,
        check_window,
        num_page_parts,
    )
    from jaxkv.memory.page_pool import (
        NO_PAGE,
        Pool,
        allocate,
        make_pool,
        release_counted,
        share,
    )
    from jaxkv.memory.page_sharing import fork, holders, owned_pages, reorder
    from jaxkv.memory.page_table import (
        Copies,
        PageTableView,
        SlotPages,
        Table,
        advance_lengths,
        clear_slots,
        drop_slots,
        is_shared,
        make_table,
        move_slots,
        needs_copy,
        num_new_pages,
        num_pages,
        reserve,
        truncate,
    )
    from jaxkv.memory.prefixes.checkpoints import checkpoint_of, checkpointed
    from jaxkv.memory.prefixes.idle_pages import is_idle
    from jaxkv.memory.prefixes.prefix_cache import (
        PrefixCache,
        count_prefix_faults,
        insert_unpinned,
        is_cached,
        make_prefix_cache,
        match,
        replace_tokens,
    )
    from jaxkv.memory.prefixes.prefix_eviction import (
        CLOCK_SECONDS,
        FIFO,
        LFU,
        LRU,
        MAX_RATE_MS,
        Eviction,
        LinearEviction,
        Releases,
        Uses,
        evict,
        linear_eviction,
        mark_idle,
        mark_used,
        rerank,
    )
    from jaxkv.memory.prefixes.prefix_transfer import (
        Prefix,
        export_prefix,
        import_prefix,
    )
    from jaxkv.memory.state_pool import (
        StatePool,
        allocate_states,
        attach_states,
        count_state_faults,
        make_state_pool,
        replace_states,
    )
    from jaxkv.memory.swap_buffer import (
        Staging,
        copy_in,
        copy_out,
        count_swap_faults,
        forget,
        is_out,
        is_written,
        make_staging,
        num_free_places,
    )
    from jaxkv.memory.window_pool import (
        WindowPool,
        attach_window_pages,
        continue_window_slots,
        drop_window_slots,
        make_window_pool,
        map_window_pages,
        release_swapped_windows,
        start_on_window_pages,
        trim_window_pages,
        window_pages_of,
        window_table,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
