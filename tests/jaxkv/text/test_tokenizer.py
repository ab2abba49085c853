"""Tokenizers, streams and chats compared with transformers on the same folders."""

import json
import sys
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.text import chat_templates
from jaxkv.text.tokenizer import ByteTokenizer, Tokenizer
from tests.support.folders import TOKENIZED

FOLDER = TOKENIZED
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected_text.json").read_text())
AWKWARD = "naïve 漢字 \U0001f469\u200d\U0001f680 e\u0301 \ufffd.\n"


def load() -> Tokenizer:
    return Tokenizer.from_json(
        (FOLDER / "tokenizer.json").read_text(),
        eos_ids=[1],
        settings=json.loads((FOLDER / "tokenizer_config.json").read_text()),
    )


def streamed(stream: Any, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("case", EXPECTED["texts"], ids=lambda case: case["text"][:9])
def test_text_agrees_with_transformers(case: dict[str, Any]) -> None:
    tokenizer = load()
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert (
        tokenizer.encode(case["text"], add_special_tokens=False)
        == case["ids_without_special"]
    )
    assert tokenizer.decode(case["ids"]) == case["decoded"]


@pytest.mark.parametrize("case", EXPECTED["chats"])
def test_chats_agree_with_transformers(case: dict[str, Any]) -> None:
    tokenizer = load()
    arguments = case["messages"], case["add_generation_prompt"]
    assert tokenizer.apply_chat_template(*arguments) == case["rendered"]
    assert tokenizer.encode_chat(*arguments) == case["ids"]


def test_files_describe_the_tokenizer() -> None:
    tokenizer = load()
    files = tokenizer.files()
    again = Tokenizer.from_json(
        files["tokenizer.json"], settings=json.loads(files["tokenizer_config.json"])
    )
    assert again.vocab_size == tokenizer.vocab_size == 320
    assert again.encode(AWKWARD) == tokenizer.encode(AWKWARD)
    assert again.special_tokens == tokenizer.special_tokens
    assert again.special_tokens["bos_token"] == "<|begin|>"


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_streams_return_whole_characters(text: str) -> None:
    for tokenizer in (load(), ByteTokenizer(257)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = streamed(tokenizer.stream(), ids)
        assert "".join(parts) == text == tokenizer.decode(ids)
        assert "".join(parts).isascii() or all(
            part.count("\ufffd") <= text.count("\ufffd") for part in parts
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=40))
def test_streams_replace_broken_characters(ids: list[int]) -> None:
    tokenizer = load()
    assert "".join(streamed(tokenizer.stream(), ids)) == tokenizer.decode(ids)
    narrow = ByteTokenizer(264)
    ids = [token % 264 for token in ids]
    assert "".join(streamed(narrow.stream(), ids)) == narrow.decode(ids)


def test_streams_hold_incomplete_characters_back() -> None:
    tokenizer = ByteTokenizer(256)
    assert streamed(tokenizer.stream(), [0x41, 0xE6, 0xBC, 0xA2]) == [
        "A",
        "",
        "",
        "漢",
        "",
    ]
    assert streamed(tokenizer.stream(), [0xE6, 0xBC]) == ["", "", "\ufffd"]


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Words that start with a block, and bytes: the layout of Llama 2's tokenizer."""
    vocab = {"▁Hello": 0, "▁world": 1, "!": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    core.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return core


def test_streams_keep_spaces_and_byte_fallback() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    ids = [0, 1, *(3 + byte for byte in "漢é".encode()), 1, 2]
    assert tokenizer.decode(ids) == "Hello world漢é world!"
    parts = streamed(tokenizer.stream(), ids)
    assert "".join(parts) == "Hello world漢é world!"
    assert "\ufffd" not in "".join(parts)


def test_stream_does_not_hold_text_back_forever() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    stream = tokenizer.stream()
    parts = [stream.push(3 + 0x80) for _ in range(200)]
    assert len("".join(parts)) > 150
    assert stream.push(1).endswith("world")


def test_byte_tokenizer() -> None:
    assert ByteTokenizer(256).eos_ids == ()
    assert ByteTokenizer(257).eos_ids == (256,)
    assert ByteTokenizer(260, eos_ids=[259]).eos_ids == (259,)
    assert ByteTokenizer(257).encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer(257).decode([97, 0xC3, 0xA9, 256]) == "aé"
    assert ByteTokenizer(257).files() == {}


@pytest.mark.parametrize("vocab_size", [255, 265])
def test_byte_tokenizer_vocabulary_size(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size="):
        ByteTokenizer(vocab_size)


@pytest.mark.parametrize("tokenizer", [load(), ByteTokenizer(256)])
def test_lone_surrogate_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud83d")


def test_a_broken_tokenizer_file_is_refused() -> None:
    for text in ("", "{}", '{"model": 3}', "\0"):
        with pytest.raises(ValueError, match="not a tokenizer") as info:
            Tokenizer.from_json(text)
        assert "\n" not in str(info.value)


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "messages", "line"),
    [
        (None, USER, "no chat template"),
        ([{"name": "rag", "template": "x"}], USER, "no chat template"),
        ("{{ messages", USER, "template failed"),
        ("{{ messages[7].content }}", USER, "template failed"),
        ("{{ 1 / 0 }}", USER, "division by zero"),
        ("{{ raise_exception('no such role') }}", USER, "no such role"),
        ("{{ ''.__class__.__mro__ }}", USER, "unsafe"),
        ("{{ messages.append(1) }}", USER, "unsafe|not safely callable"),
        ({"a": "x"}, USER, "no text but of type dict"),
        (7, USER, "no text but of type int"),
        ([7, {"name": "default", "template": 7}], USER, "no text but of type int"),
        ("{{ 'a' * 10 ** 12 }}", USER, r"\* makes too large a value"),
        ("{{ 2 ** 99999999 }}", USER, r"\*\* makes too large a value"),
        ("{{ [1] * 10 ** 12 }}", USER, r"\* makes too large a value"),
        ("x", [{"role": "user"}], "message 0 must have a role and a content"),
        ("x", [3], "message 0 must have a role and a content"),
        ("x", "hi", "messages must be a list"),
        ("x", None, "messages must be a list"),
        ("x", [{"role": "user", "content": b"bytes"}], "template failed"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_bad_templates_and_messages(template: Any, messages: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as info:
        chat_templates.render(template, messages)
    assert "\n" not in str(info.value)


MANY = "{% for i in range(100000) %}"


@pytest.mark.parametrize(
    "template",
    [
        MANY + MANY + "{% endfor %}{% endfor %}",
        MANY + MANY.replace(" %}", " if false %}") + "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(90) }}",
    ],
    ids=["nested", "filtered", "recursive"],
)
def test_endless_templates_are_stopped(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "MAX_TEMPLATE_STEPS", 20_000)
    before = sys.gettrace()
    with pytest.raises(ValueError, match="it takes more than 20,000 steps"):
        chat_templates.render(template, USER)
    assert sys.gettrace() is before
    assert (
        chat_templates.render("{{ 3 * 4 + 2 ** 8 }}{{ 'ab' * 2 }}", USER) == "268abab"
    )


def test_templates_have_their_helpers() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ bos_token }}{{ pad_token }}"
    )
    text = chat_templates.render(
        [{"name": "default", "template": template}],
        [{"role": "user", "content": "<Ω&>"}] * 2,
        {"bos_token": "<s>"},
    )
    assert text == '{"role": "user", "content": "<Ω&>"}4<s>'


def test_tools_are_passed_to_templates() -> None:
    template = (
        "{% if tools is not none %}{{ tools[0].name }}{% endif %}{{ messages|length }}"
    )
    tokenizer = ByteTokenizer(256)
    tokenizer.settings["chat_template"] = template
    tools = [{"name": "look"}]
    assert tokenizer.encode_chat(USER) == list(b"1")
    assert tokenizer.encode_chat(USER, tools=tools) == list(b"look1")


def test_offsets_are_the_starts_of_tokens_in_the_text() -> None:
    tokenizer = load()
    for text in (
        AWKWARD,
        "a<|end|>b",
        "def f(x):\n  return",
        "日<|role|> <|end|>é",
        "",
    ):
        ids = tokenizer.encode(text)
        offsets = tokenizer.offsets(text)
        shown = tokenizer.stream(skip_special_tokens=False)
        shown.push(ids[0])  # the tokenizer adds the first token
        lengths = [0, *(len(shown.push(token)) for token in ids[1:])]
        assert offsets == [0, *(sum(lengths[: i + 1]) for i in range(len(ids) - 1))]
    assert tokenizer.offsets("a<|end|>b") == [0, 0, 1, 8]
    # A token that absorbs the spaces around it.
    absorbing = tokenizers.AddedToken("<e>", lstrip=True, rstrip=True, special=True)
    tokenizer.core.add_special_tokens([absorbing])
    assert tokenizer.offsets("a <e>  b") == [0, 0, 1, 7]
    assert ByteTokenizer(256).offsets("aé日b") == [0, 1, 1, 2, 2, 2, 3]
