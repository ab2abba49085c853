"""What is gained when requests come and go while others run?

The lectures' two pictures, by the engine's own scheduler: sequences S1 to S7 in four
slots, requests R1 to R5 three at a time. Then throughput as outputs become more uneven,
under static batching, under continuous batching with the longest sequence reserved, and
with pages; all have the same memory and the same price of a step. And what a large
batch does to throughput and latency. Nothing is ever preempted by anything but a lack
of pages.

`real` serves the bundled model here, under both policies and in batches of any size.
`paper` is OPT-13B on an A100 of 40 GB, prompts of 512 tokens and exponential outputs of
mean 128, as published: there each limit keeps the outputs up to it.
"""

import dataclasses
from typing import Any

from experiments.framework import Claim, Part, Sheet, units
from experiments.serving.batching import claims as batching_claims
from experiments.serving.batching import drawing, lectures, serving, sweeps
from experiments.serving.batching.sweeps import SYSTEMS, Result
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

PANELS = (4, 2)
PANEL_SIZE_INCHES = (3.4, 1.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The machine, and the requests that it serves."""

    model: str = ""
    """A folder, or a bundled model: serves it here, in place of simulated sweeps of
    deviations and clients, and leaves the limits out."""
    cost: str = "opt-13b-a100-40gb"
    """What a step takes: a name as `cost_models` has it."""
    num_places: int = 15_728
    """Token places of K and V; those of a 13B model on 40 GB."""
    prompt_tokens: int = 512
    """Of every prompt."""
    mean_output_tokens: float = 128.0
    """Of outputs, before they are limited."""
    limits: tuple[int, ...] = (32, 128, 512, 1536)
    """Outputs are exponential, those above the limit drawn anew; ascending."""
    deviations: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    """Coefficients of variation of outputs of the same mean; ascending."""
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Who ask for an answer again and again, prompts of 32 tokens; ascending."""
    num_requests: int = 1000
    """Requests of each load, all there when the clock starts."""
    num_seeds: int = 3
    """Draws of the lengths."""
    max_slots: int = 64
    """Sequences that run at once at most."""

    def __post_init__(self) -> None:
        """Refuses what cannot be simulated."""
        validation.at_least(
            self, "prompt_tokens", "num_requests", "num_seeds", "max_slots"
        )
        for name, least in (("limits", 1), ("deviations", 0), ("clients", 1)):
            values = getattr(self, name)
            if not values or min(values) < least or sorted(set(values)) != [*values]:
                raise ValueError(f"{name}={values} must be ascending, from {least}")
        if self.num_places < self.longest:
            raise ValueError(
                f"{self.num_places=} must hold a prompt and its longest output, "
                f"{self.longest} tokens"
            )
        if self.clients[-1] > self.max_slots:
            raise ValueError(f"{self.clients=} must be at most {self.max_slots=}")
        validation.at_least(self, "mean_output_tokens")

    @property
    def longest(self) -> int:
        """Tokens of a prompt with the longest output."""
        return self.prompt_tokens + self.limits[-1]


CONFIGS = {
    "smoke": Config(
        num_places=160,
        prompt_tokens=8,
        mean_output_tokens=8.0,
        limits=(4, 16, 24),
        deviations=(0.0, 1.0),
        clients=(1, 4),
        num_requests=24,
        num_seeds=1,
        max_slots=8,
    ),
    "paper": Config(),
    "real": Config(
        model="stdlib-bytes",
        num_places=8 * 256,
        prompt_tokens=32,
        mean_output_tokens=48.0,
        limits=(224,),
        deviations=(0.0, 0.5, 1.0, 1.5),
        clients=(1, 2, 4, 8, 16),
        num_requests=64,
        num_seeds=2,
        max_slots=16,
    ),
}


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates all of it, or serves what can be served here."""
    if config.model:
        return serving.run(config, progress)
    return sweeps.run(config, progress)


def plot(axes: Any, result: Result) -> None:
    """Draws the pictures, and throughput below."""
    drawing.draw(axes, result)


def claims(result: Result) -> list[Claim]:
    """Holds the lectures' pictures, and published speeds, against ours."""
    return batching_claims.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Gives the pictures in words, and all speeds."""
    r = result
    return {
        "where": r.where,
        "sequences_static": lectures.words(lectures.grid(r.static_sequences)),
        "sequences_continuous": lectures.words(lectures.grid(r.continuous_sequences)),
        "requests_static": lectures.batches(r.static_requests),
        "requests_continuous": lectures.batches(r.continuous_requests),
        "limits": _speeds(r.limits, "longest"),
        "deviations": _speeds(r.deviations, "deviation"),
        "clients": [
            {"clients": int(n), "tokens_per_s": float(rate), "token_s": float(s)}
            for n, rate, s in zip(*r.clients, strict=True)
        ],
    }


def summary(result: Result) -> list[Part]:
    """Shows the pictures as tables, and the sweeps."""
    found = metrics(result)
    heads = ("iteration", "request by request", "iteration by iteration")
    both = [found["requests_static"], found["requests_continuous"]]
    rows = [
        (str(i + 1), *(x[i] if i < len(x) else "" for x in both))
        for i in range(max(map(len, both)))
    ]
    names = [f"T{i + 1}" for i in range(lectures.PLACES)]
    parts: list[Part] = [
        Sheet(f"{kind} batching", names, [x.split() for x in found[key]])
        for kind, key in (
            ("static", "sequences_static"),
            ("continuous", "sequences_continuous"),
        )
    ]
    parts.append(Sheet("R1 to R5, three at a time", heads, rows))
    for key, title in (
        ("limits", "exponential outputs up to a limit"),
        ("deviations", "outputs of equal means"),
        ("clients", "requests side by side"),
    ):
        if found[key]:
            cells = [[units.named(*x) for x in row.items()] for row in found[key]]
            rows = [[cell for _, cell in row] for row in cells]
            parts.append(Sheet(title, [label for label, _ in cells[0]], rows))
    return parts


def _speeds(found: sweeps.Speeds, name: str) -> list[dict[str, Any]]:
    """Rows of a sweep: means over seeds."""
    rows = []
    for i, value in enumerate(found.value.tolist()):
        row: dict[str, Any] = {name: value}
        row["measured deviation"] = float(found.deviation[i].mean())
        for system, rate in zip(SYSTEMS, found.means()[:, i], strict=False):
            row[f"{system}_tokens_per_s"] = float(rate)
        row["gain"] = float(found.means()[-1, i] / found.means()[0, i])
        row["fewer_steps"] = float(found.steps[0, i].sum() / found.steps[-1, i].sum())
        rows.append(row)
    return rows
