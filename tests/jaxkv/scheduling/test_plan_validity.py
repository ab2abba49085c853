"""Plans of faulty policies: types are refused by name, values become valid."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxkv
from jaxkv import ledger, scheduling
from jaxkv.ledger import Groups, SlotPlan
from jaxkv.scheduling import Counts, OrderedQueue, Plan
from tests.support.plans import LINE, counts, plan_of


class Fixed(NamedTuple):
    """A policy that returns its fields."""

    raw: Plan
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        return self.raw


NUMBERS = hnp.arrays(
    np.int32, LINE, elements=st.one_of(st.integers(-3, 40), st.integers(-(2**31), -1))
)
MASKS = hnp.arrays(bool, LINE)
KINDS: dict[str, Any] = dict.fromkeys(Plan._fields, NUMBERS)
KINDS |= dict.fromkeys(("preempt", "swap", "admit"), MASKS)
# Slots 1 and 2 are a request whose second sequence waits to be forked; slot 3 is held.
BUSY = counts(
    [(9, 8, 2), (16, 3, 4), (0, 0, 0), "2"],
    [7, 12, 5],
    free_pages=6,
    scored=([], [1]),
    spare_logit_rows=4,
    arrived=[True, True, False],
    group=[0, 1, 1, 3],
    waiting_cached=[4, 0, 0, 0],
    waiting_swapped=[False, False, True, False],
    drafts=[2, 0, 0, 0],
)


@settings(max_examples=60, deadline=None)
@given(st.builds(Plan, **KINDS))
def test_every_drawn_plan_becomes_valid(raw: Plan) -> None:
    c = BUSY
    plan = jax.tree.map(np.asarray, plan_of(BUSY, Fixed(raw)))
    assert not plan.preempt[~c.running].any()
    assert not plan.swap[~plan.preempt].any()
    assert not plan.admit[~c.waiting].any()
    stays = c.running & ~plan.preempt
    assert (plan.num_rows >= 0).all()
    assert (plan.num_rows <= np.where(stays, c.target_length - c.length, 0)).all()
    assert (plan.head_rows >= 0).all()
    admitted_tokens = np.where(plan.admit & ~c.waiting_swapped, c.waiting_tokens, 0)
    assert (plan.head_rows <= np.maximum(admitted_tokens - c.waiting_cached, 0)).all()
    assert plan.head_rows[1] <= 4
    drafts = plan.drafts
    assert (drafts >= 0).all()
    assert (drafts <= c.drafts).all()
    assert not drafts[plan.num_rows != 1].any()
    ends = np.where(plan.num_rows > 0, c.length + plan.num_rows, 0)
    assert (plan.places >= ends).all()
    assert (plan.places + drafts <= c.max_length).all()
    assert not plan.places[~stays].any()
    assert not plan.places[2]
    ends = np.where(plan.head_rows > 0, c.waiting_cached + plan.head_rows, 0)
    assert ((plan.head_places >= ends) & (plan.head_places <= c.max_length)).all()
    # Valid values are kept.
    expected_rows = np.where(
        stays, np.clip(raw.num_rows, 0, c.target_length - c.length), 0
    )
    assert (plan.num_rows == expected_rows).all()


def test_a_valid_plan_is_unchanged() -> None:
    for policy in (scheduling.fcfs(), scheduling.static(), scheduling.vllm_scheduler()):
        c = BUSY._replace(drafts=None)
        plan = plan_of(c, policy)
        raw = policy.plan(jax.tree.map(jnp.asarray, c))
        jax.tree.map(np.testing.assert_array_equal, plan, raw)


def test_preemption_is_widened_to_whole_requests() -> None:
    """Sequences 0, 1 and 3 of one request, the second of which has finished."""
    slots = ledger.make_ledger(
        num_slots=4, num_places=8, num_sequences=4, has_groups=True, holds=True
    ).slots._replace(
        sequence=jnp.arange(4, dtype=jnp.int32),
        held=jnp.array([False, True, False, False]),
    )
    group = Groups(
        jnp.array([0, 0, 2, 0], jnp.int32), jnp.array([True, False, True, False])
    )
    none = jnp.zeros(4, jnp.int32)
    for marked in range(4):
        out = jnp.arange(4) == marked
        plan = Plan(out, out, none, none, none > 0, none, none)
        wide = ledger.preempt_groups(plan, slots, group)
        expected = [marked != 2, False, marked == 2, marked != 2]
        assert wide.preempt.tolist() == wide.swap.tolist() == expected
        assert ledger.preempt_groups(plan, slots, None) is plan


def test_rows_beyond_the_budget_are_cut_to_one_for_each_sequence() -> None:
    rows = jnp.array([1, 7, 0, 3], jnp.int32)
    plan: Any = SlotPlan(rows, rows, jnp.array([2, 0, 0, 0], jnp.int32))
    assert plan.within(13).num_rows.tolist() == rows.tolist()
    assert plan.within(13).drafts.tolist() == plan.drafts.tolist()
    assert plan.within(12).num_rows.tolist() == [1, 1, 0, 1]
    assert not plan.within(12).drafts.any()
    assert SlotPlan(rows, rows, None).within(11).num_rows.tolist() == rows.tolist()


def test_beams_of_a_request_decode_together() -> None:
    c = counts(
        [(9, 8, 2), (9, 8, 2), (9, 8, 2)],
        free_pages=9,
        group=[0, 0, 2, 3],
        lockstep=[True, True, False, False],
    )
    raw = scheduling.fcfs().plan(jax.tree.map(jnp.asarray, c))
    for fed in ([1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]):
        plan = plan_of(c, Fixed(raw._replace(num_rows=jnp.array(fed))))
        both = int(fed[0] or fed[1])
        assert plan.num_rows.tolist() == [both, both, fed[2], 0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "float": (dict(num_rows=np.zeros(4, np.float32)), "num_rows=float32[4], "),
    "mask for numbers": (dict(places=np.zeros(4, bool)), "places=bool[4], "),
    "numbers for a mask": (dict(preempt=np.zeros(4, np.int32)), "preempt=int32[4], "),
    "too few": (dict(head_rows=np.zeros(3, np.int32)), "head_rows=int32[3], "),
    "a scalar": (dict(admit=False), "admit=bool[], "),
    "an axis more": (dict(swap=np.zeros((4, 1), bool)), "swap=bool[4, 1], "),
    "absent": (dict(head_places=None), "head_places=None, "),
    "text": (dict(drafts="x"), "drafts='x', "),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("no_type_checks")
def test_a_field_of_another_type_or_shape_is_refused_by_name(name: str) -> None:
    fields, line = WRONG[name]
    raw = scheduling.fcfs().plan(jax.tree.map(jnp.asarray, BUSY))._replace(**fields)
    with pytest.raises(ValueError, match="must be") as caught:
        scheduling.schedule(BUSY, Fixed(raw))
    kind = "bool" if fields.keys() & {"preempt", "swap", "admit"} else "int32"
    assert str(caught.value) == (
        f"Fixed.plan returns {line}which must be {kind}[{LINE}]"
    )


def test_integers_of_another_width_are_accepted() -> None:
    c = jax.tree.map(jnp.asarray, BUSY)
    raw = scheduling.fcfs().plan(c)
    rows: Any = np.asarray(raw.num_rows, np.int64)
    plan = scheduling.schedule(c, Fixed(raw._replace(num_rows=rows)))
    assert plan.num_rows.dtype == jnp.int32
    assert plan.num_rows.tolist() == raw.num_rows.tolist()


# The first running request


def test_the_first_running_request_stays_if_pages_are_shared() -> None:
    """All pages are cached, and shared by the second and the third request."""
    line: Any = [None, (9, 8, 2), (9, 8, 2), (9, 8, 2)]
    shared: Any = dict(owned_pages=[0, 0, 0, 0], group=[0, 1, 2, 2])
    c = counts(line, free_pages=0, **shared)
    c = c._replace(shared_pages=jnp.int32(6))
    for policy in (
        scheduling.fcfs(),
        scheduling.fcfs(victim="cheapest"),
        scheduling.vllm_scheduler(),
    ):
        plan = plan_of(c, policy)
        assert plan.preempt.tolist() == [False, False, True, True]
        assert plan.num_rows.tolist() == [0, 1, 0, 0]
    first = c._replace(group=jnp.array([0, 1, 1, 3], jnp.int32))
    assert plan_of(first, scheduling.fcfs()).preempt.tolist() == [False] * 3 + [True]


# Policies that wrap another one

WRAPPERS = {
    "ageing_priority": lambda inner: scheduling.ageing_priority(inner=inner),
    "earliest_deadline": scheduling.earliest_deadline,
    "fair_share": scheduling.fair_share,
    "shortest_remaining": scheduling.shortest_remaining,
}


class Foreign(NamedTuple):
    """A wrapper of a user, with the attribute of the tutorial."""

    weight: jax.Array
    inner: jaxkv.Policy
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        return self.inner.plan(counts)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_policy_keeps_its_properties(name: str) -> None:
    wrap = WRAPPERS[name]
    for inner in (scheduling.static(), scheduling.fcfs(), wrap(scheduling.static())):
        policy = wrap(inner)
        assert policy.holds_finished == inner.holds_finished
        assert scheduling.holds_finished(policy) == inner.holds_finished
    c = counts([(5, 4, 5)], waiting=[1], free_pages=16, max_length=17)
    plan = plan_of(c, wrap(scheduling.static()))
    jax.tree.map(np.testing.assert_array_equal, plan, plan_of(c, scheduling.static()))
    assert type(wrap(None).inner) is type(scheduling.fcfs())


def test_a_foreign_wrapper_keeps_its_properties() -> None:
    one = jnp.float32(1)
    assert scheduling.holds_finished(Foreign(one, scheduling.static()))
    assert not scheduling.holds_finished(Foreign(one, scheduling.fcfs()))
    inner = Foreign(one, scheduling.earliest_deadline(scheduling.static()))
    assert scheduling.earliest_deadline(inner).holds_finished


BAD_FIELDS: Any = ("x", 3)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "inner", [5, "fcfs", scheduling.fcfs, scheduling.FCFS, (), Foreign(*BAD_FIELDS)]
)
@pytest.mark.usefixtures("no_type_checks")
def test_an_inner_policy_is_checked(name: str, inner: Any) -> None:
    with pytest.raises(ValueError, match=r"^inner=.* must be a "):
        WRAPPERS[name](inner)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (scheduling.chunked_prefill, dict(max_running=0)),
        (scheduling.chunked_prefill, dict(max_running=1.5)),
        (scheduling.chunked_prefill, dict(max_running=True)),
        (scheduling.chunked_prefill, dict(whole_prompts=1)),
        (scheduling.chunked_prefill, dict(first="no")),
        (scheduling.ageing_priority, dict(level_ms=0)),
        (scheduling.ageing_priority, dict(level_ms=2.5)),
        (scheduling.fcfs, dict(chunk_size=0)),
        (scheduling.fcfs, dict(watermark=-1)),
        (scheduling.fcfs, dict(stackable=1)),
        (scheduling.fcfs, dict(victim="first")),
        (scheduling.vllm_scheduler, dict(max_num_seqs=0)),
        (scheduling.vllm_scheduler, dict(long_prefill_token_threshold=-1)),
    ],
)
def test_an_argument_of_a_policy_is_checked(make: Any, fields: dict[str, Any]) -> None:
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match="must be") as caught:
        make(**fields)
    assert str(caught.value).startswith(f"{name}={value!r}")


def test_an_ordered_queue_is_one_type_for_all_keys() -> None:
    assert {type(wrap(None)) for wrap in WRAPPERS.values()} == {OrderedQueue}
