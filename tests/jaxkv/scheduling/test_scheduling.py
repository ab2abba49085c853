"""Plans worked by hand: counts in, decisions out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.scheduling import fcfs as scheduling_fcfs
from jaxkv.scheduling import interface, static_batching
from jaxkv.scheduling.fcfs import fcfs
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.plans import check, counts, plan_of


def test_an_idle_engine_admits_until_the_budget_is_used_up() -> None:
    # 2 + 3 + 1 of 10 pages; 5 + 7 of 12 rows, so the third gets none and waits.
    plan = plan_of(counts(waiting=[5, 9, 3], free_pages=10), fcfs())
    check(plan, admit=[1, 1, 0], head_places=[5, 9], head_rows=[5, 7])


def test_a_chunk_size_leaves_rows_for_those_behind() -> None:
    plan = plan_of(counts(waiting=[5, 9, 3], free_pages=10), fcfs(chunk_size=4))
    check(plan, admit=[1, 1, 1], head_places=[5, 9, 3], head_rows=[4, 4, 3])


def test_whoever_decodes_is_served_before_prompts() -> None:
    line: list = [(8, 7, 2), (12, 4, 3), (5, 4, 1)]
    c = counts(line, free_pages=1, token_budget=6)
    # The third grows into the last free page; 6 rows less 2 are left for the prompt.
    check(plan_of(c, fcfs()), places=[8, 12, 5], num_rows=[1, 4, 1])


def test_the_latest_is_preempted_and_nobody_is_admitted() -> None:
    line: list = [(8, 7, 2), (12, 4, 3), (5, 4, 1)]
    c = counts(line, waiting=[1], free_pages=0, token_budget=6)
    plan = plan_of(c, fcfs())
    check(plan, preempt=[0, 0, 1], places=[8, 12], num_rows=[1, 5])
    # Not for want of a row, a page or a slot: the one that is left out has freed them.
    plan = plan_of(counts(line, waiting=[1], free_pages=0), fcfs())
    check(plan, preempt=[0, 0, 1], places=[8, 12], num_rows=[1, 8])


def test_everybody_behind_the_first_who_does_not_fit_is_preempted() -> None:
    # The first needs a third page: 3 + 2 > 4. The third would fit beside it.
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


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    c = counts([(8, 7, 2)], waiting=[13, 1], free_pages=3)
    check(plan_of(c, fcfs()), places=[8], num_rows=[1])


def test_nobody_overtakes_a_request_that_has_not_arrived() -> None:
    c = counts(waiting=[3, 1], free_pages=9, arrived=[False, True])
    check(plan_of(c, fcfs()))


def test_full_slots_admit_nobody() -> None:
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


def test_nobody_overtakes_a_scored_prompt_without_logit_rows() -> None:
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
    # Places 1 and 2 are one request: its second sequence no longer fits.
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
        mine = jax.tree.map(lambda x, index=index: x[index], together)
        jax.tree.map(np.testing.assert_array_equal, alone, mine)


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
def test_static_admits_nobody_into_a_batch(line: list) -> None:
    c = counts(line, waiting=[1], free_pages=16, max_length=17)
    runs = [int(isinstance(each, tuple)) for each in line]
    places = [5 * each for each in runs]
    check(plan_of(c, static_batching.static()), num_rows=runs, places=places)


def test_static_lets_those_grow_that_another_policy_admitted() -> None:
    # Full pages of 4 each: two find a page, the third waits for the next batch.
    c = counts([(5, 4, 1), (9, 8, 2), (5, 4, 1)], waiting=[1], free_pages=2)
    plan = plan_of(c, static_batching.static())
    check(plan, preempt=[0, 0, 1], places=[5, 9, 0], num_rows=[1, 1, 0])


def test_static_admits_nobody_who_has_not_arrived() -> None:
    c = counts(waiting=[3, 1], free_pages=16, arrived=[False, False])
    check(plan_of(c, static_batching.static()))


def test_static_serves_a_pool_smaller_than_the_longest_sequence() -> None:
    # 3 pages, and 5 would be reserved: the first gets what there is.
    c = counts(waiting=[5, 1], free_pages=3, max_length=17)
    plan = plan_of(c, static_batching.static())
    check(plan, admit=[1, 0], head_places=[12], head_rows=[5])


BUGS = {
    "decodes cost no budget": Bug(
        interface,
        "share_budget",
        " - jnp.sum(decodes, dtype=jnp.int32)",
        "",
        test_whoever_decodes_is_served_before_prompts,
    ),
    "chunks of any size": Bug(
        interface,
        "share_budget",
        "jnp.minimum(prompts, jnp.asarray(chunk_size, jnp.int32))",
        "prompts",
        test_a_chunk_size_leaves_rows_for_those_behind,
    ),
    "logits for all": Bug(
        interface,
        "share_budget",
        "_fill(jnp.where(scored, prompts, 0), c.spare_logit_rows)",
        "prompts",
        test_scored_prompts_feed_no_more_rows_than_have_logits,
    ),
    "the budget is used up too soon": Bug(
        interface,
        "_fill",
        "jnp.cumsum(want, dtype=jnp.int32) - want",
        "jnp.cumsum(want, dtype=jnp.int32)",
        test_an_idle_engine_admits_until_the_budget_is_used_up,
    ),
    "copies need no page": Bug(
        interface,
        "growth",
        " + c.copies",
        "",
        test_copies_are_granted_with_growth,
    ),
    "half of a group is preempted": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "runs &= ~interface.any_of_group(c, c.running & ~runs)",
        "",
        test_a_group_is_preempted_as_one,
    ),
    "no watermark": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "free - self.watermark",
        "free",
        test_the_watermark_stays_free_at_admission,
        (2, 0),
    ),
    "a watermark for an idle engine": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "jnp.where(~jnp.any(runs) & first, free, free - self.watermark)",
        "free - self.watermark",
        test_the_first_of_an_idle_engine_may_take_every_page,
    ),
    "admission beside a preemption": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "c.waiting & ~jnp.any(preempt)",
        "c.waiting",
        test_the_latest_is_preempted_and_nobody_is_admitted,
    ),
    "slots of finished sequences are free": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "runs | c.held",
        "runs",
        test_full_slots_admit_nobody,
    ),
    "each request has all free slots": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "jnp.cumsum(c.waiting_slots, dtype=jnp.int32)",
        "c.waiting_slots",
        test_empty_places_in_line_change_nothing,
    ),
    "each request has all free pages": Bug(
        scheduling_fcfs.FCFS,
        "_plan",
        "jnp.cumsum(c.waiting_pages, dtype=jnp.int32)",
        "c.waiting_pages",
        test_requests_are_admitted_as_far_as_the_pages_go,
    ),
    "small requests overtake": Bug(
        scheduling_fcfs,
        "_leading",
        "jnp.cumsum(~mask, dtype=jnp.int32) == 0",
        "mask",
        test_nobody_overtakes_a_request_that_has_not_arrived,
    ),
    "static batching lets requests join": Bug(
        static_batching.Static,
        "plan",
        "c.waiting & ~busy & (fits | first)",
        "c.waiting & (fits | first)",
        test_static_admits_nobody_into_a_batch,
        ([(5, 4, 5)],),
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_seeded_bug_is_noticed(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.disable_jit():  # else the right program would be found compiled
        mutation.assert_noticed(monkeypatch, bug)
