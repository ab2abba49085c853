"""What does it buy to read prompts on other GPUs than those that decode?

Both phases on one GPU keep each other from their promises. Apart, each takes the GPUs
that suit it, and keys and values cross over in between: the experiments of DistServe,
with the times of steps that its authors published, and queues beside their formulas.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.framework import (
    Ours,
    Part,
    Record,
    beside,
    column,
    ours,
    report,
    table,
)
from experiments.plotting import style
from experiments.serving.disaggregation import queues, runs, settings
from experiments.serving.disaggregation.queues import MACHINES, SERVICE_S, Queues
from experiments.serving.disaggregation.runs import Loads
from experiments.serving.disaggregation.settings import (
    EXAMPLE,
    KNOWN,
    LINK,
    Config,
    Instance,
)
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation.disaggregated import Role, Split

PANELS, PANEL_SIZE_INCHES = (2, 3), (3.2, 2.5)
CONFIGS = {
    "smoke": Config(
        applications=("chat, 13B",),
        shares=(0.2, 0.6),
        links=(2e9,),
        seconds=20.0,
        queue_loads=(0.3,),
        queue_requests=500,
        queue_seeds=8,
    ),
    "paper": Config(),
}


class Result(Record):
    """What was simulated."""

    alone: Loads = column("single machines: for both phases, and for either")
    split: Loads = column("machines for either phase, coupled")
    links: Loads = column("the example's, with slower ways for keys and values")
    queues: Queues = column("prompts that wait for one machine, or two")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates everything."""
    asked: list[tuple[str, Role, Instance, float]] = []
    for name in (EXAMPLE, *config.applications):
        x = KNOWN[name]
        phases: dict[Role, tuple[int, ...]]
        phases = {"both": (x.together,), "prefill": x.ways, "decode": x.ways}
        for role, ways in phases.items():
            for instance in [Instance(x.model, num) for num in ways]:
                most = runs.bounds(x, instance)[role]
                asked += [(name, role, instance, part * most) for part in config.shares]
    progress.show("one machine, either phase or both")
    alone = runs.alone(asked, config, progress)
    found = runs.phases(alone)
    placements = [(name, *runs.best(name, found)) for name in config.applications]
    # The example's is as the paper has it, whatever would be best here.
    reads, decodes = (x["rate_per_s"] for x in found if x["name"] == EXAMPLE)
    one, sustained = Instance(KNOWN[EXAMPLE].model, 1).replica, min(2 * reads, decodes)
    placements += [
        (EXAMPLE, Split(one, one, 2, 1, link), sustained)
        for link in (LINK, *config.links)
    ]
    top = [1.15 * x / max(config.shares) for x in config.shares if x >= 0.2]
    progress.show("machines for either phase")
    both = runs.split(
        [
            (name, x, share * most)
            for name, x, most in placements
            if most > 0
            for share in top
        ],
        config,
        progress,
    )
    is_slow = (both.name == EXAMPLE) & (both.link != LINK)
    return Result(
        alone=alone,
        split=both.at(~is_slow),
        links=both.at(is_slow),
        queues=queues.measure(config, progress),
    )


@beside(__file__).judges
def claims(result: Result) -> Iterator[Ours]:
    """Finds everything; parts that were not simulated are left out."""
    found, line = runs.goodputs(result.alone, result.split), result.queues
    here, (reads, decodes) = found[0], runs.phases(result.alone)[:2]
    together, split = here["together_per_card_per_s"], here["split_per_card_per_s"]
    yield ours("example", together, what="both phases on one GPU")
    yield ours("example", reads["rate_per_s"], what="prompts alone")
    yield ours("example", decodes["rate_per_s"], what="decoding alone")
    coupled = "two GPUs that read and one that decodes, for each GPU"
    yield ours("example", split, what=coupled)
    yield ours("more", split / together if together > 0 else math.nan)
    for row in found[1:]:
        yield from _application(row)
    yield from _transfers(result.split)
    off, known = abs(line.off).max(1), (line.error_s / line.waiting_s).max(1)
    words: dict[str, Any] = {"low": line.rate.min(), "high": line.rate.max()}
    words["service"] = SERVICE_S
    for machine, most, error in zip(MACHINES, off, known, strict=True):
        yield ours("queue", 100 * most, machine=machine, error=100 * error, **words)


def _application(row: dict[str, Any]) -> Iterator[Ours]:
    together, apart = row["together_per_card_per_s"], row["split_per_card_per_s"]
    low, high = KNOWN[row["name"]].ratio
    if not math.isnan(apart):
        yield ours(
            "application" if low == high else "span",
            apart / together if together > 0 else math.nan,
            published=low if low == high else (low, high),
            name=row["name"],
            where=KNOWN[row["name"]].where,
            ratio=f"{low:g}" if low == high else f"{low:g} to {high:g}",
            rates=f"{apart:.3g} against {together:.3g} requests/s for each GPU, "
            f"{row['placement']}",
        )


def _transfers(split: Loads) -> Iterator[Ours]:
    size = 512 * settings.kv_bytes("opt-66b") / 2**30
    yield ours("kv", size)
    yield ours("need", 10 * size)
    here = split.where(name="chat, 66B")
    if len(here):
        quick, slowest_s = float(here.quick_share.min()), float(here.transfer_s.max())
        yield ours("transfers", quick, link=LINK / 1e9, most=1000 * slowest_s)


def metrics(result: Result) -> dict[str, Any]:
    """Lists every load, what GPUs sustain, and the queues."""
    found = runs.goodputs(result.alone, result.split)
    more = {"goodput": found, "queues": result.queues.rows()}
    return table.metrics(result) | more


def summary(result: Result) -> list[Part]:
    """Puts placements, and queues and formulas, beside each other."""
    each = "requests/s for each GPU"
    links = [
        {
            "GB/s": link / 1e9,
            each: f"{runs.each(here):.3g}",
            "transfer_s": here.transfer_s.min(),
        }
        for link in result.links.distinct("link")
        for here in [result.links.where(link=link)]
    ]
    waits = zip(result.queues.rows(), result.queues.off.flat, strict=True)
    return [
        report.row_sheet(
            "requests a second, for each GPU, of which 90 % keep both objectives",
            runs.goodputs(result.alone, result.split),
            {
                "application": "name",
                "together": "together_per_card_per_s",
                "split": "split_per_card_per_s",
                "placement": "placement",
            },
            "Of the example, 90 % keep either objective, as figure 1 has it.",
        ),
        report.row_sheet(
            "one phase alone",
            runs.phases(result.alone),
            {
                "application": "name",
                "phase": "role",
                "GPUs": "ways",
                each: "rate_per_s",
            },
        ),
        report.row_sheet(
            "the example over slower links",
            links,
            {
                "GB/s": "GB/s",
                each: each,
                "95 % of transfers, at the lowest rate": "transfer_s",
            },
            "What a machine sends goes one after the other.",
        ),
        report.row_sheet(
            "queues of prompts",
            [row | {"off_share": off} for row, off in waits],
            {
                "machine": "machine",
                "requests/s": "rate_per_s",
                "formula": "formula_s",
                "simulated": "simulated_s",
                "waiting off by": "off_share",
            },
        ),
    ]


GREY = "0.55"
LOOKS = {"both": ("both phases", 6), "prefill": ("prompts alone", 1)}
LOOKS |= {"decode": ("decoding alone", 3), "split": ("split", 5)}


RATES = "requests/s for each GPU"


def plot(axes: Any, result: Result) -> None:
    """Draws six panels."""
    alone, split = (x.where(name=EXAMPLE) for x in (result.alone, result.split))
    both, prefill, decode = (alone.where(role=x) for x in ("both", "prefill", "decode"))
    first_s, gap_s = KNOWN[EXAMPLE].objectives
    _draw_tail(axes[0, 0], "ttft_s", [both, prefill, split], first_s)
    _draw_tail(axes[0, 1], "tpot_s", [both, decode, split], gap_s)
    axes[0, 0].set(title="OPT-13B, 512 + 64 tokens", ylabel="first token, P90, s")
    label = "per output token, P90, s"
    axes[0, 1].set(title="the same, between tokens", ylabel=label)
    _draw_attained(axes[0, 2], [both, split])
    _draw_goodput(axes[1, 0], runs.goodputs(result.alone, result.split))
    _draw_links(axes[1, 1], result.links, split)
    _draw_queues(axes[1, 2], result.queues)


def _draw_tail(ax: Any, field: str, lines: list[Loads], goal: float) -> None:
    for loads in filter(len, lines):
        values = getattr(loads, field)
        label, color = LOOKS[loads.role[0]]
        values = np.where(np.isfinite(values), values, np.nan)
        style.curve(ax, loads.rate_per_card, values, color, label)
    ax.axhline(goal, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlabel=RATES, ylim=(0, 3 * goal))
    ax.set_xlim(left=0)
    ax.legend()


def _draw_attained(ax: Any, lines: list[Loads]) -> None:
    for loads in filter(len, lines):
        label, color = LOOKS[loads.role[0]]
        rates = loads.rate_per_card
        style.curve(ax, rates, 100 * loads.attained, color, label)
        for values, mark in ((loads.attained_first, ":"), (loads.attained_gap, "--")):
            style.curve(ax, rates, 100 * values, color, mark=mark, linewidth=0.8)
    ax.axhline(90, color=GREY, linewidth=0.8, linestyle=":")
    title = "objectives kept (dotted: first; dashed: between)"
    rates = f"{RATES} (split: 2 read and 1 decodes)"
    style.titled(ax, title, rates, "% of requests")
    ax.set_xlim(left=0)
    ax.legend(loc="lower left")


def _draw_goodput(ax: Any, rows: list[dict[str, Any]]) -> None:
    colors = style.colors()
    for i, row in enumerate(rows):
        together, split = row["together_per_card_per_s"], row["split_per_card_per_s"]
        base = together if together > 0 else np.nan
        for dx, value, color in ((-0.2, together, 6), (0.2, split, 5)):
            bar = ax.bar(i + dx, value / base, 0.36, color=colors[color])
            if np.isfinite(value / base):
                ax.bar_label(bar, [f"{value:.2g}"], fontsize=5)
        for ratio in {*KNOWN[row["name"]].ratio}:
            ax.plot([i + 0.2], [ratio], "D", color=GREY, markersize=3)
    names = [row["name"].replace(", ", "\n") for row in rows]
    ax.set_xticks(range(len(rows)), names)
    ax.tick_params("x", labelsize=6)
    title = "goodput, together and split (grey: published)"
    ax.set(title=title, ylabel=f"{RATES}, relative")


def _draw_links(ax: Any, links: Loads, split: Loads) -> None:
    speeds = {
        link / 1e9: runs.each(links.where(link=link)) for link in links.distinct("link")
    }
    if len(split):
        speeds[settings.LINK / 1e9] = runs.each(split)
    style.curve(ax, [*speeds], [*speeds.values()], 5)
    title = "how fast keys and values must cross over"
    style.titled(ax, title, "link from GPU to GPU, GB/s", RATES, xscale="log")
    ax.set_ylim(bottom=0)


def _draw_queues(ax: Any, found: Queues) -> None:
    machines = zip(MACHINES, (1, queues.SPEED_UP, 2), (6, 5, 3), strict=True)
    for i, (machine, speed_up, color) in enumerate(machines):
        rates = np.linspace(0.01, 0.93, 200) * speed_up / SERVICE_S
        exact = [queues.formula_s(machine, rate) for rate in rates]
        style.curve(ax, rates, exact, color, machine, "-", linewidth=0.8)
        style.curve(ax, found.rate, found.simulated_s[i], color, mark="o")
    title, seconds = (
        "M/D/1: formulas, and simulated (dots)",
        "mean time to the first token, s",
    )
    style.titled(ax, title, "requests/s", seconds, ylim=(0, 0.45))
    ax.legend(loc="upper left")
