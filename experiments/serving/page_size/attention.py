"""Times attention over pages and over contiguous memory.

A decode step with the batch and context sizes of the paper's figure is run over pages
of every size, and with the fastest implementation over contiguous memory. Both are
checked against float64 and timed alternately. A page that holds a whole sequence needs
no page table lookups, so the remaining overhead is due to the kernel.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.harness import MAX_ERROR, KernelRun, attention_implementations
from pallas_kernels import bench, devices
from pallas_kernels.bench import (
    AttentionProblem,
    HeadShape,
    Spec,
    make_attention,
    measure_empty,
    num_turns,
)

PAPER_PAGE_SIZE = 16
"""Default page size of vLLM and of section 7.2."""
CONTIGUOUS = ("XLA head-major", "XLA contiguous", "cuDNN contiguous")


class Config(lab.ConfigRecord):
    """Shapes of a decode step."""

    batches: lab.AscendingInts = (8, 32)
    """Batch sizes."""
    contexts: lab.AscendingInts = (64, 128, 256)
    """Context lengths in tokens with the new token, ascending."""
    page_sizes: lab.AscendingInts = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Token places in a page; ascending."""
    num_q_heads: lab.PositiveInt = 40
    """Query heads; OPT-13B, the model of most of the paper's numbers, has 40."""
    num_kv_heads: lab.PositiveInt = 40
    """Key and value heads."""
    head_dim: lab.PositiveInt = 128
    """Elements of a head."""
    repeats: lab.PositiveInt = 5
    """Rounds, each of which times every implementation once."""
    num_calls: Annotated[int, lab.Range(2)] = 3
    """Calls of a round, of which the median counts."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads!r} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads!r}"
            )


CONFIGS = {
    "smoke": Config(
        batches=(2,),
        contexts=(32, 64),
        page_sizes=(4, 16),
        num_q_heads=4,
        num_kv_heads=4,
        head_dim=16,
        repeats=2,
        num_calls=2,
    ),
    "real": Config(),
}


Times = Float[np.ndarray, "rows page_sizes"]


class Latency(lab.ResultTable):
    """Latency of each batch and context size, by page size.

    NaN for page sizes that the implementation does not support.
    """

    batch: lab.Ints = lab.column("sequences")
    context: lab.Ints = lab.column("tokens of each sequence")
    paged_s: Times = lab.column("attention over pages")
    contiguous_s: Times = lab.column(
        "fastest attention over contiguous memory in the rounds of that page size"
    )
    ratio: Times = lab.column("median over rounds of paged / contiguous")
    error: Times = lab.column("error of paged attention from float64")


class Result(lab.ResultRecord):
    """Latencies and the device they were measured on."""

    device: str = lab.column("kind of device")
    clock: str = lab.column("clock, as in `timing.Timing`")
    paged: str = lab.column("implementation of paged attention")
    page_size: np.ndarray = lab.column("token places in a page")
    latency: Latency = lab.column("by batch and context")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Measures all shapes; if stopped, keeps the finished ones."""
    target = devices.current_target()
    on_gpu = target.platform == "gpu"
    paged = "mosaic_gpu" if on_gpu else "reference"
    rows = []
    cases = [(b, n) for b in config.batches for n in config.contexts]
    for batch, context in progress.track(cases, "shapes", "shapes"):
        cells: list[Cell] = []
        contiguous = None
        for page_size in config.page_sizes:
            progress.show(f"{batch} sequences of {context}, pages of {page_size}")
            spec = Spec(
                kind="decode",
                batch=batch,
                context=context - 1,
                heads=HeadShape(
                    config.num_q_heads, config.num_kv_heads, config.head_dim
                ),
                page_size=page_size,
                dtype="bfloat16" if on_gpu else "float32",
            )
            turns = num_turns(spec.bytes, target.kind)
            problem = make_attention(spec, num_turns=turns)
            contiguous = contiguous or _fastest(problem)
            cells.append(_measure(problem, (paged, contiguous), config))
        rows.append((batch, context, *zip(*cells, strict=True)))
    return Result(
        device=target.kind,
        clock=measure_empty(num_calls=2).clock,
        paged=paged,
        page_size=np.asarray(config.page_sizes),
        latency=Latency.of(rows),
    )


type Cell = tuple[float, float, float, float]
"""Seconds over pages and over contiguous memory, their ratio, and the error."""


def _fastest(problem: AttentionProblem) -> str:
    """Returns the name of the fastest correct attention over contiguous memory.

    Raises:
      RuntimeError: no implementation is correct.
    """
    seconds = {
        name: bench.measure(run.call, num_calls=2).seconds
        for name in CONTIGUOUS
        if (run := _prepare(problem, name)) and _is_right(problem, run)
    }
    if not seconds:
        raise RuntimeError(
            f"{problem.spec.name}: no contiguous attention has an error within bounds"
        )
    return min(seconds, key=seconds.__getitem__)


def _measure(problem: AttentionProblem, names: tuple[str, str], config: Config) -> Cell:
    """Times both alternately; NaN if the first does not support the page size.

    Raises:
      RuntimeError: the first supports it, and its result is wrong.
    """
    paged, contiguous = (_prepare(problem, name) for name in names)
    if paged is None or contiguous is None:
        return math.nan, math.nan, math.nan, math.nan
    if not _is_right(problem, paged):
        raise RuntimeError(f"{problem.spec.name}: {names[0]} is wrong")
    rounds = np.asarray(
        [
            [
                bench.measure(run.call, num_calls=config.num_calls).seconds
                for run in (paged, contiguous)
            ]
            for _ in range(config.repeats)
        ]
    )
    paged_s, contiguous_s = np.median(rounds, axis=0).tolist()
    ratio = float(np.median(rounds[:, 0] / rounds[:, 1]))
    return paged_s, contiguous_s, ratio, paged.error()


def _prepare(problem: AttentionProblem, name: str) -> KernelRun | None:
    """Prepares an implementation; None if it refuses the problem."""
    implementations = {x.name: x for x in attention_implementations()}
    try:
        return implementations[name].prepare(problem)
    except ValueError:  # unsupported page size, or no GPU
        return None


def _is_right(problem: AttentionProblem, run: KernelRun) -> bool:
    return run.error() <= MAX_ERROR[problem.spec.dtype]


def _paper_column(result: Result) -> int:
    """Returns the column of the paper's page size, or of the nearest one."""
    return int(np.argmin(np.abs(result.page_size - PAPER_PAGE_SIZE)))


def metrics(result: Result) -> dict[str, Any]:
    """Returns ratios by shape and page size, and times at the paper's page size."""
    latency = result.latency
    column = _paper_column(result)
    sizes = result.page_size.tolist()
    usual = sizes[column]
    rows = [
        {"sequences": row["batch"], "tokens": row["context"]}
        | {f"paged_s, pages of {usual}": row["paged_s"][column]}
        | {"contiguous_s": row["contiguous_s"][column]}
        | {f"ratio, {n}": x for n, x in zip(sizes, row["ratio"], strict=True)}
        # The largest page holds a whole sequence: its ratio is the kernel's overhead,
        # and the remainder is that of the page table.
        | {f"ratio, {usual} / {sizes[-1]}": row["ratio"][column] / row["ratio"][-1]}
        for row in latency.rows()
    ]
    return lab.metrics(result) | {"latency": rows}


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the published overhead of pages with the measured one."""
    latency = result.latency
    column = _paper_column(result)
    ratios = latency.ratio[:, column]
    finite_ratios = ratios[np.isfinite(ratios)]
    low, high = (
        (finite_ratios.min(), finite_ratios.max())
        if finite_ratios.size
        else (math.nan, math.nan)
    )
    spread = f"Ours: {low:.2f} to {high:.2f} over all shapes"
    if finite_ratios.size and np.isfinite(latency.ratio[:, -1]).all():
        relative = float(np.nanmedian(ratios / latency.ratio[:, -1]))
        max_page_size = int(result.page_size[-1])
        spread += (
            f"; {relative:.2f} times that of pages of {max_page_size}, in the median"
        )
    on_cpu = "is jnp against jnp on"
    on_gpu = "runs against cuDNN's and XLA's on"
    words: dict[str, Any] = {
        "size": int(result.page_size[column]),
        "peers": on_gpu if result.paged == "mosaic_gpu" else on_cpu,
        "device": result.device,
        "spread": spread,
    }
    yield lab.measured("price", float(low), which="where it costs least", **words)
    yield lab.measured("price", float(high), which="where it costs most", **words)


DASHES = ("-", "--", ":", "-.")
COLOR_INDICES = (5, 6, 3, 1)
MARKERS = "os^d"


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the ratio by page size, and times as in the paper."""
    ratios, times = axes
    column = _paper_column(result)
    latency = result.latency
    batches = latency.distinct("batch")
    contexts = latency.distinct("context")
    looks = dict(
        zip(batches, itertools.cycle(zip(COLOR_INDICES, MARKERS, strict=True)))
    )
    for row in latency.rows():
        batch = row["batch"]
        context = row["context"]
        color, mark = looks[batch]
        look = {"linestyle": DASHES[contexts.index(context) % 4], "marker": mark}
        label = f"{batch} x {context}"
        lab.draw_curve(ratios, result.page_size, row["ratio"], color, label, **look)
    for batch, (color, mark) in looks.items():
        subset = latency.where(batch=batch)
        paged = subset.paged_s[:, column]
        contiguous = subset.contiguous_s[:, column]
        label = f"{batch} sequence{'s' * (batch > 1)}"
        lab.draw_curve(
            times, subset.context, 1e3 * paged, color, f"{label}, pages", marker=mark
        )
        look = {"linestyle": ":", "marker": mark}
        label = f"{label}, contiguous"
        lab.draw_curve(times, subset.context, 1e3 * contiguous, color, label, **look)
    lab.draw_reference_line(ratios, 1, "contiguous")
    lab.use_powers_of_two(ratios)
    title = times_title = "Attention over pages"
    if batches:
        at_size = latency.ratio[:, column]
        size = result.page_size[column]
        min_ratio = at_size.min()
        most_ratio = at_size.max()
        title = (
            f"Pages of {size} take {min_ratio:.2f} to {most_ratio:.2f} times as long "
        )
        title += "as contiguous attention"
        max_ms = 1e3 * latency.paged_s[:, column].max()
        times_title = f"Pages of {size}: at most {max_ms:.3g} ms a step"
        ratios.legend(title="sequences x tokens")
        times.legend()
    lab.set_labels(ratios, title, "page size [tokens]", "paged / contiguous [ratio]")
    lab.set_labels(times, times_title, "length of each sequence [tokens]", "time [ms]")
    for ax in axes:
        ax.set_ylim(bottom=0)


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    metrics=metrics,
    panels=lab.Panels(2, 1, 3.6),
    switch=("hours", False),
)
