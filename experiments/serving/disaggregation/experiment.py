"""What does it buy to read prompts on other GPUs than those that decode?

Both phases on one GPU keep each other from their promises. Apart, each takes the GPUs
that suit it, and keys and values cross over in between: the experiments of DistServe,
with the times of steps that its authors published, and queues beside their formulas.
"""

import dataclasses
from typing import Any

from experiments.framework import Part, Record, Study, column, report, table
from experiments.serving.disaggregation import drawing, published, queues, runs
from experiments.serving.disaggregation.queues import Queues
from experiments.serving.disaggregation.runs import Loads
from experiments.serving.disaggregation.settings import (
    APPLICATIONS,
    EXAMPLE,
    KNOWN,
    LINK,
    Instance,
)
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation.disaggregated import Role, Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    applications: tuple[str, ...] = tuple(APPLICATIONS)
    """Names in `settings.APPLICATIONS`."""
    shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1)
    """Rates at which goodput is looked for, as shares of one that is hardly sustained;
    ascending."""
    links: tuple[float, ...] = (2e9, 4e9, 6e9, 8e9, 12e9, 25e9)
    """Slower ways for keys and values, bytes a second from GPU to GPU."""
    seconds: float = 300.0
    """Simulated, of each."""
    queue_loads: tuple[float, ...] = (0.2, 0.4, 0.6, 0.75)
    """What a machine's time is taken up by, where it is a queue; below 1."""
    queue_requests: int = 16000
    """Of each seed."""
    queue_seeds: int = 384
    """Seeds of each load."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what is not known, or leaves nothing to compare."""
        validation.among(self, "applications", known=APPLICATIONS)
        validation.above(self, "shares", "links", "seconds")
        validation.ascending(self, "shares", least=2)
        validation.ascending(self, "queue_loads", strictly=False)
        validation.within(self, "queue_loads", low=0, high=1, ends="()")
        validation.at_least(self, "queue_requests", "queue_seeds", low=2)
        validation.at_least(self, "seed", low=0)


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
    names = (EXAMPLE, *config.applications)
    asked: list[tuple[str, Role, Instance, float]] = []
    for name in names:
        x = KNOWN[name]
        phases: dict[Role, tuple[int, ...]]
        phases = {"both": (x.together,), "prefill": x.ways, "decode": x.ways}
        for role, ways in phases.items():
            for instance in [Instance(x.model, num) for num in ways]:
                most = runs.bounds(x, instance)[role]
                asked += [(name, role, instance, part * most) for part in config.shares]
    how: Any = {"seconds": config.seconds, "seed": config.seed, "progress": progress}
    progress.show("one machine, either phase or both")
    alone = runs.alone(asked, **how)
    # The example's is as the paper has it, whatever would be best here.
    example = runs.phases(EXAMPLE, alone)
    one, rates = Instance(KNOWN[EXAMPLE].model, 1), [x[1] for x in example.values()]
    two_and_one = (
        Split(one.machine, one.machine, 2, 1, LINK),
        min(2 * rates[0], rates[1]),
    )
    placements = [(name, *runs.best(name, alone)) for name in config.applications]
    placements.append((EXAMPLE, *two_and_one))
    num = sum(most > 0 for _, _, most in placements)
    placements += [
        (EXAMPLE, two_and_one[0]._replace(link=link), two_and_one[1])
        for link in config.links
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
        **how,
    )
    return Result(
        alone=alone,
        split=both.at(slice(num * len(top))),
        links=both.at(slice(num * len(top), None)),
        queues=queues.measure(
            config.queue_loads,
            num=config.queue_requests,
            num_seeds=config.queue_seeds,
            seed=config.seed,
            progress=progress,
        ),
    )


def metrics(result: Result) -> dict[str, Any]:
    """Lists every load, and the queues."""
    told = {"goodput": published.goodputs(result), "queues": result.queues.rows()}
    return table.metrics(result) | told


def summary(result: Result) -> list[Part]:
    """Puts placements, and queues and formulas, beside each other."""
    each = "requests/s for each GPU"
    phases = [
        {"name": name, "role": role, "ways": ways, "rate_per_s": rate}
        for name in result.alone.distinct("name")
        for role, found in runs.phases(name, result.alone).items()
        for ways, rate in found.items()
    ]
    links = [
        {
            "GB/s": link / 1e9,
            each: f"{runs.each(here):.3g}",
            "transfer_s": here.transfer_s.min(),
        }
        for link in result.links.distinct("link")
        for here in [result.links.where(link=link)]
    ]
    waits = [
        row | {"off_share": off}
        for row, off in zip(result.queues.rows(), result.queues.off.flat, strict=True)
    ]
    return [
        report.row_sheet(
            "requests a second, for each GPU, of which 90 % keep both objectives",
            published.goodputs(result),
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
            phases,
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
            waits,
            {
                "machine": "machine",
                "requests/s": "rate_per_s",
                "formula": "formula_s",
                "simulated": "simulated_s",
                "waiting off by": "off_share",
            },
        ),
    ]


STUDIES = (
    Study(
        configs=CONFIGS,
        result=Result,
        run=run,
        plot=drawing.draw,
        claims=published.claims,
        metrics=metrics,
        summary=summary,
        panels=(2, 3),
        panel_size_inches=(3.2, 2.5),
    ),
)
