# ruff: noqa: RUF001 - DeepSeek's tokens have wide bars
"""Chats over HTTP: messages and tools become prompts, and answers have tool calls."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import tokenizers

from jaxkv.server import openai_requests, tool_calls
from jaxkv.server.openai_requests import ApiError, GenerationRequest
from jaxkv.server.openai_responses import ResponseWriter
from jaxkv.serving import Completion, Event, FinishedAnswer
from jaxkv.text import ByteTokenizer, Tokenizer
from tests.support import folders

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "tags": {"type": ["array", "null"]},
                },
            },
        },
    }
]


class ChatBackend(NamedTuple):
    """The parts of a backend that parsing reads."""

    tokenizer: Tokenizer | ByteTokenizer
    model_name: str = "m"
    max_length: int = 100_000
    adapters: tuple[str, ...] = ()

    def status(self) -> dict[str, Any]:
        return {}

    def stream(self, *args: Any, **fields: Any) -> Any:
        raise NotImplementedError


def parse(template: Any, **fields: Any) -> GenerationRequest:
    tokenizer = ByteTokenizer(257)
    tokenizer.settings["chat_template"] = template
    body = json.dumps(fields).encode()
    return openai_requests.parse_chat(body, {}, ChatBackend(tokenizer), 5.0)


def prompt_of(template: Any, **fields: Any) -> str:
    [prompt] = parse(template, **fields).prompts
    return bytes(prompt).decode()


CASES = folders.ROOT.parent / "shared" / "cases"


def test_collected_cases() -> None:
    paths = [*CASES.glob("*/chats.json")]
    if not paths:
        pytest.skip(f"{CASES}: there are no collected cases")
    for path in paths:
        for case in json.loads(path.read_text(encoding="utf-8")):
            name = case.pop("name")
            prompt = case.pop("prompt")
            assert prompt_of(**case) == prompt, name


READS_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}"
    "{% for t in m.tool_calls %}{{ t.function.name }}"
    "{% for k, v in t.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
READS_PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }};{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"x": 1, "y": "a"}', "look x=1 y=a"), ("", "look"), (None, "look")],
)
def test_wire_arguments_are_objects(arguments: Any, text: str) -> None:
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "look", "arguments": arguments}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "1", "content": "4"}
    assert prompt_of(READS_CALLS, messages=[USER, called, answer]) == (
        f"<user>hi<assistant>{text}<tool>4"
    )


def test_wire_contents_are_parts_or_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert prompt_of(READS_PARTS, messages=[USER]) == "hi;"
    assert prompt_of(READS_PARTS, messages=[message]) == "a;b;"
    assert prompt_of(READS_CALLS, messages=[message]) == "<user>ab"
    empty = {"role": "assistant", "content": "yes", "tool_calls": []}
    assert prompt_of(READS_CALLS, messages=[USER, empty]) == "<user>hi<assistant>yes"


THINKS = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking"
    " %}/off{% endif %}{{ tools }}{# <tool_call> #}"
)


def test_variables_of_the_template() -> None:
    for variables, text in (
        ({}, "hiNone"),
        ({"enable_thinking": False}, "hi/offNone"),
        ({"enable_thinking": True}, "hiNone"),
    ):
        fields = {"messages": [USER], "chat_template_kwargs": variables}
        assert prompt_of(THINKS, **fields) == text


@pytest.mark.parametrize(
    ("fields", "param", "line"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be an object"),
        *(
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs", name)
            for name in (
                *("messages", "tools", "add_generation_prompt", "chat_template"),
                *("continue_final_message", "tokenize", "enable_thinkng"),
            )
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0].function must have a"),
        ({"tools": [{"function": {}}]}, "tools", "tools[0].function must have a name"),
        ({"messages": [USER | {"name": 3}]}, "messages[0].name", "must be text"),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
            "'[1]' must be a JSON object",
        ),
    ],
)
def test_invalid_chats_are_refused(
    fields: dict[str, Any], param: str, line: str
) -> None:
    with pytest.raises(ApiError) as info:
        parse(THINKS, **{"messages": [USER]} | fields)
    assert (info.value.status, info.value.param) == (400, param)
    assert line in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}{{ tools }}",  # calls of an unknown format
        "{{ messages[0].content }}<tool_call>",  # does not read tools
    ],
)
def test_tools_of_an_unknown_format_are_refused(template: str) -> None:
    with pytest.raises(ApiError, match="tool_choice='none' answers without tools"):
        parse(template, messages=[USER], tools=TOOLS)
    request = parse(template, messages=[USER], tools=TOOLS, tool_choice="none")
    assert request.tool_reader is None


# Answers

MODELS = {
    "Hermes": "hermes3 qwen2_5 qwen3 qwen3_vl",
    "Qwen3-Coder": "qwen3_coder",
    "GLM": "glm4moe",
    "DeepSeek": "deepseekv3",
    "Mistral": "mistral_nemo",
    "Llama 3": "llama3_1 llama3_2",
    "": "gemma3 idefics3",
}


def test_formats_of_published_templates() -> None:
    for name, stems in MODELS.items():
        for stem in stems.split():
            template = folders.published_template(stem)
            tool_format = tool_calls.find_tool_format(template)
            assert (tool_format.name if tool_format else "") == name, stem


ARGUMENTS = {"city": "Oslo é", "days": 2, "tags": ["a"], "unit": None}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'
PAIRS = {"city": "Oslo é", "days": "2", "tags": '["a"]', "unit": "null"}
XML = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in PAIRS.items())
GLM = "".join(
    f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in PAIRS.items()
)
FENCED = f"function<｜tool▁sep｜>look\n```json\n{JSON}\n```"
ANSWERS = [
    ("Hermes", CALL, None, 1),
    ("Hermes", f"Wait.\n{CALL}\n{CALL}", "Wait.\n", 2),
    ("Hermes", CALL.removesuffix("</tool_call>"), None, 1),
    ("Qwen3-Coder", f"<tool_call>\n<function=look>\n{XML}</function>\n</tool_call>",
     None, 1),
    ("GLM", f"So.<tool_call>look\n{GLM}</tool_call>", "So.", 1),
    ("DeepSeek", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}"
     f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, 2),
    ("Mistral", f'Wait.[TOOL_CALLS][{{"name": "look", "arguments": {JSON}}}]',
     "Wait.", 1),
    ("Mistral", f"[TOOL_CALLS]look[CALL_ID]abc123def[ARGS]{JSON}[TOOL_CALLS]look{JSON}",
     None, 2),
    ("Llama 3", f'{{"name": "look", "parameters": {JSON}}}', None, 1),
    ("Llama 3", f'<|python_tag|>{{"name": "look", "parameters": {JSON}}}; '
     f'{{"name": "look", "parameters": {JSON}}}', None, 2),
]  # fmt: skip
"""Formats, answers, contents and numbers of calls."""
NO_CALLS = [
    ("Hermes", "a <tool_ca"),
    ("Hermes", "a <tool_call>{"),
    ("Hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("Hermes", "<tool_call>" + "[" * 5000),
    ("Qwen3-Coder", "<tool_call>\n<function=look>\n<parameter=city>"),
    ("GLM", "<tool_call>no call at all</tool_call>"),
    ("DeepSeek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
    ("Mistral", "[TOOL_CALLS]look[ARGS]{"),
    ("Mistral", "[TOOL_CALLS] [1]"),
    ("Llama 3", '{"a": 1} is JSON'),
    ("Llama 3", "Use {braces}."),
    ("Llama 3", ""),
]


def answer_of(tokenizer: Any, text: str, reason: str = "stop") -> FinishedAnswer:
    return FinishedAnswer(
        tokens=tokenizer.encode(text),
        text=tokenizer.decode(tokenizer.encode(text)),
        reason=reason,
        sample=0,
        score=None,
        logprobs=None,
        top_logprobs=None,
    )


def writer_of(tokenizer: Tokenizer | ByteTokenizer, name: str) -> ResponseWriter:
    """Returns a writer for a request with tools and calls of a format."""
    [tool_format] = [x for x in tool_calls.TOOL_CALL_FORMATS if x.name == name]
    tokenizer.settings["chat_template"] = "{{ tools }}" + "".join(tool_format.marks)
    body = json.dumps({"messages": [USER], "tools": TOOLS}).encode()
    request = openai_requests.parse_chat(body, {}, ChatBackend(tokenizer), 5.0)
    return ResponseWriter(request, "m", tokenizer)


def completion_of(answer: FinishedAnswer) -> Completion:
    fields: dict[str, Any] = dict.fromkeys(Completion._fields, 0)
    fields["answers"] = [answer]
    return Completion(**fields)


def stream(
    writer: ResponseWriter, answer: FinishedAnswer, events: Sequence[Event]
) -> dict[str, Any]:
    """Returns the choice of a stream, its chunks joined as OpenAI's client does."""
    choice: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None}
    last = Event(0, [], "", completion_of(answer))
    for event in (*events, last):
        for chunk in writer.chunks(0, event):
            [part] = chunk["choices"]
            choice["content"] += part["delta"].get("content", "")
            choice["tool_calls"] += part["delta"].get("tool_calls", [])
            choice["finish_reason"] = part["finish_reason"]
    return choice


@pytest.mark.parametrize(("name", "text", "content", "num_calls"), ANSWERS)
def test_tool_calls_of_answers(
    name: str, text: str, content: str | None, num_calls: int
) -> None:
    tokenizer = ByteTokenizer(257)
    writer = writer_of(tokenizer, name)
    answer = answer_of(tokenizer, text)
    [choice] = writer.document([completion_of(answer)])["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", content)
    assert len({call["id"] for call in message["tool_calls"]}) == num_calls
    for call in message["tool_calls"]:
        assert (call["type"], call["function"]["name"]) == ("function", "look")
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    events = [Event(0, [*char.encode()], char, None) for char in text]
    streamed = stream(writer, answer, events)
    assert streamed["content"] == (content or "")
    assert streamed["finish_reason"] == "tool_calls"
    for i, call in enumerate(streamed["tool_calls"]):
        assert call["index"] == i
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert len(streamed["tool_calls"]) == num_calls


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_answers_without_calls_are_content(name: str, text: str) -> None:
    tokenizer = ByteTokenizer(257)
    writer = writer_of(tokenizer, name)
    answer = answer_of(tokenizer, text, "length")
    [choice] = writer.document([completion_of(answer)])["choices"]
    assert choice["finish_reason"] == "length"
    message = {"role": "assistant", "content": text, "refusal": None}
    assert choice["message"] == message
    events = [Event(0, [*char.encode()], char, None) for char in text]
    expected = {"content": text, "tool_calls": [], "finish_reason": "length"}
    assert stream(writer, answer, events) == expected


def test_arguments_without_a_usable_schema_are_text() -> None:
    pairs = "<arg_key>a</arg_key><arg_value>5</arg_value>"
    for schema in (
        {}, {"parameters": [1]}, {"parameters": {"properties": 3}},
        {"parameters": {"properties": {"a": True}}},
    ):  # fmt: skip
        tools = [{"function": {"name": "f"} | schema}]
        [call] = tool_calls._parse_glm(f"<tool_call>f\n{pairs}</tool_call>", tools)
        assert call.arguments == '{"a": "5"}'
    parameters = {"properties": {"a": {"anyOf": [3, {"type": "integer"}]}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    [call] = tool_calls._parse_glm(f"<tool_call>f\n{pairs}</tool_call>", tools)
    assert call.arguments == '{"a": 5}'


@pytest.mark.parametrize(
    ("name", "start", "piece"),
    [
        ("Hermes", "<tool_call>", "\n"),
        ("Qwen3-Coder", "<tool_call><function=f>", "<parameter=a>\n"),
        ("GLM", "<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
        ("DeepSeek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>"),
        ("Mistral", "[TOOL_CALLS]f", "[ARGS]"),
        ("Llama 3", "{", " "),
    ],
)
def test_repeated_text_is_no_call(name: str, start: str, piece: str) -> None:
    # A cubic number of steps would take years.
    [tool_format] = [x for x in tool_calls.TOOL_CALL_FORMATS if x.name == name]
    text = start + piece * (100_000 // len(piece))
    with contextlib.suppress(ValueError):
        assert not tool_format.parse(text, [])


def test_content_before_calls_is_streamed_at_once() -> None:
    writer = writer_of(ByteTokenizer(257), "Hermes")
    texts = []
    for piece in ("a", "b <", "c <tool_", "call>{", "x"):
        chunks = writer.chunks(0, Event(0, [1], piece, None))
        texts.append([chunk["choices"][0]["delta"]["content"] for chunk in chunks])
    assert texts == [["a"], ["b "], ["<c "], [], []]


@pytest.mark.parametrize("end", ["", "</s>"])
def test_special_tokens_that_begin_calls(end: str) -> None:
    # `decode` removes them, as for Mistral's tokenizers of Hugging Face.
    special = ["[TOOL_CALLS]", "[ARGS]", "</s>"]
    vocab = {chr(32 + i): i for i in range(95)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.decoder = tokenizers.decoders.Fuse()
    core.add_special_tokens(special)
    tokenizer = Tokenizer(core)
    writer = writer_of(tokenizer, "Mistral")
    answer = answer_of(tokenizer, f'Wait.[TOOL_CALLS]look[ARGS]{{"city": "a"}}{end}')
    assert "TOOL_CALLS" not in (answer.text or "")
    [choice] = writer.document([completion_of(answer)])["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"city": "a"}'}
    assert choice["message"]["content"] == "Wait."
    events = [Event(0, [x], tokenizer.decode([x]), None) for x in answer.tokens]
    streamed = stream(writer, answer, events)
    assert streamed["content"] == "Wait."
    assert len(streamed["tool_calls"]) == 1
