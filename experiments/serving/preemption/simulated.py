"""What do preemptions cost at the paper's scale, and what makes them cheap?

OPT-13B under chat requests, in simulated time. Who is preempted, and how many pages are
kept free against it, decide how much is computed again. What it costs to move pages
instead depends on their size, since every page is a transfer of its own for K and for V
in every layer.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from experiments.framework import Ours, Part, Record, beside, ours
from experiments.framework.table import Floats, Ints, Table, Texts, column, shown
from experiments.plotting import style
from experiments.serving.latency_vs_rate import runs, settings
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, victims
from jaxkv.simulation import SimulationMember, driver
from jaxkv.workloads import arrivals
from scaling.costs import serving

RATE = 1.9
"""Requests a second: nearly what the memory sustains."""
PAGES_RATE = 1.6
"""Where pages of several sizes are compared: large ones sustain less."""
NUM_SEEDS = 4
"""Draws of the load under which the latest is preempted: so near to what is sustained
one draw of a thousand requests tells little."""
MAX_SLOTS = 96
WATERMARKS = (0, 8, 16, 32, 64, 128)
"""Pages kept free at admission, of 983."""
PREEMPTIONS = ("recompute", "swap", "swap, hold new")
"""What becomes of preempted requests; under the last no new one is let in until all of
them are done, as in the paper."""
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
RULES: tuple[victims.Victim, ...] = get_args(victims.Victim.__value__)
BUS = 25e9
"""Bytes a second between a GPU and its host that PCIe 4 x16 reaches, of 32e9."""
LAUNCH_S = 4e-6
"""What a transfer takes besides: our choice."""
NUM_TOKENS = 512
"""Of the sequence that is brought back."""
BOOK = beside(__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The load."""

    simulated_requests: int = 1024
    """Requests."""
    seed: int = 0
    """The first, of their lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn."""
        validation.at_least(self, "simulated_requests")
        validation.at_least(self, "seed", low=0)


PANELS, PANEL_SIZE_INCHES = (2, 2), (3.4, 3.7)
SWITCH = ("simulated_requests", True)

CONFIGS = {"paper": Config()}


class Simulated(Table):
    """What became of every way of serving, a row for each."""

    study: Texts = column("victims: these, and watermarks; pages: size, what is moved")
    victim: Texts = column("who is preempted")
    watermark: Ints = column("pages kept free at admission", heading="pages kept free")
    preemption: Texts = column("what becomes of preempted requests")
    page_size: Ints = column("token places in a page")
    rate: Floats = column("requests a second")
    seed: Ints = column("of their lengths and arrivals")
    num_preempted: Ints = column("preemptions of a request", heading="preempted")
    recomputed_share: Floats = column("of all tokens", heading="computed again")
    normalised_s: Floats = column("seconds a token", heading="a token")
    moved_bytes: Floats = column("over the bus, both ways")


class BringBack(Table):
    """Times of one request alone, a row for each page size."""

    page_size: Ints = column("token places in a page")
    num_tokens: Ints = column("of the request")
    recompute_s: Floats = column("computing them again")
    swap_s: Floats = column("moving its pages out and in")


class Result(Record):
    """Requests served in simulated time."""

    simulated: Simulated = column("every way")

    @property
    @shown(heading=f"{NUM_TOKENS} tokens brought back")
    def bring_back(self) -> BringBack:
        """One request alone: arithmetic."""
        sizes, again = PAGE_SIZES, recompute_s(NUM_TOKENS)
        return BringBack.of(
            (x, NUM_TOKENS, again, bring_back_s(NUM_TOKENS, x)) for x in sizes
        )


def page_bytes(page_size: int) -> int:
    """K and V of a page in all layers: 13,107,200 bytes for 16 tokens."""
    model = settings.SERVERS["13B"].description
    return int(serving.kv_bytes_per_token(model)) * page_size


def swap_s(page_size: int) -> float:
    """Time to move a page one way: K and V of every layer, one after the other.

    A page of 16 tokens: 80 * 4 us + 13.1 MB / 25 GB/s = 0.84 ms.
    """
    layers = settings.SERVERS["13B"].description.num_layers
    return 2 * layers * LAUNCH_S + page_bytes(page_size) / BUS


def recompute_s(num_tokens: int) -> float:
    """Time to compute tokens again, in a step that others run in, too."""
    return float(settings.cost(settings.SERVERS["13B"]).prefill[1]) * num_tokens


def bring_back_s(num_tokens: int, page_size: int) -> float:
    """Time to move a sequence's pages out and in."""
    return 2 * -(-num_tokens // page_size) * swap_s(page_size)


class Way(NamedTuple):
    """How requests that run out of pages are served; fields as in `Simulated`."""

    study: str
    victim: victims.Victim
    watermark: int
    preemption: str
    page_size: int
    rate: float
    seed: int


def ways(seed: int) -> list[Way]:
    """All that are compared, on the load of a seed; some on those behind it, too."""
    found = [
        Way("victims", rule, mark, "recompute", settings.PAGE_SIZE, RATE, seed + k)
        for rule in RULES
        for k in range(NUM_SEEDS if rule == "latest" else 1)
        for mark in WATERMARKS
    ]
    return found + [
        Way("pages", "latest", 0, preemption, size, PAGES_RATE, seed)
        for preemption in PREEMPTIONS
        for size in PAGE_SIZES
    ]


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves the same requests in every way."""
    law, num = settings.DATA["ShareGPT"], config.simulated_requests
    asked = ways(config.seed)
    loads = [
        arrivals.open_loop(np.random.default_rng(way.seed), law, rate=way.rate, num=num)
        for way in asked
    ]
    served = driver.simulate(
        driver.stack([*map(_member, loads, asked)]),
        max_slots=MAX_SLOTS,
        head=runs.HEAD,
        progress=progress,
    )
    totals, rows = served.totals, []
    for i, way in enumerate(asked):
        fed = max(1, int(totals.decoded[i] + totals.read[i]))
        took_s = served.finish_s[i] - served.arrival_s[i]
        again = served.recomputed[i].sum() / fed
        latency_s = np.mean(took_s / np.asarray(loads[i].output))
        moved = int(totals.swapped_pages[i]) * page_bytes(way.page_size)
        rows.append((*way, served.preempted[i].sum(), again, latency_s, float(moved)))
    return Result(Simulated.of(rows))


def _member(load: arrivals.Workload, way: Way) -> SimulationMember:
    server = settings.SERVERS["13B"]
    pages = server.num_places // way.page_size
    swaps = way.preemption != "recompute"
    policy = fcfs.fcfs(
        watermark=way.watermark,
        victim=way.victim,
        preemption="swap" if swaps else "recompute",
        hold_new="hold new" in way.preemption,
        stackable=True,
    )
    capacity = runs.capacity(pages, way.page_size)._replace(
        max_swap_pages=jnp.int32(pages if swaps else 0)
    )
    cost = settings.cost(server)._replace(swap_s=jnp.float32(swap_s(way.page_size)))
    return SimulationMember(load, capacity, policy, cost)


@BOOK.judges
def claims(result: Result) -> Iterator[Ours]:
    """Judges watermarks, victims, and moving against recomputing."""
    found = result.simulated
    latest = found.where(study="victims", victim="latest")
    for mark in latest.distinct("watermark"):
        here = latest.where(watermark=mark)
        shares = 100 * here.recomputed_share
        for id, values in (("kept_free", shares), ("latency", here.normalised_s)):
            low, mean, high = values.min(), values.mean(), values.max()
            words: dict[str, Any] = {"mark": mark, "low": low, "high": high}
            words["differs"] = True
            most = max(high - mean, mean - low)
            yield ours(id, mean, tolerance=most, num=len(here), **words)
    rules = _first(found.where(study="victims", watermark=0))
    if len(rules) > 1:
        shares, best = rules.recomputed_share, rules.recomputed_share.argmin()
        words = {"best": rules.victim[best].replace("_", " ")}
        (latest,) = rules.where(victim="latest").recomputed_share
        words |= {"share": 100 * shares[best], "latest": 100 * latest}
        saved = 1 - shares[best] / max(latest, 1e-9)
        yield ours("simulated_victims", saved, **words)
    alone = result.bring_back
    pages_of_1, pages_of_256 = alone.swap_s[[0, -1]]
    yield ours("pages_of_1", pages_of_1 / pages_of_256)
    yield ours("simulated_fifth", (alone.recompute_s / alone.swap_s).max())
    again = found.where(preemption="recompute", study="pages")
    for name in PREEMPTIONS[1:] if len(again) else ():
        ratio = again.normalised_s / found.where(preemption=name).normalised_s
        middle = ratio[np.isin(again.page_size, (16, 32, 64))]
        furthest = max(middle, key=lambda x: abs(np.log(x)))
        yield ours("as_fast", furthest, name=name, rate=PAGES_RATE)
        yield ours("faster", ratio[0], name=name)


def _first(found: Simulated) -> Simulated:
    """The rows of the first seed."""
    return found.where(seed=found.seed.min(initial=2**31))


def summary(result: Result) -> list[Part]:
    """Puts rules, watermarks and page sizes beside each other."""
    found = result.simulated
    names = ("num_preempted", "recomputed_share", "normalised_s")
    rules, sizes = _first(found.where(study="victims")), found.where(study="pages")
    kept = f"victims and pages kept free, {RATE} requests/s"
    pages = f"end to end, {PAGES_RATE} requests/s"
    back = f"{NUM_TOKENS} tokens brought back"
    return [
        rules.sheet(kept, "watermark", "victim", *names),
        result.bring_back.sheet(back, "page_size", "recompute_s", "swap_s"),
        sizes.sheet(pages, "page_size", "preemption", *names),
    ]


def plot(axes: Any, result: Result) -> None:
    """Draws victims and watermarks above, and page sizes below."""
    found, alone = result.simulated, result.bring_back
    _draw_rules(axes[0, 0], found, "kept_free", "recomputed_share", 100)
    _draw_rules(axes[0, 1], found, "latency", "normalised_s", 1000)
    ax, size = axes[1, 0], "page size [tokens]"
    again, swap = 1000 * alone.recompute_s, 1000 * alone.swap_s
    style.curve(ax, PAGE_SIZES, again, "recompute", "recompute")
    style.curve(ax, PAGE_SIZES, swap, "swap", "swap out and in")
    less = [x for x, a, b in zip(PAGE_SIZES, again, swap, strict=True) if b < a]
    title = f"{NUM_TOKENS} tokens come back sooner by swapping "
    title += f"from pages of {less[0]} on" if less else "with no page size"
    style.titled(ax, title, size, "time [ms]")
    ax, worst = axes[1, 1], ("", 0.0)
    for name in PREEMPTIONS:
        rows = found.where(study="pages", preemption=name)
        style.curve(ax, rows.page_size, 1000 * rows.normalised_s, name, name)
        if len(rows) and (most := 1000 * float(rows.normalised_s.max())) > worst[1]:
            worst = name, most
    title = (
        f"{PAGES_RATE} requests/s: {worst[0]} is worst, up to {worst[1]:,.0f} ms/token"
    )
    style.titled(ax, title, size, "latency [ms/token]")
    for ax in axes[1]:
        style.powers_of_two(ax)
        ax.set(yscale="log")
        style.plain_log(ax.yaxis)
        ax.legend()


def _draw_rules(ax: Any, found: Any, id: str, name: str, scale: int) -> None:
    """A number of every rule of victims against the pages kept free."""
    theirs = {int(x): y for x, y in BOOK.published(id).items()}
    look = {"linestyle": ":", "linewidth": 1}
    # The sketch's shares are in per cent.
    values = [(1000 if name == "normalised_s" else 1) * y for y in theirs.values()]
    style.curve(ax, [*theirs], values, "published", "earlier sketch", **look)
    for rule in RULES:
        rows, text = (
            _first(found.where(study="victims", victim=rule)),
            rule.replace("_", " "),
        )
        style.curve(ax, rows.watermark, scale * getattr(rows, name), text, text)
    latest, first = found.where(study="victims", victim="latest"), True
    for seed in latest.distinct("seed"):
        rows = latest.where(seed=seed)
        look = {"marker": "", "linewidth": 0.8, "alpha": 0.6}
        label = "latest, other draws" if first else ""
        style.curve(
            ax, rows.watermark, scale * getattr(rows, name), "latest", label, **look
        )
        first = False
    rows = _first(latest)
    values = scale * getattr(rows, name)
    if name == "recomputed_share":
        title, y = "Tokens computed again by pages kept free", "again [% of tokens]"
        if len(rows):
            title = f"Keeping {rows.watermark[-1]:.0f} pages free: {values[0]:.0f} % "
            title += f"computed again become {values[-1]:.0f} %"
    else:
        title, y = "Latency by pages kept free", "latency [ms/token]"
        if len(rows):
            title = f"Latency is least, {values.min():.0f} ms/token, with "
            title += f"{rows.watermark[int(values.argmin())]:.0f} pages kept free"
    style.titled(ax, title, "pages kept free [of 983]", y)
    ax.set_ylim(bottom=0)
    ax.legend()
