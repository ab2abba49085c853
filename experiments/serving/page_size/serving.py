"""Serves whole workloads with pages of every size, in simulated time.

A step takes as long whatever the pages: what is left is memory, the places of the last
page of each sequence that nobody uses yet. What tables cost is asked of the kernel.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.framework import Claim, judge
from experiments.harness import Members, simulating
from experiments.plotting import style
from experiments.serving.latency_vs_rate import runs, settings
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity

PAPER = "Kwon et al. 2023, arXiv:2309.06180, figure 18b"
OURS = "an earlier simulation of ours, of the paper's mean lengths"
SLOTS: Mapping[str, int] = {"ShareGPT": 96, "Alpaca": 256}
LOADED: Mapping[str, float] = {"ShareGPT": 1.7, "Alpaca": 25.0}
"""Requests a second at which latencies are compared: near what is borne."""
FULL: Mapping[str, float] = {"ShareGPT": 2.2, "Alpaca": 60.0}
"""More than is borne: where memory is full."""
BEST: Mapping[str, tuple[int, int]] = {"ShareGPT": (16, 128), "Alpaca": (16, 32)}
"""Sizes that figure 18b shows to be best."""
TOKENS: Mapping[str, Mapping[int, float]] = {
    data: dict(zip((1, 4, 8, 16, 32, 64, 128, 256), shares, strict=True))
    for data, shares in (
        ("ShareGPT", (98.4, 98.1, 97.7, 96.9, 95.2, 92.0, 86.1, 76.5)),
        ("Alpaca", (98.7, 96.9, 94.6, 90.3, 82.8, 70.8, 51.3, 29.7)),
    )
}
"""Share of a full memory that holds keys and values, in per cent."""


class Serving(NamedTuple):
    """What became of every load, a row for each."""

    data: np.ndarray
    rate: np.ndarray
    """Requests a second."""
    page_size: np.ndarray
    normalised_s: np.ndarray
    """Seconds a token, arrival to answer; who has none counts with the time so far."""
    batch: np.ndarray
    """Sequences that run."""
    tokens: np.ndarray
    """Share of the memory that holds keys and values."""
    unused: np.ndarray
    """Share that is held and does not."""
    preempted: np.ndarray
    """Times that a request gave way, by the requests."""


def empty() -> Serving:
    """Nothing served."""
    return Serving(np.empty(0, "U1"), *[np.empty(0)] * (len(Serving._fields) - 1))


def measure(
    page_sizes: Sequence[int], seconds: float, seed: int, progress: Progress = QUIET
) -> Serving:
    """Serves either data at two rates with pages of every size.

    Args:
      page_sizes: token places in a page.
      seconds: in which requests come; they are served for as long.
      seed: of lengths and arrivals.
      progress: hears of it; ended early, it has what is done.
    """
    server = settings.SERVERS["13B"]
    parts = []
    for data, law in settings.DATA.items():
        if progress.stopped:
            break
        progress.show(f"{data}, pages of every size")
        load = runs.load(law, FULL[data], seconds, seed)
        asked = [(r, s) for r in (LOADED[data], FULL[data]) for s in page_sizes]
        served = simulating.simulate(
            simulating.stack(
                [
                    Members(
                        load.at(rate),
                        _capacity(server.num_places, size),
                        fcfs.fcfs(),
                        settings.cost(server),
                    )
                    for rate, size in asked
                ]
            ),
            max_slots=SLOTS[data],
            head=runs.HEAD,
            since_s=seconds / 4,  # until then memory fills
            until_s=seconds,
            progress=progress,
        )
        rows = []
        for i, (rate, size) in enumerate(asked):
            w = load.at(rate)
            num = w.prompt.shape[0]
            finish_s = served.finish_s[i][:num]
            finish_s = np.where(np.isnan(finish_s), served.end_s[i], finish_s)
            took_s = finish_s - served.arrival_s[i][:num]
            means = served.means
            rows.append(
                (
                    *(data, rate, size),
                    np.mean(took_s / np.asarray(w.output)),
                    means.batch[i],
                    means.tokens[i],
                    means.reserved[i] + means.internal[i],
                    served.preempted[i].sum() / num,
                )
            )
        parts.append(Serving(*map(np.asarray, zip(*rows, strict=True))))
    return Serving(*map(np.concatenate, zip(empty(), *parts, strict=True)))


def _capacity(num_places: int, page_size: int) -> Capacity:
    plain = runs.capacity(num_places // page_size)
    return plain._replace(page_size=jnp.int32(page_size))


def _rows(serving: Serving, data: str, rate: float) -> Serving:
    here = (serving.data == data) & (serving.rate == rate)
    return Serving(*(column[here] for column in serving))


def claims(serving: Serving) -> list[Claim]:
    """Holds latencies, and what is left of a full memory, against ours."""
    found = []
    for data in dict.fromkeys(serving.data.tolist()):
        found += _latencies(_rows(serving, data, LOADED[data]), data)
        found += _memory(_rows(serving, data, FULL[data]), data)
    return found


def _latencies(rows: Serving, data: str) -> list[Claim]:
    sizes, latency = rows.page_size, rows.normalised_s
    if not sizes.size:
        return []
    low, high = BEST[data]
    best = latency.min()
    inside = latency[(sizes >= low) & (sizes <= high)]
    larger = latency[sizes > high]
    found = []
    where = f"{LOADED[data]:g} requests/s; the paper's rate is not printed"
    kernel = f"Ours is memory alone, at {where}: tables cost a step nothing."
    if inside.size:
        found.append(
            judge(
                f"{data}: pages of {low} to {high} serve best; slowest of them / best",
                source=PAPER,
                published=1.0,
                ours=float(inside.max() / best),
                unit="times",
                tolerance=0.1,
                differs=kernel,
            )
        )
    if larger.size:
        found.append(
            judge(
                f"{data}: larger ones serve worse; slowest / best",
                source=PAPER,
                published=1.0,
                ours=float(larger.max() / best),
                unit="times",
                relation="at_least",
                differs=kernel,
            )
        )
    return found


def _memory(rows: Serving, data: str) -> list[Claim]:
    found = []
    places = settings.SERVERS["13B"].num_places
    law = settings.DATA[data]
    # Both sources look before a step's tokens are written, ours after.
    written = rows.batch / places
    tokens, unused = 100 * (rows.tokens - written), 100 * (rows.unused + written)
    for i, size in enumerate(rows.page_size.astype(int).tolist()):
        if size in TOKENS[data]:
            found.append(
                judge(
                    f"{data}, memory full, pages of {size}: share that holds tokens",
                    source=OURS,
                    published=TOKENS[data][size],
                    ours=float(tokens[i]),
                    unit="%",
                    tolerance=1.0,
                    note=f"At {FULL[data]:g} requests/s.",
                )
            )
        if size in (16, 128) and size < law.prompt.mean + law.output.mean:
            half = 100 * float(rows.batch[i]) * (size + 1) / 2 / places
            found.append(
                judge(
                    f"{data}, pages of {size}: half a page of each sequence is unused",
                    source="worked out: batch (p + 1) / 2 / places",
                    published=half,
                    ours=float(unused[i]),
                    unit="%",
                    tolerance=0.05 * half,
                )
            )
    return found


def plot(axes: Any, serving: Serving) -> None:
    """Draws latency, and what is left of a full memory, against the page size."""
    latency, memory = axes
    colors = style.colors()
    for data, color in (("ShareGPT", colors[5]), ("Alpaca", colors[6])):
        rows = _rows(serving, data, LOADED[data])
        if rows.data.size:
            text = f"{data}, {LOADED[data]:g} requests/s"
            latency.plot(
                rows.page_size, rows.normalised_s, "o-", color=color, label=text
            )
            low, high = BEST[data]
            best = rows.normalised_s.min()
            latency.plot([low, high], [0.9 * best] * 2, color=color, linewidth=3)
        rows = _rows(serving, data, FULL[data])
        theirs = TOKENS[data]
        memory.plot([*theirs], [*theirs.values()], "D:", color="0.7", linewidth=0.8)
        memory.plot(rows.page_size, 100 * rows.tokens, "o-", color=color, label=data)
    latency.set_yscale("log")
    latency.set_ylabel("normalised latency, s/token")
    latency.set_title("end to end (bars: best as published)", loc="left")
    memory.set_ylim(0, 100)
    memory.set_ylabel("% of the memory that holds tokens")
    memory.set_title("a full memory (grey: an earlier simulation)", loc="left")
    for ax in (latency, memory):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_xlabel("token places in a page")
        ax.legend()
