"""The prefix cache in the engine: hits, and answers that do not depend on them."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.sampling import Sampling
from tests.support import engines
from tests.support.asks import alike
from tests.support.engines import CACHED, ROOMY, Ask

LARGE = dataclasses.replace(ROOMY, prefix_cache=True, token_budget=32)
"""Enough pages without eviction, and budget to prefill two prompts in one step."""
SYSTEM = list(range(20, 33))
"""Three full pages and a token."""


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_answers_equal_those_of_a_plain_loop(chunk_size: int | None) -> None:
    run = engines.serve(alike(), CACHED, scheduling.fcfs(chunk_size=chunk_size))
    engines.assert_equal_plain(run, alike(), CACHED)
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 40
    assert run.info.num_preempted.sum() > 3


def ask(name: int, prompt: list[int], **fields) -> Ask:
    return Ask(name, prompt, Sampling.greedy(max_tokens=6, ignore_eos=True, **fields))


def one_by_one(*asks: Ask) -> list[int]:
    """Returns the cached tokens of each request, submitted one after the other."""
    state = None
    cached_counts = []
    for request in asks:
        run = engines.serve([request], LARGE, state=state)
        state = run.state
        names = engines.names_of([request])
        assert sum(map(len, run.tokens.values())) == 6 * len(names)
        cached_counts.append(sum(run.outcomes[name].num_cached for name in names))
        assert run.info.num_rows.sum() == len(request.prompt) - cached_counts[
            -1
        ] + 5 * len(names)
    return cached_counts


@pytest.mark.slow
def test_the_next_turn_of_a_chat_finds_the_last_ones_answer() -> None:
    first = ask(1, SYSTEM)
    answer = engines.serve([first], LARGE).tokens[1]
    # 13 + 6 tokens, the last of them never fed.
    assert one_by_one(first, ask(2, [*SYSTEM, *answer, 7, 7])) == [0, 16]


@pytest.mark.slow
def test_salts_separate_tenants_and_a_request_may_opt_out() -> None:
    cached_counts = one_by_one(
        ask(0, SYSTEM, prefix_cache=False),
        ask(1, SYSTEM, salt=1),
        ask(2, SYSTEM, salt=2),
        ask(3, SYSTEM),
        ask(4, [*SYSTEM, 5], salt=1, n=4),
        ask(5, SYSTEM, prefix_cache=False),
        ask(6, SYSTEM, prompt_logprobs=True, logprobs=0),
    )
    assert cached_counts == [0, 0, 0, 0, 12, 0, 0]


@pytest.mark.slow
def test_equal_prompts_in_one_step_share_pages() -> None:
    # The budget suffices for both: they fill equal pages in the same step.
    run = engines.serve([ask(1, SYSTEM), ask(2, SYSTEM)], LARGE)
    assert [run.outcomes[name].num_cached for name in (1, 2)] == [0, 0]
    # Three pages of the prompt once, then equal pages of their answers.
    assert run.info.used_pages.max() < 2 * 5
    assert run.tokens[1] == run.tokens[2]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 5, 6])
def test_the_first_running_request_is_never_preempted(shared: int) -> None:
    """Pages of one token, all of which are cached; prompts share their first tokens."""
    config = dataclasses.replace(
        CACHED, page_size=1, num_pages=32, max_slots=4, token_budget=32, max_length=32
    )
    rng = np.random.default_rng(0)
    prompts: Any = rng.integers(0, 61, (4, 7))
    prompts[:, :shared] = prompts[0, :shared]
    asks = [engines.greedy(i, x.tolist(), 20) for i, x in enumerate(prompts)]
    run = engines.serve(asks, config)
    engines.assert_equal_plain(run, asks, config)
    assert run.info.num_preempted.any()
    first = run.info.sequence[:, 0]
    for before, after, ended in zip(
        first, first[1:], run.info.reason[:, 0] > 0, strict=False
    ):
        assert after == before or ended or before < 0
    work = (run.info.sequence >= 0).any(axis=1)
    assert run.info.num_rows.sum(axis=1)[work].all()
