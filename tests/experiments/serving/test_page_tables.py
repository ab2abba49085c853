"""The walk-through of paged memory: the engine states of its frames."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import SentenceLanguage, SentenceModel
from experiments.serving.page_tables import experiment
from experiments.serving.page_tables.frames import Frames
from jaxkv.memory import NO_PAGE, Rows, make_pages
from jaxkv.report import tables
from tests.support import smoke


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return smoke.run("page_tables").result


def rows(frames: Frames, slot: int) -> list[tuple[list[int], list[int]]]:
    """Returns pages and filled places of a slot, frame by frame."""
    every = range(len(frames.caption))
    return [(frames.pages(i, slot), frames.filled(i, slot)) for i in every]


def text(frames: Frames, i: int, slot: int) -> str:
    """Returns the words of a slot, read from the keys of its pages."""
    held = frames.held[i, frames.pages(i, slot)].reshape(-1)
    return " ".join(frames.words[held[: frames.length[i, slot]]].tolist())


def uses(frames: Frames, i: int) -> dict[int, int]:
    return {page: int(n) for page, n in enumerate(frames.ref[i]) if n}


@pytest.mark.slow
def test_one_request_occupies_pages_7_1_and_5(result: experiment.Result) -> None:
    assert rows(result.one, 0) == [
        ([7, 1], [4, 2]),
        ([7, 1], [4, 3]),
        ([7, 1], [4, 4]),
        ([7, 1, 5], [4, 4, 1]),
    ]
    assert rows(result.one, 1) == [([], [])] * 4
    assert text(result.one, 0, 0) == "Alan Turing is a computer scientist"
    assert text(result.one, 3, 0) == (
        "Alan Turing is a computer scientist and mathematician renowned"
    )
    assert uses(result.one, 3) == {7: 1, 1: 1, 5: 1}


@pytest.mark.slow
def test_two_requests_share_a_pool(result: experiment.Result) -> None:
    a = rows(result.two, 0)
    b = rows(result.two, 1)
    assert a == [([7, 1], [4, 3]), ([7, 1], [4, 4]), ([7, 1, 3], [4, 4, 1]), ([], [])]
    assert b == [([], []), ([5, 2], [4, 1]), ([5, 2], [4, 2]), ([5, 2], [4, 3])]
    assert text(result.two, 2, 0).endswith("years ago our fathers brought")
    assert text(result.two, 2, 1) == "It was the best of times"
    # The first has ended: its pages are free, but still contain its tokens.
    assert uses(result.two, 3) == {5: 1, 2: 1}
    assert (result.two.held[3, 7] == result.two.held[2, 7]).all()


@pytest.mark.slow
def test_samples_diverge_at_their_first_different_word(
    result: experiment.Result,
) -> None:
    samples = result.samples
    assert rows(samples, 0) == [([7, 1], [4, 3]), ([7, 3], [4, 4])]
    assert rows(samples, 1) == [([7, 1], [4, 3]), ([7, 1], [4, 4])]
    assert uses(samples, 0) == {7: 2, 1: 2}
    assert uses(samples, 1) == {7: 2, 1: 1, 3: 1}
    assert samples.copied[1].tolist() == [-1, -1, -1, 1, -1, -1, -1, -1, -1]
    assert (samples.copied[0] == NO_PAGE).all()
    assert text(samples, 1, 0).endswith("seven years ago our fathers")
    assert text(samples, 1, 1).endswith("seven years ago our mothers")


@pytest.mark.slow
def test_beams_share_and_free_pages(result: experiment.Result) -> None:
    beams = result.beams
    pages = [[beams.pages(i, slot) for slot in range(4)] for i in range(4)]
    assert pages[0] == [[0, 1], [0, 6], [0, 3], [0, 2]]
    assert pages[1] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert pages[2] == [[0, 1, 3, 6], [0, 1, 3, 6], [0, 1, 3, 7], [0, 1, 3, 7]]
    assert [row[:4] for row in pages[3]] == pages[2]
    assert {row[4] for row in pages[3]} == {2, 4, 5, 8}  # freed in this step
    assert beams.length.tolist() == [[5] * 4, [15] * 4, [16] * 4, [17] * 4]
    assert uses(beams, 1) == {0: 4, 1: 3, 3: 3} | dict.fromkeys((2, 4, 5, 6, 7, 8), 1)
    assert uses(beams, 2) == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2}
    # Tables have moved for words that are chosen but not yet written.
    chosen = beams.words[beams.tokens[2, :, 16]].tolist()
    assert chosen == ["and", "which", "ruled", "one"]
    ends = [text(beams, 3, slot).split("symbols ")[1] for slot in range(4)]
    assert ends == [
        "on an endless tape and",
        "on an endless tape which",
        "in squares of paper ruled",
        "in squares of paper one",
    ]


@pytest.mark.slow
def test_pages_contain_the_tokens_of_the_tables(result: experiment.Result) -> None:
    for frames in tables.field_values(result).values():
        num, slots = frames.length.shape
        for i, slot in np.ndindex(num, slots):
            length = int(frames.length[i, slot])
            pages = frames.pages(i, slot)
            held = frames.held[i, pages].reshape(-1)[:length]
            np.testing.assert_array_equal(held, frames.tokens[i, slot, :length])
            place = frames.place[i, pages].reshape(-1)[:length]
            np.testing.assert_array_equal(place, np.arange(length))
        for i in range(num):
            mapped = frames.page_ids[i][frames.page_ids[i] != NO_PAGE]
            counts = np.bincount(mapped, minlength=frames.ref.shape[1])
            np.testing.assert_array_equal(frames.ref[i], counts)


@pytest.mark.slow
def test_claims_hold_except_for_the_order_of_reuse(result: experiment.Result) -> None:
    *figures, unused = experiment.claims(result)
    assert len(figures) == 7
    for claim in figures:  # every entry of the figures
        assert claim.ours == claim.published > 0
    assert unused.ours < unused.published == 4


@pytest.mark.slow
def test_claims_detect_another_table(result: experiment.Result) -> None:
    page_ids = result.one.page_ids.copy()
    page_ids[3, 0, 2] = 6
    one = dataclasses.replace(result.one, page_ids=page_ids)
    other = dataclasses.replace(result, one=one)
    assert experiment.claims(other)[0].verdict == "fails"


@pytest.mark.slow
def test_the_picture_shows_the_words() -> None:
    figure = (smoke.run("page_tables").folder / "figure.svg").read_text()
    for word in ("mathematician", "mothers", "Princeton"):
        assert word in figure


def test_a_language_divides_probability_among_next_words() -> None:
    language = SentenceLanguage({"a b c": 3.0, "a b d": 1.0}, 4)
    assert language.words == ("a", "b", "c", "d")
    tokens = jnp.asarray([[0, 1, -1, -1], [0, -1, -1, -1], [2, -1, -1, -1]], jnp.int32)
    laws = np.exp(np.asarray(language.logits(tokens), np.float64))
    np.testing.assert_allclose(laws[0], [0, 0, 0.75, 0.25], atol=1e-6)
    np.testing.assert_allclose(laws[1], [0, 1, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(laws[2], 1)  # starts no sentence


def test_the_page_table_determines_the_next_word() -> None:
    language = SentenceLanguage({"a b c": 1.0, "d b e": 1.0}, 4)
    a, b, d = language.encode("a b d")

    @jax.jit
    def next_word(first_page: jax.Array) -> jax.Array:
        pages = make_pages(
            num_layers=1,
            num_pages=3,
            num_kv_heads=1,
            page_size=1,
            head_dim=1,
            dtype="float32",
        )
        first = Rows(
            token=jnp.asarray([a, d], jnp.int32),
            position=jnp.asarray([0, 0], jnp.int32),
            slot=None,
            page_ids=jnp.asarray([[0], [1]], jnp.int32),
            logit_rows=jnp.asarray([-1], jnp.int32),
        )
        words = first.token.astype(jnp.float32)[:, None, None]
        pages = pages.layout.write(pages, 0, words, words, first)
        # The third page contains a word that is no part of the text yet.
        table = jnp.asarray([[0, 2, 1, NO_PAGE], [NO_PAGE] * 4], jnp.int32)
        rows = Rows(
            token=jnp.asarray([b, b], jnp.int32),
            position=jnp.asarray([1, -1], jnp.int32),
            slot=None,
            page_ids=table.at[0, 0].set(first_page),
            logit_rows=jnp.asarray([0, -1], jnp.int32),
        )
        result = SentenceModel(language=language)(None, pages, rows)
        return result.logits[0].argmax()

    for first_page, following in ((0, "c"), (1, "e")):
        assert language.words[int(next_word(np.int32(first_page)))] == following
