"""Paged memory: pool, page tables, sharing, prefix cache, K and V themselves."""

from jaxkv.memory.demand import Size as Size
from jaxkv.memory.demand import pages_for as pages_for
from jaxkv.memory.invariants import InvariantError as InvariantError
from jaxkv.memory.kv_pages import Pages as Pages
from jaxkv.memory.page_pool import NO_PAGE as NO_PAGE
from jaxkv.memory.page_pool import Pool as Pool
from jaxkv.memory.page_table import Table as Table
from jaxkv.memory.prefix_cache import Prefixes as Prefixes
from jaxkv.memory.prefix_eviction import Eviction as Eviction
from jaxkv.memory.prefix_eviction import Uses as Uses
from jaxkv.memory.swap_buffer import Staging as Staging

__all__ = [
    "NO_PAGE",
    "Eviction",
    "InvariantError",
    "Pages",
    "Pool",
    "Prefixes",
    "Size",
    "Staging",
    "Table",
    "Uses",
    "demand",
    "idle_pages",
    "invariants",
    "kv_pages",
    "page_pool",
    "page_sharing",
    "page_table",
    "pages_for",
    "prefix_cache",
    "prefix_eviction",
    "swap_buffer",
]
