"""Tables and figure of the decode benchmark.

Rows of older records lack some columns, which are then None.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from experiments import lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY_COLUMNS = ("implementation", "batch", "prompt_tokens")
type Phase = Literal["decode", "prefill"]
RATIO_COLUMNS: Mapping[Phase, Literal["ratio", "prefill_ratio"]] = {
    "decode": "ratio",
    "prefill": "prefill_ratio",
}
RANGE_COLUMNS: Mapping[Phase, Literal["ratio_range", "prefill_ratio_range"]] = {
    "decode": "ratio_range",
    "prefill": "prefill_ratio_range",
}
RATE_COLUMNS: Mapping[Phase, Literal["decode_tokens_per_s", "prefill_tokens_per_s"]] = {
    "decode": "decode_tokens_per_s",
    "prefill": "prefill_tokens_per_s",
}
"""Keys of the ratios to the best peer, of their ranges, and of the rates, by phase."""
type TimelinePart = Literal["products_s", "attention_s", "sampling_s"]
TIMELINE_PARTS: Mapping[TimelinePart, tuple[str, int]] = {
    "products_s": ("products, norms, KV writes", lab.SKY),
    "attention_s": ("attention", lab.ORANGE),
    "sampling_s": ("scheduling, sampling", lab.GREEN),
}


class DecodeRow(TypedDict, total=False):
    """Measurements of an engine on a case; older records lack some keys."""

    implementation: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float | None
    first_token_s: float | None
    decode_tokens_per_s: float
    step_s: float
    occupancy: float | None
    host_share: float | None
    compile_s: float
    peak_bytes: int
    spread: float
    same_answers: float
    dtype: str
    version: str
    absent: str
    ratio: float | None
    ratio_range: list[float] | None
    prefill_ratio: float | None
    prefill_ratio_range: list[float] | None
    step_bytes: float | None
    floor_s: float
    fraction: float | None
    read_bytes_per_s: float
    products_s: float
    sampling_s: float
    attention_s: float


class DecodeRates(lab.ResultTable):
    """Columns of the report; each is a key of the rows."""

    implementation: lab.Texts = lab.column("name of the engine", heading="engine")
    batch: lab.Ints = lab.column(
        "sequences in the batch", heading="sequences", form="{:,}"
    )
    prompt_tokens: lab.Ints = lab.column(
        "context length", heading="context", form="{:,}"
    )
    decode_tokens_per_s: lab.Floats = lab.column(
        "median rate", heading="decode tokens/s"
    )
    prefill_tokens_per_s: np.ndarray = lab.column(
        "median rate", heading="prefill tokens/s"
    )
    step_s: lab.Floats = lab.column("time of a step with a token per sequence")
    occupancy: np.ndarray = lab.column("share of slots that decoded")
    first_token_s: np.ndarray = lab.column(
        "time until every sequence has a token", heading="first token"
    )
    step_bytes: np.ndarray = lab.column(
        "bytes of weights, K and V that a step reads", heading="bytes per step"
    )
    fraction: np.ndarray = lab.column(
        "floor / step time", heading="of the memory floor"
    )
    host_share: np.ndarray = lab.column("share of time waiting for the host, or None")
    compile_s: lab.Floats = lab.column("compile time", heading="compiling")
    peak_bytes: lab.Ints = lab.column(
        "peak of the process or device", heading="peak memory"
    )
    version: lab.Texts = lab.column("versions of the libraries")
    spread: lab.Floats = lab.column(
        "range of the rates / median",
        heading="decode spread",
        form=lab.format_percent,
    )
    same_answers: lab.Floats = lab.column(
        "share of answers equal to those of jaxkv", form=lab.format_percent
    )


REPORTED = ("batch", "prompt_tokens", "decode_tokens_per_s", "prefill_tokens_per_s")
REPORTED += ("first_token_s", "step_s", "step_bytes", "fraction", "occupancy")
REPORTED += ("host_share",)
REPORTED += ("compile_s", "peak_bytes")
LACKING: DecodeRow = {
    "occupancy": None,
    "first_token_s": None,
    "step_bytes": None,
    "fraction": None,
}


def fill_missing(result: list[DecodeRow]) -> list[DecodeRow]:
    """Returns the rows, with None for missing columns."""
    return [LACKING | row for row in result]


def plot(axes: np.ndarray, result: list[DecodeRow]) -> None:
    """Draws tokens per second, ratios with their range, and the parts of a step."""
    decode, prefill, ratios, spent = axes
    names = list(dict.fromkeys(x["implementation"] for x in result))
    jaxkv_rows = [x for x in result if x["implementation"] == "jaxkv"]
    for ax, (kind, key) in zip((decode, prefill), RATIO_COLUMNS.items(), strict=True):
        _draw_rates(ax, kind, result, names)
        engine_ratios = [ratio for x in jaxkv_rows if (ratio := x[key]) is not None]
        if engine_ratios:
            low = min(engine_ratios)
            high = max(engine_ratios)
            title = (
                f"{kind}: jaxkv has {low:.2f} to {high:.2f} times the best peer's rate"
            )
            ax.set_title(title.capitalize().replace("Jaxkv", "jaxkv"))
    _draw_ratios(ratios, jaxkv_rows)
    _draw_parts(spent, [x for x in jaxkv_rows if "products_s" in x])


def _label(row: DecodeRow) -> str:
    return f"{row['batch']:,}\n{row['prompt_tokens']:,}"


def _draw_rates(
    ax: "Axes", kind: Phase, result: list[DecodeRow], names: list[str]
) -> None:
    key = RATE_COLUMNS[kind]
    rows = [x for x in result if x[key] is not None]
    cases = list(dict.fromkeys(map(_label, rows)))
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        selected = [x for x in rows if x["implementation"] == name]
        places = [cases.index(_label(x)) + (i + 0.5) * width - 0.42 for x in selected]
        rates = [rate for x in selected if (rate := x[key]) is not None]
        bars = ax.bar(
            places, rates, 0.94 * width, label=name, **lab.system_style(name).bar
        )
        ax.bar_label(bars, [*map(lab.format_rate, rates)], padding=2, rotation=90)
    ax.margins(y=0.22)
    ax.set(title=f"Rates of {kind}", ylabel=f"{kind} [tokens/s]")
    _name_cases(ax, cases)
    if rows:
        ax.legend()


def _name_cases(ax: "Axes", cases: list[str]) -> None:
    ax.set_xticks(range(len(cases)), cases)
    ax.set_xlabel("top: batch [sequences]; bottom: context of each [tokens]")
    ax.tick_params(axis="x", length=0)


def _draw_ratios(ax: "Axes", jaxkv_rows: list[DecodeRow]) -> None:
    cases = [_label(x) for x in jaxkv_rows]
    faster = []
    looks = zip(RATIO_COLUMNS.items(), ((lab.BLUE, "o"), (lab.SKY, "s")), strict=True)
    for (kind, key), (color, marker) in looks:
        points = [
            (i + (0.12 if kind == "prefill" else -0.12), ratio, x)
            for i, x in enumerate(jaxkv_rows)
            if (ratio := x[key]) is not None
        ]
        place = [at for at, *_ in points]
        values = [ratio for _, ratio, _ in points]
        ends = [x.get(RANGE_COLUMNS[kind]) or [y] * 2 for _, y, x in points]
        look = {"marker": marker, "linestyle": "", "markersize": 6}
        lab.draw_curve(ax, place, values, color, kind, **look)
        for x, (low, high) in zip(place, ends, strict=True):
            ax.vlines(x, low, high, color=lab.colors()[color])
        num = sum(x > 1 for x in values)
        faster.append(f"{kind} in {num} of {len(values)} cases")
    lab.draw_reference_line(ax, 1, "equally fast")
    title = f"jaxkv is faster than the best peer: {', '.join(faster)}"
    ax.set(title=title, ylabel="rate / best peer's [ratio]")
    _name_cases(ax, cases)
    ax.legend()


def _draw_parts(ax: "Axes", jaxkv_rows: list[DecodeRow]) -> None:
    bottom = np.zeros(len(jaxkv_rows))
    for hatch, (key, (name, color)) in zip(
        ("", "//", ".."), TIMELINE_PARTS.items(), strict=True
    ):
        shares = [100 * max(0.0, x[key]) / x["step_s"] for x in jaxkv_rows]
        ax.bar(
            range(len(jaxkv_rows)),
            shares,
            0.7,
            bottom,
            label=name,
            color=lab.colors()[color],
            hatch=hatch,
            edgecolor="white",
        )
        bottom += shares
    title = "Parts of a decode step"
    if jaxkv_rows:
        attention = [100 * x["attention_s"] / x["step_s"] for x in jaxkv_rows]
        title = f"Attention takes {min(attention):.0f} to {max(attention):.0f} % "
        title += "of a decode step of jaxkv"
        ax.legend()
    ax.set(title=title, ylim=(0, 100), ylabel="share of the step [%]")
    _name_cases(ax, [_label(x) for x in jaxkv_rows])


def summary(result: list[DecodeRow]) -> list[lab.ReportPart]:
    """Tabulates the rates of all engines, and details of jaxkv."""
    if not result:
        return []
    rate_table = DecodeRates.of(fill_missing(result))
    note = "Host share: share of time in which the device waits between two calls."
    jaxkv_rows = [x for x in result if x["implementation"] == "jaxkv"]
    parts: list[lab.ReportPart] = [
        rate_table.where(implementation="jaxkv").sheet("jaxkv", *REPORTED, note=note)
    ]
    if part_rows := [x for x in jaxkv_rows if "products_s" in x]:
        lines = [
            [
                f"{x['batch']:,}",
                f"{x['prompt_tokens']:,}",
                f"{1e3 * x['step_s']:.1f}",
                *(lab.format_percent(x[key] / x["step_s"]) for key in TIMELINE_PARTS),
            ]
            for x in part_rows
        ]
        heads = [
            "sequences",
            "context",
            "step, ms",
            *(x for x, _ in TIMELINE_PARTS.values()),
        ]
        parts.append(lab.Sheet("parts of a decode step", heads, lines))
    names = rate_table.distinct("implementation")
    if not names[1:]:
        return parts
    heads = ["sequences", "context", *names, "jaxkv / best peer", "range"]
    for kind, key in RATIO_COLUMNS.items():
        lines = []
        for selected in jaxkv_rows:
            case = selected["batch"], selected["prompt_tokens"]
            ratio = selected[key]
            if ratio is None:
                continue
            rates = [
                lab.format_rate(x[RATE_COLUMNS[kind]])
                for x in result
                if (x["batch"], x["prompt_tokens"]) == case
            ]
            ends = selected.get(RANGE_COLUMNS[kind])
            span = "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
            sizes = [f"{x:,}" for x in case]
            lines.append([*sizes, *rates, f"{ratio:.2f}", span])
        parts.append(lab.Sheet(f"{kind}, tokens per second", heads, lines))
    absent = result[0]["absent"]
    shown = (*KEY_COLUMNS, "version", "spread", "same_answers")
    note = f"Not timed: {absent}." if absent else ""
    return [*parts, rate_table.sheet("engines", *shown, note=note)]
