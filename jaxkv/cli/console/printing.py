"""Tables, texts and claims on standard output, fitted to its width.

Text and layout carry the full meaning, in ASCII. Colour is an addition, and is omitted
if the output is not a terminal or `NO_COLOR` is set (no-color.org).
"""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich import console as rich_console
from rich import padding, table, text

from jaxkv.report import Claim, Excerpts, ReportPart, Sheet, claim_numbers, group_heads

MAX_WIDTH = 100
"""Largest number of columns: longer lines are hard to read."""
PIPED_WIDTH = 80
"""Columns if the output is not a terminal and `COLUMNS` is not set, because the
reader's width is unknown."""
MIN_TEXT_WIDTH = 24
"""Smallest width of a column of sentences."""
_NAME_WIDTH = 24
"""Largest width of a name that a long value does not shorten."""
NUM_EXCERPTS = 2
"""Number of excerpts printed; the report has all of them."""

COLUMN_GAP = 2
VERDICT_COLORS = {"holds": "green", "fails": "bold red"}
OTHER = "yellow"
"""Colour of a claim without a verdict."""


def make_console(*, stderr: bool = False) -> rich_console.Console:
    """Opens standard output or error, without escape sequences if `NO_COLOR` is set."""
    # Bold and dim are escape sequences, too.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return rich_console.Console(
        stderr=stderr, highlight=False, emoji=False, color_system=colors
    )


def print_parts(parts: Sequence[ReportPart]) -> None:
    """Prints parts of a report, each after an empty line."""
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
            heads = group_heads(part.claims).items()
            blocks += [(head, [_verdicts(claims)]) for head, claims in heads]
    for title, below in blocks:
        with console.capture() as capture:
            if title:
                console.print(text.Text(title, "bold"), width=width)
            for renderable in below:
                console.print(
                    padding.Padding(renderable, (0, 0, 0, COLUMN_GAP)), width=width
                )
        print("", *(line.rstrip() for line in capture.get().splitlines()), sep="\n")


def _sheet(sheet: Sheet, width: int) -> Iterator[rich_console.RenderableType]:
    """Yields a table and its note; a table that is too wide is transposed or split."""
    if not sheet.rows:
        yield "(no rows)"
    else:
        first, *rows = zip(sheet.columns, *sheet.rows, strict=True)
        shapes = (sheet, _broken_heads(sheet), Sheet("", first, rows))
        fitting = [shape for shape in shapes if _min_width(shape) <= width]
        pieces = (  # every row becomes a table of names and values
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
        padding=(0, COLUMN_GAP, 0, 0),
        pad_edge=False,
    )
    has_heads = any(sheet.columns)
    for i, head in enumerate(sheet.columns):
        cells = [row[i] for row in sheet.rows]
        right = all(x in ("", "-") or x.lstrip("-")[:1].isdigit() for x in cells)
        # A name keeps its width next to a long value, which is folded.
        is_name = not has_heads and i == 0 and len(sheet.columns) > 1
        grid.add_column(
            text.Text(head),
            justify="right" if right else "left",
            vertical="top",
            no_wrap=is_name or (has_heads and not _is_prose(sheet, i)),
            min_width=min(max(map(len, cells)), _NAME_WIDTH) if is_name else None,
            overflow="ellipsis" if has_heads else "fold",
        )
    for row in sheet.rows:
        grid.add_row(*map(text.Text, row))
    return grid


def _excerpts(excerpts: Excerpts) -> table.Table:
    grid = _plain_grid()
    for number, (prompt, wrote) in enumerate(excerpts.pairs[:NUM_EXCERPTS]):
        if number:
            grid.add_row("", "")
        grid.add_row(text.Text("given", "dim"), text.Text(prompt, "dim"))
        grid.add_row(text.Text("wrote", "dim"), text.Text(wrote))
    return grid


def _verdicts(claims: Sequence[Claim]) -> table.Table:
    grid = _plain_grid()
    for x in claims:
        color = VERDICT_COLORS.get(x.verdict, OTHER)
        grid.add_row(text.Text(x.verdict, color), text.Text(x.claim))
        for line in (claim_numbers(x), x.note):
            if line:
                grid.add_row("", text.Text(line, "dim"))
    return grid


def _plain_grid() -> table.Table:
    """Returns a grid of a narrow column and a wide one."""
    grid = table.Table.grid(padding=(0, COLUMN_GAP, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _broken_heads(sheet: Sheet) -> Sheet:
    """Breaks headings between words to the width of their cells."""
    heads = []
    for i, head in enumerate(sheet.columns):
        longest = max((len(word) for word in head.split()), default=1)
        below = max(len(row[i]) for row in sheet.rows)
        words = textwrap.wrap(head, max(longest, below), break_on_hyphens=False)
        heads.append("\n".join(words))
    return sheet._replace(columns=heads)


def _min_width(sheet: Sheet) -> int:
    """Returns the columns that a table needs with wrapped sentences."""
    needed = 0
    for i, head in enumerate(sheet.columns):
        lines = [line for row in sheet.rows for line in row[i].split("\n")]
        cells = max(
            map(len, lines), default=0
        )  # a transposed single column has no rows
        if _is_prose(sheet, i):
            cells = min(cells, MIN_TEXT_WIDTH)
        needed += COLUMN_GAP + max(cells, *map(len, head.split("\n")))
    return needed


def _is_prose(sheet: Sheet, column: int) -> bool:
    return any(row[column].count(" ") > 2 for row in sheet.rows)
