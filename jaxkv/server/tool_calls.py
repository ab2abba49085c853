# ruff: noqa: RUF001 - DeepSeek's tokens have wide bars
"""Tool calls in answers: the formats of model families, chosen by the chat template."""

import contextlib
import dataclasses
import functools
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.serving import FinishedAnswer
from jaxkv.text import ByteTokenizer, Tokenizer


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON text of an object."""

    @property
    def document(self) -> dict[str, object]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        # Mistral's templates accept ids of 9 letters or digits only.
        call_id = uuid.uuid4().hex[:9]
        return {"id": call_id, "type": "function", "function": function}


Tools = Sequence[Mapping[str, Any]]


class ToolCallFormat(NamedTuple):
    """Text of tool calls that a model was trained to generate."""

    name: str
    marks: tuple[str, ...]
    """Texts that all occur in the chat templates of these models."""
    starts: tuple[str, ...]
    """Texts that begin the calls of an answer; a content may precede the first one."""
    parse: Callable[[str, Tools], list[ToolCall]]
    """Reads the calls from the start on. Raises ValueError for other text."""
    is_whole_answer: bool = False
    """True if calls begin only at the start of an answer."""


class ToolCallReader(NamedTuple):
    """Reads the tool calls of the answers to one request."""

    format: ToolCallFormat
    tools: Tools
    """Functions of the request."""
    tokenizer: Tokenizer | ByteTokenizer

    def read(self, answer: FinishedAnswer) -> tuple[str, list[ToolCall]]:
        """Returns the content of an answer and its calls.

        An answer whose calls cannot be parsed, such as one that ended early, is all
        content.
        """
        text = answer.text or ""
        start = self.find_start(text)
        content = text[:start]
        calls = text[start:]
        if self.hidden_start in answer.tokens:
            place = answer.tokens.index(self.hidden_start)
            decode = self.tokenizer.decode
            content = decode(answer.tokens[:place])
            tokens = answer.tokens[place:]
            if not decode(tokens[-1:]):  # the end token
                tokens = tokens[:-1]
            calls = decode(tokens, skip_special_tokens=False)
        try:
            parsed = self.format.parse(calls, self.tools) if calls else []
        except (ValueError, RecursionError):
            parsed = []
        return (content, parsed) if parsed else (text, [])

    def find_start(self, text: str) -> int:
        """Returns the number of characters before text that is or may become a call."""
        if self.format.is_whole_answer:
            body = text.lstrip()
            is_open = any(x.startswith(body[: len(x)]) for x in self.format.starts)
            return 0 if is_open else len(text)
        [start] = self.format.starts
        if (place := text.find(start)) >= 0:
            return place
        size = min(len(start) - 1, len(text))
        while size and not start.startswith(text[-size:]):
            size -= 1
        return len(text) - size

    @property
    def hidden_start(self) -> int | None:
        """Special token that begins the calls, which `decode` removes; else None."""
        return _find_hidden_token(self.tokenizer, self.format.starts[0])


@dataclasses.dataclass
class StreamedContent:
    """Content of a streamed answer, without the text of tool calls.

    Args:
      reader: reader of the request's calls.
    """

    reader: ToolCallReader
    held: str = ""
    """Text that is or may become a call."""
    num_sent: int = 0
    """Characters of the content that were returned."""
    has_calls: bool = False
    """True after the token that begins the calls."""

    def push(self, text: str, tokens: Sequence[int]) -> str:
        """Adds text with its tokens; returns the text that is certainly content."""
        self.held += text
        self.has_calls |= self.reader.hidden_start in tokens
        end = self.reader.find_start(self.held)
        if self.reader.format.is_whole_answer and self.num_sent:
            end = len(self.held)
        end = 0 if self.has_calls else end
        content = self.held[:end]
        self.held = self.held[end:]
        self.num_sent += end
        return content

    def finish(self, answer: FinishedAnswer) -> tuple[str, list[ToolCall]]:
        """Returns the remaining content, and the calls."""
        content, calls = self.reader.read(answer)
        return content[self.num_sent :], calls


def find_tool_format(template: str) -> ToolCallFormat | None:
    """Returns the format of the calls that a chat template renders, or None."""
    for tool_format in TOOL_CALL_FORMATS:
        if all(mark in template for mark in tool_format.marks):
            return tool_format
    return None


@functools.lru_cache(maxsize=16)
def _find_hidden_token(tokenizer: Tokenizer | ByteTokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    is_hidden = len(ids) == 1 and not tokenizer.decode(ids)
    return ids[0] if is_hidden else None


def _make_call(name: object, arguments: object) -> ToolCall:
    if isinstance(arguments, str):  # encoded twice
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _read_object(document: object) -> ToolCall:
    """Reads a name with `arguments`, or with `parameters`."""
    if not isinstance(document, dict):
        raise ValueError("not a call")
    arguments = document.get("arguments", document.get("parameters", {}))
    return _make_call(document.get("name"), arguments)


def _split_tags(text: str) -> list[str]:
    bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
    return [body.strip() for body in bodies]


def _split_pairs(text: str, start: str, middle: str, end: str) -> list[tuple[str, str]]:
    """Returns the two texts between each start, middle and end, in linear time."""
    pairs = []
    for part in text.split(start)[1:]:
        body, end_mark, _ = part.partition(end)
        first, middle_mark, second = body.partition(middle)
        if not (end_mark and middle_mark):
            raise ValueError("not a call")
        pairs.append((first, second))
    return pairs


def _parse_hermes(text: str, tools: Tools) -> list[ToolCall]:
    del tools
    return [_read_object(json.loads(body)) for body in _split_tags(text)]


def _parse_qwen_coder(text: str, tools: Tools) -> list[ToolCall]:
    pairs = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    calls = []
    for body in _split_tags(text):
        match = re.fullmatch(r"<function=([^>\n]+)>(.*)</function>", body, re.DOTALL)
        if match is None:
            raise ValueError("not a call")
        arguments = re.findall(pairs, match[2], re.DOTALL)
        calls.append(_read_pairs(match[1], arguments, tools))
    return calls


def _parse_glm(text: str, tools: Tools) -> list[ToolCall]:
    calls = []
    for body in _split_tags(text):
        name = body.partition("<arg_key>")[0].strip()
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError("not a call")
        pairs = _split_pairs(body, "<arg_key>", "<arg_value>", "</arg_value>")
        arguments = [(x.strip().removesuffix("</arg_key>"), y) for x, y in pairs]
        calls.append(_read_pairs(name, arguments, tools))
    return calls


def _read_pairs(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ToolCall:
    """Makes a call of arguments without types; the schema of the function has them."""
    arguments: dict[str, object] = {}
    for key, text in pairs:
        types = _read_types(tools, name, key)
        arguments[key] = text
        if "string" not in types or (text == "null" and "null" in types):
            with contextlib.suppress(ValueError):
                arguments[key] = json.loads(text)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _read_types(tools: Tools, name: str, argument: str) -> set[str]:
    """Returns the JSON types that a schema names; "string" without a schema."""
    for tool in tools:
        if tool["function"]["name"] != name:
            continue
        schema: Any = tool["function"]
        for key in ("parameters", "properties", argument):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping):
            choices = schema.get("anyOf")
            choices = choices if isinstance(choices, list) else []
            schemas = [x for x in (schema, *choices) if isinstance(x, Mapping)]
            types = [x.get("type") for x in schemas]
            return {str(y) for x in types for y in (x if isinstance(x, list) else [x])}
    return {"string"}


def _parse_llama(text: str, tools: Tools) -> list[ToolCall]:
    del tools
    text = text.strip().removeprefix("<|python_tag|>")
    calls = []
    while text:
        document, end = json.JSONDecoder().raw_decode(text.lstrip())
        calls.append(_read_object(document))
        text = text.lstrip()[end:].strip()
        if text and not text.startswith(";"):
            raise ValueError("text after a call")
        text = text.removeprefix(";")
    return calls


def _parse_mistral(text: str, tools: Tools) -> list[ToolCall]:
    """Reads a JSON list, or `name[ARGS]{...}` after each mark."""
    del tools
    decode = json.JSONDecoder().raw_decode
    calls = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        body = body.strip()
        if body.startswith(("[", "{")):
            document, _ = decode(body)
            documents = document if isinstance(document, list) else [document]
            calls += [_read_object(call_object) for call_object in documents]
            continue
        match = re.match(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*", body)
        if match is None:
            raise ValueError("not a call")
        calls.append(_make_call(match[1], decode(body, match.end())[0]))
    return calls


def _parse_deepseek(text: str, tools: Tools) -> list[ToolCall]:
    """Reads `function` and a name with fenced JSON, or a name and JSON."""
    del tools
    marks = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    calls = []
    for name, body in _split_pairs(text, *marks):
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```", body.strip(), re.DOTALL)
        if fenced is not None:
            name, body = fenced.groups()
        calls.append(_make_call(name.strip(), json.loads(body)))
    return calls


TOOL_CALL_FORMATS = (
    ToolCallFormat(
        "Qwen3-Coder",
        ("<tool_call>", "<function="),
        ("<tool_call>",),
        _parse_qwen_coder,
    ),
    ToolCallFormat("GLM", ("<tool_call>", "<arg_key>"), ("<tool_call>",), _parse_glm),
    ToolCallFormat("Hermes", ("<tool_call>",), ("<tool_call>",), _parse_hermes),
    ToolCallFormat(
        "DeepSeek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁calls▁begin｜>",),
        _parse_deepseek,
    ),
    ToolCallFormat("Mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), _parse_mistral),
    ToolCallFormat(
        "Llama 3",
        ('"parameters": ', "ipython"),
        ("<|python_tag|>", "{"),
        _parse_llama,
        is_whole_answer=True,
    ),
)
"""Formats in the order in which they are tried."""
