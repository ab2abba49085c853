"""Prompt orders and the prefix cache: enumerated, and against a plain model."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import Stepper
from experiments.serving.prefix_caching import checkpoints, orders, serving, workloads
from tests.support import smoke, traces
from tests.support.commands import Command, assert_refused
from tests.support.impatience import Impatient


@pytest.fixture(scope="module")
def result() -> orders.Result:
    return smoke.run("prefix_caching").result


@pytest.fixture(scope="module")
def server(result: orders.Result) -> Stepper:
    """Returns the engine of the run, whose program is compiled."""
    num_pages = result.loads.num_distinct.max() + 1
    longest = result.loads.longest.max()
    window = orders.CONFIGS["smoke"].window
    return serving.make_cache_engine(int(num_pages), int(longest), window)


@pytest.mark.slow
def test_a_small_run_satisfies_its_identities(result: orders.Result) -> None:
    measured = smoke.measured_values(orders.claims(result))
    for name, best in zip(result.loads.name, 100 * result.loads.best, strict=True):
        claim_values = {
            claim: value for claim, value in measured.items() if f"{name}: " in claim
        }
        for claim, value in claim_values.items():
            if "misses each of them once" in claim or "depth first" in claim:
                assert value == pytest.approx(best), claim
            elif "no smaller cache finds more" in claim:
                assert value <= best + 1e-9
        assert f"{name}: a cache of all pages misses each of them once" in claim_values
    assert result.loads.name.tolist() == ["small", "chats", "few-shot"]
    assert result.loads.best[0] == 2 / 8
    for name in ("chats", "few-shot"):
        walk, eager, plain = (
            result.rated.curve(name, order).rate
            for order in ("depth_first", "cached_first", "fcfs")
        )
        assert np.ptp(walk) == 0
        assert (walk >= eager).all()
        assert (eager > plain).all()
        assert (np.diff(plain) > 0).all()


def is_walked(order: tuple[list[int], ...]) -> bool:
    """Returns True if prompts that share a page are adjacent, for every page."""
    for page in {page for prompt in order for page in prompt}:
        is_inside = [page in prompt for prompt in order]
        first = is_inside.index(True)
        last = len(is_inside) - is_inside[::-1].index(True)
        if not all(is_inside[first:last]):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2], [1, 3], [4, 5], [4, 6]],
        [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7, 8]],
        [[1], [1, 2, 3], [4, 5], [1, 2]],
    ],
)
def test_depth_first_is_the_best_order_of_all(
    server: Stepper, prompts: list[list[int]]
) -> None:
    """The pool holds the longest prompt, and the token that is always computed."""
    pool = max(map(len, prompts)) + 1
    cached_by_order = {}
    for order in itertools.permutations(range(len(prompts))):
        hits = serving.serve_prompts(
            server, [prompts[i] for i in order], num_pages=pool
        )
        assert hits is not None
        cached_by_order[order] = hits.num_cached.sum()
    num_pages = sum(map(len, prompts))
    best = num_pages - len({page for prompt in prompts for page in prompt})
    walks = [
        order
        for order in cached_by_order
        if is_walked(tuple(prompts[i] for i in order))
    ]
    assert tuple(workloads.depth_first_order(prompts)) in walks
    assert {cached_by_order[order] for order in walks} == {best}
    assert max(cached_by_order.values()) == best
    assert min(cached_by_order.values()) < best


def by_hand(
    prompts: list[list[int]], pool: int, window: int, cached_first: bool, rule: str
) -> tuple[list[int], list[int]]:
    """Returns the cached pages of each prompt and the order of service."""
    used: dict[int, int] = {}
    path: dict[int, list[int]] = {}
    waiting = list(range(len(prompts)))
    num_found = [0] * len(prompts)
    served = []

    def count_cached(i: int) -> int:
        flags = [page in used for page in prompts[i]]
        return (*flags, False).index(False)

    def last_use(page: int) -> tuple[int, int]:
        behind = [used[other] for other in used if page in path[other]]
        return max(behind), -len(path[page])

    while waiting:
        turn = max(waiting[:window], key=count_cached) if cached_first else waiting[0]
        waiting.remove(turn)
        served.append(turn)
        ids = prompts[turn]
        num_found[turn] = count_cached(turn)
        wanted = len(ids) - num_found[turn] + 1
        for _ in range(max(0, wanted - (pool - len(used)))):
            del used[min(used.keys() - {*ids}, key=last_use)]
        for place, page in enumerate(ids):
            path.setdefault(page, ids[: place + 1])
            if rule == "lru" or page not in used:
                used[page] = len(served)
    return num_found, np.argsort(served).tolist()


def again_and_again(seed: int) -> list[list[int]]:
    """Returns short prompts with common prefixes, in random order."""
    few = [[i] for i in range(4)] + [[i, 4 + i] for i in range(4)]
    few += [[i, 4 + i, 8 + i] for i in range(2)]
    return [few[i] for i in np.random.default_rng(seed).integers(0, len(few), 60)]


POOL = 8


@pytest.mark.slow
@pytest.mark.parametrize("cached_first", [False, True])
@pytest.mark.parametrize("rule", ["lru", "fifo"])
def test_hits_equal_those_counted_by_hand(
    server: Stepper, cached_first: bool, rule: serving.Eviction
) -> None:
    prompts = again_and_again(1)
    window = server.config.max_slots
    hits = serving.serve_prompts(
        server, prompts, num_pages=POOL, cached_first=cached_first, eviction=rule
    )
    assert hits is not None
    expected = by_hand(prompts, POOL, window, cached_first, rule)
    assert (hits.num_cached.tolist(), hits.turn.tolist()) == expected
    others = {"lru": "fifo", "fifo": "lru"}
    assert expected != by_hand(prompts, POOL, window, cached_first, others[rule])


@pytest.mark.slow
def test_random_eviction_differs_from_both_rules(server: Stepper) -> None:
    prompts = again_and_again(1)
    hits_by_rule = [
        serving.serve_prompts(server, prompts, num_pages=POOL, eviction=rule)
        for rule in serving.EVICTIONS
    ]
    sums = {int(hits.num_cached.sum()) for hits in hits_by_rule if hits is not None}
    assert len(sums) == 3


def test_generated_prompts_are_prefixes() -> None:
    """Equal ids follow equal ids; otherwise an id would not identify a page."""
    for load in (
        workloads.make_chats(7, 5, 0),
        workloads.make_few_shot(6, 9, 0),
    ):
        before: dict[int, tuple[int, ...]] = {}
        for ids in load.page_ids:
            for place, page in enumerate(ids):
                assert before.setdefault(page, tuple(ids[:place])) == tuple(ids[:place])
        assert load.num_distinct < load.num_pages


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--trace nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--shares 0.5 1.0", "shares"),
        ("--window 0", "window=0 must be at least 1"),
        ("--num-users 0 --num-tasks 0", "leave no prompts"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: str, line: str, jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(workloads.DATA_VARIABLE, raising=False)
    assert_refused(jaxkv, f"run prefix_caching smoke --out run {arguments}", line)


def test_a_recording_without_prefixes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    with pytest.raises(ValueError, match="in common"):
        workloads.read_prompt_pages(str(path))


@pytest.mark.slow
def test_a_pool_that_is_too_small_is_refused(server: Stepper) -> None:
    with pytest.raises(ValueError, match=r"num_pages=3 must be in \[4, "):
        serving.serve_prompts(server, [[1, 2, 3]], num_pages=3)


@pytest.mark.slow
def test_a_stopped_run_keeps_finished_servings(server: Stepper) -> None:
    config = orders.CONFIGS["smoke"]
    progress = Impatient("serving")
    assert orders.run(config, progress).runs.order.tolist() == ["depth_first"]
    assert serving.serve_prompts(server, [[1]], progress=progress) is None


@pytest.mark.slow
def test_the_recording_has_the_counted_hits() -> None:
    load = workloads.read_prompt_pages(
        str(traces.find("traces/mooncake_synthetic.jsonl"))
    )
    assert (len(load.page_ids), load.num_pages) == (3993, 121_877)
    assert 1 - load.num_distinct / load.num_pages == pytest.approx(0.640, abs=5e-4)
    server = serving.make_cache_engine(load.num_distinct + 1, load.longest, 1)
    hits = serving.serve_prompts(server, load.page_ids)
    assert hits is not None
    assert hits.num_cached.sum() == load.num_pages - load.num_distinct


def test_shareable_pages_end_at_a_border() -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [8]]
    assert workloads.count_shareable(prompts, 1) == 4 + 2
    assert workloads.count_shareable(prompts, 2) == 4 + 2
    assert workloads.count_shareable(prompts, 3) == 3


@pytest.mark.slow
def test_checkpoints_find_all_pages_before_them() -> None:
    config = checkpoints.CONFIGS["hybrids_smoke"]
    config = dataclasses.replace(config, num_tasks=2, num_questions=3)
    result = checkpoints.run(config)
    whole = result.where(memory_gib=0)
    assert (whole.share == 1).all()
    assert (whole.rate > result.where(memory_gib=1).rate).all()
