"""The tree of branches with their regrets, and the tables of the report."""

from collections.abc import Callable

import numpy as np

from experiments import lab
from experiments.decisions.counterfactual.branches import (
    METRICS,
    BranchTable,
    mean_and_width,
)

LEVELS = ("drafter", "eviction", "level_ms", "chunk", "victim")
"""Columns of the decisions, from the root of the tree to its leaves."""
NAMES = ("drafter", "eviction", "order [ms]", "chunk [rows]", "victim")
NUM_LABELLED = 3
"""Levels whose nodes have labels; the ticks name the values of the rest."""
SHOWN = "mean_latency_s"
LABEL_POINTS = 9


def plot(axes: "np.ndarray", table: BranchTable) -> None:
    """Draws the tree, coloured by regret, and the regret of each leaf below it."""
    tree, leaves = axes
    if not len(table):
        return
    regret, width = table.regret(SHOWN)
    num = len(table)
    place = np.arange(num, dtype=float)
    color_of = _colors(regret)
    keys = list(zip(*(getattr(table, x) for x in LEVELS), strict=True))
    centers = {(): float(place.mean())}
    for depth, name in enumerate(LEVELS, 1):
        nodes = list(dict.fromkeys(key[:depth] for key in keys))
        for node in nodes:
            members = [i for i, key in enumerate(keys) if key[:depth] == node]
            x = float(place[members].mean())
            tree.plot(
                (centers[node[:-1]], x, x),
                (depth - 1, depth - 0.6, depth),
                color=color_of(float(regret[members].mean())),
                linewidth=1 + 3 * len(members) / num,
                zorder=2,
            )
            if depth <= NUM_LABELLED and len(nodes) > 1:
                text = _name(name, node[-1])
                tree.text(
                    x,
                    depth,
                    text,
                    ha="center",
                    va="center",
                    fontsize=LABEL_POINTS,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                    zorder=3,
                )
            centers[node] = x
    ticks = [_tick(*names, table) for names in zip(NAMES, LEVELS, strict=True)]
    tree.set_yticks(range(1, len(LEVELS) + 1), ticks)
    tree.set_xticks([])
    tree.set_ylim(len(LEVELS) + 0.1, -0.1)
    tree.grid(visible=False)
    title = f"{num} futures of one state; light branches have low regret"
    lab.set_labels(tree, title, "branches [1]", "decision [level]")
    colors = [color_of(float(x)) for x in regret]
    leaves.errorbar(place, regret, yerr=width, fmt="none", ecolor="0.6", zorder=1)
    leaves.scatter(place, regret, color=colors, s=20, zorder=2)
    best = int(np.argmin(regret))
    for i, marker, color, label in (
        (best, "*", lab.GREEN, "best"),
        (0, "D", lab.BLACK, "unchanged"),
    ):
        look = {"color": lab.colors()[color], "markersize": 7, "label": label}
        leaves.plot(place[i], regret[i], marker, linestyle="", zorder=3, **look)
    lab.draw_reference_line(leaves, 0.0)
    leaves.legend(loc="best")
    leaves.set_xticks([])
    title = f"Unchanged {regret[0]:.2f} s, worst {regret.max():.2f} s above the best"
    y = "regret, mean latency [s]"
    lab.set_labels(leaves, title, "branches, as above [1]", y)
    for ax in axes:
        ax.set_xlim(-1, num)


def _name(level: str, value: object) -> str:
    if level == "drafter":
        return "no drafts" if value == "none" else "n-gram"
    return f"{int(value):,}" if level == "level_ms" else str(value)  # ty: ignore


def _tick(name: str, level: str, table: BranchTable) -> str:
    """Returns the name of a level, with its values from left to right."""
    if LEVELS.index(level) < NUM_LABELLED:
        return name
    values = [str(x).split("_")[0] for x in dict.fromkeys(getattr(table, level))]
    return "\n".join([name, *([" | ".join(values)] if len(values) > 1 else [])])


def _colors(values: np.ndarray) -> Callable[[float], np.ndarray]:
    """Returns a function from regrets to colours, light for small ones."""
    shades = lab.sequential_colors(np.linspace(0, 1, 101))
    low, high = float(values.min()), float(values.max())

    def color(value: float) -> np.ndarray:
        share = (value - low) / max(high - low, 1e-12)
        return shades[round(100 * min(max(share, 0.0), 1.0))]

    return color


def summary(result: object, table: BranchTable) -> list[lab.ReportPart]:
    """Returns the tables of the report: metrics, costs, regrets, single decisions."""
    parts = [x for x in lab.sheets(result) if getattr(x, "title", "") != "branches"]
    if not len(table):
        return parts
    columns = {name: name for name in LEVELS}
    rows = []
    for i in range(len(table)):
        row = {name: getattr(table, name)[i] for name in LEVELS}
        row |= {name: getattr(table, name)[i] for name in ("num_preempted", "num_open")}
        for metric in METRICS:
            row[metric] = float(getattr(table, metric)[i].mean())
            regret, width = table.regret(metric)
            row[f"regret_{metric}"] = float(regret[i])
            row[f"width_{metric}"] = float(width[i])
        rows.append(row)
    order = np.argsort([row[f"regret_{SHOWN}"] for row in rows], kind="stable")
    columns |= {
        "preempted": "num_preempted",
        "open": "num_open",
        "mean latency": "mean_latency_s",
        "regret": f"regret_{SHOWN}",
        "+-": f"width_{SHOWN}",
        "p90": "p90_latency_s",
        "regret of p90": "regret_p90_latency_s",
        "+- of p90": "width_p90_latency_s",
        "mean job": "mean_job_s",
        "regret of jobs": "regret_mean_job_s",
        "+- of jobs": "width_mean_job_s",
    }
    note = "Sorted by regret; the first row of the tree is the unchanged policy."
    sheet = lab.row_sheet("regret by branch", [rows[i] for i in order], columns, note)
    return [*parts, decision_sheet(table), sheet]


def decision_sheet(table: BranchTable) -> lab.ReportPart:
    """Returns what each single decision changes, all others being averaged."""
    rows = []
    for level in LEVELS:
        column = getattr(table, level)
        values = list(dict.fromkeys(column.tolist()))
        base = {m: getattr(table, m)[column == values[0]].mean(axis=0) for m in METRICS}
        for value in values[1:]:
            row: dict[str, object] = {"level": level, "value": str(value)}
            for metric in METRICS:
                branch_values = getattr(table, metric)[column == value].mean(axis=0)
                mean, width = mean_and_width(branch_values - base[metric])
                row[metric] = float(mean)
                row[f"width_{metric}"] = float(width)
            rows.append(row | {"base": str(values[0])})
    columns = {
        "decision": "level",
        "value": "value",
        "instead of": "base",
        "mean latency": "mean_latency_s",
        "+-": "width_mean_latency_s",
        "p90": "p90_latency_s",
        "+- of p90": "width_p90_latency_s",
        "mean job": "mean_job_s",
        "+- of jobs": "width_mean_job_s",
    }
    note = "Differences in s within a seed, averaged over all branches; 90 % intervals."
    return lab.row_sheet("single decisions", rows, columns, note)
