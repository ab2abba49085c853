"""Preemption rules, swapping and admission after preemptions, computed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.scheduling import FCFS, interface, victims
from jaxkv.scheduling.first_come import fcfs
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.plans import check, counts, plan_of

READER = (16, 2, 4)
SHORT = (6, 5, 2)
LONG = (12, 11, 3)
"""(known, written, pages): one early in its prefill, and two that decode."""


@pytest.mark.parametrize(
    ("victim", "out"),
    [
        ("latest", [0, 0, 0, 1]),
        ("least_computed", [0, 1, 0, 0]),
        ("fewest_pages", [0, 0, 1, 0]),
        ("cheapest", [0, 1, 0, 0]),
    ],
)
def test_one_is_preempted(victim: Any, out: list[int]) -> None:
    # The first needs a page, and there is none.
    line: Any = [(9, 8, 2), READER, SHORT, LONG]
    plan = plan_of(counts(line, free_pages=0), fcfs(victim=victim))
    expected_places = [
        0 if is_out else num_tokens
        for is_out, (num_tokens, *_) in zip(out, line, strict=True)
    ]
    # Decoding feeds one token per sequence, prefill the rest of 12.
    rows = [int(not is_out) for is_out in out]
    rows[1] = 0 if out[1] else 12 - rows[0] - rows[2] - rows[3]
    check(plan, preempt=out, places=expected_places, num_rows=rows)


@pytest.mark.parametrize(
    ("victim", "out"),
    [
        ("latest", [0, 0, 1, 1]),
        ("least_computed", [0, 1, 0, 1]),
        ("fewest_pages", [0, 1, 0, 1]),
        # One preemption is enough for two of them: the one with fewer tokens.
        ("cheapest", [0, 1, 0, 0]),
    ],
)
def test_three_pages_are_missing(victim: Any, out: list[int]) -> None:
    line: Any = [(17, 8, 2), LONG, (16, 14, 4), SHORT]
    plan = plan_of(counts(line, free_pages=0), fcfs(victim=victim))
    assert plan.preempt.tolist() == [bool(flag) for flag in out]


@pytest.mark.parametrize("victim", victims.VICTIM_NAMES)
def test_of_equals_the_later_is_preempted(victim: Any) -> None:
    line: Any = [(9, 8, 2), SHORT, SHORT, SHORT]
    plan = plan_of(counts(line, free_pages=0), fcfs(victim=victim))
    assert plan.preempt.tolist() == [False, False, False, True]


def test_if_no_victim_frees_enough_the_largest_is_preempted() -> None:
    # The first needs three more pages, and no later sequence has so many.
    line: Any = [(18, 8, 2), (5, 4, 2), (5, 4, 2), (1, 0, 1)]
    plan = plan_of(counts(line, free_pages=0), fcfs(victim="cheapest"))
    assert plan.preempt.tolist() == [False, True, True, False]


def test_when_pages_move_the_cheapest_has_the_fewest_to_move() -> None:
    # Both release two pages; one shares pages with the cache, so more would move.
    line: Any = [(9, 8, 2), (8, 7, 2), (8, 6, 2)]
    c = counts(line, free_pages=0, swap_pages=[2, 1, 2, 0], free_swap_pages=9)
    assert plan_of(c, fcfs(victim="cheapest")).preempt.tolist()[2]
    plan = plan_of(c, fcfs(victim="cheapest", preemption="swap"))
    assert plan.preempt.tolist()[:3] == plan.swap.tolist()[:3] == [False, True, False]


@pytest.mark.parametrize("victim", victims.VICTIM_NAMES)
def test_the_first_is_never_preempted_and_groups_go_as_one(victim: Any) -> None:
    line: Any = [None, (5, 4, 1), (5, 4, 1), (5, 4, 1)]
    shared: Any = dict(group=[0, 1, 2, 2], owned_pages=[0, 1, 1, 1])
    plan = plan_of(counts(line, free_pages=0, **shared), fcfs(victim=victim))
    assert plan.preempt.tolist() == [False, False, True, True]


def test_pages_are_kept_as_far_as_there_is_room() -> None:
    line: Any = [(17, 8, 2), (8, 7, 2), (8, 7, 2), (8, 7, 2)]
    for free, num_swapped in ((9, 2), (4, 2), (3, 1), (1, 0)):
        c = counts(line, free_pages=0, free_swap_pages=free)
        plan = plan_of(c, fcfs(preemption="swap"))
        assert plan.preempt.tolist() == [False, False, True, True]
        assert plan.swap.tolist() == [False, False, num_swapped > 0, num_swapped > 1]
    # Groups are swapped as a whole; sequences without written tokens are not swapped.
    shared: Any = dict(group=[0, 1, 2, 2], swap_pages=[2, 0, 2, 2])
    c = counts(line, free_pages=0, free_swap_pages=3, **shared)
    assert not plan_of(c, fcfs(preemption="swap")).swap.any()
    assert not plan_of(c, fcfs()).swap.any()


def test_a_swapped_in_request_gets_pages_and_no_rows() -> None:
    back: Any = dict(
        waiting_preempted=[True, False, False, False],
        waiting_swapped=[True, False, False, False],
        waiting_pages=[3, 1, 0, 0],
    )
    c = counts([(5, 4, 2)], waiting=[9, 3], free_pages=9, **back)
    plan = plan_of(c, fcfs())
    check(
        plan,
        places=[5],
        num_rows=[1],
        admit=[1, 1],
        head_places=[9, 3],
        head_rows=[0, 3],
    )
    # With `hold_new`, the other request is new and must wait.
    plan = plan_of(c, fcfs(preemption="swap"))
    check(plan, places=[5], num_rows=[1], admit=[1], head_places=[9])
    tight = counts([(5, 4, 2)], waiting=[9, 3], free_pages=2, **back)
    check(plan_of(tight, fcfs()), places=[5], num_rows=[1])


def test_new_requests_wait_while_a_preempted_one_runs() -> None:
    line: Any = [(5, 4, 2), (5, 4, 2)]
    for hold_new in (True, False):
        policy = fcfs(hold_new=hold_new)
        c = counts(line, waiting=[3], free_pages=9)
        assert plan_of(c, policy).admit.tolist()[0]
        second: Any = np.arange(4) == 1
        c = c._replace(preempted=second)
        assert plan_of(c, policy).admit.tolist()[0] != hold_new


def test_the_longest_prefix_comes_first_if_asked_for() -> None:
    # Two slots are free. No request overtakes a preempted one.
    waiting: Any = dict(waiting_cached=[0, 4, 8, 8], waiting_pages=[3, 2, 1, 1])
    sizes: Any = dict(free_pages=9, token_budget=30)
    c = counts([(5, 4, 2)] * 2, waiting=[10, 10, 10, 10], **sizes, **waiting)
    plan = plan_of(c, fcfs(cached_first=True))
    assert plan.admit.tolist() == [False, False, True, True]
    assert plan.head_rows.tolist() == [0, 0, 2, 2]
    assert plan_of(c, fcfs()).admit.tolist() == [True, True, False, False]
    second: Any = np.arange(4) == 1
    c = c._replace(waiting_preempted=second)
    plan = plan_of(c, fcfs(cached_first=True))
    assert plan.admit.tolist() == [False, True, True, False]
    # A request that has not arrived blocks no other request.
    c = counts(waiting=[9, 2], free_pages=9, arrived=[False, True])
    assert plan_of(c, fcfs(cached_first=True)).admit.tolist()[:2] == [False, True]


def test_static_batching_admits_swapped_requests() -> None:
    back: Any = dict(waiting_swapped=[True, False, False, False])
    c = counts(waiting=[5, 2], free_pages=16, max_length=17, **back)
    plan = plan_of(c, scheduling.static())
    check(plan, admit=[1, 1], head_places=[17, 17], head_rows=[0, 2])


BUGS = {
    "the first may be a victim": Bug(
        victims,
        "rank_victims",
        "jnp.where(is_first, LAST_KEY, keys[victim])",
        "keys[victim]",
        test_the_first_is_never_preempted_and_groups_go_as_one,
        ("least_computed",),
    ),
    "the earliest of equals": Bug(
        victims,
        "rank_victims",
        "place[:, None] < place[None, :]",
        "place[:, None] > place[None, :]",
        test_of_equals_the_later_is_preempted,
        ("cheapest",),
    ),
    "just enough is too little": Bug(
        victims,
        "rank_victims",
        "frees >= shortage",
        "frees > shortage",
        test_three_pages_are_missing,
        ("cheapest", [0, 1, 0, 0]),
    ),
    "the smallest of those that do not suffice": Bug(
        victims,
        "rank_victims",
        "LAST_KEY // 2 - frees",
        "LAST_KEY // 2 + frees",
        test_if_no_victim_frees_enough_the_largest_is_preempted,
    ),
    "tokens for pages": Bug(
        victims,
        "rank_victims",
        "by_group(c.owned_pages)",
        "by_group(c.owned_tokens)",
        test_one_is_preempted,
        ("fewest_pages", [0, 0, 1, 0]),
    ),
    "pages to move cost as much as recomputation": Bug(
        FCFS,
        "_plan",
        "jnp.where(self.swap, c.swap_pages, cost)",
        "cost",
        test_when_pages_move_the_cheapest_has_the_fewest_to_move,
    ),
    "a full buffer has room": Bug(
        FCFS,
        "_plan",
        " & ~interface.any_of_group(c, keeps & ~fits)",
        "",
        test_pages_are_kept_as_far_as_there_is_room,
    ),
    "the last page of the buffer is never used": Bug(
        FCFS,
        "_plan",
        "<= c.free_swap_pages",
        "< c.free_swap_pages",
        test_pages_are_kept_as_far_as_there_is_room,
    ),
    "swapped-in requests feed tokens": Bug(
        interface,
        "share_budget",
        "admit & ~c.waiting_swapped",
        "admit",
        test_a_swapped_in_request_gets_pages_and_no_rows,
    ),
    "new requests are held for ever": Bug(
        FCFS,
        "_plan",
        "self.hold & away",
        "self.hold",
        test_new_requests_wait_while_a_preempted_one_runs,
    ),
    "one that runs again is forgotten": Bug(
        FCFS,
        "_plan",
        "jnp.any(c.running & c.preempted) | ",
        "",
        test_new_requests_wait_while_a_preempted_one_runs,
    ),
    "a prefix overtakes a preempted request": Bug(
        FCFS,
        "plan",
        "jnp.where(counts.waiting_preempted, -NO_LIMIT, key)",
        "key",
        test_the_longest_prefix_comes_first_if_asked_for,
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_seeded_bug_is_noticed(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.disable_jit():  # else the right program would be found compiled
        mutation.assert_noticed(monkeypatch, bug)


def test_the_last_two_tokens_of_a_prompt_stall_decodes() -> None:
    c = counts([(6, 4, 2), (5, 4, 2)], free_pages=4)
    policy = scheduling.chunked_prefill(first=True)
    assert plan_of(c, policy).num_rows.tolist()[:2] == [2, 0]


@pytest.mark.parametrize(("free_pages", "drafts"), [(2, 4), (1, 0)])
def test_drafts_may_take_the_last_free_page(free_pages: int, drafts: int) -> None:
    c = counts([(5, 4, 1)], free_pages=free_pages)
    wanted = jnp.array([4, 0, 0, 0], jnp.int32)
    rows = interface._grant_drafts(c, plan_of(c, fcfs()), wanted)
    assert rows.tolist() == [drafts, 0, 0, 0]
