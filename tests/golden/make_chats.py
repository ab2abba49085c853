"""Writes `openai_chats.json`; to be run by hand with transformers.

The file has 20 conversations in the form of OpenAI's API, and for each template in
`$JAXKV_DATA/chat_templates` the digests of the prompts that transformers renders.
Transformers gets the form that the template reads, by the tables in this script; they
were written by reading the templates. The templates are those of published models, as
in `huggingface/trl` (trl/chat_templates: deepseekv3, gemma3, glm4moe, idefics3,
llama3_1, llama3_2, qwen2_5, qwen3, qwen3_vl), `EricLBuehler/mistral.rs`
(chat_templates: hermes3, mistral_nemo) and `google/minja` (qwen3_coder).

    JAXKV_DATA=FOLDER python tests/golden/make_chats.py
"""

import copy
import hashlib
import json
import os
import pathlib
from typing import Any

import tokenizers
import transformers

HERE = pathlib.Path(__file__).parent

TEXT_ARGUMENTS = {"deepseekv3"}
"""Templates that add the arguments of a call to text."""
NEEDS_CONTENT = {"deepseekv3"}
"""Templates that add the content of a call's message to text."""
TOOL_NAMES = {"hermes3"}
"""Templates that render the name of a tool's message."""
PARTS = {
    "idefics3": {"system", "user", "assistant", "tool"},
    "qwen3_vl": {"system", "user", "assistant", "tool"},
    "glm4moe": {"system", "user", "assistant"},
    "gemma3": {"user", "assistant"},
}
"""Roles whose contents a template reads as parts."""
ONLY_PARTS = {"idefics3"}
"""Templates that do not read a content that is text."""

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather in Oslo?"}
REPLY = {"role": "assistant", "content": "Cold."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks it up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of a city"},
                    "days": {"type": "integer", "description": "Days from today"},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "news")
]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(name: str, arguments: Any, call_id: str = "abc123def") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calls(*items: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(items)}


def answer(content: Any, call_id: str = "abc123def", **more: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


OSLO = '{"city": "Oslo", "days": 2}'
NESTED = '{"city":"Tromsø <1>","more":{"x":[1,2.5,null,true],"y":"a\\nb"},"days":-1e3}'
WITH_TOOLS = {"tools": TOOLS}
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([SYSTEM, USER], {}),
    ([SYSTEM, USER, REPLY, USER], {}),
    ([{"role": "user", "content": parts("one ", "two")}], {}),
    ([SYSTEM | {"content": parts("Be ", "brief.")}, USER], {}),
    ([USER, REPLY | {"content": parts("Co", "ld.")}, USER], {}),
    ([SYSTEM, USER], WITH_TOOLS),
    ([USER, calls(call("weather", OSLO)), answer("4 C")], WITH_TOOLS),
    ([USER, calls(call("news", "")), answer("none")], WITH_TOOLS),
    ([USER, calls(call("news", None)), answer("none")], WITH_TOOLS),
    (
        [
            USER,
            calls(call("weather", OSLO), call("news", OSLO, "abc123deg")),
            answer("4 C"),
            answer("none", "abc123deg"),
            REPLY,
            USER,
        ],
        WITH_TOOLS,
    ),
    ([USER, calls(call("weather", NESTED)), answer('{"t": "4 °C"}')], WITH_TOOLS),
    ([USER, calls(call("weather", OSLO), content="Wait."), answer("4 C")], WITH_TOOLS),
    ([USER, calls(call("weather", OSLO)), answer(parts("4 ", "C"))], WITH_TOOLS),
    (
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": OSLO},
            },
            {"role": "function", "name": "weather", "content": "4 C"},
        ],
        WITH_TOOLS,
    ),
    ([{"role": "developer", "content": "Be brief."}, USER], {}),
    ([USER, REPLY | {"tool_calls": [], "refusal": None}, USER], {}),
    (
        [USER, REPLY | {"reasoning_content": "It is winter."}, USER],
        {"enable_thinking": False},
    ),
    ([USER], {"enable_thinking": True}),
    (
        [
            USER | {"name": "ann"},
            calls(call("weather", OSLO)),
            answer("4 C", name="weather"),
            REPLY,
            USER | {"name": "bob"},
        ],
        WITH_TOOLS,
    ),
]
"""Messages on the wire, and further arguments."""


def template_form(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in the form that a template reads."""
    converted = copy.deepcopy(messages)
    for i, message in enumerate(converted):
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": f"call{i - 1:05d}"}
        if old := message.pop("function_call", None):
            message["tool_calls"] = [call(**old, call_id=f"call{i:05d}")]
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        for tool_call in message.get("tool_calls", ()):
            function = tool_call["function"]
            if name in TEXT_ARGUMENTS:
                function["arguments"] = function["arguments"] or "{}"
            else:
                function["arguments"] = json.loads(function["arguments"] or "{}")
        if message["role"] == "tool" and name in TOOL_NAMES and "name" not in message:
            ids = {
                tool_call["id"]: tool_call["function"]["name"]
                for before in converted[:i]
                for tool_call in before.get("tool_calls", ())
            }
            message["name"] = ids[message["tool_call_id"]]
        content = message["content"]
        if content is None and name in NEEDS_CONTENT:
            message["content"] = ""
        if isinstance(content, str) and name in ONLY_PARTS:
            message["content"] = parts(content)
        if isinstance(content, list) and message["role"] not in PARTS.get(name, ()):
            message["content"] = "".join(part["text"] for part in content)
    return converted


def digest(
    template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> str | None:
    """Returns the digest of a prompt; None if the template refuses the messages."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            date_string="26 Jul 2024",
            **arguments,
        )
    except Exception:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    lines = [
        json.dumps({"messages": messages, "arguments": arguments})
        for messages, arguments in CHATS
    ]
    digests = {}
    for path in sorted(
        (pathlib.Path(os.environ["JAXKV_DATA"]) / "chat_templates").glob("*.jinja")
    ):
        texts = [
            digest(path.read_text(), template_form(path.stem, messages), arguments)
            for messages, arguments in CHATS
        ]
        digests[path.stem] = texts
    rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in digests.items())
    chats = ",\n".join(lines)
    text = f'{{"chats": [\n{chats}\n],\n"digests": {{\n{rows}\n}}}}\n'
    (HERE / "openai_chats.json").write_text(text)
