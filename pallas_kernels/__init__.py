"""Attention over paged KV arrays: arrays in, arrays out, with a plain reference.

`paged_attention` attends from rows to pages, in one plan a step (`make_plan`);
`merge_states` puts attention over parts of the keys together. `write_kv` and
`copy_pages` fill and copy pages, `quantize` and `dequantize` are for pages of 8 bits,
and `flash_attention` is for keys that are not in pages. `grouped_matmul` multiplies
rows by the weights of their group, as mixtures of experts do.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.flash_attention import flash_attention
    from pallas_kernels.grouped_matmul import grouped_matmul
    from pallas_kernels.page_ops import copy_pages, write_kv
    from pallas_kernels.paged_attention import (
        AttentionState,
        make_plan,
        merge_states,
        paged_attention,
    )
    from pallas_kernels.quantizing import Quantized, dequantize, quantize

_HOMES = {
    "AttentionState": "attention",
    "Quantized": "quantizing",
    "copy_pages": "copying",
    "dequantize": "quantizing",
    "flash_attention": "flash",
    "grouped_matmul": "grouped",
    "make_plan": "attention",
    "merge_states": "attention",
    "paged_attention": "attention",
    "quantize": "quantizing",
    "write_kv": "writing",
}

__all__ = [
    "AttentionState",
    "Quantized",
    "copy_pages",
    "dequantize",
    "flash_attention",
    "grouped_matmul",
    "make_plan",
    "merge_states",
    "paged_attention",
    "quantize",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
