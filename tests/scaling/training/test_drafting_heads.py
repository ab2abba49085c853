"""Training of heads: inputs, loss and score, against slow loops."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import init_params, run_sequences
from jaxkv.speculation import EagleConfig, MedusaConfig, head_logits
from scaling.corpora import CorpusConfig, open_corpus
from scaling.training import TrainConfig, drafting_heads
from tests.support import engines, texts
from tests.support.engines import MODEL
from tests.support.impatience import Stopping
from tests.support.shapes import SMALL

DEPTH = 3
HEADS: dict[str, Any] = {
    "medusa": MedusaConfig(target=MODEL, num_heads=DEPTH),
    "eagle": EagleConfig(target=MODEL, taps=(0, 2)),
}


def weights_of(heads: Any) -> Any:
    rng = np.random.default_rng(4)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype),
        heads.param_shapes(),
    )


@functools.cache
def guessed_texts(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts that the heads partly guess, their guesses, and the model's predictions."""
    heads = HEADS[kind]
    rng = np.random.default_rng(6)
    head_params = weights_of(heads)
    target = engines.params()

    @jax.jit
    def guess(tokens: Any) -> Any:
        target_outputs = drafting_heads.read_target(target, tokens, heads)
        guess_logits = drafting_heads.head_guesses(
            head_params, target, tokens, target_outputs, heads=heads, depth=DEPTH
        )
        return guess_logits, target_outputs.logits

    tokens = rng.integers(0, 61, (3, 20)).astype(np.int32)
    for place in range(4, 20):
        guess_logits, _ = map(np.asarray, guess(tokens))
        best = guess_logits[rng.integers(DEPTH), :, place - 1].argmax(-1)
        tokens[:, place] = np.where(rng.random(3) < 0.7, best, tokens[:, place])
    return tokens, *map(np.asarray, guess(tokens))


def test_guesses_of_medusa_are_for_the_token_after_each_place() -> None:
    """Guess d of position q is that of head d + 1, d + 1 positions earlier."""
    tokens, guess_logits, logits = guessed_texts("medusa")
    heads = HEADS["medusa"]
    expected = engines.full_logits(engines.params(), tokens, config=MODEL)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    model = models.merge(MODEL, engines.params())
    states = run_sequences(model, jnp.asarray(tokens)).last.T
    every = head_logits(
        weights_of(heads), engines.params(), states, config=heads
    ).reshape(DEPTH, *tokens.shape, -1)
    for depth in range(DEPTH):
        for place in range(depth + 1, tokens.shape[1]):
            earlier = every[depth, :, place - depth - 1]
            np.testing.assert_allclose(
                guess_logits[depth, :, place], earlier, atol=1e-5
            )


@pytest.mark.parametrize("start", [1, 6])
@pytest.mark.parametrize("kind", HEADS)
def test_the_score_equals_steps_of_decoding(kind: str, start: int) -> None:
    tokens, guess_logits, _ = guessed_texts(kind)
    best = np.argsort(-guess_logits, axis=-1, kind="stable")[..., :4]
    hits = np.zeros((DEPTH, 4))
    num_steps = 0
    for row, text in enumerate(tokens.tolist()):
        num_known = start + 1
        while num_known + DEPTH <= len(text):
            drafts = [best[d, row, num_known - 1 + d].tolist() for d in range(DEPTH)]
            right = [
                [x == text[num_known + d] for x in candidates]
                for d, candidates in enumerate(drafts)
            ]
            hits += right
            num_steps += 1
            num_known += 1
            for flags in right:
                if not flags[0]:
                    break
                num_known += 1
    assert num_steps > 20
    assert hits[:, 0].sum() > 0
    rates = drafting_heads.acceptance_rates(
        weights_of(HEADS[kind]),
        engines.params(),
        tokens,
        heads=HEADS[kind],
        depth=DEPTH,
        num_ranks=4,
        start=start,
        batch_size=2,
    )
    np.testing.assert_allclose(rates, hits / num_steps, atol=1e-9)


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_equals_a_loop(kind: str) -> None:
    tokens, *both = guessed_texts(kind)
    guess_logits, logits = (x.astype(np.float64) for x in both)
    law = np.exp(logits - logits.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    log = guess_logits - guess_logits.max(-1, keepdims=True)
    log -= np.log(np.exp(log).sum(-1, keepdims=True))
    expected = [
        -(law * log[depth])[:, depth + 1 :].sum(-1).mean() for depth in range(DEPTH)
    ]
    loss = drafting_heads.head_loss(
        weights_of(HEADS[kind]),
        engines.params(),
        jnp.asarray(tokens),
        heads=HEADS[kind],
        depth=DEPTH,
        decay=0.5,
    )
    assert float(loss) == pytest.approx(np.dot([4, 2, 1], expected) / 7, rel=1e-4)


LEARNT = dataclasses.replace(SMALL, num_layers=2)


def recipe(pattern: str, num_steps: int) -> drafting_heads.HeadRecipe:
    run = TrainConfig(
        model=LEARNT,
        corpus=CorpusConfig(pattern=pattern, held_out=0.2),
        batch_size=4,
        seq_len=24,
        num_steps=num_steps,
        warmup_steps=2,
        cooldown_steps=0,
        learning_rate=2e-2,
        report_every=num_steps // 4,
    )
    return drafting_heads.HeadRecipe(run=run, depth=2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", HEADS)
def test_heads_learn_and_the_model_does_not(kind: str, tmp_path: Path) -> None:
    heads = dataclasses.replace(HEADS[kind], target=LEARNT)
    how = recipe(texts.write_functions(tmp_path / "text"), 40)
    corpus = open_corpus(how.run.corpus)
    # A model with predictions: its last states are those of its embeddings.
    target = init_params(LEARNT, jax.random.key(1))
    target["embed"]["weight"] *= 20
    before = jax.tree.map(np.array, target)
    head_run = drafting_heads.train_heads(how, heads, target, corpus)
    assert head_run.status == "done"
    assert [line["step"] for line in head_run.curve] == [10, 20, 30, 40]
    assert head_run.curve[-1]["tokens"] == 40 * 4 * 24
    assert head_run.curve[-1]["loss"] < 0.9 * head_run.curve[0]["loss"]
    jax.tree.map(np.testing.assert_array_equal, before, target)
    again = drafting_heads.train_heads(how, heads, target, corpus)
    jax.tree.map(np.testing.assert_array_equal, head_run.params, again.params)


def test_a_stopped_run_has_its_status(tmp_path: Path) -> None:
    heads = dataclasses.replace(HEADS["medusa"], target=LEARNT)
    how = recipe(texts.write_functions(tmp_path / "text"), 40)
    target = init_params(LEARNT, jax.random.key(1))
    corpus = open_corpus(how.run.corpus)
    head_run = drafting_heads.train_heads(
        how, heads, target, corpus, progress=Stopping(0)
    )
    assert (head_run.status, head_run.curve) == ("stopped", [])


@pytest.mark.parametrize(("depth", "decay"), [(0, 0.8), (1, 0.0), (1, 1.5)])
def test_invalid_recipes_are_refused(depth: int, decay: float) -> None:
    run = TrainConfig(model=SMALL, seq_len=24)
    with pytest.raises(ValueError, match="must be"):
        drafting_heads.HeadRecipe(run=run, depth=depth, decay=decay)


def test_losses_are_means_and_steps_scaled_by_the_learning_rate(
    tmp_path: Path,
) -> None:
    heads = dataclasses.replace(HEADS["medusa"], target=LEARNT)
    how = recipe(texts.write_functions(tmp_path / "text"), 8)
    target = init_params(LEARNT, jax.random.key(1))
    head_run = drafting_heads.train_heads(
        how, heads, target, open_corpus(how.run.corpus)
    )
    before = heads.init_params(jax.random.key(how.run.seed))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(head_run.params), strict=True)
    moved = max(np.abs(new - old).max() for old, new in pairs)
    assert 0 < moved < 8 * 2 * how.run.learning_rate
    # New models predict all tokens alike, and each report is of two steps.
    uniform = math.log(LEARNT.vocab_size)
    losses = [line["loss"] for line in head_run.curve]
    assert losses == pytest.approx([uniform] * 4, rel=0.1)
