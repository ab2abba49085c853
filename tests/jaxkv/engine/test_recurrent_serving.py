"""Engines of models with recurrent layers: states, checkpoints, preemption, drafts."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling, models
from jaxkv.engine import EngineConfig, Speculation, forget_kv
from jaxkv.memory import NO_PAGE, Rows
from jaxkv.models import (
    AttentionKind,
    ModelConfig,
    PagedForward,
    RecurrenceConfig,
    make_model_pages,
)
from jaxkv.scheduling import fcfs
from jaxkv.speculation import NGram, SharedNoiseVerifier
from tests.support import batches, engines
from tests.support.asks import alike, groups
from tests.support.engines import CACHED, TIGHT, Ask, Run


def model_of(kind: Any) -> ModelConfig:
    """Returns a model with recurrent layers before and after one with attention."""
    if kind == "single":
        return engines.SINGLE
    is_conv = kind == "conv"
    recurrence = RecurrenceConfig(
        kind=kind,
        num_key_heads=1,
        num_value_heads=1 if is_conv else 2,
        key_dim=1 if is_conv else 6,
        value_dim=10 if is_conv else 5,
    )
    return dataclasses.replace(
        engines.MODEL,
        num_layers=3,
        recurrence=recurrence,
        other_attention=(AttentionKind(is_recurrent=True),),
        attention_pattern=(1, 0, 1),
        out_gate=True,
    )


SLOW = pytest.mark.slow
GDN = model_of("gdn")
CHECKPOINTED = dataclasses.replace(CACHED, state_interval=8)


def check_answers(
    asks: Sequence[Ask], config: EngineConfig, model: ModelConfig, **how: Any
) -> Run:
    """Checks that answers equal those of whole sequences without a cache."""
    weights = engines.params(model)
    run = engines.serve(asks, config, model=model, weights=weights, **how)
    engines.assert_sound(run.info)
    answers = {name: (x.tokens, x.reason) for name, x in run.outcomes.items()}
    assert answers == engines.plain(asks, config, model=model, weights=weights)
    return run


def test_answers_equal_whole_sequences_with_checkpoints_and_preemptions() -> None:
    run = check_answers(alike(1, 20), CHECKPOINTED, GDN)
    assert run.info.num_preempted.sum() > 3
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conv", "gdn", "single", "mamba2", "kda"])
def test_swapped_groups_keep_their_states(kind: str) -> None:
    config = dataclasses.replace(CHECKPOINTED, max_swap_pages=16)
    asks = [
        *groups(1, 12),
        *(x._replace(request_id=50 + x.request_id) for x in alike(2, 8)),
    ]
    run = check_answers(asks, config, model_of(kind), policy=fcfs(preemption="swap"))
    assert run.info.num_swapped_out.sum() > 0
    assert run.state.states is not None
    assert not run.state.states.ref.any()


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_rejected_drafts_leave_no_trace_in_the_state(cached: bool) -> None:
    config = CHECKPOINTED if cached else TIGHT
    config = dataclasses.replace(config, max_drafts=3, token_budget=40)
    speculation = Speculation(NGram(1, 3), SharedNoiseVerifier())
    run = check_answers(alike(1, 12), config, GDN, speculation=speculation)
    num_drafts = np.asarray(run.info.num_drafts)
    drafted = num_drafts.sum()
    accepted = (run.info.num_emitted - 1)[num_drafts > 0].sum()
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_beams_continue_from_the_states_of_their_parents() -> None:
    config = dataclasses.replace(
        CHECKPOINTED, num_pages=40, max_beams=3, max_logprobs=0, max_logit_rows=0
    )
    rng = np.random.default_rng(0)
    asks = [
        Ask(
            index,
            rng.integers(0, 61, 11).tolist(),
            Sampling(beam_width=3, n=3, max_tokens=9),
        )
        for index in range(3)
    ]
    weights = engines.params(GDN)
    together = engines.serve(asks, config, model=GDN, weights=weights)
    engines.assert_sound(together.info)
    for ask in asks:
        alone = engines.serve([ask], config, model=GDN, weights=weights).outcomes
        for name, outcome in alone.items():
            assert together.outcomes[name].tokens == outcome.tokens
            # The score is the sum of the log-probabilities of whole sequences.
            tokens = jnp.asarray([[*ask.prompt, *outcome.tokens]])
            logits = models.logits(weights, tokens, config=GDN)
            logprobs = jax.nn.log_softmax(logits[0, len(ask.prompt) - 1 : -1])
            total = sum(float(logprobs[i, t]) for i, t in enumerate(outcome.tokens))
            assert outcome.score == pytest.approx(total / len(outcome.tokens), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2", "single", "conv"])
def test_no_bit_depends_on_batch_chunks_hits_and_preemptions(kind: str) -> None:
    model = model_of(kind)
    weights = engines.params(model)
    asks = batches.groups(0)
    first: dict[Any, Any] = {}
    for name in ("8 slots", "small pool", "large budget", "1 slot, 1 token"):
        if max(ask.sampling.n for ask in asks) > batches.SETTINGS[name].max_slots:
            continue
        config = batches.config_of(batches.SETTINGS[name])
        config = dataclasses.replace(config, state_interval=config.page_size)
        run = engines.serve(asks, config, model=model, weights=weights)
        engines.assert_sound(run.info)
        first = first or run.outcomes
        for request_id, outcome in run.outcomes.items():
            batches.assert_same_bits(outcome, first[request_id])


def rows_of(tokens: Any, slot: Any, place: Any, table: Any, logit_rows: Any) -> Rows:
    """Returns rows at places of slots, or without slots one row for each."""
    of = np.arange(2) if slot is None else slot
    return Rows(
        token=jnp.asarray(tokens[of, np.maximum(place, 0)]),
        position=jnp.asarray(place),
        slot=None if slot is None else jnp.asarray(slot),
        page_ids=table,
        logit_rows=jnp.asarray(logit_rows),
    )


def near(actual: Any, desired: Any) -> None:
    scale = np.abs(desired).max()
    np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-5 * scale)


def test_packed_chunks_equal_single_tokens() -> None:
    """One pass over two sequences in chunks equals passes of one token each."""
    forward = PagedForward(GDN)
    weights = engines.params(GDN)
    config = dataclasses.replace(TIGHT, num_pages=32, max_slots=2)
    lengths = 40, 13
    table = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 40)).astype(np.int32)
    rows = [(slot, place) for slot in range(2) for place in range(lengths[slot])]
    slot, place = np.array(rows, np.int32).T
    packed = rows_of(tokens, slot, place, table, np.array([39, 52], np.int32))
    pages = make_model_pages(GDN, config)
    result = jax.jit(forward)(weights, pages, packed)
    step = jax.jit(forward)
    every = np.arange(2, dtype=np.int32)
    for position in range(40):
        at = np.where(position < np.array(lengths), position, -1).astype(np.int32)
        one = rows_of(tokens, None, at, table, every)
        single = step(weights, pages, one)
        pages = single.pages
        if position == 12:
            near(result.logits[1], single.logits[1])
    near(result.logits[0], single.logits[0])
    for left, right in zip(
        jax.tree.leaves(result.pages.states), jax.tree.leaves(pages.states), strict=True
    ):
        near(left[:, :2], right[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_an_engine_reports_the_bits_of_score(dtype: str) -> None:
    weights = engines.params(GDN, dtype)
    setting = batches.SETTINGS["small pool"]
    config = batches.config_of(setting)
    config = dataclasses.replace(config, state_interval=config.page_size)
    asks = [
        engines.greedy(index, [*range(3 + index, 20 + 5 * index)], 8)
        for index in range(3)
    ]
    asks = [
        x._replace(sampling=dataclasses.replace(x.sampling, logprobs=0)) for x in asks
    ]
    run = engines.serve(
        asks,
        config,
        state=engines.start(config, GDN, dtype),
        model=GDN,
        weights=weights,
    )
    for ask in asks:
        outcome = run.outcomes[ask.request_id]
        tokens = jnp.asarray([[*ask.prompt, *outcome.tokens]], jnp.int32)
        scores = jaxkv.score(weights, tokens, config=GDN)
        np.testing.assert_array_equal(
            np.asarray(scores)[0, len(ask.prompt) :], outcome.logprobs
        )


def test_new_parameters_leave_no_checkpoint() -> None:
    state = engines.start(CHECKPOINTED, GDN)
    pool = state.states
    assert pool is not None
    named = pool._replace(
        page=pool.page.at[3].set(2), of_page=pool.of_page.at[2].set(3)
    )
    after = forget_kv(state._replace(states=named), config=CHECKPOINTED)
    assert after.states is not None
    assert (np.asarray(after.states.page) == NO_PAGE).all()


@pytest.mark.parametrize(
    ("message", "refuse"),
    [
        (
            "state_interval=6 must be a multiple of page_size=4",
            lambda: engines.start(dataclasses.replace(CACHED, state_interval=6), GDN),
        ),
        (
            "must be served by an engine",
            lambda: jaxkv.decoding.init_cache(
                make_model_pages(GDN, TIGHT), max_slots=1, max_length=8
            ),
        ),
        (
            "layers=(0,) must be None for a model with recurrent layers",
            lambda: PagedForward(GDN, layers=(0,)),
        ),
        (
            "recurrence=None must be set exactly if other_attention has",
            lambda: dataclasses.replace(GDN, recurrence=None),
        ),
        (
            "must have a layer with attention",
            lambda: make_model_pages(
                dataclasses.replace(GDN, attention_pattern=(1,)), TIGHT
            ),
        ),
    ],
)
def test_refusals_are_one_line(message: str, refuse: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse()
