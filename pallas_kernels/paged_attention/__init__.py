"""Attention over paged K and V: plans, reference, and kernels."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.online_softmax import ScoreTransform
    from pallas_kernels.paged_attention.api import (
        AttentionImplementation,
        AttentionState,
        make_plan,
        merge_devices,
        merge_own_rows,
        merge_states,
        paged_attention,
    )
    from pallas_kernels.paged_attention.decode_plan import DecodePlan, item_heads
    from pallas_kernels.paged_attention.dispatch import KernelTilings, StepPlan
    from pallas_kernels.paged_attention.merging import PartialStates, merge_and_unpack
    from pallas_kernels.paged_attention.page_blocks import PagedKV, RowView
    from pallas_kernels.paged_attention.reference import choose_run_queries

__all__, __getattr__, __dir__ = lazy_exports(__name__)
