"""OpenAI's requests: every field is read, refused by name, or listed as without effect.

Errors have OpenAI's format, so that its client raises the usual exceptions.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxkv import validation
from jaxkv.sampling import Grammar, Sampling, json_object_schema
from jaxkv.scheduling import REQUEST_FIELDS, RequestAttributes, StallError, from_fields
from jaxkv.server.backend import Backend, OverloadedError
from jaxkv.server.tool_calls import (
    TOOL_CALL_FORMATS,
    ToolCallReader,
    find_tool_format,
)
from jaxkv.text import convert_openai_messages

DEADLINE_HEADER = "x-deadline-s"
"""HTTP header with a time limit in s; the field `deadline_s` takes precedence."""
DEFAULT_MAX_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API; a chat answer may fill the
remaining length."""
MAX_PROMPTS = 4096
"""Largest number of prompts of one request."""


class ApiError(Exception):
    """An error response with an HTTP status and OpenAI's error document.

    Args:
      status: HTTP status.
      message: one line.
      param: name of the wrong field, or None.
      kind: OpenAI's type of the error.
      code: OpenAI's code of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind
        self.code = code

    @property
    def document(self) -> dict[str, object]:
        """OpenAI's error document."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **fields}}


def api_error(error: BaseException) -> ApiError:
    """Returns the API error for an exception of parsing or of a backend."""
    if isinstance(error, ApiError):
        return error
    line = validation.one_line(error)
    if isinstance(error, ValueError):
        line = line.replace("self.", "")
        field = re.match(r"(\w+)=", line)
        return ApiError(400, line, param=field[1] if field else None)
    if isinstance(error, TimeoutError):
        return ApiError(504, line, kind="server_error", code="deadline_exceeded")
    if isinstance(error, OverloadedError):
        return ApiError(503, line, kind="server_error", code="overloaded")
    if isinstance(error, ConnectionError):  # no worker is left; new ones may start
        return ApiError(503, line, kind="server_error", code="unavailable")
    if isinstance(error, StallError):
        return ApiError(500, line, kind="server_error", code="stalled")
    return ApiError(500, line, kind="server_error")


def _refusal(field: str, line: str) -> ApiError:
    return ApiError(400, line, param=field)


class GenerationRequest(NamedTuple):
    """A validated generation request."""

    kind: Literal["completion", "chat"]
    prompts: list[list[int]]
    """Token ids of each prompt."""
    samplings: list[Sampling]
    """Sampling parameters of each prompt."""
    echoes: list[str] | None
    """Text that precedes the answers of each prompt; None without `echo`."""
    logprobs: int | None
    """Number of alternatives to return for each token; None returns no
    log-probabilities."""
    drops_answer: bool
    """True if only the prompt is requested: `max_tokens` is 0, and the one token that
    is generated is not returned."""
    is_streamed: bool
    has_usage: bool
    """True if a stream ends with token counts."""
    deadline_s: float
    attributes: RequestAttributes
    """Attributes of each prompt's request, for the scheduling policy."""
    prompt_offsets: list[list[int]] | None = None
    """Starts of the tokens of each prompt in its text, which special tokens may be a
    part of; None for prompts of token ids, or if they are not requested."""
    tool_reader: ToolCallReader | None = None
    """Reader of tool calls; None if the request has no tools."""


def parse_completion(
    body: bytes, headers: Mapping[str, str], backend: Backend, deadline_s: float
) -> GenerationRequest:
    """Parses the body of /v1/completions.

    Args:
      body: JSON.
      headers: HTTP headers by lower-case name.
      backend: system that will answer.
      deadline_s: time limit in s of a request without its own.

    Raises:
      ApiError: a field is unknown, refused, or out of its range.
    """
    body_fields = _read_fields(body, "completion", backend)
    prompts, texts = _parse_prompts(
        _get_required(body_fields, "prompt"), backend.tokenizer
    )
    echo = _get_checked(body_fields, "echo", validation.boolean, False)
    num_tops = _get_checked(body_fields, "logprobs", validation.integer)
    max_tokens = _get_checked(body_fields, "max_tokens", validation.integer)
    fields, request_fields = _parse_common(body_fields, headers, deadline_s, backend)
    if (model := body_fields.get("model")) in backend.adapters:
        fields["adapter"] = model
    fields["logprobs"] = num_tops
    fields["prompt_logprobs"] = echo and num_tops is not None
    echoes = None
    offsets = None
    if fields["prompt_logprobs"] and None not in texts:
        offsets = [backend.tokenizer.offsets(text) for text in texts]
    if echo:
        decode = backend.tokenizer.decode
        echoes = [
            decode(ids) if text is None else text
            for ids, text in zip(prompts, texts, strict=True)
        ]
    fields["max_tokens"] = max_tokens
    return GenerationRequest(
        kind="completion",
        prompts=prompts,
        samplings=_make_samplings(fields, prompts, DEFAULT_MAX_TOKENS, backend),
        echoes=echoes,
        logprobs=num_tops,
        drops_answer=max_tokens == 0,
        prompt_offsets=offsets,
        **request_fields,
    )


def parse_chat(
    body: bytes, headers: Mapping[str, str], backend: Backend, deadline_s: float
) -> GenerationRequest:
    """Parses the body of /v1/chat/completions; see `parse_completion`."""
    body_fields = _read_fields(body, "chat", backend)
    messages = _get_required(body_fields, "messages")
    tools = body_fields.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(x, dict) for x in tools):
        raise _refusal("tools", "tools must be a list of objects")
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise _refusal("tools", f"tools[{i}].function must have a name")
    if body_fields.get("tool_choice") == "none" or not tools:
        tools = None
    tokenizer = backend.tokenizer
    names = tokenizer.chat_variables(tools)
    variables = _parse_template_variables(body_fields, names)
    reader = None
    if tools is not None:
        tool_format = find_tool_format(tokenizer.chat_template(tools))
        if tool_format is None or "tools" not in names:
            formats = ", ".join(call_format.name for call_format in TOOL_CALL_FORMATS)
            raise _refusal(
                "tools",
                "tools are not supported: the model's chat template renders none, or "
                f"its tool calls are in none of the formats {formats}; "
                "tool_choice='none' answers without tools",
            )
        reader = ToolCallReader(tool_format, tools, tokenizer)
    try:
        messages = convert_openai_messages(messages, tokenizer, tools=tools)
    except ValueError as error:
        raise _refusal(re.split("[ =]", str(error))[0], str(error)) from None
    wants = _get_checked(body_fields, "logprobs", validation.boolean, False)
    num_tops = _get_checked(body_fields, "top_logprobs", validation.integer)
    if num_tops and not wants:
        line = f"top_logprobs={num_tops} needs logprobs=true"
        raise _refusal("top_logprobs", line)
    limits = [
        _get_checked(body_fields, name, functools.partial(validation.integer, low=1))
        for name in ("max_tokens", "max_completion_tokens")
    ]
    if None not in limits and limits[0] != limits[1]:
        raise _refusal(
            "max_tokens",
            f"max_tokens={limits[0]} must be max_completion_tokens={limits[1]}, "
            "or one of them absent",
        )
    fields, request_fields = _parse_common(body_fields, headers, deadline_s, backend)
    if (model := body_fields.get("model")) in backend.adapters:
        fields["adapter"] = model
    num_tops = (num_tops or 0) if wants else None
    fields["logprobs"] = num_tops
    fields["max_tokens"] = limits[0] if limits[1] is None else limits[1]
    prompts = [tokenizer.encode_chat(messages, tools=tools, **variables)]
    return GenerationRequest(
        kind="chat",
        prompts=prompts,
        samplings=_make_samplings(fields, prompts, backend.max_length, backend),
        echoes=None,
        logprobs=num_tops,
        drops_answer=False,
        tool_reader=reader,
        **request_fields,
    )


_NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields without effect on an answer, used by OpenAI for billing and records."""
_ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "suffix": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
}
"""OpenAI's fields that are refused, except for these values, which have no effect."""
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "n",
    "best_of",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    # Not OpenAI's.
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "prefix_cache",
    "salt",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
"""Fields of `Sampling`."""
_ATTRIBUTE_FIELDS = REQUEST_FIELDS
"""Fields of `RequestAttributes`; `priority` is also vLLM's."""
_COMMON_FIELDS = (
    *("model", "stream", "stream_options", "stop", "stop_tokens", "deadline_s"),
    *("logprobs", "max_tokens", "response_format", "regex"),
)
_ROUTE_FIELDS = {
    "completion": ("prompt", "echo"),
    "chat": (
        *("messages", "tools", "top_logprobs", "max_completion_tokens"),
        "chat_template_kwargs",
    ),
}


def read_object(body: bytes) -> dict[str, object]:
    """Reads a JSON object; a field that is null counts as absent.

    Raises:
      ApiError: the body is not a JSON object, or a text is not valid Unicode.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise ApiError(400, f"the body is not JSON: {line}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, value in document.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            value_text = validation.format_value(value)
            line = f"{name}={value_text} is not valid Unicode: half of a surrogate pair"
            raise _refusal(name, line) from None
    return {name: value for name, value in document.items() if value is not None}


def _read_fields(body: bytes, kind: str, backend: Backend) -> dict[str, Any]:
    """Returns the fields of a request, after unsupported ones were refused."""
    body_fields = read_object(body)
    names = {
        *_COMMON_FIELDS,
        *_SAMPLING_FIELDS,
        *_ATTRIBUTE_FIELDS,
        *_ROUTE_FIELDS[kind],
    }
    for name in body_fields:
        if name in _ALLOWED_VALUES:
            if body_fields[name] not in _ALLOWED_VALUES[name]:
                value_text = validation.format_value(body_fields[name])
                raise _refusal(name, f"{name}={value_text} is not supported")
        elif name not in names and name not in _NO_EFFECT:
            raise _unknown_field(name)
    model = body_fields.get("model", backend.model_name)
    if model not in (names := (backend.model_name, *backend.adapters)):
        raise ApiError(
            404,
            f"model={validation.format_value(model)} must be "
            + " or ".join(map(repr, names)),
            param="model",
            code="model_not_found",
        )
    return body_fields


def _get_checked[T](
    body_fields: dict[str, object],
    name: str,
    check: Callable[[str, object], T],
    default: T | None = None,
) -> Any:
    """Returns the checked value of a field, or the default if it is absent."""
    return check(name, body_fields[name]) if name in body_fields else default


def _get_required(body_fields: dict[str, object], name: str) -> Any:
    if name not in body_fields:
        raise _refusal(name, f"{name} must be given")
    return body_fields[name]


def _parse_common(
    body_fields: dict[str, object],
    headers: Mapping[str, str],
    deadline_s: float,
    backend: Backend,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the fields that both kinds of requests have.

    Returns:
      Fields of `Sampling`, unchecked, and of `GenerationRequest`.
    """
    fields = {
        name: body_fields[name] for name in _SAMPLING_FIELDS if name in body_fields
    }
    for name in ("top_k", "seed"):  # as in vLLM, -1 is the default
        if type(fields.get(name)) is int and fields[name] == -1:
            del fields[name]
    if "seed" in fields:
        low = -(2**63)
        below = 2**64
        hint = "an integer in [-2**63, 2**64)"
        seed = validation.integer(
            "seed", fields["seed"], low=low, below=below, hint=hint
        )
        fields["seed"] = seed % 2**64
    stop = body_fields.get("stop", [])
    ends = body_fields.get("stop_tokens", [])
    stop = [stop] if isinstance(stop, str) else stop
    for name, value in (("stop", stop), ("stop_tokens", ends)):
        if not isinstance(value, list):
            raise _refusal(
                name, f"{name}={validation.format_value(value)} must be a list"
            )
        fields[name] = tuple(value)
    fields["grammar"] = _parse_grammar(body_fields, backend.tokenizer)
    is_streamed = _get_checked(body_fields, "stream", validation.boolean, False)
    options = body_fields.get("stream_options", {})
    if options and not is_streamed:
        raise _refusal("stream_options", "stream_options needs stream=true")
    # Obfuscation pads chunks against observers of their sizes; not supported.
    if not isinstance(options, dict) or options.keys() - _STREAM_OPTIONS:
        raise _refusal(
            "stream_options",
            f"stream_options={validation.format_value(options)} must be an object with "
            "include_usage",
        )
    flags = {name: validation.boolean(name, options[name]) for name in options}
    if flags.get("include_obfuscation"):
        raise _refusal("stream_options", "include_obfuscation=True is not supported")
    # Answers are ranked at the end, so they cannot be streamed.
    ranks = {"best_of": body_fields.get("n", 1), "beam_width": None}
    for name, unranked in ranks.items():
        if is_streamed and name in body_fields and body_fields[name] != unranked:
            raise _refusal(name, f"{name} is not supported with stream=true")
    limit = headers.get(DEADLINE_HEADER, deadline_s)
    with contextlib.suppress(ValueError):
        limit = float(limit)
    limit = body_fields.get("deadline_s", limit)
    hint = f"in [0.001, {MAX_DEADLINE_S:g}]"
    return fields, {
        "is_streamed": is_streamed,
        "has_usage": flags.get("include_usage", False),
        "deadline_s": validation.number(
            "deadline_s", limit, low=0.001, high=MAX_DEADLINE_S, hint=hint
        ),
        "attributes": from_fields(
            {
                name: body_fields[name]
                for name in _ATTRIBUTE_FIELDS
                if name in body_fields
            }
        ),
    }


def _parse_grammar(body_fields: dict[str, Any], tokenizer: Any) -> Grammar | None:
    """Returns the grammar of `response_format` or `regex`; None without them."""
    how = body_fields.get("response_format", {"type": "text"})
    pattern = body_fields.get("regex")
    if how == {"type": "text"} and pattern is None:
        return None
    name = "response_format" if pattern is None else "regex"
    if pattern is not None and "response_format" in body_fields:
        raise _refusal(name, "regex is not supported with response_format")
    if body_fields.get("tools") and body_fields.get("tool_choice") != "none":
        raise _refusal(name, f"{name} is not supported with tools")
    try:
        if pattern is not None:
            return Grammar.from_regex(pattern, tokenizer)
        match how:
            case {"type": "json_object", **rest} if not rest:
                schema = json_object_schema()
            case {"type": "json_schema", "json_schema": {"schema": schema, **rest}} if (
                rest.keys() <= {"name", "description", "strict"} and len(how) == 2
            ):
                pass
            case _:
                shown = validation.format_value(how)
                raise ValueError(
                    f"response_format={shown} must be of type text, json_object, or "
                    "json_schema with json_schema.schema"
                )
        return Grammar.from_json_schema(schema, tokenizer)
    except ValueError as error:
        raise _refusal(name, validation.one_line(error)) from None


_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
MAX_DEADLINE_S = 86400.0


def _make_samplings(
    fields: dict[str, Any], prompts: list[list[int]], default: int, backend: Backend
) -> list[Sampling]:
    """Returns the sampling parameters of each prompt, with its `max_tokens`.

    An engine would end an answer at `max_length`; here a request for more tokens is
    refused, as by OpenAI.
    """
    rooms = []
    max_tokens = fields.pop("max_tokens")
    for i, prompt in enumerate(prompts):
        left = backend.max_length - len(prompt)
        wanted = max_tokens
        if wanted is None:
            wanted = max(1, min(default, left))
        if wanted > left:
            where = f"prompt[{i}]" if len(prompts) > 1 else "the prompt"
            raise ApiError(
                400,
                f"{where} has {len(prompt)} tokens, with max_tokens={wanted} more than "
                f"max_length={backend.max_length}",
                code="context_length_exceeded",
            )
        rooms.append(max(1, wanted))
    sampling = Sampling(**fields)
    return [dataclasses.replace(sampling, max_tokens=room) for room in rooms]


def _parse_prompts(
    raw: object, tokenizer: Any
) -> tuple[list[list[int]], list[str | None]]:
    """Returns token ids of each prompt, and its text if it was given as text."""
    prompts: list[Any] = raw if isinstance(raw, list) else [raw]
    if {type(one) for one in prompts} == {int}:
        prompts = [prompts]
    if len(prompts) > MAX_PROMPTS:
        line = f"len(prompt)={len(prompts)} must be at most {MAX_PROMPTS}"
        raise _refusal("prompt", line)
    kinds = {type(one) for one in prompts}
    if kinds == {str}:
        return [tokenizer.encode(text) for text in prompts], prompts
    if kinds == {list} and all({type(x) for x in one} <= {int} for one in prompts):
        return prompts, [None] * len(prompts)
    raise _refusal(
        "prompt",
        f"prompt={validation.format_value(raw)} must be "
        "a text, a list of texts, a list of "
        "token ids, or a list of such lists",
    )


def _parse_template_variables(
    body_fields: dict[str, object], names: set[str]
) -> dict[str, object]:
    """Returns `chat_template_kwargs`; they must be among the template's variables."""
    field = "chat_template_kwargs"
    variables = body_fields.get(field, {})
    if not isinstance(variables, dict):
        value_text = validation.format_value(variables)
        raise _refusal(field, f"{field}={value_text} must be an object")
    allowed = names - _RESERVED_VARIABLES
    for name in variables:
        if name not in allowed:
            value_text = validation.format_value(name)
            choices = ", ".join(sorted(allowed)) or "it has none"
            raise _refusal(
                field,
                f"{field} has {value_text}, must have variables of the model's chat "
                f"template: {choices}",
            )
    return variables


_RESERVED_VARIABLES = {"messages", "tools", "add_generation_prompt", "chat_template"}
"""Variables of a template that other fields determine."""


def tokenize(body: bytes, backend: Backend) -> dict[str, object]:
    """Answers /tokenize (as in vLLM): the token ids of a text.

    Raises:
      ApiError: a field is missing, unknown or of another type.
      ValueError: the text is not valid Unicode.
    """
    body_fields = _read_fields_of(body, "prompt", "add_special_tokens", "model")
    text = _get_required(body_fields, "prompt")
    if not isinstance(text, str):
        raise _refusal("prompt", "prompt must be text")
    special = _get_checked(body_fields, "add_special_tokens", validation.boolean, True)
    ids = backend.tokenizer.encode(text, add_special_tokens=special)
    return {"tokens": ids, "count": len(ids), "max_model_len": backend.max_length}


def detokenize(body: bytes, backend: Backend) -> dict[str, object]:
    """Answers /detokenize (as in vLLM): the text of token ids; raises as `tokenize`."""
    body_fields = _read_fields_of(body, "tokens", "model")
    ids = validation.token_sequence(
        "tokens", _get_required(body_fields, "tokens")
    ).tolist()
    text = backend.tokenizer.decode(ids, skip_special_tokens=False)
    return {"prompt": text}


def _read_fields_of(body: bytes, *names: str) -> dict[str, object]:
    """Returns the fields of a body; refuses all but the given names."""
    body_fields = read_object(body)
    for name in body_fields.keys() - {*names}:
        raise _unknown_field(name)
    return body_fields


def _unknown_field(name: str) -> ApiError:
    line = f"{validation.format_value(name)} is not a field of this API"
    return _refusal(name[:64], line)
