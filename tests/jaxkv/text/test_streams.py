"""Streaming decode compared with the library's decode of all tokens."""

import random
import time
from typing import Any

import pytest

from jaxkv.text import ByteTokenizer, streams
from jaxkv.text.streams import TextStream
from tests.support.tokenizers import (
    DECODERS,
    ids_of,
    random_ids,
    text_after,
    tokenizer_of,
)


def streamed(stream: TextStream, ids: list[int]) -> str:
    return "".join(map(stream.push, ids)) + stream.finish()


def check_random_answers(name: str, num: int, **settings: Any) -> None:
    tokenizer = tokenizer_of(DECODERS[name], **settings)
    rng = random.Random(name)
    for _ in range(num):
        answer = random_ids(rng, tokenizer, rng.choice((0, 1, 2, 3, 5, 8, 13, 30)))
        prompt = random_ids(rng, tokenizer, rng.choice((0, 1, 2, 3, 6, 12, 30)))
        skip = rng.random() < 0.7
        full_text = tokenizer.decode(answer, skip_special_tokens=skip)
        stream = tokenizer.stream(skip_special_tokens=skip)
        assert streamed(stream, answer) == full_text, (prompt, answer)
        assert (
            streamed(stream, answer) == full_text
        )  # a finished stream can be used again
        stream = tokenizer.stream(prompt, skip_special_tokens=skip)
        expected = text_after(tokenizer, prompt, answer, skip)
        assert streamed(stream, answer) == expected, (prompt, answer)


@pytest.mark.parametrize("name", DECODERS)
def test_random_answers(name: str) -> None:
    check_random_answers(name, 12)


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", DECODERS)
def test_many_random_answers(name: str) -> None:
    check_random_answers(name, 20_000)


def test_spaces_are_cleaned_up_by_setting() -> None:
    check_random_answers("word piece", 20, clean_up_tokenization_spaces=True)
    tokenizer = tokenizer_of(None, clean_up_tokenization_spaces=True)
    assert tokenizer.decode(ids_of(tokenizer, "a", ".", "b")) == "a. b"


def test_random_bytes() -> None:
    tokenizer = ByteTokenizer(260)
    rng = random.Random(0)
    for _ in range(100):
        data = "a日é😀".encode() if rng.random() < 0.5 else rng.randbytes(8)
        ids = [token + 200 * (rng.random() < 0.1) for token in data]
        ids = [min(token, 259) for token in ids]
        cut = rng.randrange(len(ids) + 1)
        assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids)
        expected = text_after(tokenizer, ids[:cut], ids[cut:])
        assert streamed(tokenizer.stream(ids[:cut]), ids[cut:]) == expected


@pytest.mark.parametrize(
    ("decoder", "prompt", "answer", "text"),
    [
        ("llama", [], ["bytes:日本"], "日本"),
        ("llama", ["▁a"], ["▁ab▁"], " ab "),
        ("llama", [], ["▁ab▁"], "ab "),
        ("llama", ["▁a", "</s>"], ["▁a"], " a"),
        ("gemma", ["a"], ["▁", "bytes:é", "</s>", "bytes:é"], " éé"),
        ("metaspace", [], ["▁a", "</s>", "▁ab▁"], "a ab "),
        ("metaspace", ["<s>"], ["▁a"], "a"),
        ("word piece", ["do"], ["not", "##a", "."], " nota."),
        ("bpe", ["a</w>"], ["a</w>", "a"], " a a"),
        ("byte level", ["Ġa"], ["Ġa", "æĹ", "¥"], " a日"),
        ("none", ["a"], ["b", "</s>", "b"], " b b"),
    ],
)
def test_known_answers(
    decoder: str, prompt: list[str], answer: list[str], text: str
) -> None:
    tokenizer = tokenizer_of(DECODERS[decoder])
    before = ids_of(tokenizer, *prompt)
    ids = ids_of(tokenizer, *answer)
    assert streamed(tokenizer.stream(before), ids) == text
    assert text_after(tokenizer, before, ids) == text


@pytest.mark.parametrize(
    ("cut", "more", "text"),
    [
        ("bytes:日", [], ""),
        ("bytes:日", ["bytes:本"], "本"),
        ("bytes:日", ["a"], "a"),
        ("<0xE6>", ["<0x97>", "<0xA5>", "a"], "日a"),
        ("<0xE6>", ["a"], "a"),
        # One broken byte also breaks those of the prompt: no text is shared.
        ("bytes:日", ["<0xFF>"], "\ufffd" * 4),
    ],
)
def test_a_prompt_that_ends_in_bytes(cut: str, more: list[str], text: str) -> None:
    tokenizer = tokenizer_of(DECODERS["llama"])
    prompt = ids_of(tokenizer, "▁a", cut)
    answer = ids_of(tokenizer, *more)
    assert streamed(tokenizer.stream(prompt), answer) == text
    assert text_after(tokenizer, prompt, answer) == text


def test_final_text_is_returned_immediately() -> None:
    def pieces(decoder: str, *texts: str) -> list[str]:
        tokenizer = tokenizer_of(DECODERS[decoder])
        stream = tokenizer.stream()
        return [stream.push(token) for token in ids_of(tokenizer, *texts)]

    assert pieces("llama", "a", "bytes:é", "▁a") == ["a", "", "", "é a"]
    assert pieces("llama", "<0xFF>", "<0xC3>", "a") == ["\ufffd", "\ufffd", "a"]
    assert pieces("llama", "<0xC3>", "<0xFF>") == ["", "\ufffd\ufffd"]
    assert pieces("byte level", "a", "æĹ", "¥", "Ġa") == ["a", "", "日", " a"]
    assert pieces("metaspace", "▁a", "</s>", "▁") == ["a", "", " "]
    assert pieces("bpe", "a</w>", "b") == ["", "a "]


def test_tail_returns_held_back_text() -> None:
    tokenizer = tokenizer_of(DECODERS["llama"])
    stream = tokenizer.stream(ids_of(tokenizer, "bytes:日"))
    tails = []
    for token in ids_of(tokenizer, "bytes:本語", "a"):
        assert stream.push(token) == ("本語a" if len(tails) == 6 else "")
        tails.append(stream.tail())
    # Without the incomplete character.
    assert tails == ["", "", "本", "本", "本", "本語", ""]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("decoder", "texts"),
    [
        ("llama", ["<0x80>"]),
        ("llama", ["bytes:日"]),
        ("byte level", ["æ"]),
        ("metaspace", ["</s>"]),
        ("expression over tokens", ["aa"]),
    ],
)
def test_time_is_linear_in_tokens(decoder: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(DECODERS[decoder])
    ids = ids_of(tokenizer, *texts)

    def seconds(num: int) -> float:
        best = float("inf")
        for _ in range(3):
            stream = tokenizer.stream()
            start = time.process_time()
            streamed(stream, ids * num)
            best = min(best, time.process_time() - start)
        return best

    # Ten times the tokens take ten times the time, not a hundred times.
    assert seconds(6_000) < 40 * seconds(600)


def test_a_pattern_over_several_pieces_is_replaced() -> None:
    for text in ("xabcy", "aababcc", "ababab"):
        stage = streams._ReplaceStage("abc", "-")
        pieces = [piece for letter in text for piece in stage.push(letter)]
        assert "".join([*pieces, *stage.held(True)]) == text.replace("abc", "-")
