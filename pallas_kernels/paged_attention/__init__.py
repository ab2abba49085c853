"""Attention over paged K and V: plans, reference, and kernels."""

from pallas_kernels.paged_attention.api import (
    AttentionState,
    make_plan,
    merge_states,
    paged_attention,
)

__all__ = [
    "AttentionState",
    "api",
    "decode_plan",
    "dispatch",
    "make_plan",
    "merge_states",
    "merging",
    "paged_attention",
]
