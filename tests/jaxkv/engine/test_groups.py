"""Requests of several sequences: one prompt, shared pages, copies before writes."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.sampling import Sampling
from jaxkv.serving import refusals
from tests.support import engines
from tests.support.asks import groups
from tests.support.engines import MODEL, ROOMY, TIGHT, Ask, Run, run_on
from tests.support.marks import one_quick


@functools.cache
def served(chunk_size: int | None = None, watermark: int = 0, seed: int = 0) -> Run:
    policy = scheduling.fcfs(chunk_size=chunk_size, watermark=watermark)
    return engines.serve(groups(seed), TIGHT, policy)


@pytest.mark.parametrize(
    ("chunk_size", "watermark"), one_quick([(5, 3), (1, 0), (None, 0)])
)
def test_every_answer_equals_that_of_a_plain_loop(chunk_size, watermark) -> None:
    run = served(chunk_size, watermark)
    engines.assert_equal_plain(run, groups(), TIGHT)
    assert run.info.num_preempted.sum() > 3
    assert run.info.num_copied.sum() > 3
    assert len(run.outcomes) > len(groups()) + 5


@pytest.mark.slow
def test_static_batching_forks_too() -> None:
    run = engines.serve(groups(), ROOMY, scheduling.static())
    engines.assert_equal_plain(run, groups(), ROOMY)
    assert not run.info.num_preempted.any()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 7, 8, 29])
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_a_prompt_is_computed_once(length: int, chunk_size: int | None) -> None:
    prompt = np.random.default_rng(length).integers(0, 61, length).tolist()
    ask = Ask(3, prompt, Sampling(n=8, max_tokens=5, ignore_eos=True))
    run = engines.serve([ask], ROOMY, scheduling.fcfs(chunk_size=chunk_size))
    assert run.info.num_rows.sum() == length + 8 * 4
    # Seven of the eight copy the partial page, if there is one.
    assert run.info.num_copied.sum() == (7 if length % 4 else 0)
    assert len({tuple(tokens) for tokens in run.tokens.values()}) > 1


@pytest.mark.thorough
def test_pages_of_the_prompt_are_shared() -> None:
    prompt = list(range(30))
    ask = Ask(0, prompt, Sampling(n=4, max_tokens=9))
    run = engines.serve([ask], ROOMY)
    # 7 full pages once, and for each answer the pages of 3 more tokens and its own 8.
    assert run.info.used_pages.max() == 7 + 4 * 3
    alone = engines.serve([ask._replace(sampling=Sampling(max_tokens=9))], ROOMY)
    saved = 1 - run.info.used_pages.max() / (4 * alone.info.used_pages.max())
    assert saved == pytest.approx(3 / 4 * 7 / 10)


@pytest.mark.slow
def test_a_preempted_group_feeds_its_common_tokens_once() -> None:
    # A pool in which the second group is preempted for the first while both write.
    prompt = list(range(10))
    asks = [
        Ask(name, prompt, Sampling(n=3, max_tokens=14, seed=name)) for name in range(2)
    ]
    config = dataclasses.replace(TIGHT, num_pages=21)
    run = engines.serve(asks, config)
    engines.assert_equal_plain(run, asks, config)
    lost = [run.outcomes[name].num_recomputed for name in engines.names_of(asks[1:])]
    assert run.info.num_preempted.sum() >= 3
    again = sum(lost)
    answers_fed = sum(len(tokens) - 1 for tokens in run.tokens.values())
    assert run.info.num_rows.sum() == 2 * 10 + answers_fed + again
    # The prompt was fed once per preemption, not three times.
    assert again < 3 * run.info.num_preempted.sum() // 3 * 10 + answers_fed


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [(0,), (1,), (0, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("calls", [1, 2])
def test_cancelling_during_a_shared_prefill_promotes_a_waiter(
    samples: tuple[int, ...], calls: int
) -> None:
    # Four or eight of the prompt's 22 tokens are fed, by the first for all three.
    ask = Ask(7, list(range(22)), Sampling(n=3, max_tokens=9, ignore_eos=True))
    requests = engines.requests_of([ask], TIGHT)
    state, _ = engines.submit(engines.start(TIGHT), requests, config=TIGHT)
    slow = scheduling.fcfs(chunk_size=1)
    state, _ = run_on(state, calls=calls, policy=slow)
    names = np.full(len(samples), 7, np.int32)
    state = engines.cancel(state, names, np.array(samples, np.int32))
    num_rows = 4 * calls
    for _ in range(12):
        state, info = run_on(state, policy=slow)
        num_rows += int(info.num_rows.sum())
    engines.assert_empty(state)
    _, sequences = engines.drain(state)
    outcomes = engines.outcomes_of(sequences)
    expected = engines.plain([ask], TIGHT)
    for sample in range(3):
        name = engines.name_of(7, sample)
        cancelled = sample in samples
        assert outcomes[name].reason == ("cancelled" if cancelled else "length")
        assert outcomes[name].tokens == ([] if cancelled else expected[name][0])
    # No token is fed twice.
    assert num_rows == 22 + 8 * (3 - len(samples))


def test_more_answers_than_slots_or_pages_are_refused() -> None:
    check = functools.partial(
        refusals.check_request, num_eos=0, vocab_size=MODEL.vocab_size, has_text=False
    )
    with pytest.raises(ValueError, match=r"9 answers .* at most config.max_slots=8"):
        check([1], Sampling(n=9), config=TIGHT)
    big = Sampling(n=4, max_tokens=20)
    with pytest.raises(ValueError, match="may need 20 pages, more than"):
        check([1], big, config=TIGHT)
    requests = engines.requests_of([Ask(0, [1], big)], TIGHT)
    state = engines.start(TIGHT)
    before = np.asarray(state.ledger.progress).copy()
    state, taken = engines.submit(state, requests, config=TIGHT)
    assert not np.asarray(taken).any()
    np.testing.assert_array_equal(state.ledger.progress, before)
