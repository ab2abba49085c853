"""Paged memory: pool, page tables, sharing, prefix cache, swap, pages and layouts."""

from jaxkv.memory.demand import Size, pages_for
from jaxkv.memory.invariants import InvariantError
from jaxkv.memory.kv_layout import KVLayout
from jaxkv.memory.kv_pages import Pages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import PageTableView, Table
from jaxkv.memory.prefix_cache import PrefixCache
from jaxkv.memory.prefix_eviction import Eviction, Uses
from jaxkv.memory.prefix_transfer import Prefix
from jaxkv.memory.swap_buffer import Staging

__all__ = [
    "NO_PAGE",
    "Eviction",
    "InvariantError",
    "KVLayout",
    "PageTableView",
    "Pages",
    "Pool",
    "Prefix",
    "PrefixCache",
    "Size",
    "Staging",
    "Table",
    "Uses",
    "demand",
    "features",
    "idle_pages",
    "invariants",
    "kv_layout",
    "kv_pages",
    "page_parts",
    "page_pool",
    "page_sharing",
    "page_table",
    "pages_for",
    "prefix_cache",
    "prefix_eviction",
    "prefix_transfer",
    "swap_buffer",
]
