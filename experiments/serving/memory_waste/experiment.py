"""What is the memory of a serving card good for, and how much of it is wasted?

OPT-13B on a card of 40 GB, as in figures 1 and 2 of the paged-attention paper: what
weights, keys and values take; how memory fills with requests, and what that does to
throughput; and, simulated under the load of its section 6.2, which token places hold
something, are reserved for what will come, or are wasted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.framework import Claim, Part, Sheet, units
from experiments.serving.latency_vs_rate import Load, Setting, runs, settings
from experiments.serving.memory_waste import drawing, published
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation import Cost, Work, driver
from scaling.costs import devices, serving

PANELS = (2, 2)

SYSTEMS = settings.SYSTEMS[1:]
"""Those that run a request as soon as there is room for it."""
USES = ("tokens", "reserved", "internal", "external")
"""What token places are: of K and V; of those to come; reserved for none; the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How long the load is served, and how often."""

    rate: float = 2.0
    """Requests a second."""
    hours: float = 1.0
    """Of load."""
    warm_up_s: float = 0.0
    """Seconds of it that do not count; the paper says of none."""
    num_seeds: int = 6
    """Loads, alike but for chance."""
    step_scales: tuple[float, ...] = (1.0, 1.2, 1.31)
    """Times that a step takes as long as on a card of 80 GB, the last one being the
    ratio of the bandwidths; what the paged system's memory depends on."""

    def __post_init__(self) -> None:
        """Refuses what cannot be served."""
        if not 0 < self.rate <= 100:
            raise ValueError(f"{self.rate=} must be in (0, 100] requests a second")
        if not 0 <= self.warm_up_s < 3600 * self.hours <= 86_400:
            raise ValueError(f"{self.warm_up_s=} must lie within {self.hours=}")
        validation.at_least(self, "num_seeds")
        if not self.step_scales or min(self.step_scales) <= 0:
            raise ValueError(f"{self.step_scales=} must be above 0, at least one")


CONFIGS = {
    "paper": Config(),
    "smoke": Config(hours=0.05, warm_up_s=60.0, num_seeds=1, step_scales=(1.31,)),
}


class Waste(NamedTuple):
    """What memory was used for; leaves of shape [systems, seeds].

    Attributes:
      uses: shares of the token places, [systems, seeds, uses].
      batch: requests served at once.
      step_s: seconds of a step.
      num_preempted: sequences that gave way.
      num_answered: requests that ended in the time that counts.
    """

    uses: np.ndarray
    batch: np.ndarray
    step_s: np.ndarray
    num_preempted: np.ndarray
    num_answered: np.ndarray


class Growth(NamedTuple):
    """Memory and throughput by requests served at once; NaN beyond those that fit.

    Attributes:
      requests: how many.
      memory_bytes: with the weights, [systems, requests].
      tokens_per_s: drawn, [systems, requests].
    """

    requests: np.ndarray
    memory_bytes: np.ndarray
    tokens_per_s: np.ndarray


class Result(NamedTuple):
    """All of it.

    Attributes:
      memory_bytes: of the card.
      weight_bytes: parameters.
      kv_bytes: left for keys and values.
      token_bytes: of one token's.
      system: names.
      waste: of each.
      step_scales: of the steps.
      scaled: of the paged system, with [step scales, seeds] in place of systems.
      growth: by requests.
    """

    memory_bytes: float
    weight_bytes: float
    kv_bytes: float
    token_bytes: float
    system: Any
    waste: Waste
    step_scales: Any
    scaled: Waste
    growth: Growth


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves the load by every system."""
    server = settings.SERVERS["13B"]
    setting = Setting(server, settings.DATA["ShareGPT"])
    loads = [
        runs.load(setting.law, config.rate, 3600 * config.hours, seed)
        for seed in range(config.num_seeds)
    ]
    cost = settings.cost(server)
    progress.show("contiguous memory")
    orca = [(name, load, cost) for name in settings.ORCAS for load in loads]
    last = settings.SYSTEMS[-1]
    contiguous = _serve(config, setting, orca, progress)
    progress.show("paged memory")
    costs = [
        _slower(cost, scale / config.step_scales[-1]) for scale in config.step_scales
    ]
    paged = [(last, load, each) for each in costs for load in loads]
    scaled = _serve(config, setting, paged, progress)
    waste = Waste(
        *(np.concatenate([x, y[-1:]]) for x, y in zip(contiguous, scaled, strict=True))
    )
    token_bytes = float(serving.kv_bytes_per_token(server.description))
    return Result(
        memory_bytes=devices.find(server.device).memory_bytes,
        weight_bytes=float(server.weight_bytes),
        kv_bytes=float(server.kv_gib * 2**30),
        token_bytes=token_bytes,
        system=np.array(SYSTEMS),
        waste=waste,
        step_scales=np.array(config.step_scales),
        scaled=scaled,
        growth=_growth(waste, server, cost, token_bytes),
    )


def _slower(cost: Cost, ratio: float) -> Cost:
    """The same steps, each so many times as long."""
    assert isinstance(cost, settings.cost_models.Linear)
    names = ("prefill", "decode", "decode_large")
    return cost._replace(**{x: getattr(cost, x) * np.float32(ratio) for x in names})


def _serve(
    config: Config,
    setting: Setting,
    asked: Sequence[tuple[settings.System, Load, Cost]],
    progress: Progress,
) -> Waste:
    """Serves loads in simulated time; rows are systems, or costs, columns seeds."""
    served = driver.simulate(
        driver.stack(
            [
                runs.member(setting, load, system, config.rate, cost, 1)
                for system, load, cost in asked
            ]
        ),
        max_slots=max(setting.slots(system) for system, *_ in asked),
        head=runs.HEAD,
        since_s=config.warm_up_s,
        until_s=3600 * config.hours,
        progress=progress,
    )
    shape = (-1, config.num_seeds)
    ended = served.finish_s > config.warm_up_s
    means, totals = served.means, served.totals
    return Waste(
        uses=np.stack([getattr(means, x).reshape(shape) for x in USES], axis=-1),
        batch=means.batch.reshape(shape),
        step_s=(totals.busy_s / totals.steps).reshape(shape),
        num_preempted=totals.preempted.reshape(shape),
        num_answered=ended.sum(axis=1).reshape(shape),
    )


def _growth(
    waste: Waste, server: settings.Server, cost: Cost, token_bytes: float
) -> Growth:
    """Fills the memory with requests as they were met, one after the other."""
    uses, batch = waste.uses.mean(axis=1), waste.batch.mean(axis=1)
    places = server.num_places
    # What is external to contiguous regions is lost to others, too; free pages are not.
    lost = np.where(np.array(SYSTEMS) == "paged", 0.0, uses[:, 3])
    held = (uses[:, :3].sum(axis=1) + lost) * places / batch
    context = uses[:, 0] * places / batch
    most = np.maximum(np.round(places / held), 1)
    requests = np.arange(1, int(most.max()) + 1)
    fits = requests <= most[:, None]
    memory = server.weight_bytes + requests * held[:, None] * token_bytes

    def step_s(batch: jax.Array, context: jax.Array) -> jax.Array:
        zero = jnp.zeros((), jnp.int32)
        decodes = batch.astype(jnp.int32)
        work = Work(*(zero,) * len(Work._fields))
        work = work._replace(
            num_decodes=decodes,
            num_drawn=decodes,
            decode_context=(batch * context).astype(jnp.int32),
        )
        return cost(work)

    batches = jnp.asarray(requests, jnp.float32)
    every = jax.jit(jax.vmap(jax.vmap(step_s, (0, None)), (None, 0)))
    seconds = np.asarray(every(batches, jnp.asarray(context, jnp.float32)))
    return Growth(
        requests=requests,
        memory_bytes=np.where(fits, memory, np.nan),
        tokens_per_s=np.where(fits, requests / seconds, np.nan),
    )


def claims(result: Result) -> list[Claim]:
    """Holds memory, waste and batches against the published ones."""
    return published.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Gives what memory holds, and how large batches are."""
    waste = result.waste
    return {
        "weights_share": result.weight_bytes / result.memory_bytes,
        "kv_share": result.kv_bytes / result.memory_bytes,
        "token_bytes": result.token_bytes,
        "systems": [
            {"system": str(name)}
            | dict(zip((f"{x}_share" for x in USES), uses.tolist(), strict=True))
            | {
                "batch": float(waste.batch[i].mean()),
                "step_s": float(waste.step_s[i].mean()),
                "answered": float(waste.num_answered[i].mean()),
                "preempted": float(waste.num_preempted[i].mean()),
            }
            for i, (name, uses) in enumerate(
                zip(result.system, waste.uses.mean(axis=1), strict=True)
            )
        ],
    }


def summary(result: Result) -> list[Part]:
    """Lays out the waste beside the published one, and what it depends on."""
    return [
        *_tables(result),
        Sheet(
            "the paged system, by length of a step",
            ("times", "a step", "memory with tokens", "requests at once", "preempted"),
            [
                (
                    f"{scale:g}",
                    units.seconds(float(result.scaled.step_s[i].mean())),
                    _spread(100 * result.scaled.uses[i, :, 0]) + " %",
                    _spread(result.scaled.batch[i]),
                    f"{result.scaled.num_preempted[i].mean():,.0f}",
                )
                for i, scale in enumerate(result.step_scales)
            ],
            "How long a step is against one on a card of 80 GB, of which times are "
            "published; the last row is the one that the claims are about.",
        ),
    ]


def _tables(result: Result) -> list[Part]:
    waste, printed = result.waste, published
    uses = [
        (
            str(name),
            *(_spread(100 * waste.uses[i, :, k]) for k in range(len(USES))),
            printed.as_text(str(name)),
        )
        for i, name in enumerate(result.system)
    ]
    served = [
        (
            str(name),
            _spread(waste.batch[i]),
            f"{printed.BATCHES[str(name)]:.2f}",
            units.seconds(float(waste.step_s[i].mean())),
            f"{waste.num_answered[i].mean():,.0f}",
            f"{waste.num_preempted[i].mean():,.0f}",
        )
        for i, name in enumerate(result.system)
    ]
    many = waste.batch.shape[1]
    note = f"Means over time and {many} loads, and the standard deviation over loads."
    heads = ("system", *USES, "paper's")
    of_served = ("system", "requests at once", "paper's", "step", "answered")
    return [
        Sheet("per cent of the token places", heads, uses, note),
        Sheet("served meanwhile", (*of_served, "preempted"), served),
    ]


def _spread(values: np.ndarray) -> str:
    """Mean and standard deviation of a few numbers."""
    if values.size < 2:
        return f"{values.mean():.2f}"
    return f"{values.mean():.2f} ({values.std(ddof=1):.2f})"


def plot(axes: Any, result: Result) -> None:
    """Draws memory by part, its growth, throughput, and the waste."""
    drawing.draw(axes, result)
