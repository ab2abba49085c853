"""Chat templates: a conversation to the text a model was trained on.

A template is a program that comes with the model, in Jinja. It runs in Jinja's sandbox,
sees plain values only, and may fail in any way: what it raises becomes one line. It may
not run for long either: its steps are counted, and sums and products are bounded.
"""

import contextlib
import datetime
import json
import sys
from collections.abc import Generator, Mapping, Sequence
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_STEPS = 5_000_000
"""Lines of Python that a template may run: some seconds of work, and a hundred times
what a conversation of a thousand messages takes."""
MAX_SIZE = 10_000_000
"""Characters, entries or bits that a sum, product or power in a template may have."""


def render(
    template: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **special_tokens: str,
) -> str:
    """Renders a conversation as Hugging Face's tokenizers do.

    Args:
      template: its text, or a list of named ones of which "default" counts.
      messages: in order, each with at least "role" and "content".
      add_generation_prompt: whether to open the assistant's next turn.
      tools: JSON descriptions of functions, as the template expects them.
      **special_tokens: texts by role, such as `bos_token`.

    Raises:
      ValueError: if there is no template, or something else in its place, if a message
        lacks role or content, or if the template refuses the messages, is itself
        broken, or runs for longer than `MAX_STEPS`.
    """
    text = _text_of(template)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError("messages must be a list, each with a role and a content")
    for number, message in enumerate(messages):
        named = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not named:
            raise ValueError(f"message {number} must have a role and a content")
    helpers = dict(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        # Through JSON, so that the template can reach no object of ours.
        plain = json.loads(json.dumps([dict(message) for message in messages]))
        described = None if tools is None else [dict(tool) for tool in tools]
        program = _environment().from_string(text, globals=helpers)
        with _counted_steps():
            return program.render(
                messages=plain,
                tools=json.loads(json.dumps(described)),
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
    except Exception as error:  # whatever a stranger's program raises
        line = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template failed: {line}") from None


def _text_of(template: Any) -> str:
    """The text of a template, or of the one of several that is named "default".

    Raises:
      ValueError: there is none.
    """
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        found = [x.get("template") for x in named if x.get("name") == "default"]
        template = found[-1] if found else None
    if template is None:
        raise ValueError("this model has no chat template: give it plain text")
    if not isinstance(template, str):
        raise ValueError(
            f"the chat template is no text but of type {type(template).__name__}"
        )
    return template


@contextlib.contextmanager
def _counted_steps() -> Generator[None]:
    """Ends what runs inside after `MAX_STEPS` lines of Python, in this thread alone.

    Jinja compiles a template to Python, so that loops, macros and filters are all made
    of lines; whoever traces them already, a debugger for one, does so again behind.
    """
    num_left, before = MAX_STEPS, sys.gettrace()

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise jinja2.TemplateRuntimeError(f"it takes more than {MAX_STEPS:,} steps")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where sums, products and powers stay small, too.

    A filter may still make a long text, such as `center` of a great width.
    """

    intercepted_binops = frozenset(["+", "*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuses what would make more than `MAX_SIZE`, before it is made."""
        sizes = _size(left), _size(right)
        size = sum(sizes)
        if operator in ("*", "**"):
            # Text times a number, or a number of so many bits to a power.
            times = [x for x in (left, right) if isinstance(x, int)][-1:]
            size = max(size, max(sizes) * abs(times[0])) if times else size
        if size > MAX_SIZE:
            raise jinja2.TemplateRuntimeError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """Characters of a text, entries of a list, bits of a number."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if hasattr(value, "__len__") else 1


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The sandbox, with the syntax that templates may count on."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **kwargs: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)
