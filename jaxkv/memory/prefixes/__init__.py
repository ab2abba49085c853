"""The prefix cache: entries, order of eviction, and transfer to another pool."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.memory.prefixes.checkpoints import (
        checkpoint_of,
        checkpointed,
        new_checkpoints,
    )
    from jaxkv.memory.prefixes.idle_pages import is_idle
    from jaxkv.memory.prefixes.prefix_cache import (
        PrefixCache,
        count_prefix_faults,
        entry_tick,
        insert_unpinned,
        is_cached,
        make_prefix_cache,
        match,
        replace_tokens,
    )
    from jaxkv.memory.prefixes.prefix_eviction import (
        FIFO,
        LFU,
        LRU,
        Eviction,
        Uses,
        evict,
        mark_idle,
        mark_used,
        rerank,
    )
    from jaxkv.memory.prefixes.prefix_transfer import (
        Prefix,
        export_prefix,
        import_prefix,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
