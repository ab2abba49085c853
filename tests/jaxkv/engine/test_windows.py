"""Engines whose pages of layers with a window return behind it."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.engine import (
    EngineConfig,
    EngineParts,
    EngineRules,
    Speculation,
    forget_kv,
    init,
)
from jaxkv.models import AttentionKind, ModelConfig, PagedForward, make_model_pages
from jaxkv.parallel import make_mesh
from jaxkv.scheduling import fcfs, vllm_scheduler
from jaxkv.serving import refusals
from jaxkv.speculation import NGram, SharedNoiseVerifier
from tests.support import batches, engines
from tests.support.asks import alike
from tests.support.engines import CACHED, MODEL, ROOMY, TIGHT, Ask, Run, greedy
from tests.support.folders import GOLDEN

ALL = dataclasses.replace(MODEL, window=6)
"""A window in every layer, as in Mistral."""
MIXED = dataclasses.replace(
    MODEL,
    num_layers=4,
    attention_pattern=(1, 2, 0, 1),
    other_attention=(
        AttentionKind(window=6, rope_theta=100.0),
        AttentionKind(window=3),
    ),
)
"""Layers with two windows, and one without, as in Gemma 3."""


def releasing(config: EngineConfig, **changes: Any) -> EngineConfig:
    return dataclasses.replace(config, release_window_pages=True, **changes)


def check_answers(
    asks: Sequence[Ask], config: EngineConfig, model: ModelConfig, **how: Any
) -> Run:
    """Checks that answers equal those of whole sequences without a cache."""
    weights = engines.params(model)
    run = engines.serve(asks, config, model=model, weights=weights, **how)
    answers = {name: (x.tokens, x.reason) for name, x in run.outcomes.items()}
    assert answers == engines.plain(asks, config, model=model, weights=weights)
    assert run.state.windows is not None
    assert not run.state.windows.pool.ref.any()
    return run


@pytest.mark.slow
def test_one_sequence_holds_the_pages_of_its_window() -> None:
    """Prefill in chunks of 12, then single tokens, with pages of 4."""
    config = releasing(TIGHT)
    prompt = np.random.default_rng(0).integers(0, 61, 30).tolist()
    run = check_answers([greedy(1, prompt, 30)], config, ALL)
    rows = run.info.num_rows.sum(axis=1)
    length = np.cumsum(rows) - rows
    feeds = rows > 0
    first = np.maximum(length - 6 + 1, 0) // 4
    expected = -(-(length + rows) // 4) - first
    used = np.asarray(run.info.used_window_pages)
    np.testing.assert_array_equal(used[feeds], expected[feeds])
    assert used[length > 30].max() == 3
    assert run.info.used_pages.max() == 15


@pytest.mark.slow
def test_rejected_drafts_return_their_pages() -> None:
    config = releasing(CACHED, max_drafts=3, token_budget=40)
    speculation = Speculation(NGram(1, 3), SharedNoiseVerifier())
    run = check_answers(alike(1, 12), config, MIXED, speculation=speculation)
    num_drafts = np.asarray(run.info.num_drafts)
    accepted = (run.info.num_emitted - 1)[num_drafts > 0].sum()
    assert 0 < accepted < num_drafts.sum()
    assert run.info.num_preempted.sum() > 0
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 0


SETTINGS = batches.SETTINGS | {
    "swapping": batches.EngineSetting(8, 4, 16, 40, 8, True, 24, "cheapest")
}


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "mixed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_bits_are_those_of_pages_that_are_kept(name: str, layers: str) -> None:
    """Over slots, pages, chunks, prefix hits, forks, preemption and swapping."""
    model = ALL if layers == "all" else MIXED
    weights = engines.params(model)
    asks = batches.groups(0)
    kept = batches.config_of(SETTINGS["8 slots"])
    expected = engines.serve(asks, kept, model=model, weights=weights).outcomes
    setting = SETTINGS[name]
    asks = [ask for ask in asks if ask.sampling.num_sequences <= setting.max_slots]
    run = batches.serve(
        asks,
        setting,
        0,
        config=releasing(batches.config_of(setting)),
        model=model,
        weights=weights,
        as_served=False,
    )
    for answer, outcome in run.outcomes.items():
        batches.assert_same_bits(outcome, expected[answer])
    if name == "swapping":
        assert run.info.num_swapped_out.sum() > 0
        assert sum(x.num_cached for x in run.outcomes.values()) > 0
        assert run.state.windows is not None
        assert not run.state.windows.pool.ref.any()


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "mixed"])
@pytest.mark.parametrize("policy", [fcfs(), vllm_scheduler(), fcfs(chunk_size=3)])
def test_schedules_are_those_of_pages_that_are_kept(layers: str, policy: Any) -> None:
    model = ALL if layers == "all" else MIXED
    weights = engines.params(model)
    rng = np.random.default_rng(1)
    asks = [*alike(1, 20), *engines.random_asks(rng, 20, max_n=3, first_id=500)]
    both = [
        engines.serve(asks, config, policy, model=model, weights=weights)
        for config in (ROOMY, releasing(ROOMY))
    ]
    assert both[0].tokens == both[1].tokens
    for name in ("num_rows", "num_preempted", "num_copied", "used_pages"):
        np.testing.assert_array_equal(*(getattr(run.info, name) for run in both))
    used = np.asarray(both[1].info.used_window_pages)
    assert used.max() <= releasing(ROOMY).num_window_pages(6)
    assert used.sum() < 0.7 * both[1].info.used_pages.sum()


@pytest.mark.slow
def test_beams_share_their_windows() -> None:
    config = releasing(CACHED, num_pages=40, max_beams=3, max_logprobs=0)
    config = dataclasses.replace(config, max_logit_rows=0)
    rng = np.random.default_rng(0)
    asks = [
        Ask(
            index,
            rng.integers(0, 61, 11).tolist(),
            Sampling(beam_width=3, n=3, max_tokens=9),
        )
        for index in range(3)
    ]
    kept = dataclasses.replace(config, release_window_pages=False)
    weights = engines.params(MIXED)
    runs = [
        engines.serve(asks, x, model=MIXED, weights=weights) for x in (config, kept)
    ]
    assert runs[0].tokens == runs[1].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"speculate": "early-exit"},
        {"speculate": "lookahead", "max_drafts": 4},
        {"kv_dtype": "int8"},
        {"scan_layers": True},
        {"speculate": "ngram", "numerics": "reproducible"},
    ],
)
def test_an_engine_gives_the_answers_of_pages_that_are_kept(
    how: dict[str, Any],
) -> None:
    folder = GOLDEN / "gemma3"
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 60, n).tolist() for n in (5, 17, 30, 17)]
    prompts[3] = prompts[2][:25]
    answers = []
    for release in (False, True):
        engine = jaxkv.Engine.load(
            folder,
            page_size=4,
            num_pages=40,
            max_slots=3,
            max_length=80,
            token_budget=16,
            prefix_cache=True,
            release_window_pages=release,
            debug=True,
            **how,
        )
        ask = Sampling(temperature=0, max_tokens=24)
        answers.append(
            [
                list(answer.tokens)
                for _ in range(2)
                for answer in engine.generate(prompts, ask)
            ]
        )
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_forgotten_prefixes_leave_no_window() -> None:
    """After new parameters no request starts on pages of the old ones."""
    config = releasing(CACHED)
    weights = engines.params(MIXED)
    asks = alike(1, 6)
    run = engines.serve(asks, config, model=MIXED, weights=weights)
    state = jax.jit(forget_kv, static_argnames="config")(run.state, config=config)
    other = jax.tree.map(lambda x: 1.5 * x, weights)
    again = engines.serve(asks, config, state=state, model=MIXED, weights=other)
    expected = engines.plain(asks, config, model=MIXED, weights=other)
    answers = {name: (x.tokens, x.reason) for name, x in again.outcomes.items()}
    assert answers == expected


def pages_of(model: ModelConfig, config: EngineConfig) -> Any:
    return jax.eval_shape(lambda: make_model_pages(model, config))


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    config = releasing(TIGHT, num_pages=400)
    pages = pages_of(MIXED, config)
    assert pages.num_layers == 1
    assert pages.windowed.num_layers == 3
    assert pages.windowed.layout.window == 6
    # ceil(4 / 4) + 2 for each of 8 slots, and 12 rows.
    assert pages.windowed.num_pages == 8 * 3 + 3
    assert pages_of(ALL, config).num_layers == 0
    assert pages_of(ALL, dataclasses.replace(config, num_pages=16)).windowed is not None
    cached = dataclasses.replace(config, prefix_cache=True, max_swap_pages=1)
    assert pages_of(ALL, cached).windowed.num_pages == 3 * 27


def test_windows_are_refused_where_their_pages_stay() -> None:
    line = "release_window_pages=True must be False for a model without windows"
    with pytest.raises(ValueError, match=re.escape(line)):
        pages_of(MODEL, releasing(TIGHT))
    kept = make_model_pages(ALL, TIGHT)
    line = "config.release_window_pages=True needs pages made with release_window"
    with pytest.raises(ValueError, match=re.escape(line)):
        init(releasing(TIGHT), kept)
    config = releasing(TIGHT)
    pages = make_model_pages(ALL, config)
    state = init(config, pages)
    with pytest.raises(ValueError, match="release_window_pages=True must be False whe"):
        refusals.check_prefixes_move(state)
    with pytest.raises(ValueError, match="release_window_pages=True must be False wit"):
        jaxkv.decoding.init_cache(pages, max_slots=1, max_length=8)
    parts = EngineParts(None, PagedForward(ALL), pages, config, mesh=make_mesh())
    with pytest.raises(ValueError, match="release_window_pages=True must be False on"):
        refusals.check_parts(parts, EngineRules())
    rows = engines_rows(config)
    with pytest.raises(ValueError, match="rows must have window_ids for pages with"):
        PagedForward(ALL)(engines.params(ALL), pages, rows)


def engines_rows(config: EngineConfig) -> Any:
    one = jnp.zeros((1,), jnp.int32)
    table = jnp.zeros((1, config.max_pages_per_slot), jnp.int32)
    return jaxkv.memory.Rows(one, one, one, table, one)
