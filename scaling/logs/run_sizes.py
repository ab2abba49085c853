"""Parameters and tokens of a run, from `7B:4T` or from its name."""

import re
from typing import NamedTuple

from jaxkv import validation
from scaling.logs import rules

TOKENS_PER_PARAM = 20.0
"""Tokens per parameter of a run named `1xC`, as in OLMo's ladder, arXiv:2412.04403."""
_NAME = re.compile(
    r"(?P<size>\d+(?:\.\d+)?[KMBT])-"
    r"(?:(?P<multiple>\d+(?:\.\d+)?)xC|(?P<tokens>\d+(?:\.\d+)?[KMBT]))(?![\w.])",
    re.IGNORECASE,
)


class RunSize(NamedTuple):
    """Size of a run.

    Attributes:
      num_params: parameters.
      num_tokens: training tokens.
    """

    num_params: float
    num_tokens: float

    @property
    def label(self) -> str:
        """Parameters and tokens as `7B:4T`."""
        return ":".join(_shorten(value) for value in self)


class RunName(NamedTuple):
    """Sizes in a run's name.

    Attributes:
      size: text of the model size, such as `190M`.
      run_size: parameters and tokens, rounded as the name has them.
      multiple: tokens divided by 20 times the parameters; None if the name has tokens.
    """

    size: str
    run_size: RunSize
    multiple: float | None


def parse_run_size(text: str) -> RunSize:
    """Parses parameters and tokens, such as `7B:4T` or `6.9e9:3.9e12`.

    Raises:
      ValueError: the text has another form, or a number is not positive and finite.
    """
    parts = validation.instance("text", text, str).split(":")
    values = [rules.parse_number(part.strip(), 1.0) for part in parts]
    if len(values) == 2 and all(x is not None and 0 < x < 1e100 for x in values):
        return RunSize(*(float(x) for x in values if x is not None))
    raise ValueError(f"{text!r} must be PARAMETERS:TOKENS, such as 7B:4T")


def parse_run_name(name: str) -> RunName | None:
    """Reads sizes in a name such as `190M-0.5xC` or `7B-4T`; None without them."""
    match = _NAME.match(validation.instance("name", name, str))
    if match is None:
        return None
    num_params = rules.parse_number(match["size"].upper(), 1.0)
    tokens = rules.parse_number((match["tokens"] or "0").upper(), 1.0)
    if not num_params or tokens is None:
        return None
    multiple = float(match["multiple"]) if match["multiple"] else None
    if multiple is not None:
        tokens = TOKENS_PER_PARAM * multiple * num_params
    if tokens <= 0:
        return None
    return RunName(match["size"].upper(), RunSize(num_params, tokens), multiple)


def _shorten(value: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"
