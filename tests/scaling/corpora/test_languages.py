"""Languages: entropies against brute force, samples against the language."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from scaling.corpora import open_corpus
from scaling.corpora.languages import hidden_markov, language, markov
from scaling.corpora.languages.language import LanguageConfig

TINY = {
    "zipf": LanguageConfig(kind="zipf", vocab_size=5, exponent=1.3),
    "markov": LanguageConfig(kind="markov", vocab_size=3, order=2, seed=4),
    "kgram": LanguageConfig(kind="kgram", vocab_size=3, mixture=(0.4, 0.6), seed=1),
    "hidden_markov": LanguageConfig(
        kind="hidden_markov", vocab_size=3, num_states=2, sharpness=4.0, seed=7
    ),
}


def brute_force(chain: markov.Chain) -> list[float]:
    """Conditional entropies, by a dense matrix over contexts and its eigenvector."""
    size = chain.vocab_size
    order = chain.order
    contexts = list(itertools.product(range(size), repeat=order))
    move = np.zeros((len(contexts), size))
    for row, (tokens, probs) in enumerate(zip(chain.tokens, chain.probs, strict=True)):
        for token, prob in zip(tokens, probs, strict=True):
            move[row, token] += prob
    dense = np.zeros((len(contexts),) * 2)
    for i, context in enumerate(contexts):
        for token in range(size):
            dense[i, contexts.index((*context, token)[1:])] += move[i, token]
    values, vectors = np.linalg.eig(dense.T)
    share = np.real(vectors[:, np.argmin(abs(values - 1))])
    share /= share.sum()
    entropies = []
    for depth in range(order + 1):
        joint: dict[tuple[int, ...], np.ndarray] = {}
        for i, context in enumerate(contexts):
            key = context[order - depth :]
            joint[key] = joint.get(key, np.zeros(size)) + share[i] * move[i]
        total = 0.0
        for counts in joint.values():
            p = counts[counts > 0]
            total -= float((p * np.log(p / counts.sum())).sum())
        entropies.append(total)
    return entropies


@pytest.mark.parametrize("kind", ["zipf", "markov", "kgram"])
def test_entropies_are_those_of_brute_force(kind: str) -> None:
    optimum = language.optimal_loss(TINY[kind])
    np.testing.assert_allclose(
        optimum.by_order, brute_force(language._chain(TINY[kind])), rtol=1e-10
    )
    assert optimum.floor == optimum.by_order[-1]
    assert optimum.floor_se == 0


def test_known_entropies() -> None:
    fair = LanguageConfig(kind="zipf", vocab_size=8, exponent=0.0)
    assert language.optimal_loss(fair).floor == pytest.approx(math.log(8), abs=1e-12)
    # Two states that change with probability 0.1: the entropy of one such coin.
    flip = np.array([[0.9, 0.1], [0.1, 0.9]])
    chain = markov.make_chain(2, 1, np.array([[0, 1], [0, 1]]), flip)
    coin = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    np.testing.assert_allclose(
        markov.chain_conditional_entropies(chain), [math.log(2), coin], rtol=1e-12
    )
    # A periodic deterministic chain has entropy 0.
    ring = markov.make_chain(3, 1, np.array([[1], [2], [0]]), np.ones((3, 1)))
    np.testing.assert_allclose(
        markov.chain_conditional_entropies(ring), [math.log(3), 0], atol=1e-12
    )


def test_tokens_named_twice_add_up() -> None:
    chain = markov.make_chain(
        4, 0, np.array([[2, 0, 2, 0, 3]]), np.array([[1.0, 2, 3, 4, 10]])
    )
    dense_probs = np.zeros(4)
    np.add.at(dense_probs, chain.tokens[0], chain.probs[0])
    np.testing.assert_allclose(dense_probs, [0.3, 0, 0.2, 0.5])
    assert markov.entropy(dense_probs) == pytest.approx(markov.entropy(chain.probs))


@pytest.mark.parametrize("kind", ["markov", "kgram"])
def test_segments_run_side_by_side_are_the_sequential_run(kind: str) -> None:
    chain = language._chain(TINY[kind])
    uniforms = np.random.default_rng(0).random(5000)
    context = 7
    expected = []
    for uniform in uniforms:
        cumulative = np.cumsum(chain.probs[context])
        token = int(chain.tokens[context, (cumulative <= uniform).sum()])
        context = (context * 3 + token) % 9
        expected.append(token)
    assert markov.sample_chain(chain, 7, uniforms).tolist() == expected
    # Also for a chain that never forgets its start.
    ring = markov.make_chain(3, 1, np.array([[1], [2], [0]]), np.ones((3, 1)))
    assert markov.sample_chain(ring, 0, uniforms).tolist() == [*np.arange(1, 5001) % 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, marks=pytest.mark.slow if x == "hidden_markov" else [])
        for x in TINY
    ],
)
def test_texts_are_in_the_language(kind: str) -> None:
    config = dataclasses.replace(TINY[kind], num_tokens=200_000, num_held_out=20_000)
    corpus = open_corpus(config)
    assert corpus.stream.dtype == corpus.held_out.dtype == np.uint16
    assert (len(corpus.stream), len(corpus.held_out)) == (200_000, 20_000)
    nats = language.code_lengths(config, corpus.stream)
    # The mean code length of tokens is the entropy; 128 blocks give its error.
    blocks = nats[: len(nats) // 128 * 128].reshape(128, -1).mean(1)
    error = blocks.std() / math.sqrt(128)
    assert 0 < error < 0.01
    assert corpus.floor == pytest.approx(nats.mean(), abs=4 * error)
    unigram = np.bincount(corpus.stream, minlength=corpus.vocab_size) / 200_000
    first = language.optimal_loss(config).by_order[0]
    assert markov.entropy(unigram) == pytest.approx(first, abs=0.01)


def bounds(hidden: hidden_markov.HiddenChain, length: int) -> tuple[float, float]:
    """Bounds of the entropy rate by all texts of a length: exact, and costly.

    Returns:
      The entropy of the token after so many, given them; for the lower bound also
      given the first state.

    Source: Cover and Thomas, Elements of Information Theory, theorem 4.5.1.
    """
    lower = upper = 0.0
    for text in itertools.product(range(hidden.writes.shape[1]), repeat=length):
        # Joint probability of this text and the state after it, by first state.
        joint = np.diag(hidden.share)
        for token in text:
            joint = (joint * hidden.writes[:, token]) @ hidden.moves
        lower += expected_entropy(hidden, joint)
        upper += expected_entropy(hidden, joint.sum(0, keepdims=True))
    return lower, upper


def expected_entropy(hidden: hidden_markov.HiddenChain, rows: np.ndarray) -> float:
    """Entropy of the next token in each row of states, weighted by the row."""
    weight = rows.sum(1)
    beliefs = rows[weight > 0] / weight[weight > 0, None]
    return float(weight[weight > 0] @ markov.row_entropies(beliefs @ hidden.writes))


@pytest.mark.slow
def test_filter_is_between_the_bounds_of_all_short_texts() -> None:
    hidden = language._hidden(TINY["hidden_markov"])
    lower, upper = bounds(hidden, 9)
    rate = hidden_markov.entropy_rate(
        hidden, np.random.default_rng(1), num_texts=256, length=512
    )
    assert 1e-4 < upper - lower < 4e-3
    assert 0 < rate.se < 1e-3
    assert lower - 4 * rate.se < rate.mean < upper + 4 * rate.se
    # Exact blocks, longest first: each token helps, none is below the bounds.
    steps = hidden_markov.hidden_conditional_entropies(hidden, max_order=9)
    assert (np.diff(steps)[:4] < 0).all()
    assert steps[-1] == pytest.approx(upper, abs=1e-12)
    # States that determine the token make a Markov chain of the tokens.
    visible_chain = hidden_markov.make_hidden_chain(hidden.moves, np.eye(2))
    chain = hidden_markov._states(hidden.moves)
    np.testing.assert_allclose(
        hidden_markov.hidden_conditional_entropies(visible_chain, 1),
        markov.chain_conditional_entropies(chain),
    )


def test_the_reference_language() -> None:
    """Four atoms after one, two and three tokens, with the intended entropy."""
    optimum = language.optimal_loss(LanguageConfig(kind="kgram"))
    assert len(optimum.by_order) == 4
    assert (np.diff(optimum.by_order) < -0.15).all()
    assert 1.5 < optimum.floor < 1.8


def test_a_shorter_text_begins_a_longer() -> None:
    config = dataclasses.replace(TINY["kgram"], num_tokens=5000, num_held_out=100)
    full_corpus = open_corpus(config)
    short = open_corpus(dataclasses.replace(config, num_tokens=1300))
    again = open_corpus(dataclasses.replace(config, num_unique_tokens=1300))
    assert short.stream.tolist() == full_corpus.stream[:1300].tolist()
    assert again.digest == short.digest != full_corpus.digest
    assert again.epochs(2600) == 2
    other = open_corpus(dataclasses.replace(config, seed=9))
    assert other.digest != full_corpus.digest
    with pytest.raises(ValueError, match="num_unique_tokens=5001 are more than its"):
        open_corpus(dataclasses.replace(config, num_unique_tokens=5001))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 1}, r"vocab_size=1 must be in \[2"),
        ({"kind": "markov", "order": 0}, "order=0 must be at least 1"),
        ({"exponent": -1.0}, r"exponent=-1\.0 must be at least 0 and finite"),
        ({"kind": "kgram", "mixture": (0.5, 0.4)}, "shares that sum to 1"),
        ({"kind": "kgram", "vocab_size": 128}, "2097152 contexts of kgram are too"),
        ({"kind": "markov", "order": 9}, "contexts of markov are too many"),
    ],
)
def test_impossible_languages_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LanguageConfig(kind="zipf"), **change)


def test_a_chain_with_two_ends_has_no_entropy_of_its_own() -> None:
    apart = markov.make_chain(2, 1, np.array([[0], [1]]), np.ones((2, 1)))
    with pytest.raises(ValueError, match="depends on its start"):
        markov.stationary_distribution(apart)


def test_code_lengths_of_a_hidden_chain_add_up_to_that_of_the_stream() -> None:
    hidden = language._hidden(TINY["hidden_markov"])
    stream = np.array([0, 2, 1, 1, 0])
    lengths = hidden_markov.hidden_code_lengths(hidden, stream)
    for num in range(1, len(stream) + 1):
        joint = hidden.share
        for token in stream[:num]:
            joint = (joint * hidden.writes[:, token]) @ hidden.moves
        np.testing.assert_allclose(lengths[:num].sum(), -np.log(joint.sum()))
