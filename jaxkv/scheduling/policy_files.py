"""Policies by name and from files, for the flag `--policy` of commands.

A policy is a name of `POLICY_NAMES`, `FILE.py:NAME`, or `FILE.json`. A Python file is
executed. NAME is a policy, or a class or function that makes one without arguments. A
JSON file has the weights of a `LinearScore`, and may have those of a `LinearEviction`.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import files, validation
from jaxkv.memory import LinearEviction, linear_eviction
from jaxkv.scheduling import (
    ageing,
    deadlines,
    fair_sharing,
    first_come,
    interface,
    linear_scores,
    prefill_chunks,
    remaining_work,
    static_batching,
    vllm,
)
from jaxkv.scheduling.attributes import RequestAttributes
from jaxkv.scheduling.interface import Counts, Policy

IN_ORDER_NAMES = ("fcfs", "vllm", "vllm-0.19", "prefill-first", "static")
"""Policies that admit requests in the order of the queue."""
POLICY_NAMES = (
    *IN_ORDER_NAMES,
    "ageing-priority",
    "earliest-deadline",
    "fair-share",
    "shortest-remaining",
)
"""Policies that need no parameter."""


@validation.checks_numbers()
def find_policy(text: str, *, max_running: int | None = None) -> Policy:
    """Returns a policy by name, or from a file.

    Args:
      text: a name of `POLICY_NAMES`, `FILE.py:NAME`, or `FILE.json`.
      max_running: largest number of running sequences of vLLM's policies; None means
        the number of slots.

    Raises:
      ValueError: the name is unknown, the file cannot be read or executed, or it does
        not define a policy whose plans have the right shapes; one line.
    """
    if text in ("vllm", "vllm-0.19"):
        rule = "vllm-0.15" if text == "vllm" else "vllm-0.19"
        return vllm.vllm_scheduler(max_num_seqs=max_running, rule=rule)
    if text == "prefill-first":
        return prefill_chunks.chunked_prefill(whole_prompts=True, first=True)
    makers: dict[str, Callable[[], Policy]] = {
        "fcfs": first_come.fcfs,
        "static": static_batching.static,
        "ageing-priority": ageing.ageing_priority,
        "earliest-deadline": deadlines.earliest_deadline,
        "fair-share": fair_sharing.fair_share,
        "shortest-remaining": remaining_work.shortest_remaining,
    }
    if text in makers:
        return makers[text]()
    if text.endswith(".json"):
        return read_rules(text)[0]
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        if text.endswith(".py"):
            raise ValueError(f"policy={text} must name a policy of the file, FILE:NAME")
        names = ", ".join(POLICY_NAMES)
        raise ValueError(
            f"policy={text} must be one of {names}, or FILE.py:NAME, or FILE.json"
        )
    member = _find_member(Path(file), name)
    policy = member
    if not isinstance(member, Policy) or isinstance(member, type):
        if not callable(member):
            raise ValueError(f"{text} is no policy: it has no method plan")
        try:
            policy = member()
        except Exception as error:
            reason = validation.one_line(error)
            raise ValueError(
                f"{text} makes no policy without arguments: {reason}"
            ) from None
    check_plan(policy, text)
    return policy


def _find_member(path: Path, name: str) -> Any:
    """Executes a Python file, and returns an object that it defines.

    Raises:
      ValueError: the file cannot be read or raises an error, or defines no such name.
    """
    with files.reporting_errors(path):
        path.open("rb").close()
    module_name = f"_policy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # annotations of classes are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {validation.one_line(error)}"
        raise ValueError(f"{path}: cannot be executed: {reason}") from None
    members = vars(module)
    if name not in members:
        policy_names = [x for x, value in members.items() if hasattr(value, "plan")]
        listing = f"; it defines {', '.join(policy_names)}" if policy_names else ""
        raise ValueError(f"{path}: defines no {name or 'name'}{listing}")
    return members[name]


def check_plan(policy: object, name: str = "policy") -> None:
    """Checks a policy by its type and by the shapes of one plan; runs no computation.

    Raises:
      ValueError: the object is no policy, its plan cannot be traced, or a field of the
        plan has a wrong shape or type; one line that begins with `name`.
    """
    interface.check_policy(policy, name)
    for has_drafts in (False, True):
        counts = _example_counts(has_drafts)
        try:
            jax.eval_shape(interface.schedule, counts, policy)
        except Exception as error:
            text = validation.one_line(error)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{name}: {kind}{text[:200]}") from None


def _example_counts(has_drafts: bool) -> Counts:
    """Returns counts of 5 slots and 3 waiting requests, all 0."""
    line = jnp.zeros(5, jnp.int32)
    head = jnp.zeros(3, jnp.int32)
    scalar = jnp.zeros((), jnp.int32)
    no_line = line > 0
    no_head = head > 0
    return Counts(
        running=no_line,
        held=no_line,
        group=line,
        target_length=line,
        length=line,
        num_pages=line,
        owned_pages=line,
        owned_tokens=line,
        swap_pages=line,
        copies=line,
        preempted=no_line,
        scored_prompt=no_line,
        waiting=no_head,
        waiting_tokens=head,
        waiting_cached=head,
        waiting_slots=head,
        waiting_pages=head,
        waiting_preempted=no_head,
        waiting_swapped=no_head,
        waiting_scored_prompt=no_head,
        free_pages=scalar,
        free_swap_pages=scalar,
        page_size=16,
        max_length=64,
        token_budget=32,
        spare_logit_rows=0,
        drafts=line if has_drafts else None,
        attributes=RequestAttributes(*[line] * len(RequestAttributes._fields)),
        waiting_attributes=RequestAttributes(*[head] * len(RequestAttributes._fields)),
    )


def find_eviction(text: str) -> LinearEviction | None:
    """Returns the rule of eviction in a policy file, for a text of `find_policy`.

    None if the text is no policy file, or the file has no `eviction`.

    Raises:
      ValueError: as for `find_policy`.
    """
    return read_rules(text)[1] if text.endswith(".json") else None


def read_rules(
    path: str | Path,
) -> tuple[linear_scores.LinearScore, LinearEviction | None]:
    """Reads a policy file of `format_linear_score`.

    Raises:
      ValueError: the file cannot be read, or a weight is unknown or out of its range.
    """
    fields = files.read_json(path)
    kind = fields.pop("policy", None)
    if kind != linear_scores.KIND:
        shown = validation.format_value(kind)
        raise ValueError(f"{path}: policy={shown} must be {linear_scores.KIND!r}")
    fields.pop("formula", None)
    rates = fields.pop("eviction", None)
    names = ("admission", "victim", "age_per_s", "chunk_size", "watermark")
    if unknown := sorted(fields.keys() - {*names}):
        raise ValueError(f"{path}: {unknown[0]!r} must be one of {', '.join(names)}")
    try:
        eviction = None
        if rates is not None:
            checked = validation.instance("eviction", rates, dict)
            for name in checked:
                validation.choice("eviction", name, LinearEviction._fields)
            eviction = linear_eviction(**checked)
        return linear_scores.linear_score(**fields), eviction
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def format_linear_score(
    policy: linear_scores.LinearScore, eviction: LinearEviction | None = None
) -> str:
    """Returns the text of a policy file, with the formula for readers."""
    document = {
        "policy": linear_scores.KIND,
        "formula": linear_scores.format_formula(policy, eviction),
        **linear_scores.weights_of(policy),
    }
    if eviction is not None:
        numbers = {name: int(x) for name, x in eviction._asdict().items()}
        document["eviction"] = numbers | {"recency": numbers["recency"] / 100}
    return json.dumps(document, indent=2) + "\n"
