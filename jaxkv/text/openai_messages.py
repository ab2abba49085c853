"""OpenAI's messages in the form that a chat template reads.

OpenAI's wire form and the form of templates differ. Arguments of a tool call are JSON
text on the wire and an object in most templates; a content is text or a list of parts,
and a template may read one of them only. The forms that a template reads are measured:
it renders short conversations in each form, and a form counts if its text appears.
"""

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv import validation
from jaxkv.text import chat_templates
from jaxkv.text.tokenizer import ByteTokenizer, Tokenizer


def convert_openai_messages(
    messages: Sequence[Mapping[str, object]],
    tokenizer: Tokenizer | ByteTokenizer,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> list[dict[str, object]]:
    """Converts a conversation from OpenAI's API for the tokenizer's chat template.

    * Arguments of tool calls become objects, or JSON text for a template that only
      renders text. "" and None are an empty object; an empty `tool_calls` is absent.
    * A content stays in its form if the template renders it; else a text becomes one
      part, or text parts are joined. A missing content of a message with tool calls
      becomes "" if the template needs one.
    * `function_call` becomes a tool call, and the role `function` becomes `tool`.
    * A tool's message gets the `name` of the call that it answers, if the template
      renders that name and the message has none.
    * The role `developer` becomes `system`, unless the template contains the word.
    * Other fields, such as `name` and `reasoning_content`, are unchanged.

    Args:
      messages: messages as in requests to /v1/chat/completions.
      tokenizer: tokenizer with the template.
      tools: functions that the model may call; they may select another template.

    Returns:
      Messages for `encode_chat` and `apply_chat_template`.

    Raises:
      ValueError: there is no template, or a field is invalid; the line begins with the
        path of the field, such as `messages[0].content`.
    """
    template = tokenizer.chat_template(tools)
    tokens = tuple(sorted(tokenizer.special_tokens.items()))
    call_forms = _read_call_forms(template, tokens)
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list, not empty")
    conversation = []
    call_names: dict[str, str] = {}
    call_id = None
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{path} must have a role")
        fields = {key: value for key, value in message.items() if value is not None}
        for key in ("name", "tool_call_id"):
            _check_text(f"{path}.{key}", fields.get(key, ""))
        if "function_call" in fields:
            if fields.get("tool_calls"):
                line = "must be absent if there are tool_calls"
                raise ValueError(f"{path}.function_call {line}")
            call_id = f"call{i:05d}"  # some templates need 9 letters or digits
            function = fields.pop("function_call")
            fields["tool_calls"] = [
                {"id": call_id, "type": "function", "function": function}
            ]
        if "tool_calls" in fields:
            calls = _convert_calls(path, fields["tool_calls"], call_forms)
            fields["tool_calls"] = calls
            call_names |= {x["id"]: x["function"]["name"] for x in calls if x.get("id")}
            if not calls:
                del fields["tool_calls"]
        if fields["role"] == "function":
            fields["role"] = "tool"
            if call_id is not None:
                fields.setdefault("tool_call_id", call_id)
        elif fields["role"] == "developer" and "developer" not in template:
            fields["role"] = "system"
        name = call_names.get(fields.get("tool_call_id", ""))
        if fields["role"] == "tool" and name and call_forms.has_tool_names:
            fields.setdefault("name", name)
        content = fields.get("content", fields.pop("refusal", None))
        if content is not None:
            forms = _read_content_forms(template, tokens, fields["role"])
            fields["content"] = _convert_content(f"{path}.content", content, forms)
        elif "tool_calls" not in fields:
            raise ValueError(f"{path}.content must be text, or a list of text parts")
        elif call_forms.needs_content:
            fields["content"] = ""
        conversation.append(fields)
    return conversation


class _CallForms(NamedTuple):
    """Forms of an assistant's message with tool calls."""

    has_text_arguments: bool
    """True if only JSON text is rendered as arguments, not an object."""
    needs_content: bool
    """True if the template fails without a content."""
    has_tool_names: bool
    """True if the `name` of a tool's message is rendered."""


class _ContentForms(NamedTuple):
    """Forms of a content that a template renders completely."""

    text: bool
    parts: bool
    """Several text parts."""
    one_part: bool
    """A list with one text part."""


def _convert_calls(path: str, calls: object, forms: _CallForms) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{path}.tool_calls must be a list")
    converted = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        where = f"{path}.tool_calls[{i}].function"
        if not isinstance(function, Mapping) or not isinstance(
            function.get("name"), str
        ):
            raise ValueError(f"{where} must be an object with a name and arguments")
        if call.get("id") is not None:
            _check_text(f"{path}.tool_calls[{i}].id", call["id"])
        arguments = _convert_arguments(
            f"{where}.arguments", function.get("arguments"), forms
        )
        converted.append(call | {"function": function | {"arguments": arguments}})
    return converted


def _check_text(path: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{path}={validation.format_value(value)} must be text")


def _convert_arguments(path: str, raw: object, forms: _CallForms) -> object:
    value = {} if raw is None or raw == "" else raw
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        value_text = validation.format_value(raw)
        raise ValueError(f"{path}={value_text} must be a JSON object, or its text")
    if not forms.has_text_arguments:
        return value
    is_text = isinstance(raw, str) and raw != ""
    return raw if is_text else json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _convert_content(
    path: str, content: object, forms: _ContentForms
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        is_text = forms.text or not (forms.parts or forms.one_part)
        return content if is_text else [_text_part(content)]
    if not isinstance(content, list):
        raise ValueError(f"{path} must be text, or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            value_text = validation.format_value(kind)
            raise ValueError(f"{path} has a part of type {value_text}, must be 'text'")
        texts.append(text)
    if forms.parts:
        return [_text_part(text) for text in texts]
    if forms.one_part and not forms.text:
        return [_text_part("".join(texts))]
    return "".join(texts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# Probes of a template

_PROBE_TEXT = "probe7a"
_SECOND = "probe7b"
_USER = {"role": "user", "content": "x"}
_CALL_ID = "call00000"
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "x"}},
        },
    },
}
_PRINTED_PART = re.compile(rf"""text\\?['"]:\s*\\?['"]{_PROBE_TEXT}""")
"""A part that is printed as an object: the template does not read it."""
_Tokens = tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=64)
def _read_call_forms(template: str, tokens: _Tokens) -> _CallForms:
    def is_rendered(arguments: object, **content: str) -> bool:
        message = {"role": "assistant", **content, "tool_calls": [_call(arguments)]}
        return _is_rendered(template, tokens, [_USER, message], _PROBE_TEXT)

    arguments = {"key": _PROBE_TEXT}
    text = json.dumps(arguments)
    has_text = not is_rendered(arguments, content="") and is_rendered(text, content="")
    chosen = text if has_text else arguments
    needs_content = not is_rendered(chosen) and is_rendered(chosen, content="")
    call = {"role": "assistant", "content": "", "tool_calls": [_call(chosen)]}
    answer = {"role": "tool", "content": "x", "tool_call_id": _CALL_ID, "name": _SECOND}
    has_names = _is_rendered(template, tokens, [_USER, call, answer], _SECOND)
    return _CallForms(has_text, needs_content, has_names)


@functools.lru_cache(maxsize=256)
def _read_content_forms(template: str, tokens: _Tokens, role: str) -> _ContentForms:
    message = {"role": role}
    before = []
    after = []
    if role in ("system", "developer"):
        after = [_USER]
    elif role == "assistant":
        before = [_USER]
        after = [_USER]
    elif role == "tool":
        arguments = {"key": "x"}
        if _read_call_forms(template, tokens).has_text_arguments:
            arguments = json.dumps(arguments)
        call = {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}
        before = [_USER, call]
        message |= {"tool_call_id": _CALL_ID, "name": "f"}

    def is_rendered(content: object, *texts: str) -> bool:
        messages = [*before, message | {"content": content}, *after]
        return _is_rendered(template, tokens, messages, *texts)

    parts = [_text_part(_PROBE_TEXT), _text_part(_SECOND)]
    forms = _ContentForms(
        text=is_rendered(_PROBE_TEXT, _PROBE_TEXT),
        parts=is_rendered(parts, _PROBE_TEXT, _SECOND),
        one_part=is_rendered(parts[:1], _PROBE_TEXT),
    )
    if role != "user" and not any(forms):  # the conversation fails in every form
        return _read_content_forms(template, tokens, "user")
    return forms


def _call(arguments: object) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _is_rendered(
    template: str,
    tokens: _Tokens,
    messages: Sequence[Mapping[str, object]],
    *texts: str,
) -> bool:
    """Returns True if a template renders messages with these texts in order."""
    prompt = ""
    for tools in (None, [_TOOL]):  # some templates fail without tools
        with contextlib.suppress(ValueError):
            variables = dict(tokens) | {"tools": tools}
            prompt = chat_templates.render(template, messages, variables)
            break
    pattern = ".*".join(map(re.escape, texts))
    is_complete = re.search(pattern, prompt, re.DOTALL) is not None
    return is_complete and _PRINTED_PART.search(prompt) is None
