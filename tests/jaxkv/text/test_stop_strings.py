"""Stop strings in answers of every kind of tokenizer, as in the engine."""

import random
from typing import Any

import pytest
import tokenizers

from jaxkv import Sampling
from jaxkv.serving import requests
from jaxkv.text import Tokenizer
from tests.support.tokenizers import (
    DECODERS,
    ids_of,
    random_ids,
    text_after,
    tokenizer_of,
)


def answered(
    tokenizer: Tokenizer, prompt: list[int], answer: list[int], *stops: str, **ask: Any
) -> tuple[str, list[int], str]:
    """Returns text, tokens and end reason of an answer with a limit on its length."""
    part = requests.PartialAnswer(
        stream=tokenizer.stream(prompt), search=tokenizer.stop_search(stops, prompt)
    )
    record = requests.RequestRecord(
        request_id=0,
        prompt=prompt,
        sampling=Sampling(stop=stops, **ask),
        arrival_s=0.0,
        end_tokens=(),
        answers=[part],
    )
    streamed_text = ""
    for i, token in enumerate(answer):
        reason = "length" if i + 1 == len(answer) else None
        event = record.extend(0, [token], [0.0], reason, 1.0)
        streamed_text += event.text
        if event.reason is not None:
            break
    record.close(0, None, 0)
    [finished] = record.complete().answers
    assert streamed_text == finished.text
    return streamed_text, finished.tokens, finished.reason


@pytest.mark.parametrize(
    ("stops", "answer", "pieces"),
    [
        # The text is held from the longest end that a stop string begins with.
        (["b" * 50, "aab"], "xaxbaac", ["x", "", "ax", "", "b", "", "aac"]),
        (["aab"], "aaab", ["", "", "a", ""]),
        (["abab!", "b?"], "ababab?", ["", "", "", "", "ab", "", "aba"]),
        # A stop string with a special token holds the text before that token.
        (["ab</s>"], "zab!ab", ["z", "", "", "ab!", "", "ab"]),
        (["ab</s>", "b!"], "zab~!", ["z", "", "", "", "a"]),
        (["b<s></s>"], "ab~~ca", ["a", "", "", "", "bc", "a"]),
    ],
)
def test_only_a_possible_match_is_held_back(
    stops: list[str], answer: str, pieces: list[str]
) -> None:
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({x: i for i, x in enumerate("abcxz!?")}, "x")
    )
    core.add_special_tokens(["<s>", "</s>"])
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = Tokenizer(core)
    ids = ids_of(tokenizer, *("<s>" if x == "~" else x for x in answer))
    search = tokenizer.stop_search(stops)
    part = requests.PartialAnswer(stream=tokenizer.stream(), search=search)
    record = requests.RequestRecord(
        request_id=0,
        prompt=[1],
        sampling=Sampling(stop=tuple(stops)),
        arrival_s=0.0,
        end_tokens=(),
        answers=[part],
    )
    texts = []
    for i, token in enumerate(ids):
        reason = "length" if i + 1 == len(ids) else None
        texts.append(record.extend(0, [token], [0.0], reason, 1.0).text)
    assert texts == pieces


@pytest.mark.parametrize("decoder", ["llama", "metaspace", "byte level", "bpe", "none"])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    decoder: str,
) -> None:
    tokenizer = tokenizer_of(DECODERS[decoder])
    rng = random.Random(decoder)
    for _ in range(15):
        prompt, answer = (random_ids(rng, tokenizer, num) for num in (3, 12))
        stops = rng.sample(("日", "éa", "a ", "ab", "b", "😀日", " <think>"), 2)
        text = text_after(tokenizer, prompt, answer)
        num = len(answer)
        reason = "length"
        for i in range(1, len(answer) + 1):
            so_far = text_after(tokenizer, prompt, answer[:i])
            places = [so_far.find(stop) for stop in stops if stop in so_far]
            if places:
                text = so_far[: min(places)]
                num = i
                reason = "stop"
                break
        expected = text, answer[:num], reason
        assert answered(tokenizer, prompt, answer, *stops) == expected


@pytest.mark.parametrize(
    ("decoder", "answer", "stop", "text", "num"),
    [
        # Special tokens, which the text hides.
        ("llama", ["▁a", "</s>", "b"], "</s>", " a", 2),
        ("llama", ["</s>", "b"], "</s>", "", 1),
        ("llama", ["▁a", "<end of turn>"], "<end of turn>", " a", 2),
        ("llama", ["▁ab▁", "</s>"], "b </s>", " a", 2),
        ("llama", ["▁a", "</s>", "▁ab▁"], "</s> a", " a", 3),
        ("llama", ["▁a", "<s>", "</s>"], "a<s></s>", " ", 3),
        ("llama", ["<s>", "bytes:日本", "</s>", "b"], "本</s>", "日", 8),
        ("metaspace", ["▁a", "<s>", "▁ab▁", "</s>"], "b </s>", " a a", 4),
        ("byte level", ["Ġa", "æĹ", "¥", "<s>"], "日<s>", " a", 4),
        ("word piece", ["do", "</s>", "a"], "</s>", " do", 2),
        ("bpe", ["a</w>", "</s>", "a"], "</s>", " a", 2),
        ("none", ["do", "</s>", "a"], "o </s>", " d", 2),
        # A part of a special token, which is not text.
        ("llama", ["▁a", "</s>", "b"], "/s", " ab", None),
        # Text that continues after a special token.
        ("llama", ["a", "</s>", "b"], "ab", "", 3),
        # Characters of bytes, added tokens and unfinished characters.
        ("llama", ["▁a", "bytes:日", "<0x80>", "b"], "日", " a", 4),
        ("llama", ["▁a", "<think>", "b"], "<think>", " a", 2),
        ("llama", ["a", "bytes:日", "<0xFF>"], "\ufffd", "a", 5),
        ("llama", ["a", "<0xE6>", "b"], "\ufffd", "a", 3),
        ("byte level", ["a", "æĹ", "¥", "b"], "\ufffd", "a日b", None),
    ],
)
def test_known_stop_strings(
    decoder: str, answer: list[str], stop: str, text: str, num: int | None
) -> None:
    tokenizer = tokenizer_of(DECODERS[decoder])
    prompt = ids_of(tokenizer, "b")
    ids = ids_of(tokenizer, *answer)
    if decoder == "bpe":
        prompt = ids_of(tokenizer, "a</w>")
    ending = answered(tokenizer, prompt, ids, stop)
    assert ending == (text, ids[:num], "length" if num is None else "stop")
