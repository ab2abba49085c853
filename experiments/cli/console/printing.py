"""Tables, texts and claims on standard output, in as many columns as there are.

Words and columns carry all of the meaning, in ASCII; colour only helps, and is left out
where the output is not a terminal or `NO_COLOR` is set (no-color.org).
"""

import os
import textwrap
from collections.abc import Sequence

from rich import console as rich_console
from rich import padding, table, text

from experiments.framework import Excerpts, Part, Sheet, Verdicts, report

MAX_WIDTH = 100
"""Columns used at most: longer lines are hard to read."""
MIN_TEXT_WIDTH = 24
"""Columns to which a column of sentences may shrink."""
NUM_EXCERPTS = 2
"""Texts shown; the report has the others."""

GAP = 2
COLORS = {"holds": "green", "fails": "bold red", "differs": "yellow"}
_COUNTED = {"holds": "hold", "fails": "fail", "differs": "differ in conditions"}


def make_console(*, stderr: bool = False) -> rich_console.Console:
    """Opens standard output or error; nothing but text goes where no colour should."""
    if os.environ.get("NO_COLOR"):
        # Bold and dim are escape sequences, too.
        return rich_console.Console(
            stderr=stderr, highlight=False, emoji=False, color_system=None
        )
    return rich_console.Console(stderr=stderr, highlight=False, emoji=False)


def print_parts(parts: Sequence[Part]) -> None:
    """Prints them, each with an empty line before it."""
    console = make_console()
    width = min(console.width, MAX_WIDTH)
    for part in parts:
        with console.capture() as said:
            if isinstance(part, Sheet):
                _print_sheet(console, part, width)
            elif isinstance(part, Excerpts):
                _print_excerpts(console, part, width)
            else:
                _print_verdicts(console, part, width)
        print("", *(line.rstrip() for line in said.get().splitlines()), sep="\n")


def _print_sheet(console: rich_console.Console, sheet: Sheet, width: int) -> None:
    """Prints a table, on its side or in pieces where it is too wide."""
    if sheet.title:
        console.print(text.Text(sheet.title, "bold"))
    if not sheet.rows:
        console.print("  (nothing)")
    else:
        shapes = (sheet, _broken_heads(sheet), _turned(sheet))
        fitting = [shape for shape in shapes if _min_width(shape) <= width]
        for shape in fitting[:1] or _pieces(sheet):
            _print_grid(console, shape, width)
    if sheet.note:
        console.print()
        _print_indented(console, text.Text(sheet.note), width)


def _print_grid(console: rich_console.Console, sheet: Sheet, width: int) -> None:
    grid = table.Table(
        box=None,
        show_header=any(sheet.columns),
        header_style="dim",
        padding=(0, GAP, 0, 0),
        pad_edge=False,
    )
    for i, head in enumerate(sheet.columns):
        right = all(_is_number(row[i]) for row in sheet.rows)
        grid.add_column(
            text.Text(head),
            justify="right" if right else "left",
            vertical="top",
            no_wrap=not _is_prose(sheet, i),
        )
    for row in sheet.rows:
        grid.add_row(*map(text.Text, row))
    _print_indented(console, grid, width)


def _print_excerpts(
    console: rich_console.Console, excerpts: Excerpts, width: int
) -> None:
    console.print(text.Text(excerpts.title, "bold"))
    grid = _plain_grid()
    for number, (given, wrote) in enumerate(excerpts.pairs[:NUM_EXCERPTS]):
        if number:
            grid.add_row("", "")
        grid.add_row(text.Text("given", "dim"), text.Text(given, "dim"))
        grid.add_row(text.Text("wrote", "dim"), text.Text(wrote))
    _print_indented(console, grid, width)


def _print_verdicts(
    console: rich_console.Console, verdicts: Verdicts, width: int
) -> None:
    counts = [
        f"{sum(x.verdict == verdict for x in verdicts.claims)} {words}"
        for verdict, words in _COUNTED.items()
    ]
    console.print(text.Text(f"claims: {', '.join(counts)}", "bold"))
    grid = _plain_grid()
    for x in verdicts.claims:
        grid.add_row(text.Text(x.verdict, COLORS[x.verdict]), text.Text(x.claim))
        for line in (report.claim_numbers(x), x.note):
            if line:
                grid.add_row("", text.Text(line, "dim"))
    _print_indented(console, grid, width)


def _plain_grid() -> table.Table:
    """A grid of a narrow column and a wide one."""
    grid = table.Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _print_indented(
    console: rich_console.Console, content: rich_console.RenderableType, width: int
) -> None:
    console.print(padding.Padding(content, (0, 0, 0, GAP)), width=width)


def _broken_heads(sheet: Sheet) -> Sheet:
    """Breaks heads between words, to be no wider than what stands below them."""
    heads = []
    for i, head in enumerate(sheet.columns):
        longest = max((len(word) for word in head.split()), default=1)
        below = max(len(row[i]) for row in sheet.rows)
        words = textwrap.wrap(head, max(longest, below), break_on_hyphens=False)
        heads.append("\n".join(words))
    return sheet._replace(columns=heads)


def _turned(sheet: Sheet) -> Sheet:
    """Swaps rows and columns."""
    first, *rows = zip(sheet.columns, *sheet.rows, strict=True)
    return Sheet("", first, rows)


def _pieces(sheet: Sheet) -> list[Sheet]:
    """Makes every row a table of its own, of names and values."""
    return [
        Sheet("", ("", ""), [*zip(sheet.columns, row, strict=True), ("", "")])
        for row in sheet.rows
    ]


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


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("-").partition(" ")[0][:1].isdigit()
