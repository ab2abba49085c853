"""Attention over paged KV arrays and grouped products, with plain JAX references.

Each operation is a sub-package that exports its public functions:

    from pallas_kernels.paged_attention import make_plan, merge_states, paged_attention
    from pallas_kernels.page_ops import copy_pages, write_rows
    from pallas_kernels.flash_attention import flash_attention
    from pallas_kernels.grouped_matmul import grouped_matmul

`paged_attention` attends from query rows to pages; `make_plan` makes the plan of a
step, which all layers share. `merge_states` merges attention over disjoint sets of
keys. `write_rows` and `copy_pages` write and copy pages, `quantizing` has 8-bit pages,
and `flash_attention` takes contiguous keys and values. `grouped_matmul` multiplies rows
by the weights of their group, for mixtures of experts.
"""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels import bench as bench
    from pallas_kernels import flash_attention as flash_attention
    from pallas_kernels import grouped_matmul as grouped_matmul
    from pallas_kernels import page_ops as page_ops
    from pallas_kernels import paged_attention as paged_attention
    from pallas_kernels import quantizing as quantizing

__all__, __getattr__, __dir__ = lazy_exports(__name__)
