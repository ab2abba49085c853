"""Chat templates: a conversation to the text a model was trained on.

A template is a program that comes with the model, in Jinja. It runs in Jinja's sandbox,
sees plain values only, and may fail in any way: what it raises becomes one line.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


def render(
    template: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **special_tokens: str,
) -> str:
    """Renders a conversation as Hugging Face's tokenizers do.

    Args:
      template: its text, or a list of named ones of which "default" counts.
      messages: in order, each with at least "role" and "content".
      add_generation_prompt: whether to open the assistant's next turn.
      **special_tokens: texts by role, such as `bos_token`.

    Raises:
      ValueError: if there is no template, if a message lacks role or content, or if the
        template refuses the messages or is itself broken.
    """
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}
        template = template.get("default")
    if not isinstance(template, str):
        raise ValueError("this model has no chat template: give it plain text")
    for number, message in enumerate(messages):
        if not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number} must have a role and a content")
    try:
        # Through JSON, so that the template can reach no object of ours.
        plain = json.loads(json.dumps([dict(message) for message in messages]))
        return (
            _environment()
            .from_string(
                template,
                globals=dict(
                    raise_exception=_raise_exception, strftime_now=_strftime_now
                ),
            )
            .render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        )
    except Exception as error:  # whatever a stranger's program raises
        line = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template failed: {line}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The sandbox, with the syntax that templates may count on."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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
