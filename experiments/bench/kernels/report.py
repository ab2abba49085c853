"""Report of the kernel benchmark: tables, a roofline, and lines for the README.

print(report.kernel_table(Path("experiments/records/bench_kernels")))
"""

import collections
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import lab
from pallas_kernels.bench import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLOCKS = {
    "cupti": "Times are kernel times (CUPTI) with cold caches.",
    "wall": "Times are wall-clock times of single calls, including the wait.",
    "queue": "Times are those of queued calls, because CUPTI was not found.",
}
"""Meaning of the times, by clock."""


class KernelTimes(lab.ResultTable):
    """Rows that have a time."""

    spec: lab.Texts = lab.column("name of the shape")
    implementation: lab.Texts = lab.column("name of the implementation")
    how: lab.Texts = lab.column("variant, if there are several")
    is_peer: lab.Bools = lab.column("True for a peer")
    bytes: lab.Ints = lab.column("bytes to move")
    flops: lab.Ints = lab.column("operations to compute")
    seconds: lab.Floats = lab.column(
        "a layer takes", heading="time", form=lab.format_seconds
    )
    plan_per_layer_s: np.ndarray = lab.column(
        "its part of the plan", heading="plan, share"
    )
    merge_s: np.ndarray = lab.column("time of the merge")
    target_s: lab.Floats = lab.column("that a good kernel takes")
    fraction: lab.Floats = lab.column(
        "floor / time", heading="of the floor", form=lab.format_percent
    )
    ratio: np.ndarray = lab.column("best peer", heading="best peer / it", form="{:.2f}")
    error: lab.Floats = lab.column("from float64", form="{:.1e}")

    @property
    @lab.computed_column(heading="implementation")
    def label(self) -> np.ndarray:
        """Implementations, with their variant in parentheses."""
        pairs = zip(self.implementation.tolist(), self.how.tolist(), strict=True)
        return np.array(
            [f"{label} ({how})" if how else label for label, how in pairs], str
        )

    def fastest(self, *, is_peer: bool) -> dict[str, Any] | None:
        """Returns the row of the fastest peer, or of this project's fastest kernel."""
        rows = self.where(is_peer=is_peer).rows()
        return min(rows, key=lambda row: row["seconds"], default=None)


REPORTED = ("label", "seconds", "plan_per_layer_s", "merge_s", "target_s", "fraction")
REPORTED += ("ratio", "error")


def timed_rows(rows: list[lab.Row]) -> KernelTimes:
    """Returns the rows of a result that have a time, as a table."""
    return KernelTimes.of(row for row in rows if row["seconds"] is not None)


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Tabulates the ceilings, and the times of all implementations by shape.

    Args:
      result: result of the benchmark.
    """
    head, *rows = result
    ceilings = Ceilings(**head["ceilings"])
    timings = timed_rows(rows)
    title = f"ceilings of {head['device']}"
    reached = [*_reached(ceilings).items()]
    parts: list[lab.ReportPart] = [
        lab.Sheet(title, ("", ""), reached, CLOCKS[ceilings.clock])
    ]
    # Columns without values are omitted: no plans or merges on a CPU.
    names = [
        x for x in REPORTED if any(v is not None for v in getattr(timings, x).tolist())
    ]
    for name in timings.distinct("spec"):
        selected = timings.where(spec=name)
        size = lab.format_bytes(selected.bytes[0])
        work = lab.format_flops(selected.flops[0])
        parts.append(selected.sheet(f"{name}: {size}, {work}", *names))
    absent = [(x["implementation"], x["note"]) for x in rows if x["seconds"] is None]
    if absent:
        total = len({row["spec"] for row in rows})
        reasons = collections.Counter(absent).items()
        lines = [(label, f"{num} of {total}", why) for (label, why), num in reasons]
        parts.append(lab.Sheet("not timed", ("implementation", "shapes", "why"), lines))
    return parts


def _reached(ceilings: Ceilings) -> dict[str, str]:
    return {
        "copy": f"{lab.format_bytes(ceilings.copy_bytes_per_s)}/s",
        "read": f"{lab.format_bytes(ceilings.read_bytes_per_s)}/s",
        "matrix product": f"{lab.format_flops(ceilings.flops_per_s)}/s",
        "empty call": lab.format_seconds(ceilings.empty_call_s),
    }


def plot(axes: np.ndarray, result: list[lab.Row]) -> None:
    """Draws the speed relative to the best peer, and the share of the floor, by shape.

    Args:
      axes: two axes.
      result: result of the benchmark; empty axes without times.
    """
    timings = timed_rows(result[1:])
    names = list(timings.distinct("spec"))
    if not names:
        return
    best = [
        [timings.where(spec=name).fastest(is_peer=is_peer) for name in names]
        for is_peer in (False, True)
    ]
    _draw_speeds(axes[0], *best)
    _draw_floors(axes[1], *best)
    short = [name.removesuffix("-float32").removesuffix("-bfloat16") for name in names]
    for ax in axes:
        ax.set_yticks(range(len(names)), short)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(axis="y", color="0.9", linewidth=0.6)
        ax.tick_params(axis="y", length=0)


type Fastest = list[dict[str, Any] | None]
"""Fastest row of every shape, of this project or of peers."""


def _draw_speeds(ax: "Axes", jaxkv_best: Fastest, peers: Fastest) -> None:
    """Draws the time of the best peer over that of jaxkv, for shapes that have both."""
    both = [
        (i, peer["seconds"] / selected["seconds"])
        for i, (selected, peer) in enumerate(zip(jaxkv_best, peers, strict=True))
        if selected and peer
    ]
    for i, ratio in both:
        lab.draw_curve(
            ax, [1, ratio], [i, i], "jaxkv", marker="", linewidth=3, alpha=0.4
        )
        lab.draw_curve(ax, [ratio], [i], "jaxkv", markersize=7)
        side = (7, "left") if ratio >= 1 else (-7, "right")
        look = {"ha": side[1], "va": "center_baseline"}
        lab.annotate(ax, f"{ratio:.2g}", (ratio, i), (side[0], 0), **look)
    lab.draw_reference_line(ax, 1, "as fast as the best peer", along="y")
    num = sum(ratio > 1 for _, ratio in both)
    title = f"jaxkv is faster than the best peer on {num} of {len(both)} shapes"
    lab.set_labels(ax, title, "best peer's time / jaxkv's [ratio]", "", xscale="log")
    ax.margins(x=0.12)
    lab.label_log_axis(ax.xaxis)
    ax.legend()


def _draw_floors(ax: "Axes", jaxkv_best: Fastest, peers: Fastest) -> None:
    """Draws the least possible time as a share of the time, by side."""
    medians = []
    for rows, name, label in (
        (peers, "published", "best peer"),
        (jaxkv_best, "jaxkv", "jaxkv"),
    ):
        points = [(i, 100 * x["fraction"]) for i, x in enumerate(rows) if x]
        if points:
            places, shares = zip(*points, strict=True)
            look = {"linestyle": "", "markersize": 7}
            lab.draw_curve(ax, shares, places, name, label, **look)
            medians.append(f"{label} {np.median(shares):.0f} %")
    title = f"Share of the roofline's speed, median: {', '.join(medians[::-1])}"
    lab.set_labels(ax, title, "least possible time / time [%]", "", xlim=(0, 100))
    ax.legend()


TABLE_HEADS = ("shape", "bytes", "jaxkv", "best peer", "best / jaxkv", "of the floor")
TABLE_HEADS += ("target",)


def kernel_table(folder: Path) -> str:
    """Renders a record as a table in Markdown, followed by its provenance.

    The time of a shape is that of the fastest kernel of this project, including a
    layer's share of the plan; the faster side is bold. A shape without a time has a
    line with the reason.

    Args:
      folder: complete run folder of `bench kernels` on a GPU.

    Raises:
      ValueError: the folder is not such a run.
    """
    run = lab.read_run(folder, lab.load_experiment("bench_kernels"))
    head, *rows = run.result
    if head["device"] == "cpu":
        raise ValueError(f"{folder}: was made on a CPU; the table is of a GPU's record")
    if run.env.get("status") != "done":
        raise ValueError(f"{folder}: {run.env.get('status')=}; only a whole run counts")
    names = dict.fromkeys(row["spec"] for row in rows)
    lines = [_line(name, [x for x in rows if x["spec"] == name]) for name in names]
    ceilings = Ceilings(**head["ceilings"])
    versions = {"jax": run.env["versions"].get("jax", "?"), **head["peers"]}
    provenance = [
        head["device"],
        run.env["started_at"][:10],
        f"commit {(run.env['commit'] or 'unknown')[:10]}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    reached = ", ".join(f"{name} {x}" for name, x in _reached(ceilings).items())
    note = f"{'; '.join(provenance)}. Measured in the same run: {reached}. "
    note += CLOCKS[ceilings.clock]
    return lab.part_to_markdown(lab.Sheet("", TABLE_HEADS, lines, note))


def _line(name: str, rows: list[lab.Row]) -> tuple[str, ...]:
    """Returns the line of a shape."""
    timings = timed_rows(rows)
    jaxkv_best, peer = (timings.fastest(is_peer=is_peer) for is_peer in (False, True))
    peer_time = (
        f"{lab.format_seconds(peer['seconds'])} ({peer['label']})" if peer else "-"
    )
    size = lab.format_bytes(rows[0]["bytes"])
    if jaxkv_best is None:
        notes = dict.fromkeys(row["note"] for row in rows if not row["is_peer"])
        return name, size, f"not timed: {'; '.join(notes)}", peer_time, "-", "-", "-"
    selected = lab.format_seconds(jaxkv_best["seconds"])
    if peer and peer["seconds"] < jaxkv_best["seconds"]:
        peer_time = f"**{peer_time}**"
    else:
        selected = f"**{selected}**"
    if jaxkv_best["implementation"] != "mosaic_gpu":
        selected += f" ({jaxkv_best['implementation']})"
    ratio = f"{peer['seconds'] / jaxkv_best['seconds']:.2f}" if peer else "-"
    share = lab.format_percent(jaxkv_best["fraction"])
    target = lab.format_seconds(jaxkv_best["target_s"])
    return name, size, selected, peer_time, ratio, share, target
