"""OpenAI's responses: documents and chunks of a stream, made from completions."""

import dataclasses
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkv.server.openai_requests import ApiError, GenerationRequest
from jaxkv.server.tool_calls import StreamedContent, ToolCall
from jaxkv.serving import Completion, Event, FinishedAnswer
from jaxkv.text import NUM_BYTES

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LOWEST_LOGPROB = -9999.0
"""Log-probability that replaces minus infinity, which JSON cannot represent."""


@dataclasses.dataclass(frozen=True)
class ResponseWriter:
    """Makes the documents of one request.

    Args:
      request: the request.
      model: name of the model.
      tokenizer: tokenizer of the model.
    """

    request: GenerationRequest
    model: str
    tokenizer: Any
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    _contents: dict[int, StreamedContent] = dataclasses.field(
        default_factory=dict, init=False
    )
    """Streamed content of answers that may have tool calls, by their index."""

    def document(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the document of a request that is not streamed."""
        choices = []
        for prompt, completion in enumerate(completions):
            for place, answer in enumerate(completion.answers):
                text = self._text(prompt, answer)
                logprobs = None
                if self.request.logprobs is not None:
                    logprobs = self._logprobs(prompt, completion, answer)
                body: dict[str, object] = {"text": text}
                calls: list[ToolCall] = []
                if self.request.kind == "chat":
                    message = {"role": "assistant", "content": text, "refusal": None}
                    if self.request.tool_reader is not None:
                        content, calls = self.request.tool_reader.read(answer)
                        message["content"] = content if content or not calls else None
                    if calls:
                        message["tool_calls"] = [call.document for call in calls]
                    body = {"message": message}
                choices.append(
                    {
                        "index": self._index(prompt, place),
                        **body,
                        "logprobs": logprobs,
                        "finish_reason": finish_reason(answer.reason, calls),
                    }
                )
        kind = "chat.completion" if self.request.kind == "chat" else "text_completion"
        usage = self.usage(completions)
        return self._head(kind) | {"choices": choices, "usage": usage}

    def opening(self, prompt: int) -> Iterable[dict[str, Any]]:
        """Yields the chunks before the tokens of a prompt's answers."""
        for place in range(self.request.samplings[prompt].n):
            if self.request.kind == "chat":
                yield self._chunk(prompt, place, {"role": "assistant", "content": ""})
            elif self.request.echoes is not None:
                yield self._chunk(prompt, place, self.request.echoes[prompt])

    def chunks(self, prompt: int, event: Event) -> Iterable[dict[str, Any]]:
        """Yields the chunks of an event.

        Log-probabilities are in the last chunk of an answer, since those of
        alternatives are known only then.
        """
        text = event.text
        reader = self.request.tool_reader
        if reader is not None:
            sent = self._contents.setdefault(event.sample, StreamedContent(reader))
            text = sent.push(event.text, event.tokens)
        if text and not self.request.drops_answer:
            is_chat = self.request.kind == "chat"
            delta = {"content": text} if is_chat else text
            yield self._chunk(prompt, event.sample, delta)
        if event.completion is not None:
            for place, answer in enumerate(event.completion.answers):
                logprobs = None
                if self.request.logprobs is not None:
                    logprobs = self._logprobs(prompt, event.completion, answer)
                delta = {} if self.request.kind == "chat" else ""
                calls: list[ToolCall] = []
                if reader is not None:
                    sent = self._contents.pop(place, StreamedContent(reader))
                    content, calls = sent.finish(answer)
                    if content:
                        yield self._chunk(prompt, place, {"content": content})
                if calls:
                    documents = [
                        {"index": i} | call.document for i, call in enumerate(calls)
                    ]
                    yield self._chunk(prompt, place, {"tool_calls": documents})
                reason = finish_reason(answer.reason, calls)
                yield self._chunk(prompt, place, delta, logprobs, reason)

    def closing(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yields the last chunk of a stream, if token counts are requested."""
        if self.request.has_usage:
            usage = self.usage(completions)
            yield self._head(self._chunk_kind) | {"choices": [], "usage": usage}

    def usage(self, completions: Sequence[Completion]) -> dict[str, object]:
        """Returns the token counts of prompts and answers."""
        prompt = sum(map(len, self.request.prompts))
        answers = [
            answer for completion in completions for answer in completion.answers
        ]
        num = sum(len(completion.tokens) for completion in answers)
        num = 0 if self.request.drops_answer else num
        cached = sum(completion.num_cached for completion in completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num,
            "total_tokens": prompt + num,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _index(self, prompt: int, place: int) -> int:
        return prompt * self.request.samplings[prompt].n + place

    def _head(self, kind: str) -> dict[str, object]:
        prefix = "chatcmpl" if self.request.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    @property
    def _chunk_kind(self) -> str:
        is_chat = self.request.kind == "chat"
        return "chat.completion.chunk" if is_chat else "text_completion"

    def _chunk(
        self,
        prompt: int,
        place: int,
        delta: object,
        logprobs: object = None,
        reason: str | None = None,
    ) -> dict[str, object]:
        name = "delta" if self.request.kind == "chat" else "text"
        choice = {"index": self._index(prompt, place), name: delta}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.request.has_usage else {}
        return self._head(self._chunk_kind) | {"choices": [choice]} | usage

    def _text(self, prompt: int, answer: FinishedAnswer) -> str:
        echo = "" if self.request.echoes is None else self.request.echoes[prompt]
        return echo if self.request.drops_answer else echo + (answer.text or "")

    def _logprobs(
        self, prompt: int, completion: Completion, answer: FinishedAnswer
    ) -> dict[str, object]:
        tokens: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[int, float] | None] = []
        num = self.request.logprobs
        if not self.request.drops_answer:
            tokens = list(answer.tokens)
            logprobs = list(answer.logprobs or [])
            tops = list(answer.top_logprobs or [{} for _ in tokens])
        if self.request.kind == "chat":

            def entry(token: int, logprob: float | None) -> dict[str, object]:
                piece, raw = self._piece(token)
                return {"token": piece, "logprob": _json_number(logprob), "bytes": raw}

            content = [
                entry(token, logprob)
                | {"top_logprobs": [entry(*pair) for pair in (top or {}).items()]}
                for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        if self.request.echoes is not None:
            begun = self.request.prompts[prompt]
            if self.request.prompt_offsets is None:
                offsets = self._offsets(begun, 0, len(self.request.echoes[prompt]))
            else:
                offsets = self.request.prompt_offsets[prompt]
            tokens = begun + tokens
            logprobs = (completion.prompt_logprobs or []) + logprobs
            none = [None, *[{} for _ in begun[1:]]]
            tops = (completion.prompt_top_logprobs or none) + tops
        best: list[dict[str, float | None] | None] = []
        rows = zip(tops, tokens, logprobs, strict=True) if num else ()
        for top, token, logprob in rows:
            by_text: dict[str, float | None] = {}
            # Best first: of two tokens with equal text the likelier one is kept. The
            # generated token is always included.
            for alternative, value in ((top or {}) | {token: logprob}).items():
                by_text.setdefault(self._piece(alternative)[0], _json_number(value))
            best.append(None if top is None else by_text)
        text = self._text(prompt, answer)
        start = len(text) - len(answer.text or "")
        context = self.request.prompts[prompt]
        new = tokens[len(offsets) :]
        offsets = offsets + self._offsets(new, start, len(text), context)
        return {
            "tokens": [self._piece(token)[0] for token in tokens],
            "token_logprobs": [_json_number(x) for x in logprobs],
            "top_logprobs": best if num else None,
            "text_offset": offsets,
        }

    def _offsets(
        self, tokens: Sequence[int], start: int, end: int, context: Sequence[int] = ()
    ) -> list[int]:
        """Returns offsets of tokens in the text of a choice, from `start` on."""
        stream = self.tokenizer.stream(context)
        offsets = []
        for token in tokens:
            offsets.append(min(start, end))
            start += len(stream.push(token))
        return offsets

    def _piece(self, token: int) -> tuple[str, list[int] | None]:
        """Returns the text of a token and its bytes; names half a character.

        The bytes are None if the tokenizer does not expose them.
        """
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        if text and REPLACEMENT not in text:
            return text, list(text.encode())
        core = getattr(self.tokenizer, "core", None)
        if core is not None:
            return core.id_to_token(token) or f"<|{token}|>", None
        if token < NUM_BYTES:
            return f"bytes:\\x{token:02x}", [token]
        return f"<|{token}|>", None


def finish_reason(reason: str, calls: Sequence[ToolCall] = ()) -> str:
    """Returns OpenAI's `finish_reason` of an answer with these tool calls.

    Raises:
      ApiError: the answer is not complete.
    """
    if reason in ("stop", "length"):
        return "tool_calls" if calls else reason
    why = {"nan": "the model's logits are not all finite"}
    line = why.get(reason, f"the answer was {reason}")
    raise ApiError(500, line, kind="server_error")


def _json_number(value: float | None) -> float | None:
    """Returns a log-probability as a JSON number."""
    if value is None or math.isnan(value):
        return None
    return max(value, LOWEST_LOGPROB)
