"""Special tokens named in several files of a folder, compared with transformers."""

import json
import warnings
from typing import Any

import pytest

from jaxkv.text import Tokenizer, special_tokens
from jaxkv.text.tokenizer import ByteTokenizer
from tests.support.folders import GOLDEN
from tests.support.tokenizers import DECODERS, tokenizer_of

FOLDERS: list[dict[str, Any]] = json.loads((GOLDEN / "named_tokens.json").read_text())
CHATS: list[dict[str, Any]] = json.loads((GOLDEN / "chats.json").read_text())
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def tokenizer_in(folder: dict[str, Any]) -> Tokenizer:
    files = folder["files"]
    return Tokenizer.from_json(
        json.dumps(folder["core"]),
        settings=files["tokenizer_config"],
        special_map=files.get("special_tokens_map"),
        added_tokens=files.get("added_tokens"),
    )


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_special_tokens_agree_with_transformers(number: int) -> None:
    folder = FOLDERS[number]
    tokenizer = tokenizer_in(folder)
    added = {
        str(token): [text.content, *(getattr(text, name) for name in FLAGS)]
        for token, text in tokenizer.core.get_added_tokens_decoder().items()
    }
    assert added == folder["added"]
    assert tokenizer.special_tokens == folder["roles"]
    eos = [] if folder["eos"] is None else [folder["eos"]]
    assert tokenizer.special_ids("eos_token") == eos
    for text, ids in folder["encoded"]:
        assert tokenizer.encode(text) == ids
    for ids, shown, hidden in folder["decoded"]:
        assert tokenizer.decode(ids, skip_special_tokens=False) == shown
        assert tokenizer.decode(ids) == hidden
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == hidden
    files = tokenizer.files()
    again = Tokenizer.from_json(
        files["tokenizer.json"], settings=json.loads(files["tokenizer_config.json"])
    )
    assert again.core.get_vocab() == tokenizer.core.get_vocab()
    assert again.special_tokens == folder["roles"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"bos_token": 3}, "bos_token=3 must be a text"),
        ({"extra_special_tokens": [3]}, "extra_special_tokens=3 must be a text"),
        ({"extra_special_tokens": "<s>"}, "extra_special_tokens='<s>' must be a list"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder=\[\] must be an object"),
        ({"added_tokens_decoder": {"x": "<s>"}}, "token id 'x' must be a whole number"),
        ({"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder={} must be a text"),
    ],
)
def test_tokens_without_text_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        special_tokens.read_special_tokens(settings, None, None, [])


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_chats_agree_with_transformers(number: int) -> None:
    chat = CHATS[number]
    tokenizer = tokenizer_of(None, bos_token="<s>", eos_token="</s>")
    tokenizer.settings["chat_template"] = chat["template"]
    arguments = chat["messages"], True
    text = tokenizer.apply_chat_template(*arguments, **chat["arguments"])
    assert text == chat["text"]
    ids = tokenizer.encode_chat(*arguments, **chat["arguments"])
    assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"tools": "f"}, "tools must be a list of mappings, or None"),
        ({"tools": [len]}, "tools must be a list of mappings"),
        ({"documents": [3]}, "documents must be a list of mappings"),
        ({"continue_final_message": True}, "continue_final_message is no variable"),
        ({"tokenize": False}, "tokenize is no variable"),
        ({"x": {1}}, "the chat template failed"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_invalid_chat_template_arguments(arguments: dict[str, Any], line: str) -> None:
    tokenizer = ByteTokenizer(257)
    tokenizer.settings["chat_template"] = "{{ messages[0].content }}"
    user = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(user) == "a"
    with pytest.raises(ValueError, match=line):
        tokenizer.apply_chat_template(user, **arguments)
    with pytest.raises(ValueError, match="messages must be a list"):
        tokenizer.apply_chat_template([])


def test_duplicate_bos_token_warns_once() -> None:
    text = (GOLDEN / "tokenized" / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_json(text, settings={"bos_token": "<|begin|>"})
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        for plain in ("", "a", "aa", "a<|begin|>"):
            tokenizer.encode(plain)
        tokenizer.encode("<|begin|><|begin|>a", add_special_tokens=False)
        assert not caught_warnings
        assert tokenizer.encode("<|begin|>a")[:2] == [0, 0]
        tokenizer.encode("<|begin|>b")
    assert [str(warning.message)[:32] for warning in caught_warnings] == [
        "the text begins with '<|begin|>'"
    ]
    other = tokenizer_of(DECODERS["none"])
    assert other.encode("<s><s>a") == other.encode("<s><s>a", add_special_tokens=False)
