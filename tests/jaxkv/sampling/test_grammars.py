"""Grammars compared with `re` on prefixes; refused schemas; bytes of tokens."""

import importlib.util
import json
import random
import re
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from jaxkv import sampling
from jaxkv.sampling import Grammar, grammars, json_schemas
from jaxkv.text import ByteTokenizer
from tests.support import constrained, tokenizers
from tests.support.constrained import Vocabulary
from tests.support.refusals import refused

WORDS = Vocabulary([b"a", b"b", b"1", b"ab", b"1a", b"aa", None, b""])
"""Tokens over the alphabet "ab1"; an end token and one without bytes."""
PATTERNS = (
    r"(ab|a1)b?",
    r"a{2,4}1?",
    r"[ab]{0,3}1",
    r"(a|b1){1,2}",
    r"",
    r"(a|ab)(1|b1)?",
    r"[^a]{2}",
    r"a|ab1",
    r"(a|b1)??1?",
    r"a(b1){0,2}",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_allowed_tokens_are_those_of_prefixes_by_re(pattern: str) -> None:
    matches, prefixes = constrained.viable_prefixes(pattern, "ab1", 6)
    grammar = Grammar.from_regex(pattern, WORDS)
    tables = sampling.make_grammar_tables(2, 9, 256)
    tables = sampling.load_grammar(tables, 1, grammar, end_tokens=[6])
    classes, cells = map(np.asarray, tables)
    texts = [x.decode() if x else None for x in WORDS.token_bytes()]
    # Every prefix that tokens can write, with the state after it.
    pending = [("", 256)]
    seen = set()
    while pending:
        text, state = pending.pop()
        if text in seen:
            continue
        seen.add(text)
        after = cells.reshape(-1)[state + classes[1]]
        for token, piece in enumerate(texts):
            if token == 6:
                assert (after[token] == state) == (text in matches), text
            elif piece is None:
                assert after[token] == grammars.FORBIDDEN
            else:
                assert (after[token] >= 0) == (text + piece in prefixes), (text, piece)
                if after[token] >= 0:
                    pending.append((text + piece, int(after[token])))
        assert after[8] == grammars.FORBIDDEN  # beyond the grammar's vocabulary
    assert seen == prefixes


def test_rows_without_a_grammar_are_unchanged_and_others_masked() -> None:
    grammar = Grammar.from_regex("a1?", WORDS)
    tables = sampling.make_grammar_tables(1, 8, 64)
    tables = sampling.load_grammar(tables, 0, grammar, end_tokens=[6])
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    masked = sampling.mask_forbidden(tables, jnp.array([-1, 0], jnp.int32), logits)
    np.testing.assert_array_equal(masked[0], logits[0])
    assert np.flatnonzero(np.isfinite(masked[1])).tolist() == [0]
    state = sampling.next_grammar_state(tables, jnp.int32(0), jnp.int32(0))
    masked = sampling.mask_forbidden(tables, state[None], logits[:1])
    assert np.flatnonzero(np.isfinite(masked[0])).tolist() == [2, 6]


def test_states_from_which_the_vocabulary_ends_no_answer_are_dropped() -> None:
    words = Vocabulary([b"a", b"c", b"d"])
    for pattern in ("ab|cd", r"a\x00d|cd"):
        grammar = Grammar.from_regex(pattern, words)
        allowed = grammar.table[0, grammar.classes] >= 0
        assert allowed.tolist() == [False, True, False]
    with refused("grammar='ab' accepts no text of this vocabulary"):
        Grammar.from_regex("ab", words)
    with refused("accepts no text of this vocabulary"):
        Grammar.from_regex(r"\x00", words)


def test_bytes_of_characters_may_be_divided_over_tokens() -> None:
    grammar = Grammar.from_regex("[é日]", constrained.VOCABULARY)
    tokens = constrained.TOKENS
    for texts in (["é".encode()], [b"\xc3", b"\xa9"], [b"\xe6\x97", b"\xa5"]):
        state = 0
        for text in texts:
            state = grammar.table[state, grammar.classes[tokens.index(text)]]
        assert grammar.table[state, grammars.END_CLASS] == state
    assert grammar.table[0, grammar.classes[tokens.index(b"\xa9")]] < 0


def test_bounded_repetitions_need_few_states() -> None:
    # Exponential in the bound, if a match could begin at any byte.
    schema = {"type": "string", "maxLength": 60}
    grammar = Grammar.from_json_schema(schema, ByteTokenizer(257))
    assert 60 < grammar.table.shape[0] < 60 * 12


def test_equal_grammars_are_built_once_and_have_one_hash() -> None:
    first = Grammar.from_regex("a|b", WORDS)
    assert Grammar.from_regex("a|b", WORDS) is first
    other = Grammar.from_regex("b|a", WORDS)
    assert other == first
    assert hash(other) == hash(first)
    assert Grammar.from_regex("a", WORDS) != first


@pytest.mark.parametrize("pattern", ["(", "a)|(b", "a(?=b)", r"\bfoo", "^a"])
def test_expressions_that_have_no_automaton_are_refused(pattern: str) -> None:
    with refused("grammar="):
        Grammar.from_regex(pattern, WORDS)


def test_a_table_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_TABLE_BYTES", 64)
    with refused("needs a table above MAX_TABLE_BYTES=64"):
        Grammar.from_regex("[ab]{0,9}1", WORDS)


def test_without_the_library_grammars_are_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = "a grammar needs outlines_core: pip install 'jaxkv[grammar]'"
    with refused(line):
        Grammar.from_regex("abab", WORDS)
    with refused(line):
        Grammar.from_json_schema({"type": "null"}, WORDS)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
REFUSED: dict[str, tuple[Any, str]] = {
    "minimum": ({"type": "integer", "minimum": 3}, "'minimum' is not supported"),
    "multipleOf": ({"type": "number", "multipleOf": 2}, "'multipleOf' is not"),
    "pattern": ({"type": "string", "pattern": "^a$"}, "'pattern' is not supported"),
    "format": ({"type": "string", "format": "date"}, "'format' is not supported"),
    "uniqueItems": (
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
        "'uniqueItems' is not supported",
    ),
    "prefixItems": ({"type": "array", "prefixItems": []}, "'prefixItems' is not"),
    "minProperties": ({"type": "object", "minProperties": 1}, "'minProperties' is"),
    "patternProperties": (
        {"type": "object", "patternProperties": {}},
        "'patternProperties' is not supported",
    ),
    "oneOf": ({"oneOf": [{"type": "null"}]}, "type=None must be one"),
    "allOf": ({"type": "null", "allOf": []}, "'allOf' is not supported"),
    "not": ({"type": "null", "not": {}}, "'not' is not supported"),
    "with anyOf": (
        {"type": "null", "anyOf": [{"type": "null"}]},
        "'type' is not supported with anyOf",
    ),
    "no type": ({}, "type=None must be one or a list of object, array, string"),
    "true": (True, "schema at #: True must be an object"),
    "no items": ({"type": "array"}, "items must be given"),
    "no properties": ({"type": "object"}, "properties must be given"),
    "required": (
        {"type": "object", "properties": {}, "required": ["a"]},
        "required has 'a', which is not in properties",
    ),
    "a name": (
        {"type": "object", "properties": {'q"': {"type": "null"}}},
        "must have no characters that JSON escapes",
    ),
    "bounds": ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength=2 must"),
    "large bounds": ({"type": "string", "maxLength": 9999}, "in [0, 1024]"),
    "recursion": ({"$ref": "#"}, "$ref='#' is recursive"),
    "deep recursion": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        "$ref='#/$defs/node' is recursive",
    ),
    "no target": ({"$ref": "#/$defs/x"}, "is not in the schema"),
    "another document": ({"$ref": "http://a"}, "must begin with #"),
    "a float": ({"enum": [0.5]}, "must have no floating-point numbers"),
    "no value": ({"enum": ["a"], "type": "integer"}, "has no value of type integer"),
    "a large number": ({"const": 2**70}, "must be"),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemas_are_refused_by_name(name: str) -> None:
    schema, line = REFUSED[name]
    with refused(line):
        json_schemas.schema_pattern(schema)


def test_patterns_of_schemas_match_their_documents() -> None:
    schema = {
        "title": "ignored",
        "type": "object",
        "properties": {
            "kind": {"const": "x.y", "type": "string"},
            "size": {"type": ["integer", "null"]},
            "part": {"$ref": "#/$defs/part"},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        "required": ["kind", "part", "map"],
        "$defs": {"part": {"type": "array", "items": {"enum": [1, "é"]}}},
    }
    pattern = json_schemas.schema_pattern(schema)
    document = {"kind": "x.y", "size": None, "part": [1, "é"], "map": {"q": True}}
    jsonschema.validate(document, schema)
    assert re.fullmatch(pattern, json.dumps(document, ensure_ascii=False))
    changes = {"kind": "xxy", "size": "1", "part": [2], "map": {"q": 1}}
    for name, value in changes.items():
        wrong = json.dumps(document | {name: value}, ensure_ascii=False)
        assert not re.fullmatch(pattern, wrong)
    nested = '{"a": [1, {"b": null}], "c": {}}'
    assert re.fullmatch(
        json_schemas.schema_pattern(sampling.json_object_schema()), nested
    )


OVER_TOKENS = {
    *(
        "bytes, byte level",
        "fuse, byte level",
        "bpe",
        "ctc",
        "ctc, word piece",
        "fuse, bpe",
        "metaspace, bpe",
    ),
    *("bpe, fused metaspace", "byte level, word piece", "patterns over tokens"),
    *("expression over tokens",),
}
"""Decoders that change text over several tokens."""


@pytest.mark.parametrize("name", tokenizers.DECODERS)
def test_bytes_of_tokens_are_those_of_texts(name: str) -> None:
    tokenizer = tokenizers.tokenizer_of(tokenizers.DECODERS[name])
    if name in OVER_TOKENS:
        with refused("single tokens have no bytes"):
            tokenizer.token_bytes()
        return
    texts = tokenizer.token_bytes()
    rng = random.Random(0)
    # Without incomplete characters, which become replacement characters.
    words = [
        token
        for token, text in enumerate(texts[: len(tokenizers.WORDS)])
        if text is not None and text == text.decode(errors="ignore").encode()
    ]
    words += tokenizers.ids_of(tokenizer, "<think>", "<s>", "</s>")
    for _ in range(20):
        prompt = tokenizers.ids_of(tokenizer, "ab", "b")
        answer = rng.choices(words, k=4)
        if "byte" in name and "level" not in name:
            answer += tokenizers.ids_of(tokenizer, "bytes:日", "a")
        stream = tokenizer.stream(prompt)
        text = "".join(map(stream.push, answer)) + stream.finish()
        assert b"".join(texts[i] or b"" for i in answer).decode() == text
