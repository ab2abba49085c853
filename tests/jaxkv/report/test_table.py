"""Columns are declared once: arrays, JSON and tables follow."""

import math

import numpy as np
import pytest
from jaxtyping import Float

from jaxkv import report
from jaxkv.report import run_folder, to_rows, units
from jaxkv.report.parts import Sheet
from jaxkv.report.tables import (
    Bools,
    Floats,
    Ints,
    ResultRecord,
    ResultTable,
    Texts,
    column,
    computed_column,
)


class Loads(ResultTable):
    """Synthetic request rates."""

    data: Texts = column("whose lengths")
    rate: Floats = column("arrivals", heading="requests/s", form="{:.2f}")
    finish_s: Float[np.ndarray, "rows repeats"] = column("to the end", of=np.median)
    num: Ints = column("requests", key="requests")
    ended: Bools = column("whether all did", is_reported=False)

    @property
    @computed_column(heading="over the first")
    def ratio(self) -> np.ndarray:
        """Rates relative to the first one."""
        return self.rate / self.rate[:1].sum()


class Tail(ResultRecord):
    """A nested record of a result."""

    p95_s: float = column("the tail")


class Result(ResultRecord):
    """A synthetic result."""

    slope: float = column("of something")
    curve: np.ndarray = column("drawn, not reported")
    secret: str = column("saved, not reported", is_reported=False)
    loads: Loads = column("all of them", heading="all loads")
    tail: Tail = column("of the latencies")


@pytest.fixture
def loads() -> Loads:
    rows = [("a", 2, [0.1, 0.2, 0.9], 3, True), ("b", 5.0, [1, 2, 3], 4, False)]
    return Loads.of(rows)


def test_rows_and_tables_follow_from_the_columns(loads: Loads) -> None:
    assert loads.rows() == [
        {"data": "a", "rate": 2.0, "finish_s": 0.2, "requests": 3, "ratio": 1.0},
        {"data": "b", "rate": 5.0, "finish_s": 2.0, "requests": 4, "ratio": 2.5},
    ]
    sheet = loads.sheet("made up", "data", "rate", "finish_s", "ratio", note="So.")
    assert sheet.columns == ["data", "requests/s", "finish", "over the first"]
    assert sheet.rows[0] == ("a", "2.00", "200 ms", "1")
    assert (sheet.title, sheet.note) == ("made up", "So.")
    assert loads.rows("ended") == [{"ended": True}, {"ended": False}]


def test_rows_are_selected_concatenated_and_named(loads: Loads) -> None:
    assert loads.where(data="b", ended=False).num.tolist() == [4]
    assert len(loads.where(data="b", num=3)) == 0
    both = Loads.joined([loads, Loads.of([]), loads.at([1, 0])])
    assert both.data.tolist() == ["a", "b", "b", "a"]
    assert both.distinct("num") == [3, 4]
    row = {"data": "c", "rate": 1, "finish_s": [1.0], "num": 2, "ended": True}
    assert Loads.of([row]).data.tolist() == ["c"]


def test_columns_have_their_type_even_without_rows() -> None:
    none = Loads.joined([])
    kinds = [x.dtype.kind for x in (none.data, none.rate, none.num, none.ended)]
    assert kinds == ["U", "f", "i", "b"]
    with pytest.raises(ValueError, match="column num must hold ints, not float64"):
        Loads.of([("a", 1, [1.0], 1.5, True)])
    with pytest.raises(ValueError, match="columns of Loads differ"):
        Loads(*map(np.array, (["a"], [1.0, 2.0], [[1.0]], [1], [True])))
    with pytest.raises(ValueError, match="a row of Loads must have data, rate"):
        Loads.of([("a", 1)])


def test_a_result_is_saved_and_reported(loads: Loads, tmp_path) -> None:
    result = Result(math.nan, np.arange(3), "x", loads, Tail(0.5))
    arrays = run_folder._flatten(result)
    assert arrays["loads.finish_s"].shape == (2, 3)
    np.savez(tmp_path / "result.npz", **arrays)
    again = run_folder._load_arrays(tmp_path / "result.npz", Result)
    assert (again.tail.p95_s, again.secret) == (0.5, "x")
    assert again.loads.rows() == loads.rows()
    output = report.metrics(again)
    assert [*output] == ["slope", "loads", "tail"]
    assert output["tail"] == {"p95_s": 0.5}
    assert report.sheets(again) == [
        Sheet("", ("metric", "value"), [("slope", "-")]),
        loads.sheet("all loads"),
        Sheet("", ("metric", "value"), [("p95", "500 ms")]),
    ]


def test_columns_by_name_become_rows() -> None:
    columns = {"tokens": np.array([1, 2]), "is_same": np.array([True, False])}
    rows = to_rows(columns)
    assert rows == [{"tokens": 1, "is_same": True}, {"tokens": 2, "is_same": False}]
    assert type(rows[0]["tokens"]) is int
    assert to_rows({"tokens": np.zeros(0)}) == []


class Bare(ResultRecord):
    """A record with the array names of older run folders."""

    tail: Tail = column("without its name", prefix="")
    best: Tail = column("with another", prefix="best_")


def test_nested_arrays_can_keep_names_of_older_folders(tmp_path) -> None:
    arrays = run_folder._flatten(Bare(Tail(0.5), Tail(0.25)))
    assert [*arrays] == ["p95_s", "best_p95_s"]
    np.savez(tmp_path / "result.npz", **arrays)
    again = run_folder._load_arrays(tmp_path / "result.npz", Bare)
    assert (again.tail.p95_s, again.best.p95_s) == (0.5, 0.25)


def test_a_rate_has_three_digits() -> None:
    texts = [units.format_rate(x) for x in (1.234, 12.34, 99.94, 123.4, 12_345.6)]
    assert texts == ["1.23", "12.3", "99.9", "123", "12,346"]
