"""Serves the same requests with combined and with disaggregated workers.

Each worker is a Ray actor with a core of its own, and there are always 2. Either both
run prefill and decode, and a request goes to the worker with less load; or one runs
prefill and sends its pages through Ray's object store to the other, which decodes.
Prompts are held-out text, arrivals are a Poisson process, and answers are sampled.

Step costs are calibrated beforehand on one such worker, with prompts of 3 lengths and
batches of 4 sizes. With these costs the simulator predicts both placements.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from experiments import lab
from experiments.harness import RANDOM_SHAPES, cut_held_out_prompts
from jaxkv import workloads
from jaxkv.disaggregation import RoutedAnswer, Service, WorkerSpec
from jaxkv.files import model_folder
from jaxkv.models import LoadedModel, ModelConfig, init_params, load_model, save_model
from jaxkv.sampling import Sampling
from jaxkv.simulation import (
    Capacity,
    Job,
    PhasePlacement,
    Replica,
    RequestLoad,
    RequestTiming,
    select_requests,
    simulate_jobs,
    simulate_placements,
)
from jaxkv.text import ByteTokenizer
from jaxkv.workloads import Lengths
from scaling.corpora import VOCAB_SIZE
from scaling.costs import kv_bytes_per_token, linear_cost
from scaling.shapes import describe_config

CLAIMS = lab.claims_file(__file__)
PHASES = ("both phases", "either phase")
NUM_WORKERS = 2
BATCH_SIZES = (1, 2, 4, 8)
"""Batch sizes of the calibration."""


class Config(lab.ConfigRecord):
    """The requests and the workers."""

    model: str = "stdlib-bytes"
    """Model folder, bundled model, or one of `model_shapes.RANDOM_SHAPES`."""
    prompt_tokens: int = 448
    output_tokens: Annotated[int, lab.Range(2)] = 48
    shares_served: Annotated[tuple[float, ...], lab.Ascending(0)] = (0.3, 0.5, 0.7)
    """Request rates, over the highest rate of 2 combined workers."""
    seconds: Annotated[float, lab.Range(0, ends="()")] = 20.0
    """Seconds of arrivals at each rate."""
    max_slots: Annotated[int, lab.Range(2)] = 8
    """Largest number of sequences that a worker runs at once."""
    page_size: lab.PositiveInt = 16
    token_budget: int = 128
    """Token budget of a step of workers that prefill."""
    decode_budget: int = 32
    """Token budget of a step of a decode worker, which prefills less than a page."""
    temperature: float = 1.0
    repeats: lab.PositiveInt = 5
    """Repetitions of each calibration."""
    seed: int = 0
    """Seed of arrivals, prompts and sampling."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        min_budget = max(self.page_size, self.max_slots)
        for name in ("token_budget", "decode_budget"):
            lab.Range(min_budget).check(name, getattr(self, name))
        lab.Range(4 * self.page_size).check("prompt_tokens", self.prompt_tokens)

    @property
    def ask(self) -> Sampling:
        """Sampling of the answers."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=self.output_tokens,
            ignore_eos=True,
        )

    @property
    def engine(self) -> dict[str, int]:
        """Arguments of `Engine.load`; the pool holds twice the running sequences."""
        length = self.prompt_tokens + self.output_tokens + 1
        pages = -(-length // self.page_size)
        return {
            "max_length": length,
            "max_slots": self.max_slots,
            "page_size": self.page_size,
            "num_pages": 2 * self.max_slots * pages,
            "steps_per_call": 1,
            "seed": self.seed,
        }


CONFIGS = {
    "real": Config(),
    "large": Config(
        model="random-135m", shares_served=(0.3, 0.6), seconds=60.0, repeats=2
    ),
}


class MeasuredLoads(lab.ResultTable):
    """Latencies of requests at a rate under one placement."""

    way: lab.Texts = lab.column("phases of a worker")
    rate: lab.Floats = lab.column("requests/s", form="{:.1f}")
    requests: lab.Ints = lab.column("requests that arrived")
    first_s: lab.Floats = lab.column(
        "median time to first token", form=lab.format_seconds
    )
    first_p90_s: lab.Floats = lab.column(
        "P90 time to first token", form=lab.format_seconds
    )
    between_s: lab.Floats = lab.column(
        "median time between tokens", form=lab.format_seconds
    )
    between_p90_s: lab.Floats = lab.column(
        "P90 time between tokens", form=lab.format_seconds
    )
    said_first_s: lab.Floats = lab.column(
        "median time to first token, simulated", form=lab.format_seconds
    )
    said_between_s: lab.Floats = lab.column(
        "median time between tokens, simulated", form=lab.format_seconds
    )
    sent_s: lab.Floats = lab.column(
        "median time to copy, send and write the pages",
        form=lab.format_seconds,
    )


class CalibrationTimes(lab.ResultTable):
    """Calibrated times of one worker on an idle machine."""

    what: lab.Texts = lab.column("timed operation")
    size: lab.Ints = lab.column("tokens of the prompt, or batch size")
    seconds: lab.Floats = lab.column(
        "median: to the first token, or between tokens", form=lab.format_seconds
    )


class Result(lab.ResultRecord):
    """Latencies, costs and transfers."""

    loads: MeasuredLoads = lab.column(
        "by rate and placement",
        heading="two workers, a core each",
        note="{0.different} of {0.answers} answers differ between the placements. "
        "Simulated: with costs calibrated on a single worker.",
    )
    costs: CalibrationTimes = lab.column(
        "calibrated costs",
        heading="calibrated: a single worker",
        note="Bytes of a token in transferred pages: {0.page_bytes:,.0f} by the "
        "workers, headers counted; {0.formula_bytes:,.0f} of keys and values, by the "
        "formula.",
    )
    different: int = lab.column("differing answers", is_shown=False)
    answers: int = lab.column("compared answers", is_shown=False)
    page_bytes: float = lab.column("sent bytes per token", is_shown=False)
    formula_bytes: float = lab.column("K and V per token by formula", is_shown=False)


class OfferedLoad(NamedTuple):
    """Requests at one rate.

    Attributes:
      rate: requests/s.
      requests: arrivals and lengths.
      prompts: prompt tokens of each request.
    """

    rate: float
    requests: RequestLoad
    prompts: list[list[int]]


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Calibrates, then serves every load both ways; if stopped, keeps finished ones."""
    with contextlib.ExitStack() as stack:
        if config.model in RANDOM_SHAPES:
            # Random weights with a byte tokenizer are kept in a temporary folder.
            words = ByteTokenizer(VOCAB_SIZE)
            shape = RANDOM_SHAPES[config.model]
            shape = dataclasses.replace(shape, vocab_size=words.vocab_size)
            params = init_params(shape, jax.random.key(0))
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            folder = Path(scratch) / config.model
            save_model(folder, shape, params, tokenizer=words)
        else:
            folder = model_folder(config.model)
        loaded = load_model(folder)
        with _service(config, folder, ["decode"], [config.token_budget]) as service:
            progress.show("calibrating")
            costs = asyncio.run(_calibrated(config, loaded, service))
        replica, max_rate = _replica(config, loaded.config, costs)
        offered = []
        for share in config.shares_served:
            # Both placements serve the same requests.
            rate = share * max_rate
            rng = np.random.default_rng(config.seed)
            num = max(2, round(rate * config.seconds))
            arrival_s = workloads.poisson(rng, rate=rate, num=num)
            tokens = _prompts(loaded, [config.prompt_tokens] * num, rng)
            sizes = np.array([*map(len, tokens)]), np.full(num, config.output_tokens)
            requests = RequestLoad(arrival_s, Lengths(*sizes))
            offered.append(OfferedLoad(rate, requests, tokens))
        jobs = [(phases, load) for phases in PHASES for load in offered]
        answers: list[list[RoutedAnswer]] = []
        for phases, load in progress.track(jobs, "loads", "serving"):
            other = config.token_budget if phases == PHASES[0] else config.decode_budget
            roles = ("decode" if phases == PHASES[0] else "prefill", "decode")
            budgets = (config.token_budget, other)
            with _service(config, folder, roles, budgets) as service:
                answers.append(asyncio.run(_serve(config, load, service)))
    rows = []
    sent_bytes = []
    for (phases, load), served in zip(jobs, answers, strict=False):
        marks = np.percentile([_times_s(x) for x in served], (50, 90), axis=0)
        simulated = _simulated(config, phases, load, replica)
        sent = [x.transfer for x in served if x.transfer.num_bytes]
        sent_s = np.median([x.transfer_s for x in sent] or [0.0])
        sent_bytes += [x.num_bytes for x in sent]
        rows.append(
            (phases, load.rate, len(served), *marks.T.ravel(), *simulated, sent_s)
        )
    pairs = [
        (a.completion.tokens, b.completion.tokens)
        for both in zip(answers, answers[len(offered) :], strict=False)
        for a, b in zip(*both, strict=True)
    ]
    full_tokens = config.prompt_tokens // config.page_size * config.page_size
    return Result(
        loads=MeasuredLoads.of(rows),
        costs=CalibrationTimes.of(costs),
        different=sum(a != b for a, b in pairs),
        answers=len(pairs),
        page_bytes=float(np.median(sent_bytes)) / full_tokens if sent_bytes else np.nan,
        formula_bytes=replica.kv_bytes,
    )


def _service(
    config: Config, folder: Path, roles: Sequence[str], budgets: Sequence[int]
) -> Service:
    """Starts workers of the given roles and token budgets, each on its own core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    specs = [
        WorkerSpec(
            role=role,
            folder=str(folder),
            engine=config.engine | {"token_budget": budget},
            cores=(cores[i % len(cores)],) if cores else None,
        )
        for i, (role, budget) in enumerate(zip(roles, budgets, strict=True))
    ]
    return Service(folder, specs)


async def _calibrated(
    config: Config, loaded: LoadedModel, service: Service
) -> list[tuple[str, int, float]]:
    """Times the prefill of single prompts, and batches that decode."""
    rng = np.random.default_rng(config.seed + 1)
    names = itertools.count()
    rows = []
    max_prompt = config.prompt_tokens
    sizes = [max_prompt // 4, max_prompt // 2, max_prompt]
    sizes = [x for x in sizes for _ in range(config.repeats + 1)]
    batches = [x for x in BATCH_SIZES if x <= config.max_slots]
    sizes += [max_prompt // 2] * (config.repeats * sum(batches))
    # Prompts are cut before the clock starts, so that this process is idle then.
    ready = iter(_prompts(loaded, sizes, rng))

    async def ask(output: int) -> RoutedAnswer:
        ask = dataclasses.replace(config.ask, max_tokens=output)
        future = service.answer(next(ready), ask, key_id=next(names))
        return await asyncio.wrap_future(future)

    for size in (max_prompt // 4, max_prompt // 2, max_prompt):
        answers = [await ask(1) for _ in range(config.repeats + 1)][1:]
        took_s = float(np.median([_times_s(x)[0] for x in answers]))
        rows.append(("a prompt", size, took_s))
    for batch in batches:
        paces = []
        for _ in range(config.repeats):
            both = (ask(config.output_tokens) for _ in range(batch))
            paces += [_times_s(x)[1] for x in await asyncio.gather(*both)]
        rows.append(("decoding", batch, float(np.median(paces))))
    return rows


def _prompts(
    loaded: LoadedModel, sizes: list[int], rng: np.random.Generator
) -> list[list[int]]:
    """Cuts prompts from held-out text."""
    samplings = [Sampling()] * len(sizes)
    return [
        x.tokens for x in cut_held_out_prompts(loaded.tokenizer, sizes, samplings, rng)
    ]


def _times_s(served: RoutedAnswer) -> tuple[float, float]:
    """Returns the time to first token and the mean time between tokens."""
    times = served.completion
    assert times.first_token_s is not None
    later_s = times.finish_s - times.first_token_s
    num = len(times.tokens) - 1
    return times.first_token_s - times.arrival_s, later_s / max(num, 1)


def _replica(
    config: Config, model: ModelConfig, costs: Sequence[tuple[str, int, float]]
) -> tuple[Replica, float]:
    """Returns the simulated worker, and the highest rate of 2 workers in requests/s."""

    def line(what: str) -> np.ndarray:
        """Returns intercept and slope of a linear fit, both at least 0."""
        size, seconds = np.array([x[1:] for x in costs if x[0] == what]).T
        slope, start = np.polyfit(size, seconds, 1)
        return np.maximum([start, slope], 0)

    reads = line("a prompt")
    decodes = line("decoding")
    cost = linear_cost((*reads, 0.0), (decodes[0], 0.0, decodes[1]), scale=1.0)
    # The simulated replicas prefill whole prompts.
    budget = config.prompt_tokens + config.max_slots
    bounds = config.engine | {"token_budget": budget}
    names = ("num_pages", "page_size", "max_length", "token_budget")
    capacity = Capacity.of(**{name: bounds[name] for name in names})
    size = kv_bytes_per_token(describe_config(model), kv_bytes=4)
    slots = config.max_slots
    prompt_s = reads @ [1, config.prompt_tokens]
    answer_s = config.output_tokens * (decodes @ [1, slots]) / slots
    return Replica(cost, capacity, 1, float(size)), NUM_WORKERS / (prompt_s + answer_s)


async def _serve(
    config: Config, load: OfferedLoad, service: Service
) -> list[RoutedAnswer]:
    """Sends the requests at their arrival times."""
    begun_s = time.perf_counter()

    async def one(name: int, tokens: list[int], arrival_s: float) -> RoutedAnswer:
        await asyncio.sleep(max(0.0, begun_s + arrival_s - time.perf_counter()))
        return await asyncio.wrap_future(
            service.answer(tokens, config.ask, key_id=name)
        )

    came = zip(load.prompts, load.requests.arrival_s.tolist(), strict=True)
    return await asyncio.gather(
        *(one(name, *request) for name, request in enumerate(came))
    )


def _simulated(
    config: Config, phases: str, load: OfferedLoad, replica: Replica
) -> tuple[float, float]:
    """Returns the simulated median time to first token and between tokens."""
    until_s = 10 * config.seconds
    timings: list[RequestTiming]
    if phases == PHASES[0]:
        turns = [
            select_requests(load.requests, slice(i, None, NUM_WORKERS))
            for i in range(NUM_WORKERS)
        ]
        jobs = [Job(replica, "both", x) for x in turns]
        timings = simulate_jobs(jobs, until_s, max_slots=config.max_slots)
    else:
        # On one machine the cost of a transfer is time of the workers.
        placement = PhasePlacement(replica, replica, 1, 1, 1e9)
        timings = simulate_placements(
            [(placement, load.requests)], until_s, max_slots=config.max_slots
        )
    first = np.concatenate([x.first_s - x.arrival_s for x in timings])
    pace = [(x.finish_s - x.first_s) / (x.output - 1) for x in timings]
    # An arrival of NaN does not count; a request without an answer is the slowest.
    came = np.isfinite(np.concatenate([x.arrival_s for x in timings]))
    first, between = (
        np.nan_to_num(x[came], nan=np.inf) for x in (first, np.concatenate(pace))
    )
    return float(np.median(first)), float(np.median(between))


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares both placements with each other and with the simulator."""
    yield lab.measured("served_same", result.different, num=f"{result.answers:,}")
    yield lab.measured(
        "served_bytes", result.page_bytes, published=result.formula_bytes
    )
    for row in result.loads.rows():
        words: dict[str, Any] = {"way": row["way"], "rate": f"{row['rate']:.1f}"}
        for id, name in (("served_first", "first_s"), ("served_between", "between_s")):
            simulated = row[f"said_{name}"]
            yield lab.measured(
                id, row[name], published=simulated, differs=True, **words
            )


SYSTEMS = dict(zip(PHASES, ("both phases", "split"), strict=True))
"""Labels of the placements in figures."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws time to first token and time between tokens by rate."""
    for ax, name, unit, words in (
        (axes[0], "first", 1, "first token"),
        (axes[1], "between", 1000, "between tokens"),
    ):
        last = {}
        for phases, system in SYSTEMS.items():
            subset = result.loads.where(way=phases)
            curves = {
                f"{phases}, median": (unit * getattr(subset, f"{name}_s"), "-"),
                f"{phases}, 90 %": (unit * getattr(subset, f"{name}_p90_s"), "--"),
                f"{phases}, simulated": (unit * getattr(subset, f"said_{name}_s"), ":"),
            }
            for label, (values, line) in curves.items():
                lab.draw_curve(ax, subset.rate, values, system, label, linestyle=line)
            if len(subset):
                last[phases] = float(curves[f"{phases}, 90 %"][0][-1])
        title = f"Times of the {words} by rate"
        if len(last) == len(PHASES):
            shown = [
                f"{last[phases]:,.2g} {'s' if unit == 1 else 'ms'}" for phases in PHASES
            ]
            title = f"{words.capitalize()}, 90 %, at {max(result.loads.rate):.2g} "
            title += f"requests/s: {shown[0]} combined, {shown[1]} disaggregated"
        scale = "log" if name == "first" else "linear"
        y = f"{'time to the' if name == 'first' else 'time'} {words} "
        y += "[s]" if unit == 1 else "[ms]"
        lab.set_labels(ax, title, "load [requests/s]", y, yscale=scale)
        if name == "first":
            lab.label_log_axis(ax.yaxis)
        else:
            ax.set_ylim(bottom=0)
        ax.set_xticks(result.loads.distinct("rate"))
        ax.xaxis.set_major_formatter("{x:.2g}")
        if last:
            ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    panels=lab.Panels(2, 1),
    switch=("shares_served", True),
)
