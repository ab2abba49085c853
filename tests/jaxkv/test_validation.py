"""Validation of fields of configs: accepted values, and errors."""

import dataclasses
import math
import re
from typing import Annotated

import numpy as np
import pytest
from jaxtyping import Float

from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.validation import (
    Ascending,
    AscendingInts,
    Choices,
    ConfigRecord,
    Entries,
    NonNegativeInt,
    PositiveInt,
    Range,
    Share,
    token_sequence,
)


class Limits(ConfigRecord):
    """A config with a bound of each kind."""

    count: PositiveInt = 3
    share: Share = 0.5
    rate: Annotated[float, Range(0, ends="()")] = 1.0
    inner: Annotated[float, Range(0, 1, "(]")] = 1.0
    limit: Annotated[int | None, Range(2)] = None
    sizes: AscendingInts = (1, 2, 4)
    pair: Annotated[tuple[int, int], Ascending(1, strictly=False)] = (2, 2)
    weights: Annotated[tuple[float, ...], Range(0), Entries(2)] = (0.0, 1.0)
    levels: Annotated[tuple[float, ...], Ascending(minimum=3)] = (-1.0, 0.0, 1.0)
    names: Annotated[tuple[str, ...], Choices({"a": 1, "b": 2}, minimum=1)] = ("a",)
    text: str = ""


class Narrower(Limits):
    """A config with a further field and a relation."""

    top: NonNegativeInt = 0
    count: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(0, self.count).check("top", self.top)


def test_valid_fields_are_accepted() -> None:
    config = Narrower(limit=2, sizes=(3,), weights=(0, math.inf), top=3)
    assert config == dataclasses.replace(config)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top = 2  # ty: ignore[invalid-assignment]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("count", 0, "count=0 must be at least 1"),
        ("count", math.nan, "count=nan must be at least 1"),
        ("share", 1.5, "share=1.5 must be in [0, 1]"),
        ("share", math.nan, "share=nan must be in [0, 1]"),
        ("rate", 0, "rate=0 must be above 0 and finite"),
        ("rate", math.inf, "rate=inf must be above 0 and finite"),
        ("inner", 0.0, "inner=0.0 must be in (0, 1]"),
        ("limit", 1, "limit=1 must be at least 2"),
        ("sizes", (1, 4, 2), "sizes=(1, 4, 2) must be ascending, from 1"),
        ("sizes", (2, 2), "sizes=(2, 2) must be ascending, from 1"),
        ("sizes", (), "sizes=() must be ascending, from 1"),
        ("sizes", (0, 1), "sizes=(0, 1) must be ascending, from 1"),
        ("pair", (3, 2), "pair=(3, 2) must be in order, from 1"),
        ("weights", (1.0,), "weights=(1.0,) must be 2 or more"),
        ("weights", (1.0, -1.0), "weights=(1.0, -1.0) must be at least 0"),
        ("levels", (1.0,), "levels=(1.0,) must be 3 or more, ascending"),
        ("names", (), "names=() must be 1 or more of ['a', 'b']"),
        ("names", ("c",), "names=('c',) must be 1 or more of ['a', 'b']"),
        ("top", 4, "top=4 must be in [0, 3]"),
        ("top", -1, "top=-1 must be at least 0"),
    ],
)
def test_invalid_field_is_named(name: str, value: object, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        dataclasses.replace(Narrower(), **{name: value})


def test_a_former_spelling_is_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="num_lengths is now called"):
        old = EngineConfig(max_drafts=4, num_lengths=2)  # ty: ignore[unknown-argument]
    assert old == EngineConfig(max_drafts=4, num_draft_buckets=2)
    with pytest.raises(ValueError, match="num_lengths"):
        EngineConfig(num_lengths=2, num_draft_buckets=2)  # ty: ignore[unknown-argument]


def test_token_ids_are_integers() -> None:
    for ids in (np.array([1, 2], np.uint8), [1, 2], (1, np.int64(2))):
        assert token_sequence("ids", ids).tolist() == [1, 2]
    for wrong in (np.array([1.0]), np.array([[1]]), [1.0], [True], "1", 1):
        with pytest.raises(ValueError, match="must be a sequence of token ids"):
            token_sequence("ids", wrong)


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
