"""Compares scheduling of prefill: whole prompts and chunked prefill.

A prompt that is prefilled in one step stalls the decoding requests. Chunked prefill
splits it over steps that also decode, so that no request stalls for long and the
prompt's own first token is little later. Reproduces the experiments of Sarathi-Serve
with a roofline model in place of its GPUs.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments import lab
from experiments.serving.chunked_prefill import runs, settings
from experiments.serving.chunked_prefill.runs import (
    NUM_DECODING,
    Capacities,
    PrefillRuns,
    Timeline,
)
from experiments.serving.chunked_prefill.settings import MODELS, Config
from jaxkv.plotting import (
    system_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (4, 1)
PANEL_SIZE_INCHES = (6.8, 3.1)
CONFIGS = {
    "smoke": Config(
        models=("Yi-34B",),
        data=("openchat",),
        shares=(0.1, 0.4),
        budgets=(256, 2048),
        seconds=20.0,
    ),
    "paper": Config(),
    "calibrated": Config(models=tuple(x for x in MODELS if MODELS[x].is_calibrated)),
}


LONG_PROMPT = 8192
"""Tokens of the prompt that is split into chunks of several sizes."""
CHUNKS = (256, 257, 512, 2048)
SCHEDULE_NAMES = ("mixed only", "chunks only", "both")
"""Rows of table 4."""


class PublishedRatio(NamedTuple):
    """A published ratio of sustained loads.

    Attributes:
      model: name of the model.
      data: name of the dataset; empty for the one with the larger ratio.
      objective: "strict" or "relaxed".
      system: the system with the higher load.
      rival: the system that it is compared with.
      published: the ratio.
      where: place in the paper.
    """

    model: str
    data: str
    objective: str
    system: str
    rival: str
    published: float
    where: str


_SMALL_CHUNKS = "Sarathi (512)"
_LARGE_CHUNKS = "Sarathi (2,048)"
PUBLISHED_RATIOS = (
    PublishedRatio(
        "Yi-34B", "openchat", "strict", _SMALL_CHUNKS, "vLLM", 3.7, "figure 10"
    ),
    PublishedRatio(
        "Yi-34B", "openchat", "strict", _SMALL_CHUNKS, "Orca", 4.0, "figure 10"
    ),
    PublishedRatio(
        "Yi-34B", "openchat", "relaxed", _LARGE_CHUNKS, "vLLM", 1.65, "section 5.2"
    ),
    PublishedRatio(
        "Mistral-7B", "openchat", "strict", _SMALL_CHUNKS, "vLLM", 3.5, "section 5.2"
    ),
    PublishedRatio("Mistral-7B", "", "strict", _SMALL_CHUNKS, "vLLM", 2.6, "abstract"),
)
CLAIMS = lab.claims_file(__file__)
CALIBRATED_SHEET = (
    "Simulated with step times fitted to vLLM servers on H100s, as shares of the data "
    "sheet of A100s, and lengths by law; the paper's was measured on A100s"
)
"""Conditions of the config `calibrated`, in place of those in claims.toml."""


class Result(lab.ResultRecord):
    """Simulated results."""

    timeline: Timeline = lab.column("token times of 4 schedules", is_reported=False)
    ways: PrefillRuns = lab.column("4 schedules at one rate and one token budget")
    budgets: PrefillRuns = lab.column("mixed chunks of several sizes at the same rate")
    loads: PrefillRuns = lab.column("systems by rate")
    chunk: np.ndarray = lab.column("tokens of a chunk")
    chunk_cost: np.ndarray = lab.column("time of a prompt in chunks / time in one step")

    @property
    @lab.computed_column()
    def capacities(self) -> Capacities:
        """Requests/s that each system sustains."""
        return runs.sustained_capacities(self.loads)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates all parts; if stopped, returns the finished ones."""
    name = config.models[0]
    model = MODELS[config.models[0]]
    progress.show("4 schedules of prefill")
    timeline = runs.simulate_timeline(name, config.data[0], settings.SCHEDULES)
    four = [(schedule, config.share) for schedule in settings.SCHEDULES]
    ways = [runs.simulate_systems(name, data, four, config) for data in config.data]
    budget_cases = [
        (settings.chunked_and_mixed(budget), config.share) for budget in config.budgets
    ]
    budgets = runs.simulate_systems(name, config.data[0], budget_cases, config)
    cases = [
        (model_name, data, [(system, share) for share in config.shares])
        for model_name in config.models
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


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of schedules, token budgets and capacities."""
    names = ("budget", "rate", "ttft_s", "tbt_p50_s", "tbt_p99_s", "longest_s")
    kinds = ("strict", "relaxed")
    rows = []
    for x in result.capacities.rows():
        last = result.loads.where(model=x["model"], data=x["data"]).rate.max()
        rates = [x[f"{kind}_per_s"] for kind in kinds]
        # ">" if the system sustains every simulated rate.
        cells = [f"{'> ' if rate >= last else ''}{rate:.2f}" for rate in rates]
        rows.append((x["model"], x["data"], x["system"], *cells))
    model = result.ways.model[0] if len(result.ways) else ""
    title = f"4 schedules of prefill, {model}"
    return [
        result.ways.sheet(title, "data", "system", *names),
        result.budgets.sheet(f"chunks, mixed, {model}", *names),
        lab.Sheet(
            "requests a second that a system sustains",
            ("model", "data", "system", *kinds),
            rows,
            "Rate at which the P99 time between tokens meets the objective (0.2 and "
            "1 s for Yi-34B, 0.1 and 0.5 s for Mistral-7B) and the median scheduling "
            "delay is at most 2 s. Llama-2-70B and Falcon-180B, which the paper runs "
            "with pipeline parallelism, are omitted.",
        ),
    ]


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the simulated parts."""
    sheet: dict[str, Any] = {}
    if len(result.ways) and MODELS[result.ways.model[0]].is_calibrated:
        sheet["sheet"] = CALIBRATED_SHEET
    for data in CLAIMS.published("ttft"):
        rows = result.ways.where(data=data)
        if not len(rows):
            continue
        mixed, chunks, both = (
            rows.where(system=schedule) for schedule in SCHEDULE_NAMES
        )
        load = f"Both at one rate, {both.rate[0]:.2f} requests/s, and one budget."
        first, tail = (
            [getattr(schedule, name)[0] for schedule in (mixed, chunks, both)]
            for name in ("ttft_s", "tbt_p99_s")
        )
        # The order of table 4 does not depend on the speed of the GPUs.
        order = {
            "mixed_first": first[0] / min(first[1:]),
            "both_sooner": first[2] / first[1],
            "both_shortest": tail[2] / min(tail[:2]),
        }
        for id, ratio in order.items():
            yield lab.measured(id, ratio, data=data, load=load, **sheet)
        for schedule, ttft_s, tbt_s in zip(SCHEDULE_NAMES, first, tail, strict=True):
            yield lab.measured("ttft", ttft_s, data=data, way=schedule, **sheet)
            yield lab.measured("tbt", tbt_s, data=data, way=schedule, **sheet)
    capacities = result.capacities.rows()
    for x in PUBLISHED_RATIOS:
        # Ratio of sustained loads on the dataset with the larger ratio.
        rates: dict[str, dict[str, float]] = {}
        for row in capacities:
            if MODELS[row["model"]].name == x.model and x.data in ("", row["data"]):
                none = {x.system: math.nan, x.rival: math.nan}
                by_system = rates.setdefault(row["data"], none)
                by_system[row["system"]] = row[f"{x.objective}_per_s"]
        ratios = {
            data: by_system[x.system] / by_system[x.rival]
            if by_system[x.rival] > 0
            else math.nan
            for data, by_system in rates.items()
        }
        if ratios:
            data = max(ratios, key=lambda data: np.nan_to_num(ratios[data]))
            words: dict[str, Any] = x._asdict() | {"data": data} | sheet
            words |= {"rate": rates[data][x.system], "other": rates[data][x.rival]}
            yield lab.measured(
                "more" if x.data else "more_on_better", ratios[data], **words
            )
    cost = dict(zip(result.chunk.tolist(), result.chunk_cost.tolist(), strict=True))
    for id, size in {"chunks_512": 512, "chunks_2048": 2048}.items():
        yield lab.measured(id, 100 * (cost[size] - 1), tokens=LONG_PROMPT, **sheet)
    yield lab.measured("tiles", 100 * (cost[257] / cost[256] - 1), **sheet)


SYSTEM_NAMES = tuple(x.name for x in settings.SYSTEMS)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws 4 panels."""
    _draw_timeline(axes[0], result.timeline)
    _draw_budgets(axes[1], result.budgets)
    if len(result.loads):
        _draw_loads(axes[2], result.loads)
    else:
        axes[2].remove()
    _draw_capacities(axes[3], result.capacities.rows())


def _draw_timeline(ax: "Axes", timeline: Timeline) -> None:
    """Draws a tick for each token; each schedule has a line for each sequence."""
    last = timeline.time_s.max()
    stalls = {}
    look: dict[str, Any] = {"markersize": 5, "linestyle": "", "marker": "|"}
    kinds = (("decoding at the start", lab.ORANGE), ("arrived late", lab.BLUE))
    names = timeline.distinct("way")
    for i, name in enumerate(names):
        longest = 0.0
        for sequence in range(timeline.sequence.max() + 1):
            at = timeline.where(way=name, sequence=sequence).time_s
            y = np.full(len(at), i + 0.14 * sequence - 0.28)
            label, color = kinds[sequence >= NUM_DECODING]
            is_named = not i and sequence in (0, NUM_DECODING)
            lab.draw_curve(ax, at, y, color, label if is_named else "", **look)
            if sequence < NUM_DECODING:
                longest = max(longest, np.diff(at).max())
        stalls[name] = 1000 * longest
        text = f"{stalls[name]:,.0f} ms"
        lab.annotate(ax, text, (last, i), (6, 0), va="center_baseline")
    worst, best = (f(stalls, key=lambda x: stalls[x]) for f in (max, min))
    title = f"Two long prompts arrive: answers stall {stalls[worst]:,.0f} ms with "
    title += f"{worst}, {stalls[best]:,.0f} ms with {best}"
    lab.set_labels(
        ax, title, "time, a tick for each token; right: longest stall [s]", ""
    )
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(0, 1.02 * last), ylim=(len(names) - 0.5, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.legend()


def _draw_limits(ax: "Axes", model: str) -> None:
    limits = MODELS[model].limits_s.items()
    for (name, limit_s), line in zip(limits, ("--", "-."), strict=False):
        ax.axhline(
            limit_s,
            label=name.replace("_", " "),
            color="0.45",
            linewidth=1,
            linestyle=line,
        )


def _draw_budgets(ax: "Axes", budgets: PrefillRuns) -> None:
    for label, values, color, mark in (
        ("first token, median", budgets.ttft_s, lab.GREEN, "^"),
        ("between tokens, 99 %", budgets.tbt_p99_s, lab.RED, "s"),
        ("between tokens, median", budgets.tbt_p50_s, lab.BLUE, "o"),
    ):
        lab.draw_curve(ax, budgets.budget, values, color, label, marker=mark)
    lab.use_powers_of_two(ax)
    _draw_limits(ax, budgets.model[0])
    slow = budgets.tbt_p99_s[-1] / budgets.tbt_p99_s[0]
    title = f"From {budgets.budget[0]:,.0f} to {budgets.budget[-1]:,.0f} tokens a step "
    title += f"the tail between tokens grows {slow:.0f}-fold"
    lab.set_labels(ax, title, "budget [tokens/step]", "time [s]", yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.legend()


def _draw_loads(ax: "Axes", loads: PrefillRuns) -> None:
    """Draws P99 time between tokens by rate for the first model and dataset."""
    model = loads.model[0]
    data = loads.data[0]
    ends = {}
    for system in SYSTEM_NAMES:
        subset = loads.where(model=model, data=data, system=system)
        lab.draw_curve(ax, subset.rate, subset.tbt_p99_s, system, system)
        if len(subset):
            ends[system] = float(subset.tbt_p99_s[-1])
    _draw_limits(ax, model)
    best = min(ends, key=lambda x: ends[x])
    title = f"{model}, {data}: {best} keeps the tail between tokens at "
    title += f"{ends[best]:.2g} s"
    y = "between tokens, 99 % [s]"
    lab.set_labels(ax, title, "load [requests/s]", y, yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.set_xlim(left=0)
    ax.legend()


def _draw_capacities(ax: "Axes", rows: list[lab.Row]) -> None:
    """Draws bars of load over vLLM's for each case; diamonds are published."""
    cases = dict.fromkeys((x["model"], x["data"]) for x in rows)
    groups = [(*case, kind) for case in cases for kind in ("strict", "relaxed")]
    width = 0.2
    legend_names = set[str]()
    best = ("", 0.0)
    reference = {
        (x.model, x.data, x.objective, x.system): x.published
        for x in PUBLISHED_RATIOS
        if x.rival == "vLLM"
    }
    for i, (model, data, kind) in enumerate(groups):
        selected = [x for x in rows if (x["model"], x["data"]) == (model, data)]
        rates = {x["system"]: x[f"{kind}_per_s"] for x in selected}
        base = max(rates.get("vLLM", 0.0), 1e-9)
        for k, system in enumerate(SYSTEM_NAMES):
            gain = rates.get(system, 0.0) / base
            if not 0 < gain < 100:
                continue
            place = i + (k - 1.5) * width
            label = "" if system in legend_names else system
            ax.bar(
                place,
                gain,
                width * 0.94,
                label=label or None,
                **system_style(system).bar,
            )
            legend_names.add(system)
            best = (system, gain) if gain > best[1] else best
            if ratio := reference.get((model, data, kind, system)):
                label = "" if "published" in legend_names else "published"
                look = {"linestyle": "", "markersize": 7, "markeredgecolor": "white"}
                lab.draw_curve(ax, [place], [ratio], "published", label, **look)
                legend_names.add("published")
    labels = [f"{m.split('-')[0]}\n{d}\n{k}" for m, d, k in groups]
    labels = [label.replace("openchat", "open-\nchat") for label in labels]
    ax.set_xticks(range(len(groups)), labels)
    lab.draw_reference_line(ax, 1)
    title = "Load within the objective, over vLLM's"
    if best[0]:
        title = f"{best[0]} sustains up to {best[1]:.1f} times vLLM's load within the "
        title += "objective"
        ax.legend()
    lab.set_labels(ax, title, "", "load / vLLM's [ratio]")


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(4, 1, 3.1)
)
