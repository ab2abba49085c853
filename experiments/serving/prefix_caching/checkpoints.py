"""Measures hit rates of models with recurrent layers, by the interval of checkpoints.

A request can start on cached pages only at a checkpoint of the recurrent state. For the
sizes of such a model, checkpoints at several intervals share a memory with the pages.
Requests are served one at a time in order of arrival, as in `orders`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np

from experiments import lab
from experiments.serving.prefix_caching import serving, workloads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMS = lab.claims_file(__file__)


class Config(lab.ConfigRecord):
    """The prompts, and the memory of pages and checkpoints."""

    num_users: lab.PositiveInt = 50
    """Number of conversations."""
    num_turns: lab.PositiveInt = 6
    """Turns of each conversation."""
    num_tasks: lab.PositiveInt = 16
    """Number of few-shot tasks."""
    num_questions: lab.PositiveInt = 20
    """Questions of each task."""
    intervals: tuple[lab.PositiveInt, ...] = (16, 64, 256)
    """Tokens between checkpoints, multiples of those of a page, 16."""
    memories_gib: tuple[lab.PositiveInt, ...] = (8, 32)
    """Memory of pages and checkpoints together, in GiB, besides one that holds all."""
    checkpoint_share: Annotated[float, lab.Range(0, 1, "()")] = 0.75
    """Part of the memory that checkpoints have."""
    page_kib: lab.PositiveInt = 384
    """Bytes of K and V of a page, in KiB. The default is that of Qwen3-Next-80B-A3B in
    16 bits: 12 layers of 2 heads of 256 numbers."""
    state_kib: lab.PositiveInt = 75_456
    """Bytes of a checkpoint, in KiB. The default is that of Qwen3-Next-80B-A3B: 36
    layers of 32 states of 128 x 128 numbers in 32 bits, and 3 inputs of convolutions of
    8,192 numbers in 16 bits."""
    seed: lab.NonNegativeInt = 0
    """Seed of the generated prompts."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        size = workloads.PAGE_SIZE
        if not self.intervals or any(x % size for x in self.intervals):
            raise ValueError(f"intervals={self.intervals} must be multiples of {size}")
        least = min(self.memories_gib, default=1) * 2**20 * self.checkpoint_share
        if least < self.state_kib:
            raise ValueError(
                f"memories_gib={self.memories_gib} must hold a checkpoint of "
                f"state_kib={self.state_kib}"
            )


CONFIGS = {
    "hybrids": Config(),
    "hybrids_smoke": Config(
        num_users=6,
        num_turns=4,
        num_tasks=5,
        num_questions=8,
        intervals=(32,),
        memories_gib=(1,),
        page_kib=16_384,
        state_kib=131_072,
    ),
}


class Result(lab.ResultTable):
    """Servings, by workload, interval and memory."""

    workload: lab.Texts = lab.column("workload", heading="prompts")
    interval: lab.Ints = lab.column("tokens between checkpoints", heading="interval")
    memory_gib: lab.Ints = lab.column("memory in GiB; 0 holds all", heading="GiB")
    pool: lab.Ints = lab.column("pages of the pool", heading="pages")
    num_checkpoints: lab.Ints = lab.column("checkpoints", heading="checkpoints")
    num_pages: lab.Ints = lab.column("pages of all prompts", heading="prompt pages")
    num_cached: lab.Ints = lab.column("cached pages, summed over prompts")
    num_shareable: lab.Ints = lab.column(
        "pages up to the last border of an interval that an earlier prompt has too"
    )

    @property
    @lab.computed_column(heading="pages found", form=lab.format_percent)
    def rate(self) -> np.ndarray:
        """Pages found / pages of all prompts."""
        return self.num_cached / self.num_pages

    @property
    @lab.computed_column(heading="of those up to a checkpoint", form=lab.format_percent)
    def share(self) -> np.ndarray:
        """Pages found / pages up to the last border that an earlier prompt has too."""
        return self.num_cached / np.maximum(self.num_shareable, 1)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves each workload at each interval; if stopped, keeps the finished ones."""
    loads = [
        workloads.make_chats(config.num_users, config.num_turns, config.seed),
        workloads.make_few_shot(config.num_tasks, config.num_questions, config.seed),
    ]
    settings = [
        (load, interval, memory)
        for load in loads
        for interval in config.intervals
        for memory in (0, *config.memories_gib)
    ]
    rows = []
    for load, interval, memory in progress.track(settings, "serving", "runs"):
        pages = interval // load.page_size
        pool = load.num_distinct + 1
        num_checkpoints = load.num_distinct
        if memory:
            kib = memory * 2**20
            pool = int(kib * (1 - config.checkpoint_share)) // config.page_kib
            # One more page holds the token that is always computed.
            pool = min(max(pool, load.longest + 1), load.num_distinct + 1)
            num_checkpoints = int(kib * config.checkpoint_share) // config.state_kib
        hits = serving.serve_prompts(
            serving.make_cache_engine(
                pool, load.longest, 1, interval=pages, num_checkpoints=num_checkpoints
            ),
            load.page_ids,
            progress=progress,
        )
        if hits is None:
            break
        shareable = workloads.count_shareable(load.page_ids, pages)
        sizes = pool, num_checkpoints, load.num_pages, hits.num_cached.sum(), shareable
        rows.append((load.name, interval, memory, *sizes))
    return Result.of(rows)


def summary(result: Result) -> list[lab.ReportPart]:
    """Tabulates the hit rates."""
    names = ("workload", "interval", "memory_gib", "pool", "num_checkpoints")
    note = (
        "0 GiB: memory for everything. The last column is relative to the pages up to "
        "the last border of an interval that an earlier prompt has too."
    )
    return [result.sheet("hit rates", *names, "rate", "share", note=note)]


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the share found with memory for everything."""
    runs = result.where(memory_gib=0)
    if len(runs):
        yield lab.measured("checkpoints", 100 * float(runs.share.min()))


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the share of pages by interval, a panel for each workload."""
    for ax, name in zip(axes, result.distinct("workload"), strict=False):
        _draw(ax, name, result.where(workload=name))


def _draw(ax: "Axes", name: str, runs: Result) -> None:
    intervals = runs.distinct("interval")
    memories = runs.distinct("memory_gib")
    width = 0.8 / len(memories)
    for number, memory in enumerate(memories):
        rates = 100 * runs.where(memory_gib=memory).rate
        places = np.arange(len(rates)) + (number - (len(memories) - 1) / 2) * width
        label = f"{memory} GiB" if memory else "memory for all"
        ax.bar(places, rates, 0.9 * width, label=label)
    ax.set_xticks(range(len(intervals)), [f"{x:,}" for x in intervals])
    lab.set_labels(
        ax, name, "interval of checkpoints [tokens]", "pages found [%]", ylim=(0, 100)
    )
    ax.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(1, 2, 3.0)
)
