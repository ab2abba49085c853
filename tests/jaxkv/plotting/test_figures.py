"""Figures: the common rules, the style, and panels."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from jaxkv.plotting import SYSTEM_STYLES, layout, style, system_style
from jaxkv.report import read_run
from tests.support import figures, smoke
from tests.support.folders import RECORDS

QUICK = {
    *("bench_fit", "bench_launches", "bench_simulate", "chatbot", "cost_check"),
    *("disaggregation_large", "page_size", "parallelism"),
}
"""Records that are drawn in less than a second."""


def marked(name: str) -> Any:
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough])


RECORDED = sorted(path.parent.name for path in RECORDS.glob("*/claims.json"))


@pytest.mark.parametrize("name", [marked(name) for name in RECORDED])
def test_the_figure_of_a_record_meets_the_rubric(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = json.loads((RECORDS / name / "env.json").read_text("utf-8"))
    stored_run = read_run(RECORDS / name, load_experiment(env["experiment"]))
    sheet = figures.draw_sheet(
        lambda: smoke.draw(stored_run.study, stored_run.result), monkeypatch
    )
    assert figures.faults(sheet) == []
    for system, color in figures.looks(sheet):
        assert color == pytest.approx(system_style(system).color), system
    # A file for each panel of the figure.
    panels = {path.name for path in (RECORDS / name).glob("figure-*.png")}
    num = len(sheet.axes) if len(sheet.axes) > 1 else 0
    assert panels == {f"figure-{i}.png" for i in range(1, num + 1)}


def test_font_sizes_are_measured_at_print_width() -> None:
    assert style.PRINT_WIDTH_INCHES == figures.WIDTH_INCHES
    with pytest.raises(ValueError, match=r"width=10.2 inches must be in \(0, 6.8\]"):
        style.render_figure(lambda axes: None, panels=(1, 3))


def test_bars_start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(ax: Any) -> None:
        ax.bar(["a", "b"], [5.0, 6.0])
        ax.set_ylim(4, 7)

    sheet = figures.draw_sheet(lambda: style.render_figure(draw), monkeypatch)
    assert sheet.axes[0].get_ylim() == (0, 7)

    def draw_log(ax: Any) -> None:
        draw(ax)
        ax.set_yscale("log")

    with pytest.raises(ValueError, match="yscale='log' must be linear"):
        style.render_figure(draw_log)


def test_legends_and_titles_do_not_cover_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    title = "A message of many words that is far too long for one line of a panel"

    def draw(axes: Any) -> None:
        for ax in axes:
            for name in ("static", "continuous", "continuous, paged", "published"):
                style.draw_curve(ax, [1, 2], [0, 1e6], name, name)
            style.set_labels(ax, title, "load [requests/s]", "rate [tokens/s]")
            ax.legend(loc="center")

    render = lambda: style.render_figure(draw, panels=(1, 2))  # noqa: E731
    sheet = figures.draw_sheet(render, monkeypatch)
    assert figures.faults(sheet) == []
    assert all(ax.get_legend().get_window_extent().y0 > ax.bbox.y1 for ax in sheet.axes)
    assert sheet.axes[0].get_title(loc="left").split() == title.split()


def test_a_look_overrides_the_style_of_a_system() -> None:
    def draw(ax: Any) -> None:
        [plain] = style.draw_curve(ax, [1, 2], [3, 4], "jaxkv", "jaxkv")
        look: dict[str, Any] = dict(color="0.5", linewidth=9.0)
        [other] = style.draw_curve(ax, [1, 2], [3, 4], "jaxkv", **look)
        assert plain.get_color() == system_style("jaxkv").line["color"] != "0.5"
        assert (other.get_color(), other.get_linewidth()) == ("0.5", 9.0)

    style.render_figure(draw)


def breach(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the faults of a valid panel after a change during drawing."""

    def draw(ax: Any) -> None:
        style.draw_curve(ax, [1, 2], [3, 4], "jaxkv", "jaxkv")
        style.set_labels(ax, "One message", "width [features]", "rate [tokens/s]")
        ax.legend()

    sheet = figures.draw_sheet(lambda: style.render_figure(draw), monkeypatch)
    assert figures.faults(sheet) == []
    change(sheet.axes[0])
    return figures.faults(sheet)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda ax: ax.tick_params(labelsize=7), "7.0 points"),
        (lambda ax: ax.figure.set_figwidth(13.6), "4.5 points"),
        (lambda ax: ax.set_xlabel("width"), "'width' has no unit"),
        (lambda ax: ax.set_title("", loc="left"), "no title"),
        (lambda ax: ax.bar([1, 2], [3, 4], bottom=2).remove(), ""),
        (lambda ax: (ax.bar([1], [4]), ax.set_ylim(1, 4)), "do not start at zero"),
        (lambda ax: ax.legend(loc="center"), "the legend is on data"),
        (lambda ax: ax.set_xticks([1, 1.01], ["one", "two"]), "overlaps 'two'"),
        (lambda ax: ax.text(3, 3, "far outside"), "leaves the figure"),
    ],
)
def test_faults_of_figures_are_detected(
    change: Callable[[Any], Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = "\n".join(breach(change, monkeypatch))
    assert fault in faults if fault else not faults


def test_systems_differ_in_colour_or_marker() -> None:
    """Systems in one figure differ in colour or marker; none is yellow."""
    yellow = style.colors()[4]
    for name in SYSTEM_STYLES:
        assert system_style(name).color != yellow
    for group in (
        ("jaxkv", "PyTorch", "PyTorch, compiled", "transformers", "llama.cpp"),
        ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged"),
        ("Orca", "vLLM", "Sarathi (512)", "Sarathi (2,048)", "published"),
        ("static", "continuous", "continuous, paged"),
        ("n-gram", "Jacobi", "lookahead", "Medusa", "EAGLE", "draft model"),
    ):
        looks = [system_style(name) for name in group]
        assert len({look.color for look in looks}) == len(group)
        assert len({look.marker for look in looks}) == len(group)


def test_every_panel_has_a_separate_file() -> None:
    def draw(axes: Any) -> None:
        for i, ax in enumerate(axes.flat):
            style.draw_curve(ax, np.arange(3), np.arange(3) ** i, "jaxkv", f"panel {i}")
            style.set_labels(ax, f"Message {i}", "x [1]", "y [1]")
            ax.legend()

    files = style.render_figure(draw, panels=(1, 2))
    kinds = ("svg", "png")
    names = {f"figure-{i}.{kind}" for i in (1, 2) for kind in kinds}
    assert files.keys() == names | {"figure.svg", "figure.png", "figure.csv"}
    for i in range(2):
        panel = files[f"figure-{i + 1}.svg"].decode()
        assert re.findall(r"Message \d", panel) == [f"Message {i}"]
    alone = style.render_figure(lambda ax: draw(np.array([ax])))
    assert alone.keys() == {"figure.svg", "figure.png", "figure.csv"}


def test_a_long_number_keeps_its_unit() -> None:
    assert layout.join_units("grows to 12 % of 5 GB") == (
        "grows to 12\N{NO-BREAK SPACE}% of 5\N{NO-BREAK SPACE}GB"
    )
