"""Beam search in the engine: transformers' answers, in any company."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock
from jaxkv.engine.state import EngineConfig
from jaxkv.models import checkpoints, paged
from jaxkv.sampling.sampler import Sampling
from jaxkv.scheduling import fcfs as scheduling_fcfs
from jaxkv.scheduling import interface, static_batching
from jaxkv.scheduling.fcfs import FCFS
from jaxkv.serving import outputs
from tests import engines
from tests.engines import Ask, Run
from tests.test_beams import EXPECTED, GOLDEN, LIMIT

pytestmark = pytest.mark.usefixtures("fast_compile")

ROOMY = EngineConfig(
    num_pages=64,
    page_size=4,
    max_slots=12,
    max_length=64,
    max_sequences=48,
    queue_capacity=40,
    token_budget=16,
    max_stop_tokens=2,
    max_beams=6,
    prefix_cache=True,
    submit_width=12,
    steps_per_call=4,
    debug=True,
)
TIGHT = dataclasses.replace(ROOMY, num_pages=31)
RULES = (False, True, "never")


@functools.cache
def asks(name: str) -> tuple[Ask, ...]:
    """All searches of the golden file, and between them requests that draw."""
    prompt, stops = (EXPECTED[f"{name}_{part}"] for part in ("prompt", "stops"))
    found = []
    for i, (width, penalty, rule) in enumerate(EXPECTED["settings"].tolist()):
        sampling = Sampling(
            beam_width=int(width),
            n=int(width),
            length_penalty=penalty,
            early_stopping=RULES[int(rule)],
            stop_tokens=tuple(int(stop) for stop in stops if stop >= 0),
            max_tokens=LIMIT,
        )
        found.append(Ask(i, prompt.tolist(), sampling))
        others = Sampling(n=1 + i % 3, max_tokens=5 + i % 7, seed=i)
        found.append(Ask(100 + i, prompt.tolist()[: 1 + i % 9], others))
    return tuple(found)


def serve(name: str, config: EngineConfig, num: int = 54, **fields: Any) -> Run:
    loaded = checkpoints.load_model(GOLDEN / name)
    return engines.serve(
        asks(name)[:num], config, model=loaded.config, weights=loaded.params, **fields
    )


def check(name: str, run: Run, num: int = 54) -> None:
    tokens, scores = (EXPECTED[f"{name}_{part}"] for part in ("tokens", "scores"))
    for ask in asks(name)[:num:2]:
        i = ask.request_id
        for beam, answer in enumerate(engines.names_of([ask])):
            want = [int(token) for token in tokens[i, beam] if token >= 0]
            assert run.tokens[answer] == want, (i, beam)
            assert run.outcomes[answer].score == pytest.approx(
                float(scores[i, beam]), abs=1e-4
            )


class Moody(NamedTuple):
    """First come, first served, but every few steps it believes that pages are gone.

    Whoever gives way then is swapped out, if there is room for its pages.
    """

    most: jax.Array
    holds_finished = False

    def plan(self, counts: interface.Counts) -> interface.Plan:
        age = jnp.sum(counts.length, dtype=jnp.int32) % 5
        held = jnp.sum(counts.owned_pages, dtype=jnp.int32)
        missing = jnp.where(age == 0, self.most + held // 3, 0)
        free = counts.free_pages - missing
        return self.fcfs().plan(counts._replace(free_pages=free))

    def fcfs(self) -> FCFS:
        return scheduling_fcfs.fcfs(chunk_size=3, preemption="swap", hold_new=False)


MOODY = Moody(jnp.asarray(4, jnp.int32))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def test_answers_of_transformers_beside_requests_that_draw(name: str) -> None:
    run = serve(name, ROOMY)
    check(name, run)
    assert run.info.num_copied.sum() > 50
    assert sum(each.num_cached for each in run.outcomes.values()) > 10


@pytest.mark.thorough
def test_beams_that_gave_way_go_on_as_if_nothing_had_happened() -> None:
    # In a buffer for some of them: the others' tokens are fed again.
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
    run = serve("llama", config, 12, policy=static_batching.static())
    check("llama", run, 12)


@pytest.mark.thorough
def test_a_cancelled_search_leaves_nothing() -> None:
    loaded = checkpoints.load_model(GOLDEN / "llama")
    search = asks("llama")[4]
    state = engines.start(ROOMY, loaded.config)
    state, _ = engines.submit(state, engines.requests_of([search], ROOMY), config=ROOMY)
    state, _ = engines.run_steps(
        *(loaded.params, state, clock.from_seconds(0)),
        config=ROOMY,
        forward=paged.PagedForward(loaded.config, ROOMY.numerics),
        policy=scheduling_fcfs.fcfs(),
    )
    assert int(state.pool.num_free) < ROOMY.num_pages
    assert state.slots.sequence.max() >= 0
    # One beam named, all are meant.
    names = jnp.asarray([search.request_id, -1], jnp.int32)
    state = engines.cancel(state, names, jnp.asarray([1, -1], jnp.int32))
    state, sequences = engines.drain(state)
    engines.assert_empty(state)
    outcomes = engines.outcomes_of(sequences)
    assert len(outcomes) == search.sampling.num_sequences
    assert all(each.tokens == [] for each in outcomes.values())


@pytest.mark.thorough
def test_a_search_ends_where_logits_are_not_finite() -> None:
    loaded = checkpoints.load_model(GOLDEN / "llama")
    head = "embed" if loaded.config.tie_embeddings else "head"
    table = loaded.params[head]["weight"]
    # A token that no prompt holds: only its own logits tell.
    table = table.at[loaded.config.vocab_size - 1, 0].set(jnp.inf)
    weights = loaded.params | {head: {"weight": table}}
    searches = [ask for ask in asks("llama") if ask.sampling.beam_width][:3]
    run = engines.serve(searches, ROOMY, model=loaded.config, weights=weights)
    assert {each.reason for each in run.outcomes.values()} == {"nan"}
    assert not any(run.tokens.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(beam_width=0), "self.beam_width=0 must be None or at least self.n=1"),
        (dict(beam_width=2, n=3), "self.beam_width=2 must be None or at least"),
        (dict(beam_width=2, best_of=2), "beam search takes no best_of, penalties"),
        (dict(beam_width=2, presence_penalty=1.0), "beam search takes no best_of"),
        (dict(length_penalty=11.0), r"self.length_penalty=11.0 must be in \[-10, 10\]"),
        (dict(early_stopping="now"), "self.early_stopping='now' must be True, False"),
    ],
)
def test_searches_out_of_range_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_wider_than_the_engine_is_refused() -> None:
    ask = Ask(0, [1, 2], Sampling(beam_width=7, max_tokens=2))
    with pytest.raises(ValueError, match=r"ask.beam_width=7 must be at most"):
        outputs.check(
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
    with pytest.raises(
        ValueError, match=r"self.max_beams=13 must be in \[0, self.max_s"
    ):
        dataclasses.replace(ROOMY, max_beams=13)
