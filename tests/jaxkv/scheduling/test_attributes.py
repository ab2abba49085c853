"""Attributes of requests: checks, times relative to the clock, order of admission."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import scheduling
from jaxkv.scheduling import RequestAttributes, attributes, interface
from jaxkv.serving import make_requests
from tests.support import engines
from tests.support.plans import LINE, counts, plan_of


def columns(**fields: list[int]) -> Any:
    """Columns of four requests; missing attributes have the default."""
    blank = attributes.attribute_columns([attributes.RequestAttributes()] * LINE)
    return blank._replace(**{name: np.array(x, np.int32) for name, x in fields.items()})


def admitted(policy: Any, waiting: list[int], free_pages: int, **fields: Any) -> Any:
    c = counts([], waiting, free_pages=free_pages, token_budget=99)
    c = c._replace(**fields)
    return np.flatnonzero(plan_of(c, policy).admit).tolist()


def test_the_fields_with_a_row_for_each_waiting_request_are_declared() -> None:
    hints = interface.Counts.__annotations__
    field_names = [
        name
        for name, hint in hints.items()
        if getattr(hint, "dim_str", "") == "head" or name == "waiting_attributes"
    ]
    assert field_names == list(interface.WAITING_FIELDS)


def test_attributes_of_a_request_are_checked() -> None:
    assert attributes.check_attributes(None) == RequestAttributes()
    request_attributes = RequestAttributes(priority=np.int64(3), deadline_ms=250)
    assert attributes.check_attributes(request_attributes) == RequestAttributes(
        priority=3, deadline_ms=250
    )
    for wrong, line in (
        (RequestAttributes(priority=1001), "attributes.priority=1001 must be a whole"),
        (RequestAttributes(session=-2), "attributes.session=-2 must be a whole"),
        (RequestAttributes(deadline_ms=1.5), "attributes.deadline_ms=1.5 must be a"),
        (RequestAttributes(arrival_ms=4), "attributes.arrival_ms=4 must be a whole"),
        (RequestAttributes(predicted_length=True), "predicted_length=True must be"),
        (7, "attributes=7 must be "),
    ):
        with pytest.raises(ValueError, match=re.escape(line)):
            attributes.check_attributes(wrong)


def test_times_become_relative_to_the_clock() -> None:
    absolute_times = columns(deadline_ms=[500, 0, 900, attributes.NO_DEADLINE])
    absolute_times = absolute_times._replace(
        predicted_length=np.array([0, 9, 40, 7], np.int32)
    )
    arrival = np.array([[3, 250_000], [3, 999_000], [2**31 - 1, 0], [0, 0]], np.int32)
    limit = np.array([30, 30, 30, 30], np.int32)
    clock = jnp.asarray([3, 500_000], jnp.int32)
    relative_times = attributes.relative_to_clock(
        absolute_times, jnp.asarray(arrival), jnp.asarray(limit), clock
    )
    assert relative_times.arrival_ms.tolist() == [-250, 499, 999_999_500, -3500]
    assert relative_times.deadline_ms.tolist()[:2] == [250, 499]
    assert relative_times.deadline_ms.tolist()[3] == attributes.NO_DEADLINE
    assert relative_times.predicted_length.tolist() == [30, 9, 30, 7]


def test_the_shortest_comes_first_less_what_is_cached() -> None:
    policy = scheduling.shortest_remaining()
    fields: Any = {
        "waiting_attributes": columns(predicted_length=[30, 9, 12, 0]),
        "waiting_cached": np.array([0, 0, 4, 0], np.int32),
    }
    # Each takes two pages: there is room for one, then for two.
    assert admitted(policy, [8, 8, 8], 2, **fields) == [2]
    assert admitted(policy, [8, 8, 8], 4, **fields) == [1, 2]
    # A preempted request comes first for any remaining length.
    fields["waiting_preempted"] = np.array([True, False, False, False])
    assert admitted(policy, [8, 8, 8], 2, **fields) == [0]


def test_waiting_outweighs_priority_in_the_end() -> None:
    policy = scheduling.ageing_priority(level_ms=100)
    waiting = columns(priority=[0, -2, -1, 0], arrival_ms=[-150, -10, -50, 0])
    assert admitted(policy, [8, 8, 8], 2, waiting_attributes=waiting) == [1]
    older = waiting._replace(arrival_ms=np.array([-350, -10, -50, 0], np.int32))
    assert admitted(policy, [8, 8, 8], 2, waiting_attributes=older) == [0]
    with pytest.raises(ValueError, match=r"level_ms=0 must be in \[1, 1000000\]"):
        scheduling.ageing_priority(level_ms=0)


def test_the_earliest_deadline_comes_first() -> None:
    policy = scheduling.earliest_deadline()
    due = columns(deadline_ms=[attributes.NO_DEADLINE, 70, -5, 70])
    admissions = [
        admitted(policy, [8] * 4, 2 * n, waiting_attributes=due) for n in (1, 2, 3)
    ]
    assert admissions == [[2], [1, 2], [1, 2, 3]]


def test_sessions_take_turns() -> None:
    policy = scheduling.fair_share()
    line: Any = [(9, 8, 3), (9, 8, 3)]
    running = columns(session=[4, 5, 4, -1])
    waiting = columns(session=[4, 4, 6, -1])
    c = counts(line, [8, 8, 8, 8], free_pages=5)
    c = c._replace(attributes=running, waiting_attributes=waiting)
    # Two requests fit; those of sessions without slots are admitted: the last two.
    assert np.flatnonzero(plan_of(c, policy).admit).tolist() == [2, 3]
    # One fits: a session without slots equals a request without a session.
    c = c._replace(
        free_pages=jnp.int32(3), waiting_attributes=columns(session=[6, -1, 4, 4])
    )
    assert np.flatnonzero(plan_of(c, policy).admit).tolist() == [0]


def test_victims_are_chosen_by_attributes() -> None:
    line: Any = [(9, 8, 2), (9, 8, 2), (9, 8, 2), (9, 8, 2)]
    running = columns(priority=[0, -3, 1, -2], predicted_length=[10, 12, 20, 30])
    c = counts(line, free_pages=0)._replace(attributes=running)
    # Each needs a page, and the two preempted ones release four.
    for victim, victims in (("least_urgent", [2, 3]), ("longest_remaining", [2, 3])):
        plan = plan_of(c, scheduling.fcfs(victim=victim))
        assert np.flatnonzero(plan.preempt).tolist() == victims
    swapped = running._replace(priority=np.array([0, 3, -5, -2], np.int32))
    c = counts(line, free_pages=1)._replace(attributes=swapped)
    plan = plan_of(c, scheduling.fcfs(victim="least_urgent"))
    assert np.flatnonzero(plan.preempt).tolist() == [1]


def test_an_engine_serves_the_urgent_first() -> None:
    config = dataclasses.replace(engines.SERVED, max_slots=1, token_budget=8)
    request_attributes = [RequestAttributes(priority=x) for x in (0, 1, 5)]
    requests = make_requests(
        [[1, 2], [3, 4], [5, 6]],
        [jaxkv.Sampling(n=2)] * 3,
        config=config,
        attributes=request_attributes,
    )
    assert requests.attributes.priority.tolist() == [0, 0, 1, 1, 5, 5]
    assert jax.tree.leaves(requests.attributes)[0].dtype == np.int32
    with pytest.raises(ValueError, match="len\\(attributes\\)=1 must be len"):
        make_requests(
            [[1], [2]],
            [jaxkv.Sampling()] * 2,
            config=config,
            attributes=request_attributes[:1],
        )
