"""Drafts of modules for multi-token prediction, against NumPy in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import EngineConfig, EngineParts, EngineState, Speculation, init
from jaxkv.memory import Rows
from jaxkv.models import Experts, ModelConfig, init_params
from jaxkv.speculation import (
    ModelWeights,
    MTPConfig,
    build_speculative,
    draws,
    parse_speculation,
)
from scaling.training import transformer_rows
from tests.support import ahead_reference, engines
from tests.support.engines import MODEL

NUM = 3
BOUNDS = EngineConfig(
    num_pages=2,
    page_size=64,
    max_slots=2,
    max_length=64,
    max_sequences=2,
    queue_capacity=2,
    submit_width=2,
    token_budget=24,
    max_drafts=NUM,
)
KNOWN = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]]
# Places of each sequence that a pass reads: all but the last, which the drafter reads.
PASSES = ((range(2), range(7)), (range(2, 6), range(7, 11)))


def parts_of(
    model: ModelConfig, weights: Any
) -> tuple[EngineParts, Speculation | None]:
    return build_speculative(
        ModelWeights(model, weights),
        BOUNDS,
        parse_speculation("mtp"),
        dtype="float32",
    )


def state_after_passes(parts: EngineParts) -> EngineState:
    """Returns an engine that has read both sequences, in two passes of packed rows."""
    pages: Any = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), parts.pages)
    state = init(BOUNDS, pages, ())
    page_ids = jnp.full_like(state.table.page_ids, -1)
    page_ids = page_ids.at[:, 0].set(jnp.arange(2, dtype=jnp.int32))
    run = jax.jit(parts.forward, compiler_options=engines.FAST_COMPILE)
    for places in PASSES:
        cells = [(slot, place) for slot in (0, 1) for place in places[slot]]
        cells += [(0, -1)] * (10 - len(cells))
        rows = Rows(
            token=jnp.asarray([KNOWN[slot][place] for slot, place in cells], jnp.int32),
            position=jnp.asarray([place for _, place in cells], jnp.int32),
            slot=jnp.asarray([slot for slot, _ in cells], jnp.int32),
            page_ids=page_ids,
            logit_rows=jnp.zeros((1,), jnp.int32),
        )
        pages = run(parts.params, pages, rows).pages
    tokens = np.zeros(state.sequences.tokens.shape, np.int32)
    for row, context in enumerate(KNOWN):
        tokens[row, : len(context)] = context
    return state._replace(
        pages=pages,
        table=state.table._replace(page_ids=page_ids),
        sequences=state.sequences._replace(tokens=jnp.asarray(tokens)),
    ).with_slots(
        state.slots._replace(
            sequence=jnp.arange(2, dtype=jnp.int32),
            num_tokens=jnp.asarray([len(context) for context in KNOWN], jnp.int32),
        )
    )


def drafted(
    parts: EngineParts, speculation: Speculation | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, np.ndarray]:
    """Returns drafts `[slots, drafts]`, and the logits that they were chosen from."""
    logits_by_step: list[np.ndarray] = []
    rank = draws.shared_noise_logits

    def record(logits: Any, *how: Any) -> Any:
        jax.debug.callback(lambda x: logits_by_step.append(np.asarray(x)), logits)
        return rank(logits, *how)

    monkeypatch.setattr(draws, "shared_noise_logits", record)
    assert speculation is not None
    propose = jax.jit(
        speculation.drafter.propose,
        static_argnames="config",
        compiler_options=engines.FAST_COMPILE,
    )
    granted = jnp.full((2,), NUM, jnp.int32)
    state = state_after_passes(parts)
    _, _, drafts = propose(parts.params, (), state, granted, config=BOUNDS)
    jax.effects_barrier()
    assert drafts.num.tolist() == [NUM, NUM]
    assert len(logits_by_step) == NUM
    return np.asarray(drafts.tokens), np.stack(logits_by_step, axis=1)


@pytest.mark.parametrize("num_modules", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_drafts_are_those_of_the_reference(
    num_modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module drafts all tokens; of two modules, the second one drafts two."""
    model = dataclasses.replace(MODEL, num_ahead_layers=num_modules)
    weights = engines.params(model)
    drafts, logits = drafted(*parts_of(model, weights), monkeypatch)
    for slot, context in enumerate(KNOWN):
        draft_tokens = drafts[slot].tolist()
        wanted = ahead_reference.reference_draft_logits(
            weights, context, draft_tokens, model
        )
        np.testing.assert_allclose(logits[slot], wanted, rtol=1e-4, atol=1e-4)
        assert draft_tokens == wanted.argmax(axis=1).tolist()


@pytest.mark.slow
def test_first_drafts_of_mixtures_are_those_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With learned positions and norms with biases, too."""
    model = dataclasses.replace(
        MODEL,
        num_ahead_layers=2,
        norm="layer",
        positions="learned",
        experts=Experts(num_experts=4, top_k=2, size=8, num_dense_layers=1),
    )
    weights = init_params(model, jax.random.key(0))
    drafts, logits = drafted(*parts_of(model, weights), monkeypatch)
    for slot, context in enumerate(KNOWN):
        tokens = jnp.asarray([[*context, int(drafts[slot, 0])]], jnp.int32)
        how: Any = {"config": model, "num_ahead": 2}
        outputs = transformer_rows.run_with_ahead(weights, tokens, **how)
        for module in (0, 1):
            wanted = outputs[1 + module].logits[0, len(context) - 1 + module]
            np.testing.assert_allclose(logits[slot, module], wanted, atol=1e-4)


def test_models_without_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ahead_layers=0 must be at least 1"):
        MTPConfig(target=MODEL)
    with pytest.raises(ValueError, match="not num_ahead_layers=0"):
        parts_of(MODEL, engines.params())
