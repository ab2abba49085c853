"""Chat templates: render a conversation to the text that a model was trained on.

A template is a Jinja program that comes with the model. It runs in Jinja's sandbox and
has access to plain values only. Every exception becomes an error of one line. Its steps
are counted and its sums and products are bounded, so that it cannot run forever.
"""

import contextlib
import datetime
import functools
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from jaxkv.validation import one_line

MAX_TEMPLATE_STEPS = 5_000_000
"""Limit on the lines of Python that a template executes: some seconds, and 100 times
the need of a conversation of a thousand messages."""
MAX_PROMPT_SIZE = 10_000_000
"""Limit on the characters, entries or bits of a sum, product or power in a template."""


def render(
    template: object,
    messages: Sequence[Mapping[str, object]],
    variables: Mapping[str, object] | None = None,
) -> str:
    """Renders a conversation as transformers 5.24 does.

    Args:
      template: text of the template, or a list of named templates: "tool_use" is used
        if tools are given, else "default".
      messages: at least one message, in order; each has "role" and "content", or other
        keys in place of the content, such as "tool_calls". Keys with the value None
        count as missing.
      variables: variables of the template: texts of special tokens, such as
        `bos_token`; `tools`, the functions that the model may call, as JSON schemas,
        None by default; `documents`, texts that the model may quote, None by default;
        `add_generation_prompt`, True by default, to open the assistant's next turn; and
        any further ones. Variables that are not passed are undefined.

    Raises:
      ValueError: the template is missing or not text; a message lacks role or content;
        a variable is an option of transformers' `apply_chat_template`; or the template
        refuses the messages, is invalid, or exceeds `MAX_TEMPLATE_STEPS`.
    """
    context: dict[str, Any] = {"tools": None, "documents": None} | dict(variables or {})
    template = choose_template(template, context["tools"])
    if not _is_list(messages) or not messages:
        raise ValueError("messages must be a list, each with a role and a content")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not (
            "role" in message and len(message) > 1
        ):
            raise ValueError(
                f"message {number} must have a role and a content, or tool calls"
            )
    for name in context:
        if name in _OPTIONS:
            raise ValueError(f"{name} is no variable of a chat template")
    for name in ("tools", "documents"):
        value = context[name]
        if value is not None and not (
            _is_list(value) and all(isinstance(entry, Mapping) for entry in value)
        ):
            raise ValueError(f"{name} must be a list of mappings, or None")
    conversation = []
    for message in messages:
        plain = {key: x for key, x in message.items() if x is not None}
        # Templates read the reasoning under two names.
        reasoning = [plain[name] for name in _REASONING if name in plain][:1]
        for text in reasoning:
            plain = {"thinking": text} | plain | {"reasoning_content": text}
        conversation.append(plain)
    context = {"add_generation_prompt": True} | context | {"messages": conversation}
    try:
        # Copied through JSON, so that the template has no access to Python objects.
        context = json.loads(json.dumps(context, default=dict))
        program = _compile(template)
        with _counted_steps():
            return program.render(context)
    except Exception as error:  # a template may raise any exception
        raise ValueError(f"the chat template failed: {one_line(error)}") from None


def choose_template(template: object, tools: object = None) -> str:
    """Returns the text of a template, or of the named one that renders `tools`.

    Args:
      template: as in `render`.
      tools: the functions that the model may call; None means none.

    Raises:
      ValueError: the template is missing or not text.
    """
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        texts = {entry.get("name"): entry.get("template") for entry in named}
        has_tools = tools is not None and "tool_use" in texts
        template = texts.get("tool_use" if has_tools else "default")
    if template is None:
        raise ValueError("this model has no chat template: give it plain text")
    if not isinstance(template, str):
        raise ValueError(
            f"the chat template is no text but of type {type(template).__name__}"
        )
    return template


def read_variables(template: str) -> set[str]:
    """Returns the names of the variables that a template reads and `render` accepts.

    Raises:
      ValueError: the template is invalid.
    """
    try:
        program = _environment().parse(template)
        names = jinja2.meta.find_undeclared_variables(program)
    except Exception as error:  # the parser may raise any exception
        raise ValueError(f"the chat template failed: {one_line(error)}") from None
    return names - _HELPERS.keys() - _OPTIONS


@functools.cache
def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    return environment


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template, globals=_HELPERS)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_OPTIONS = frozenset(
    (
        "conversation",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
"""Keywords of transformers' `apply_chat_template` that are not template variables."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, in order of preference."""


@contextlib.contextmanager
def _counted_steps() -> Generator[None]:
    """Raises an error after `MAX_TEMPLATE_STEPS` lines of Python in this thread.

    Jinja compiles a template to Python, so loops, macros and filters consist of lines.
    A trace function set before, such as a debugger's, is restored at the end.
    """
    num_left = MAX_TEMPLATE_STEPS
    before = sys.gettrace()

    def count(
        frame: FrameType, event: str, _: object
    ) -> Callable[[FrameType, str, object], Callable]:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise jinja2.TemplateRuntimeError(
                f"it takes more than {MAX_TEMPLATE_STEPS:,} steps"
            )
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounded sums, products and powers.

    A filter may still make a long text, such as `center` with a large width.
    """

    intercepted_binops = frozenset(["+", "*", "**"])

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: object,
        right: object,
    ) -> object:
        """Raises an error if the result would exceed `MAX_PROMPT_SIZE`."""
        sizes = _size(left), _size(right)
        size = sum(sizes)
        if operator in ("*", "**"):
            # Text times a number, or a power of a number with `max(sizes)` bits.
            times = [x for x in (left, right) if isinstance(x, int)][-1:]
            size = max(size, max(sizes) * abs(times[0])) if times else size
        if size > MAX_PROMPT_SIZE:
            raise jinja2.TemplateRuntimeError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


def _size(value: object) -> int:
    """Returns the characters of a text, entries of a list, or bits of a number."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, Sized) else 1


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's text for training.

    The text is rendered unchanged in a scope of its own, as by transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object):
        # No parameter is named self, which may be a variable of the template.
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace has no variable {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, unlike the training text of models.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_HELPERS: dict[str, object] = {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    "namespace": _Namespace,
}
"""Functions that transformers defines for every template."""
