"""Consistency: the loss and its gradient against loops, records, and fewer steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from scaling.corpora import streams
from scaling.costs import Layout
from scaling.training import TrainConfig, TrainState, make_records, train_in_memory
from scaling.training.consistency import Consistency, Trajectory
from tests.support import engines
from tests.support.engines import MODEL

OBJECTIVE = Consistency(prompt_tokens=3, block_tokens=4, text_tokens=5, text_weight=0.5)


@jax.jit
def law_of(params: Any, tokens: Any, place: Any) -> Any:
    logits = models.logits(params, tokens, config=MODEL)
    return jax.nn.log_softmax(logits[0, place])


def law_behind(params: Any, text: list[int]) -> Any:
    """Log-probabilities of the token after a text, of a separate forward pass."""
    tokens = np.zeros((1, 8), np.int32)  # a causal model ignores later padding
    tokens[0, : len(text)] = text
    return law_of(params, tokens, len(text) - 1)


def loss_slowly(params: Any, fixed: Any, rows: np.ndarray) -> tuple[Any, Any]:
    """The loss position by position, with separate texts; `fixed` gives the targets."""
    far = []
    text = []
    for row in rows.tolist():
        prompt = row[:3]
        end = row[3:7]
        guess = row[7:11]
        words = row[11:]
        for place in range(4):
            expected = law_behind(fixed, prompt + end[:place])
            logprobs = law_behind(params, prompt + guess[:place])
            far.append(jnp.sum(jnp.exp(expected) * (expected - logprobs)))
        for place in range(1, 5):
            text.append(-law_behind(params, words[:place])[words[place]])
    far = jnp.stack(far).mean()
    text = jnp.stack(text).mean()
    return far + 0.5 * text, far


@pytest.mark.thorough
def test_the_loss_and_its_gradient_are_those_of_a_loop() -> None:
    """No gradient goes through the targets."""
    rng = np.random.default_rng(0)
    params = engines.params()
    rows = rng.integers(0, MODEL.vocab_size, (2, OBJECTIVE.record_tokens))
    rows[1, 7:9] = rows[1, 3:5]  # a partly correct guess

    def actual(params: Any) -> Any:
        tokens = jnp.asarray(rows, jnp.int32)
        return OBJECTIVE(params, tokens, tokens, model=MODEL)

    slowly = functools.partial(loss_slowly, fixed=params, rows=rows)
    (loss, far), grads = jax.jit(jax.value_and_grad(actual, has_aux=True))(params)
    (expected, its_far), others = jax.value_and_grad(slowly, has_aux=True)(params)
    np.testing.assert_allclose((loss, far), (expected, its_far), rtol=1e-5)
    assert float(far) > 0.1
    for one, other in zip(*map(jax.tree.leaves, (grads, others)), strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * scale + 1e-7)


def test_records_are_read_whole_each_once_an_epoch() -> None:
    text = np.arange(50, dtype=np.uint16)
    trajectories = [
        Trajectory([100 + i] * 3, np.array([[i] * 4, [9] * 4, [60 + i] * 4]))
        for i in range(6)
    ]
    sizes: Any = {"text_tokens": 5, "seed": 1}
    stream = make_records(trajectories, text, num_guesses=9, **sizes)
    size = OBJECTIVE.record_tokens
    rows = stream.reshape(-1, size)
    # The final block is not an intermediate guess.
    assert sorted(zip(rows[:, 0], rows[:, 7], strict=True)) == sorted(
        (100 + i, guess) for i in range(6) for guess in (i, 9)
    )
    assert (rows[:, 3:7] == rows[:, :1] - 40).all()
    assert (np.diff(rows[:, 11:], axis=1) == 1).all()
    assert len(make_records(trajectories, text, num_guesses=1, **sizes)) == 6 * size
    windows = [
        np.asarray(
            streams.draw_windows(
                jnp.asarray(stream),
                jnp.int32(3),
                jnp.int32(i),
                batch_size=4,
                seq_len=size,
                aligned=True,
            )
        )[:, :size]
        for i in range(3)
    ]
    assert {*map(tuple, np.concatenate(windows))} == {*map(tuple, rows)}


def constant_texts(num: int, size: int, seed: int) -> np.ndarray:
    """Texts that repeat one token each, never 0."""
    rng = np.random.default_rng(seed)
    return np.repeat(rng.integers(1, 9, (num, 1)), size, axis=1).astype(np.uint16)


def trained(config: TrainConfig, stream: np.ndarray, **how: Any) -> Any:
    held_out = stream[: config.seq_len + 1]
    corpus = streams.make_corpus(stream, held_out, vocab_size=257, name="a toy")
    return train_in_memory(config, corpus, **how)


def guesses_of(params: Any, prompts: np.ndarray, num: int, model: Any) -> np.ndarray:
    """Guesses of every iteration, by the definition."""
    guesses = [np.zeros((len(prompts), num), np.int32)]
    for _ in range(num + 1):
        tokens = np.concatenate([prompts, guesses[-1]], axis=1).astype(np.int32)
        logits = models.logits(params, jnp.asarray(tokens), config=model)
        guesses.append(np.argmax(logits, axis=-1)[:, prompts.shape[1] - 1 : -1])
    return np.stack(guesses, axis=1).astype(np.int32)


def steps_of(guesses: np.ndarray) -> float:
    """Returns the mean number of iterations per block until the guesses are fixed."""
    same = (guesses[:, 1:] == guesses[:, :-1]).all(axis=2)
    return float(np.argmax(same, axis=1).mean())


@pytest.mark.slow
def test_a_model_learns_to_predict_a_block_in_one_iteration() -> None:
    """In texts of one token, the model learns to ignore the wrong guesses."""
    model = dataclasses.replace(MODEL, vocab_size=257, num_layers=1)
    objective = Consistency(prompt_tokens=4, block_tokens=8, text_tokens=12)
    config = TrainConfig(
        model=model,
        batch_size=16,
        seq_len=12,
        num_steps=80,
        learning_rate=1e-2,
        warmup_steps=10,
        cooldown_steps=40,
        report_every=20,
    )
    text = constant_texts(400, 24, 0).reshape(-1)
    before = trained(config, text)
    prompts = constant_texts(24, 4, 1)
    guesses = guesses_of(before.params, prompts, 8, model)
    took = steps_of(guesses)
    stream = make_records(
        [*map(Trajectory, prompts.tolist(), guesses)],
        text,
        num_guesses=8,
        text_tokens=12,
        seed=0,
    )
    start = TrainState(before.params, before.state.moments, jnp.int32(0))
    after = trained(
        dataclasses.replace(config, seq_len=objective.record_tokens),
        stream,
        start=start,
        objective=objective,
    )
    again = steps_of(guesses_of(after.params, prompts, 8, model))
    losses = [line["loss"] for line in after.curve]
    assert losses[-1] < 0.3 * losses[0]
    assert took > 3
    assert again < 0.6 * took


def test_invalid_records_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens=0 must be at least 1"):
        Consistency(block_tokens=0)
    with pytest.raises(ValueError, match="text_tokens=1 must be at least 2"):
        Consistency(text_tokens=1)
    with pytest.raises(ValueError, match=r"seq_len=9 must be record_tokens=16"):
        OBJECTIVE.check(9, Layout())
    with pytest.raises(ValueError, match="must be one device"):
        OBJECTIVE.check(16, Layout(data=2))
    same = [Trajectory([1], np.array([[2], [2]]))]
    text = np.arange(9, dtype=np.uint16)
    with pytest.raises(ValueError, match="no trajectory has a guess"):
        make_records(same, text, num_guesses=1, text_tokens=3, seed=0)
    with pytest.raises(ValueError, match="are not whole records of seq_len=4"):
        streams.draw_windows(
            jnp.arange(9, dtype=jnp.uint16),
            jnp.int32(0),
            jnp.int32(0),
            batch_size=1,
            seq_len=4,
            aligned=True,
        )
