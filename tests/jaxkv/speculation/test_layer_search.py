"""Layer search: counts by hand, and against all sets of layers."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.models import load_model, stack_layers
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig, layer_search
from tests.support import engines
from tests.support.engines import MODEL
from tests.support.folders import GOLDEN

THREE = dataclasses.replace(MODEL, num_layers=3)


def texts() -> Any:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, MODEL.vocab_size, (3, 20)), jnp.int32)


def test_speeds_by_formula() -> None:
    # Two drafts at half a step each: (1 + 0.5 + 0.25) / 2.
    speeds = [sum(0.5**k for k in range(n + 1)) / (n / 2 + 1) for n in (1, 2, 3)]
    assert layer_search.speed_of(0.5, 0.5, 3) == (max(speeds), 1)
    assert layer_search.speed_of(1.0, 0.25, 6) == (7 / 2.5, 6)
    assert layer_search.speed_of(0.0, 0.25, 6)[1] == 1


@pytest.mark.thorough
def test_agreement_is_counted_place_by_place() -> None:
    params = engines.params(THREE)
    tokens = texts()
    layers = (0, 2)
    cut = {**params, "layers": {0: params["layers"][0], 1: params["layers"][2]}}
    smaller = dataclasses.replace(THREE, num_layers=2)
    full_tokens = np.argmax(models.logits(params, tokens, config=THREE), axis=-1)
    other = np.argmax(models.logits(cut, tokens, config=smaller), axis=-1)
    how: Any = {"config": THREE}
    share = layer_search.agreement(params, tokens, layers=layers, **how)
    assert share == pytest.approx(np.mean(full_tokens == other))
    assert layer_search.agreement(params, tokens, layers=(0, 1, 2), **how) == 1.0


@pytest.mark.thorough
def test_the_best_of_all_sets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    params = engines.params(THREE)
    tokens = texts()
    sets = [
        layers for size in (1, 2) for layers in itertools.combinations(range(3), size)
    ]
    shares = {
        layers: layer_search.agreement(params, tokens, config=THREE, layers=layers)
        for layers in sets
    }
    speeds = {
        layers: max(
            sum(share**k for k in range(n + 1)) / (n * len(layers) / 3 + 1)
            for n in range(1, 5)
        )
        for layers, share in shares.items()
    }
    search = layer_search.search_layers(params, tokens, config=THREE, max_drafts=4)
    assert search.speed == pytest.approx(max(speeds.values()))
    assert speeds[search.layers] == pytest.approx(search.speed)
    # Greedy removal: the best pair, then the better of its layers.
    monkeypatch.setattr(layer_search, "MOST_SETS", 5)
    pair = max(sets[3:], key=lambda layers: shares[layers])
    tried = [pair, *((layer,) for layer in pair)]
    best = max(tried, key=lambda layers: shares[layers] if len(layers) == 1 else -1.0)
    search = layer_search.search_layers(params, tokens, config=THREE, max_drafts=4)
    assert search.layers in (pair, best)
    assert search.speed == pytest.approx(max(speeds[pair], speeds[best]))


@pytest.mark.slow
def test_found_layers_are_served() -> None:
    """As on the package's page."""
    folder = GOLDEN / "llama"
    prompts = [[3, 1, 4], [1, 5, 9, 2]]
    model = load_model(folder)
    search = layer_search.search_layers(model.params, texts() % 60, config=model.config)
    bounds: Any = {"num_pages": 16, "max_slots": 2, "max_length": 40}
    ask = Sampling.greedy(max_tokens=12, ignore_eos=True)
    plain = jaxkv.Engine.load(folder, numerics="reproducible", **bounds)
    engine = jaxkv.Engine.load(
        folder,
        speculate=SpeculationConfig("early-exit", draft_layers=search.layers),
        max_drafts=search.num_drafts,
        numerics="reproducible",
        keep_trace=True,
        **bounds,
    )
    answers = [
        [x.answers[0].tokens for x in llm.generate(prompts, ask)]
        for llm in (plain, engine)
    ]
    assert answers[0] == answers[1]
    assert sum(np.asarray(info.num_drafts).sum() for info in engine.trace) > 0


def test_models_that_cannot_be_searched_are_refused() -> None:
    params = engines.params(THREE)
    tokens = texts()
    with pytest.raises(ValueError, match="max_drafts=0 must be"):
        layer_search.search_layers(params, tokens, config=THREE, max_drafts=0)
    one = dataclasses.replace(THREE, num_layers=1)
    with pytest.raises(ValueError, match="num_layers=1 must be at least 2"):
        layer_search.search_layers(params, tokens, config=one)
    stacked = stack_layers(THREE, params)
    with pytest.raises(ValueError, match="layers that are not stacked"):
        layer_search.search_layers(stacked, tokens, config=THREE)


def test_of_equal_gains_the_fewest_drafts_are_chosen() -> None:
    assert layer_search.speed_of(0.0, 0.0, 4) == (1.0, 1)
