"""Beam search in the engine: transformers' answers, in any batch."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, scheduling
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
