"""Blocks of rows have the cells of the whole table."""

import json
import os
import threading
from pathlib import Path

import pytest

from jaxkv.files import (
    MISSING,
    RaggedError,
    TableBlock,
    iterate_objects,
    read_blocks,
    read_table,
)

CSV = "# by a script\n#2\nid;note;x\n" + "".join(
    f"{i};'a {i}';\n\n#{i} is skipped\n" for i in range(90)
)
TEXTS = {
    "comments": CSV,
    "excel": "sep=|\r\na|b\r\n" + "1|2\r\n" * 300,
    "quotes": 'a\tb\n"1\n2"\t" 3"\n' * 2 + '"x\ty"\t4\n' * 200,
    "decimal commas": "a;b\n" + "1,5;2\n" * 200,
    "two names": "a,a,b\n" + "1,2,3\n" * 200,
    "labels": "id,b\n" + "#1,2\n" * 300,
    "lines": "".join(
        json.dumps({"a": [i], f"b{i % 3}": "\u2028"}) + "\n\n" for i in range(90)
    ),
    "array": json.dumps([{"a": i, "b": [i]} for i in range(90)]),
    "marked": "\ufeff" + "a,b\n" + "\u00e9,2\n" * 200,
}


def rows(blocks: list[TableBlock]) -> list[tuple[int, dict]]:
    numbered_rows = []
    for block in blocks:
        for i, line in enumerate(block.lines):
            cells = {name: column[i] for name, column in block.columns.items()}
            numbered_rows.append(
                (line, {k: v for k, v in cells.items() if v is not MISSING})
            )
    return numbered_rows


@pytest.mark.parametrize("name", TEXTS)
def test_blocks_are_those_of_the_whole_table(tmp_path: Path, name: str) -> None:
    path = tmp_path / "table"
    path.write_text(TEXTS[name], "utf-8", newline="")
    table = read_table(path, keep_lists=True, allow_partial=False)
    expected = [(row.line or row.number, dict(row.cells)) for row in table.rows]
    blocks = [*read_blocks(path, block_bytes=512)]
    assert rows(blocks) == expected
    is_whole = name in ("decimal commas", "two names", "array")
    assert (len(blocks) == 1) == is_whole
    assert rows([*read_blocks(path)]) == expected


def test_a_ragged_row_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b\n\n" + "1,2\n" * 300 + "1\n")
    for size in (512, 2**22):
        with pytest.raises(RaggedError) as caught:
            list(read_blocks(path, block_bytes=size))
        assert (caught.value.row, caught.value.line) == (301, 303)


def test_a_pipe_is_read_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "a,b\n" + "1,2\n" * 300
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    [block] = read_blocks(pipe, block_bytes=512)
    writer.join()
    assert len(block.lines) == 300


def test_objects_are_lines_or_a_list_or_one(tmp_path: Path) -> None:
    values = [{"a": 1}, {"b": [{"c": 2}]}]
    path = tmp_path / "values.json"
    for text, expected in (
        ("\n".join(map(json.dumps, values)), values),
        (json.dumps(values, indent=1), values),
        (json.dumps(values[1], indent=1), values[1:]),
    ):
        path.write_text(text)
        assert [value for _, value in iterate_objects(path)] == expected
    for text, line in (("[1]", "entry 1: holds int"), ('{"a": 1}\n2', "line 2: holds")):
        path.write_text(text)
        with pytest.raises(ValueError, match=line):
            list(iterate_objects(path))
