"""Messages of OpenAI's API become prompts, as transformers renders the same chats."""

import hashlib
import json
from typing import Any

import pytest

from jaxkv.text import ByteTokenizer, convert_openai_messages
from tests.support.folders import GOLDEN, published_template

TABLE = json.loads((GOLDEN / "openai_chats.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "hi"}
ECHO = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}"
    "{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% for t in m.tool_calls %}"
    "{{ t.function.arguments | tojson }}{% else %}{{ m.content }}{% endfor %}"
    "{% endfor %}"
)


def tokenizer_of(template: Any, **settings: str) -> ByteTokenizer:
    tokenizer = ByteTokenizer(257)
    tokenizer.settings |= {"chat_template": template, **settings}
    return tokenizer


def prompt_of(template: Any, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer = tokenizer_of(template)
    tools = variables.get("tools")
    converted = convert_openai_messages(messages, tokenizer, tools=tools)
    return tokenizer.apply_chat_template(converted, **variables)


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.usefixtures("no_type_checks")  # 10 times faster
@pytest.mark.parametrize("name", TABLE["digests"])
def test_prompts_equal_those_of_transformers(name: str) -> None:
    tokenizer = tokenizer_of(
        published_template(name), bos_token="<s>", eos_token="</s>"
    )
    digests: list[str | None] = []
    for chat in TABLE["chats"]:
        arguments = chat["arguments"] | {"date_string": "26 Jul 2024"}
        messages = convert_openai_messages(
            chat["messages"], tokenizer, tools=arguments.get("tools")
        )
        try:
            text = tokenizer.apply_chat_template(messages, **arguments)
        except ValueError:
            digests.append(None)
            continue
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
        # The template's form is unchanged by a second conversion.
        again = convert_openai_messages(
            messages, tokenizer, tools=arguments.get("tools")
        )
        assert tokenizer.apply_chat_template(again, **arguments) == text
    assert digests == TABLE["digests"][name]


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        (PARTS, "a", "a|"),
        (PARTS, [("text", "a"), ("text", "b")], "a|b|"),
        (PARTS, [("text", "a"), ("refusal", "b")], "a|b|"),
        ("{{ messages[0].content | map(attribute='text') | join }}", "a", "a"),
        ("{{ messages[0].content[0].text }}", [("text", "a"), ("text", "b")], "ab"),
        (ECHO, [("text", "a"), ("text", "b")], "<user>ab"),
        (ECHO, [], "<user>"),
        ("{{ messages[0].content | tojson }}", [("text", "a")], '"a"'),
        ("{% if messages[0].content is string %}s{{ messages[0].content }}{% else %}"
         + PARTS + "{% endif %}", "a", "sa"),
        ("{% if messages[0].content is string %}s{{ messages[0].content }}{% else %}"
         + PARTS + "{% endif %}", [("text", "a"), ("text", "b")], "a|b|"),
        ("{% macro show(c) %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m['content']) }}{% endfor %}", "a", "a"),
        ("{{ bos_token + messages[0].content }}", "a", None),
    ],
)  # fmt: skip
def test_contents_reach_the_template_in_its_form(
    template: str, content: Any, prompt: str | None
) -> None:
    if isinstance(content, list):
        content = [{"type": kind, kind: text} for kind, text in content]
    messages = [{"role": "user", "content": content}]
    if prompt is None:
        with pytest.raises(ValueError, match="the chat template failed"):
            prompt_of(template, messages)
    else:
        assert prompt_of(template, messages) == prompt


def test_forms_depend_on_the_role() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% for p in m.content %}{{ p.text }}|{% endfor %}"
        "{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    messages = [{"role": x, "content": parts} for x in ("system", "user", "assistant")]
    assert prompt_of(template, messages) == "ab;a|b|ab;"


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [
        ('{"b": 1, "a": "<é>"}', '{"b": 1, "a": "<é>"}'),
        ({"b": "é"}, '{"b": "é"}'),
        ("{}", "{}"),
        ("", "{}"),
        (None, "{}"),
        (' {"x": {"y": [1.0, null]}} ', '{"x": {"y": [1.0, null]}}'),
    ],
)
def test_arguments_are_objects(raw: Any, prompt: str) -> None:
    assert prompt_of(CALLS, calling(raw)) == "hi" + prompt
    as_text = CALLS.replace("arguments | tojson", "arguments + ';'")
    text = raw if isinstance(raw, str) and raw else prompt
    assert prompt_of(as_text, calling(raw)) == f"hi{text};"


@pytest.mark.parametrize(
    "raw", ["[1]", "x", "null", "3", " ", '{"x": NaN}', "[" * 100_000, 3, [1], True]
)
def test_other_arguments_are_refused(raw: Any) -> None:
    path = r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments="
    with pytest.raises(ValueError, match=path + ".* must be a JSON object") as info:
        prompt_of(CALLS, calling(raw))
    assert "\n" not in str(info.value)


def test_missing_arguments_and_contents() -> None:
    [_, message] = calling(None)
    del message["tool_calls"][0]["function"]["arguments"], message["content"]
    assert prompt_of(CALLS, [USER, message]) == "hi{}"
    for empty in ([], None):
        plain = {"role": "assistant", "content": "yes", "tool_calls": empty}
        text = "{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}"
        assert prompt_of(text, [USER, plain]) == "FalseFalse"
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    assert prompt_of(ECHO, [USER, refusal]) == "<user>hi<assistant>no"
    needs = "{% for m in messages %}{{ m.content + (m.tool_calls | string) }}{% endfor"
    needs += " %}"
    assert "'f'" in prompt_of(needs, calling("{}"))


def test_old_function_calls_and_names() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }} {{ m.name }}{{ m.tool_call_id }}>"
        "{% for t in m.tool_calls %}{{ t.id }}{{ t.function | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    messages = [
        USER | {"name": "ann"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "4"},
    ]
    text = '<user ann><assistant >call00001{"name": "f", "arguments": {}}'
    assert prompt_of(template, messages) == text + "<tool fcall00001>"
    # The name of the call, since the template renders names.
    messages = [*calling("{}"), {"role": "tool", "tool_call_id": "1", "content": "4"}]
    assert prompt_of(template, messages).endswith("<tool f1>")


def test_the_developer_is_the_system_of_older_templates() -> None:
    messages = [{"role": "developer", "content": "a"}, USER]
    assert prompt_of(ECHO, messages) == "<system>a<user>hi"
    assert prompt_of(ECHO + "{# developer #}", messages) == "<developer>a<user>hi"


def test_tools_select_the_template() -> None:
    named = [
        {"name": "default", "template": ECHO},
        {"name": "tool_use", "template": PARTS + "{{ tools[0].name }}"},
    ]
    assert prompt_of(named, [USER]) == "<user>hi"
    assert prompt_of(named, [USER], tools=[{"name": "f"}]) == "hi|f"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"content": "a"}, "messages[0] must have a role"),
        ({"role": 3, "content": "a"}, "messages[0] must have a role"),
        ({"role": "user"}, "messages[0].content must be text, or a list"),
        ({"role": "user", "content": 3}, "messages[0].content must be text, or a list"),
        ({"role": "user", "content": ["a"]}, "messages[0].content has a part of type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "type 'image_url'"),
        ({"role": "user", "content": "a", "name": 3}, "messages[0].name=3 must be"),
        (
            {"role": "tool", "content": "a", "tool_call_id": [1]},
            "tool_call_id=[1] must",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": [1], "function": {"name": "f"}}],
            },
            "messages[0].tool_calls[0].id=[1] must be text",
        ),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls must be a"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "with a name"),
        ({"role": "assistant", "function_call": "f"}, "with a name and arguments"),
        (calling("{}")[1] | {"function_call": {"name": "f"}}, "must be absent"),
    ],
)
def test_invalid_messages_are_refused(message: Any, line: str) -> None:
    with pytest.raises(ValueError, match=r"^messages\[0\]") as info:
        prompt_of(ECHO, [message])
    assert line in str(info.value)
