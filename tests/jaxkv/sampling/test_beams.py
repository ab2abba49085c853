"""Beam search: by hand, against brute force, and against a reference in Python."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling import beam_search
from jaxkv.sampling.beam_search import AT_LENGTH, ESTIMATE, WHEN_FULL, BeamParams, Beams

pytestmark = pytest.mark.usefixtures("full_optimization")

RULES = (ESTIMATE, WHEN_FULL, AT_LENGTH)

type Model = Callable[[tuple[int, ...]], np.ndarray]
"""Tokens so far -> logits [vocab] of the next one."""


class Answer(NamedTuple):
    score: float
    tokens: tuple[int, ...]


def params_of(
    width: int,
    length_penalty: float = 1.0,
    early_stopping: int = ESTIMATE,
    stops: tuple[int, ...] = (-1, -1),
    limit: int = 8,
) -> BeamParams:
    return BeamParams(
        width=jnp.asarray(width, jnp.int32),
        length_penalty=jnp.asarray(length_penalty, jnp.float32),
        early_stopping=jnp.asarray(early_stopping, jnp.int32),
        stop_tokens=jnp.asarray(stops, jnp.int32),
        limit=jnp.asarray(limit, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="max_stops")
def advance(group, params, logits, active, max_stops=2):
    tokens, logprobs = beam_search.choices(
        logits, max_beams=logits.shape[0], max_stops=max_stops
    )
    return beam_search.advance_beams(group, params, tokens, logprobs, active)


choices = jax.jit(beam_search.choices, static_argnames=("max_beams", "max_stops"))
finalize = jax.jit(beam_search.finalize)
unroll = jax.jit(beam_search.follow_parents)
YES = jnp.asarray(True)
NO = jnp.asarray(False)


def random_model(seed: int, vocab: int, spread: float = 2.0) -> Model:
    """Returns a model with random logits that depend on all tokens before."""

    @functools.cache
    def model(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *prefix])
        return (spread * rng.standard_normal(vocab)).astype(np.float32)

    return model


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum())


def drive(
    model: Model, params: BeamParams, max_beams: int
) -> tuple[Beams, list[Answer]]:
    """Searches with `advance_beams`, with the prefixes of beams as tuples."""
    group = beam_search.make_beams(max_beams)
    prefixes = [()] * max_beams
    history = np.zeros((2, max_beams, int(params.limit)), np.int32)
    while not group.done:
        logits = jnp.asarray(np.stack([model(prefix) for prefix in prefixes]))
        group, parents, tokens = advance(group, params, logits, YES)
        history[:, :, int(group.length) - 1] = tokens, parents
        moves = np.stack([parents, tokens], axis=1).tolist()
        prefixes = [(*prefixes[parent], token) for parent, token in moves]
    rows = finalize(group, *jnp.asarray(history), jnp.zeros((), jnp.int32))
    return group, answers_of(rows, group.finished.score)


def answers_of(rows: jax.Array, scores: jax.Array) -> list[Answer]:
    """Returns the answers among the rows; checks that rows have no gaps."""
    answers = []
    for row, score in zip(np.asarray(rows), np.asarray(scores), strict=True):
        length = int((row >= 0).sum())
        assert (row[:length] >= 0).all()
        assert (length > 0) == (score > -np.inf)
        answers.append(Answer(float(score), tuple(row[:length].tolist())))
    num = sum(1 for answer in answers if answer.tokens)
    assert not any(answer.tokens for answer in answers[num:])
    return answers[:num]


def assert_equal(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.tokens for answer in answers] == [row.tokens for row in expected]
    np.testing.assert_allclose(
        [answer.score for answer in answers],
        [row.score for row in expected],
        rtol=1e-5,
        atol=1e-5,
    )


def reference_search(model: Model, params: BeamParams) -> list[Answer]:
    """Beam search with lists, sorting all candidates."""
    width = int(params.width)
    limit = int(params.limit)
    penalty = float(params.length_penalty)
    rule = int(params.early_stopping)
    stops = set(np.asarray(params.stop_tokens).tolist())
    running = [(0.0, ())]
    answers = []
    for length in range(1, limit + 1):
        candidates = [
            (total + logprob, (*prefix, token))
            for total, prefix in running
            for token, logprob in enumerate(logprobs_of(model(prefix)))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        going = [candidate for candidate in candidates if candidate[1][-1] not in stops]
        if length == limit:
            going = []
        ended = [
            candidate for candidate in candidates[:width] if candidate not in going
        ]
        answers += [Answer(total / length**penalty, row) for total, row in ended]
        answers = sorted(answers, key=lambda answer: -answer.score)[:width]
        running = going[:width]
        if len(answers) == width and running:
            reach = limit if rule == AT_LENGTH and penalty > 0 else length
            best = running[0][0] / reach**penalty
            if rule == WHEN_FULL or best <= answers[-1].score:
                break
    return answers


def test_two_steps_by_hand() -> None:
    """Width 2 of 3 beams; token 3 stops. Logits are logarithms of probabilities."""
    params = params_of(2, length_penalty=1.0, stops=(3, -1))
    first = jnp.log(jnp.asarray([[0.1, 0.5, 0.3, 0.1]] * 3, jnp.float32))
    group, parents, tokens = advance(beam_search.make_beams(3), params, first, YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0, 2], [1, 2, 0])
    np.testing.assert_allclose(np.exp(group.score), [0.5, 0.3, 0.0], rtol=1e-6)
    assert group.finished.length.tolist() == [0, 0, 0]  # a stop came third

    second = jnp.asarray(
        [[0.2, 0.1, 0.1, 0.6], [0.1, 0.0, 0.9, 0.0], [0.0, 0.0, 0.0, 1.0]], jnp.float32
    )
    # 0.30 is beam 0 with the stop, 0.27 beam 1 with 2, 0.10 beam 0 with 0.
    group, parents, tokens = advance(group, params, jnp.log(second), YES)
    assert (parents.tolist(), tokens.tolist()) == ([1, 0, 2], [2, 0, 0])
    np.testing.assert_allclose(np.exp(group.score), [0.27, 0.1, 0.0], rtol=1e-6)
    answer = jax.tree.map(lambda leaf: leaf[0], group.finished)
    assert (answer.length, answer.beam, answer.token) == (2, 0, 3)
    np.testing.assert_allclose(answer.score, np.log(0.3) / 2, rtol=1e-6)
    assert group.finished.length.tolist() == [2, 0, 0]
    assert not group.done

    same = advance(group, params, first, NO)
    jax.tree.map(np.testing.assert_array_equal, same[0], group)
    assert (same[1].tolist(), same[2].tolist()) == ([0, 1, 2], [0, 0, 0])


@pytest.mark.parametrize("rule", [ESTIMATE, AT_LENGTH])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
def test_wide_search_is_exhaustive(penalty: float, rule: int) -> None:
    vocab = 3
    stop = 2
    limit = 4
    model = random_model(1, vocab)
    every = []
    for length in range(1, limit + 1):
        for row in itertools.product(range(vocab), repeat=length):
            if stop not in row[:-1] and (row[-1] == stop or length == limit):
                total = sum(logprobs_of(model(row[:i]))[t] for i, t in enumerate(row))
                every.append(Answer(total / length**penalty, row))
    assert len(every) == 31
    every.sort(key=lambda answer: -answer.score)
    # 24 beams hold every prefix; to keep the best 24 answers, the search may stop
    # before the limit only if no answer can be lost.
    for width in (32, 24) if rule == AT_LENGTH else (32,):
        params = params_of(width, penalty, rule, (stop, -1), limit)
        group, answers = drive(model, params, 32)
        assert_equal(answers, every[:width])
        assert group.done


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("penalty", [-1.5, 0.0, 1.0, 2.0])
def test_narrow_search_equals_reference(penalty: float, rule: int) -> None:
    early = 0
    for seed, width in itertools.product(range(8), (1, 2, 3, 5)):
        stops = ((4, -1), (4, 0), (-1, -1), (6, 5))[seed % 4]
        params = params_of(width, penalty, rule, stops, limit=4 + 2 * (seed % 5))
        model = random_model(seed, 7, spread=(2.0, 6.0)[seed // 4])
        group, answers = drive(model, params, 5)
        assert_equal(answers, reference_search(model, params))
        early += int(group.length < params.limit)
    assert early >= 5 or (rule == AT_LENGTH and penalty > 0)  # the rules are put to use


def test_one_program_serves_every_setting() -> None:
    logits = jnp.zeros((5, 9), jnp.float32)
    run: Any = jax.jit(lambda *arguments: advance(*arguments))
    for width, rule in itertools.product((1, 4), RULES):
        run(beam_search.make_beams(5), params_of(width, 0.5, rule), logits, YES)
    assert run._cache_size() == 1


@pytest.mark.thorough
def test_groups_are_independent() -> None:
    """Row i of a batch of groups equals group i in a batch of one, bit for bit."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(13):
        params = params_of(1 + i % 4, i / 3 - 1, i % 3, (i, -1), limit=4 + i % 3)
        group = beam_search.make_beams(4)
        for _ in range(i % 4):
            logits = jnp.asarray(rng.standard_normal((4, 16)), jnp.float32)
            group, *_ = advance(group, params, logits, YES)
        logits = jnp.asarray(rng.standard_normal((4, 16)), jnp.float32)
        tokens, logprobs = choices(logits, max_beams=4, max_stops=2)
        lines.append((group, params, tokens, logprobs, jnp.asarray(i != 5)))
    step = jax.jit(beam_search.advance_beams)
    together = jax.jit(jax.vmap(beam_search.advance_beams))(
        *jax.tree.map(lambda *x: jnp.stack(x), *lines)
    )
    for i, line in enumerate(lines):
        alone = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        jax.tree.map(np.testing.assert_array_equal, alone, step(*line))


def test_stops_do_not_displace_running_beams() -> None:
    params = params_of(2, 2.0, AT_LENGTH, stops=(6, 1))
    logits = jnp.asarray([[0, 9, 1, 3, 2, 3, 9]] * 2, jnp.float32)
    group, parents, tokens = advance(beam_search.make_beams(2), params, logits, YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0], [3, 5])
    assert group.finished.token.tolist() == [1, 6]


def test_equals_rank_by_beam_and_token() -> None:
    params = params_of(3)
    logits = jnp.zeros((3, 6), jnp.float32)
    group, parents, tokens = advance(beam_search.make_beams(3), params, logits, YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0, 0], [0, 1, 2])
    group, parents, tokens = advance(group, params, logits, YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0, 0], [0, 1, 2])


@pytest.mark.thorough
def test_beams_without_candidates_stop() -> None:
    """A mask leaves two tokens, NaN removes one beam, then no candidate remains."""
    params = params_of(3, stops=(5, -1))
    none = -jnp.inf
    logits = jnp.full((4, 6), none, jnp.float32).at[:, 2:4].set(0.0)
    group, parents, tokens = advance(beam_search.make_beams(4), params, logits, YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0, 2, 3], [2, 3, 0, 0])
    assert group.score.tolist()[2:] == [none, none]
    group, parents, tokens = advance(group, params, logits.at[0].set(jnp.nan), YES)
    assert (parents.tolist(), tokens.tolist()) == ([1, 1, 2, 3], [2, 3, 0, 0])
    group, parents, tokens = advance(group, params, jnp.full_like(logits, none), YES)
    assert (parents.tolist(), tokens.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])
    assert group.done
    assert group.finished.length.tolist() == [0, 0, 0, 0]
    after, parents, _ = advance(group, params, jnp.zeros_like(logits), YES)
    jax.tree.map(np.testing.assert_array_equal, after, group)
    rows = finalize(group, *jnp.zeros((2, 4, 3), jnp.int32), jnp.zeros((), jnp.int32))
    assert (rows == -1).all()


def test_unroll_follows_back_pointers() -> None:
    rng = np.random.default_rng(3)
    num_beams = 4
    places = 11
    parents = rng.integers(0, num_beams, (num_beams, places)).astype(np.int32)
    beam = np.asarray([0, 3, 3, 1, 2, 0], np.int32)
    length = np.asarray([11, 7, 1, 0, 10, 2], np.int32)
    expected = np.full((len(beam), places), beam_search.NO_BEAM)
    for end, (node, num) in enumerate(zip(beam, length, strict=True)):
        for place in reversed(range(num)):
            expected[end, place] = node
            node = parents[node, place]
    np.testing.assert_array_equal(unroll(parents, beam, length), expected)


def test_a_history_may_begin_with_the_prompt() -> None:
    params = params_of(2, stops=(3, -1), limit=2)
    first = jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.4]] * 2, jnp.float32))
    group = beam_search.make_beams(2)
    prompt = [7, 8, 9]
    tokens = jnp.full((2, 6), 99, jnp.int32).at[0, :3].set(jnp.asarray(prompt))
    parents = jnp.zeros((2, 6), jnp.int32)
    for place in (3, 4):
        group, parent, token = advance(group, params, first, YES)
        parents = parents.at[:, place].set(parent)
        tokens = tokens.at[:, place].set(token)
    rows = finalize(group, tokens, parents, jnp.asarray(3, jnp.int32))
    assert rows.tolist() == [[*prompt, 3, -1, -1], [*prompt, 2, 3, -1]]
