"""Files of figures: printed sizes by style, PDF, and the plotted data as CSV."""

import csv
import io
import re
import zlib
from typing import Any

import numpy as np
import pytest

from jaxkv.plotting import draw_with, render_figure, style
from tests.support.commands import assert_refused, command


def draw(ax: Any) -> None:
    style.draw_curve(ax, [1, 2], [3, 4], "jaxkv", "ours")
    style.set_labels(ax, "A message", "load [requests/s]", "latency [s]")


@pytest.mark.parametrize(
    ("name", "size_inches", "points"),
    [
        ("paper", (3.3, 3.2 * 8 / 9), 8.0),
        pytest.param("page", (3.4, 3.2), 9.0, marks=pytest.mark.thorough),
        pytest.param("slide", (40 / 3, 7.5), 18.0, marks=pytest.mark.thorough),
    ],
)
def test_a_style_sets_printed_sizes(
    name: str, size_inches: tuple[float, float], points: float
) -> None:
    with draw_with(name, has_pdf=True):
        files = render_figure(draw)
    # A PDF has its page in points, and one matrix that scales all of its text.
    pdf = files["figure.pdf"]
    box = re.search(rb"MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    stream = re.search(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL)
    assert box is not None
    assert stream is not None
    content = zlib.decompress(stream[1])
    matrix = re.search(rb"([\d.]+) 0 0 [\d.]+ 0 0 cm", content)
    scale = 1.0 if matrix is None else float(matrix[1])
    fonts = [scale * float(x) for x in re.findall(rb"/F\d+ ([\d.]+) Tf", content)]
    assert min(fonts) == pytest.approx(points, rel=1e-3)
    assert [float(x) / 72 for x in box.groups()] == pytest.approx(size_inches)
    svg = re.search(
        r'width="([\d.]+)pt" height="([\d.]+)pt"', files["figure.svg"].decode()
    )
    assert svg is not None
    assert [float(x) / 72 for x in svg.groups()] == pytest.approx(size_inches)
    width, height = (int.from_bytes(files["figure.png"][i : i + 4]) for i in (16, 20))
    assert (width / 200, height / 200) == pytest.approx(size_inches, abs=0.02)


def draw_two(axes: Any) -> None:
    for ax in axes:
        draw(ax)


@pytest.mark.thorough
def test_the_columns_of_a_paper_have_its_text_width() -> None:
    with draw_with("paper"):
        files = render_figure(draw_two, panels=(1, 2))
    assert "figure.pdf" not in files
    sizes = [
        float(re.findall(r'width="([\d.]+)pt"', files[f"{name}.svg"].decode())[0]) / 72
        for name in ("figure", "figure-1")
    ]
    assert sizes == pytest.approx([6.8, 3.3])


def test_plotted_data_are_one_table() -> None:
    x = np.array([1.0, 2.0])

    def plot(axes: Any) -> None:
        curves, bars = axes
        draw(curves)
        style.shade_band(curves, x, x - 1, x + 2, "C0", 0.2)
        style.draw_reference_line(curves, 5.5, "objective")
        curves.errorbar(x, x, yerr=[0.5, 0.25], capsize=3, label="measured")
        curves.scatter([7], [8], label="one run")
        curves.vlines([9], [1], [2], label="range")
        curves.stairs([4, 6], [0, 1, 2], label="reserved")
        bars.bar([-0.2, 0.8], [1, 2], 0.4, label="paged")
        bars.barh([5], [3], left=1, label="wide")
        bars.set_xticks([0, 1], ["chat\n13B", "code"])

    table = render_figure(plot, panels=(1, 2))["figure.csv"].decode()
    heads, *rows = csv.reader(io.StringIO(table))
    assert heads == "panel x_axis y_axis series x y low high".split()
    panels = {("1", "load [requests/s]", "latency [s]"), ("2", "", "")}
    assert {tuple(row[:3]) for row in rows} == panels
    assert {tuple(row[3:]) for row in rows} == {
        ("ours", "1", "3", "", ""),
        ("ours", "2", "4", "", ""),
        ("", "1", "", "0", "3"),
        ("", "2", "", "1", "4"),
        ("objective", "", "5.5", "", ""),
        ("measured", "1", "1", "", ""),
        ("measured", "2", "2", "", ""),
        ("measured", "1", "", "0.5", "1.5"),
        ("measured", "2", "", "1.75", "2.25"),
        ("reserved", "0", "4", "", ""),
        ("reserved", "1", "6", "", ""),
        ("one run", "7", "8", "", ""),
        ("range", "9", "", "1", "2"),
        ("paged", "chat 13B", "1", "0", "1"),
        ("paged", "code", "2", "0", "2"),
        ("wide", "3", "5", "1", "4"),
    }


def test_style_and_format_are_refused_where_they_have_no_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, words, line in (
        ("list", "--style paper", "--style paper: jaxkv list draws none"),
        ("cost", "x --style slide", "jaxkv cost draws a figure only with --plot"),
        ("demo", "--style papr", "unknown style 'papr'"),
        ("demo", "--format eps", "--format eps: must be pdf"),
        ("run", "--style", "--style has no value"),
    ):
        assert_refused(command(capsys, name), words, line)
