"""Markdown tables render: one header, one separator, equal numbers of cells."""

import re
from pathlib import Path

import pytest

from tests.support.folders import ROOT

SEPARATOR = re.compile(r"\|(?: *:?-+:? *\|)+")


def markdown_files() -> list[Path]:
    """Returns the Markdown files of the tree; hidden folders and `runs` are skipped."""
    tops = [x for x in ROOT.iterdir() if x.name[0] != "." and x.name != "runs"]
    inside = [path for top in tops if top.is_dir() for path in top.rglob("*.md")]
    return [*(top for top in tops if top.suffix == ".md"), *inside]


def split_cells(line: str) -> list[str]:
    r"""Returns the cells of a row; `|` inside a cell is escaped as `\|`."""
    return re.split(r"(?<!\\)\|", line.strip())[1:-1]


def table_errors(text: str) -> list[str]:
    """Returns the errors in all tables of a page, each with its line number."""
    errors = []
    head = 0
    is_code = False
    lines = ["", *text.splitlines(), ""]
    for i, line in enumerate(lines):
        row = line.strip()
        before = lines[i - 1].strip()
        is_code ^= row.startswith("```")
        if is_code or not row.startswith("|"):
            if head and row and not row.startswith("```"):
                errors.append(f"{i}: a table needs an empty line below it")
            head = 0
            continue
        if head:
            begins = False
        else:
            begins = True
            head = len(split_cells(line))
        if not row.endswith("|"):
            errors.append(f"{i}: the row does not end with |")
        elif len(split_cells(line)) != head:
            errors.append(f"{i}: {len(split_cells(line))} cells, its head has {head}")
        if not begins:
            continue
        if before:
            errors.append(f"{i}: a table needs an empty line above it")
        if not SEPARATOR.fullmatch(lines[i + 1].strip()):
            errors.append(f"{i}: no separator below the head")
    return errors


def test_all_tables_render() -> None:
    errors_by_page = {
        str(page.relative_to(ROOT)): lines
        for page in markdown_files()
        if (lines := table_errors(page.read_text("utf-8")))
    }
    assert len(markdown_files()) > 40
    assert errors_by_page == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |", "5: no separator"),
        ("| a | b |\n|---|---|\n| 1 |", "3: 1 cells, its head has 2"),
        ("| a | b |\n|---|\n| 1 | 2 |", "2: 1 cells"),
        ("words\n| a |\n|---|", "2: a table needs an empty line above"),
        ("| a |\n|---|\nwords", "3: a table needs an empty line below"),
        ("| a |\n|---|\n| 1", "3: the row does not end"),
    ],
)
def test_table_errors_are_found(text: str, message: str) -> None:
    assert table_errors(text)[0].startswith(message)


def test_valid_table_has_no_errors() -> None:
    text = "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\n\n```\n| no table\n```\n"
    assert table_errors(text) == []
