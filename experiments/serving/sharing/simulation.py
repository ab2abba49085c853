"""Simulates page sharing at the paper's lengths.

The engine's scheduler serves a load with the cost model of OPT-13B on an A100 of 40 GB,
whose pool has 983 pages of 16 tokens. Samples of a request share the full pages of its
prompt, and its partial page until they write: figure 15a.

Translations share a prefix of examples: figure 16, for LLaMA-13B, whose weights and
pool have the same size. With pages, the full pages of the prefix are in the pool once
and are prefilled before the load starts. Orca (Oracle) knows the length of every
translation and reserves contiguous memory for it, with a copy of the prefix that it
prefills for each request.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from experiments import lab
from experiments.harness import draw_lengths, measured_page_saving
from experiments.serving.latency_vs_rate import drawings, runs, settings
from experiments.serving.sharing.measurement import (
    CLAIMS,
    DATASET_NAMES,
    figure_claim,
    lengths_claims,
)
from experiments.serving.sharing.requests import published_share
from jaxkv import scheduling, simulation, workloads
from jaxkv.simulation import Capacity, Cost, SimulationMember, Work
from jaxkv.workloads import ALPACA, SHAREGPT, LogNormal, Pair, make_workload, open_loop

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (2, 2)
SWITCH = ("num_simulated", True)
SERVER = settings.SERVERS["13B"]
MAX_BATCH_ROWS = 2560
"""Token budget of a step: the longest prompt and all decoding sequences."""

LENGTH_LAWS = {"short": ALPACA, "long": SHAREGPT}
TIMES = {"short": 4, "long": 1}
"""Factor of the number of requests, for equal precision of short and long ones."""
SEQUENCES_PER_S = {"short": 20.0, "long": 1.2}
"""Load in sequences/s, two thirds of the ends of the axes of figures 14 and 12. The
saving does not depend on it as long as no request waits."""
ANSWERS = (2, 4, 6)

SENTENCE_LENGTHS = Pair(
    prompt=LogNormal(mean=28.0, sigma=0.5),
    output=LogNormal(mean=37.0, sigma=0.5),
    max_prompt=256,
    max_length=512,
)
"""Sentences of WMT16 English to German. Four more examples add 341 - 80 = 261 tokens,
so a pair has 65. German has a third more tokens than English."""
REQUEST_RATES = np.round(np.geomspace(4.0, 80.0, 20), 2)
"""Translations/s."""
DURATION_S = 120.0
"""Simulated seconds of load."""
AT_MOST_S = 0.5
"""Latency in s/token at which rates are compared."""
SYSTEMS = ("Orca (Oracle)", "paged")


class Config(lab.ConfigRecord):
    """Extent of the simulation."""

    num_simulated: lab.PositiveInt = 512
    """Requests with the paper's lengths in each setting."""
    prefixes: lab.PositiveInts = (80, 341)
    """Tokens of the common prefix of translations: 1 and 5 examples."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""


CONFIGS = {"paper": Config()}


class SimulatedSavings(lab.ResultTable):
    """Simulated page sharing of requests with several samples."""

    lengths: lab.Texts = lab.column('"short" or "long"')
    num_sequences: lab.Ints = lab.column("samples per request", key="answers")
    rate: lab.Floats = lab.column(
        "arrivals", key="requests_per_s", heading="requests/s"
    )
    num_requests: lab.Ints = lab.column("requests", key="requests")
    batch: lab.Floats = lab.column("mean number of running sequences")
    saved_share: lab.Floats = lab.column("mean saved pages / pages without sharing")
    expected_share: lab.Floats = lab.column("saved share by lengths")
    drawn_share: lab.Floats = lab.column("saved share by lengths of figure 11")
    num_preempted: lab.Ints = lab.column("preempted sequences", key="preempted")

    @property
    @lab.computed_column()
    def published_share(self) -> np.ndarray:
        """Published share; NaN if there is none."""
        return published_share("answers", self)


class TranslationRates(lab.ResultTable):
    """Sustained rates of translations by length of the prefix."""

    prefix_tokens: lab.Ints = lab.column("tokens of the prefix")
    rate: Float[np.ndarray, "rows rates"] = lab.column("requests/s", is_reported=False)
    latency_s: Float[np.ndarray, "rows systems rates"] = lab.column(
        "latency in s/token, Orca and paged", is_reported=False
    )
    batch: Float[np.ndarray, "rows systems rates"] = lab.column(
        "mean number of running sequences", is_reported=False
    )
    at_most: Float[np.ndarray, "rows systems"] = lab.column(
        "requests/s at 0.5 s/token", is_reported=False
    )

    @property
    @lab.computed_column()
    def oracle_per_s(self) -> np.ndarray:
        """Highest rate that Orca (Oracle) sustains, requests/s."""
        return self.at_most.reshape(-1, 2)[:, 0]

    @property
    @lab.computed_column()
    def paged_per_s(self) -> np.ndarray:
        """Rate that the paged system sustains."""
        return self.at_most.reshape(-1, 2)[:, 1]

    @property
    @lab.computed_column()
    def ratio(self) -> np.ndarray:
        """Paged rate over that of Orca (Oracle)."""
        return self.paged_per_s / self.oracle_per_s

    @property
    @lab.computed_column()
    def published_ratio(self) -> np.ndarray:
        """Published ratio; NaN if there is none."""
        printed = CLAIMS.published("translations")
        return np.array([printed.get(str(x), np.nan) for x in self.prefix_tokens])


class Result(lab.ResultRecord):
    """Simulated samples and translations."""

    counted: SimulatedSavings = lab.column(
        "samples",
        key="simulated",
        heading="pages saved by several samples, simulated",
        note="OPT-13B on an A100 of 40 GB; lengths follow the printed means. Expected: "
        "by lengths.",
    )
    translated: TranslationRates = lab.column(
        "common prefixes",
        key="translations",
        heading=f"translations/s at {AT_MOST_S} s a token, simulated",
        note="Sentence lengths follow from those of the examples, and step times are "
        "OPT-13B's fit; neither is printed.",
    )


class SharedPrefixCost(NamedTuple):
    """A cost model whose sequences attend to an uncounted shared prefix.

    Attributes:
      cost: cost model of a step.
      num_tokens: tokens of the shared prefix.
    """

    cost: Cost
    num_tokens: Int32[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the seconds of a step."""
        more = work.decode_context + self.num_tokens * work.num_decodes
        return self.cost(work._replace(decode_context=more))


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates both parts; if stopped, keeps the finished ones."""
    counted = simulate_answers(config, progress)
    translated = TranslationRates.of([])
    if not progress.stopped:
        translated = simulate_translations(config, progress)
    return Result(counted=counted, translated=translated)


def _capacity(num_places: int) -> Capacity:
    """Returns the capacity of a pool with `num_places` token places."""
    plain = runs.pool_capacity(num_places // settings.PAGE_SIZE)
    return plain._replace(token_budget=jnp.int32(MAX_BATCH_ROWS))


def simulate_answers(config: Config, progress: lab.Progress) -> SimulatedSavings:
    """Simulates each kind of requests with each number of samples."""
    rows = []
    for name, law in LENGTH_LAWS.items():
        size = TIMES[name] * config.num_simulated
        rng = np.random.default_rng(config.seed)
        tokens = draw_lengths(law, size, settings.MAX_LENGTH, rng)
        drawn_law = drawings.drawn_law(DATASET_NAMES[name], law)
        drawn_tokens = drawn_law.draw(np.random.default_rng(config.seed), 100_000)
        members = []
        for n in ANSWERS:
            # The same requests in the same random order for every number of samples.
            rng = np.random.default_rng(config.seed)
            order = rng.permutation(size)
            rate = SEQUENCES_PER_S[name] / n
            load = make_workload(
                workloads.poisson(rng, rate=rate, num=size),
                tokens.prompt[order],
                tokens.output[order],
                samples=n,
            )
            pool = _capacity(SERVER.num_places)
            members.append(
                SimulationMember(
                    load, pool, scheduling.fcfs(), settings.step_time(SERVER)
                )
            )
        served = simulation.simulate(
            simulation.stack(members),
            max_slots=128,
            max_samples=max(ANSWERS),
            head=runs.HEAD_SIZE,
            progress=progress,
        )
        if progress.stopped:
            break
        means = served.means
        preempted = served.totals.preempted
        saved = workloads.shared_page_saving(means.saved_pages, means.used_pages)
        for i, n in enumerate(ANSWERS):
            by_lengths = [
                measured_page_saving(x, n, settings.PAGE_SIZE)
                for x in (tokens, drawn_tokens)
            ]
            setting = name, n, SEQUENCES_PER_S[name] / n, size
            rows.append((*setting, means.batch[i], saved[i], *by_lengths, preempted[i]))
    return SimulatedSavings.of(rows)


def simulate_translations(config: Config, progress: lab.Progress) -> TranslationRates:
    """Simulates translations at all rates with both systems; empty if stopped."""
    shape = (len(config.prefixes), len(REQUEST_RATES))
    latency_s, batch = np.zeros((2, shape[0], len(SYSTEMS), shape[1]))
    for k, system in enumerate(SYSTEMS):
        members = simulation.stack(
            [
                _translations(system, prefix, rate, DURATION_S, config.seed)
                for prefix in config.prefixes
                for rate in REQUEST_RATES.tolist()
            ]
        )
        served = simulation.simulate(
            members, max_slots=runs.MAX_SLOTS, head=runs.HEAD_SIZE, progress=progress
        )
        if progress.stopped:
            return TranslationRates.of([])
        took_s = workloads.normalised_latency_s(
            served.arrival_s, served.finish_s, np.asarray(members.workload.output)
        )
        latency_s[:, k] = took_s.reshape(shape)
        batch[:, k] = served.means.batch.reshape(shape)
    capacity = functools.partial(workloads.capacity, at_most_s=AT_MOST_S)
    at_most = [[capacity(REQUEST_RATES, curve) for curve in both] for both in latency_s]
    prefixes = np.array(config.prefixes)
    rates = np.broadcast_to(REQUEST_RATES, shape)
    return TranslationRates(prefixes, rates, latency_s, batch, np.array(at_most))


def _translations(
    system: str, prefix: int, rate: float, seconds: float, seed: int
) -> SimulationMember:
    page = settings.PAGE_SIZE
    places = SERVER.num_places
    shared = prefix // page * page if system == "paged" else 0
    rng = np.random.default_rng(seed)
    num = max(1, round(rate * seconds))
    load = open_loop(rng, SENTENCE_LENGTHS, rate=rate, num=num)
    reservation = simulation.reservation(
        "oracle",
        num_leaves=places // page,
        leaves_per_region=settings.MAX_LENGTH // page,
    )
    return SimulationMember(
        load._replace(prompt=load.prompt + prefix - shared),
        _capacity(places - shared),
        scheduling.fcfs(),
        SharedPrefixCost(settings.step_time(SERVER), jnp.asarray(shared, jnp.int32)),
        reservation=None if system == "paged" else reservation,
    )


def metrics(result: Result) -> dict[str, object]:
    """Returns a row per setting."""
    # Every run of the experiment has the keys of both studies.
    served = ("samples", "beams", "readings", "prefixes", "pictures")
    return {**{name: [] for name in served}, **lab.metrics(result)}


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the simulation with closed forms and figures 15a and 16."""
    yield from lengths_claims(result.counted)
    for row in result.counted.rows():
        is_end = (row["lengths"], row["answers"]) == ("long", max(ANSWERS))
        words = row | ({} if is_end else {"too_much": ""})
        yield from figure_claim("answers-simulated", words)
    for row in result.translated.rows():
        rates = f"{SYSTEMS[0]} {row['oracle_per_s']:.1f}, "
        rates += f"{SYSTEMS[1]} {row['paged_per_s']:.1f}"
        num = row["prefix_tokens"]
        yield lab.measured(
            "translations", row["ratio"], num=num, at_most=AT_MOST_S, rates=rates
        )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws figure 15a above and figure 16 below."""
    names = result.counted.distinct("lengths")
    for ax, name in zip(axes[0], names, strict=False):
        _draw_savings(ax, result.counted.where(lengths=name), name)
    for i, ax in enumerate(axes[1][: len(result.translated)]):
        _draw_latency(ax, result.translated, i)
    for ax in (*axes[0][len(names) :], *axes[1][len(result.translated) :]):
        ax.remove()


def _draw_savings(ax: "Axes", counted: SimulatedSavings, name: str) -> None:
    """Draws simulated and published bars; a dash marks the saving by lengths."""
    data = DATASET_NAMES[name]
    place = np.arange(len(counted))
    for shift, share, system, label in (
        (-0.2, counted.published_share, "published", "the paper's"),
        (0.2, counted.saved_share, data, "ours"),
    ):
        container = ax.bar(
            place + shift,
            100 * share,
            0.38,
            label=label,
            **lab.system_style(system).bar,
        )
        texts = [f"{y:.1f}" if np.isfinite(y) else "" for y in 100 * share]
        ax.bar_label(container, texts, padding=2)
    expected = 100 * counted.expected_share
    look = {"marker": "_", "markersize": 18, "linestyle": "", "markeredgewidth": 2}
    lab.draw_curve(ax, place + 0.2, expected, 0, "from the lengths", **look)
    ax.set_xticks(place, [str(n) for n in counted.num_sequences])
    ax.margins(y=0.18)
    max_share = 100 * float(np.nanmax(counted.saved_share, initial=0.0))
    title = f"{data}: sharing saves up to {max_share:.0f} % of the pages"
    lab.set_labels(ax, title, "answers of a request [sequences]", "pages saved [%]")
    ax.legend()


def _draw_latency(ax: "Axes", translated: TranslationRates, i: int) -> None:
    """Draws latency by rate as in figure 16."""
    for k, name in enumerate(SYSTEMS):
        end = translated.at_most[i, k]
        look = {"marker": ""}
        lab.draw_curve(ax, translated.rate[i], translated.latency_s[i, k], name, **look)
        lab.draw_curve(
            ax, [end], [AT_MOST_S], name, f"{name}: {end:.1f}/s", markersize=7
        )
    lab.draw_reference_line(ax, AT_MOST_S)
    row = translated.rows()[i]
    title = (
        f"{row['prefix_tokens']} tokens in common: {row['ratio']:.2f} times the load"
    )
    if np.isfinite(row["published_ratio"]):
        title += f", the paper's {row['published_ratio']}"
    x = "load [requests/s]"
    y = "latency [s/token]"
    lab.set_labels(ax, title, x, y, ylim=(0, 1))
    ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    lab.sheets,
    metrics,
    panels=lab.Panels(2, 2),
    switch=("num_simulated", True),
)
