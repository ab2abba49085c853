"""Drafts change no bit for any batch: tokens, log-probabilities, finish reasons."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import init
from jaxkv.speculation import (
    EagleConfig,
    LoadedHeads,
    MedusaConfig,
    ModelWeights,
    build_speculative,
    parse_speculation,
)
from jaxkv.speculation.ngram import NGram
from tests.support import batches, engines
from tests.support.batches import SETTINGS, assert_same_bits, config_of, workload
from tests.support.engines import MODEL, Run

pytestmark = pytest.mark.usefixtures("full_optimization")

SMALLER = dataclasses.replace(MODEL, num_layers=1, hidden_size=16, mlp_size=24)
AHEAD = dataclasses.replace(MODEL, num_ahead_layers=2)
HEADS: dict[str, Any] = {
    "medusa": MedusaConfig(target=MODEL, num_heads=3),
    "eagle": EagleConfig(target=MODEL, taps=(0, 2)),
}


def heads_of(kind: str) -> LoadedHeads:
    """Heads with random weights."""
    rng = np.random.default_rng(2)
    shape = HEADS[kind]
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype),
        shape.param_shapes(),
    )
    return LoadedHeads(shape, params, ((0.5,), (0.4,), (0.3,)))


@functools.cache
def serve(method: Any, setting: str, seed: int) -> Run:
    """Up to three drafts per step and slot, as budget and pages allow."""
    config = dataclasses.replace(config_of(SETTINGS[setting]), max_drafts=3)
    heads = heads_of(method) if method in HEADS else None
    small = ModelWeights(SMALLER, engines.params(SMALLER))
    model = ModelWeights(MODEL, engines.params())
    if method == "mtp":
        module_params = engines.params(AHEAD)["ahead"]
        model = ModelWeights(AHEAD, {**model.params, "ahead": module_params})
    parts, speculation = build_speculative(
        model,
        config,
        parse_speculation(method),
        dtype="float32",
        draft=small if method == "draft-model" else None,
        heads=heads,
    )
    assert speculation is not None
    if method == "ngram":  # random answers repeat little more than pairs
        speculation = speculation._replace(drafter=NGram(shortest=2))
    return batches.serve(
        workload(seed),
        SETTINGS[setting],
        seed,
        config=config,
        as_served=False,
        weights=parts.params,
        state=init(config, parts.pages, speculation.drafter.init(config)),
        forward=parts.forward,
        speculation=speculation,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("ngram", ("1 slot", "8 slots")),
        *(
            pytest.param(
                method, ("1 slot", "8 slots", "large budget"), marks=pytest.mark.slow
            )
            for method in ("draft-model", "early-exit", "jacobi", "mtp", *HEADS)
        ),
    ],
)
def test_no_bit_depends_on_the_batch(method: str, names: tuple[str, ...]) -> None:
    """Single sequences, many with preemption, and decoding without drafts."""
    num_drafts = num_accepted = num_preempted = 0
    for seed in range(3):
        plain = batches.serve(
            workload(seed), SETTINGS["8 slots"], seed, as_served=False
        )
        for name in names:
            run = serve(method, name, seed)
            drafts = np.asarray(run.info.num_drafts)
            accepted = np.maximum(run.info.num_emitted - 1, 0)[drafts > 0]
            num_drafts = num_drafts + drafts.sum()
            num_accepted = num_accepted + accepted.sum()
            num_preempted += int(run.info.num_preempted.sum())
            assert len(run.outcomes) == len(plain.outcomes)
            for request_id, outcome in run.outcomes.items():
                assert_same_bits(outcome, plain.outcomes[request_id])
    assert num_drafts > 100
    assert num_accepted > 10
    assert num_preempted > 0
