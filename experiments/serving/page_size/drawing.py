"""The picture of what pages cost: ratios by page size, times by context."""

import itertools
from typing import Any

from experiments.plotting import style

DASHES = ("-", "--", ":", "-.")


def plot(axes: Any, result: Any, column: int) -> None:
    """Draws the ratio against the page size, and times of one page size.

    Args:
      axes: two of them.
      result: of the experiment; without cases nothing but frames is drawn.
      column: the page size whose times are drawn.
    """
    ratios, times = axes
    found, colors = result.latency, style.colors()
    batches = list(dict.fromkeys(found.batch.tolist()))
    contexts = list(dict.fromkeys(found.context.tolist()))
    cycle = itertools.cycle((colors[5], colors[6], colors[3], colors[1]))
    looks = dict(zip(batches, cycle, strict=False))
    cases = zip(found.batch.tolist(), found.context.tolist(), strict=True)
    for i, (batch, context) in enumerate(cases):
        ratios.plot(
            result.page_size,
            found.ratio[i],
            color=looks[batch],
            linestyle=DASHES[contexts.index(context) % len(DASHES)],
            marker="o",
            label=f"{batch} x {context}",
        )
    ratios.axhline(1, color="0.6", linewidth=0.8)
    ratios.set_xscale("log", base=2)
    ratios.xaxis.set_major_formatter("{x:,.0f}")
    ratios.set_xlabel("token places in a page")
    ratios.set_ylabel("paged / contiguous")
    ratios.set_title("time over that of contiguous attention", loc="left")
    if batches:
        title = "sequences x tokens"
        ratios.legend(title=title, fontsize=6, ncols=len(batches), loc="upper center")
    for batch in batches:
        mine = found.batch == batch
        look: dict[str, Any] = {"color": looks[batch], "marker": "o"}
        paged, contiguous = (
            1e3 * seconds[mine, column]
            for seconds in (found.paged_s, found.contiguous_s)
        )
        times.plot(found.context[mine], paged, label=f"{batch} sequences", **look)
        times.plot(found.context[mine], contiguous, linestyle=":", **look)
    times.set_xlabel("tokens of each sequence")
    times.set_ylabel("ms")
    size = result.page_size[column]
    times.set_title(f"pages of {size} (dotted: contiguous)", loc="left")
    for ax, room in ((ratios, 1.45), (times, 1.0)):
        ax.set_ylim(bottom=0, top=room * ax.get_ylim()[1])
    if batches:
        times.legend()
