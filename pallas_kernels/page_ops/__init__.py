"""Writing rows of K and V into pages, and copying pages."""

from pallas_kernels.page_ops.copy import copy_pages
from pallas_kernels.page_ops.write import write_rows

__all__ = [
    "copy",
    "copy_pages",
    "rotary_write",
    "write",
    "write_rows",
]
