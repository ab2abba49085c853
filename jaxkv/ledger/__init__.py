"""Bookkeeping of queue, slots and progress, shared by the engine and the simulator."""

from jaxkv.ledger.groups import Groups, find_groups
from jaxkv.ledger.head import Head, PageFacts, RequestColumns, look_up_head, observe
from jaxkv.ledger.state import (
    NO_SEQUENCE,
    Fork,
    Ledger,
    SequenceEvents,
    SequenceProgress,
    Slots,
    is_occupied,
    is_running,
    make_ledger,
    num_to_feed,
    unpack_columns,
)
from jaxkv.ledger.transitions import (
    Admission,
    SlotPlan,
    admit,
    note_events,
    num_recomputed,
    preempt,
    record_forks,
    retire,
)

__all__ = [
    "NO_SEQUENCE",
    "Admission",
    "Fork",
    "Groups",
    "Head",
    "Ledger",
    "PageFacts",
    "RequestColumns",
    "SequenceEvents",
    "SequenceProgress",
    "SlotPlan",
    "Slots",
    "admit",
    "find_groups",
    "is_occupied",
    "is_running",
    "look_up_head",
    "make_ledger",
    "note_events",
    "num_recomputed",
    "num_to_feed",
    "observe",
    "preempt",
    "record_forks",
    "retire",
    "unpack_columns",
]
