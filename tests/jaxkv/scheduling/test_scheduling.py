"""Plans computed by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.scheduling import FCFS, interface, static_batching
from jaxkv.scheduling.first_come import fcfs
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.plans import check, counts, plan_of


def test_an_idle_engine_admits_until_the_budget_is_used_up() -> None:
    # 2 + 3 + 1 of 10 pages; 5 + 7 of 12 rows, so the third gets none and waits.
    plan = plan_of(counts(waiting=[5, 9, 3], free_pages=10), fcfs())
    check(plan, admit=[1, 1, 0], head_places=[5, 9], head_rows=[5, 7])


def test_a_chunk_size_leaves_rows_for_later_prompts() -> None:
    plan = plan_of(counts(waiting=[5, 9, 3], free_pages=10), fcfs(chunk_size=4))
    check(plan, admit=[1, 1, 1], head_places=[5, 9, 3], head_rows=[4, 4, 3])


def test_decoding_is_served_before_prompts() -> None:
    line: list = [(8, 7, 2), (12, 4, 3), (5, 4, 1)]
    c = counts(line, free_pages=1, token_budget=6)
    # The third grows into the last free page; 6 rows less 2 are left for the prompt.
    check(plan_of(c, fcfs()), places=[8, 12, 5], num_rows=[1, 4, 1])


def test_the_latest_is_preempted_and_no_request_is_admitted() -> None:
    line: list = [(8, 7, 2), (12, 4, 3), (5, 4, 1)]
    c = counts(line, waiting=[1], free_pages=0, token_budget=6)
    plan = plan_of(c, fcfs())
    check(plan, preempt=[0, 0, 1], places=[8, 12], num_rows=[1, 5])
    # The preempted sequence has released a row, pages and a slot.
    plan = plan_of(counts(line, waiting=[1], free_pages=0), fcfs())
    check(plan, preempt=[0, 0, 1], places=[8, 12], num_rows=[1, 8])


def test_all_after_the_first_that_does_not_fit_are_preempted() -> None:
    # The first needs a third page: 3 + 2 > 4. The third would still fit.
    line: list = [(9, 8, 2), (5, 4, 1), (4, 3, 1)]
    plan = plan_of(counts(line, free_pages=0), fcfs())
    check(plan, preempt=[0, 1, 1], places=[9], num_rows=[1])


def test_empty_places_in_line_change_nothing() -> None:
    line: list = [None, (8, 7, 2), None, (9, 8, 2)]
    plan = plan_of(counts(line, waiting=[4, 4, 4], free_pages=9), fcfs())
    check(
        plan,
        places=[0, 8, 0, 9],
        num_rows=[0, 1, 0, 1],
        admit=[1, 1, 0],  # two slots are free
        head_places=[4, 4],
        head_rows=[4, 4],
    )


def test_requests_are_admitted_as_far_as_the_pages_go() -> None:
    plan = plan_of(counts(waiting=[4, 4, 1], free_pages=2), fcfs())
    check(plan, admit=[1, 1], head_places=[4, 4], head_rows=[4, 4])


def test_no_request_overtakes_one_that_does_not_fit() -> None:
    c = counts([(8, 7, 2)], waiting=[13, 1], free_pages=3)
    check(plan_of(c, fcfs()), places=[8], num_rows=[1])


MASKABLE = {
    "fcfs": fcfs(),
    "every rule": fcfs(stackable=True, preemption="swap", cached_first=True),
    "chunked": scheduling.chunked_prefill(max_running=2),
    "whole prompts": scheduling.chunked_prefill(whole_prompts=True, first=True),
    "static": static_batching.static(),
}


@pytest.mark.parametrize("name", MASKABLE)
def test_unmarked_rows_are_skipped(name: str) -> None:
    """The hidden request takes more pages, slots and rows than there are."""
    hidden: Any = dict(
        waiting_pages=[99, 1, 99, 1],
        waiting_slots=[9, 1, 9, 1],
        waiting_cached=[900, 0, 900, 0],
        waiting_preempted=[True, False, True, False],
        waiting_swapped=[True, False, False, False],
    )
    marked = [False, True, False, True]
    c = counts(waiting=[999, 3, 999, 2], free_pages=16, arrived=marked, **hidden)
    plan = plan_of(c, MASKABLE[name])
    places = [0, 32, 0, 32] if name == "static" else [0, 3, 0, 2]
    check(plan, admit=[0, 1, 0, 1], head_places=places, head_rows=[0, 3, 0, 2])
    none = plan_of(c._replace(waiting=jnp.zeros(4, bool)), MASKABLE[name])
    check(none)


@pytest.mark.parametrize("name", [name for name in MASKABLE if name != "static"])
def test_the_first_marked_request_that_does_not_fit_blocks_later_ones(
    name: str,
) -> None:
    marked = [False, True, False, True]
    c = counts(waiting=[1, 30, 1, 2], free_pages=4, arrived=marked)
    check(plan_of(c, MASKABLE[name]))
    # It fits, but its log-probabilities need spare logit rows, and there are none.
    scored: Any = ([], [1])
    c = counts(waiting=[1, 3, 1, 2], free_pages=9, arrived=marked, scored=scored)
    check(plan_of(c, MASKABLE[name]))


def test_full_slots_admit_no_request() -> None:
    line: list = [(3, 2, 1), (3, 2, 1), "2", (3, 2, 1)]
    c = counts(line, waiting=[1], free_pages=9)
    check(plan_of(c, fcfs()), places=[3, 3, 0, 3], num_rows=[1, 1, 0, 1])


@pytest.mark.parametrize(("watermark", "admitted"), [(0, 1), (1, 1), (2, 0)])
def test_the_watermark_stays_free_at_admission(watermark: int, admitted: int) -> None:
    # 3 free pages; the runner needs no more, the other one two.
    c = counts([(7, 6, 2)], waiting=[5], free_pages=3)
    check(
        plan_of(c, fcfs(watermark=watermark)),
        places=[7],
        num_rows=[1],
        admit=[admitted],
        head_places=[5 * admitted],
        head_rows=[5 * admitted],
    )


def test_the_first_of_an_idle_engine_may_take_every_page() -> None:
    c = counts(waiting=[12, 1], free_pages=3)
    plan = plan_of(c, fcfs(watermark=100))
    check(plan, admit=[1, 0], head_places=[12], head_rows=[12])


def test_scored_prompts_feed_no_more_rows_than_have_logits() -> None:
    c = counts(
        [(20, 4, 5), (8, 2, 2)],
        waiting=[6, 2],
        free_pages=9,
        scored=([0, 1], []),
        spare_logit_rows=5,
        token_budget=12,
    )
    # The first takes all spare logit rows, the second waits for its own.
    check(
        plan_of(c, fcfs()),
        places=[20, 8],
        num_rows=[5, 0],
        admit=[1, 1],
        head_places=[6, 2],
        head_rows=[6, 1],
    )


def test_no_request_overtakes_a_scored_prompt_without_logit_rows() -> None:
    c = counts(
        waiting=[4, 3, 2],
        free_pages=9,
        scored=([], [0, 1]),
        spare_logit_rows=4,
    )
    plan = plan_of(c, fcfs())
    check(plan, admit=[1, 0, 0], head_places=[4], head_rows=[4])


def test_a_sequence_that_decodes_needs_no_spare_logit_row() -> None:
    c = counts([(9, 8, 3)], free_pages=9, scored=([0], []))
    check(plan_of(c, fcfs()), places=[9], num_rows=[1])


def test_a_group_is_preempted_as_one() -> None:
    # Slots 1 and 2 are one request: its second sequence no longer fits.
    line: Any = [(9, 8, 2), (9, 8, 2), (9, 8, 2)]
    shared: Any = dict(group=[0, 1, 1, 3], owned_pages=[2, 2, 0, 0])
    plan = plan_of(counts(line, free_pages=2, **shared), fcfs())
    check(plan, preempt=[0, 1, 1], places=[9], num_rows=[1])
    plan = plan_of(counts(line, free_pages=3, **shared), fcfs())
    check(plan, places=[9, 9, 9], num_rows=[1, 1, 1])


def test_copies_are_granted_with_growth() -> None:
    # Both write to the page that they share: one of them copies it.
    line: Any = [(6, 5, 2), (6, 5, 2)]
    shared: Any = dict(group=[0, 0, 2, 3], copies=[1, 0, 0, 0])
    alone = counts(line, free_pages=1, owned_pages=[2, 0, 0, 0], **shared)
    check(plan_of(alone, fcfs()), places=[6, 6], num_rows=[1, 1])
    line.append((9, 8, 2))
    other = counts(line, free_pages=1, owned_pages=[2, 0, 2, 0], **shared)
    check(plan_of(other, fcfs()), preempt=[0, 0, 1], places=[6, 6], num_rows=[1, 1])


def test_a_request_is_admitted_with_all_of_its_sequences() -> None:
    waiting: Any = dict(waiting_slots=[2, 3, 1, 0], waiting_pages=[2, 3, 1, 0])
    plan = plan_of(counts([(5, 4, 2)], [4, 4, 4], free_pages=9, **waiting), fcfs())
    check(plan, places=[5], num_rows=[1], admit=[1], head_places=[4], head_rows=[4])
    plan = plan_of(counts([], [4, 4, 4], free_pages=4, **waiting), fcfs())
    check(plan, admit=[1], head_places=[4], head_rows=[4])


def test_parameters_are_swept_by_vmap() -> None:
    c = counts([(7, 6, 2)], waiting=[9, 3], free_pages=4)
    values = [(None, 0), (2, 0), (5, 1), (1, 4)]
    members = [fcfs(chunk_size=chunk, watermark=mark) for chunk, mark in values]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    together = jax.vmap(lambda policy: plan_of(c, policy))(stacked)
    for index, policy in enumerate(members):
        alone = plan_of(c, policy)
        member_plan = jax.tree.map(lambda x, index=index: x[index], together)
        jax.tree.map(np.testing.assert_array_equal, alone, member_plan)


def test_static_reserves_the_longest_sequence_for_each_slot() -> None:
    # 17 places are 5 pages each: three of them fit into 16.
    c = counts(waiting=[5, 2, 3, 1], free_pages=16, max_length=17)
    plan = plan_of(c, static_batching.static())
    check(plan, admit=[1, 1, 1, 0], head_places=[17, 17, 17], head_rows=[5, 2, 3])


def test_static_feeds_prompts_as_the_budget_lets_it() -> None:
    c = counts(waiting=[9, 9], free_pages=16, max_length=17)
    plan = plan_of(c, static_batching.static())
    check(plan, admit=[1, 1], head_places=[17, 17], head_rows=[9, 3])


@pytest.mark.parametrize("line", [[(5, 4, 5)], ["5"], ["5", (5, 4, 5)]])
def test_static_admits_no_request_into_a_batch(line: list) -> None:
    c = counts(line, waiting=[1], free_pages=16, max_length=17)
    runs = [int(isinstance(entry, tuple)) for entry in line]
    places = [5 * run for run in runs]
    check(plan_of(c, static_batching.static()), num_rows=runs, places=places)


def test_static_grows_sequences_that_another_policy_admitted() -> None:
    # Full pages of 4 each: two find a page, the third waits for the next batch.
    c = counts([(5, 4, 1), (9, 8, 2), (5, 4, 1)], waiting=[1], free_pages=2)
    plan = plan_of(c, static_batching.static())
    check(plan, preempt=[0, 0, 1], places=[5, 9, 0], num_rows=[1, 1, 0])


def test_static_admits_no_request_before_its_arrival() -> None:
    c = counts(waiting=[3, 1], free_pages=16, arrived=[False, False])
    check(plan_of(c, static_batching.static()))


def test_static_serves_a_pool_smaller_than_the_longest_sequence() -> None:
    # 3 pages, and 5 would be reserved: the first gets all 3.
    c = counts(waiting=[5, 1], free_pages=3, max_length=17)
    plan = plan_of(c, static_batching.static())
    check(plan, admit=[1, 0], head_places=[12], head_rows=[5])


def test_static_leaves_pages_for_the_forks_of_the_first_request() -> None:
    # 5 pages each would be 15 of 11: each of the three sequences has 3.
    waiting: Any = dict(waiting_slots=[3, 1, 0, 0])
    c = counts(waiting=[5, 1], free_pages=11, max_length=17, **waiting)
    plan = plan_of(c, static_batching.static())
    check(plan, admit=[1, 0], head_places=[12], head_rows=[5])


BUGS = {
    "decodes cost no budget": Bug(
        interface,
        "share_budget",
        " - jnp.sum(decodes, dtype=jnp.int32)",
        "",
        test_decoding_is_served_before_prompts,
    ),
    "chunks of any size": Bug(
        interface,
        "share_budget",
        "jnp.minimum(prompts, jnp.asarray(chunk_size, jnp.int32))",
        "prompts",
        test_a_chunk_size_leaves_rows_for_later_prompts,
    ),
    "logits for all": Bug(
        interface,
        "share_budget",
        "_grant_in_order(jnp.where(scored, prompts, 0), c.spare_logit_rows)",
        "prompts",
        test_scored_prompts_feed_no_more_rows_than_have_logits,
    ),
    "the budget is used up too soon": Bug(
        interface,
        "_grant_in_order",
        "jnp.cumsum(want, dtype=jnp.int32) - want",
        "jnp.cumsum(want, dtype=jnp.int32)",
        test_an_idle_engine_admits_until_the_budget_is_used_up,
    ),
    "copies need no page": Bug(
        interface,
        "pages_to_grow",
        " + c.copies",
        "",
        test_copies_are_granted_with_growth,
    ),
    "half of a group is preempted": Bug(
        FCFS,
        "_plan",
        "runs &= ~interface.any_of_group(c, c.running & ~runs)",
        "",
        test_a_group_is_preempted_as_one,
    ),
    "no watermark": Bug(
        FCFS,
        "_plan",
        "free - self.watermark",
        "free",
        test_the_watermark_stays_free_at_admission,
        (2, 0),
    ),
    "a watermark for an idle engine": Bug(
        FCFS,
        "_plan",
        "jnp.where(~jnp.any(runs) & first, free, free - self.watermark)",
        "free - self.watermark",
        test_the_first_of_an_idle_engine_may_take_every_page,
    ),
    "admission in a step with a preemption": Bug(
        FCFS,
        "_plan",
        "c.waiting & ~jnp.any(preempt)",
        "c.waiting",
        test_the_latest_is_preempted_and_no_request_is_admitted,
    ),
    "slots of finished sequences are free": Bug(
        FCFS,
        "_plan",
        "runs | c.held",
        "runs",
        test_full_slots_admit_no_request,
    ),
    "each request has all free slots": Bug(
        FCFS,
        "_plan",
        "jnp.cumsum(c.waiting_slots, dtype=jnp.int32)",
        "c.waiting_slots",
        test_empty_places_in_line_change_nothing,
    ),
    "each request has all free pages": Bug(
        FCFS,
        "_plan",
        "jnp.cumsum(c.waiting_pages, dtype=jnp.int32)",
        "c.waiting_pages",
        test_requests_are_admitted_as_far_as_the_pages_go,
    ),
    "small requests overtake": Bug(
        interface,
        "admissible",
        "arrays.before_first(counts.waiting & ~fits)",
        "fits",
        test_the_first_marked_request_that_does_not_fit_blocks_later_ones,
        ("fcfs",),
    ),
    "an unmarked request blocks": Bug(
        interface,
        "admissible",
        "counts.waiting & ~fits",
        "~fits",
        test_unmarked_rows_are_skipped,
        ("fcfs",),
    ),
    **{
        f"unmarked requests count, {name}": Bug(
            interface,
            "skip_unmarked",
            "jnp.where(c.waiting, c.waiting_slots, 0)",
            "c.waiting_slots",
            test_unmarked_rows_are_skipped,
            (name,),
        )
        for name in ("fcfs", "chunked", "static")
    },
    "static batching lets requests join": Bug(
        static_batching.Static,
        "plan",
        "c.waiting & ~busy & (fits | first)",
        "c.waiting & (fits | first)",
        test_static_admits_no_request_into_a_batch,
        ([(5, 4, 5)],),
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_seeded_bug_is_noticed(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.disable_jit():  # else the right program would be found compiled
        mutation.assert_noticed(monkeypatch, bug)


# Plain FCFS in plain Python


def slow_fcfs(c: Any, chunk_size: int, watermark: int) -> dict[str, list[Any]]:
    """Plans as `fcfs` for requests of one sequence, one request at a time."""
    places = range(len(c.running))

    def pages(tokens: int) -> int:
        return -(-tokens // c.page_size)

    wanted = [
        int(c.running[i])
        * (
            int(c.owned_pages[i])
            + max(pages(int(c.target_length[i])) - int(c.num_pages[i]), 0)
            + int(c.copies[i])
        )
        for i in places
    ]
    free = int(c.free_pages) + sum(
        int(c.owned_pages[i]) for i in places if c.running[i]
    )
    runs = []
    all_fit = True
    for i in places:
        all_fit &= sum(wanted[: i + 1]) <= free
        runs.append(bool(c.running[i]) and all_fit)
    preempt = [bool(c.running[i]) and not runs[i] for i in places]
    free -= sum(wanted[i] for i in places if runs[i])
    slots = len(runs) - sum(runs[i] or bool(c.held[i]) for i in places)
    need = [int(c.target_length[i] - c.length[i]) * runs[i] for i in places]
    left = c.token_budget - need.count(1)
    spare = int(c.spare_logit_rows)

    def rows_of(prompt: int, is_scored: bool) -> int:
        nonlocal left, spare
        rows = min(prompt, chunk_size)
        if is_scored:
            rows = max(0, min(rows, spare))
            spare -= min(prompt, chunk_size)
        fed_rows = max(0, min(rows, left))
        left -= rows
        return fed_rows

    num_rows = [
        1 if need[i] == 1 else rows_of(need[i], bool(c.scored_prompt[i]))
        for i in places
    ]
    admit = []
    head_rows = []
    is_first = True
    blocked = any(preempt)
    for k in range(len(c.waiting)):
        rows = 0
        if c.waiting[k] and not blocked:
            free -= int(c.waiting_pages[k])
            slots -= int(c.waiting_slots[k])
            reserve = 0 if is_first and not any(runs) else watermark
            blocked = free < reserve or slots < 0
            is_first = False
            if not blocked:
                tokens = int(c.waiting_tokens[k] - c.waiting_cached[k])
                tokens *= not c.waiting_swapped[k]
                rows = rows_of(tokens, bool(c.waiting_scored_prompt[k]))
                blocked = rows == 0 and not c.waiting_swapped[k]
        admit.append(bool(c.waiting[k]) and not blocked)
        head_rows.append(rows * admit[-1])
    return {
        "preempt": preempt,
        "places": [int(c.target_length[i]) * runs[i] for i in places],
        "num_rows": num_rows,
        "admit": admit,
        "head_places": [
            int(x) * a for x, a in zip(c.waiting_tokens, admit, strict=True)
        ],
        "head_rows": head_rows,
    }


def random_counts(rng: np.random.Generator, *, masked: bool) -> Any:
    """Random counts of an engine with four slots, the queue masked or not."""
    line: Any = [None] * 4
    for i in range(4):
        length = int(rng.integers(0, 14))
        more = int(rng.integers(1, 7))
        if rng.random() < 0.4:
            line[i] = (length + more, length, -(-length // 4))
        elif rng.random() < 0.2:
            line[i] = str(rng.integers(1, 4))
    waiting = rng.integers(1, 15, rng.integers(0, 5)).tolist()
    marked = (rng.random(len(waiting)) < 0.5).tolist() if masked else None
    num_scored = int(rng.integers(0, 2))
    fields: Any = dict(
        waiting_cached=[int(rng.integers(0, x)) for x in (*waiting, 1, 1, 1, 1)][:4],
        waiting_slots=rng.integers(1, 3, 4).tolist(),
        waiting_swapped=(rng.random(4) < 0.2).tolist(),
        copies=rng.integers(0, 2, 4).tolist(),
    )
    return counts(
        line,
        waiting,
        free_pages=int(rng.integers(0, 20)),
        token_budget=int(rng.integers(4, 20)),
        arrived=marked,
        scored=([0] * num_scored, [1] * num_scored),
        spare_logit_rows=int(rng.integers(0, 6)),
        **fields,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_plain_fcfs_plans_as_one_request_at_a_time_would(masked: bool) -> None:
    rng = np.random.default_rng(0)
    num_admitted = 0
    for _ in range(120):
        c = random_counts(rng, masked=masked)
        chunk_size = int(rng.integers(1, 9))
        watermark = int(rng.integers(0, 3))
        plan = plan_of(c, fcfs(chunk_size=chunk_size, watermark=watermark))
        for name, wanted in slow_fcfs(c, chunk_size, watermark).items():
            assert np.asarray(getattr(plan, name)).tolist() == wanted, name
        num_admitted += int(np.asarray(plan.admit).sum())
    assert num_admitted > 30


class InOrder(NamedTuple):
    """First come, first served, in an order of the queue."""

    order: jax.Array
    holds_finished = False

    def plan(self, counts: interface.Counts) -> interface.Plan:
        return interface.plan_in_order(fcfs(), counts, self.order)


def test_a_queue_in_another_order() -> None:
    c = counts(waiting=[9, 2, 5, 3], free_pages=3, arrived=[True, True, False, True])
    plan = plan_of(c, InOrder(jnp.asarray([2, 1, 3, 0], jnp.int32)))
    check(plan, admit=[0, 1, 0, 1], head_places=[0, 2, 0, 3], head_rows=[0, 2, 0, 3])
    same = plan_of(c, InOrder(jnp.arange(4, dtype=jnp.int32)))
    for leaf, wanted in zip(same, plan_of(c, fcfs()), strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(leaf, wanted)
