"""Tables: equal rows from every file format, and errors for invalid files."""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv.files import delimited, read_decompressed_text, read_table
from tests.support.refusals import refused

ROWS = [
    {"N": 1e7, "D": 2e8, "loss": 5.5, "note": "a"},
    {"N": 3e7, "D": 6e8, "loss": 4.25, "note": "b"},
]
CSV = "N,D,loss,note\n1e7,2e8,5.5,a\n3e7,6e8,4.25,b\n"


def cells(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, with numbers parsed."""

    def number(cell: Any) -> Any:
        try:
            return float(cell)
        except (TypeError, ValueError):
            return cell

    return [
        {name: number(cell) for name, cell in row.cells.items()}
        for row in read_table(path).rows
    ]


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        "\ufeff" + CSV,
        CSV.replace("\n", "\r\n"),
        CSV.replace("\n", "\r"),
        CSV.replace(",", ";"),
        CSV.replace(",", "|"),
        CSV.replace(",", "\t"),
        CSV.replace(",", ", "),
        "sep=;\n" + CSV.replace(",", ";"),
        '\ufeff"sep=;"\r\n' + CSV.replace(",", ";"),
        "SEP=\t\n" + CSV.replace(",", "\t"),
        "sep=,,,\n" + CSV,
        "# by a script, in 2024\n# it's; \"quoted\n\n" + CSV,
        "#" + CSV,
        "# exported\n# " + CSV,
        CSV.replace("3e7", "# 2e7,4e8,5,z\n\n  # later\n3e7"),
        "N;D;loss;note\n1e7;2e8;5,5;a\n3e7;6e8;4,25;b\n",
        "N\tD\tloss\tnote\n10.000.000\t2e8\t5,5\ta\n30.000.000\t6e8\t4,25\tb\n",
        'N,D,loss,note\n"10,000,000",2e8,5.5,a\n"30,000,000",6e8,4.25,b\n',
    ],
)
def test_formats_give_equal_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_bytes(text.encode())
    assert cells(tmp_path / "t.csv") == ROWS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('N;D;loss;"val, last"\n1;2;3;x\n', ["N", "D", "loss", "val, last"]),
        ("N\tD\tnote (nats, mean)\n1\t2\tx\n", ["N", "D", "note (nats, mean)"]),
        ("N,D,tags; all\n1,2,a;b\n", ["N", "D", "tags; all"]),
        ("N,D,a|b\n1,2,x\n", ["N", "D", "a|b"]),
        ("N;loss, mean\n1e7;3,5\n", ["N", "loss, mean"]),
        ("N;D;notes, all\n1;2;x, y\n3;4;z, y\n", ["N", "D", "notes, all"]),
        ("N,D\n1,2\n", ["N", "D"]),
        ("N\n1\n", ["N"]),
    ],
)
def test_delimiter_gives_rows_equal_numbers_of_cells(
    text: str, names: list[str]
) -> None:
    table = delimited.read_delimited(text)
    assert table.names == names
    assert all(len(row) == len(names) for _, row in table.rows)


def test_comments_are_counted_and_numbered_rows_kept() -> None:
    table = delimited.read_delimited("# one\nrun,N\na,1\n# b,2\nc,3\n")
    assert table.rows == [(3, ["a", "1"]), (5, ["c", "3"])]
    assert table.notes == ("2 comment lines left out (line 1, 4)",)
    # A # in every row is an issue number, and a quoted cell may have a second line.
    assert len(delimited.read_delimited("run,N\n#1,1\n#2,2\n").rows) == 2
    quoted = delimited.read_delimited('run,N\n"a\n# b",1\nc,2\n')
    assert quoted.rows == [(2, ["a\n# b", "1"]), (4, ["c", "2"])]


def test_ragged_row_is_reported_with_the_best_delimiter() -> None:
    with pytest.raises(delimited.RaggedError) as caught:
        delimited.read_delimited('N;D;"a, b"\n1;2;3\n4;5\n6;7;8\n')
    error = caught.value
    assert (error.row, error.line, error.num_cells, error.num_names) == (2, 3, 2, 3)


@pytest.mark.parametrize(
    ("text", "first", "doubt"),
    [
        ("N;loss\n5;5,331\n6;4,821\n", "5.331", "5,331 is read as 5.331: is its com"),
        ('N,D\n5,"5,331"\n6,"4,821"\n', "5331", "5,331 is read as 5331: is its com"),
        ("N;loss\n5,5;5,331\n6;4,821\n", "5.331", ""),
        ("N;loss\n5,5;5.331\n6;4.821\n", "5.331", "4.821 is read with a decimal poi"),
        ("N;loss\n5;1.234,5\n6;4,821\n", "1234.5", ""),
        ("N;loss\n5;0,331\n6;4,821\n", "0.331", ""),
        ("N;loss\n5;1,234.5\n6;4,821.0\n", "1234.5", ""),
        ("N;note\n5;1,5\n6;a, b\n", "1,5", ""),
        ("N;note\n5;1,5\n6;1,234,567\n", "1,5", ""),
    ],
)
def test_commas_in_numbers(text: str, first: str, doubt: str) -> None:
    table = delimited.read_delimited(text)
    assert table.rows[0][1][1].replace("4821", "") == first
    sentences = " ".join(table.doubtful.values())
    assert doubt in sentences
    assert bool(sentences) == bool(doubt)


def test_repeated_names_of_equal_columns_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("N,x,D,x,D,\n1,a,2,b,2,\n")
    table = read_table(path)
    assert table.names == ("N", "D", "")
    assert table.repeated == {"x"}


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\v", "\x1c"])
def test_lines_end_at_line_feeds_only(tmp_path: Path, mark: str) -> None:
    note = f"a{mark}b"
    rows = [ROWS[0] | {"note": note}, ROWS[1]]
    path = tmp_path / "t"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if mark in ("\v", "\x1c"):  # JSON escapes control characters
        lines = [json.dumps(row) for row in rows]
    for text in ("\r\n".join(lines), "\ufeff" + "\n".join(lines) + "\n\n"):
        path.write_bytes(text.encode())
        assert [row.cells["note"] for row in read_table(path).rows] == [
            note,
            "b",
        ]
    path.write_text(f"N,note\n1,{note}\n2,b\n")
    assert [row.cells["note"] for row in read_table(path).rows] == [note, "b"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_read(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "t"
    path.write_bytes(pack(CSV.encode()))
    assert cells(path) == ROWS
    assert read_decompressed_text(path) == CSV
    path.write_bytes(pack(CSV.encode())[:-9])
    with refused("t: cannot be read: Compressed file ended before"):
        read_table(path)
    path.write_bytes(pack(b" " * 2**20))
    with refused("more than 0 MiB"):
        read_table(path, max_bytes=2**19)


def test_numpy_vectors_are_columns(tmp_path: Path) -> None:
    columns: dict[str, Any] = {x: [row[x] for row in ROWS] for x in ROWS[0]}
    path = tmp_path / "t.npz"
    np.savez_compressed(path, **columns, seed=3)
    assert cells(path) == ROWS
    assert read_table(path).notes == ("no columns, and left out: seed",)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"N": [1, 2], "D": [1]}, "its arrays have different lengths: N 2, D 1"),
        ({"N": np.array([{}], object)}, "cannot be decoded: "),
        ({"N": np.zeros((2, 2))}, "none of its arrays is a named column"),
    ]
    for arrays, line in cases:
        np.savez(path, **arrays)
        with refused(line):
            read_table(path)
    path.write_bytes(path.read_bytes()[:-40])
    with refused("it is a zip archive, and cannot be decoded"):
        read_table(path)


def compressed_by_arrow(kind: str) -> bytes:
    """Returns the rows in a format that pyarrow writes."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra `tables`) is absent")
    from pyarrow import feather, ipc, parquet

    table = arrow.Table.from_pylist(ROWS)
    file = arrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table, file)
    elif kind == "feather":
        feather.write_feather(table, file)
    elif kind == "zstd":
        with arrow.CompressedOutputStream(file, "zstd") as packed:
            packed.write(CSV.encode())
    else:
        make = ipc.new_file if kind == "arrow" else ipc.new_stream
        with make(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow", "stream", "zstd"])
def test_files_that_pyarrow_reads(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(compressed_by_arrow(kind))
    assert cells(path) == ROWS
    path.write_bytes(path.read_bytes()[:-30])
    with refused("t: cannot be read: it is ", "and cannot be decoded: "):
        read_table(path)


def test_parquet_structs_dates_and_size_limit(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra `tables`) is absent")
    from pyarrow import parquet

    path = tmp_path / "t"
    file = io.BytesIO()
    times = arrow.array([1_700_000_000_123_456_789], arrow.timestamp("ns"))
    word = arrow.array(["x"]).dictionary_encode()
    config = arrow.array([{"lr": 0.5, "inner": {"seed": 1}}])
    columns = {"t": times, "word": word, "config": config, "ids": arrow.array([[1, 2]])}
    parquet.write_table(arrow.table(columns), file)
    path.write_bytes(file.getvalue())
    expected = {
        "t": "2023-11-14 22:13:20.123456",
        "word": "x",
        "config.lr": 0.5,
        "config.inner.seed": 1,
    }
    [row] = read_table(path).rows
    assert row.cells == expected
    [row] = read_table(path, keep_lists=True).rows
    assert row.cells == expected | {"ids": [1, 2]}
    # A billion equal cells take few bytes on disk.
    large_table = arrow.table({"N": arrow.array(np.zeros(2**18))})
    parquet.write_table(large_table, path)
    with refused("more than 1 MiB"):
        read_table(path, max_bytes=2**20)


@pytest.mark.parametrize("start", [b"PAR1", b"ARROW1", b"\x28\xb5\x2f\xfd"])
def test_missing_library_error_has_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t").write_bytes(start + bytes(20))
    with refused("which pyarrow reads: pip install 'jaxkv[tables]'"):
        read_table(tmp_path / "t")
