"""What do users feel of how prompts are read, and what does reading in chunks buy?

While a long prompt is read whole, who is being answered waits: a stall. Read in chunks,
each in one step with those who decode, it delays nobody for long, and its own first
token little: the experiments of Sarathi-Serve, on data sheets in place of its cards.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, Part
from experiments.serving.chunked_prefill import drawing, published, runs, settings
from experiments.serving.chunked_prefill.runs import Loads, Timeline
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

PANELS = (2, 2)
PANEL_SIZE_INCHES = (3.8, 2.6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    models: tuple[str, ...] = ("Yi-34B", "Mistral-7B")
    """Names in `chunked_prefill_settings.MODELS`; the first is looked at closely."""
    data: tuple[str, ...] = ("openchat", "arxiv")
    """Names in `chunked_prefill_settings.DATA`; the first is looked at closely."""
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
        known = {"models": settings.MODELS, "data": settings.DATA}
        for name, there in known.items():
            values = getattr(self, name)
            if not values or not set(values) <= set(there):
                raise ValueError(f"{name}={values} must be of {', '.join(there)}")
        for name in ("shares", "budgets"):
            values = getattr(self, name)
            if len(values) < 2 or min(values) <= 0 or sorted(set(values)) != [*values]:
                raise ValueError(f"{name}={values} must be several, ascending, above 0")
        if not min(self.budgets) >= settings.MAX_SLOTS:
            raise ValueError(
                f"{self.budgets=} must be at least {settings.MAX_SLOTS}, a token for "
                "each who decodes"
            )
        validation.above(self, "share", "seconds")
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


class Result(NamedTuple):
    """What was simulated."""

    timeline: Timeline
    """Of the four ways."""
    ways: Loads
    """The four ways at one rate, and under one budget."""
    budgets: Loads
    """Chunks of several sizes, mixed, at the same rate."""
    loads: Loads
    """Systems against the rate."""
    chunk: np.ndarray
    """Tokens of a chunk."""
    chunk_cost: np.ndarray
    """Time to read a prompt in such chunks, over that of reading it whole."""


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates everything; ended early, it has what is done."""
    models = [settings.MODELS[name] for name in config.models]
    data = [(name, settings.DATA[name]) for name in config.data]
    first = data[0][1]
    # As many requests for all, so that they share a program.
    most = max(
        runs.num_requests(
            max(config.shares) * runs.full_rate(model, each),
            config.seconds,
        )
        for model in models
        for _, each in data
    )

    def serve(model: Any, name: str, asked: list[Any]) -> Loads:
        return runs.serve(
            *(model, settings.DATA[name], name, asked),
            seconds=config.seconds,
            seed=config.seed,
            num=most,
        )

    cases = [
        (model, name, [(system, share) for share in config.shares])
        for model in models
        for name, _ in data
        for system in settings.SYSTEMS
    ]
    progress.show("four ways to read prompts")
    timeline = runs.timeline(models[0], first, settings.WAYS)
    ways = [
        serve(models[0], name, [(way, config.share) for way in settings.WAYS])
        for name, _ in data
    ]
    budgets = [(settings.both(budget), config.share) for budget in config.budgets]
    sweep = serve(models[0], data[0][0], budgets)
    loads = [
        serve(*case) for case in progress.track(cases, "systems and rates", "systems")
    ]
    prompt = published.LONG_PROMPT
    whole_s = settings.prompt_s(models[0], prompt)
    chunk = sorted({*config.budgets, *published.CHUNKS})
    costs = [settings.prompt_s(models[0], prompt, size) / whole_s for size in chunk]
    return Result(
        timeline=timeline,
        ways=runs.join(ways),
        budgets=sweep,
        loads=runs.join(loads),
        chunk=np.array(chunk),
        chunk_cost=np.array(costs),
    )


def plot(axes: Any, result: Result) -> None:
    """Draws stalls, the budget's price, tails against rates, and capacities."""
    drawing.draw(axes, result)


def claims(result: Result) -> list[Claim]:
    """Holds what Sarathi-Serve published against ours."""
    return published.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Lists every load, and the capacities."""
    return published.metrics(result)


def summary(result: Result) -> list[Part]:
    """Puts ways, budgets and capacities beside each other."""
    return published.summary(result)
