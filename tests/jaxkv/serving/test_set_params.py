"""Parameters of an engine are replaced while it serves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import scheduling
from jaxkv.engine import EngineConfig, EngineRules
from jaxkv.models import init_params, load_model
from jaxkv.sampling import Sampling
from jaxkv.speculation import ModelWeights, build_speculative, parse_speculation
from tests.support import engines
from tests.support.engines import MODEL

CONFIG = EngineConfig(
    num_pages=24,
    page_size=4,
    max_slots=2,
    max_length=48,
    token_budget=16,
    steps_per_call=4,
    numerics="reproducible",
    prefix_cache=True,
    debug=True,
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 5, 9, 2, 6, 7, 8], [2, 7, 1, 8, 2]]
GREEDY = Sampling.greedy(max_tokens=20)


def new_params(params: Any) -> Any:
    """Returns other parameters of the same shapes."""
    rng = np.random.default_rng(11)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), params
    )


def engine_of(
    params: Any, method: Any = None, policy: Any = None, **fields: Any
) -> jaxkv.Engine:
    bounds = dataclasses.replace(CONFIG, **fields)
    parts, speculation = build_speculative(
        ModelWeights(MODEL, params),
        bounds,
        parse_speculation(method),
        dtype="float32",
    )
    policy = scheduling.fcfs() if policy is None else policy
    return jaxkv.Engine(parts, EngineRules(policy=policy, speculation=speculation))


def tokens_of(engine: jaxkv.Engine, prompts: Any = None, ask: Any = GREEDY) -> Any:
    prompts = PROMPTS if prompts is None else prompts
    return [done.tokens for done in engine.generate(prompts, ask)]


def plain_tokens(params: Any, prompts: Any, max_tokens: int = 20) -> Any:
    """Returns the greedy tokens of a loop without an engine."""
    asks = [
        engines.greedy(index, prompt, max_tokens)
        for index, prompt in enumerate(prompts)
    ]
    answers = engines.plain(asks, engines.SERVED, weights=params)
    return [answers[name][0] for name in engines.names_of(asks)]


def finish(engine: jaxkv.Engine) -> dict[int, list[int]]:
    """Returns the tokens of all requests, by id."""
    done = [event.completion for event in engine.stream()]
    return {x.request_id: x.tokens for x in done if x is not None}


def test_new_parameters_give_their_own_answers_and_compile_nothing() -> None:
    params = engines.params()
    other = new_params(params)
    engine = engine_of(params)
    before = tokens_of(engine)
    compile_s = engine.compile_s
    engine.set_params(other)
    after = tokens_of(engine)
    # The prompts were in the prefix cache, with K and V of the old parameters.
    assert after == plain_tokens(other, PROMPTS) != before
    engine.set_params(jax.tree.map(np.asarray, params))
    assert tokens_of(engine) == before
    assert engine.compile_s == compile_s

    # Requests in flight are completed first; a later one gets the new parameters.
    ids = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine.step()
    late = engine.submit(PROMPTS[2], GREEDY)
    with pytest.raises(ValueError, match="3 requests are not complete"):
        engine.set_params(other, in_flight="refuse")
    engine.set_params(other, in_flight="finish")
    tokens = finish(engine)
    assert [tokens[name] for name in ids] == before[:2]
    assert tokens[late] == after[2]
    assert engine.compile_s == compile_s


SWAP = {
    "num_pages": 12,
    "max_slots": 3,
    "max_swap_pages": 8,
    "policy": scheduling.fcfs(preemption="swap", hold_new=False),
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param(SWAP, marks=pytest.mark.slow),
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
    ],
)
def test_requests_in_flight_continue_with_new_parameters(
    fields: dict[str, Any],
) -> None:
    params = engines.params()
    other = new_params(params)
    engine = engine_of(params, **fields)
    whole = tokens_of(engine)
    ids = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.set_params(other, in_flight="recompute")
    known = {name: list(engine.tracker.records[name].answers[0].tokens) for name in ids}
    assert any(known.values())
    tokens = finish(engine)
    for prompt, name, old in zip(PROMPTS, ids, whole, strict=True):
        begin = known[name]
        assert begin == old[: len(begin)]
        [rest] = plain_tokens(other, [prompt + begin], 20 - len(begin))
        assert tokens[name] == begin + rest
    assert tokens_of(engine) == plain_tokens(other, PROMPTS)
    engines.assert_empty(engine.state)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["early-exit", "ngram"])
def test_drafts_follow(method: str) -> None:
    params = engines.params()
    other = new_params(params)
    engine = engine_of(params, method, max_drafts=3)
    tokens_of(engine)
    engine.set_params(other)
    assert tokens_of(engine) == tokens_of(engine_of(other))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"scan_layers": True},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"max_slots": 3})),
    ],
)
def test_parameters_as_loaded_fit_an_engine_that_changed_their_form(
    tmp_path: Any, options: dict[str, Any]
) -> None:
    folder = engines.save_tiny_model(tmp_path, max_positions=64)
    fields: dict[str, Any] = {
        "num_pages": 16,
        "max_length": 32,
        "max_slots": 1,
        **options,
    }
    engine = jaxkv.Engine.load(folder, **fields)
    config = load_model(folder).config
    other = init_params(config, jax.random.key(5))
    engine.set_params(other)
    shapes = [
        [leaf.shape for leaf in jax.tree.leaves(x)] for x in (engine.params, other)
    ]
    assert (shapes[0] != shapes[1]) == bool(options)
    loaded = load_model(folder)._replace(params=other)
    fresh = jaxkv.Engine.load(folder, loaded=loaded, **fields)
    assert tokens_of(engine, ["abc"]) == tokens_of(fresh, ["abc"])


@pytest.mark.thorough
def test_modules_for_prediction_follow() -> None:
    engine = jaxkv.Engine.load(
        "stdlib-bytes-deepseek",
        speculate="mtp",
        max_slots=1,
        num_pages=16,
        max_length=64,
    )
    params = load_model(jaxkv.files.model_folder("stdlib-bytes-deepseek")).params
    other = jax.tree.map(lambda x: x * 1.01, params)
    engine.set_params(other)
    np.testing.assert_array_equal(
        *(jax.tree.leaves(x)[0] for x in (engine.params.draft, other["ahead"]))
    )
    with pytest.raises(ValueError, match="ahead"):
        engine.set_params({name: x for name, x in other.items() if name != "ahead"})


def test_parameters_that_do_not_fit_are_refused() -> None:
    params = engines.params()
    engine = engine_of(params)
    few = {name: leaf for name, leaf in params.items() if name != "head"}
    with pytest.raises(ValueError, match=r"params\['head'\]\['weight'\] is missing"):
        engine.set_params(few)
    wide = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    with pytest.raises(ValueError, match=r"=bfloat16\[61, 24\] must be float32"):
        engine.set_params(wide)
    elsewhere = jax.device_put(params, jax.devices()[1])
    with pytest.raises(ValueError, match="must have SingleDeviceSharding"):
        engine.set_params(elsewhere)
    with pytest.raises(ValueError, match="in_flight='later' must be"):
        engine.set_params(params, in_flight="later")  # ty: ignore[invalid-argument-type]
    assert engine.params is params
