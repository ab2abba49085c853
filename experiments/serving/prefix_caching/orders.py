"""Measures hit rates of the prefix cache by pool size, order and eviction rule.

Waiting requests are served one at a time by the engine's scheduler, page pool and
prefix cache, with a model that does no work. The order is the order of arrival; or the
request with the most cached tokens among the first in the queue
(`fcfs(cached_first=True)`); or a depth-first walk of the tree of all prompts,
which needs all prompts in advance and computes every page once, the optimum.

A hit rate is pages found / pages of all prompts. Pool sizes are relative to the number
of distinct pages; a pool that holds them all never evicts. The run takes 10 minutes on
one core.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import lab
from experiments.serving.prefix_caching import serving, workloads
from experiments.serving.prefix_caching.serving import EVICTIONS, Eviction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMS = lab.claims_file(__file__)
ORDER_NAMES = {
    "depth_first": "depth first",
    "cached_first": "most cached first",
    "fcfs": "in order of arrival",
}
"""Orders of service with their labels."""


OpenShares = Annotated[tuple[float, ...], lab.Range(0, 1, "()")]


class Config(lab.ConfigRecord):
    """The prompts and the caches."""

    trace: str = "traces/mooncake_synthetic.jsonl"
    """A recording in Mooncake's format: a path, or a path below the folder in the
    environment variable JAXKV_DATA; empty for none."""
    num_users: lab.NonNegativeInt = 200
    """Number of conversations; 0 for none."""
    num_turns: lab.PositiveInt = 6
    """Turns of each conversation."""
    num_tasks: lab.NonNegativeInt = 57
    """Number of few-shot tasks; 0 for none."""
    num_questions: lab.PositiveInt = 20
    """Questions of each task."""
    shares: OpenShares = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Pool sizes as shares of the distinct pages. The smallest pool that holds the
    longest prompt and the pool that holds all pages are added."""
    window: lab.PositiveInt = 32
    """Waiting requests that "cached_first" chooses from."""
    evictions: Annotated[tuple[Eviction, ...], lab.Choices(EVICTIONS, minimum=1)] = (
        EVICTIONS
    )
    """Eviction rules for the order of arrival: least recently used, first in first out,
    random. Other orders use the first rule."""
    seed: lab.NonNegativeInt = 0
    """Seed of the generated prompts."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not (self.trace or self.num_users or self.num_tasks):
            raise ValueError("trace, num_users and num_tasks leave no prompts")


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        trace="",
        num_users=6,
        num_turns=4,
        num_tasks=5,
        num_questions=8,
        shares=(1 / 4, 1 / 2),
        window=8,
    ),
}


class WorkloadTable(lab.ResultTable):
    """Sizes of the workloads."""

    name: lab.Texts = lab.column("workload")
    num_requests: lab.Ints = lab.column("prompts", key="requests")
    num_pages: lab.Ints = lab.column(
        "pages of all prompts, with repetitions", key="pages"
    )
    num_distinct: lab.Ints = lab.column("distinct pages", key="distinct_pages")
    longest: lab.Ints = lab.column("pages of the longest prompt")
    page_size: lab.Ints = lab.column("tokens of a page")

    @property
    @lab.computed_column(key="best_share")
    def best(self) -> np.ndarray:
        """Highest possible hit rate: every page is computed once."""
        return 1 - self.num_distinct / self.num_pages


class CacheRuns(lab.ResultTable):
    """Cached pages of each serving."""

    workload: lab.Texts = lab.column("name of the workload")
    order: lab.Texts = lab.column("key of `ORDER_NAMES`")
    eviction: lab.Texts = lab.column("one of `EVICTIONS`")
    pool: lab.Ints = lab.column("pages of the pool", key="pool_pages")
    num_cached: lab.Ints = lab.column(
        "cached pages, summed over prompts", is_reported=False
    )
    most_delayed: lab.Ints = lab.column("most places by which a request was overtaken")


class CacheHitRates(CacheRuns):
    """Servings with their hit rates."""

    rate: lab.Floats = lab.column("pages found / pages of all prompts", key="hit_share")
    is_whole: lab.Bools = lab.column(
        "True if the pool holds all distinct pages", is_reported=False
    )

    def curve(
        self, workload: str, order: str, eviction: str | None = None
    ) -> "CacheHitRates":
        """Returns the servings of an order and eviction rule, by pool size.

        The default is the first eviction rule. The pool that holds all pages is left
        out, since all orders are equal there.
        """
        rates = self.where(workload=workload, order=order, is_whole=False)
        wanted = [eviction] if eviction else rates.distinct("eviction")[:1]
        rates = rates.at(np.isin(rates.eviction, wanted))
        return rates.at(np.argsort(rates.pool))


class Result(lab.ResultRecord):
    """Workloads and servings."""

    loads: WorkloadTable = lab.column("workloads", key="workloads")
    runs: CacheRuns = lab.column("servings", is_reported=False)

    @property
    @lab.computed_column(key="runs")
    def rated(self) -> CacheHitRates:
        """Servings with their hit rates."""
        names = self.loads.name.tolist()
        loads = self.loads.at([names.index(x) for x in self.runs.workload])
        return CacheHitRates(
            **lab.field_values(self.runs),
            rate=self.runs.num_cached / loads.num_pages,
            is_whole=self.runs.pool > loads.num_distinct,
        )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves every workload, order and pool; if stopped, keeps the finished ones.

    Raises:
      ValueError: the trace does not exist, or has no prefixes.
    """
    loads = []
    if config.trace:
        loads.append(workloads.read_prompt_pages(config.trace))
    for num, num_each, make in (
        (config.num_users, config.num_turns, workloads.make_chats),
        (config.num_tasks, config.num_questions, workloads.make_few_shot),
    ):
        if num:
            loads.append(make(num, num_each, config.seed))
    usual = config.evictions[0]
    settings = []
    for load in loads:
        # One more page holds the token that is always computed.
        min_pool = load.longest + 1
        full_pool = load.num_distinct + 1
        pool_sizes = (round(share * load.num_distinct) for share in config.shares)
        pools = sorted(
            {min_pool, *(max(min_pool, num) for num in pool_sizes), full_pool}
        )
        for pool in pools:
            # In a pool that holds all pages, order and eviction have no effect.
            kinds = [("fcfs", usual)]
            if pool < full_pool:
                kinds = [("depth_first", usual), ("cached_first", usual)]
                kinds += [("fcfs", eviction) for eviction in config.evictions]
            settings += [(load, pool, *kind) for kind in kinds]
    max_pool = max(load.num_distinct for load in loads) + 1
    server = serving.make_cache_engine(
        max_pool, max(load.longest for load in loads), config.window
    )
    rows = []
    for load, pool, order, eviction in progress.track(settings, "serving", "runs"):
        turns = list(range(len(load.page_ids)))
        if order == "depth_first":
            turns = workloads.depth_first_order(load.page_ids)
        hits = serving.serve_prompts(
            server,
            [load.page_ids[i] for i in turns],
            num_pages=pool,
            cached_first=order == "cached_first",
            eviction=eviction,
            progress=progress,
        )
        if hits is None:
            break
        # `turn` counts from the order of submission.
        waited = hits.turn - np.asarray(turns)
        counts = hits.num_cached.sum(), max(0, waited.max())
        rows.append((load.name, order, eviction, pool, *counts))
    described = [
        (x.name, len(x.page_ids), x.num_pages, x.num_distinct, x.longest, x.page_size)
        for x in loads
    ]
    return Result(WorkloadTable.of(described), CacheRuns.of(rows))


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns a table of hit rates for each workload that was served."""
    loads = result.loads.rows()
    served = result.rated.distinct("workload")
    return [_sheet(load, result.rated) for load in loads if load["name"] in served]


def _sheet(load: dict[str, Any], rated: CacheHitRates) -> lab.Sheet:
    runs = rated.where(workload=load["name"])
    kinds = {
        ORDER_NAMES[x]: runs.where(order=x) for x in ("depth_first", "cached_first")
    }
    for eviction in runs.distinct("eviction"):
        selected = runs.where(order="fcfs", eviction=eviction)
        kinds[f"{ORDER_NAMES['fcfs']}, {eviction}"] = selected
    rows = []
    for pool in np.unique(runs.pool).tolist():
        rates = (kind.where(pool=pool).rate.tolist() for kind in kinds.values())
        cells = [lab.format_percent(rate[0] if rate else None) for rate in rates]
        rows.append(
            [f"{pool:,}", lab.format_percent(pool / load["distinct_pages"]), *cells]
        )
    note = (
        f"{load['requests']:,} prompts of {load['pages']:,} pages, "
        f"{load['distinct_pages']:,} of them distinct, {load['page_size']} tokens each."
    )
    eager = kinds[ORDER_NAMES["cached_first"]].most_delayed
    if eager.size:
        note += (
            ' With "most cached first" a request is overtaken by at most '
            f"{eager.max():,} places."
        )
    heads = ["pool, pages", "of distinct", *kinds]
    return lab.Sheet(f"pages found: {load['name']}", heads, rows, note)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges identities and published hit rates for the workloads that were served."""
    loads = result.loads.rows()
    rated = result.rated
    load_claims = [claim for load in loads for claim in _of_load(load, rated)]
    for id in CLAIMS.ids:
        yield from (claim for claim in load_claims if claim.id == id)
    eager = [rated.curve(load["name"], "cached_first").rate for load in loads]
    pairs = zip(eager, result.loads.best, strict=True)
    shares = [float((rate / best).mean()) for rate, best in pairs if rate.size]
    if shares:
        rates = np.concatenate(eager)
        yield lab.measured("average", 100 * float(np.mean(shares)))
        yield lab.measured("lowest", 100 * float(rates.min()))
        yield lab.measured("highest", 100 * float(rates.max()))


def _of_load(load: dict[str, Any], rated: CacheHitRates) -> Iterator[lab.MeasuredValue]:
    name = load["name"]
    best = 100 * load["best_share"]
    full_pools = rated.where(workload=name, is_whole=True)
    if len(full_pools):
        rate = 100 * float(full_pools.rate[0])
        yield lab.measured("whole", rate, published=best, **load)
        yield lab.measured("recorded", rate, **load)
    rates = np.concatenate([rated.curve(name, order).rate for order in ORDER_NAMES])
    if rates.size:
        yield lab.measured("below", 100 * float(rates.max()), published=best, **load)
    walk = rated.curve(name, "depth_first")
    if len(walk):
        rate = 100 * float(walk.rate[0])
        pool = walk.pool[0]
        yield lab.measured("walk", rate, published=best, pool=pool, **load)


ORDER_KINDS = (
    ("depth_first", None, "depth first", "depth first"),
    ("cached_first", None, "most cached first", "most cached first"),
    ("fcfs", None, "in order of arrival", "in order of arrival"),
    ("fcfs", "fifo", "in order, first in evicted first", "in order of arrival"),
    ("fcfs", "random", "in order, random eviction", "in order of arrival"),
)
"""Order, eviction rule, label, and the system whose colour it has."""
LINES = {None: "-", "fifo": ":", "random": "-."}
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws hit rates by pool size, a panel for each workload."""
    loads = result.loads.rows()
    for ax, load in zip(axes, loads, strict=False):
        _draw(ax, load, result.rated)
    for ax in axes[len(loads) :]:
        ax.remove()


def _draw(ax: "Axes", load: dict[str, Any], rated: CacheHitRates) -> None:
    """Draws the servings of a workload."""
    distinct = load["distinct_pages"]
    ends = {}
    lab.draw_reference_line(ax, 100 * load["best_share"], "all repeated pages")
    for order, eviction, label, system in ORDER_KINDS:
        runs = rated.curve(load["name"], order, eviction)
        if not len(runs):
            continue
        look = {"linestyle": LINES[eviction]} | ({"marker": ""} if eviction else {})
        share = 100 * runs.pool / distinct
        lab.draw_curve(ax, share, 100 * runs.rate, system, label, **look)
        ends[label] = 100 * float(runs.rate[0])
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    title = f"{load['name']}, {load['requests']:,} prompts"
    if ends:
        best = max(ends, key=lambda x: ends[x])
        title += f": {best} finds {ends[best]:.0f} % with the smallest pool"
    x = f"pool [% of {distinct:,} distinct pages of {load['page_size']} tokens]"
    lab.set_labels(ax, title, x, "pages found [%]", ylim=(0, 100))
    ax.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(3, 1, 3.0)
)
