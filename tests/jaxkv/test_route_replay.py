"""Experts that an engine records, and scores that are computed with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from experiments.decoding.rollout_mismatch.schedules import (
    FAMILIES,
    LENGTH,
    SETUPS,
    EngineSetup,
    ReportedLogprobs,
    draw_requests,
    make_setup_engine,
    reported_logprobs,
    serve_load,
)
from jaxkv import models
from jaxkv.engine import EngineConfig
from jaxkv.models import NO_EXPERT, Experts, ModelConfig
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from tests.support import engines

pytestmark = pytest.mark.usefixtures("full_optimization")

MIXTURE = FAMILIES["experts"]
"""Four experts, of which two serve a token, in two layers."""
LATE = dataclasses.replace(
    MIXTURE, experts=Experts(num_experts=4, top_k=2, size=24, num_dense_layers=1)
)
"""A dense layer, then a mixture."""
EIGHT = dataclasses.replace(
    MIXTURE, num_layers=4, experts=Experts(num_experts=8, top_k=2, size=24)
)


def setup_of(name: str, **fields: Any) -> EngineSetup:
    """Returns a setup that records routes, with some of its bounds changed."""
    setup = SETUPS[name]
    bounds = dataclasses.replace(setup.bounds, record_routes=True, **fields)
    return setup._replace(bounds=bounds)


def ordinary_routes(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the experts of each token in the ordinary forward pass."""

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        states = models.run_sequences(models.merge(config, params), tokens)
        return jnp.stack([routing.expert for routing in states.routings], axis=1)

    return np.array(run(params, tokens)).reshape(*tokens.shape, -1, 2)


def serve_routes(
    engine: jaxkv.Engine, config: ModelConfig
) -> tuple[ReportedLogprobs, np.ndarray]:
    """Serves random requests; returns sequences and the experts of their tokens."""
    prompts, asks = draw_requests(5, 12, 61)
    completions = serve_load(engine, prompts, asks)
    reported = reported_logprobs(prompts, completions)
    answers = [answer for item in completions for answer in item.answers]
    shape = (*reported.tokens.shape, config.num_mixtures, 2)
    routes = np.full(shape, NO_EXPERT, np.int32)
    for row, answer in zip(routes, answers, strict=True):
        assert answer.routes is not None
        row[: len(answer.routes)] = answer.routes
    fed = np.arange(LENGTH)[None, :] < reported.lengths[:, None] - 1
    assert ((routes >= 0) == fed[:, :, None, None]).all()
    return reported, routes


def test_replayed_experts_have_the_shares_of_their_scores() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4)).astype(np.float32)
    replayed = jnp.array([[3, 0], [NO_EXPERT, NO_EXPERT], [4, 1]], jnp.int32)
    for scoring in ("softmax", "sigmoid"):
        experts = Experts(num_experts=4, top_k=2, size=8, scoring=scoring)
        routing = models.route(
            jnp.asarray(logits), experts, replayed=jnp.asarray(replayed)
        )
        scores = np.exp(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
        best = np.argsort(-scores[1])[:2]
        assert routing.expert[1].tolist() == best.tolist()
        for row, chosen in enumerate([[3, 0], best]):
            expected = scores[row, chosen] / scores[row, chosen].sum()
            np.testing.assert_allclose(routing.share[row], expected, rtol=1e-5)
        assert np.isnan(routing.share[2]).all()  # there is no expert 4


@pytest.mark.parametrize(
    "config",
    [LATE, pytest.param(engines.SINGLE, id="single", marks=pytest.mark.slow)],
)
def test_replay_of_the_routers_choice_changes_no_bit(config: ModelConfig) -> None:
    params = engines.params(config)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 40)).astype(np.int32)
    plain = np.asarray(jaxkv.score(params, tokens, config=config))
    routes = ordinary_routes(config, params, tokens)
    routes[1, 7:] = NO_EXPERT
    replay = np.asarray(jaxkv.score(params, tokens, config=config, routes=routes))
    np.testing.assert_array_equal(replay, plain)
    routes[0, 10] = (routes[0, 10] + 1) % 4
    other = np.asarray(jaxkv.score(params, tokens, config=config, routes=routes))
    if config is not LATE:
        # Routes of the first mixture concern all later tokens, by the state after it.
        assert np.argwhere(other != plain).tolist() == [[0, x] for x in range(11, 40)]
        return
    # The only mixture is in the last layer, so only the next token is concerned.
    assert np.argwhere(other != plain).tolist() == [[0, 11]]


@pytest.mark.slow
def test_replay_has_the_gradient_of_the_ordinary_forward_pass() -> None:
    params = engines.params(LATE)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 61, (2, 40)), jnp.int32)
    order = np.argsort(rng.normal(size=(2, 40, 1, 4)))
    routes = jnp.asarray(order[..., :2], jnp.int32)

    def plain(params: Any) -> jax.Array:
        logits = models.logits(params, tokens, config=LATE, routes=routes)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return jnp.sum(jnp.take_along_axis(logprobs, tokens[:, 1:, None], 2))

    def replay(params: Any) -> jax.Array:
        return jnp.sum(jaxkv.score(params, tokens, config=LATE, routes=routes))

    ours, theirs = (jax.grad(function)(params) for function in (replay, plain))
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(two).max())
    assert np.abs(ours["layers"][1]["mixture"]["router"]["weight"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "setup"),
    [
        ("bfloat16", setup_of("recompute")),
        ("float32", setup_of("drafts")._replace(method="early-exit")),
        ("float32", setup_of("swap")),
        ("bfloat16", setup_of("small pages")),
    ],
)
def test_recorded_routes_are_those_of_score(dtype: str, setup: EngineSetup) -> None:
    """Of chunks, prefix hits, preempted requests, drafts and several answers."""
    params = jax.tree.map(lambda x: x.astype(dtype), engines.params(MIXTURE))
    engine = make_setup_engine(MIXTURE, params, setup)
    for _ in range(2):
        reported, routes = serve_routes(engine, MIXTURE)
        inputs = params, reported.tokens, reported.lengths
        plain = np.asarray(jaxkv.score(*inputs, config=MIXTURE))
        replay = np.asarray(jaxkv.score(*inputs, config=MIXTURE, routes=routes))
        np.testing.assert_array_equal(replay, plain)
        is_different = (plain != reported.logprobs) & reported.is_reported
        assert not is_different.any()
        if dtype == "float32":
            expected = ordinary_routes(MIXTURE, params, reported.tokens)
            np.testing.assert_array_equal(routes[routes >= 0], expected[routes >= 0])


@pytest.mark.slow
def test_replay_takes_away_the_mismatch_in_routes() -> None:
    """Of a sampler in bfloat16, whose trainer has parameters in float32."""
    params = engines.params(EIGHT)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    setup = setup_of("large pages", numerics="fast")
    reported, routes = serve_routes(make_setup_engine(EIGHT, rounded, setup), EIGHT)
    own = ordinary_routes(EIGHT, params, reported.tokens)
    is_fed = routes[..., 0, 0] >= 0
    is_other = np.any(np.sort(own) != np.sort(routes), axis=(2, 3))[is_fed]
    assert is_other.mean() > 0.05
    plain, replay = (
        np.abs(np.asarray(scores) - reported.logprobs)[reported.is_reported]
        for scores in (
            jaxkv.score(params, reported.tokens, reported.lengths, config=EIGHT),
            jaxkv.score(
                params, reported.tokens, reported.lengths, config=EIGHT, routes=routes
            ),
        )
    )
    assert replay.mean() < 0.3 * plain.mean()
    assert replay.max() < 0.2 * plain.max()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}, {"expert": 2}])
def test_devices_record_the_routes_of_one(tmp_path: Any, axes: dict[str, int]) -> None:
    config = dataclasses.replace(MIXTURE, family="mixtral", mlp_size=24)
    params = engines.params(config)
    models.save_model(tmp_path / "model", config, params, dtype="float32")
    bounds = setup_of("recompute", prefix_cache=False).bounds
    fields = {
        field.name: getattr(bounds, field.name)
        for field in dataclasses.fields(bounds)
        if field.name not in ("max_stop_tokens", "numerics")
    }
    engine = jaxkv.Engine.load(tmp_path / "model", mesh=make_mesh(**axes), **fields)
    reported, routes = serve_routes(engine, config)
    expected = ordinary_routes(config, params, reported.tokens)
    np.testing.assert_array_equal(routes[routes >= 0], expected[routes >= 0])


@pytest.mark.slow
def test_cancelled_answers_have_the_routes_of_their_tokens() -> None:
    params = engines.params(LATE)
    setup = setup_of("recompute", steps_per_call=4)
    engine = make_setup_engine(LATE, params, setup)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    ask = Sampling.greedy(max_tokens=60)
    running, waiting = (engine.submit(prompt, ask) for prompt in prompts)
    engine.cancel(waiting)
    for _ in range(3):
        engine.step()
    engine.cancel(running)
    events = [*engine.stream()]
    done = {x.request_id: x.completion for x in events if x.completion is not None}
    assert done[waiting].answers[0].routes is None  # it was never on the device
    answer = done[running].answers[0]
    tokens = np.array([prompts[0] + answer.tokens], np.int32)
    assert answer.reason == "cancelled"
    assert tokens.size > 6
    expected = ordinary_routes(LATE, params, tokens)[0, :-1]
    np.testing.assert_array_equal(answer.routes, expected)


def test_wrong_routes_are_refused() -> None:
    tokens = np.zeros((1, 3), np.int32)
    routes = np.tile(np.array([[0, 1]], np.int32), (1, 3, 2, 1))

    def refuse(message: str, routes: np.ndarray, config: ModelConfig = MIXTURE) -> None:
        with pytest.raises(ValueError, match=message):
            jaxkv.score(engines.params(config), tokens, config=config, routes=routes)

    refuse("routes must be None for a model without", routes, FAMILIES["dense"])
    refuse(r"routes.shape=\(1, 2, 2, 2\) must be \(1, 3, 2, 2\)", routes[:, :2])
    refuse(r"have expert 5, and must be in \[0, 4\), or -1", routes + 4)
    refuse(r"have expert -2, and must be", routes - 2)
    refuse("must be -1 for all experts of a token", routes - 1)
    refuse("must name each expert of a token once", routes * 0)
    bounds = SETUPS["recompute"].bounds
    with pytest.raises(ValueError, match="max_beams=2 must be 0 with record_routes"):
        dataclasses.replace(bounds, max_beams=2, record_routes=True)
    with pytest.raises(ValueError, match="record_routes=True must be False for a"):
        make_setup_engine(
            FAMILIES["dense"], engines.params(FAMILIES["dense"]), setup_of("recompute")
        )
    recording = EngineConfig(num_pages=2, max_length=64, record_routes=True)
    pages = models.make_model_pages(MIXTURE, recording)
    with pytest.raises(ValueError, match="needs pages made with record_routes"):
        jaxkv.init(recording, pages)
