"""Grammars over HTTP: `response_format` and `regex` become grammars or are refused."""

import json
from typing import Any, NamedTuple

import pytest

from jaxkv.sampling import Grammar, json_object_schema
from jaxkv.server import openai_requests
from jaxkv.server.openai_requests import ApiError
from jaxkv.text import ByteTokenizer

TOKENIZER = ByteTokenizer(257)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "strict": True, "schema": SCHEMA}


class FormatBackend(NamedTuple):
    """The parts of a backend that parsing reads."""

    tokenizer: ByteTokenizer = TOKENIZER
    model_name: str = "m"
    max_length: int = 100
    adapters: tuple[str, ...] = ()

    def status(self) -> dict[str, Any]:
        return {}

    def stream(self, *args: Any, **fields: Any) -> Any:
        raise NotImplementedError


def grammar_of(**fields: Any) -> Grammar | None:
    body = json.dumps({"prompt": "text", "n": 2} | fields).encode()
    request = openai_requests.parse_completion(body, {}, FormatBackend(), 5.0)
    return request.samplings[0].grammar


def test_formats_become_grammars() -> None:
    assert grammar_of() is None
    assert grammar_of(response_format={"type": "text"}) is None
    expected = Grammar.from_regex("[ab]+", TOKENIZER)
    assert grammar_of(regex="[ab]+") == expected
    expected = Grammar.from_json_schema(SCHEMA, TOKENIZER)
    how = {"type": "json_schema", "json_schema": NAMED}
    assert grammar_of(response_format=how) == expected
    expected = Grammar.from_json_schema(json_object_schema(), TOKENIZER)
    assert grammar_of(response_format={"type": "json_object"}) == expected


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"response_format": {"type": "json_schema"}}, "must be of type text"),
        ({"response_format": {"type": "grammar"}}, "must be of type text"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "must be of type text",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "integer", "minimum": 1}},
                }
            },
            "'minimum' is not supported",
        ),
        ({"regex": "("}, "grammar="),
        ({"regex": 5}, "pattern=5 must be"),
        ({"regex": "a", "response_format": {"type": "text"}}, "not supported with"),
    ],
)
def test_other_formats_are_refused_by_name(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ApiError, match=line) as error:
        grammar_of(**fields)
    assert error.value.status == 400
    assert error.value.param == next(iter(fields))
