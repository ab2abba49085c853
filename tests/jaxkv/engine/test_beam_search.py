"""Beam search in the engine: transformers' answers, in any batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, sampling, scheduling
from jaxkv.engine import EngineConfig, EngineState, beam_search, init
from jaxkv.engine.state import LENGTH_REACHED, NOT_ENDED, STOPPED
from jaxkv.memory import make_pages
from jaxkv.models import PagedForward, load_model
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs
from jaxkv.serving import refusals
from tests.support import engines
from tests.support.engines import Ask
from tests.support.searches import GOLDEN, MOODY, ROOMY, TIGHT, asks, check, serve


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "mistral"))],
)
def test_answers_equal_transformers_in_a_batch_with_sampling(name: str) -> None:
    run = serve(name, ROOMY)
    check(name, run)
    assert run.info.num_copied.sum() > 50
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 10


@pytest.mark.slow
def test_preempted_beams_continue_unchanged() -> None:
    # The buffer has room for some beams; the rest are recomputed.
    config = dataclasses.replace(TIGHT, max_swap_pages=8)
    run = serve("llama", config, policy=MOODY)
    check("llama", run)
    assert 5 < run.info.num_swapped_out.sum() < run.info.num_preempted.sum() - 5
    lost = [
        run.outcomes[name].num_recomputed for name in engines.names_of(asks("llama"))
    ]
    assert sum(lost) > 50


@pytest.mark.slow
def test_static_batching_searches_without_a_cache_too() -> None:
    config = dataclasses.replace(ROOMY, num_pages=192, prefix_cache=False)
    run = serve("llama", config, 12, policy=scheduling.static())
    check("llama", run, 12)


@pytest.mark.slow
def test_a_cancelled_search_frees_all_pages() -> None:
    loaded = load_model(GOLDEN / "llama")
    search = asks("llama")[4]
    state = engines.start(ROOMY, loaded.config)
    state, _ = engines.submit(state, engines.requests_of([search], ROOMY), config=ROOMY)
    state, _ = engines.run_steps(
        loaded.params,
        state,
        clock.from_seconds(0),
        config=ROOMY,
        forward=PagedForward(loaded.config, ROOMY.numerics),
        policy=fcfs(),
    )
    assert int(state.pool.num_free) < ROOMY.num_pages
    assert state.slots.sequence.max() >= 0
    # Cancelling one beam cancels all of them.
    names = jnp.asarray([search.request_id, -1], jnp.int32)
    state = engines.cancel(state, names, jnp.asarray([1, -1], jnp.int32))
    state, sequences = engines.drain(state)
    engines.assert_empty(state)
    outcomes = engines.outcomes_of(sequences)
    assert len(outcomes) == search.sampling.num_sequences
    assert all(outcome.tokens == [] for outcome in outcomes.values())


@pytest.mark.slow
def test_a_search_ends_where_logits_are_not_finite() -> None:
    loaded = load_model(GOLDEN / "llama")
    head = "embed" if loaded.config.tie_embeddings else "head"
    table = loaded.params[head]["weight"]
    # A token that is in no prompt, so that only its own logits are not finite.
    table = table.at[loaded.config.vocab_size - 1, 0].set(jnp.inf)
    weights = loaded.params | {head: {"weight": table}}
    searches = [ask for ask in asks("llama") if ask.sampling.beam_width][:3]
    run = engines.serve(searches, ROOMY, model=loaded.config, weights=weights)
    assert {outcome.reason for outcome in run.outcomes.values()} == {"nan"}
    assert not any(run.tokens.values())


BY_HAND = EngineConfig(
    num_pages=4,
    page_size=4,
    max_slots=4,
    max_length=8,
    max_sequences=4,
    token_budget=4,
    max_stop_tokens=1,
    max_beams=2,
)


@jax.jit
def step_by_hand(state: EngineState, probs: Any) -> tuple[EngineState, jax.Array]:
    """Writes the last token of each slot, then advances the searches."""
    length = state.slots.num_tokens
    state = state._replace(table=state.table._replace(length=length))
    return beam_search.step_beams(
        state,
        jnp.log(probs),
        length > 0,
        lambda logits: sampling.choices(logits, max_beams=2, max_stops=1),
        BY_HAND,
    )


@jax.jit
def start_by_hand() -> EngineState:
    """Two beams with a limit of two tokens, one with three, and an empty slot."""
    pages = make_pages(
        num_layers=1,
        num_pages=4,
        num_kv_heads=1,
        page_size=4,
        head_dim=1,
        dtype="float32",
    )
    state = init(BY_HAND, pages)
    rows = jnp.arange(3, dtype=jnp.int32)
    group = jnp.asarray([0, 0, 2, 3], jnp.int32)
    sample = jnp.asarray([0, 1, 0, 0], jnp.int32)
    s = state.sequences
    tokens = s.tokens.at[:2, :2].set(7).at[2, 0].set(8)
    assert state.search is not None
    return state._replace(
        search=state.search._replace(width=jnp.asarray([2, 2, 1, 0], jnp.int32)),
        sequences=s._replace(
            tokens=tokens,
            group=group,
            prompt_length=jnp.asarray([2, 2, 1, 0], jnp.int32),
            limit=jnp.asarray([4, 4, 4, 0], jnp.int32),
            stop_tokens=s.stop_tokens.at[2].set(0),
            params=s.params._replace(sample=sample),
        ),
        pool=state.pool._replace(ref=jnp.asarray([1, 1, 1, 0], jnp.int32)),
        table=state.table._replace(page_ids=state.table.page_ids.at[:3, 0].set(rows)),
    ).with_slots(
        state.slots._replace(
            sequence=jnp.asarray([0, 1, 2, -1], jnp.int32),
            num_tokens=jnp.asarray([2, 2, 1, 0], jnp.int32),
        )
    )


def test_a_limit_ends_beams_that_have_not_stopped() -> None:
    first = [[0.1, 0.5, 0.3, 0.1]] * 4
    second = [
        [0.2, 0.1, 0.1, 0.6],
        [0.1, 0, 0.9, 0],
        [0.7, 0.1, 0.1, 0.1],
        [1, 0, 0, 0],
    ]
    state, reason = step_by_hand(start_by_hand(), np.array(first, np.float32))
    assert reason.tolist() == [NOT_ENDED] * 4
    assert state.slots.num_tokens.tolist() == [3, 3, 2, 0]
    # 0.30 is the first beam with 3, 0.27 the second one with 2.
    state, reason = step_by_hand(state, np.array(second, np.float32))
    assert reason.tolist() == [LENGTH_REACHED, LENGTH_REACHED, STOPPED, NOT_ENDED]
    assert state.slots.num_tokens.tolist() == [4, 4, 3, 0]
    tokens = np.asarray(state.sequences.tokens)
    assert tokens[:2, :4].tolist() == [[7, 7, 1, 3], [7, 7, 2, 2]]
    assert tokens[2, :3].tolist() == [8, 1, 0]
    expected = np.log([0.3, 0.27, 0.35]) / 2
    np.testing.assert_allclose(state.sequences.score[:3], expected, rtol=1e-5)


def test_wider_than_the_engine_is_refused() -> None:
    ask = Ask(0, [1, 2], Sampling(beam_width=7, max_tokens=2))
    with pytest.raises(ValueError, match=r"ask.beam_width=7 must be at most"):
        refusals.check_request(
            ask.prompt,
            ask.sampling,
            config=ROOMY,
            num_eos=0,
            vocab_size=9,
            has_text=False,
        )
    state = engines.start(ROOMY)
    requests = engines.requests_of([ask], ROOMY)
    state, taken = engines.submit(state, requests, config=ROOMY)
    assert not np.asarray(taken).any()
    with pytest.raises(ValueError, match=r"max_beams=13 must be in \[0, max_s"):
        dataclasses.replace(ROOMY, max_beams=13)
