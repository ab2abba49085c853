"""What does it buy to read prompts on other cards than those that decode?

Both phases on one card keep each other from their promises. Apart, each takes the cards
that suit it, and keys and values cross over in between: the experiments of DistServe,
with the times of steps that its authors published, and queues beside their formulas.
"""

import dataclasses
from typing import Any, NamedTuple

from experiments.framework import Claim, Part
from experiments.serving.disaggregation import drawing, published, runs, settings
from experiments.serving.disaggregation.instances import Role, Split
from experiments.serving.disaggregation.queues import Queues, measure
from experiments.serving.disaggregation.runs import Asked, Loads
from experiments.serving.disaggregation.settings import Application, Instance
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

PANELS = (2, 3)
PANEL_SIZE_INCHES = (3.2, 2.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    applications: tuple[str, ...] = tuple(settings.APPLICATIONS)
    """Names in `disaggregation_settings.APPLICATIONS`."""
    shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1)
    """Rates at which goodput is looked for, as shares of one that is hardly borne;
    ascending."""
    links: tuple[float, ...] = (2e9, 4e9, 6e9, 8e9, 12e9, 25e9)
    """Slower ways for keys and values, bytes a second from card to card."""
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
        if not set(self.applications) <= set(settings.APPLICATIONS):
            known = "; ".join(settings.APPLICATIONS)
            raise ValueError(f"{self.applications=} must be of {known}")
        shares = self.shares
        if len(shares) < 2 or min(shares) <= 0 or sorted(set(shares)) != [*shares]:
            raise ValueError(f"{self.shares=} must be several, ascending, above 0")
        if not all(link > 0 for link in self.links):
            raise ValueError(f"{self.links=} must be above 0 bytes per second")
        if not (self.queue_loads and all(0 < x < 1 for x in self.queue_loads)):
            raise ValueError(f"{self.queue_loads=} must lie in (0, 1)")
        validation.at_least(self, "queue_requests", "queue_seeds", low=2)
        validation.above(self, "seconds")
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

EXAMPLE = "example, 13B"
_ONE = Instance("opt-13b", 1)
_EXAMPLE = Application(
    *("opt-13b", settings.EXAMPLE, settings.EXAMPLE_OBJECTIVES, 1, (1,), (2.1, 2.1)),
    where="section 2",
)


class Result(NamedTuple):
    """What was simulated."""

    alone: Loads
    """Single machines: for both phases, and for either."""
    split: Loads
    """Machines for either phase, coupled."""
    links: Loads
    """The example's, with slower ways for keys and values."""
    queues: Queues


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates everything."""
    known = {EXAMPLE: _EXAMPLE} | {
        name: settings.APPLICATIONS[name] for name in config.applications
    }
    asked = [
        Asked(name, x.objectives, x.law, role, instance, share * most)
        for name, x in known.items()
        for role, ways in _roles(x)
        for instance in (Instance(x.model, num) for num in ways)
        for most in (runs.bounds(x, instance)[role],)
        for share in config.shares
    ]
    how: Any = {"seconds": config.seconds, "seed": config.seed, "progress": progress}
    progress.show("one machine, either phase or both")
    alone = runs.alone(asked, **how)
    placements = {
        name: runs.best(name, x, alone) for name, x in known.items() if name != EXAMPLE
    }
    # As the paper has it, whatever would be best here.
    reads, decodes = (
        runs.goodput(alone.where(name=EXAMPLE, role=role), field)
        for role, field in (("prefill", "attained_first"), ("decode", "attained_gap"))
    )
    two_and_one = Split(_ONE, _ONE, 2, 1)
    placements[EXAMPLE] = two_and_one, min(2 * reads, decodes)
    top = [1.15 * x / max(config.shares) for x in config.shares if x >= 0.2]
    asked_split = [
        (name, known[name].objectives, known[name].law, placement, share * most)
        for name, (placement, most) in placements.items()
        if most > 0
        for share in top
    ]
    num = len(asked_split)
    asked_split += [
        (
            *(EXAMPLE, _EXAMPLE.objectives, _EXAMPLE.law),
            *(two_and_one._replace(link=link), share * placements[EXAMPLE][1]),
        )
        for link in config.links
        for share in top
    ]
    progress.show("machines for either phase")
    both = runs.split(asked_split, **how)
    queues = measure(
        config.queue_loads,
        num=config.queue_requests,
        num_seeds=config.queue_seeds,
        seed=config.seed,
        progress=progress,
    )
    return Result(
        alone=alone,
        split=Loads(*(column[:num] for column in both)),
        links=Loads(*(column[num:] for column in both)),
        queues=queues,
    )


def _roles(x: Application) -> list[tuple[Role, tuple[int, ...]]]:
    return [("both", (x.together,)), ("prefill", x.ways), ("decode", x.ways)]


def plot(axes: Any, result: Result) -> None:
    """Draws tails, goodput, what links decide, and queues beside formulas."""
    drawing.draw(axes, result)


def claims(result: Result) -> list[Claim]:
    """Holds what DistServe published against ours."""
    return published.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Lists every load, and the queues."""
    return published.metrics(result)


def summary(result: Result) -> list[Part]:
    """Puts placements, and queues and formulas, beside each other."""
    return published.summary(result)
