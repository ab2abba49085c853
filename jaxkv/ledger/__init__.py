"""Bookkeeping of queue, slots and progress, shared by the engine and the simulator."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.ledger.groups import Groups, find_groups
    from jaxkv.ledger.head import Head, PageFacts, RequestColumns, look_up_head, observe
    from jaxkv.ledger.state import (
        EVENTS,
        NO_SEQUENCE,
        PROGRESS,
        Fork,
        Ledger,
        SequenceEvents,
        SequenceProgress,
        Slots,
        TableLayout,
        is_occupied,
        is_running,
        make_ledger,
        num_to_feed,
    )
    from jaxkv.ledger.transitions import (
        Admission,
        SlotPlan,
        admit,
        note_events,
        num_recomputed,
        preempt,
        preempt_groups,
        record_forks,
        retire,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
