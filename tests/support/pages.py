"""Programs in pages: the fenced `python` blocks, their output, and how they run."""

import contextlib
import io
import math
import re
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import jax

from tests.support.folders import ROOT

_FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Line of the page at which the text begins, from 1."""


def fenced_blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a page that name a language, in order."""
    page = path.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            textwrap.dedent(match["text"]),
            page.count("\n", 0, match.start("text")) + 1,
        )
        for match in _FENCED.finditer(page)
    ]


@contextlib.contextmanager
def user_promotion() -> Generator[None]:
    """JAX promotes dtypes and ranks as for users, not as the tests configure it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def run_blocks(path: Path) -> tuple[dict, list[str]]:
    """Runs the `python` blocks of a page in order, as one program.

    Returns:
      The names that the program has defined, and the printed output of each block.
    """
    space: dict = {"__name__": "__main__"}
    printed = []
    for block in fenced_blocks(path):
        if block.language != "python":
            continue
        # Tracebacks then name the line of the page.
        source = "\n" * (block.line - 1) + block.text
        with contextlib.redirect_stdout(io.StringIO()) as output, user_promotion():
            exec(compile(source, str(path), "exec"), space)
        printed.append(output.getvalue())
    return space, printed


_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")


def _parts(text: str) -> tuple[list[str], list[float]]:
    """Splits a text into its words without numbers, and its numbers."""
    numbers = [float(x.replace(",", "")) for x in _NUMBER.findall(text)]
    return _NUMBER.sub("#", text).split(), numbers


def is_same_output(shown: str, printed: str, rtol: float = 0.02) -> bool:
    """Compares the output that a page shows with the printed one.

    Spaces do not count, and numbers may differ by `rtol`. Output that ends in `...` is
    the beginning of the printed one.
    """
    is_beginning = shown.rstrip().endswith("...")
    words, numbers = _parts(shown.rstrip().removesuffix("..."))
    all_words, all_numbers = _parts(printed)
    if is_beginning:
        all_words = all_words[: len(words)]
        all_numbers = all_numbers[: len(numbers)]
    return (
        words == all_words
        and len(numbers) == len(all_numbers)
        and all(
            math.isclose(x, y, rel_tol=rtol, abs_tol=1e-9)
            for x, y in zip(numbers, all_numbers, strict=True)
        )
    )


def wrong_outputs(path: Path, printed: list[str]) -> list[str]:
    """Returns the shown outputs of a page that differ from the printed ones.

    A `text` block after a `python` block, with only prose between, is its output. The
    comment `<!-- varies -->` on the line before a `text` block excludes it, for times.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = []
    outputs = iter(printed)
    last = None
    for block in fenced_blocks(path):
        if block.language == "python":
            last = next(outputs)
            continue
        varies = lines[max(block.line - 3, 0)].strip() == "<!-- varies -->"
        if block.language == "text" and last is not None and not varies:
            if not is_same_output(block.text, last):
                wrong.append(
                    f"line {block.line} shows\n{block.text}\nprinted was\n{last}"
                )
        last = None
    return wrong


def tutorials() -> list[Path]:
    """Returns the pages that end in a figure of their own program."""
    docs = ROOT / "docs"
    return [docs / "ten_minutes.md", *sorted(docs.glob("tutorials/*.md"))]


def figure_path(page: Path) -> Path:
    """Returns the path of the figure that a tutorial shows."""
    return ROOT / "docs/figures/tutorials" / f"{page.stem}.svg"


def shown_figure(page: Path) -> re.Match[str] | None:
    """Returns the image after the block that writes it: `varies`, `alt` and `path`."""
    _, _, end = page.read_text(encoding="utf-8").rpartition(f'"{page.stem}.svg"')
    varies = r"(?P<varies><!-- varies -->\n)?"
    return re.match(rf".*\n```\n\n{varies}!\[(?P<alt>.*)\]\((?P<path>.*)\)\n", end)


def is_same_figure(page: Path, written: Path) -> bool:
    """Compares the texts of a figure with those of the figure that the page shows.

    Matplotlib writes them as comments of the SVG. The comment `<!-- varies -->` on the
    line before the image excludes it.
    """
    image = shown_figure(page)
    shown, drawn = (
        "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))
        for path in (figure_path(page), written)
    )
    return image is not None and (bool(image["varies"]) or is_same_output(shown, drawn))
