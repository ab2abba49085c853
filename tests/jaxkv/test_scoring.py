"""The log-probabilities of `score` are those of an engine, bit for bit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from experiments.decoding.rollout_mismatch.schedules import (
    FAMILIES,
    LENGTH,
    LOADS,
    SETUPS,
    EngineSetup,
    count_different,
    make_setup_engine,
)
from jaxkv import models
from jaxkv.models import ModelConfig
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.serving import read_model_folder
from pallas_kernels.paged_attention import PagedKV, choose_run_queries, reference
from tests.support import engines, latent_models
from tests.support.folders import ROOT

pytestmark = pytest.mark.usefixtures("full_optimization")

DENSE = FAMILIES["dense"]
SETUP = SETUPS["recompute"]


def setup_of(name: str = "recompute", **fields: Any) -> EngineSetup:
    """Returns a setup with some of its bounds changed."""
    setup = SETUPS[name]
    return setup._replace(bounds=dataclasses.replace(setup.bounds, **fields))


def params_of(config: ModelConfig, dtype: str = "float32") -> Any:
    if config.latent is not None:
        return latent_models.params(config)
    return engines.params(config, dtype)


@functools.cache
def shared_engine() -> jaxkv.Engine:
    """An engine of `DENSE`, compiled once."""
    return make_setup_engine(DENSE, params_of(DENSE), SETUP)


def test_an_engine_reports_the_bits_of_score() -> None:
    """Proves the promise of the README."""
    promise = "returns the log-probabilities that such an engine reports, bit for bit"
    assert f"`jaxkv.score` {promise}" in (ROOT / "README.md").read_text("utf-8")
    params = params_of(DENSE)
    engine = shared_engine()
    for at_least in (1_500, 500):  # the second time with prefix hits
        counts = count_different(engine, DENSE, params, num_requests=16)
        assert counts.num_different == 0
        assert counts.num_logprobs > at_least


@pytest.mark.slow
def test_score_has_the_same_bits_with_the_runs_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where long runs have other bits, `score` has the short runs of an engine."""
    tokens = np.random.default_rng(5).integers(0, 61, (3, 90)).astype(np.int32)
    params = params_of(DENSE)
    scores = jaxkv.score(params, tokens, config=DENSE)
    choices = []

    def choose(q: jax.Array, memory: PagedKV) -> int:
        choices.append(choose_run_queries(q, memory))
        return reference.RUN_QUERIES

    monkeypatch.setattr(reference, "choose_run_queries", choose)
    padded = np.pad(tokens, ((0, 0), (0, 1)))  # otherwise it is not traced again
    lengths = np.full(3, 90, np.int32)
    short = jaxkv.score(params, padded, lengths, config=DENSE)
    assert choices
    np.testing.assert_array_equal(short[:, :-1], scores)


@pytest.mark.parametrize(
    "family",
    [
        "experts",
        *(pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES if x != "experts"),
    ],
)
def test_no_bit_depends_on_the_place_of_a_row(family: str) -> None:
    """Products of 32 rows have had other bits in the last two of them."""
    config = FAMILIES[family]
    params = params_of(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (3, 60)).astype(np.int32)
    expected = None
    for shift in range(0, 32, 3):
        # The first sequence moves the others within their tiles.
        lengths = np.array([shift, 60, 60], np.int32)
        scores = jaxkv.score(params, tokens, lengths, config=config)[1:]
        expected = scores if expected is None else expected
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS[1:])
def test_the_order_of_requests_changes_no_bit(load: str) -> None:
    params = params_of(DENSE)
    counts = count_different(shared_engine(), DENSE, params, load=load)
    assert counts.num_different == 0
    assert counts.num_logprobs > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "setup"),
    [
        (
            "latent",
            "float32",
            setup_of("swap", max_drafts=2)._replace(method="ngram"),
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("dense", "bfloat16", setup_of("large pages", num_pages=6)),
                ("window", "bfloat16", SETUP),
                ("dense", "float32", SETUPS["swap"]),
                (
                    "dense",
                    "bfloat16",
                    setup_of(max_drafts=3)._replace(method="early-exit"),
                ),
                ("experts", "float32", SETUP),
                ("dense", "bfloat16", SETUP),
                ("dense", "float32", SETUPS["small pages"]),
                ("dense", "float32", SETUPS["drafts"]),
                ("experts", "bfloat16", setup_of(page_size=16, num_pages=20)),
                ("latent", "float32", SETUP),
                ("window", "float32", setup_of(token_budget=70)),
            )
        ),
    ],
)
def test_any_engine_reports_the_bits_of_score(
    family: str, dtype: str, setup: EngineSetup
) -> None:
    config = FAMILIES[family]
    params = params_of(config, dtype)
    engine = make_setup_engine(config, params, setup)
    counts = count_different(engine, config, params)
    assert counts.num_different == 0
    assert counts.num_logprobs > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_two_devices_reports_the_bits_of_score(
    tmp_path: Any, dtype: str
) -> None:
    folder = engines.save_tiny_model(tmp_path, max_positions=LENGTH)
    mesh = make_mesh(tensor=2)
    loaded = read_model_folder(folder, dtype=dtype, mesh=mesh)
    bounds = {
        field.name: getattr(SETUP.bounds, field.name)
        for field in dataclasses.fields(SETUP.bounds)
    }
    engine = jaxkv.Engine.load(folder, loaded=loaded, mesh=mesh, dtype=dtype, **bounds)
    counts = count_different(engine, loaded.config, loaded.params, mesh=mesh)
    assert counts.num_different == 0
    assert counts.num_logprobs > 1_000


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(DENSE, num_layers=1),
        *(
            pytest.param(
                config,
                marks=pytest.mark.slow,
            )
            for name, config in FAMILIES.items()
        ),
    ],
)
def test_score_has_the_gradient_of_the_ordinary_forward_pass(
    config: ModelConfig,
) -> None:
    params = params_of(config)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 61, (3, 40)), jnp.int32)
    lengths = np.array([40, 1, 23], np.int32)
    weights = rng.normal(size=tokens.shape).astype(np.float32)

    def plain(params: Any) -> jax.Array:
        logits = models.logits(params, tokens, config=config)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        logprobs = jnp.take_along_axis(logprobs, tokens[:, 1:, None], 2)[..., 0]
        known = np.arange(1, 40)[None, :] < lengths[:, None]
        return jnp.sum(jnp.where(known, logprobs, 0) * weights[:, 1:])

    def ours(params: Any) -> Any:
        scores = jaxkv.score(params, tokens, lengths, config=config)
        return jnp.sum(scores * weights), scores

    expected = jax.jit(jax.grad(plain))(params)
    (_, scores), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    for ours_leaf, leaf in zip(
        *map(jax.tree.leaves, (gradient, expected)), strict=True
    ):
        assert jnp.max(jnp.abs(ours_leaf - leaf)) <= 1e-5 * jnp.max(jnp.abs(leaf))
    # A program that differentiates has the bits of one that does not.
    alone = jaxkv.score(params, tokens, lengths, config=config)
    np.testing.assert_array_equal(scores, alone)
    # No bit depends on the other sequences, and padding has none.
    one = jaxkv.score(params, tokens[2:, :30], lengths[2:], config=config)
    np.testing.assert_array_equal(one[0], alone[2, :30])
    assert not np.asarray(alone)[1].any()
    assert not np.asarray(alone)[2, 23:].any()


@pytest.mark.slow
def test_score_under_temperature_and_cuts() -> None:
    params = params_of(DENSE)
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 61, 10).tolist()
    ask = Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=40, seed=3)
    [done] = shared_engine().generate([prompt], ask)
    tokens = jnp.array([prompt + done.tokens], jnp.int32)
    scores = np.asarray(jaxkv.score(params, tokens, config=DENSE, sampling=ask))[0]
    assert np.isfinite(scores[10:]).all()
    assert not np.isfinite(scores[1:10]).all()  # random tokens are cut off
    logits = models.logits(params, tokens, config=DENSE)[0, :-1]
    rows = jax.tree.map(
        lambda x: jnp.repeat(x, len(logits), axis=0),
        jaxkv.sampling.make_params([ask], [(0, 0)], [0]),
    )
    law = jaxkv.sampling.probabilities(logits, rows)
    law = jnp.take_along_axis(law, tokens[0, 1:, None], 1)[:, 0]
    np.testing.assert_allclose(np.exp(scores[1:]), law, rtol=1e-3)


@pytest.mark.slow
def test_an_engine_reports_the_law_that_it_draws_from() -> None:
    params = params_of(DENSE)
    engine = make_setup_engine(
        DENSE,
        params,
        setup_of(logprobs_mode="processed_logprobs"),
    )
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 61, size).tolist() for size in (3, 30, 17, 9, 1)]
    asks = [
        Sampling(
            temperature=0.2 * index,  # the first is greedy
            top_k=4 * index,
            top_p=1 - 0.1 * index,
            max_tokens=60,
            logprobs=0,
            seed=index,
            ignore_eos=True,
        )
        for index in range(5)
    ]
    answers = engine.generate(prompts, asks)
    for prompt, ask, done in zip(prompts, asks, answers, strict=True):
        tokens = np.array([prompt + done.tokens], np.int32)
        scores = jaxkv.score(params, tokens, config=DENSE, sampling=ask)
        np.testing.assert_array_equal(scores[0, len(prompt) :], done.logprobs)


def test_score_refuses_what_it_cannot_score() -> None:
    params = params_of(DENSE)
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.2"):
        jaxkv.score(
            params,
            tokens,
            config=DENSE,
            sampling=Sampling(repetition_penalty=1.2),
        )
    with pytest.raises(ValueError, match="at least one token"):
        jaxkv.score(params, tokens[:, :0], config=DENSE)
    for wrong in (-1, 5):
        lengths = np.array([wrong], np.int32)
        with pytest.raises(
            ValueError, match=rf"lengths=\[{wrong}\] must be in \[0, 4\]"
        ):
            jaxkv.score(params, tokens, lengths, config=DENSE)
