"""OpenAI's requests: every field is read, refused by name, or listed as without effect.

Errors have OpenAI's shape, so that its client raises what its users expect.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxkv import validation
from jaxkv.sampling import Sampling
from jaxkv.scheduling import StallError
from jaxkv.server.backend import Backend, OverloadedError

DEADLINE_HEADER = "x-deadline-s"
"""HTTP header with the seconds that a request may take; the field `deadline_s` wins."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat answer may fill the room that is left."""
MAX_PROMPTS = 4096
"""Prompts of one request."""


class ApiError(Exception):
    """An answer with an HTTP status and OpenAI's error document.

    Args:
      status: HTTP status.
      message: one line.
      param: the field that is wrong; None if it is none.
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
        self.status, self.param, self.kind, self.code = status, param, kind, code

    @property
    def document(self) -> dict[str, Any]:
        """OpenAI's error document."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **fields}}


def api_error(error: BaseException) -> ApiError:
    """Returns the answer to an exception that parsing or a backend has raised."""
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
    if isinstance(error, ConnectionError):  # the workers are gone; others may come
        return ApiError(503, line, kind="server_error", code="unavailable")
    if isinstance(error, StallError):
        return ApiError(500, line, kind="server_error", code="stalled")
    return ApiError(500, line, kind="server_error")


def _refusal(field: str, line: str) -> ApiError:
    return ApiError(400, line, param=field)


class GenerationRequest(NamedTuple):
    """A request for answers, after all of it was checked."""

    kind: Literal["completion", "chat"]
    prompts: list[list[int]]
    """Token ids of each prompt."""
    samplings: list[Sampling]
    """How each prompt's answers are drawn."""
    echoes: list[str] | None
    """Text that precedes the answers of each prompt; None without `echo`."""
    logprobs: int | None
    """Alternatives to report with each token; None reports no log-probabilities."""
    drops_answer: bool
    """True if only the prompt is asked for: `max_tokens` is 0, and one token is drawn
    that is not reported."""
    is_streamed: bool
    has_usage: bool
    """True if a stream ends with the number of tokens."""
    deadline_s: float


def parse_completion(
    body: bytes, headers: Mapping[str, str], backend: Backend, deadline_s: float
) -> GenerationRequest:
    """Reads the body of /v1/completions.

    Args:
      body: JSON.
      headers: by lower-case name.
      backend: the system that will answer.
      deadline_s: seconds that a request without a deadline of its own may take.

    Raises:
      ApiError: a field is unknown, refused, or out of its range.
    """
    given = _fields(body, "completion", backend)
    prompts, texts = _prompts(_needed(given, "prompt"), backend.tokenizer)
    echo = _taken(given, "echo", validation.boolean, False)
    num_tops = _taken(given, "logprobs", validation.integer)
    max_tokens = _taken(given, "max_tokens", validation.integer)
    fields, own = _common(given, headers, deadline_s)
    fields["logprobs"] = num_tops
    fields["prompt_logprobs"] = echo and num_tops is not None
    echoes = None
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
        samplings=_samplings(fields, prompts, DEFAULT_MAX_TOKENS, backend),
        echoes=echoes,
        logprobs=num_tops,
        drops_answer=max_tokens == 0,
        **own,
    )


def parse_chat(
    body: bytes, headers: Mapping[str, str], backend: Backend, deadline_s: float
) -> GenerationRequest:
    """Reads the body of /v1/chat/completions; see `parse_completion`."""
    given = _fields(body, "chat", backend)
    messages = _messages(_needed(given, "messages"))
    tools = given.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(x, dict) for x in tools):
        raise _refusal("tools", "tools must be a list of objects")
    if given.get("tool_choice") == "none":
        tools = []
    wants = _taken(given, "logprobs", validation.boolean, False)
    num_tops = _taken(given, "top_logprobs", validation.integer)
    if num_tops and not wants:
        line = f"top_logprobs={num_tops} needs logprobs=true"
        raise _refusal("top_logprobs", line)
    limits = [
        _taken(given, name, functools.partial(validation.integer, low=1))
        for name in ("max_tokens", "max_completion_tokens")
    ]
    if None not in limits and limits[0] != limits[1]:
        raise _refusal(
            "max_tokens",
            f"max_tokens={limits[0]} must be max_completion_tokens={limits[1]}, "
            "or one of them absent",
        )
    fields, own = _common(given, headers, deadline_s)
    num_tops = (num_tops or 0) if wants else None
    fields["logprobs"] = num_tops
    fields["max_tokens"] = limits[0] if limits[1] is None else limits[1]
    prompts = [backend.tokenizer.encode_chat(messages, tools=tools or None)]
    return GenerationRequest(
        kind="chat",
        prompts=prompts,
        samplings=_samplings(fields, prompts, backend.max_length, backend),
        echoes=None,
        logprobs=num_tops,
        drops_answer=False,
        **own,
    )


_NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields without effect on an answer: for the billing and records of OpenAI."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
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
"""Fields of OpenAI's that are refused, except for these values, which ask for nothing.
"""
_SAMPLING = (
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
"""Fields that are those of `Sampling`."""
_COMMON = (
    *("model", "stream", "stream_options", "stop", "stop_tokens", "deadline_s"),
    *("logprobs", "max_tokens"),
)
_OWN = {
    "completion": ("prompt", "echo"),
    "chat": ("messages", "tools", "top_logprobs", "max_completion_tokens"),
}


def read_object(body: bytes) -> dict[str, Any]:
    """Reads a JSON object; a field that is null counts as absent.

    Raises:
      ApiError: the body is no JSON object.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise ApiError(400, f"the body is not JSON: {line}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: value for name, value in given.items() if value is not None}


def _fields(body: bytes, kind: str, backend: Backend) -> dict[str, Any]:
    """The fields of a request, after all that is not served was refused."""
    given = read_object(body)
    known = {*_COMMON, *_SAMPLING, *_OWN[kind]}
    for name in given:
        if name in _NEUTRAL:
            if given[name] not in _NEUTRAL[name]:
                shown = validation.shown(given[name])
                raise _refusal(name, f"{name}={shown} is not supported")
        elif name not in known and name not in _NO_EFFECT:
            raise _unknown(name)
    model = given.get("model", backend.model_name)
    if model != backend.model_name:
        raise ApiError(
            404,
            f"model={validation.shown(model)} must be {backend.model_name!r}",
            param="model",
            code="model_not_found",
        )
    return given


def _taken(
    given: dict[str, Any],
    name: str,
    check: Callable[[str, Any], Any],
    default: Any = None,
) -> Any:
    """The checked value of a field, or the default where it is absent."""
    return check(name, given[name]) if name in given else default


def _needed(given: dict[str, Any], name: str) -> Any:
    if name not in given:
        raise _refusal(name, f"{name} must be given")
    return given[name]


def _common(
    given: dict[str, Any], headers: Mapping[str, str], deadline_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that both kinds of requests have.

    Returns:
      Fields of `Sampling`, unchecked, and of `GenerationRequest`.
    """
    fields = {name: given[name] for name in _SAMPLING if name in given}
    stop, ends = given.get("stop", []), given.get("stop_tokens", [])
    stop = [stop] if isinstance(stop, str) else stop
    for name, value in (("stop", stop), ("stop_tokens", ends)):
        if not isinstance(value, list):
            raise _refusal(name, f"{name}={validation.shown(value)} must be a list")
        fields[name] = tuple(value)
    is_streamed = _taken(given, "stream", validation.boolean, False)
    options = given.get("stream_options", {})
    if options and not is_streamed:
        raise _refusal("stream_options", "stream_options needs stream=true")
    # Obfuscation pads chunks against observers of their sizes; there is none here.
    if not isinstance(options, dict) or options.keys() - _STREAM_OPTIONS:
        raise _refusal(
            "stream_options",
            f"stream_options={validation.shown(options)} must be an object with "
            "include_usage",
        )
    flags = {name: validation.boolean(name, options[name]) for name in options}
    if flags.get("include_obfuscation"):
        raise _refusal("stream_options", "include_obfuscation=True is not supported")
    # Which answers are kept is known only at the end.
    ranks = {"best_of": given.get("n", 1), "beam_width": None}
    for name, unranked in ranks.items():
        if is_streamed and name in given and given[name] != unranked:
            raise _refusal(name, f"{name} is not supported with stream=true")
    limit = given.get("deadline_s", headers.get(DEADLINE_HEADER, deadline_s))
    if isinstance(limit, str):  # of a header
        with contextlib.suppress(ValueError):
            limit = float(limit)
    hint = f"in [0.001, {MAX_DEADLINE_S:g}]"
    return fields, {
        "is_streamed": is_streamed,
        "has_usage": flags.get("include_usage", False),
        "deadline_s": validation.number(
            "deadline_s", limit, low=0.001, high=MAX_DEADLINE_S, hint=hint
        ),
    }


_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
MAX_DEADLINE_S = 86400.0


def _samplings(
    fields: dict[str, Any], prompts: list[list[int]], default: int, backend: Backend
) -> list[Sampling]:
    """How each prompt's answers are drawn, with the tokens that they may have.

    An engine would end an answer at `max_length`; here a request that asks for more is
    refused, as OpenAI does.
    """
    rooms, max_tokens = [], fields.pop("max_tokens")
    for i, prompt in enumerate(prompts):
        left = backend.max_length - len(prompt)
        wanted = max(1, max_tokens or 0)
        if max_tokens is None:
            wanted = max(1, min(default, left))
        if wanted > left:
            where = f"prompt[{i}]" if len(prompts) > 1 else "the prompt"
            raise ApiError(
                400,
                f"{where} has {len(prompt)} tokens, with max_tokens={wanted} more than "
                f"max_length={backend.max_length}",
                code="context_length_exceeded",
            )
        rooms.append(wanted)
    sampling = Sampling(**fields)
    return [dataclasses.replace(sampling, max_tokens=room) for room in rooms]


def _prompts(raw: Any, tokenizer: Any) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and its text where that was given."""
    each: list[Any] = raw if isinstance(raw, list) else [raw]
    if {type(one) for one in each} == {int}:
        each = [each]
    if len(each) > MAX_PROMPTS:
        line = f"len(prompt)={len(each)} must be at most {MAX_PROMPTS}"
        raise _refusal("prompt", line)
    kinds = {type(one) for one in each}
    if kinds == {str}:
        return [tokenizer.encode(text) for text in each], each
    if kinds == {list} and all({type(x) for x in one} <= {int} for one in each):
        return each, [None] * len(each)
    raise _refusal(
        "prompt",
        f"prompt={validation.shown(raw)} must be a text, a list of texts, a list of "
        "token ids, or a list of such lists",
    )


def _messages(raw: Any) -> list[dict[str, Any]]:
    """Messages for a chat template: their content is text, and None only with calls.

    Parts of a content are joined; images and audio are refused.
    """
    if not isinstance(raw, list) or not raw:
        raise _refusal("messages", "messages must be a list, not empty")
    found = []
    for i, message in enumerate(raw):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refusal(where, f"{where} must have a role")
        content, where = message.get("content"), f"{where}.content"
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind != "text" or not isinstance(part.get("text"), str):
                    kind = validation.shown(kind)
                    line = f"{where} has a part of type {kind}, must be 'text'"
                    raise _refusal(where, line)
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and not (
            content is None and message.get("tool_calls")
        ):
            raise ApiError(400, f"{where} must be text", param=f"messages[{i}]")
        found.append(message | {"content": content})
    return found


def tokenize(body: bytes, backend: Backend) -> dict[str, Any]:
    """Answers /tokenize, vLLM's: the token ids of a text.

    Raises:
      ApiError: a field is missing, unknown or of another type.
      ValueError: the text is not valid Unicode.
    """
    given = _only(body, "prompt", "add_special_tokens", "model")
    text = _needed(given, "prompt")
    if not isinstance(text, str):
        raise _refusal("prompt", "prompt must be text")
    special = _taken(given, "add_special_tokens", validation.boolean, True)
    ids = backend.tokenizer.encode(text, add_special_tokens=special)
    return {"tokens": ids, "count": len(ids), "max_model_len": backend.max_length}


def detokenize(body: bytes, backend: Backend) -> dict[str, Any]:
    """Answers /detokenize, vLLM's: the text of token ids; raises as `tokenize`."""
    given = _only(body, "tokens", "model")
    ids = validation.token_sequence("tokens", _needed(given, "tokens")).tolist()
    text = backend.tokenizer.decode(ids, skip_special_tokens=False)
    return {"prompt": text}


def _only(body: bytes, *names: str) -> dict[str, Any]:
    """The fields of a body that has no other fields than these."""
    given = read_object(body)
    for name in given.keys() - {*names}:
        raise _unknown(name)
    return given


def _unknown(name: str) -> ApiError:
    line = f"{validation.shown(name)} is not a field of this API"
    return _refusal(name[:64], line)
