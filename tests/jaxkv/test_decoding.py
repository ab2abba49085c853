"""Decoding without a scheduler, inside the caller's program."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import decoding, memory, models
from jaxkv.memory import Pages, make_pages
from jaxkv.models import ModelConfig, PagedForward, make_model_pages, param_shapes
from pallas_kernels import devices
from tests.support import engines
from tests.support.engines import MODEL
from tests.support.mutation import replace

FORWARD = PagedForward(MODEL)
SLOTS = 3
LENGTH = 40
PAGE_SIZE = 4


def make_cache(num_pages: int = 30) -> decoding.Cache:
    pages = make_pages(
        num_layers=MODEL.num_layers,
        num_pages=num_pages,
        num_kv_heads=MODEL.num_kv_heads,
        page_size=PAGE_SIZE,
        head_dim=MODEL.head_dim,
        dtype="float32",
    )
    pages = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)
    return decoding.init_cache(pages, max_slots=SLOTS, max_length=LENGTH)


compiled = functools.partial(jax.jit)
prefill = compiled(decoding.prefill, static_argnames="forward")
decode_step = compiled(decoding.decode_step, static_argnames="forward")


def assert_sound(cache: decoding.Cache) -> None:
    counts = memory.violations(
        cache.pool, cache.table, cache.table.length > 0, page_size=PAGE_SIZE
    )
    assert not any(np.asarray(count).any() for count in counts)


def random_tokens(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, MODEL.vocab_size, (SLOTS, LENGTH)).astype(np.int32)


@functools.cache
def expected(seed: int = 0) -> np.ndarray:
    """Returns the logits [slots, length, vocab] of one plain forward pass."""
    rows = []
    for row in random_tokens(seed):
        # A new array: JAX may still read it when the next one is filled.
        tokens = np.zeros((1, MODEL.max_positions), np.int32)
        tokens[0, :LENGTH] = row
        logits = engines.full_logits(engines.params(), tokens, config=MODEL)
        rows.append(logits[0, :LENGTH])
    return np.stack(rows)


@pytest.mark.thorough
def test_chunked_prefill_then_decode() -> None:
    tokens = random_tokens()
    cache = make_cache()
    params = engines.params()
    done = np.zeros(SLOTS, np.int32)
    for lengths in ([8, 0, 3], [1, 7, 0], [0, 8, 8], [8, 2, 8]):
        piece = np.zeros((SLOTS, 8), np.int32)
        for slot, num in enumerate(lengths):
            piece[slot, :num] = tokens[slot, done[slot] : done[slot] + num]
        logits, cache, enough = prefill(
            params, cache, piece, np.array(lengths, np.int32), forward=FORWARD
        )
        assert enough
        done += lengths
        for slot in np.flatnonzero(lengths):
            want = expected()[slot, done[slot] - 1]
            np.testing.assert_allclose(logits[slot], want, rtol=0, atol=1e-4)
        assert cache.table.length.tolist() == done.tolist()
        assert_sound(cache)
    for active in ([1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]):
        fed = tokens[np.arange(SLOTS), done]
        logits, cache, enough = decode_step(
            params, cache, fed, forward=FORWARD, active=np.array(active, bool)
        )
        assert enough
        done += active
        for slot in np.flatnonzero(active):
            want = expected()[slot, done[slot] - 1]
            np.testing.assert_allclose(logits[slot], want, rtol=0, atol=1e-4)
        assert cache.table.length.tolist() == done.tolist()
        assert_sound(cache)


@pytest.mark.parametrize("lengths", [[8, 5, 0], [3, 8, 1]])
def test_too_few_pages_change_no_slot(lengths: list[int]) -> None:
    params = engines.params()
    tokens = random_tokens()[:, :8]
    cache = make_cache(num_pages=2)
    one = np.array([0, 3, 0], np.int32)
    _, cache, enough = prefill(params, cache, tokens, one, forward=FORWARD)
    assert enough
    before = jax.tree.map(np.asarray, cache)
    _, cache, enough = prefill(
        params, cache, tokens, np.array(lengths, np.int32), forward=FORWARD
    )
    assert not enough
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, cache))


def test_full_slot_changes_no_slot() -> None:
    cache = make_cache()
    tokens = random_tokens()
    full = cache._replace(
        table=cache.table._replace(length=jnp.asarray([0, LENGTH, 0], jnp.int32))
    )
    _, after, enough = decode_step(
        engines.params(), full, tokens[:, 0], forward=FORWARD
    )
    assert not enough
    assert after.table.length.tolist() == [0, LENGTH, 0]


def test_a_second_prefill_continues_the_first() -> None:
    tokens = random_tokens()
    cache = make_cache()
    for begin in (0, 8):
        logits, cache, enough = prefill(
            engines.params(),
            cache,
            tokens[:, begin : begin + 8],
            np.full(SLOTS, 8, np.int32),
            forward=FORWARD,
        )
        assert enough
        np.testing.assert_allclose(logits, expected()[:, begin + 7], rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_inside_jit_and_scan() -> None:
    @compiled
    def answer(params, cache, prompts, lengths):
        logits, cache, enough = decoding.prefill(
            params, cache, prompts, lengths, forward=FORWARD
        )

        def body(carry, _):
            logits, cache, enough = carry
            token = jnp.argmax(logits, axis=1).astype(jnp.int32)
            logits, cache, more = decoding.decode_step(
                params, cache, token, forward=FORWARD
            )
            return (logits, cache, enough & more), token

        carry = (logits, cache, enough)
        (_, cache, enough), tokens = jax.lax.scan(body, carry, length=12)
        return tokens.T, cache, enough

    prompts = random_tokens(4)[:, :8]
    lengths = np.array([8, 1, 5], np.int32)
    tokens, cache, enough = answer(engines.params(), make_cache(), prompts, lengths)
    assert enough
    assert_sound(cache)
    asks = [
        engines.Ask(slot, prompts[slot, :num].tolist(), GREEDY)
        for slot, num in enumerate(lengths)
    ]
    alone = engines.plain(asks, CONFIG)
    assert [alone[slot][0] for slot in range(SLOTS)] == tokens.tolist()


GREEDY = engines.Sampling.greedy(max_tokens=12)
CONFIG = engines.EngineConfig(max_length=MODEL.max_positions, submit_width=4)


def test_cache_longer_than_the_models_positions() -> None:
    learned = dataclasses.replace(MODEL, positions="learned", max_positions=36)
    cache = jax.eval_shape(make_cache)
    tokens = jnp.zeros(SLOTS, jnp.int32)

    def step(config: ModelConfig) -> None:
        call = functools.partial(decoding.decode_step, forward=PagedForward(config))
        jax.eval_shape(call, param_shapes(config), cache, tokens)

    with pytest.raises(ValueError, match="cache_length=37 must be at most 36, the mod"):
        step(learned)
    step(dataclasses.replace(learned, max_positions=37))
    with pytest.warns(UserWarning, match="cache_length=37 is past 36") as said:
        step(dataclasses.replace(MODEL, max_positions=36))
    assert len(said) == 1


# Derivatives

ONE_LAYER = dataclasses.replace(MODEL, num_layers=1, num_q_heads=2, window=6)


def weighted_logits_of_cache(params: Any, weights: Any) -> jax.Array:
    """Returns a weighted sum of the logits of chunked prompts and one decode step."""
    cache = make_cache()
    layer = jax.tree.map(lambda x: x[:1], cache.pages)
    cache = cache._replace(pages=layer)
    total = jnp.zeros(())
    forward = PagedForward(ONE_LAYER)
    tokens = jnp.asarray(random_tokens())
    for begin, end, weight in ((0, 4, weights[0]), (4, 8, weights[1])):
        lengths = jnp.full((SLOTS,), end - begin, jnp.int32)
        logits, cache, _ = decoding.prefill(
            params, cache, tokens[:, begin:end], lengths, forward=forward
        )
        total += jnp.sum(logits * weight)
    logits, *_ = decoding.decode_step(params, cache, tokens[:, 8], forward=forward)
    return total + jnp.sum(logits * weights[2])


def weighted_logits_of_sequences(params: Any, weights: Any) -> jax.Array:
    """Returns the same sum by one pass over whole sequences."""
    tokens = jnp.asarray(random_tokens()[:, :9])
    logits = models.logits(params, tokens, config=ONE_LAYER)
    return jnp.einsum("stv,tsv->", logits[:, np.array([3, 7, 8])], weights)


@pytest.mark.slow
def test_gradients_equal_whole_sequences() -> None:
    """Compares `jax.grad` and `jax.jvp`; places that no row sees hold NaN."""
    params = engines.params(ONE_LAYER)
    shape = (3, SLOTS, ONE_LAYER.vocab_size)
    weights = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    wanted = jax.jit(jax.grad(weighted_logits_of_sequences))(params, weights)

    @jax.jit
    def differentiated(params: Any) -> Any:
        value, pull = jax.vjp(weighted_logits_of_cache, params, weights)
        along = jax.jvp(
            lambda x: weighted_logits_of_cache(x, weights), (params,), (wanted,)
        )
        return value, pull(jnp.ones(()))[0], along

    value, grads, (same, slope) = differentiated(params)
    assert value == same
    np.testing.assert_allclose(
        value, weighted_logits_of_sequences(params, weights), rtol=1e-5
    )
    squares = 0.0
    for x, y in zip(*map(jax.tree.leaves, (grads, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(abs(y).max()))
        squares += float((np.asarray(y, np.float64) ** 2).sum())
    np.testing.assert_allclose(slope, squares, rtol=1e-4)


def test_unsupported_gradients_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = engines.EngineConfig(
        num_pages=4, page_size=16, max_length=MODEL.max_positions
    )
    tokens = jnp.zeros((1,), jnp.int32)

    def differentiated(pages: Pages) -> None:
        cache = decoding.init_cache(pages, max_slots=1, max_length=32)

        def loss(params: Any) -> jax.Array:
            return decoding.decode_step(params, cache, tokens, forward=FORWARD)[0].sum()

        jax.eval_shape(jax.grad(loss), engines.params())

    eight = dataclasses.replace(config, kv_dtype="int8")
    with pytest.raises(
        ValueError, match="kv_dtype='int8' has no gradient; kv_dtype mu"
    ):
        differentiated(make_model_pages(MODEL, eight))
    half = make_model_pages(MODEL, config, dtype="bfloat16")
    h200 = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: h200)
    with pytest.raises(
        ValueError, match="dtype='bfloat16' of K and V must be 'float32'"
    ):
        differentiated(half)
