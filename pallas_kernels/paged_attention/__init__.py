"""Attention over paged K and V: plans, reference, and kernels behind one door."""

from pallas_kernels.paged_attention.api import AttentionState as AttentionState
from pallas_kernels.paged_attention.api import make_plan as make_plan
from pallas_kernels.paged_attention.api import merge_states as merge_states
from pallas_kernels.paged_attention.api import paged_attention as paged_attention

__all__ = [
    "AttentionState",
    "api",
    "decode_plan",
    "dispatch",
    "make_plan",
    "merge_states",
    "merging",
    "paged_attention",
    "row_packing",
]
