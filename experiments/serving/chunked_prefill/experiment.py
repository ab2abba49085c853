"""What do users feel of how prompts are read, and what does reading in chunks buy?

While a long prompt is read whole, who is being answered waits: a stall. Read in chunks,
each in one step with those who decode, it delays nobody for long, and its own first
token little: the experiments of Sarathi-Serve, on data sheets in place of its GPUs.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Ours, Part, Record, Sheet, beside, column, ours
from experiments.framework.table import shown
from experiments.plotting import style, systems
from experiments.serving.chunked_prefill import runs, settings
from experiments.serving.chunked_prefill.runs import (
    NUM_DECODING,
    Capacities,
    PrefillRuns,
    Timeline,
)
from experiments.serving.chunked_prefill.settings import Config
from jaxkv.progress import QUIET, Progress

PANELS, PANEL_SIZE_INCHES = (4, 1), (6.8, 3.1)
CONFIGS = {
    "smoke": Config(
        models=("Yi-34B",),
        data=("openchat",),
        shares=(0.1, 0.4),
        budgets=(256, 2048),
        seconds=20.0,
    ),
    "paper": Config(),
}


LONG_PROMPT = 8192
"""Tokens of the prompt that is read in chunks of several sizes."""
CHUNKS = (256, 257, 512, 2048)
WAYS = ("mixed only", "chunks only", "both")
"""Of table 4."""


class PublishedRatio(NamedTuple):
    """A published ratio of loads sustained.

    Attributes:
      model: which one.
      data: on which; empty for the better.
      objective: strict or relaxed.
      system: whose load.
      rival: over whose.
      published: the ratio.
      where: in the paper.
    """

    model: str
    data: str
    objective: str
    system: str
    rival: str
    published: float
    where: str


_SMALL, _LARGE = "Sarathi (512)", "Sarathi (2,048)"
RATIOS = (
    PublishedRatio("Yi-34B", "openchat", "strict", _SMALL, "vLLM", 3.7, "figure 10"),
    PublishedRatio("Yi-34B", "openchat", "strict", _SMALL, "Orca", 4.0, "figure 10"),
    PublishedRatio(
        "Yi-34B", "openchat", "relaxed", _LARGE, "vLLM", 1.65, "section 5.2"
    ),
    PublishedRatio(
        "Mistral-7B", "openchat", "strict", _SMALL, "vLLM", 3.5, "section 5.2"
    ),
    PublishedRatio("Mistral-7B", "", "strict", _SMALL, "vLLM", 2.6, "abstract"),
)
BOOK = beside(__file__)


class Result(Record):
    """What was simulated."""

    timeline: Timeline = column("of the four ways", is_told=False)
    ways: PrefillRuns = column("the four ways at one rate, and under one budget")
    budgets: PrefillRuns = column("chunks of several sizes, mixed, at the same rate")
    loads: PrefillRuns = column("systems against the rate")
    chunk: np.ndarray = column("tokens of a chunk")
    chunk_cost: np.ndarray = column("time of a prompt in such chunks, over the whole's")

    @property
    @shown()
    def capacities(self) -> Capacities:
        """Requests a second that each system sustains."""
        return runs.sustained_capacities(self.loads)


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Simulates everything; ended early, it has what is done."""
    name, model = config.models[0], settings.MODELS[config.models[0]]
    progress.show("four ways to read prompts")
    timeline = runs.simulate_timeline(name, config.data[0], settings.WAYS)
    four = [(way, config.share) for way in settings.WAYS]
    ways = [runs.simulate_systems(name, data, four, config) for data in config.data]
    asked = [
        (settings.chunked_and_mixed(budget), config.share) for budget in config.budgets
    ]
    budgets = runs.simulate_systems(name, config.data[0], asked, config)
    cases = [
        (each, data, [(system, share) for share in config.shares])
        for each in config.models
        for data in config.data
        for system in settings.SYSTEMS
    ]
    loads = [
        runs.simulate_systems(*case, config)
        for case in progress.track(cases, "systems and rates", "systems")
    ]
    chunk = sorted({*config.budgets, *CHUNKS})
    whole_s, *chunks_s = (
        settings.prompt_s(model, LONG_PROMPT, size) for size in (None, *chunk)
    )
    return Result(
        timeline=timeline,
        ways=PrefillRuns.joined(ways),
        budgets=budgets,
        loads=PrefillRuns.joined(loads),
        chunk=np.array(chunk),
        chunk_cost=np.array(chunks_s) / whole_s,
    )


def summary(result: Result) -> list[Part]:
    """Puts ways, budgets and capacities beside each other."""
    names = ("budget", "rate", "ttft_s", "tbt_p50_s", "tbt_p99_s", "longest_s")
    kinds = ("strict", "relaxed")
    rows = []
    for x in result.capacities.rows():
        last = result.loads.where(model=x["model"], data=x["data"]).rate.max()
        rates = [x[f"{kind}_per_s"] for kind in kinds]
        # ">" where no rate that was tried is too much.
        cells = [f"{'> ' if rate >= last else ''}{rate:.2f}" for rate in rates]
        rows.append((x["model"], x["data"], x["system"], *cells))
    model = result.ways.model[0] if len(result.ways) else ""
    title = f"four ways to read prompts, {model}"
    return [
        result.ways.sheet(title, "data", "system", *names),
        result.budgets.sheet(f"chunks, mixed, {model}", *names),
        Sheet(
            "requests a second that a system sustains",
            ("model", "data", "system", *kinds),
            rows,
            "P99 time between tokens within the objective: 0.2 and 1 s for Yi-34B, 0.1 "
            "and 0.5 s for Mistral-7B; and a median delay of 2 s at most. Models that "
            "the paper runs in pipeline stages, Llama-2-70B and Falcon-180B, are left "
            "out.",
        ),
    ]


@BOOK.judges
def claims(result: Result) -> Iterator[Ours]:
    """Finds everything; parts that were not simulated are left out."""
    for data in BOOK.published("ttft"):
        rows = result.ways.where(data=data)
        if not len(rows):
            continue
        mixed, chunks, both = (rows.where(system=way) for way in WAYS)
        load = f"Both at one rate, {both.rate[0]:.2f} requests/s, and one budget."
        first, tail = (
            [getattr(way, name)[0] for way in (mixed, chunks, both)]
            for name in ("ttft_s", "tbt_p99_s")
        )
        # The order of table 4 does not depend on the speed of the GPUs.
        order = {
            "mixed_first": first[0] / min(first[1:]),
            "both_sooner": first[2] / first[1],
            "both_shortest": tail[2] / min(tail[:2]),
        }
        for id, ratio in order.items():
            yield ours(id, ratio, data=data, load=load)
        for way, ttft_s, tbt_s in zip(WAYS, first, tail, strict=True):
            yield ours("ttft", ttft_s, data=data, way=way)
            yield ours("tbt", tbt_s, data=data, way=way)
    found = result.capacities.rows()
    for x in RATIOS:
        # How many times the load of a rival a system sustains, on the better data.
        rates: dict[str, dict[str, float]] = {}
        for row in found:
            if row["model"] == x.model and x.data in ("", row["data"]):
                none = {x.system: math.nan, x.rival: math.nan}
                here = rates.setdefault(row["data"], none)
                here[row["system"]] = row[f"{x.objective}_per_s"]
        ratios = {
            data: here[x.system] / here[x.rival] if here[x.rival] > 0 else math.nan
            for data, here in rates.items()
        }
        if ratios:
            data = max(ratios, key=lambda data: np.nan_to_num(ratios[data]))
            words: dict[str, Any] = x._asdict() | {"data": data}
            words |= {"rate": rates[data][x.system], "other": rates[data][x.rival]}
            yield ours("more" if x.data else "more_on_better", ratios[data], **words)
    cost = dict(zip(result.chunk.tolist(), result.chunk_cost.tolist(), strict=True))
    for id, size in {"chunks_512": 512, "chunks_2048": 2048}.items():
        yield ours(id, 100 * (cost[size] - 1), tokens=LONG_PROMPT)
    yield ours("tiles", 100 * (cost[257] / cost[256] - 1))


COLORS = tuple(x.name for x in settings.SYSTEMS)


def plot(axes: Any, result: Result) -> None:
    """Draws four panels."""
    _draw_timeline(axes[0], result.timeline)
    _draw_budgets(axes[1], result.budgets)
    if len(result.loads):
        _draw_loads(axes[2], result.loads)
    else:
        axes[2].remove()
    _draw_capacities(axes[3], result.capacities.rows())


def _draw_timeline(ax: Any, timeline: Timeline) -> None:
    """A tick for each token; every way has a line for each sequence."""
    last, stalls = timeline.time_s.max(), {}
    look: dict[str, Any] = {"markersize": 5, "linestyle": "", "marker": "|"}
    kinds = (("answered already", systems.ORANGE), ("came late", systems.BLUE))
    names = timeline.distinct("way")
    for i, name in enumerate(names):
        longest = 0.0
        for sequence in range(timeline.sequence.max() + 1):
            at = timeline.where(way=name, sequence=sequence).time_s
            y = np.full(len(at), i + 0.14 * sequence - 0.28)
            label, color = kinds[sequence >= NUM_DECODING]
            is_named = not i and sequence in (0, NUM_DECODING)
            style.curve(ax, at, y, color, label if is_named else "", **look)
            if sequence < NUM_DECODING:
                longest = max(longest, np.diff(at).max())
        stalls[name] = 1000 * longest
        text = f"{stalls[name]:,.0f} ms"
        style.note(ax, text, (last, i), (6, 0), va="center_baseline")
    worst, best = (f(stalls, key=lambda x: stalls[x]) for f in (max, min))
    title = f"Two long prompts arrive: answers stall {stalls[worst]:,.0f} ms with "
    title += f"{worst}, {stalls[best]:,.0f} ms with {best}"
    style.titled(ax, title, "time, a tick for each token; right: longest stall [s]", "")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(0, 1.02 * last), ylim=(len(names) - 0.5, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.legend()


def _draw_limits(ax: Any, model: str) -> None:
    limits = settings.MODELS[model].limits_s.items()
    for (name, limit_s), line in zip(limits, ("--", "-."), strict=False):
        look = {"color": "0.45", "linewidth": 1, "linestyle": line}
        ax.axhline(limit_s, label=name.replace("_", " "), **look)


def _draw_budgets(ax: Any, budgets: PrefillRuns) -> None:
    for label, values, color, mark in (
        ("first token, median", budgets.ttft_s, systems.GREEN, "^"),
        ("between tokens, 99 %", budgets.tbt_p99_s, systems.RED, "s"),
        ("between tokens, median", budgets.tbt_p50_s, systems.BLUE, "o"),
    ):
        style.curve(ax, budgets.budget, values, color, label, marker=mark)
    style.powers_of_two(ax)
    _draw_limits(ax, budgets.model[0])
    slow = budgets.tbt_p99_s[-1] / budgets.tbt_p99_s[0]
    title = f"From {budgets.budget[0]:,.0f} to {budgets.budget[-1]:,.0f} tokens a step "
    title += f"the tail between tokens grows {slow:.0f}-fold"
    style.titled(ax, title, "budget [tokens/step]", "time [s]", yscale="log")
    style.plain_log(ax.yaxis)
    ax.legend()


def _draw_loads(ax: Any, loads: PrefillRuns) -> None:
    """The first model and data: the tail between tokens against the rate."""
    model, data, ends = loads.model[0], loads.data[0], {}
    for system in COLORS:
        mine = loads.where(model=model, data=data, system=system)
        style.curve(ax, mine.rate, mine.tbt_p99_s, system, system)
        if len(mine):
            ends[system] = float(mine.tbt_p99_s[-1])
    _draw_limits(ax, model)
    best = min(ends, key=lambda x: ends[x])
    title = f"{model}, {data}: {best} keeps the tail between tokens at "
    title += f"{ends[best]:.2g} s"
    y = "between tokens, 99 % [s]"
    style.titled(ax, title, "load [requests/s]", y, yscale="log")
    style.plain_log(ax.yaxis)
    ax.set_xlim(left=0)
    ax.legend()


def _draw_capacities(ax: Any, rows: list[dict[str, Any]]) -> None:
    """Bars for each case, over vLLM's; a diamond where one is published."""
    cases = dict.fromkeys((x["model"], x["data"]) for x in rows)
    groups = [(*case, kind) for case in cases for kind in ("strict", "relaxed")]
    width, seen, best = 0.2, set[str](), ("", 0.0)
    theirs = {
        (x.model, x.data, x.objective, x.system): x.published
        for x in RATIOS
        if x.rival == "vLLM"
    }
    for i, (model, data, kind) in enumerate(groups):
        here = [x for x in rows if (x["model"], x["data"]) == (model, data)]
        rates = {x["system"]: x[f"{kind}_per_s"] for x in here}
        base = max(rates.get("vLLM", 0.0), 1e-9)
        for k, system in enumerate(COLORS):
            gain = rates.get(system, 0.0) / base
            if not 0 < gain < 100:
                continue
            place, label = i + (k - 1.5) * width, "" if system in seen else system
            look = systems.look(system).bar | {"label": label or None}
            ax.bar(place, gain, width * 0.94, **look)
            seen.add(system)
            best = (system, gain) if gain > best[1] else best
            if ratio := theirs.get((model, data, kind, system)):
                label = "" if "published" in seen else "published"
                look = {"linestyle": "", "markersize": 7, "markeredgecolor": "white"}
                style.curve(ax, [place], [ratio], "published", label, **look)
                seen.add("published")
    labels = [f"{m.split('-')[0]}\n{d}\n{k}" for m, d, k in groups]
    labels = [label.replace("openchat", "open-\nchat") for label in labels]
    ax.set_xticks(range(len(groups)), labels)
    style.reference(ax, 1)
    title = "Load within the objective, over vLLM's"
    if best[0]:
        title = f"{best[0]} bears up to {best[1]:.1f} times vLLM's load within the "
        title += "objective"
        ax.legend()
    style.titled(ax, title, "", "load / vLLM's [ratio]")
