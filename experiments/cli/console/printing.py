"""Tables, texts and claims on standard output, in as many columns as there are.

Words and columns carry all of the meaning, in ASCII; colour only helps, and is left out
where the output is not a terminal or `NO_COLOR` is set (no-color.org).
"""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import console as rich_console
from rich import padding, table, text

from experiments.framework import Claim, Excerpts, ReportPart, Sheet, report

MAX_WIDTH = 100
"""Columns used at most: longer lines are hard to read."""
PIPED_WIDTH = 80
"""Columns used where the output is not a terminal and `COLUMNS` is not set: a terminal
at the other end has a width that the reader of the output need not have."""
MIN_TEXT_WIDTH = 24
"""Columns to which a column of sentences may shrink."""
NUM_EXCERPTS = 2
"""Texts shown; the report has the others."""

GAP = 2
COLORS = {"holds": "green", "fails": "bold red"}
OTHER = "yellow"
"""The colour of a claim without a verdict."""


def make_console(*, stderr: bool = False) -> rich_console.Console:
    """Opens standard output or error; nothing but text goes where no colour should."""
    # Bold and dim are escape sequences, too.
    colors: Any = None if os.environ.get("NO_COLOR") else "auto"
    return rich_console.Console(
        stderr=stderr, highlight=False, emoji=False, color_system=colors
    )


def print_parts(parts: Sequence[ReportPart]) -> None:
    """Prints them, each with an empty line before it."""
    console = make_console()
    is_piped = not console.is_terminal and "COLUMNS" not in os.environ
    width = min(console.width, PIPED_WIDTH if is_piped else MAX_WIDTH)
    blocks: list[tuple[str, Iterable[rich_console.RenderableType]]] = []
    for part in parts:
        if isinstance(part, Sheet):
            blocks.append((part.title, _sheet(part, width)))
        elif isinstance(part, Excerpts):
            blocks.append((part.title, [_excerpts(part)]))
        else:
            heads = report.group_heads(part.claims).items()
            blocks += [(head, [_verdicts(claims)]) for head, claims in heads]
    for title, below in blocks:
        with console.capture() as capture:
            if title:
                console.print(text.Text(title, "bold"), width=width)
            for each in below:
                console.print(padding.Padding(each, (0, 0, 0, GAP)), width=width)
        print("", *(line.rstrip() for line in capture.get().splitlines()), sep="\n")


def _sheet(sheet: Sheet, width: int) -> Iterator[rich_console.RenderableType]:
    """A table, on its side or in pieces where it is too wide, and its note."""
    if not sheet.rows:
        yield "(nothing)"
    else:
        first, *rows = zip(sheet.columns, *sheet.rows, strict=True)
        shapes = (sheet, _broken_heads(sheet), Sheet("", first, rows))
        fitting = [shape for shape in shapes if _min_width(shape) <= width]
        pieces = (  # every row a table of its own, of names and values
            Sheet("", ("", ""), [*zip(sheet.columns, row, strict=True), ("", "")])
            for row in sheet.rows
        )
        yield from map(_grid, fitting[:1] or pieces)
    if sheet.note:
        yield ""
        yield text.Text(sheet.note)


def _grid(sheet: Sheet) -> table.Table:
    grid = table.Table(
        box=None,
        show_header=any(sheet.columns),
        header_style="dim",
        padding=(0, GAP, 0, 0),
        pad_edge=False,
    )
    for i, head in enumerate(sheet.columns):
        cells = (row[i] for row in sheet.rows)
        right = all(x in ("", "-") or x.lstrip("-")[:1].isdigit() for x in cells)
        grid.add_column(
            text.Text(head),
            justify="right" if right else "left",
            vertical="top",
            no_wrap=not _is_prose(sheet, i),
        )
    for row in sheet.rows:
        grid.add_row(*map(text.Text, row))
    return grid


def _excerpts(excerpts: Excerpts) -> table.Table:
    grid = _plain_grid()
    for number, (given, wrote) in enumerate(excerpts.pairs[:NUM_EXCERPTS]):
        if number:
            grid.add_row("", "")
        grid.add_row(text.Text("given", "dim"), text.Text(given, "dim"))
        grid.add_row(text.Text("wrote", "dim"), text.Text(wrote))
    return grid


def _verdicts(claims: Sequence[Claim]) -> table.Table:
    grid = _plain_grid()
    for x in claims:
        color = COLORS.get(x.verdict, OTHER)
        grid.add_row(text.Text(x.verdict, color), text.Text(x.claim))
        for line in (report.claim_numbers(x), x.note):
            if line:
                grid.add_row("", text.Text(line, "dim"))
    return grid


def _plain_grid() -> table.Table:
    """A grid of a narrow column and a wide one."""
    grid = table.Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _broken_heads(sheet: Sheet) -> Sheet:
    """Breaks heads between words, to be no wider than what stands below them."""
    heads = []
    for i, head in enumerate(sheet.columns):
        longest = max((len(word) for word in head.split()), default=1)
        below = max(len(row[i]) for row in sheet.rows)
        words = textwrap.wrap(head, max(longest, below), break_on_hyphens=False)
        heads.append("\n".join(words))
    return sheet._replace(columns=heads)


def _min_width(sheet: Sheet) -> int:
    """Columns that a table needs, its sentences wrapped."""
    needed = 0
    for i, head in enumerate(sheet.columns):
        lines = [line for row in sheet.rows for line in row[i].split("\n")]
        cells = max(map(len, lines), default=0)  # one column turned has no rows
        if _is_prose(sheet, i):
            cells = min(cells, MIN_TEXT_WIDTH)
        needed += GAP + max(cells, *map(len, head.split("\n")))
    return needed


def _is_prose(sheet: Sheet, column: int) -> bool:
    return any(row[column].count(" ") > 2 for row in sheet.rows)
