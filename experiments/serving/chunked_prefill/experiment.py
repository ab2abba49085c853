"""What do users feel of how prompts are read, and what does reading in chunks buy?

While a long prompt is read whole, who is being answered waits: a stall. Read in chunks,
each in one step with those who decode, it delays nobody for long, and its own first
token little: the experiments of Sarathi-Serve, on data sheets in place of its GPUs.
"""

from typing import Any

import numpy as np

from experiments.framework import Part, Record, Sheet, column
from experiments.serving.chunked_prefill import drawing, published, runs, settings
from experiments.serving.chunked_prefill.runs import Loads, Timeline
from experiments.serving.chunked_prefill.settings import Config
from jaxkv.progress import QUIET, Progress

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
    name, model = config.models[0], settings.MODELS[config.models[0]]
    progress.show("four ways to read prompts")
    timeline = runs.timeline(name, config.data[0], settings.WAYS)
    four = [(way, config.share) for way in settings.WAYS]
    ways = [runs.serve(name, data, four, config) for data in config.data]
    asked = [(settings.both(budget), config.share) for budget in config.budgets]
    budgets = runs.serve(name, config.data[0], asked, config)
    cases = [
        (each, data, [(system, share) for share in config.shares])
        for each in config.models
        for data in config.data
        for system in settings.SYSTEMS
    ]
    loads = [
        runs.serve(*case, config)
        for case in progress.track(cases, "systems and rates", "systems")
    ]
    chunk = sorted({*config.budgets, *published.CHUNKS})
    whole_s, *chunks_s = (
        settings.prompt_s(model, published.LONG_PROMPT, size) for size in (None, *chunk)
    )
    return Result(
        timeline=timeline,
        ways=Loads.joined(ways),
        budgets=budgets,
        loads=Loads.joined(loads),
        chunk=np.array(chunk),
        chunk_cost=np.array(chunks_s) / whole_s,
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


plot, claims = drawing.plot, published.claims
PANELS, PANEL_SIZE_INCHES = (2, 2), (3.8, 2.6)
