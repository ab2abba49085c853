"""The verifier of policies finds planted holes, and passes the library's policies."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxkv import scheduling
from jaxkv.scheduling import Counts, Plan, linear_score
from jaxkv.verification import draw_random_load, policy_checks, verify_policy
from tests.support.plans import LINE, counts, plan_of

NO_HOLE, PART, DRAFTS, NEVER, THRASHES, STARVES, BUDGET, OTHER = range(8)


class Planted(NamedTuple):
    """First come, first served, with a hole."""

    hole: jax.Array
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        c = counts
        admits = c.waiting & (self.hole != NEVER)
        key = jnp.where(self.hole == STARVES, c.waiting_tokens, 0)
        key = jnp.where(self.hole == OTHER, -c.waiting_tokens, key)
        plan = scheduling.plan_by(scheduling.fcfs(), c._replace(waiting=admits), key)
        place = jnp.arange(c.running.shape[0], dtype=jnp.int32)
        second = c.running & (c.group != place) & (self.hole == PART)
        out = second | (c.running & (self.hole == THRASHES))
        plan = plan._replace(
            preempt=plan.preempt | out,
            num_rows=jnp.where(out, 0, plan.num_rows)
            + jnp.where((self.hole == BUDGET) & (plan.num_rows > 0), 20, 0),
        )
        if c.drafts is None:
            return plan
        drafts = jnp.where(self.hole == DRAFTS, c.drafts - 2, c.drafts)
        return plan._replace(drafts=jnp.where(plan.num_rows == 1, drafts, 0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hole", "check", "reason", "num_requests"),
    [
        (PART, "valid plans", "Plan.preempt marks a sequence of a request and not", 1),
        (DRAFTS, "valid plans", "Plan.drafts is negative or exceeds Counts.drafts", 1),
        (BUDGET, "valid plans", "Plan.num_rows is negative or exceeds", 1),
        (NEVER, "every request ends", "no request is admitted and no row is fed", 1),
        (THRASHES, "every request ends", "preempted again and again", 1),
        pytest.param(
            *(STARVES, "no starvation", "it waits as long as others arrive", 36),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_holes_are_found(
    hole: int, check: str, reason: str, num_requests: int
) -> None:
    report = verify_policy(Planted(jnp.int32(hole)), num_loads=3)
    assert report.fault is not None
    assert report.fault.check == check
    assert reason in report.fault.reason
    assert len(report.fault.load.requests) == num_requests
    text = str(report)
    assert f"{check}: FAILS" in text
    assert "request 0: arrival_s=" in text
    assert f"load {report.fault.load.seed}, reduced to:" in text


@pytest.mark.slow
def test_a_policy_without_a_hole_holds_until_engine_or_tokens_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One type of policy, so that all runs share their programs."""
    plain = Planted(jnp.int32(NO_HOLE))
    report = verify_policy(plain, num_loads=3)
    assert report.fault is None, str(report)
    assert "engine: holds" in str(report)
    replay = policy_checks.replay_in_engine

    def of_another_policy(
        w: Any, steps: Any, policy: Any, *args: Any, **more: Any
    ) -> Any:
        return replay(w, steps, Planted(jnp.int32(OTHER)), *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(policy_checks, "replay_in_engine", of_another_policy)
        report = verify_policy(plain, num_loads=3)
    assert report.fault is not None
    assert report.fault.check == "engine"
    assert "in the simulation" in report.fault.reason
    assert len(report.fault.load.requests) < 24

    def of_other_weights(*args: Any, **more: Any) -> Any:
        params, forward, pages = more.pop("model")
        weights = jax.tree.map(lambda x: x + np.float32(0.1), params)
        return replay(*args, **more, model=(weights, forward, pages))

    monkeypatch.setattr(policy_checks, "replay_in_engine", of_other_weights)
    report = verify_policy(plain, num_loads=1)
    assert report.fault is not None
    assert report.fault.check == "tokens"
    assert "differs from that of fcfs from token" in report.fault.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        scheduling.fcfs(victim="cheapest"),
        scheduling.vllm_scheduler(),
        scheduling.shortest_remaining(),
        scheduling.ageing_priority(level_ms=20),
        scheduling.earliest_deadline(),
        scheduling.fair_share(),
        linear_score(
            admission={"new_tokens": 1, "younger": 0.5, "session_waiting": -1},
            victim={"remaining": 1, "lived": -0.2},
            age_per_s=1.5,
            chunk_size=6,
        ),
    ],
)
def test_policies_of_the_library_hold(policy: Any) -> None:
    report = verify_policy(policy, num_loads=9)
    assert report.fault is None, str(report)


NUMBERS = hnp.arrays(np.int32, LINE, elements=st.integers(-2, 12))
KINDS: dict[str, Any] = dict.fromkeys(Plan._fields, NUMBERS)
KINDS |= dict.fromkeys(("preempt", "swap", "admit"), hnp.arrays(bool, LINE))
BUSY = counts(
    [(9, 8, 2), (16, 3, 4), (0, 0, 0), "2"],
    [7, 12, 5],
    free_pages=6,
    group=[0, 1, 1, 3],
    waiting_swapped=[False, False, True, False],
    drafts=[2, 0, 0, 0],
)


class Fixed(NamedTuple):
    raw: Plan
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        return self.raw


@settings(max_examples=60, deadline=None)
@given(st.builds(Plan, **KINDS), st.integers(0, 3))
def test_a_plan_without_faults_is_not_corrected(raw: Plan, kind: int) -> None:
    """What `schedule` corrects is flagged; valid parts of drawn plans are not."""
    if kind:  # nearly valid
        raw = (
            scheduling.fcfs()
            .plan(jax.tree.map(jnp.asarray, BUSY))
            ._replace(
                **{name: getattr(raw, name) for name in Plan._fields[kind::3][:1]}
            )
        )
        raw = jax.tree.map(np.asarray, raw)
    faults = policy_checks._find_plan_faults(
        jax.tree.map(jnp.asarray, BUSY), jax.tree.map(jnp.asarray, raw)
    )
    if any(bool(x) for x in faults):
        return
    valid = jax.tree.map(np.asarray, plan_of(BUSY, Fixed(raw)))
    stays = BUSY.running & ~raw.preempt
    np.testing.assert_array_equal(valid.preempt, raw.preempt)
    np.testing.assert_array_equal(valid.admit, raw.admit)
    np.testing.assert_array_equal(valid.swap, raw.swap)
    np.testing.assert_array_equal(valid.num_rows, np.where(stays, raw.num_rows, 0))
    np.testing.assert_array_equal(
        valid.head_rows, np.where(raw.admit, raw.head_rows, 0)
    )


def test_documented_bounds() -> None:
    bound_s = scheduling.overtaking_bound_s
    assert bound_s(scheduling.fcfs()) == bound_s(scheduling.vllm_scheduler()) == 0
    assert bound_s(scheduling.fcfs(cached_first=True)) == math.inf
    assert bound_s(scheduling.fair_share()) == math.inf
    assert bound_s(scheduling.ageing_priority(level_ms=20)) == 40
    # A wrapper's order is that of its key only if the inner one admits in order.
    nested = scheduling.ageing_priority(inner=scheduling.fair_share())
    assert bound_s(nested) is None
    assert bound_s(Planted(jnp.int32(0))) is None


def test_loads_are_reproducible_and_lose_requests_consistently() -> None:
    load = draw_random_load(3, 24)
    assert load == draw_random_load(3, 24)
    smaller = load.without([0, 5])
    assert len(smaller.requests) == 22
    w = smaller.workload(30)
    assert w.prompt.shape == (30,)
    assert int(np.asarray(w.samples)[22:].sum()) == 0
    after = np.asarray(w.after)
    assert (after < np.arange(30)[:, None]).all()
