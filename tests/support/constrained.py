"""A small vocabulary, drawn JSON schemas, and engines that answer under grammars."""

import dataclasses
import random
import re
from collections.abc import Iterable
from typing import Any

import jaxkv
from jaxkv.engine import EngineParts, EngineRules, Speculation
from jaxkv.models import PagedForward, make_model_pages
from jaxkv.sampling import Grammar
from tests.support import engines

END = 60
"""End token of the vocabulary."""
_TEXTS = (
    *'{}[]",:-0123456789abeflnrstu\\ x',
    *('":', '", "', "true", "false", "null", '{"', "aa", '"a', "1,", "], "),
    *("é", "日"),
)
TOKENS = (*(x.encode() for x in _TEXTS), b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5")
"""Texts of the first tokens; the remaining ones have none."""


class Vocabulary:
    """A tokenizer of given token texts, as a grammar reads it."""

    def __init__(self, texts: Iterable[bytes | None]):
        self._texts = list(texts)

    def token_bytes(self) -> list[bytes | None]:
        return self._texts

    def text(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens, end tokens excluded."""
        return b"".join(self._texts[i] or b"" for i in ids if i != END).decode()


VOCABULARY = Vocabulary([*TOKENS, *[None] * (61 - len(TOKENS))])
"""Vocabulary of `engines.MODEL`."""


def make_engine(
    speculation: Speculation | None = None, policy: Any = None, **fields: Any
) -> jaxkv.Engine:
    """Returns an engine of `engines.MODEL` with grammars."""
    bounds: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "max_slots": 8,
        "max_length": 64,
        "max_grammars": 8,
        "max_grammar_cells": 2**17,
        "steps_per_call": 8,
    }
    config = jaxkv.EngineConfig(**bounds | fields)
    model = dataclasses.replace(engines.MODEL, max_positions=config.max_length)
    parts = EngineParts(
        engines.params(),
        PagedForward(model, config.numerics),
        make_model_pages(model, config),
        config,
        eos_ids=(END,),
        vocab_size=61,
    )
    policy = jaxkv.fcfs() if policy is None else policy
    return jaxkv.Engine(parts, EngineRules(policy=policy, speculation=speculation))


def from_schema(schema: Any) -> Grammar:
    return Grammar.from_json_schema(schema, VOCABULARY)


def from_regex(pattern: str) -> Grammar:
    return Grammar.from_regex(pattern, VOCABULARY)


def draw_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Draws a schema whose documents are short, nested up to `depth`."""
    kinds = ["string", "integer", "boolean", "null", "enum"]
    kind = rng.choice(kinds + ["object", "array", "object", "any"] * (depth > 0))
    match kind:
        case "object":
            words = ["a", "e", "la", "x", "tu", "é", "a b"]
            names = rng.sample(words, rng.randrange(4))
            required = [name for name in names if rng.random() < 0.7]
            return {
                "type": "object",
                "properties": {name: draw_schema(rng, depth - 1) for name in names},
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(3)
            items = draw_schema(rng, depth - 1)
            bounds = {"minItems": low, "maxItems": low + rng.randrange(3)}
            return {"type": "array", "items": items, **bounds}
        case "any":
            return {"anyOf": [draw_schema(rng, depth - 1) for _ in range(2)]}
        case "string":
            low = rng.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + 2}
        case "enum":
            values = ["a", 'x"', "\\n\n", "日é", 7, -12, True, None, [1, "a"], {"a": 1}]
            return {"enum": rng.sample(values, rng.randrange(1, 4))}
    return {"type": kind}


def viable_prefixes(pattern: str, alphabet: str, length: int) -> tuple[set, set]:
    """Returns the matches of a pattern up to a length, and all prefixes of them."""
    texts = [""]
    matches = set()
    for _ in range(length + 1):
        matches |= {text for text in texts if re.fullmatch(pattern, text)}
        texts = [text + char for text in texts for char in alphabet]
    return matches, {text[:i] for text in matches for i in range(len(text) + 1)}
