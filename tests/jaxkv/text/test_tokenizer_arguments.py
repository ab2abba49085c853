"""Tokenizers refuse ids that are no token ids, and texts that are no texts."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxkv.text import ByteTokenizer, Tokenizer, encode_texts, train_tokenizer

pytestmark = pytest.mark.usefixtures("no_type_checks")

TOKENIZERS: list[Any] = [
    Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a"))),
    ByteTokenizer(257),
]
NOT_IDS: list[Any] = [
    -1,
    5.0,
    True,
    np.bool_(True),
    np.float32(5),
    "5",
    b"5",
    None,
    5j,
    2**31,
]
NOT_IDS += [2**70, [5], float("nan")]
NOT_SEQUENCES: list[Any] = [
    b"ab",
    bytearray(b"ab"),
    "ab",
    5,
    None,
    {5},
    {5: 5},
    np.ones(2),
]
NOT_SEQUENCES += [np.array([True]), np.ones((2, 2), int), np.array([-1]), memoryview]
NOT_TEXTS: list[Any] = [b"ab", 5, -1, True, None, 5.0, ["a"], "\ud800", np.str_]


def refuses(call: Callable[[Any], Any], value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        call(value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["json", "bytes"])
def test_a_tokenizer_refuses_values_that_are_no_token_ids(tokenizer: Any) -> None:
    kind = type(tokenizer)
    argument = 257 if kind is ByteTokenizer else tokenizer.core
    calls: list[tuple[Callable[[Any], Any], str]] = [
        (tokenizer.decode, "ids"),
        (tokenizer.stream, "context"),
        (lambda ids: tokenizer.stop_search(["a"], ids), "context"),
        (lambda ids: kind(argument, eos_ids=ids), "eos_ids"),
    ]
    for call, name in calls:
        for token in NOT_IDS:
            refuses(call, [token], name)
            refuses(call, (1, token), name)
            refuses(call, iter([1, token]), name)
        for ids in NOT_SEQUENCES:
            if not (ids is None and name == "eos_ids" and kind is ByteTokenizer):
                refuses(call, ids, name)
    for token in NOT_IDS:
        refuses(tokenizer.stream().push, token, "token")


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["json", "bytes"])
def test_a_tokenizer_refuses_values_that_are_no_text(tokenizer: Any) -> None:
    for text in NOT_TEXTS:
        refuses(tokenizer.encode, text, "text")
        refuses(lambda text: tokenizer.stop_search([text]), text, "stops")
    for stops in ("ab", b"ab", 5, None):
        refuses(tokenizer.stop_search, stops, "stops")
    for flag in (1, 0, "no", None, 1.0):
        refuses(lambda flag: tokenizer.encode("a", flag), flag, "add_special_tokens")
        for call in (
            lambda flag: tokenizer.decode([1], flag),
            lambda flag: tokenizer.stream(skip_special_tokens=flag),
        ):
            refuses(call, flag, "skip_special_tokens")


def test_batches_of_texts_are_checked_text_by_text() -> None:
    for text in NOT_TEXTS:
        texts = ["a", text]
        refuses(lambda x: [*encode_texts(TOKENIZERS[0], x)], texts, "texts")
        refuses(lambda x: train_tokenizer(x, 257), texts, "texts")
    for texts in ("ab", b"ab", 5, None):
        refuses(lambda x: [*encode_texts(TOKENIZERS[0], x)], texts, "texts")
        refuses(lambda x: train_tokenizer(x, 257), texts, "texts")
    for size in (*NOT_IDS[:-4], 256):
        refuses(lambda x: train_tokenizer(["a"], x), size, "vocab_size")
        refuses(ByteTokenizer, size if size != 256 else 255, "vocab_size")


def test_ids_of_every_integer_type_are_accepted() -> None:
    for tokenizer in TOKENIZERS:
        text = tokenizer.decode([1, 2])
        arrays = np.array([1, 2], np.uint8), jnp.array([1, 2])
        for ids in ((1, 2), range(1, 3), iter([1, 2]), *arrays, [*arrays[0]]):
            assert tokenizer.decode(ids) == text
        stream = tokenizer.stream(np.array([1]))
        pushed = stream.push(np.int64(2)) + stream.finish()
        assert pushed.strip() == tokenizer.decode([2])
        # A model may have more tokens than its tokenizer.
        assert tokenizer.decode([50_000]) == tokenizer.decode([]) == ""
