"""The log-probabilities of `score` are those of an engine, bit for bit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models, scheduling
from jaxkv.engine import EngineConfig, EngineRules
from jaxkv.models import Experts, ModelConfig
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.serving import read_model_folder
from jaxkv.speculation import ModelWeights, build_speculative, parse_speculation
from tests.support import engines, latent_models

pytestmark = pytest.mark.usefixtures("full_optimization")

DENSE = dataclasses.replace(engines.MODEL, max_positions=128)
EXPERTS = dataclasses.replace(DENSE, experts=Experts(num_experts=4, top_k=2, size=24))
LATENT = dataclasses.replace(latent_models.LATENT, max_positions=128)
WINDOW = dataclasses.replace(DENSE, window=21)
LENGTH = 120
CONFIG = EngineConfig(
    num_pages=36,
    page_size=8,
    max_slots=3,
    max_length=LENGTH,
    token_budget=40,
    max_logit_rows=30,
    numerics="reproducible",
    prefix_cache=True,
)
"""A pool for two of the three slots, so that sequences are preempted."""


def requests(num: int, vocab: int) -> tuple[list[list[int]], list[Sampling]]:
    """Returns prompts, some with a common prefix, and sampling parameters."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, vocab, 24).tolist()
    prompts = []
    asks = []
    for index in range(num):
        own = rng.integers(0, vocab, rng.integers(1, 40)).tolist()
        prompts.append(prefix + own if index % 2 else own)
        asks.append(
            Sampling(
                max_tokens=LENGTH - len(prompts[-1]),
                temperature=float(rng.uniform(0.5, 1.2)),
                top_k=int(rng.integers(0, 30)),
                seed=index,
                logprobs=0,
                prompt_logprobs=index % 3 == 0,
                n=1 + index % 2,
                ignore_eos=True,
            )
        )
    return prompts, asks


def count_equal(
    engine: jaxkv.Engine,
    params: Any,
    config: ModelConfig,
    *,
    num: int = 12,
    mesh: Any = None,
) -> tuple[int, int]:
    """Returns the numbers of equal and of all log-probabilities of an engine."""
    prompts, asks = requests(num, min(config.vocab_size, 61))
    answers = []
    for prompt, done in zip(prompts, engine.generate(prompts, asks), strict=True):
        known = done.prompt_logprobs or [None] * len(prompt)
        for answer in done.answers:
            assert answer.logprobs is not None
            answers.append((prompt + answer.tokens, [*known, *answer.logprobs]))
    tokens = np.zeros((len(answers), LENGTH), np.int32)
    reported = np.full(tokens.shape, np.nan, np.float32)
    lengths = np.array([len(line) for line, _ in answers], np.int32)
    for row, (line, logprobs) in enumerate(answers):
        tokens[row, : len(line)] = line
        reported[row, : len(line)] = [
            np.nan if logprob is None else logprob for logprob in logprobs
        ]
    scores = jaxkv.score(params, tokens, lengths, config=config, mesh=mesh)
    known = ~np.isnan(reported)
    return int((reported == np.asarray(scores))[known].sum()), int(known.sum())


def engine_of(
    config: ModelConfig,
    params: Any,
    method: Any = None,
    policy: Any = None,
    **fields: Any,
) -> jaxkv.Engine:
    """Returns an engine of `CONFIG`, with some fields changed."""
    bounds = dataclasses.replace(CONFIG, **fields)
    parts, speculation = build_speculative(
        ModelWeights(config, params),
        bounds,
        parse_speculation(method),
        dtype=str(params["embed"]["weight"].dtype),
    )
    policy = scheduling.fcfs() if policy is None else policy
    return jaxkv.Engine(parts, EngineRules(policy=policy, speculation=speculation))


def params_of(config: ModelConfig, dtype: str = "float32") -> Any:
    if config.latent is not None:
        return latent_models.params(config)
    return engines.params(config, dtype)


@functools.cache
def shared_engine() -> jaxkv.Engine:
    """An engine of `DENSE`, compiled once."""
    return engine_of(DENSE, params_of(DENSE))


def test_an_engine_reports_the_bits_of_score() -> None:
    params = params_of(DENSE)
    engine = shared_engine()
    equal, num = count_equal(engine, params, DENSE, num=16)
    assert equal == num > 1_500, (equal, num)
    equal, again = count_equal(engine, params, DENSE, num=16)  # with prefix hits
    assert equal == again > 500


SWAP = {
    "max_swap_pages": 15,
    "policy": scheduling.fcfs(preemption="swap", hold_new=False),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "dtype", "fields"),
    [
        (DENSE, "bfloat16", {}),
        (DENSE, "float32", SWAP),
        (DENSE, "bfloat16", {"page_size": 64, "num_pages": 6, "token_budget": 200}),
        (DENSE, "float32", {"page_size": 2, "num_pages": 130, "token_budget": 7}),
        (DENSE, "float32", {"method": "ngram", "max_drafts": 3}),
        (DENSE, "bfloat16", {"method": "early-exit", "max_drafts": 3}),
        (EXPERTS, "float32", {}),
        (EXPERTS, "bfloat16", {"page_size": 16, "num_pages": 20}),
        (LATENT, "float32", {}),
        (LATENT, "float32", {"method": "ngram", "max_drafts": 2, **SWAP}),
        (WINDOW, "float32", {"token_budget": 70}),
        (WINDOW, "bfloat16", {}),
    ],
)
def test_any_engine_reports_the_bits_of_score(
    config: ModelConfig, dtype: str, fields: dict[str, Any]
) -> None:
    params = params_of(config, dtype)
    engine = engine_of(config, params, **fields)
    equal, num = count_equal(engine, params, config)
    assert equal == num > 1_000, (equal, num)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_two_devices_reports_the_bits_of_score(
    tmp_path: Any, dtype: str
) -> None:
    folder = engines.save_tiny_model(tmp_path, max_positions=LENGTH)
    mesh = make_mesh(tensor=2)
    loaded = read_model_folder(folder, dtype=dtype, mesh=mesh)
    bounds = {
        field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)
    }
    engine = jaxkv.Engine.load(folder, loaded=loaded, mesh=mesh, dtype=dtype, **bounds)
    equal, num = count_equal(engine, loaded.params, loaded.config, mesh=mesh)
    assert equal == num > 1_000, (equal, num)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(DENSE, num_layers=1),
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in (DENSE, EXPERTS, LATENT, WINDOW)
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


@pytest.mark.thorough
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
