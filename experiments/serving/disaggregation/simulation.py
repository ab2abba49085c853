"""Simulates DistServe's experiments: prefill and decode on separate GPUs.

Prefill and decode on one GPU delay each other. On separate GPUs, each phase has its own
tensor-parallel degree, and keys and values are transferred in between. Step times are
the published fits. Prefill queues are compared with formulas of queueing theory.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import lab
from experiments.serving.disaggregation import queues, runs, settings
from experiments.serving.disaggregation.queues import (
    MACHINE_NAMES,
    SERVICE_S,
    QueueTimes,
)
from experiments.serving.disaggregation.runs import Goodputs, PlacementLoads
from experiments.serving.disaggregation.settings import EXAMPLE, KNOWN, Config, Instance
from jaxkv.simulation import PhasePlacement, ReplicaRole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (3, 2)
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


class Result(lab.ResultRecord):
    """Simulated placements and queues."""

    alone: PlacementLoads = lab.column("single replicas of each role")
    split: PlacementLoads = lab.column("prefill and decode replicas with transfers")
    links: PlacementLoads = lab.column("the example with slower links")
    queues: QueueTimes = lab.column("prefill queues of 1 or 2 devices")

    @property
    @lab.computed_column()
    def goodput(self) -> Goodputs:
        """Goodput of each application; the paper's example is first."""
        return runs.application_goodputs(self.alone, self.split)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates all parts."""
    cases: list[tuple[str, ReplicaRole, Instance, float]] = []
    for name in (EXAMPLE, *config.applications):
        x = KNOWN[name]
        phases: dict[ReplicaRole, tuple[int, ...]]
        phases = {"both": (x.colocated_gpus,), "prefill": x.ways, "decode": x.ways}
        for role, ways in phases.items():
            for instance in [Instance(x.model, num) for num in ways]:
                max_rate = runs.search_limits(x, instance)[role]
                cases += [
                    (name, role, instance, part * max_rate) for part in config.shares
                ]
    progress.show("one machine, either phase or both")
    single = runs.serve_single_replicas(cases, config, progress)
    goodputs = runs.phase_goodputs(single)
    placements = [
        (name, *runs.best_placement(name, goodputs)) for name in config.applications
    ]
    # The example's placement is the paper's, not the best one here.
    reads, decodes = goodputs.where(name=EXAMPLE).rate_per_s
    one = Instance(KNOWN[EXAMPLE].model, 1).replica
    sustained = min(2 * reads, decodes)
    placements += [
        (EXAMPLE, PhasePlacement(one, one, 2, 1, link), sustained)
        for link in (settings.LINK, *config.links)
    ]
    top = [1.15 * x / max(config.shares) for x in config.shares if x >= 0.2]
    progress.show("machines for either phase")
    both = runs.serve_split_replicas(
        [
            (name, x, share * max_rate)
            for name, x, max_rate in placements
            if max_rate > 0
            for share in top
        ],
        config,
        progress,
    )
    is_slow = (both.name == EXAMPLE) & (both.link != settings.LINK)
    return Result(
        alone=single,
        split=both.at(~is_slow),
        links=both.at(is_slow),
        queues=queues.simulate_queues(config, progress),
    )


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the simulated parts."""
    goodput = result.goodput
    line = result.queues
    together = goodput.together_per_card_per_s[0]
    split = goodput.split_per_card_per_s[0]
    reads, decodes = runs.phase_goodputs(result.alone).rate_per_s[:2]
    yield lab.measured("example", together, quantity="both phases on one GPU")
    yield lab.measured("example", reads, quantity="prefill on one GPU")
    yield lab.measured("example", decodes, quantity="decode on one GPU")
    coupled = "two GPUs that read and one that decodes, for each GPU"
    yield lab.measured("example", split, quantity=coupled)
    yield lab.measured("more", split / together if together > 0 else math.nan)
    for row in goodput.at(slice(1, None)).rows():
        together = row["together_per_card_per_s"]
        split_rate = row["split_per_card_per_s"]
        if math.isnan(split_rate):
            continue
        (low, high), where = KNOWN[row["name"]].ratio, KNOWN[row["name"]].where
        yield lab.measured(
            "application" if low == high else "span",
            split_rate / together if together > 0 else math.nan,
            published=low if low == high else (low, high),
            name=row["name"],
            where=where,
            ratio=f"{low:g}" if low == high else f"{low:g} to {high:g}",
            rates=f"{split_rate:.3g} against {together:.3g} requests/s for each GPU, "
            f"{row['placement']}",
        )
    size = 512 * settings.kv_bytes("opt-66b") / 2**30
    yield lab.measured("kv", size)
    yield lab.measured("need", 10 * size)
    chat = result.split.where(name="chat, 66B")
    if len(chat):
        quick = float(chat.quick_share.min())
        slowest_s = float(chat.transfer_s.max())
        yield lab.measured(
            "transfers", quick, link=settings.LINK / 1e9, most=1000 * slowest_s
        )
    off = abs(line.off).max(1)
    error_shares = (line.error_s / line.waiting_s).max(1)
    words: dict[str, Any] = {"low": line.rate.min(), "high": line.rate.max()}
    words["service"] = SERVICE_S
    for machine, max_off, error in zip(MACHINE_NAMES, off, error_shares, strict=True):
        yield lab.measured(
            "queue", 100 * max_off, machine=machine, error=100 * error, **words
        )


def metrics(result: Result) -> dict[str, object]:
    """Returns every load, the goodputs and the queues."""
    return lab.metrics(result) | {"queues": result.queues.rows()}


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of placements, and of queues against formulas."""
    heading = "requests/s for each GPU"
    links = [
        {
            "GB/s": link / 1e9,
            heading: f"{runs.goodput_per_objective(selected):.3g}",
            "transfer_s": selected.transfer_s.min(),
        }
        for link in result.links.distinct("link")
        for selected in [result.links.where(link=link)]
    ]
    waits = zip(result.queues.rows(), result.queues.off.flat, strict=True)
    return [
        result.goodput.sheet(
            "requests a second, for each GPU, of which 90 % keep both objectives",
            note="The example: the rate at which 90 % meet each objective separately, "
            "as in figure 1.",
        ),
        runs.phase_goodputs(result.alone).sheet("single-phase replicas"),
        lab.row_sheet(
            "the example over slower links",
            links,
            {
                "GB/s": "GB/s",
                heading: heading,
                "95 % of transfers, at the lowest rate": "transfer_s",
            },
            "Transfers from one machine are serialized.",
        ),
        lab.row_sheet(
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


ROLE_NAMES = {"both": "both phases", "prefill": "prefill only"}
ROLE_NAMES |= {"decode": "decode only", "split": "split"}
"""Labels of the roles in figures."""


RATE_LABEL = "load [requests/s per GPU]"


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws 6 panels."""
    single, split = (x.where(name=EXAMPLE) for x in (result.alone, result.split))
    both, prefill, decode = (
        single.where(role=x) for x in ("both", "prefill", "decode")
    )
    first_s, gap_s = KNOWN[EXAMPLE].objectives
    lines = [both, prefill, split]
    label = "first token [s]"
    _draw_tail(axes[0, 0], "ttft_s", lines, first_s, label)
    lines = [both, decode, split]
    label = "time per token [s]"
    _draw_tail(axes[0, 1], "tpot_s", lines, gap_s, label)
    goodputs = result.goodput.rows()
    example = next((row for row in goodputs if row["name"] == EXAMPLE), None)
    _draw_attained(axes[1, 0], [both, split], example)
    _draw_goodput(axes[1, 1], goodputs)
    _draw_links(axes[2, 0], result.links, split)
    _draw_queues(axes[2, 1], result.queues)


def _draw_tail(
    ax: "Axes", field: str, lines: list[PlacementLoads], goal: float, label: str
) -> None:
    sustained = {}
    for loads in filter(len, lines):
        values = getattr(loads, field)
        name = ROLE_NAMES[loads.role[0]]
        values = np.where(np.isfinite(values), values, np.nan)
        lab.draw_curve(ax, loads.rate_per_card, values, name, name)
        sustained[name] = float(loads.rate_per_card[values <= goal].max(initial=0.0))
    lab.draw_reference_line(ax, goal, "objective")
    title = f"{label.partition(' [')[0].capitalize()}, 90 %"
    if sustained:
        best_name = max(sustained, key=lambda name: sustained[name])
        title += f": {best_name} has most load within the objective"
    lab.set_labels(ax, title, RATE_LABEL, label, ylim=(0, 3 * goal))
    ax.set_xlim(left=0)
    ax.legend()


def _draw_attained(
    ax: "Axes", lines: list[PlacementLoads], goodput: dict[str, Any] | None
) -> None:
    for loads in filter(len, lines):
        name = ROLE_NAMES[loads.role[0]]
        x = loads.rate_per_card
        lab.draw_curve(ax, x, 100 * loads.attained, name, name)
    lab.draw_reference_line(
        ax, ATTAINMENT_PERCENT, f"{ATTAINMENT_PERCENT} % of the requests"
    )
    title = "Requests that keep both objectives"
    if goodput:
        title = (
            f"{goodput['together_per_card_per_s']:.2g} requests/s keep the objectives "
        )
        title += f"together, {goodput['split_per_card_per_s']:.2g} split"
    y = "objectives kept [%]"
    lab.set_labels(ax, title, RATE_LABEL, y, ylim=(0, 104))
    ax.set_xlim(left=0)
    ax.legend()


ATTAINMENT_PERCENT = 90
"""Percentage of requests that must meet the objectives."""


def _draw_goodput(ax: "Axes", rows: list[lab.Row]) -> None:
    gains = []
    for i, row in enumerate(rows):
        together = row["together_per_card_per_s"]
        split = row["split_per_card_per_s"]
        base = together if together > 0 else np.nan
        pairs = ((-0.2, together, "both phases"), (0.2, split, "split"))
        for dx, value, name in pairs:
            ax.bar(
                i + dx,
                value / base,
                0.38,
                label=None if i else name,
                **lab.system_style(name).bar,
            )
        published = {*KNOWN[row["name"]].ratio}
        look = {"linewidth": 1.2, "markersize": 6, "markeredgecolor": "white"}
        label = "" if i else "published gain, a line: its range over models"
        x = [i + 0.2] * len(published)
        lab.draw_curve(ax, x, sorted(published), "published", label, **look)
        gains.append(split / base)
    names = [
        row["name"].replace(", ", "\n").replace("summaries", "sum-\nmaries")
        for row in rows
    ]
    ax.set_xticks(range(len(rows)), names)
    title = "Goodput, together and split"
    if np.isfinite(gains).any():
        title = f"Splitting gains {np.nanmin(gains):.1f} to {np.nanmax(gains):.1f} "
        title += "times the goodput"
        ax.legend()
    lab.set_labels(ax, title, "", "goodput / together [ratio]")


def _draw_links(ax: "Axes", links: PlacementLoads, split: PlacementLoads) -> None:
    speeds = {
        link / 1e9: runs.goodput_per_objective(links.where(link=link))
        for link in links.distinct("link")
    }
    if len(split):
        speeds[settings.LINK / 1e9] = runs.goodput_per_objective(split)
    lab.draw_curve(ax, [*speeds], [*speeds.values()], "split")
    title = "Goodput by the speed of the link"
    if speeds:
        best = max(speeds.values())
        enough = min(x for x, y in speeds.items() if y >= 0.95 * best)
        title = f"A link of {enough:.0f} GB/s gives 95 % of the goodput"
    y = "goodput [requests/s]"
    lab.set_labels(ax, title, "GPU to GPU [GB/s]", y, xscale="log")
    lab.label_log_axis(ax.xaxis)
    ax.set_ylim(bottom=0)


MACHINE_COLORS = (lab.BLACK, lab.ORANGE, lab.GREEN)


def _draw_queues(ax: "Axes", queue_times: QueueTimes) -> None:
    speeds = (1, queues.SPEED_UP, 2)
    machines = zip(MACHINE_NAMES, speeds, MACHINE_COLORS, "osv", strict=True)
    off = [0.0]
    for i, (machine, speed_up, color, marker) in enumerate(machines):
        rates = np.linspace(0.01, 0.93, 200) * speed_up / SERVICE_S
        exact = [queues.formula_s(machine, rate) for rate in rates]
        lab.draw_curve(ax, rates, exact, color, marker="", linewidth=1)
        look = {"marker": marker, "linestyle": ""}
        lab.draw_curve(
            ax, queue_times.rate, queue_times.simulated_s[i], color, machine, **look
        )
        reference = np.array(
            [queues.formula_s(machine, rate) for rate in queue_times.rate]
        )
        off += np.abs(queue_times.simulated_s[i] / reference - 1).tolist()
    title = f"Simulated queues (points) are within {100 * np.nanmax(off):.1f} % "
    title += "of the M/D/1 formula"
    seconds = "mean first token [s]"
    lab.set_labels(ax, title, "load [requests/s]", seconds, ylim=(0, 0.45))
    ax.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(3, 2)
)
