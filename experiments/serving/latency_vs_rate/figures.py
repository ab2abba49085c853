"""Figures 12 to 14 of the paper: latency by load, in simulated time.

Each system serves the same requests at increasing rates: first at evenly spaced rates
of the published axis, then where its latency crosses the bounds of the comparison.
"""

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import published, runs, settings
from experiments.serving.latency_vs_rate.published import axis_end_rows
from jaxkv.workloads import load_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = ("12a", "12b", "12c", "12d")
"""Panels whose curves are drawn; the others have the same shape."""
MAX_RATE_RATIO = 2.0
"""End of the rate search of a system that sustains all rates of the published axis, as
a multiple of the axis."""


class Config(lab.ConfigRecord):
    """Panels, duration and rates."""

    panels: Annotated[tuple[str, ...], lab.Choices(published.PANELS)] = (
        published.OF_THE_PAPER
    )
    """Panels of figures 12 and 14 by their names in the paper; "12a (calibrated)" has
    the step times of vLLM servers on H100s instead of published ones."""
    hours_share: Annotated[float, lab.Range(0, 24, "(]")] = 1.0
    """Share of each panel's duration: 1 h of load as published, 0.25 h for OPT-175B and
    Alpaca, whose requests suffice."""
    num_rates: Annotated[int, lab.Range(2)] = 8
    """Rates of each system, evenly spaced on the published axis."""
    num_near: lab.NonNegativeInt = 4
    """Further rates where latency crosses the bounds."""
    systems: Annotated[tuple[str, ...], lab.Choices(settings.SYSTEMS)] = (
        settings.SYSTEMS
    )
    """Simulated systems."""
    seed: int = 0
    """Seed of lengths and arrivals."""


CONFIGS = {
    "smoke": Config(
        panels=("12a",),
        hours_share=0.02,
        num_rates=2,
        num_near=0,
        systems=("Orca (Oracle)", "paged"),
    ),
    "paper": Config(),
    "figure_12a": Config(panels=("12a",)),
    "calibrated": Config(panels=("12a (calibrated)",)),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Simulates every panel; if stopped, keeps the finished ones."""
    rows: list[lab.Row] = []
    for name in config.panels:
        if progress.stopped:
            break
        panel = published.PANELS[name]
        progress.show(f"figure {name}: {panel.title}")
        setting = panel.setting()
        max_rate = MAX_RATE_RATIO * panel.axis
        seconds = 3600 * panel.hours * config.hours_share
        panel_rows = runs.explore_rates(
            setting,
            runs.draw_load(setting.law, max_rate, seconds, config.seed),
            [x for x in panel.systems if x in config.systems],
            panel.axis * np.arange(1, config.num_rates + 1) / config.num_rates,
            num_near=config.num_near,
            max_rate=max_rate,
            progress=progress,
        )
        rows += [{"panel": name} | row for row in panel_rows]
    return rows


def metrics(result: list[lab.Row]) -> dict[str, object]:
    """Returns the load that each system sustains, and every row."""
    sustained = [
        {"panel": panel} | row
        for panel, rows in runs.group_rows(result, "panel").items()
        for row in runs.sustained_rows(rows)
    ]
    return {"capacities": sustained, "rows": result}


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Returns tables of capacities, of the axes' ends, and of simulation times."""
    if not result:
        return []
    speed = [
        {
            "figure": panel,
            "rates": ("even", "beyond or near", "near")[turn],
            "simulations": len(rows),
            "requests": sum(row["num_requests"] for row in rows),
            "took_s": rows[0]["took_s"],
            "processor_s": rows[0]["processor_s"],
        }
        for panel, selected in runs.group_rows(result, "panel").items()
        for turn, rows in runs.group_rows(selected, "turn").items()
    ]
    capacities = []
    for name, selected in runs.group_rows(result, "panel").items():
        curves = runs.latency_curves(selected)
        loads = runs.sustained_loads(selected)
        cells = {system: x.text for system, x in loads.items()}
        for system in curves.keys() - {"paged"} if "paged" in curves else ():
            if loads[system].relation == "is":
                ratio = load_ratio(curves["paged"], curves[system], runs.LATENCY_BOUND)
                cells[system] += f" ({ratio:.2f})"
        row_cells = [cells.get(system, "-") for system in settings.SYSTEMS]
        capacities.append((name, published.PANELS[name].title, *row_cells))
    return [
        lab.Sheet(
            f"requests/s at {runs.LATENCY_BOUND} s a token",
            ("figure", "load", *settings.SYSTEMS),
            capacities,
            "In brackets: load of the paged system as a multiple.",
        ),
        lab.row_sheet(
            "at the end of the published axis",
            [
                x | {"preempted": x["num_preempted"] / x["num_requests"]}
                for x in axis_end_rows(result)
            ],
            {
                "figure": "panel",
                "system": "system",
                "requests/s": "rate_per_s",
                "s a token": "normalised_s",
                "batch": "batch",
                "step": "step_s",
                "memory with tokens": "tokens_share",
                "preempted a request": "preempted",
                "recomputed": "recomputed_share",
            },
            "Latencies are lower bounds if the queue grows without limit.",
        ),
        *lab.metric_sheets({"time to simulate, compilation included": speed}),
    ]


def plot(axes: np.ndarray, result: list[lab.Row]) -> None:
    """Draws four panels of figure 12, the gains of all, then figure 13.

    The other axes are removed. A result without these panels has all of its curves.
    """
    free = iter(axes.ravel())
    panels = runs.group_rows(result, "panel")
    drawn = [name for name in panels if name in CURVES] or [*panels]
    gains = {}
    for name, rows in panels.items():
        loads = runs.sustained_loads(rows)
        curves = runs.latency_curves(rows)
        panel = published.PANELS[name]
        title = f"{name}: {panel.title}"
        oracle = loads.get(published.ORACLE)
        if "paged" in loads and oracle is not None and oracle.relation == "is":
            both = curves["paged"], curves[published.ORACLE]
            gain = load_ratio(*both, runs.LATENCY_BOUND)
            prefix = "at least "
            if loads["paged"].relation == "is":
                prefix = ""
                gains[name] = gain
            title = f"{name}, {panel.title}: {prefix}{gain:.1f} times the load of "
            title += published.ORACLE
        if name in drawn:
            ax = next(free)
            runs.draw_curves(ax, rows, title)
            label = f"compared at {runs.LATENCY_BOUND:g} s"
            lab.draw_reference_line(ax, runs.LATENCY_BOUND, label)
            ax.set_xlim(0, panel.axis)
            ax.legend()
    for figure in ("12", "14"):
        selected = {name: x for name, x in gains.items() if name.startswith(figure)}
        if len(selected) > 1:
            _draw_gains(next(free), figure, selected)
    last = runs.group_rows(axis_end_rows(result), "panel")
    for name, printed in published.FIGURE_BATCHES.items():
        if selected := [x for x in last.get(name, ()) if x["system"] in printed]:
            _batches(next(free), name, selected)
    for ax in free:
        ax.remove()


def _draw_gains(ax: "Axes", figure: str, gains: dict[str, float]) -> None:
    """Draws the load over that of Orca (Oracle) by panel of a figure."""
    over_models = published.CLAIMS.published("load")[published.ORACLE]
    printed = dict.fromkeys(("12a", "12b", "12c"), over_models)
    printed |= {x: [gain] for x, gain in published.CLAIMS.published("several").items()}
    label = "the paper's; a line: over models"
    for x, name in enumerate(gains):
        if name in printed:
            y = printed[name]
            look = {"linewidth": 1.2, "markersize": 6}
            lab.draw_curve(ax, [x] * len(y), y, "published", label, **look)
            label = ""
    look = {"linestyle": "", "markersize": 6}
    lab.draw_curve(ax, range(len(gains)), [*gains.values()], "paged", "paged", **look)
    lab.draw_reference_line(ax, 1.0)
    ax.set_xticks(range(len(gains)), [*gains])
    title = f"Figure {figure}: {min(gains.values()):.1f} to {max(gains.values()):.1f} "
    title += f"times the load of {published.ORACLE}"
    lab.set_labels(ax, title, "", "gain in load [ratio]")
    ax.set(xlim=(-0.5, len(gains) - 0.5), ylim=(0, 1.1 * ax.dataLim.y1))
    ax.legend()


def _batches(ax: "Axes", name: str, rows: list[lab.Row]) -> None:
    """Draws bars of the simulated and, in grey, of the published batch sizes."""
    reference = published.FIGURE_BATCHES[name]
    systems = [row["system"] for row in rows]
    for i, row in enumerate(rows):
        system = row["system"]
        printed: dict[str, Any] = {"label": None if i else "the paper's"}
        for dx, height, look in (
            (-0.2, row["batch"], lab.system_style(system).bar),
            (0.2, reference[system], lab.system_style("published").bar | printed),
        ):
            ax.bar_label(ax.bar(i + dx, height, 0.4, **look), fmt="%.0f")
    names = [system.replace("Orca ", "").strip("()") for system in systems]
    ax.set_xticks(range(len(rows)), names)
    data = published.PANELS[name].data
    rate = rows[0]["rate_per_s"]
    largest_row = max(rows, key=lambda row: row["batch"])
    title = f"13{'ab'[data == 'Alpaca']}, {data}, {rate:g} requests/s: "
    title += f"{largest_row['system']} runs {largest_row['batch']:.0f} at once"
    lab.set_labels(ax, title, "", "batch [requests]")
    ax.legend()


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    published.claims,
    summary,
    metrics,
    panels=lab.Panels(4, 2, 3.0),
    switch=("traces", False),
)
