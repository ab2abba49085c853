"""Scheduling policies by name, for commands."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxkv.validation import format_unknown_name

if TYPE_CHECKING:
    from jaxkv.scheduling import Policy


def shipped_policies() -> "dict[str, Callable[[], Policy]]":
    """Returns the makers of the shipped policies, by name."""
    from jaxkv import scheduling

    return {
        "fcfs": scheduling.fcfs,
        "static": scheduling.static,
        "vllm": scheduling.vllm_scheduler,
        "vllm-0.19": lambda: scheduling.vllm_scheduler(rule="vllm-0.19"),
        "ageing-priority": scheduling.ageing_priority,
        "earliest-deadline": scheduling.earliest_deadline,
        "fair-share": scheduling.fair_share,
        "shortest-remaining": scheduling.shortest_remaining,
    }


def parse_policy(name: str) -> "Policy":
    """Makes the policy of a name.

    Raises:
      ValueError: there is no such policy; one line with the closest names.
    """
    makers = shipped_policies()
    if name not in makers:
        raise ValueError(format_unknown_name("policy", name, makers))
    return makers[name]()
