"""Validation of fields of configs: accepted values, and errors."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from jaxtyping import Float

from jaxkv import validation
from jaxkv.engine import EngineConfig

CONFIG = SimpleNamespace(
    count=3,
    none=0,
    share=0.5,
    whole=1.0,
    nan=math.nan,
    inf=math.inf,
    sizes=(1, 2, 4),
    equal=(2, 2),
    falling=(3, 2),
    empty=(),
    inner=SimpleNamespace(top=0),
)


def test_valid_fields_are_accepted():
    validation.at_least(CONFIG, "count", "sizes", "empty")
    validation.at_least(CONFIG, "none", "inner.top", low=0)
    validation.above(CONFIG, "share", "sizes", "inf")
    validation.within(CONFIG, "share", "none", "whole", low=0, high=1)
    validation.within(CONFIG, "share", low=0, high=1, ends="()")
    validation.ascending(CONFIG, "sizes", low=1, minimum=3)
    validation.ascending(CONFIG, "equal", low=1, strictly=False)


@pytest.mark.parametrize(
    ("check", "name", "how", "line"),
    [
        ("at_least", "none", {}, "none=0 must be at least 1"),
        ("at_least", "nan", {}, "nan=nan must be at least 1"),
        ("at_least", "inner.top", {"low": 0.5}, "inner.top=0 must be at least 0.5"),
        ("at_least", "sizes", {"low": 2}, "sizes=(1, 2, 4) must be at least 2"),
        ("above", "none", {}, "none=0 must be above 0"),
        ("above", "nan", {}, "nan=nan must be above 0"),
        ("above", "inf", {"finite": True}, "inf=inf must be above 0 and finite"),
        ("within", "count", {"low": 0, "high": 1}, "count=3 must be in [0, 1]"),
        (
            "within",
            "whole",
            {"low": 0, "high": 1, "ends": "()"},
            "whole=1.0 must be in (0, 1)",
        ),
        (
            "within",
            "none",
            {"low": 0, "high": 1, "ends": "(]"},
            "none=0 must be in (0, 1]",
        ),
        ("within", "nan", {"low": 0, "high": 1}, "nan=nan must be in [0, 1]"),
        ("ascending", "falling", {}, "falling=(3, 2) must be ascending"),
        ("ascending", "equal", {"low": 1}, "equal=(2, 2) must be ascending, from 1"),
        (
            "ascending",
            "falling",
            {"low": 1, "strictly": False},
            "falling=(3, 2) must be in order, from 1",
        ),
        ("ascending", "empty", {}, "empty=() must be ascending"),
        ("ascending", "sizes", {"minimum": 4}, "sizes=(1, 2, 4) must be 4 or more, "),
        ("ascending", "sizes", {"low": 2}, "must be ascending, from 2"),
    ],
)
def test_invalid_field_is_named(check, name, how, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        getattr(validation, check)(CONFIG, name, **how)


def test_a_former_spelling_is_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="num_lengths is now called"):
        old = EngineConfig(max_drafts=4, num_lengths=2)  # ty: ignore[unknown-argument]
    assert old == EngineConfig(max_drafts=4, num_draft_buckets=2)
    with pytest.raises(ValueError, match="num_lengths"):
        EngineConfig(num_lengths=2, num_draft_buckets=2)  # ty: ignore[unknown-argument]


def test_token_ids_end_below_the_vocabulary() -> None:
    assert validation.token_ids("prompt", [0, 6], vocab_size=7).tolist() == [0, 6]
    for token in (-1, 7):
        line = f"prompt: token id {token} must be in [0, 7)"
        with pytest.raises(ValueError, match=re.escape(line)):
            validation.token_ids("prompt", [0, token], vocab_size=7)


def test_each_entry_of_an_array_is_checked() -> None:
    @validation.checks_numbers(share="[0, 1]")
    def keep(share: float | Float[np.ndarray, " n"]) -> None:
        pass

    keep(np.array([0.0, 1.0]))
    for wrong in ([0.5, 1.5], [-0.5, 0.5], [0.5, math.nan]):
        with pytest.raises(ValueError, match="share="):
            keep(np.array(wrong))
