"""What does it buy to read prompts on other GPUs than those that decode?

Both phases on one GPU keep each other from their promises. Apart, each takes the GPUs
that suit it, and keys and values cross over in between: the experiments of DistServe,
with the times of steps that its authors published, and queues beside their formulas.
"""

import math
from collections.abc import Iterator
from typing import Any

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
from experiments.serving.disaggregation import drawing, queues, runs, settings
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
    one, sustained = Instance(KNOWN[EXAMPLE].model, 1).machine, min(2 * reads, decodes)
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
    found, queues = runs.goodputs(result.alone, result.split), result.queues
    here, (reads, decodes) = found[0], runs.phases(result.alone)[:2]
    together, split = here["together_per_card_per_s"], here["split_per_card_per_s"]
    yield ours("example", together, what="both phases on one card")
    yield ours("example", reads["rate_per_s"], what="prompts alone")
    yield ours("example", decodes["rate_per_s"], what="decoding alone")
    coupled = "two cards that read and one that decodes, for each card"
    yield ours("example", split, what=coupled)
    yield ours("more", split / together if together > 0 else math.nan)
    for row in found[1:]:
        yield from _application(row)
    yield from _transfers(result.split)
    off, known = abs(queues.off).max(1), (queues.error_s / queues.waiting_s).max(1)
    words: dict[str, Any] = {"low": queues.rate.min(), "high": queues.rate.max()}
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
            published=low,
            name=row["name"],
            where=KNOWN[row["name"]].where,
            ratio=f"{low:g}" if low == high else f"{low:g} to {high:g}",
            rates=f"{apart:.3g} against {together:.3g} requests/s for each card, "
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


plot = drawing.plot
PANELS, PANEL_SIZE_INCHES = (2, 3), (3.2, 2.5)
