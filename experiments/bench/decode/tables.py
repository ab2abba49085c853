"""What is told and drawn of decoding, from the rows of a result.

Rows of older records lack some columns; these are then None.
"""

from typing import Any

import numpy as np

from experiments.framework import Floats, Ints, Part, Sheet, Table, Texts, column, units

NAMES = ("implementation", "batch", "prompt_tokens")
RATIOS = {"decode": "ratio", "prefill": "prefill_ratio"}
"""Names of rates, held against those of the best peer."""
COLORS = {"jaxkv": "#0072b2", "transformers": "#e69f00", "llama.cpp": "0.6"}
PARTS = {
    "products_s": ("products and around", "#0072b2"),
    "attention_s": ("attention", "#e69f00"),
    "sampling_s": ("schedule, sampling", "#009e73"),
}


class Rates(Table):
    """What is told of a result, of which every column is a key of the rows."""

    implementation: Texts = column("who", heading="engine")
    batch: Ints = column("at once", heading="sequences", form="{:,}")
    prompt_tokens: Ints = column("behind each", heading="context", form="{:,}")
    decode_tokens_per_s: Floats = column("median", heading="decode tokens/s")
    prefill_tokens_per_s: np.ndarray = column("median", heading="prefill tokens/s")
    step_s: Floats = column("a token of every sequence")
    occupancy: np.ndarray = column("of slots that decoded")
    first_token_s: np.ndarray = column("until all have one", heading="first token")
    fraction: np.ndarray = column("floor over step", heading="of the memory floor")
    host_share: np.ndarray = column("of the time; None where it is not known")
    compile_s: Floats = column("of the programs", heading="compiling")
    peak_bytes: Ints = column("of the process or its device", heading="peak memory")
    version: Texts = column("of its libraries")
    spread: Floats = column("of rates", heading="decode spread", form=units.share)
    same_answers: Floats = column("share that is ours", form=units.share)


OWN = ("batch", "prompt_tokens", "decode_tokens_per_s", "prefill_tokens_per_s")
OWN += ("first_token_s", "step_s", "fraction", "occupancy", "host_share")
OWN += ("compile_s", "peak_bytes")
LACKING = ("occupancy", "first_token_s", "fraction")


def filled(result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with None where they lack a column."""
    return [dict.fromkeys(LACKING) | row for row in result]


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws tokens per second, ratios with their range, and where our time goes."""
    (decode, prefill), (ratios, spent) = axes
    names = list(dict.fromkeys(x["implementation"] for x in result))
    for ax, kind in ((decode, "decode"), (prefill, "prefill")):
        _draw_rates(ax, kind, result, names)
    if len(names) > 1:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1.1), "borderaxespad": 0}
        prefill.legend(ncols=len(names), fontsize=6, **place)
    ours = [x for x in result if x["implementation"] == "jaxkv"]
    _draw_ratios(ratios, ours)
    _draw_parts(spent, [x for x in ours if "products_s" in x])


def _label(row: dict[str, Any]) -> str:
    return f"{row['batch']:,}\n{row['prompt_tokens']:,}"


def _draw_rates(
    ax: Any, kind: str, result: list[dict[str, Any]], names: list[str]
) -> None:
    rows = [x for x in result if x[f"{kind}_tokens_per_s"] is not None]
    cases = list(dict.fromkeys(map(_label, rows)))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        mine = [x for x in rows if x["implementation"] == name]
        places = [cases.index(_label(x)) + (i + 0.5) * width - 0.4 for x in mine]
        rates = [x[f"{kind}_tokens_per_s"] for x in mine]
        look = {"label": name, "color": COLORS.get(name)}
        bars = ax.bar(places, rates, 0.92 * width, **look)
        labels = [*map(units.rate, rates)]
        ax.bar_label(bars, labels, fontsize=4, padding=1, color="0.3", rotation=90)
    ax.set(title=f"{kind}, tokens per second", yscale="log")
    _name_cases(ax, cases)


def _name_cases(ax: Any, cases: list[str]) -> None:
    ax.set_xticks(range(len(cases)), cases, fontsize=6)
    ax.set_xlabel("sequences, and context of each", fontsize=7)
    ax.tick_params(axis="x", length=0)


def _draw_ratios(ax: Any, ours: list[dict[str, Any]]) -> None:
    cases = [_label(x) for x in ours]
    for kind, key in RATIOS.items():
        known = [(i, x) for i, x in enumerate(ours) if x[key] is not None]
        values = [x[key] for _, x in known]
        ends = [x.get(f"{key}_range") or [x[key]] * 2 for _, x in known]
        below = [v - low for v, (low, _) in zip(values, ends, strict=True)]
        above = [high - v for v, (_, high) in zip(values, ends, strict=True)]
        place = [i + (0.1 if kind == "prefill" else -0.1) for i, _ in known]
        look = {"fmt": "o", "ms": 3, "lw": 1, "label": kind}
        ax.errorbar(place, values, yerr=[below, above], **look)
    ax.axhline(1, color="0.7", lw=0.8)
    ax.set(title="jaxkv over the best peer, range of rounds")
    _name_cases(ax, cases)
    ax.legend(fontsize=6)


def _draw_parts(ax: Any, ours: list[dict[str, Any]]) -> None:
    bottom = np.zeros(len(ours))
    for key, (name, color) in PARTS.items():
        shares = np.array([max(0.0, x[key]) / x["step_s"] for x in ours])
        ax.bar(range(len(ours)), shares, 0.7, bottom, label=name, color=color)
        bottom += shares
    # Room for the legend above the bars.
    ax.set(title="where the time of our step goes", ylim=(0, 1.2), yticks=(0, 0.5, 1))
    _name_cases(ax, [_label(x) for x in ours])
    if ours:
        ax.legend(fontsize=5, ncols=3, loc="upper center", columnspacing=1)


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the rates of everyone, side by side, and what our engine took."""
    if not result:
        return []
    found = Rates.of(filled(result))
    note = "host share: the time in which the device waits between two calls."
    ours = [x for x in result if x["implementation"] == "jaxkv"]
    parts: list[Part] = [
        found.where(implementation="jaxkv").sheet("jaxkv", *OWN, note=note)
    ]
    if known := [x for x in ours if "products_s" in x]:
        parts.append(_parts(known))
    names = found.distinct("implementation")
    if not names[1:]:
        return parts
    heads = ["sequences", "context", *names, "jaxkv / best peer", "range"]
    for kind, key in RATIOS.items():
        lines = []
        for mine in ours:
            case = mine["batch"], mine["prompt_tokens"]
            if mine[key] is None:
                continue
            rates = [
                units.rate(x[f"{kind}_tokens_per_s"])
                for x in result
                if (x["batch"], x["prompt_tokens"]) == case
            ]
            ends = mine.get(f"{key}_range")
            span = "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
            sizes = [f"{x:,}" for x in case]
            lines.append([*sizes, *rates, f"{mine[key]:.2f}", span])
        parts.append(Sheet(f"{kind}, tokens per second", heads, lines))
    absent = result[0]["absent"]
    told = (*NAMES, "version", "spread", "same_answers")
    note = f"Not timed: {absent}." if absent else ""
    return [*parts, found.sheet("everyone", *told, note=note)]


def _parts(ours: list[dict[str, Any]]) -> Sheet:
    """Where the time of our step goes."""
    lines = [
        [
            f"{x['batch']:,}",
            f"{x['prompt_tokens']:,}",
            f"{1e3 * x['step_s']:.1f}",
            *(units.share(x[key] / x["step_s"]) for key in PARTS),
        ]
        for x in ours
    ]
    heads = ["sequences", "context", "step, ms", *(name for name, _ in PARTS.values())]
    return Sheet("where the time of a step goes", heads, lines)
