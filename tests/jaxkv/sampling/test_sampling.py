"""Draws follow their distribution, and no row depends on its neighbours."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import sampling
from jaxkv.sampling import (
    Params,
    Sampling,
    greedy_params,
    random_keys,
    sampler,
    top_k,
)
from tests.support.marks import one_quick
from tests.support.sampled_laws import (
    chi_square,
    kept_slowly,
    law_slowly,
    params_of,
    penalised_slowly,
)

pytestmark = pytest.mark.usefixtures("full_optimization")

INF = np.inf


@functools.cache
def jitted(name: str, **static: Any) -> Any:
    return jax.jit(functools.partial(getattr(sampler, name), **static))


def rows_of(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[np.asarray(rows)]), tree)


# Parameters of users


@pytest.mark.parametrize(
    ("fields", "range_"),
    [
        ({"temperature": -0.1}, ">= 0 and finite"),
        ({"top_p": 1.01}, "in (0, 1]"),
        ({"n": 0}, "at least 1"),
        ({"best_of": 2, "n": 3}, "None or at least n=3"),
        ({"beam_width": 0}, "None or at least n=1"),
        ({"beam_width": 2, "n": 3}, "None or at least n=3"),
        ({"length_penalty": 11.0}, "in [-10, 10]"),
        ({"early_stopping": "now"}, "True, False"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": ("a", "\ud800")}, "a tuple of strings of valid Unicode, none"),
    ],
)
def test_field_errors_state_the_range(fields: dict[str, Any], range_: str) -> None:
    name, value = next(iter(fields.items()))
    line = f"{name}={value!r} must be {range_}"
    with pytest.raises(ValueError, match=re.escape(line)):
        Sampling(**fields)


@pytest.mark.parametrize("field", [{"best_of": 2}, {"presence_penalty": 1.0}])
def test_beam_search_refuses_sampling_parameters(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="beam search takes no best_of, penalties"):
        Sampling(beam_width=2, **field)


def test_range_bounds_are_accepted() -> None:
    Sampling(temperature=0.0, top_k=1, top_p=1.0, min_p=1.0, seed=2**64 - 1)
    greedy = Sampling.greedy(max_tokens=3, logprobs=0)
    assert greedy == Sampling(temperature=0.0, max_tokens=3, logprobs=0)
    assert hash(greedy) == hash(dataclasses.replace(greedy))


def test_make_params_stacks_requests() -> None:
    requests = [
        Sampling(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5),
        Sampling.greedy(presence_penalty=0.25, frequency_penalty=0.75),
    ]
    params = sampling.make_params(requests, [(1, 2), (3, 4)], [0, 5])
    columns = {name: column.tolist() for name, column in params._asdict().items()}
    assert columns == {
        "temperature": [1.0, 0.0],
        "top_k": [3, 0],
        "top_p": [0.5, 1.0],
        "min_p": [np.float32(0.1), 0.0],
        "repetition": [1.5, 1.0],
        "presence": [0.0, 0.25],
        "frequency": [0.0, 0.75],
        "key": [[1, 2], [3, 4]],
        "sample": [0, 5],
    }
    blank = greedy_params(3)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), blank) == jax.tree.map(
        lambda x: ((3, *x.shape[1:]), x.dtype), params
    )
    assert not blank.temperature.any()


# Keys and noise


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_keys_are_those_of_jax(seed: int) -> None:
    key = jax.random.key(seed, impl="threefry2x32")
    request_key = random_keys.request_key(seed, engine_seed=3, request_id=5)
    np.testing.assert_array_equal(request_key, jax.random.key_data(key))
    np.testing.assert_array_equal(
        random_keys.request_key(None, engine_seed=seed, request_id=2**32 - 1),
        jax.random.key_data(jax.random.fold_in(key, np.uint32(2**32 - 1))),
    )
    sample = jnp.array([[0, 3]], jnp.int32)
    position = jnp.array([[7, 9]], jnp.int32)
    draw_keys = random_keys.draw_key(
        jnp.broadcast_to(request_key, (1, 2, 2)), sample, position, random_keys.ACCEPT
    )
    for index in range(2):
        folded = key
        for data in (sample[0, index], position[0, index], random_keys.ACCEPT):
            folded = jax.random.fold_in(folded, data)
        np.testing.assert_array_equal(draw_keys[0, index], jax.random.key_data(folded))


def test_64_bit_seeds() -> None:
    request_key = random_keys.request_key(2**64 - 2, engine_seed=0, request_id=0)
    assert request_key.tolist() == [2**32 - 1, 2**32 - 2]
    for bad in ({"seed": -1}, {"seed": None, "engine_seed": 2**64}, {"request_id": -1}):
        fields: dict[str, Any] = {"seed": 0, "engine_seed": 0, "request_id": 0} | bad
        with pytest.raises(ValueError, match="must be in"):
            random_keys.request_key(**fields)


def test_noise_is_a_function_of_key_and_token_id() -> None:
    keys = jnp.array([[1, 2], [3, 4]], jnp.uint32)
    ids = jnp.arange(5000, dtype=jnp.int32)[None, :]
    gumbel = jax.jit(functools.partial(random_keys.gumbel, dtype=jnp.float32))
    noise = gumbel(keys, ids)
    picked = jnp.asarray(np.random.default_rng(0).integers(0, 5000, (2, 64)), jnp.int32)
    np.testing.assert_array_equal(
        gumbel(keys, picked), jnp.take_along_axis(noise, picked, axis=1)
    )
    key = jax.random.wrap_key_data(keys[1], impl="threefry2x32")
    uniform = (np.asarray(jax.random.bits(key, (5000,)), np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(noise[1], -np.log(-np.log1p(-uniform)), atol=1e-5)
    # The mean is Euler's constant, the variance pi^2 / 6.
    np.testing.assert_allclose(noise.mean(), 0.5772, atol=0.04)
    np.testing.assert_allclose(noise.var(), 1.6449, atol=0.1)


def test_uniform_probabilities() -> None:
    keys = jnp.array([[1, 2], [3, 4]], jnp.uint32)
    ids = jnp.arange(50_000, dtype=jnp.int32)[None, :]
    uniform = jax.jit(random_keys.uniform)(keys, ids)
    assert uniform.dtype == jnp.float32
    assert ((uniform >= 0) & (uniform < 1)).all()
    for chance in (0.001, 0.3, 0.9):
        share = np.mean(uniform < chance)
        np.testing.assert_allclose(share, chance, atol=0.005 * chance**0.5)
    # The counters of the other noise, and the largest of them are not rounded to 1.
    key = jax.random.wrap_key_data(keys[1], impl="threefry2x32")
    bits = np.asarray(jax.random.bits(key, (50_000,)), np.float64)
    np.testing.assert_allclose(uniform[1], bits / 2**32, rtol=1e-6)
    largest = jnp.array([[2**32 - 1, 2**32 - 128, 2**32 - 129, 0]], jnp.uint32)
    below = random_keys._below_one(largest.astype(jnp.float32) * 2.0**-32)
    assert (below < 1).tolist() == [[True] * 4]
    assert below[0, 3] == 0


# Penalties


def test_penalties_equal_plain_python() -> None:
    rng = np.random.default_rng(0)
    requests = [
        Sampling(),
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.8),
        Sampling(presence_penalty=0.7),
        Sampling(frequency_penalty=-0.4),
        Sampling(repetition_penalty=2.0, presence_penalty=-1.0, frequency_penalty=0.5),
    ]
    rows = len(requests)
    vocab = 11
    max_length = 40
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    logits[:, 3] = -INF
    tokens = rng.integers(-2, vocab + 3, (rows, max_length)).astype(np.int32)
    num_tokens = np.array([40, 40, 31, 5, 39, 22], np.int32)
    prompt_length = np.array([3, 40, 9, 0, 20, 22], np.int32)
    arrays = [jnp.asarray(x) for x in (logits, tokens, prompt_length, num_tokens)]
    result = jitted("penalise")(*arrays, params_of(requests))
    for row, request in enumerate(requests):
        slow = penalised_slowly(
            logits[row], tokens[row], prompt_length[row], num_tokens[row], request
        )
        np.testing.assert_allclose(result[row], slow, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(result[0], logits[0])
    off = jitted("penalise")(*arrays, params_of([Sampling()] * rows))
    np.testing.assert_array_equal(off, logits)


# Cut-offs


CUTS = [
    Sampling(),
    Sampling.greedy(top_k=5, top_p=0.5),
    Sampling(top_k=1),
    Sampling(top_k=3),
    Sampling(top_k=40, temperature=0.3),
    Sampling(top_k=10**6),
    Sampling(top_p=0.1),
    Sampling(top_p=0.5, temperature=3.0),
    Sampling(top_p=0.9),
    Sampling(top_p=0.999),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.05),
    Sampling(min_p=1.0),
    Sampling(top_k=50, top_p=0.7, min_p=0.01),
    Sampling(top_k=7, top_p=0.95, temperature=100.0),
    Sampling(top_k=90, top_p=0.97, min_p=0.2, temperature=0.05),
]


def hard_rows(vocab: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=vocab) * 3
    yield normal
    yield np.round(normal)  # ties everywhere
    yield np.zeros(vocab)  # ties only
    yield np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    yield np.where(np.arange(vocab) == vocab // 2, 1e30, normal)
    yield np.where(rng.random(vocab) < 0.7, -INF, normal)
    yield np.where(np.arange(vocab) == vocab - 1, 0.0, -INF)
    yield np.full(vocab, -INF)
    yield np.where(np.arange(vocab) == 0, np.nan, normal)
    yield np.where(np.arange(vocab) % 3 == 1, INF, normal)
    yield -np.log(np.arange(1.0, vocab + 1))  # heavy tail, sorted
    yield np.linspace(-1e-3, 1e-3, vocab)  # almost flat
    yield np.repeat(normal, 2)[:vocab] * 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab",
    [300, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 4099, 50257))],
)
def test_cut_offs_equal_a_full_sort(vocab: int) -> None:
    cases = [(row, cut) for row in hard_rows(vocab, vocab) for cut in CUTS]
    logits = jnp.asarray(np.stack([row for row, _ in cases]).astype(np.float32))
    params = params_of([cut for _, cut in cases])
    few, wide_mask = (
        jitted("keep_mask", max_candidates=n)(logits, params) for n in (4, 64)
    )
    # Either algorithm keeps the same tokens of a row.
    np.testing.assert_array_equal(few, wide_mask)
    excused = 0
    for row, ours, (_, cut) in zip(logits, few, cases, strict=True):
        mask, sure = kept_slowly(np.asarray(row), cut)
        wrong = mask != np.asarray(ours)
        # Float32 may differ only where rounding decides.
        assert (sure[wrong] < 2e-6).all(), (cut, np.flatnonzero(wrong))
        excused += wrong.any()
        if cut.top_p == 1 and cut.min_p == 0:
            assert not wrong.any(), cut
    assert excused <= 0.05 * len(cases)


# Probabilities


@pytest.mark.thorough
def test_probabilities_equal_numpy() -> None:
    vocab = 300
    cases = [(row, cut) for row in hard_rows(vocab, 1) for cut in CUTS[::2]]
    logits = np.stack([row for row, _ in cases]).astype(np.float32)
    params = params_of([cut for _, cut in cases])
    probs = np.asarray(jitted("probabilities")(jnp.asarray(logits), params))
    masks = np.asarray(jitted("keep_mask")(jnp.asarray(logits), params))
    for place, (_, cut) in enumerate(cases):
        row = np.asarray(logits[place])
        law = probs[place]
        mask = masks[place]
        assert not law[~mask].any()
        assert mask.any() or not law.any()
        if cut.temperature == 0:
            np.testing.assert_array_equal(law, mask)
        elif np.isfinite(row).all() and (mask == kept_slowly(row, cut)[0]).all():
            exact = law_slowly(row, cut)
            np.testing.assert_allclose(law, exact, rtol=3e-5, atol=1e-9)
        if mask.any():
            np.testing.assert_allclose(law.sum(dtype=np.float64), 1, rtol=2e-6)


@pytest.mark.thorough
def test_draws_follow_probabilities() -> None:
    draws = 20_000
    vocab = 16
    logits = np.random.default_rng(2).normal(size=vocab).astype(np.float32) * 1.5
    request = Sampling(temperature=1.5, top_k=12, top_p=0.95, min_p=0.02)
    params = rows_of(params_of([request]), [0] * draws)
    law = np.asarray(jitted("probabilities")(logits[None], rows_of(params, [0]))[0])
    assert 0 < (law > 0).sum() < vocab
    batch = jnp.broadcast_to(logits, (draws, vocab))
    samples = jitted("sample")(batch, params, jnp.arange(draws, dtype=jnp.int32))
    observed = np.bincount(samples.token, minlength=vocab)
    assert chi_square(observed, law) > 1e-3
    assert np.abs(observed / draws - law).sum() / 2 < 0.02


@pytest.mark.slow
def test_probabilities_do_not_depend_on_the_batch() -> None:
    logits, params, *_ = one_batch()
    together = jitted("probabilities")(logits, params)
    for rows in (*([row] for row in range(8)), [1, 7], [3, 1, 0, 6, 2]):
        row_probs = jitted("probabilities")(*rows_of((logits, params), rows))
        np.testing.assert_array_equal(row_probs, together[np.array(rows)])


# Draws


LAWS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.5),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.2),
    Sampling(temperature=1.5, top_k=9, top_p=0.9),
    Sampling(temperature=0.7, top_p=0.95, min_p=0.1),
    Sampling(temperature=3.0, top_k=12, top_p=0.97, min_p=0.05),
]


@pytest.mark.thorough
def test_draws_follow_enumerated_distribution() -> None:
    vocab = 16
    draws = 4000
    logits = np.random.default_rng(1).normal(size=vocab).astype(np.float32) * 1.5
    batch = jnp.broadcast_to(logits, (draws, vocab))
    positions = jnp.arange(draws, dtype=jnp.int32)
    # Above the kept tokens of all but the last case: this takes the exact search.
    sample = jitted("sample", max_candidates=10)
    for number, request in enumerate(LAWS):
        params = rows_of(params_of([request], engine_seed=number), [0] * draws)
        samples = sample(batch, params, positions)
        mask, _ = kept_slowly(logits, request)
        weights = np.where(mask, np.exp(logits / np.float32(request.temperature)), 0)
        law = weights / weights.sum()
        ours = jitted("probabilities")(batch[:1], rows_of(params, [0]))[0]
        np.testing.assert_allclose(ours, law, rtol=1e-5, atol=1e-9)
        observed = np.bincount(samples.token, minlength=vocab)
        assert chi_square(observed, law) > 1e-3, request
        assert np.abs(observed / draws - law).sum() / 2 < 0.04, request
        np.testing.assert_allclose(
            samples.logprob, jax.nn.log_softmax(batch)[0, samples.token], atol=1e-5
        )
    assert sample._cache_size() == 1


@pytest.mark.thorough
def test_neighbouring_positions_samples_and_requests_are_independent() -> None:
    # The shapes of the test above, so that no further program is compiled.
    draws = 4000
    vocab = 4
    logits = jnp.full((draws, 16), -INF, jnp.float32).at[:, :vocab].set(0)
    places = jnp.arange(draws, dtype=jnp.int32)
    base = rows_of(params_of([Sampling(seed=11)]), [0] * draws)
    sample = jitted("sample", max_candidates=10)
    first = sample(logits, base, places).token
    others = (
        (base, places + 1),
        (base._replace(sample=base.sample + 1), places),
        (rows_of(params_of([Sampling(seed=12)]), [0] * draws), places),
    )
    for params, positions in others:
        second = sample(logits, params, positions).token
        pairs = np.bincount(np.asarray(first * vocab + second), minlength=vocab**2)
        assert chi_square(pairs, np.full(vocab**2, 1 / vocab**2)) > 1e-3


ONE_BATCH = [
    Sampling(),
    Sampling.greedy(),
    Sampling(top_k=5),
    Sampling(top_p=0.9),  # settled by few candidates only on peaked rows
    Sampling(top_p=0.99, temperature=1.7),
    Sampling(top_k=100, top_p=0.9, seed=99),
    Sampling(min_p=0.02, temperature=0.8),
    Sampling.greedy(seed=5),
]


def one_batch() -> tuple[jax.Array, Params, jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(len(ONE_BATCH), 389)) * rng.choice([1, 5], (8, 1))
    positions = rng.integers(0, 1000, len(ONE_BATCH)).astype(np.int32)
    return (
        jnp.asarray(logits.astype(np.float32)),
        params_of(ONE_BATCH),
        jnp.asarray(positions),
        jnp.ones(len(ONE_BATCH), bool),
    )


def sample(
    logits: Any, params: Params, positions: Any, scored: Any = None, raw: Any = None
) -> sampler.Draw:
    """Compiled once per shape for the tests below."""
    scored = jnp.ones(len(logits), bool) if scored is None else scored
    raw = logits if raw is None else raw
    draw = jitted("sample", max_candidates=8)
    return draw(logits, params, positions, raw=raw, keep_logprobs=scored)


@pytest.mark.thorough
def test_a_row_whose_raw_logits_are_not_finite_is_flagged() -> None:
    logits, params, positions, _ = one_batch()
    raw = np.array(logits)
    raw[1, 13] = INF
    raw[2, 388] = -INF
    raw[5, 7] = np.nan
    raw[6] = np.finfo(np.float32).max
    raw[7] = np.finfo(np.float32).max / 2
    # Infinities that the caller, not the model, set in the logits are valid.
    masked = logits.at[:, 3].set(INF).at[:, 4:50].set(-INF)
    for params_of_all in (params, greedy_params(8)):
        samples = sample(masked, params_of_all, positions, raw=jnp.asarray(raw))
        broken = [row in (1, 2, 5) for row in range(8)]
        assert samples.invalid.tolist() == broken
        assert samples.token.tolist() == [0 if row else 3 for row in broken]


@pytest.mark.thorough
def test_a_row_does_not_depend_on_its_batch() -> None:
    together = sample(*one_batch())
    for row in range(8):
        row_sample = sample(*rows_of(one_batch(), [row]))
        for field, other in zip(row_sample, together, strict=True):
            np.testing.assert_array_equal(field[0], other[row])
    rng = np.random.default_rng(4)
    for _ in range(20):
        # With any other rows, in any order, some of them invalid.
        rows = rng.integers(0, 8, 8)
        logits, params, positions, scored = rows_of(one_batch(), rows)
        broken = rng.random(8) < 0.2
        logits = jnp.where(broken[:, None] & (logits > 1), jnp.nan, logits)
        samples = sample(logits, params, positions, scored)
        np.testing.assert_array_equal(samples.invalid, broken)
        fine = np.flatnonzero(~broken)
        np.testing.assert_array_equal(samples.token[fine], together.token[rows[fine]])
        np.testing.assert_array_equal(
            samples.logprob[fine], together.logprob[rows[fine]]
        )
    assert jitted("sample", max_candidates=8)._cache_size() == 2


def test_greedy_rows_take_the_first_best_token_on_every_path() -> None:
    logits, params, positions, _ = one_batch()
    logits = jnp.round(logits).at[:, 200].set(jnp.max(jnp.round(logits), axis=1))
    mixed = sample(logits, params, positions)
    greedy = sample(logits, greedy_params(8), positions)
    np.testing.assert_array_equal(greedy.token, np.argmax(logits, axis=1))
    for row in (1, 7):
        assert mixed.token[row] == greedy.token[row]
        assert mixed.logprob[row] == greedy.logprob[row]
    # Top-k of one token, or top-p that the first token reaches, is greedy as well.
    for one in (Sampling(top_k=1), Sampling(top_p=1e-9)):
        samples = sample(logits, params_of([one] * 8), positions)
        np.testing.assert_array_equal(samples.token, greedy.token)


def test_logprobs_only_where_requested() -> None:
    everything = sample(*one_batch())
    for scored in (np.arange(8) % 3 == 0, np.zeros(8, bool)):
        samples = sample(*one_batch()[:3], jnp.asarray(scored))
        np.testing.assert_array_equal(samples.token, everything.token)
        expected = np.where(scored, everything.logprob, 0)
        np.testing.assert_array_equal(samples.logprob, expected)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits, params, positions, _ = one_batch()
    raw = jnp.flip(logits, axis=1)
    samples = sample(logits, params, positions, raw=raw)
    exact = jax.nn.log_softmax(raw)[np.arange(8), samples.token]
    np.testing.assert_allclose(samples.logprob, exact, atol=1e-5)
    np.testing.assert_array_equal(samples.token, sample(*one_batch()).token)


def test_invalid_rows_are_flagged() -> None:
    logits, params, positions, _ = one_batch()
    rows = np.array(logits)
    rows[0, 13] = np.nan
    rows[1, 388] = -np.nan
    rows[2] = -INF
    rows[3, [5, 9]] = INF, -INF
    rows[4, :-1] = -INF
    rows = jnp.asarray(rows)
    samples = sample(rows, params, positions, raw=logits)
    assert samples.invalid.tolist() == [True] * 3 + [False] * 5
    assert samples.token[:5].tolist() == [0, 0, 0, 5, 388]
    logprob = sampler.token_logprobs(rows, samples.token)
    assert np.isnan(logprob).tolist() == [True] * 3 + [False] * 5
    assert logprob[3:5].tolist() == [0, 0]
    # As the model's own logits, infinities would make these rows invalid too.
    assert sample(rows, params, positions).invalid.tolist() == [True] * 5 + [False] * 3


@pytest.mark.thorough
def test_vmap_equals_single_calls() -> None:
    *arrays, scored = one_batch()
    states = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, axis=0)]), arrays)
    draw = functools.partial(sampler.sample, keep_logprobs=scored, max_candidates=8)
    samples = jax.jit(jax.vmap(draw))(*states)
    for both, one in zip(samples, sample(*one_batch()), strict=True):
        np.testing.assert_array_equal(both[0], one)
        np.testing.assert_array_equal(both[1], jnp.flip(one, axis=0))


@pytest.mark.slow
def test_float64_draws_the_same_tokens() -> None:
    logits, params, positions, scored = one_batch()
    single = sample(logits, params, positions, scored)
    with jax.enable_x64(True):
        wide = logits.astype(jnp.float64)
        double = sample(wide, params, positions, scored)
        assert double.logprob.dtype == jnp.float64
        exact = jax.nn.log_softmax(wide)[np.arange(8), double.token]
        np.testing.assert_allclose(double.logprob, exact, rtol=1e-11)
        again = sample(logits, params, positions, scored)
    np.testing.assert_array_equal(double.token, single.token)
    np.testing.assert_array_equal(again.token, single.token)
    assert double.token.dtype == jnp.int32


# Log-probabilities


@pytest.mark.parametrize(
    "vocab", [97, *(pytest.param(n, marks=pytest.mark.slow) for n in (49152, 50257))]
)
def test_logprobs_equal_a_log_softmax(vocab: int) -> None:
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(5, vocab)) * 6, 1).astype(np.float32)
    logits[0, ::2] = -INF
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    tokens = rng.integers(0, vocab, 5).astype(np.int32)
    logprobs = jitted("token_logprobs")(jnp.asarray(logits), jnp.asarray(tokens))
    np.testing.assert_allclose(logprobs, exact[np.arange(5), tokens], rtol=1e-6)
    ids, best = jitted("top_logprobs", max_logprobs=7)(jnp.asarray(logits))
    ranks = np.argsort(-logits, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(ids, ranks)
    np.testing.assert_allclose(
        best, np.take_along_axis(exact, ranks, axis=1), rtol=1e-6, atol=1e-7
    )


def test_invalid_number_of_logprobs_is_refused() -> None:
    for count in (0, 6):
        with pytest.raises(ValueError, match=r"max_logprobs=\d must be in \[1, 5\]"):
            sampler.top_logprobs(jnp.zeros((2, 5), jnp.float32), count)
    with pytest.raises(ValueError, match="max_candidates=0 must be at least 1"):
        sampler.keep_mask(
            jnp.zeros((2, 5), jnp.float32), greedy_params(2), max_candidates=0
        )


@pytest.mark.slow
def test_large_vocabulary_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(8, 49152)).astype(np.float32) * 4)
    arrays = (logits, params_of(ONE_BATCH), jnp.arange(8, dtype=jnp.int32))
    draw = jitted("sample")
    together = draw(*arrays)
    for rows in (1, 2, 3, 5, 7, 32):
        chosen = rng.integers(0, 8, rows)
        samples = draw(*rows_of(arrays, chosen))
        for row_field, other in zip(samples, rows_of(together, chosen), strict=True):
            np.testing.assert_array_equal(row_field, other)
    # XLA's maximum loses NaN at this size.
    broken = draw(logits.at[3, 77].set(jnp.nan), *arrays[1:])
    assert broken.invalid.tolist() == [row == 3 for row in range(8)]


@pytest.mark.parametrize("vocab", one_quick([1000, 97, 512]))
@pytest.mark.parametrize("with_raw", [False, True])
def test_one_pass_argmax_equals_several_passes(vocab: int, with_raw: bool) -> None:
    """Compares the GPU's version for ties, signed zeros, infinities and NaN."""
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (64, vocab)).astype(np.float32)
    logits[logits == 0] *= rng.choice([-1.0, 1.0], (logits == 0).sum())
    for row, odd in zip(range(24), itertools.cycle([INF, -INF, np.nan]), strict=False):
        logits[row, rng.integers(0, vocab, 1 + row % 3)] = odd
    logits[24] = -INF
    logits[25, :-1] = -INF
    raw = np.where(np.isneginf(logits), np.float32(0), logits) if with_raw else None
    if raw is not None:
        raw[30, 5] = np.nan
        raw[31, 0] = -INF
    both = [
        jax.jit(peak)(logits, raw)
        for peak in (top_k.argmax_checked, top_k.argmax_checked_in_one_pass)
    ]
    (top, token, invalid), (again, slow_token, wrong) = (
        map(np.asarray, x) for x in both
    )
    np.testing.assert_array_equal(wrong, invalid)
    assert 0 < invalid.sum() < len(invalid)
    np.testing.assert_array_equal(slow_token[~invalid], token[~invalid])
    np.testing.assert_array_equal(again[~invalid], top[~invalid])


def test_lower_ids_come_first_among_equal_candidates() -> None:
    """The best token may be in a later block than one of its equals."""
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (3, 2048)).astype(np.float32)
    logits[:, -1] = 9
    values, ids = top_k.candidates(jnp.asarray(logits), 4)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_have_the_derivative_of_log_softmax(dtype: str) -> None:
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 3, (5, 37)), dtype)
    tokens = jnp.asarray(rng.integers(0, 37, 5), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)

    def ours(logits: jax.Array) -> jax.Array:
        _, top = sampling.top_logprobs(logits, 3)
        one = sampling.token_logprobs(logits, tokens)[:, None]
        return jnp.sum(weights * jnp.concatenate([one, top], axis=1))

    def plain(logits: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
        one = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
        best = jax.lax.top_k(logprobs, 3)[0]
        return jnp.sum(weights * jnp.concatenate([one, best], axis=1))

    expected = jax.jit(jax.grad(plain))(logits).astype(jnp.float32)
    for gradient in (jax.grad(ours), jax.jacfwd(ours)):
        result = jax.jit(gradient)(logits).astype(jnp.float32)
        limit = 1e-6 if dtype == "float32" else 0.01
        np.testing.assert_allclose(result, expected, atol=limit, rtol=limit)


def test_draw_log_probabilities_are_those_of_the_law() -> None:
    rng = np.random.default_rng(4)
    asks = [
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(min_p=0.1),
        Sampling(temperature=0.5),
        Sampling.greedy(),
    ]
    logits = jnp.asarray(rng.normal(0, 2, (5, 40)), jnp.float32)
    params = jax.tree.map(
        jnp.asarray, sampling.make_params(asks, [(0, 0)] * 5, [0] * 5)
    )
    law = jax.jit(sampling.probabilities)(logits, params)
    draw = jax.jit(sampling.draw_logprobs)
    for token in range(40):
        tokens = jnp.full((5,), token, jnp.int32)
        logprobs = draw(logits, tokens, params)
        np.testing.assert_allclose(jnp.exp(logprobs), law[:, token], rtol=1e-5)

    best = jnp.argmax(logits, axis=1).astype(jnp.int32)

    def plain(logits: jax.Array) -> jax.Array:
        warm = jnp.maximum(params.temperature, 1e-3)[:, None]
        kept = jnp.where(law > 0, logits / warm, -jnp.inf)
        logprobs = jax.nn.log_softmax(kept, axis=1)
        return jnp.sum(jnp.take_along_axis(logprobs, best[:, None], axis=1))

    gradient = jax.jit(jax.grad(lambda x: jnp.sum(draw(x, best, params))))(logits)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(plain))(logits), atol=1e-6)
