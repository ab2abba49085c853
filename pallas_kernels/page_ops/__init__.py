"""Writing rows of K and V into pages, and copying pages."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.page_ops.copy import CopyImplementation, copy_pages
    from pallas_kernels.page_ops.rotary_write import (
        RotaryCosSin,
        RotaryWriteOutput,
        choose_rotary_write,
        query_rows,
        write_rotated_kv,
    )
    from pallas_kernels.page_ops.write import write_rows

__all__, __getattr__, __dir__ = lazy_exports(__name__)
