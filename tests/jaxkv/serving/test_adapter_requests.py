"""Requests choose LoRA adapters: answers, bits, prefix cache, and refusals."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.engine import EngineConfig
from jaxkv.models import Params
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.serving import make_requests
from tests.support import adapters, engines
from tests.support.engines import MODEL
from tests.support.refusals import refused

NAMES = None, "first", "second"
BOUNDS = EngineConfig(
    num_pages=14,
    page_size=4,
    max_slots=3,
    max_length=40,
    token_budget=16,
    steps_per_call=4,
    prefix_cache=True,
    debug=True,
)
REPRODUCIBLE = dataclasses.replace(BOUNDS, numerics="reproducible")
LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PROMPTS = [LONG, LONG, LONG, [2, 7, 1], [1, 6, 1, 8, 0], [5, 7]]
CHOSEN = [NAMES[i % 3] for i in range(6)]


class Folders(NamedTuple):
    """A model and its adapters on disk."""

    model: Path
    adapters: dict[str, Path]
    merged: dict[str | None, Params]
    """Parameters with each adapter merged in NumPy."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    model = models.save_model(root / "model", MODEL, engines.params())
    first = ["q_proj", "v_proj"]
    second = ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    paths = {
        "first": adapters.save_adapter(root / "1", model, first, std=0.5),
        "second": adapters.save_adapter(root / "2", model, second, rank=5, seed=1),
    }
    merged: dict[str | None, Params] = {None: engines.params()}
    for name, path in paths.items():
        folder = adapters.merge(path, model, root / f"merged-{name}")
        merged[name] = models.load_model(folder).params
    return Folders(model, paths, merged)


@pytest.fixture(scope="module")
def engine(folders: Folders) -> jaxkv.Engine:
    return load(folders, REPRODUCIBLE)


def load(folders: Folders, config: EngineConfig, **fields: Any) -> jaxkv.Engine:
    bounds: Any = vars(config) | {"num_adapters": 2}
    return jaxkv.Engine.load(
        folders.model, adapters=folders.adapters, **bounds | fields
    )


def ask(adapter: str | None, **fields: Any) -> Sampling:
    return Sampling.greedy(max_tokens=9, logprobs=0, adapter=adapter, **fields)


def serve(engine: jaxkv.Engine, **fields: Any) -> list[Any]:
    return engine.generate(PROMPTS, [ask(name, **fields) for name in CHOSEN])


def rows_of(completions: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of prompts and answers, and their numbers."""
    rows = [
        prompt + done.tokens for prompt, done in zip(PROMPTS, completions, strict=True)
    ]
    tokens = np.zeros((len(rows), 24), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array([*map(len, rows)], np.int32)


def assert_merged(
    completions: list[Any], merged: dict[str | None, Params], atol: float = 1e-5
) -> None:
    """Compares log-probabilities with those of models with merged weights."""
    tokens, _ = rows_of(completions)
    for i, (done, name) in enumerate(zip(completions, CHOSEN, strict=True)):
        logits = engines.full_logits(merged[name], tokens[i : i + 1], config=MODEL)[0]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        start = len(PROMPTS[i])
        places = range(start, start + len(done.tokens))
        expected = [logprobs[x - 1, tokens[i, x]] for x in places]
        np.testing.assert_allclose(done.answers[0].logprobs, expected, atol=atol)
        assert done.tokens == [logprobs[x - 1].argmax() for x in places]


@pytest.mark.slow
def test_answers_are_those_of_merged_weights_and_bits_those_alone(
    folders: Folders, engine: jaxkv.Engine
) -> None:
    assert engine.adapters == ("first", "second")
    completions = serve(engine)
    assert_merged(completions, folders.merged)
    assert len({tuple(x.tokens) for x in completions[:3]}) == 3
    # The pool is too small for all; pages of other adapters are not shared.
    assert sum(x.num_preempted for x in completions)
    # No bit depends on the neighbours or their adapters, or on cached pages.
    alone = [
        engine.generate([prompt], ask(name))[0]
        for prompt, name in zip(PROMPTS, CHOSEN, strict=True)
    ]
    others = engine.generate(PROMPTS, [ask(CHOSEN[0])] + [ask("second")] * 5)
    for other, done in [*zip(alone, completions, strict=True), (others[0], alone[0])]:
        assert other.answers[0].logprobs == done.answers[0].logprobs
    # `score` has the same bits, and without an adapter those of the plain model.
    tokens, lengths = rows_of(completions)
    for params, used in ((engine.params, [0, 1, 2] * 2), (engines.params(), None)):
        scores = jaxkv.score(
            params,
            tokens,
            lengths,
            config=MODEL,
            adapter=None if used is None else np.array(used, np.int32),
        )
        for i, done in enumerate(completions):
            if used or CHOSEN[i] is None:
                answer = np.asarray(scores)[i, len(PROMPTS[i]) : lengths[i]]
                assert answer.tolist() == done.answers[0].logprobs
    # Other parameters keep the adapters.
    with refused("params['embed']['weight'] is missing"):
        engine.set_params({"layers": engines.params()["layers"]})
    engine.set_params(jax.tree.map(lambda x: x + x, engines.params()))
    twice = serve(engine)
    assert [x.tokens for x in twice] != [x.tokens for x in completions]
    assert models.adapted_products(engine.params)[1] == ("down", "out", "qkv", "up")


@pytest.mark.slow
def test_cached_pages_belong_to_an_adapter(engine: jaxkv.Engine) -> None:
    engine.set_params(engine.params)  # empties the cache
    for num_cached in (0, 8):
        for name in NAMES:
            [done] = engine.generate([LONG], ask(name))
            assert done.num_cached == num_cached
    # Prefixes that move have no adapter.
    _, num = engine.take_prefix(LONG)
    assert num == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"speculate": "ngram"},
        {"speculate": "early-exit"},
        {"speculate": "lookahead"},
        {"speculate": "ngram", "numerics": "reproducible"},
        {"scan_layers": True},
        {"max_swap_pages": 8, "max_slots": 6},
        {"max_slots": 6, "token_budget": 128, "num_pages": 64},
        {"tensor": 2},
        {"tensor": 4, "scan_layers": True},
        {"context": 2},
    ],
    ids=str,
)
def test_options_give_the_answers_of_merged_weights(
    fields: dict[str, Any], folders: Folders, tmp_path: Path
) -> None:
    fields = dict(fields)
    degrees = {x: fields.pop(x) for x in ("tensor", "context") if x in fields}
    if degrees:
        fields["mesh"] = make_mesh(**degrees)
    if "speculate" in fields:
        fields["max_drafts"] = 3
    engine = load(folders, BOUNDS, **fields)
    completions = serve(engine)
    assert_merged(completions, folders.merged, 5e-5)
    folder = engine.save(tmp_path / "snapshot")
    engine.restore(folder)
    assert_merged(serve(engine), folders.merged, 5e-5)
    if not degrees:
        engine.set_params(models.load_model(folders.model).params)
    assert_merged(serve(engine), folders.merged, 5e-5)
    if engine.config.max_slots > 3:
        sampled = Sampling(n=3, max_tokens=9, seed=1, adapter="second")
        first, second = (engine.generate([LONG], sampled)[0] for _ in range(2))
        assert [x.tokens for x in first.answers] == [x.tokens for x in second.answers]
        assert len({tuple(x.tokens) for x in first.answers}) == 3


def test_requests_have_the_numbers_of_their_adapters() -> None:
    config = dataclasses.replace(engines.CACHED, num_adapters=2)
    asks = [Sampling(adapter=x, salt=7, n=2, max_tokens=4) for x in ("second", None)]
    requests = make_requests([[1], [2]], asks, config=config, adapters=NAMES[1:])
    assert requests.adapter is not None
    assert requests.adapter.tolist() == [2, 2, 0, 0]
    assert requests.salt.tolist() == [7 + 2**25, 7 + 2**25, 7, 7]
    state, taken = engines.submit(engines.start(config), requests, config=config)
    assert state.sequences.adapter is not None
    assert state.sequences.adapter[:4].tolist() == [2, 2, 0, 0]
    assert taken.all()
    # Without adapters, programs have no argument for them.
    plain = make_requests([[1]], [Sampling()], config=engines.CACHED)
    assert plain.adapter is None
    assert engines.start(engines.CACHED).sequences.adapter is None


def test_unknown_adapters_and_large_salts_are_refused(folders: Folders) -> None:
    engine = load(folders, BOUNDS)
    with refused("adapter='third' must be 'first' or 'second'"):
        engine.submit([1], Sampling(adapter="third"))
    with refused("salt=16777216 must be in [0, 2**24) in an engine with adapters"):
        engine.generate([[1]], Sampling(salt=2**24))
    with refused("salt=16777216 must be in [0, 2**24)"):
        engine.take_prefix([1], salt=2**24)
    plain = jaxkv.Engine.load(folders.model, max_length=32)
    with refused("adapter='first' must be None in an engine without any"):
        plain.submit([1], Sampling(adapter="first"))
    with refused("num_adapters=1 must be 2, as in adapters"):
        load(folders, BOUNDS, num_adapters=1)
    with refused("num_adapters=1 must be 0, as in adapters"):
        jaxkv.Engine.load(folders.model, num_adapters=1, max_length=32)
    with refused("adapters=[''] must have names that are not empty"):
        jaxkv.Engine.load(folders.model, adapters={"": folders.model})
    with refused("sampling.adapter='first' must be None"):
        jaxkv.score(
            engines.params(),
            np.ones((1, 2), np.int32),
            config=MODEL,
            sampling=Sampling(adapter="first"),
        )
