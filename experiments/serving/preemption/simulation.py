"""Simulates preemption at the paper's scale.

OPT-13B serves chat requests in simulated time. The rule for victims and the watermark
determine the recomputed share. The cost of swapping depends on the page size, because
every page needs separate transfers of K and V in every layer.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import runs, settings
from jaxkv import scheduling, simulation
from jaxkv.scheduling import Victim
from jaxkv.simulation import SimulationMember
from jaxkv.workloads import Workload, open_loop
from scaling.costs import kv_bytes_per_token

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REQUEST_RATE = 1.9
"""Requests/s, close to the rate that the memory sustains."""
PAGES_RATE = 1.6
"""Requests/s of the comparison of page sizes; large pages sustain less."""
NUM_SEEDS = 4
"""Draws of the load under the rule "latest". At a rate this close to the sustained one,
a single draw of 1,024 requests varies too much."""
MAX_SLOTS = 96
WATERMARK_PAGES = (0, 8, 16, 32, 64, 128)
"""Pages kept free at admission, of 983."""
PREEMPTIONS = ("recompute", "swap", "swap, hold new")
"""Ways to preempt. "hold new" admits no new request until all preempted ones are done,
as in the paper."""
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
VICTIM_RULES: tuple[Victim, ...] = get_args(Victim.__value__)
BUS = 25e9
"""Bandwidth between GPU and host in bytes/s: PCIe 4 x16 reaches 25e9 of 32e9."""
LAUNCH_S = 4e-6
"""Fixed time of a transfer, chosen here."""
NUM_TOKENS = 512
"""Tokens of the restored sequence."""
CLAIMS = lab.claims_file(__file__)


class Config(lab.ConfigRecord):
    """The load."""

    simulated_requests: lab.PositiveInt = 1024
    """Number of requests."""
    seed: lab.NonNegativeInt = 0
    """First seed of lengths and arrivals."""


CONFIGS = {"paper": Config()}


class SimulatedServings(lab.ResultTable):
    """Preemptions and latency of each simulated setting."""

    study: lab.Texts = lab.column(
        '"victims" (with watermarks) or "pages" (with preemption)'
    )
    victim: lab.Texts = lab.column("rule for victims")
    watermark: lab.Ints = lab.column(
        "pages kept free at admission", heading="pages kept free"
    )
    preemption: lab.Texts = lab.column("one of `PREEMPTIONS`")
    page_size: lab.Ints = lab.column("token places in a page")
    rate: lab.Floats = lab.column("requests/s")
    seed: lab.Ints = lab.column("seed of lengths and arrivals")
    num_preempted: lab.Ints = lab.column("preemptions", heading="preempted")
    recomputed_share: lab.Floats = lab.column(
        "share of all tokens", heading="computed again"
    )
    normalised_s: lab.Floats = lab.column("latency in s/token", heading="a token")
    moved_bytes: lab.Floats = lab.column("bytes over the bus, both ways")


class RestoreCosts(lab.ResultTable):
    """Times to restore a single request by page size."""

    page_size: lab.Ints = lab.column("token places in a page")
    num_tokens: lab.Ints = lab.column("tokens of the request")
    recompute_s: lab.Floats = lab.column("recomputation")
    swap_s: lab.Floats = lab.column("swapping out and in")


class Result(lab.ResultRecord):
    """Simulated settings."""

    simulated: SimulatedServings = lab.column("by setting")

    @property
    @lab.computed_column(heading=f"{NUM_TOKENS} tokens brought back")
    def bring_back(self) -> RestoreCosts:
        """Times to restore a single request, calculated."""
        sizes = PAGE_SIZES
        again = recompute_s(NUM_TOKENS)
        return RestoreCosts.of(
            (x, NUM_TOKENS, again, restore_s(NUM_TOKENS, x)) for x in sizes
        )


def page_bytes(page_size: int) -> int:
    """Returns bytes of K and V of a page in all layers; 16 tokens: 13,107,200."""
    model = settings.SERVERS["13B"].description
    return int(kv_bytes_per_token(model)) * page_size


def swap_s(page_size: int) -> float:
    """Returns the time to move a page one way: K and V of every layer in sequence.

    A page of 16 tokens: 80 * 4 us + 13.1 MB / 25 GB/s = 0.84 ms.
    """
    layers = settings.SERVERS["13B"].description.num_layers
    return 2 * layers * LAUNCH_S + page_bytes(page_size) / BUS


def recompute_s(num_tokens: int) -> float:
    """Returns the time to recompute tokens in a step that is run in any case."""
    return float(settings.step_time(settings.SERVERS["13B"]).prefill[1]) * num_tokens


def restore_s(num_tokens: int, page_size: int) -> float:
    """Returns the time to move a sequence's pages out and in."""
    return 2 * -(-num_tokens // page_size) * swap_s(page_size)


class SimulatedSetting(NamedTuple):
    """A simulated preemption policy and load; fields as in `SimulatedServings`."""

    study: str
    victim: Victim
    watermark: int
    preemption: str
    page_size: int
    rate: float
    seed: int


def list_settings(seed: int) -> list[SimulatedSetting]:
    """Returns all settings; "latest" has `NUM_SEEDS` seeds, other rules have one."""
    cases = [
        SimulatedSetting(
            "victims",
            rule,
            mark,
            "recompute",
            settings.PAGE_SIZE,
            REQUEST_RATE,
            seed + k,
        )
        for rule in VICTIM_RULES
        for k in range(NUM_SEEDS if rule == "latest" else 1)
        for mark in WATERMARK_PAGES
    ]
    return cases + [
        SimulatedSetting("pages", "latest", 0, preemption, size, PAGES_RATE, seed)
        for preemption in PREEMPTIONS
        for size in PAGE_SIZES
    ]


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates every setting."""
    law = settings.DATASETS["ShareGPT"]
    num = config.simulated_requests
    cases = list_settings(config.seed)
    loads = [
        open_loop(np.random.default_rng(setting.seed), law, rate=setting.rate, num=num)
        for setting in cases
    ]
    served = simulation.simulate(
        simulation.stack([*map(_member, loads, cases)]),
        max_slots=MAX_SLOTS,
        head=runs.HEAD_SIZE,
        progress=progress,
    )
    totals = served.totals
    rows = []
    for i, setting in enumerate(cases):
        fed = max(1, int(totals.decoded[i] + totals.read[i]))
        took_s = served.finish_s[i] - served.arrival_s[i]
        again = served.recomputed[i].sum() / fed
        latency_s = np.mean(took_s / np.asarray(loads[i].output))
        moved = int(totals.swapped_pages[i]) * page_bytes(setting.page_size)
        rows.append(
            (*setting, served.preempted[i].sum(), again, latency_s, float(moved))
        )
    return Result(SimulatedServings.of(rows))


def _member(load: Workload, setting: SimulatedSetting) -> SimulationMember:
    server = settings.SERVERS["13B"]
    pages = server.num_places // setting.page_size
    swaps = setting.preemption != "recompute"
    policy = scheduling.fcfs(
        watermark=setting.watermark,
        victim=setting.victim,
        preemption="swap" if swaps else "recompute",
        hold_new="hold new" in setting.preemption,
        stackable=True,
    )
    capacity = runs.pool_capacity(pages, setting.page_size)._replace(
        max_swap_pages=jnp.int32(pages if swaps else 0)
    )
    cost = settings.step_time(server)._replace(
        swap_s=jnp.float32(swap_s(setting.page_size))
    )
    return SimulationMember(load, capacity, policy, cost)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges watermarks, rules for victims, and swapping against recomputation."""
    servings = result.simulated
    rules = _first(servings.where(study="victims", watermark=0))
    if len(rules) > 1:
        shares = rules.recomputed_share
        best = rules.recomputed_share.argmin()
        words: dict[str, Any] = {"best": rules.victim[best].replace("_", " ")}
        (latest,) = rules.where(victim="latest").recomputed_share
        words |= {"share": 100 * shares[best], "latest": 100 * latest}
        saved = 1 - shares[best] / max(latest, 1e-9)
        yield lab.measured("simulated_victims", saved, **words)
    single = result.bring_back
    pages_of_1, pages_of_256 = single.swap_s[[0, -1]]
    yield lab.measured("pages_of_1", pages_of_1 / pages_of_256)
    yield lab.measured("simulated_fifth", (single.recompute_s / single.swap_s).max())
    again = servings.where(preemption="recompute", study="pages")
    for name in PREEMPTIONS[1:] if len(again) else ():
        ratio = again.normalised_s / servings.where(preemption=name).normalised_s
        middle = ratio[np.isin(again.page_size, (16, 32, 64))]
        furthest = max(middle, key=lambda x: abs(np.log(x)))
        yield lab.measured("as_fast", furthest, name=name, rate=PAGES_RATE)
        yield lab.measured("faster", ratio[0], name=name)


def _first(servings: SimulatedServings) -> SimulatedServings:
    """Returns the rows of the first seed."""
    return servings.where(seed=servings.seed.min(initial=2**31))


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of rules, watermarks and page sizes."""
    servings = result.simulated
    names = ("num_preempted", "recomputed_share", "normalised_s")
    rules = _first(servings.where(study="victims"))
    sizes = servings.where(study="pages")
    free_title = f"victims and pages kept free, {REQUEST_RATE} requests/s"
    pages = f"end to end, {PAGES_RATE} requests/s"
    back = f"{NUM_TOKENS} tokens restored"
    return [
        rules.sheet(free_title, "watermark", "victim", *names),
        result.bring_back.sheet(back, "page_size", "recompute_s", "swap_s"),
        sizes.sheet(pages, "page_size", "preemption", *names),
    ]


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws rules and watermarks above, page sizes below."""
    servings = result.simulated
    single = result.bring_back
    _draw_rules(axes[0, 0], servings, "recomputed_share", 100)
    _draw_rules(axes[0, 1], servings, "normalised_s", 1000)
    ax = axes[1, 0]
    size = "page size [tokens]"
    again = 1000 * single.recompute_s
    swap = 1000 * single.swap_s
    lab.draw_curve(ax, PAGE_SIZES, again, "recompute", "recompute")
    lab.draw_curve(ax, PAGE_SIZES, swap, "swap", "swap out and in")
    less = [x for x, a, b in zip(PAGE_SIZES, again, swap, strict=True) if b < a]
    title = f"Swapping restores {NUM_TOKENS} tokens sooner "
    title += f"from pages of {less[0]} on" if less else "with no page size"
    lab.set_labels(ax, title, size, "time [ms]")
    ax = axes[1, 1]
    worst = ("", 0.0)
    for name in PREEMPTIONS:
        rows = servings.where(study="pages", preemption=name)
        lab.draw_curve(ax, rows.page_size, 1000 * rows.normalised_s, name, name)
        if (
            len(rows)
            and (latency_ms := 1000 * float(rows.normalised_s.max())) > worst[1]
        ):
            worst = name, latency_ms
    title = (
        f"{PAGES_RATE} requests/s: {worst[0]} is worst, up to {worst[1]:,.0f} ms/token"
    )
    lab.set_labels(ax, title, size, "latency [ms/token]")
    for ax in axes[1]:
        lab.use_powers_of_two(ax)
        ax.set(yscale="log")
        lab.label_log_axis(ax.yaxis)
        ax.legend()


def _draw_rules(ax: "Axes", servings: SimulatedServings, name: str, scale: int) -> None:
    """Draws a metric of every rule for victims by pages kept free."""
    for rule in VICTIM_RULES:
        rows = _first(servings.where(study="victims", victim=rule))
        text = rule.replace("_", " ")
        lab.draw_curve(ax, rows.watermark, scale * getattr(rows, name), text, text)
    latest = servings.where(study="victims", victim="latest")
    first = True
    for seed in latest.distinct("seed"):
        rows = latest.where(seed=seed)
        look = {"marker": "", "linewidth": 0.8, "alpha": 0.6}
        label = "latest, other draws" if first else ""
        lab.draw_curve(
            ax, rows.watermark, scale * getattr(rows, name), "latest", label, **look
        )
        first = False
    rows = _first(latest)
    values = scale * getattr(rows, name)
    if name == "recomputed_share":
        title = "Tokens computed again by pages kept free"
        y = "again [% of tokens]"
        if len(rows):
            title = f"Keeping {rows.watermark[-1]:.0f} pages free: {values[0]:.0f} % "
            title += f"computed again become {values[-1]:.0f} %"
    else:
        title = "Latency by pages kept free"
        y = "latency [ms/token]"
        if len(rows):
            title = f"Latency is least, {values.min():.0f} ms/token, with "
            title += f"{rows.watermark[int(values.argmin())]:.0f} pages kept free"
    lab.set_labels(ax, title, "pages kept free [of 983]", y)
    ax.set_ylim(bottom=0)
    ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    summary,
    panels=lab.Panels(2, 2, 3.7),
    switch=("simulated_requests", True),
)
