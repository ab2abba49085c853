"""What do users feel of how prompts are read, and what does reading in chunks buy?

While a long prompt is read whole, who is being answered waits: a stall. Read in chunks,
each in one step with those who decode, it delays nobody for long, and its own first
token little: the experiments of Sarathi-Serve, on data sheets in place of its GPUs.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.framework import Part, Record, Sheet, Study, column
from experiments.serving.chunked_prefill import drawing, published, runs, settings
from experiments.serving.chunked_prefill.runs import Loads, Timeline
from jaxkv import validation
from jaxkv.progress import QUIET, Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    models: tuple[str, ...] = ("Yi-34B", "Mistral-7B")
    """Names in `settings.MODELS`; the first is looked at closely."""
    data: tuple[str, ...] = ("openchat", "arxiv")
    """Names in `settings.DATA`; the first is looked at closely."""
    shares: tuple[float, ...] = (0.04, 0.09, 0.15, 0.22, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
    """Rates at which capacities are looked for, as shares of that at which reading
    prompts alone fills the machine; ascending."""
    budgets: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Tokens of a step at which chunks are compared; ascending."""
    share: float = 0.4
    """Rate of that comparison, and of the four ways."""
    seconds: float = 600.0
    """Simulated, of each."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what is not known, or leaves nothing to compare."""
        validation.among(self, "models", known=settings.MODELS, least=1)
        validation.among(self, "data", known=settings.DATA, least=1)
        validation.ascending(self, "shares", "budgets", least=2)
        validation.above(self, "shares", "share", "seconds")
        # A token for each sequence that decodes.
        validation.at_least(self, "budgets", low=settings.MAX_SLOTS)
        validation.at_least(self, "seed", low=0)


CONFIGS = {
    "smoke": Config(
        models=("Yi-34B",),
        data=("openchat",),
        shares=(0.1, 0.4),
        budgets=(256, 2048),
        seconds=20.0,
    ),
    "paper": Config(),
}


class Result(Record):
    """What was simulated."""

    timeline: Timeline = column("of the four ways")
    ways: Loads = column("the four ways at one rate, and under one budget")
    budgets: Loads = column("chunks of several sizes, mixed, at the same rate")
    loads: Loads = column("systems against the rate")
    chunk: np.ndarray = column("tokens of a chunk")
    chunk_cost: np.ndarray = column("time of a prompt in such chunks, over the whole's")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates everything; ended early, it has what is done."""
    models = [settings.MODELS[name] for name in config.models]
    data = [settings.DATA[name] for name in config.data]
    how: Any = {"seconds": config.seconds, "seed": config.seed}
    # As many requests for all, so that they share a program.
    most = max(config.shares)
    how["num"] = max(
        runs.num_requests(model, each, most, config.seconds)
        for model in models
        for each in data
    )
    cases = [
        (model, each, [(system, share) for share in config.shares])
        for model in models
        for each in data
        for system in settings.SYSTEMS
    ]
    progress.show("four ways to read prompts")
    timeline = runs.timeline(models[0], data[0], settings.WAYS)
    four = [(way, config.share) for way in settings.WAYS]
    ways = [runs.serve(models[0], each, four, **how) for each in data]
    budgets = [(settings.both(budget), config.share) for budget in config.budgets]
    sweep = runs.serve(models[0], data[0], budgets, **how)
    loads = [
        runs.serve(*case, **how)
        for case in progress.track(cases, "systems and rates", "systems")
    ]
    chunk = sorted({*config.budgets, *published.CHUNKS})
    seconds = [
        settings.prompt_s(models[0], published.LONG_PROMPT, size)
        for size in (None, *chunk)
    ]
    return Result(
        timeline=timeline,
        ways=Loads.joined(ways),
        budgets=sweep,
        loads=Loads.joined(loads),
        chunk=np.array(chunk),
        chunk_cost=np.array(seconds[1:]) / seconds[0],
    )


def metrics(result: Result) -> dict[str, Any]:
    """Lists every load, and the capacities."""
    return {
        "ways": result.ways.rows(),
        "budgets": result.budgets.rows(),
        "capacities": runs.capacities(result.loads),
        "loads": result.loads.rows(),
    }


def summary(result: Result) -> list[Part]:
    """Puts ways, budgets and capacities beside each other."""
    names = ("budget", "rate", "ttft_s", "tbt_p50_s", "tbt_p99_s", "longest_s")
    kinds = ("strict", "relaxed")
    rows = []
    for x in runs.capacities(result.loads):
        last = result.loads.where(model=x["model"], data=x["data"]).rate.max()
        rates = [x[f"{kind}_per_s"] for kind in kinds]
        # ">" where no rate that was tried is too much.
        cells = [f"{'> ' if rate >= last else ''}{rate:.2f}" for rate in rates]
        rows.append((x["model"], x["data"], x["system"], *cells))
    model = result.ways.model[0] if len(result.ways) else ""
    title = f"four ways to read prompts, {model}"
    return [
        result.ways.sheet(title, "data", "system", *names),
        result.budgets.sheet(f"chunks, mixed, {model}", *names),
        Sheet(
            "requests a second that a system sustains",
            ("model", "data", "system", *kinds),
            rows,
            "P99 time between tokens within the objective: 0.2 and 1 s for Yi-34B, 0.1 "
            "and 0.5 s for Mistral-7B; and a median delay of 2 s at most. Models that "
            "the paper runs in pipeline stages, Llama-2-70B and Falcon-180B, are left "
            "out.",
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
        panels=(2, 2),
        panel_size_inches=(3.8, 2.6),
    ),
)
