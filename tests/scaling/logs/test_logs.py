"""Logs: columns found and converted, every row accounted for, invalid input named."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv.files import decompression
from scaling.logs import files, find_doubts, rules
from scaling.logs.log import LogColumns, read_log
from tests.support import traces
from tests.support.refusals import refused

RUNS = [
    {
        "run_id": f"r{i}",
        "status": "completed",
        "num_params": 1000.0 * (i + 1),
        "num_params_non_embedding": 900.0 * (i + 1),
        "num_tokens": 20_000 * (i + 1),
        "flops": 1.3e8 * (i + 1) ** 2,
        "loss": 4.0 - 0.1 * i,
        "recipe": {"rate": 0.01, "betas": [0.9, 0.95]},
    }
    for i in range(4)
]


def write(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def write_lines(folder: Path, rows: list[Any], name: str = "runs.jsonl") -> Path:
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows), name)


def test_a_mapped_csv_becomes_si_columns(tmp_path: Path) -> None:
    text = "size,seen,val\n1.5,20,3.5\n\n3,40,3.25\n"
    columns = LogColumns(n="size", d="seen", n_unit=1e6, d_unit=1e9, loss="val")
    log = read_log(write(tmp_path, text), columns)
    np.testing.assert_array_equal(log.columns["num_params"], [1.5e6, 3e6])
    np.testing.assert_array_equal(log.columns["num_tokens"], [20e9, 40e9])
    np.testing.assert_array_equal(log.columns["flops"], [6 * 1.5e6 * 20e9, 7.2e17])
    np.testing.assert_array_equal(log.columns["loss"], [3.5, 3.25])
    assert log.notes == ("N is taken to count total parameters (--count)", "C = 6 N D")
    assert [row.line for row in log.raw] == [2, 4]


def test_a_foreign_file_is_read_by_its_names(tmp_path: Path) -> None:
    text = "N;C;c4_loss;run\n70M;2.52e18;3.5;a\n0.125B;4.5e18;3.4;b\n"
    log = read_log(write(tmp_path, text), LogColumns(count="non-embedding"))
    np.testing.assert_allclose(log.columns["num_params"], [70e6, 125e6], rtol=1e-15)
    np.testing.assert_allclose(log.columns["num_tokens"], [6e9, 6e9], rtol=1e-12)
    assert log.count == "non-embedding"
    assert log.runs == ("a", "b")
    assert log.notes == (
        "by their names, L is c4_loss",
        "N is taken to count non-embedding parameters (--count)",
        "D = C / 6N",
    )


def test_a_sweep_needs_no_flags(tmp_path: Path) -> None:
    diverged = {"run_id": "r8", "status": "diverged", "loss": None}
    twice = {"run_id": "r9", "status": "diverged", "loss": float("nan")}
    write_lines(tmp_path, [*RUNS, diverged, twice])
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"run_id": "r1')  # killed while writing
    points = [
        {"run_id": run, "step": s, "num_tokens": s * 10, "flops": s * 1e6, "loss": 5.0}
        for run in ("r0", "r2", "r8")
        for s in (1, 2)
    ]
    lossless = points[0] | {"loss": None}
    write_lines(tmp_path, [*points, lossless], "curves.jsonl")
    log = read_log(tmp_path)
    np.testing.assert_array_equal(log.columns["num_params"], [1e3, 2e3, 3e3, 4e3])
    assert log.notes == (
        "the last line (7) is incomplete and is left out",
        "2 rows left out by status: 2 diverged",
        "C is 1.08 to 1.08 times 6 N D",
    )
    assert log.curves is not None
    assert log.curves.runs == ("r0", "r0", "r2", "r2")
    np.testing.assert_array_equal(
        log.curves.columns["num_params"], [1e3, 1e3, 3e3, 3e3]
    )

    other = read_log(tmp_path, LogColumns(count="non-embedding"), needs=["recipe.rate"])
    np.testing.assert_array_equal(other.columns["num_params"], [900, 1800, 2700, 3600])
    np.testing.assert_array_equal(other.columns["recipe.rate"], 0.01)


def test_rules_select_and_ignore(tmp_path: Path) -> None:
    path = write_lines(tmp_path, [*RUNS, {"loss": "?", "status": "completed"}])
    rule = "loss == '?' or (`recipe.rate` < .02 and not num_params > 1e3)"
    log = read_log(path, ignore=rule)
    assert log.notes[0] == f"2 rows left out by {rule!r}"
    assert log.runs == ("r1", "r2", "r3")
    for rule, selected in (
        ("row == 3", [False, True, False]),
        ("run_id != 'r1' and flops>1.2e9", [False, False, True]),
        ("num_params<=2000 or num_params >= +4e3", [True, False, True]),
        ("not (row < 3 or row == 4)", [False, True, False]),
        ("recipe.rate == 0.01", [True, True, True]),
        ("N <= 2K or N >= .004M", [True, False, True]),
        ("C > 1.2G and L > 0", [False, False, True]),
    ):
        np.testing.assert_array_equal(log.select(rule), selected)
    assert log.take(log.select("row == 3")).runs == ("r2",)


def test_json_and_gzip_are_read_like_csv(tmp_path: Path) -> None:
    text = "N,D,loss\n1.5e6,2e9,3.5\n3e6,4e9,3.25\n"
    rows = [{"N": 1.5e6, "D": 2e9, "loss": 3.5}, {"N": 3e6, "D": 4e9, "loss": 3.25}]
    expected = read_log(write(tmp_path, text))
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    write(tmp_path, json.dumps(rows), "line.json")
    write(tmp_path, "\n" + json.dumps(rows, indent=2), "pretty.json")
    for name in ("packed", "line.json", "pretty.json"):
        log = read_log(tmp_path / name)
        assert log.columns.keys() == expected.columns.keys()
        for column, values in expected.columns.items():
            np.testing.assert_array_equal(log.columns[column], values)
        assert log.notes == expected.notes
    assert log.raw[1].place == "row 2"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'{\n"N": [1, 2]\n}', "is one JSON object; a list of them is read, or one a"),
        (b'{"N": [1, 2]}', "its rows hold neither numbers nor text"),
        (b"[1, 2]", "row 1 is int, not an object"),
        (b"[]", "holds no runs"),
        (b'[{"N": 1},]', "not JSON: "),
        (b"[" * 100_000, "nested too deeply"),
        (
            gzip.compress(b"N,D" * 99, mtime=0)[:-9],
            "cannot be read: Compressed file en",
        ),
        (gzip.compress(b"PK\x03\x04", mtime=0), "cannot be read: it is a zip archive"),
        (b"PAR1\x15\x04", "cannot be read: it is Parquet, "),
        ("N,D".encode("utf-16"), "it is text in UTF-16, not UTF-8"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, data: bytes, line: str) -> None:
    (tmp_path / "log").write_bytes(data)
    with refused(line):
        read_log(tmp_path / "log")


def test_only_files_of_a_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match="it is a device, not a file"):
            read_log(Path(name))
    os.mkfifo(tmp_path / "pipe")  # without a writer
    monkeypatch.setattr(decompression, "_WRITER_WAIT_S", 0.01)
    with pytest.raises(ValueError, match="pipe: holds no runs"):
        read_log(tmp_path / "pipe")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2**20)
    for data in (b" " * (2**20 + 1), gzip.compress(b" " * (2**20 + 1))):
        (tmp_path / "large").write_bytes(data)
        with pytest.raises(ValueError, match="more than 1 MiB; leave columns or rows"):
            read_log(tmp_path / "large")


def test_a_law_of_one_input_needs_one_column(tmp_path: Path) -> None:
    path = write(tmp_path, "params,loss\n1e6,3\n2e6,2.9\n")
    log = read_log(path, needs=("num_params", "loss"))
    assert log.columns.keys() == {"num_params", "loss"}
    assert log.roles == {"num_params": "params", "loss": "loss"}
    with pytest.raises(
        ValueError, match=r"the law reads C \(--c COLUMN\), and there is"
    ):
        read_log(path, needs=("flops", "loss"))
    with pytest.raises(
        ValueError, match=r"two of N, D and C are needed, and there is N"
    ):
        read_log(path)
    both = write(tmp_path, "D,C,loss\n1e9,6e15,3\n", "both.csv")
    assert read_log(both, needs=("num_params", "loss")).columns["num_params"] == 1e6
    # A law of the learning rate reads no loss.
    rates = write(tmp_path, "N,D,lr\n1e6,1e9,1e-3\n", "rates.csv")
    columns = LogColumns(others={"learning_rate": "lr"})
    needs = ("num_params", "num_tokens", "learning_rate")
    assert "loss" not in read_log(rates, columns, needs=needs).columns


def test_the_last_and_the_best_rows_are_picked(tmp_path: Path) -> None:
    text = """run,N,D,lr,loss
a,1M,1e9,1e-3,3.9
a,1M,2e9,1e-3,3.5
b,1M,1e9,1e-2,3.8
b,1e6,2e9,1e-2,3.4
c,1M,2e9,1e-1,nan
d,2M,2e9,1e-3,3.2
"""
    path = write(tmp_path, text)
    log = read_log(path, last_of=["run"], best_of=["N", "D"])
    assert [row.number for row in log.raw] == [4, 6]
    assert log.notes[:2] == (
        "2 rows left out: not the last by D of rows with one run",
        "2 rows left out: not the lowest loss of rows with one N and D",
    )
    assert [row.number for row in read_log(path, best_of=["num_params"]).raw] == [4, 6]
    with pytest.raises(ValueError, match=r"row 5 \(line 6\): loss is nan"):
        read_log(path, last_of=["run"])
    with pytest.raises(ValueError, match="--best-of x: no such column; there is run"):
        read_log(path, best_of=["x"])
    # The later of equals; steps determine the last row, from 0.
    steps = write(tmp_path, "run,N,step,loss\na,1e6,0,3\na,1e6,0,2\n", "steps.csv")
    picked = read_log(steps, needs=["num_params", "loss"], last_of=["run"])
    assert [row.number for row in picked.raw] == [2]
    bare = write(tmp_path, "run,N,loss\na,1e6,3\n", "bare.csv")
    with pytest.raises(ValueError, match="--last-of run: which row is last"):
        read_log(bare, needs=["num_params", "loss"], last_of=["run"])


def test_losses_in_bits_are_scaled(tmp_path: Path) -> None:
    path = write(tmp_path, "N,D,bpt\n1e6,1e9,3\n")
    log = read_log(path, LogColumns(loss="bpt", loss_unit=np.log(2)))
    np.testing.assert_allclose(log.columns["loss"], 3 * np.log(2))
    assert "the loss is bpt times 0.693147" in log.notes
    with pytest.raises(ValueError, match=r"loss_unit=0\.0 must be above 0"):
        LogColumns(loss_unit=0.0)


UNNAMED: dict[str, tuple[str, ...]] = {
    "N,D,loss\n1e6,1e9,3\n2e6,1e9,2\n": (),
    "N,D,loss,experiment\n1e6,1e9,3,a\n2e6,1e9,2,a\n1e6,2e9,3,b\n2e6,2e9,2,b\n": (
        "experiment is not used, and groups the runs (a, b): --by experiment ",
        """--where 'experiment == "a"' one of them""",
    ),
    "N,D,loss,is outlier\n1e6,1e9,3,True\n2e6,1e9,2,False\n": (
        "marks 1 run, which is fitted",
        "--ignore '`is outlier` == \"True\"' leaves",
    ),
    "N,D,loss,unique_tokens\n1e6,4e9,3,1e9\n2e6,1e9,2,1e9\n": (
        "tokens up to 4 times: --law data-constrained --columns num_unique_",
    ),
    "N,D,loss,lr\n1e6,1e9,3,0.1\n1e6,1e9,3,0.2\n": (
        "lr is not used, and differs in runs of one N and D: --best-of N,D reads",
    ),
    "N,D,loss,run\n1e6,1e9,3,a\n1e6,2e9,2,a\n": (
        "runs have several rows, and each is fitted: --last-of run reads the",
    ),
    "N,D,L\n1e6,1e9,19\n": ("L is up to 19: nats per token? Of a perplexity",),
    "N,D,loss\n70.5,1e9,3\n": ("N (N) is 70.5 to 70.5: parameters? --n-unit 1",),
    "N,D,loss\n1e7,3,3\n": ("D (D) is 3 to 3: tokens? --d-unit 1e+09 if",),
    "N,C,loss\n1e7,300,3\n": ("C (C) is 300 to 300: FLOPs? --c-unit 1e+18 if",),
    "N,D,C,loss\n1e7,1e9,6e20,3\n": ("C is 1e+04 times 6 N D: is one of them",),
}
"""Logs without flags, and their warnings."""


@pytest.mark.parametrize(
    ("text", "lines", "flags"),
    [
        *((text, lines, {}) for text, lines in UNNAMED.items()),
        ("N,D,bpb\n1e6,1e9,1\n", ("like bits", "--loss-unit 0.69"), {"loss": "bpb"}),
        ("s_m,D,loss\n7e4,1e9,3\n", ("--n-unit 1e+06 if a 1",), {"n": "s_m"}),
        ("s_m,D,loss\n70,1e9,3\n", (), {"n": "s_m", "n_unit": 1e6}),
    ],
)
def test_unused_columns_are_reported(
    tmp_path: Path, text: str, lines: tuple[str, ...], flags: dict[str, Any]
) -> None:
    columns = LogColumns(**flags)
    log = read_log(write(tmp_path, text), columns)
    doubts = find_doubts(log, columns)
    assert len(doubts) == bool(lines)
    for line in lines:
        assert line in doubts[0]
    if log.names[-1] not in log.roles.values():  # a rule uses the column
        assert not find_doubts(log, columns, [f"`{log.names[-1]}` == 1"])


def test_published_runs_and_our_sweeps_are_not_doubted(tmp_path: Path) -> None:
    path = traces.find("losses/gadre_c4.csv")
    assert not find_doubts(read_log(path), LogColumns())
    write_lines(tmp_path, RUNS)
    assert not find_doubts(read_log(tmp_path), LogColumns())


@pytest.mark.parametrize(
    ("text", "flags", "line"),
    [
        ("", {}, "log.csv: holds no runs"),
        ("N,D,loss\n", {}, "log.csv: holds no runs"),
        ("N,D,loss\n1,2\n", {}, "row 1 (line 2) has 2 cells, the header has 3"),
        ("N,N,loss\n1,2,3\n", {}, "two columns are named 'N'"),
        ("N,D,loss\n1,2,3\n1,x,3\n", {}, "row 2 (line 3): D is 'x', not a number"),
        ("N,D,loss\n1,,3\n", {}, "row 1 (line 2): D is missing; --ignore 'row == 1'"),
        ("N,D,loss\n-1,2,3\n", {}, "N is -1, must be above 0 and finite"),
        ("N,D,loss\n1,2,nan\n", {}, "loss is nan, must be above 0 and finite"),
        ("N,D,loss\n1,2,3M\n", {}, "loss is '3M', not a number"),
        ("N,D,loss\n1M,2,3\n", {"n": "N", "n_unit": 1e6}, "N is '1M', not a number"),
        ("N,D,loss\n1,2_0,3\n", {}, "D is '2_0', not a number"),
        ("N,D,loss\n1,2,3\n1,2,3\n", {}, "rows 1 and 2 are the same run"),
        ("N,x,loss\n1,2,3\n", {}, "two of N, D and C are needed, and there is N (N)"),
        ("N,D,x\n1,2,3\n", {}, "which column is the loss?"),
        ("N,D,a_loss,b_loss\n1,2,3,4\n", {}, "one of N, D, a_loss, b_loss"),
        ("N,D,loss\n1,2,3\n", {"c": "F"}, "--c F: no such column; there is N, D, loss"),
        ("N,D,loss\n1,2,3\n", {"c_unit": 1e18}, "--c-unit 1e+18, but no --c"),
        ("N,D,loss,status\n1,2,3,failed\n", {}, "no run is left: 1 row left out by st"),
        ('N,D,loss\n1,2,"3\n', {}, "line 2: unexpected end of data"),
        ('{"N": 1\n{"N": 2}\n', {}, "line 1: not JSON"),
        ('{"N": 1}\n[1]\n', {}, "line 2: holds list, not an object"),
        ('{"N": 1' + 400 * "0" + ', "D": 1, "loss": 2}', {}, "must be above 0 and fin"),
        (9000 * '{"a": ' + "1" + 9000 * "}" + "\n", {}, "nested too deeply"),
        ('{"N": 1, "D": true, "loss": 2}', {}, "D is True, not a number"),
    ],
)
def test_bad_logs_are_named_in_a_line(
    tmp_path: Path, text: str, flags: dict[str, Any], line: str
) -> None:
    with refused(line):
        read_log(write(tmp_path, text), LogColumns(**flags))


def test_a_sweep_with_a_run_twice_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path, [*RUNS, RUNS[1] | {"loss": 3.0}])
    with pytest.raises(ValueError, match="rows 2 and 5 are the same run"):
        read_log(tmp_path)
    (tmp_path / "runs.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds no runs\.jsonl"):
        read_log(tmp_path)


def test_rows_with_equal_numbers_are_reported(tmp_path: Path) -> None:
    text = "N,D,loss,seed\n1,2,3,0\n1,2,3,1\n1,2,4,2\n"
    log = read_log(write(tmp_path, text))
    assert "equal numbers in rows 1 and 2: one run twice?" in log.notes
    for num, rest in ((3, ""), (5, " and 2 more")):
        text = "N,D,loss,seed\n" + "".join(f"1,2,3,{i}\n" for i in range(num + 1))
        log = read_log(write(tmp_path, text))
        rows = "1 and 2; 1 and 3; 1 and 4"
        assert f"equal numbers in rows {rows}{rest}: one run twice?" in log.notes


def test_a_law_may_read_other_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "N,D,loss,unique\n1,2,3,1e9\n")
    with pytest.raises(ValueError, match="--columns num_unique_tokens=COLUMN"):
        read_log(path, needs=["num_unique_tokens"])
    for name, value in (("unique", 1e9), ("unique*1e3", 1e12)):
        columns = LogColumns(others={"num_unique_tokens": name}, d="D", d_unit=1e9)
        log = read_log(path, columns, needs=["num_unique_tokens"])
        np.testing.assert_array_equal(log.columns["num_unique_tokens"], [value])
        is_reported = "num_unique_tokens is unique without a unit" in "".join(log.notes)
        assert is_reported == (value == 1e9)
    columns = LogColumns(others={"num_unique_tokens": "unique*-1"})
    with pytest.raises(ValueError, match="unit must be above 0"):
        read_log(path, columns, needs=["num_unique_tokens"])


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("a <", "needs a column or a value before its end"),
        ("a < 1 b", "needs `and` or `or` before b"),
        ("(a < 1", "needs a ) before its end"),
        ("a", "needs a comparison such as <= before its end"),
        ("a = 1", "cannot read = 1"),
        ("a < 1 and", "needs a column or a value before its end"),
        ("b < 1", "no column 'b'; one of a"),
        ("__import__('os').system('id') == 0", "cannot read .system"),
        ("1e3x < a", "cannot read 1e3x < a"),
        ("(" * 1999, "nested too deeply"),
        ("a" * 2001, "at most 2000"),
    ],
)
def test_bad_rules_are_named(rule: str, line: str) -> None:
    with refused(line):
        rules.parse_rule(rule, ["a"])


def test_cells_without_a_number_have_no_order(tmp_path: Path) -> None:
    test = rules.parse_rule("a < 1", ["a"])
    for cell, message in (("x", "a is 'x', not a number"), (None, "a is missing")):
        with pytest.raises(ValueError, match=message):
            test({"a": cell})
    assert rules.parse_rule("a == 1", ["a"])({"a": True})
    assert rules.parse_rule("a != 1", ["a"])({"a": None})


GRID = [
    (n, d, round(1.69 + 406.4 / n**0.34 + 410.7 / d**0.28, 5))
    for n in (1e7, 3e7, 1e8, 3e8)
    for d in (2e8, 6e8, 2e9, 6e9)
]


def grid(names: str, *more: str, scale: float = 1.0) -> str:
    """A log of 16 runs, with further columns that are equal in all rows."""
    rows = [",".join(map(str, (n / scale, d, x, *more))) for n, d, x in GRID]
    return "\n".join([names, *rows]) + "\n"


@pytest.mark.parametrize(
    "names",
    [
        "model_size,tokens_seen,val/loss",
        "Model Size,Training Tokens,Final Loss",
        "n_params,D,eval/loss",
        "config.n_params,config.train_tokens,summary.loss",
        "modelSize,trainTokens,Val Loss",
        "Parameters,total tokens,Validation Loss",
        "param_count,tokens_total,test_loss",
        "params (total),tokens [count],loss (nats)",
        "num_parameters,tokensSeen,L",
    ],
)
def test_columns_are_found_in_any_spelling(tmp_path: Path, names: str) -> None:
    log = read_log(write(tmp_path, grid(names)))
    assert [log.roles[x] for x in ("num_params", "num_tokens", "loss")] == names.split(
        ","
    )
    assert log.columns["num_params"][0] == 1e7


@pytest.mark.parametrize(
    "name", ["compute_budget", "Training FLOP", "Training compute (FLOP)", "trainFLOPs"]
)
def test_compute_is_found_in_any_spelling(tmp_path: Path, name: str) -> None:
    log = read_log(write(tmp_path, f"N,{name},loss\n1e7,6e16,3\n2e7,6e16,2\n"))
    assert log.columns["num_tokens"][0] == 1e9
    assert f"C is {name}" in log.notes[0]


def test_names_that_could_mean_the_same_are_not_guessed(tmp_path: Path) -> None:
    path = write(tmp_path, "model_size,total_params,D,loss\n1,2,3,4\n2,3,4,5\n")
    with refused("N may be model_size or total_params; two of N, D and C are needed"):
        read_log(path)
    assert read_log(path, LogColumns(n="model_size")).columns["num_params"][0] == 1
    both = write(tmp_path, "N,D,train/loss,val/loss\n1,2,3,4\n2,3,4,5\n")
    assert read_log(both).roles["loss"] == "val/loss"
    unit = write(tmp_path, "Params (M),D,loss\n70.5,1e9,4\n80,2e9,3\n")
    [doubt] = find_doubts(read_log(unit), LogColumns())
    assert "N (Params (M)) is 70.5 to 80: parameters? --n-unit 1e+06" in doubt


def test_repeated_names_matter_where_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "N,x,D,x,loss\n1,2,3,4,5\n2,3,4,5,6\n")
    assert read_log(path).columns.keys() >= {"num_params", "num_tokens", "loss"}
    with refused("two columns are named 'x'"):
        read_log(path, LogColumns(c="x"))


@pytest.mark.parametrize(
    "name", ["State", "status", "STATUS", "run_state", "Run State", "Status "]
)
def test_runs_that_did_not_complete_are_left_out(tmp_path: Path, name: str) -> None:
    states = ["finished", "Finished", "crashed", "RUNNING", "Failed", "killed"]
    rows = [f"{s},{n},{d},{x}" for s, (n, d, x) in zip(states, GRID, strict=False)]
    log = read_log(write(tmp_path, "\n".join([f"{name},N,D,loss", *rows]) + "\n"))
    assert len(log.runs) == 2
    message = (
        f"4 rows left out by {name.strip()}: 1 crashed, 1 running, 1 failed, 1 kill"
    )
    assert any(message in note for note in log.notes)


def test_other_columns_of_states_are_reported(tmp_path: Path) -> None:
    places = write(tmp_path, "State,N,D,loss\nCA,1,2,3\nNY,2,3,4\n")
    assert len(read_log(places).runs) == 2
    text = "N,D,loss,outcome\n1e7,2e9,3,converged\n2e7,3e9,2,Crashed\n"
    [doubt] = find_doubts(read_log(write(tmp_path, text)), LogColumns())
    assert doubt.startswith("outcome is not used, and 1 run is Crashed there: --ignore")
    rule = doubt.partition("--ignore '")[2].partition("'")[0]
    assert len(read_log(tmp_path / "log.csv", ignore=rule).runs) == 1
    text = "N,D,loss,is_finished\n1e7,2e9,3,True\n2e7,3e9,2,False\n"
    [doubt] = find_doubts(read_log(write(tmp_path, text)), LogColumns())
    assert "--ignore 'is_finished == \"False\"'" in doubt


def test_bad_rows_are_counted_in_a_line_with_one_rule(tmp_path: Path) -> None:
    rows = "1e7,2e8,3\n1e7,,\n-1,2e8,2\n1e7,6e8,nan\n2e7,6e8,x\n3e7,6e8,2\n"
    path = write(tmp_path, f"N,D,val loss\n{rows}")
    line = (
        "4 of 6 rows cannot be read: N is not above 0 in 1, D is missing in 1, "
        "val loss is missing in 1, val loss is not above 0 in 1, val loss is no number "
        "in 1, first in row 2 (line 3); --ignore '"
    )
    with pytest.raises(ValueError, match="leaves them out") as caught:
        read_log(path)
    assert line in str(caught.value)
    rule = str(caught.value).partition("--ignore '")[2].partition("' leaves")[0]
    assert rule == "N is invalid or D is invalid or `val loss` is invalid"
    assert [row.number for row in read_log(path, ignore=rule).raw] == [1, 6]
    missing = read_log(path, ignore="`val loss` is missing or row > 2")
    assert [row.number for row in missing.raw] == [1]
    # Where a suffix is not allowed, the rows are listed.
    units = write(tmp_path, "N,D,loss\n1M,2,3\n2M,3,4\n3,4,5\n")
    with refused("--ignore 'row == 1 or row == 2' leaves them out"):
        read_log(units, LogColumns(n="N", n_unit=1e6))
    words = write(tmp_path, "N,D,loss\na,2,3\nb,3,4\n")
    with refused("N is no number in 2, first in row 1 (line 2); is it another column?"):
        read_log(words)


def test_rules_compare_in_the_units_that_flags_declare(tmp_path: Path) -> None:
    path = write(tmp_path, grid("params,D,loss", scale=1e6))
    columns = LogColumns(n="params", n_unit=1e6, loss_unit=0.5)
    log = read_log(path, columns)
    for rule, num in (
        ("params > 5e7", 8),
        ("params <= 3e8 and params >= 1e8", 8),
        ("num_params > 5e7", 8),
        ("loss < 1.7", 3),
    ):
        assert log.select(rule).sum() == num, rule
    assert len(read_log(path, columns, ignore="params > 5e7").runs) == 8
    assert log.units == {"params": 1e6, "loss": 0.5}
    # A suffix is a unit as well.
    path = write(tmp_path, "N,D,loss\n70M,1e9,3\n0.5B,2e9,2\n")
    assert read_log(path).select("N > 1e8").tolist() == [False, True]
    assert read_log(path).select("N == '70M'").tolist() == [True, False]
    others = LogColumns(others={"num_unique_tokens": "U*1e9"})
    path = write(tmp_path, "N,D,loss,U\n1e6,1e9,3,1\n1e6,2e9,2,2\n")
    log = read_log(path, others, needs=["num_params", "num_unique_tokens"])
    assert log.select("U > 1e9").tolist() == [False, True]


def test_numbers_that_can_be_read_in_two_ways_are_doubted(tmp_path: Path) -> None:
    text = "N;D;loss;x\n1000000;1e9;5,331;2,345\n2000000;2e9;4,821;2,346\n"
    log = read_log(write(tmp_path, text))
    np.testing.assert_array_equal(log.columns["loss"], [5.331, 4.821])
    [doubt] = find_doubts(log, LogColumns())
    assert doubt.startswith("loss: 5,331 is read as 5.331")


def test_a_kind_of_doubt_is_one_line(tmp_path: Path) -> None:
    text = """N,D,loss,dataset,arch,failed,outlier
70,2,3,a,x,True,False
80,3,2,a,y,False,True
90,4,2.5,b,x,False,False
95,5,2.6,b,y,False,False
"""
    groups, marks, sizes = find_doubts(read_log(write(tmp_path, text)), LogColumns())
    assert groups.startswith("dataset is not used, and groups the runs (a, b)")
    assert groups.endswith("; the same holds for arch")
    assert marks.startswith("failed is not used, and marks 1 run")
    assert marks.endswith("; the same holds for outlier")
    assert "N (N) is 70 to 95: parameters?" in sizes
    assert "; D (D) is 2 to 5: tokens?" in sizes
