"""What is shared at the paper's lengths? Pages counted in simulated time, none read.

The engine's own scheduler serves a load with a clock for a model: OPT-13B on one A100
of 40 GB, whose pool has 983 pages of 16 tokens. Sequences of a request share the full
pages of its prompt, and a partial one until they write: figure 15a.

Translations all begin with the same examples: figure 16, of LLaMA-13B, whose weights
and pool are as large. With pages, the full pages of the examples are in the pool once,
and read before the load comes. Orca (Oracle) knows how long every translation will be
and reserves as much in one piece, with a copy of the examples for each, which it reads
again each time.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from experiments.framework import Ours, Record, ours, table
from experiments.framework.table import Floats, Ints, Table, Texts, column, shown
from experiments.harness import length_distributions
from experiments.plotting import style, systems
from experiments.serving.latency_vs_rate import runs, settings
from experiments.serving.sharing.requests import published_share
from experiments.serving.sharing.served import BOOK, DATA, figure_claim, lengths_claims
from jaxkv import validation, workloads
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, Cost, SimulationMember, Work, contiguous, driver
from jaxkv.workloads import arrivals, lengths

PANELS = (2, 2)
SWITCH = ("num_simulated", True)
SERVER = settings.SERVERS["13B"]
MAX_ROWS = 2560
"""Tokens fed in a step at most: a longest prompt, and all that decode."""

LAWS = {"short": lengths.ALPACA, "long": lengths.SHAREGPT}
TIMES = {"short": 4, "long": 1}
"""Short requests are soon served: so many times as many for the same numbers."""
SEQUENCES_PER_S = {"short": 20.0, "long": 1.2}
"""Load, two thirds of where the axes of figures 14 and 12 end. As long as nobody waits,
what is saved does not depend on it."""
ANSWERS = (2, 4, 6)

SENTENCES = lengths.Pair(
    prompt=lengths.LogNormal(mean=28.0, sigma=0.5),
    output=lengths.LogNormal(mean=37.0, sigma=0.5),
    max_prompt=256,
    max_length=512,
)
"""Sentences of WMT16 English to German. Four more examples make a prompt 341 - 80 = 261
tokens longer: a pair has 65. German takes a third more of them than English."""
RATES = np.round(np.geomspace(4.0, 80.0, 20), 2)
"""Translations a second."""
SECONDS = 120.0
"""Simulated load of them."""
AT_MOST_S = 0.5
"""Seconds a token at which rates are compared."""
SYSTEMS = ("Orca (Oracle)", "paged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    num_simulated: int = 512
    """Requests of the paper's lengths, in each of its settings."""
    prefixes: tuple[int, ...] = (80, 341)
    """Tokens with which translations begin alike: one and five examples."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to share."""
        validation.at_least(self, "num_simulated", "prefixes")
        validation.at_least(self, "seed", low=0)


CONFIGS = {"paper": Config()}


class Counted(Table):
    """Requests of several answers, a row for each setting."""

    lengths: Texts = column('"short" or "long"')
    num_sequences: Ints = column("of a request", key="answers")
    rate: Floats = column("arrivals", key="requests_per_s", heading="requests/s")
    num_requests: Ints = column("how many there were", key="requests")
    batch: Floats = column("sequences that ran, on average over time")
    saved_share: Floats = column("pages saved / without sharing, on average over time")
    expected_share: Floats = column("what lengths alone say")
    num_preempted: Ints = column("sequences preempted", key="preempted")

    @property
    @shown()
    def published_share(self) -> np.ndarray:
        """The paper's; NaN where there is none."""
        return published_share("answers", self)


class Translated(Table):
    """Translations with a common beginning, a row for each length of it."""

    prefix_tokens: Ints = column("with which all begin")
    rate: Float[np.ndarray, "rows rates"] = column("requests a second", is_told=False)
    latency_s: Float[np.ndarray, "rows systems rates"] = column(
        "seconds a token, Orca's and ours", is_told=False
    )
    batch: Float[np.ndarray, "rows systems rates"] = column(
        "sequences that ran on average", is_told=False
    )
    at_most: Float[np.ndarray, "rows systems"] = column(
        "requests a second at 0.5 s a token", is_told=False
    )

    @property
    @shown()
    def oracle_per_s(self) -> np.ndarray:
        """The rate that Orca (Oracle) sustains."""
        return self.at_most.reshape(-1, 2)[:, 0]

    @property
    @shown()
    def paged_per_s(self) -> np.ndarray:
        """The rate that pages sustain, shared."""
        return self.at_most.reshape(-1, 2)[:, 1]

    @property
    @shown()
    def ratio(self) -> np.ndarray:
        """How many times as many requests pages serve."""
        return self.paged_per_s / self.oracle_per_s

    @property
    @shown()
    def published_ratio(self) -> np.ndarray:
        """The paper's; NaN where there is none."""
        printed = BOOK.published("translations")
        return np.array([printed.get(str(x), np.nan) for x in self.prefix_tokens])


class Result(Record):
    """What was counted."""

    counted: Counted = column(
        "several answers",
        key="simulated",
        heading="pages saved by several answers, simulated",
        note="OPT-13B on an A100 of 40 GB; lengths after the printed means. Expected: "
        "by lengths alone.",
    )
    translated: Translated = column(
        "common beginnings",
        key="translations",
        heading=f"translations/s at {AT_MOST_S} s a token, simulated",
        note="Lengths of sentences are worked out from those of the examples, and step "
        "times are OPT-13B's fit; neither is printed.",
    )


class Behind(NamedTuple):
    """A cost of sequences that all attend to so many more tokens than are counted."""

    cost: Cost
    num_tokens: Int32[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        more = work.decode_context + self.num_tokens * work.num_decodes
        return self.cost(work._replace(decode_context=more))


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Counts both; ended early, it has what is done."""
    counted = count(config, progress)
    translated = Translated.of([])
    if not progress.stopped:
        translated = translate(config, progress)
    return Result(counted=counted, translated=translated)


def _capacity(num_places: int) -> Capacity:
    """Bounds of the machine with a pool of so many token places."""
    plain = runs.capacity(num_places // settings.PAGE_SIZE)
    return plain._replace(token_budget=jnp.int32(MAX_ROWS))


def count(config: Config, progress: Progress) -> Counted:
    """Serves each kind of requests with each number of answers."""
    rows = []
    for name, law in LAWS.items():
        size = TIMES[name] * config.num_simulated
        rng = np.random.default_rng(config.seed)
        tokens = length_distributions.draw(law, size, settings.MAX_LENGTH, rng)
        members = []
        for n in ANSWERS:
            # The same requests in a random order, whatever their number of answers.
            rng = np.random.default_rng(config.seed)
            order, rate = rng.permutation(size), SEQUENCES_PER_S[name] / n
            load = arrivals.make(
                arrivals.poisson(rng, rate=rate, num=size),
                tokens.prompt[order],
                tokens.output[order],
                samples=n,
            )
            pool = _capacity(SERVER.num_places)
            members.append(
                SimulationMember(load, pool, fcfs.fcfs(), settings.cost(SERVER))
            )
        served = driver.simulate(
            driver.stack(members),
            max_slots=128,
            max_samples=max(ANSWERS),
            head=runs.HEAD,
            progress=progress,
        )
        if progress.stopped:
            break
        means, preempted = served.means, served.totals.preempted
        saved = workloads.metrics.saving(means.saved_pages, means.used_pages)
        for i, n in enumerate(ANSWERS):
            expected = length_distributions.saving(tokens, n, settings.PAGE_SIZE)
            asked = name, n, SEQUENCES_PER_S[name] / n, size
            rows.append((*asked, means.batch[i], saved[i], expected, preempted[i]))
    return Counted.of(rows)


def translate(config: Config, progress: Progress) -> Translated:
    """Serves translations at all rates by both systems; stopped, it tells nothing."""
    shape = (len(config.prefixes), len(RATES))
    latency_s, batch = np.zeros((2, shape[0], len(SYSTEMS), shape[1]))
    for k, system in enumerate(SYSTEMS):
        members = driver.stack(
            [
                _translations(system, prefix, rate, SECONDS, config.seed)
                for prefix in config.prefixes
                for rate in RATES.tolist()
            ]
        )
        served = driver.simulate(
            members, max_slots=runs.MAX_SLOTS, head=runs.HEAD, progress=progress
        )
        if progress.stopped:
            return Translated.of([])
        took_s = workloads.metrics.normalised_latency_s(
            served.arrival_s, served.finish_s, np.asarray(members.workload.output)
        )
        latency_s[:, k] = took_s.reshape(shape)
        batch[:, k] = served.means.batch.reshape(shape)
    capacity = functools.partial(workloads.metrics.capacity, at_most_s=AT_MOST_S)
    at_most = [[capacity(RATES, curve) for curve in both] for both in latency_s]
    prefixes, rates = np.array(config.prefixes), np.broadcast_to(RATES, shape)
    return Translated(prefixes, rates, latency_s, batch, np.array(at_most))


def _translations(
    system: str, prefix: int, rate: float, seconds: float, seed: int
) -> SimulationMember:
    page, places = settings.PAGE_SIZE, SERVER.num_places
    shared = prefix // page * page if system == "paged" else 0
    rng, num = np.random.default_rng(seed), max(1, round(rate * seconds))
    load = arrivals.open_loop(rng, SENTENCES, rate=rate, num=num)
    reservation = contiguous.reservation(
        "oracle",
        num_leaves=places // page,
        leaves_per_region=settings.MAX_LENGTH // page,
    )
    return SimulationMember(
        load._replace(prompt=load.prompt + prefix - shared),
        _capacity(places - shared),
        fcfs.fcfs(),
        Behind(settings.cost(SERVER), jnp.asarray(shared, jnp.int32)),
        reservation=None if system == "paged" else reservation,
    )


def metrics(result: Result) -> dict[str, Any]:
    """Lists every setting, a row each."""
    # Every run of the experiment has the lists of both studies.
    served = ("samples", "beams", "readings", "prefixes", "pictures")
    return {**{name: [] for name in served}, **table.metrics(result)}


summary = table.sheets


@BOOK.judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds the counts against closed forms, and figures 15a and 16 against ours."""
    yield from lengths_claims(result.counted)
    for row in result.counted.rows():
        is_end = (row["lengths"], row["answers"]) == ("long", max(ANSWERS))
        words = row | ({} if is_end else {"too_much": ""})
        yield from figure_claim("answers-simulated", words)
    for row in result.translated.rows():
        rates = f"{SYSTEMS[0]} {row['oracle_per_s']:.1f}, "
        rates += f"{SYSTEMS[1]} {row['paged_per_s']:.1f}"
        num = row["prefix_tokens"]
        yield ours(
            "translations", row["ratio"], num=num, at_most=AT_MOST_S, rates=rates
        )


def plot(axes: Any, result: Result) -> None:
    """Draws figure 15a above, and figure 16 below."""
    names = result.counted.distinct("lengths")
    for ax, name in zip(axes[0], names, strict=False):
        _draw_savings(ax, result.counted.where(lengths=name), name)
    for i, ax in enumerate(axes[1][: len(result.translated)]):
        _draw_latency(ax, result.translated, i)
    for ax in (*axes[0][len(names) :], *axes[1][len(result.translated) :]):
        ax.remove()


def _draw_savings(ax: Any, counted: Counted, name: str) -> None:
    """Bars of ours next to the paper's in grey; a dash where lengths alone lead."""
    data, place = DATA[name], np.arange(len(counted))
    for shift, share, system, label in (
        (-0.2, counted.published_share, "published", "the paper's"),
        (0.2, counted.saved_share, data, "ours"),
    ):
        look = systems.look(system).bar | {"label": label}
        drawn = ax.bar(place + shift, 100 * share, 0.38, **look)
        texts = [f"{y:.1f}" if np.isfinite(y) else "" for y in 100 * share]
        ax.bar_label(drawn, texts, padding=2)
    expected = 100 * counted.expected_share
    look = {"marker": "_", "markersize": 18, "linestyle": "", "markeredgewidth": 2}
    style.curve(ax, place + 0.2, expected, 0, "from the lengths", **look)
    ax.set_xticks(place, [str(n) for n in counted.num_sequences])
    ax.margins(y=0.18)
    most = 100 * float(np.nanmax(counted.saved_share, initial=0.0))
    title = f"{data}: sharing saves up to {most:.0f} % of the pages"
    style.titled(ax, title, "answers of a request [sequences]", "pages saved [%]")
    ax.legend()


def _draw_latency(ax: Any, translated: Translated, i: int) -> None:
    """Latency against rate, as figure 16 has it."""
    for k, name in enumerate(SYSTEMS):
        end = translated.at_most[i, k]
        look = {"marker": ""}
        style.curve(ax, translated.rate[i], translated.latency_s[i, k], name, **look)
        style.curve(ax, [end], [AT_MOST_S], name, f"{name}: {end:.1f}/s", markersize=7)
    style.reference(ax, AT_MOST_S)
    row = translated.rows()[i]
    title = (
        f"{row['prefix_tokens']} tokens in common: {row['ratio']:.2f} times the load"
    )
    if np.isfinite(row["published_ratio"]):
        title += f", the paper's {row['published_ratio']}"
    x, y = "load [requests/s]", "latency [s/token]"
    style.titled(ax, title, x, y, ylim=(0, 1))
    ax.legend()
