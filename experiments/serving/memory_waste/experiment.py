"""Measures how a serving GPU uses its memory, and how much is wasted.

Reproduces figures 1 and 2 of the PagedAttention paper for OPT-13B on a GPU of 40 GB:
memory of weights, keys and values; growth of memory and throughput with the batch size;
and, simulated under the load of section 6.2, the shares of token places that hold a
token, are reserved for later tokens, or are wasted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments import lab
from experiments.serving.latency_vs_rate import runs, settings
from experiments.serving.latency_vs_rate.published import name_in_sentence
from experiments.serving.memory_waste.drawing import (
    CLAIMS,
    FIGURE_BATCHES,
    SYSTEMS,
    USES,
    plot,
)
from jaxkv import simulation
from jaxkv.simulation import Cost, Work
from scaling.costs import find_device, kv_bytes_per_token


class Config(lab.ConfigRecord):
    """Load and number of simulations."""

    rate: Annotated[float, lab.Range(0, 100, "(]")] = 2.0
    """Requests/s."""
    hours: float = 1.0
    """Hours of simulated load."""
    warm_up_s: float = 0.0
    """Seconds at the start that are discarded; the paper states no warm-up."""
    num_seeds: lab.PositiveInt = 6
    """Independent draws of the load."""
    step_scales: Annotated[lab.PositiveFloats, lab.Entries(1)] = (1.0, 1.2, 1.31)
    """Time of a step over that on a GPU of 80 GB, on which the paged system's memory
    use depends. The last value is the ratio of the bandwidths."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not 0 <= self.warm_up_s < 3600 * self.hours <= 86_400:
            raise ValueError(
                f"warm_up_s={self.warm_up_s!r} must lie within hours={self.hours!r}"
            )


CONFIGS = {
    "paper": Config(),
    "smoke": Config(hours=0.05, warm_up_s=60.0, num_seeds=1, step_scales=(1.31,)),
}


PerSeed = Float[np.ndarray, "rows seeds"]


class Waste(lab.ResultTable):
    """Memory use by system, or by scale of the step time."""

    uses: Float[np.ndarray, "rows seeds uses"] = lab.column(
        "shares of the token places"
    )
    batch: PerSeed = lab.column("mean batch size")
    step_s: PerSeed = lab.column("mean time of a step")
    num_preempted: Int[np.ndarray, "rows seeds"] = lab.column("preemptions")
    num_answered: Int[np.ndarray, "rows seeds"] = lab.column(
        "requests after the warm-up"
    )


class BatchGrowth(lab.ResultRecord):
    """Memory and throughput by batch size; NaN beyond the batch that fits."""

    requests: Int[np.ndarray, " requests"] = lab.column("batch size")
    memory_bytes: Float[np.ndarray, "systems requests"] = lab.column("weights included")
    tokens_per_s: Float[np.ndarray, "systems requests"] = lab.column("generated tokens")


class Result(lab.ResultRecord):
    """Memory, its use by system, and its growth."""

    memory_bytes: float = lab.column("memory of the GPU")
    weight_bytes: float = lab.column("memory of the weights")
    kv_bytes: float = lab.column("memory of the KV cache")
    token_bytes: float = lab.column("K and V of a token")
    system: lab.Texts = lab.column("names of the rows of `waste`")
    waste: Waste = lab.column("by system")
    step_scales: lab.Floats = lab.column(
        "scales of the step time, the rows of `scaled`"
    )
    scaled: Waste = lab.column("paged system by scale")
    growth: BatchGrowth = lab.column("by batch size")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates the load with every system."""
    server = settings.SERVERS["13B"]
    setting = runs.Setting(server, settings.DATASETS["ShareGPT"])
    loads = [
        runs.draw_load(setting.law, config.rate, 3600 * config.hours, seed)
        for seed in range(config.num_seeds)
    ]
    cost = settings.step_time(server)
    progress.show("contiguous memory")
    orca = [(name, load, cost) for name in settings.ORCAS for load in loads]
    last = settings.SYSTEMS[-1]
    contiguous = _serve(config, setting, orca, progress)
    progress.show("paged memory")
    names = ("prefill", "decode", "decode_large")
    last_scale = config.step_scales[-1]
    costs = [
        cost._replace(
            **{x: getattr(cost, x) * np.float32(scale / last_scale) for x in names}
        )
        for scale in config.step_scales
    ]
    paged = [(last, load, step_cost) for step_cost in costs for load in loads]
    scaled = _serve(config, setting, paged, progress)
    waste = Waste.joined([contiguous, scaled.at([-1])])
    token_bytes = float(kv_bytes_per_token(server.description))
    return Result(
        memory_bytes=find_device(server.device).sheet_bytes,
        weight_bytes=float(server.weight_bytes),
        kv_bytes=float(server.kv_gib * 2**30),
        token_bytes=token_bytes,
        system=np.array(SYSTEMS),
        waste=waste,
        step_scales=np.array(config.step_scales),
        scaled=scaled,
        growth=_growth(waste, server, cost, token_bytes),
    )


def _serve(
    config: Config,
    setting: runs.Setting,
    cases: Sequence[tuple[settings.System, runs.Load, Cost]],
    progress: lab.Progress,
) -> Waste:
    """Simulates loads; rows are systems or cost models, columns are seeds."""
    served = simulation.simulate(
        simulation.stack(
            [
                runs.make_member(setting, load, system, config.rate, cost, 1)
                for system, load, cost in cases
            ]
        ),
        max_slots=max(setting.slots(system) for system, *_ in cases),
        head=runs.HEAD_SIZE,
        since_s=config.warm_up_s,
        until_s=3600 * config.hours,
        progress=progress,
    )
    shape = (-1, config.num_seeds)
    ended = served.finish_s > config.warm_up_s
    means = served.means
    totals = served.totals
    return Waste(
        uses=np.stack([getattr(means, x).reshape(shape) for x in USES], axis=-1),
        batch=means.batch.reshape(shape),
        step_s=(totals.busy_s / totals.steps).reshape(shape),
        num_preempted=totals.preempted.reshape(shape),
        num_answered=ended.sum(axis=1).reshape(shape),
    )


def _growth(
    waste: Waste, server: settings.Machine, cost: Cost, token_bytes: float
) -> BatchGrowth:
    """Extrapolates memory and throughput to each batch size that fits."""
    uses = waste.uses.mean(axis=1)
    batch = waste.batch.mean(axis=1)
    places = server.num_places
    # External fragmentation of contiguous regions is lost to all requests; free pages
    # are not.
    lost = np.where(np.array(SYSTEMS) == "paged", 0.0, uses[:, 3])
    held = (uses[:, :3].sum(axis=1) + lost) * places / batch
    context = uses[:, 0] * places / batch
    max_requests = np.maximum(np.round(places / held), 1)
    requests = np.arange(1, int(max_requests.max()) + 1)
    fits = requests <= max_requests[:, None]
    memory = server.weight_bytes + requests * held[:, None] * token_bytes
    tokens = requests.astype(np.float32) * context.astype(np.float32)[:, None]
    decodes = jnp.asarray(np.broadcast_to(requests, fits.shape), jnp.int32)
    work = Work(*(jnp.zeros_like(decodes),) * len(Work._fields))._replace(
        num_decodes=decodes,
        num_drawn=decodes,
        decode_context=jnp.asarray(tokens, jnp.int32),
    )
    seconds = np.asarray(jax.jit(jax.vmap(jax.vmap(cost)))(work))
    return BatchGrowth(
        requests=requests,
        memory_bytes=np.where(fits, memory, np.nan),
        tokens_per_s=np.where(fits, requests / seconds, np.nan),
    )


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares memory, waste and ratios of batch sizes with the published ones."""
    yield lab.measured("weights", 100 * result.weight_bytes / result.memory_bytes)
    yield lab.measured("keys-and-values", 100 * result.kv_bytes / result.memory_bytes)
    names = result.system.tolist()
    for system, uses in zip(names, result.waste.uses, strict=True):
        shares = 100 * uses.mean(axis=0)
        why = {"external waste and rest": CLAIMS.text("rounding")}
        if system == "paged":
            why["token states"] = CLAIMS.text("load")
        words: dict[str, Any] = {
            "system": system,
            "system_name": name_in_sentence(system),
        }
        for use, share in zip(USES.values(), shares, strict=True):
            yield lab.measured("uses", share, use=use, why=why.get(use, ""), **words)
        if system == "paged":
            # Pages are reserved for at most one token ahead; no page is external.
            yield lab.measured("within", (shares[1:3] / shares[:3].sum() * 100).sum())
    batch = dict(zip(names, result.waste.batch.mean(axis=1), strict=True))
    # The batches themselves are judged by `latency_vs_rate`.
    for other in CLAIMS.published("times"):
        yield lab.measured("times", batch["paged"] / batch[other], other=other)


def metrics(result: Result) -> dict[str, object]:
    """Returns memory shares and batch sizes."""
    waste = result.waste
    columns = {f"{use}_share": waste.uses[:, :, k] for k, use in enumerate(USES)}
    columns |= {"batch": waste.batch, "step_s": waste.step_s}
    columns |= {"answered": waste.num_answered, "preempted": waste.num_preempted}
    means = {name: values.mean(axis=1) for name, values in columns.items()}
    return {
        "weights_share": result.weight_bytes / result.memory_bytes,
        "kv_share": result.kv_bytes / result.memory_bytes,
        "token_bytes": result.token_bytes,
        "systems": lab.to_rows({"system": result.system} | means),
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of memory use, and of its dependence on the step time."""
    waste = result.waste
    scaled = result.scaled
    names = result.system.tolist()
    uses = {use: _spreads(100 * waste.uses[:, :, k]) for k, use in enumerate(USES)}
    served = {
        "requests at once": _spreads(waste.batch),
        "paper's": [f"{FIGURE_BATCHES[name]:.2f}" for name in names],
        "step": _seconds(waste),
        "answered": _counts(waste.num_answered),
        "preempted": _counts(waste.num_preempted),
    }
    slower = {
        "times": [f"{scale:g}" for scale in result.step_scales],
        "a step": _seconds(scaled),
        "memory with tokens": [f"{x} %" for x in _spreads(100 * scaled.uses[:, :, 0])],
        "requests at once": _spreads(scaled.batch),
        "preempted": _counts(scaled.num_preempted),
    }
    shares = [CLAIMS.published("uses")[name] for name in names]
    cells = [[f"{x[y]:g}" if y in x else "-" for y in USES.values()] for x in shares]
    printed = {"paper's": [" / ".join(row) for row in cells]}
    num_loads = waste.batch.shape[1]
    return [
        _sheet(
            "percentage of the token places",
            {"system": names} | uses | printed,
            "Means over time"
            + (
                f" and {num_loads} loads; standard deviation over loads."
                if num_loads > 1
                else "."
            ),
        ),
        _sheet("served requests", {"system": names} | served),
        _sheet(
            "the paged system, by length of a step",
            slower,
            "Time of a step over the published time on a GPU of 80 GB; "
            "claims use the last row.",
        ),
    ]


def _sheet(
    title: str, columns: Mapping[str, Sequence[str]], note: str = ""
) -> lab.Sheet:
    """Returns a table from columns of text by heading."""
    rows = [*zip(*columns.values(), strict=True)]
    return lab.Sheet(title, tuple(columns), rows, note)


def _spreads(rows: PerSeed) -> list[str]:
    """Formats mean and standard deviation of each row."""
    if rows.shape[1] < 2:
        return [f"{row.mean():.2f}" for row in rows]
    return [f"{row.mean():.2f} ({row.std(ddof=1):.2f})" for row in rows]


def _seconds(waste: Waste) -> list[str]:
    return [lab.format_seconds(float(row.mean())) for row in waste.step_s]


def _counts(rows: np.ndarray) -> list[str]:
    return [f"{row.mean():,.0f}" for row in rows]


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(2, 2, 3.7)
)
