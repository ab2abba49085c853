"""Do the lectures' own numbers on serving follow from memory and bandwidth?

Each figure that the lectures quote is held against the bound that bytes and operations
set: how many GPUs hold the weights, how long reading them 256 times takes, how many
requests a second leave a GPU, what keys and values weigh, how the work of attention
grows with and without a cache. What a quoted time is above its bound is the efficiency
that it implies. Nothing is fitted, and no number of ours is chosen to agree.
"""

import math
from collections.abc import Iterator
from typing import Any

from experiments.counting.lecture_numbers import bounds, drawing
from experiments.counting.lecture_numbers.bounds import Config, Result
from experiments.framework import (
    Measurement,
    ReportPart,
    Sheet,
    claims_file,
    measured,
    report,
    table,
    units,
)

PANELS, PANEL_SIZE_INCHES = (3, 1), (6.8, 3.0)
CONFIGS = {"paper": Config(), "smoke": Config(tokens=16)}
run, plot = bounds.run, drawing.plot


@claims_file(__file__).judge
def claims(result: Result) -> Iterator[Measurement]:
    """Holds every quoted figure against its bound."""
    latencies, requests, kept = result.latencies, result.requests, result.kept
    need, weights = latencies.num_devices.tolist(), latencies.weight_bytes.tolist()
    largest, filled_gb = units.format_bytes(weights[0]), weights[0] / 9e9
    yield measured(
        "gpt3_175b", need[0], weights=largest, need=need[0], filled_gb=filled_gb
    )
    for row in latency_rows(result):
        bound, quoted, used = row["bound_s"], row["lecture_s"], row["cards_used"]
        words: dict[str, Any] = {
            "size": row["model"].removeprefix("gpt3-"),
            "tokens": latencies.tokens,
            "percent": 100 * bound / quoted,
            "used": used,
            "turns_s": row["in_turn_s"],
            "least": math.ceil(row["in_turn_s"] / quoted),
        }
        name = "latency" if used == 1 else "latency_of_several"
        yield measured(name, bound, published=quoted, **words)
    yield measured("one_each", max(need[1:]), weights=units.format_bytes(weights[1]))
    together = requests.together
    share = f"{100 / together:.0f} %" if together else "no share"
    words = {"batch": requests.batch, "share": share, "alone": requests.alone}
    yield measured("several_at_a_time", together, **words)
    yield measured("llama_70b", kept.devices_70b, tokens=kept.tokens_70b)
    yield measured("token_of_7b", kept.small / 1e6)
    yield measured("token_of_13b", kept.large / 1e6)
    yield measured("request", kept.request / 2**30, gb=kept.request / 1e9)
    growth = result.growth
    before, last = growth.length[-2:].tolist()
    for what, values, exponent in (
        ("without a cache attention's work grows as t^3", growth.scores_without, 3),
        ("with one as t^2", growth.scores_with, 2),
    ):
        found = math.log2(values[-1] / values[-2])
        growth_words: dict[str, Any] = {"what": what, "before": before, "last": last}
        yield measured("growth", found, published=exponent, **growth_words)


def latency_rows(result: Result) -> list[dict[str, Any]]:
    """The table of latencies, a row for each model."""
    found = result.latencies
    return table.to_rows(
        {
            "model": found.model,
            "weight_bytes": found.weight_bytes,
            "cards_for_weights": found.num_devices,
            "cards_used": found.used,
            "bound_s": found.bound_s,
            "in_turn_s": found.turns_s,
            "lecture_s": found.lecture_s,
            "implied_share": found.implied_share,
        }
    )


def metrics(result: Result) -> dict[str, Any]:
    """Gives bounds and implied efficiencies."""
    return {
        "device": result.device,
        "ridge_flops_per_byte": result.ridge,
        "requests_per_s_alone": result.requests.alone,
        "requests_per_s_together": result.requests.together,
        "requests_together": result.requests.batch,
        **table.field_values(result.kept),
        "latencies": latency_rows(result),
    }


def summary(result: Result) -> list[ReportPart]:
    """Lays out the table of latencies, and answers the spoken questions."""
    heads = ("model", "weights", "GPUs", "bound", "lecture", "implied")
    rows = [
        (
            row["model"],
            units.format_bytes(row["weight_bytes"]),
            f"{row['cards_used']}",
            units.format_seconds(row["bound_s"]),
            units.format_seconds(row["lecture_s"]),
            units.format_percent(row["implied_share"]),
        )
        for row in latency_rows(result)
    ]
    note = (
        f"Bound: weights, keys and values read once for each of "
        f"{result.latencies.tokens} tokens at the bandwidth of all GPUs "
        f"({result.device}). Implied: the share of that bandwidth which the lecture's "
        "time means."
    )
    spoken = [report.paragraph(*pair) for pair in spoken_answers(result).items()]
    return [Sheet("one request", heads, rows, note), *spoken]


def spoken_answers(result: Result) -> dict[str, str]:
    """Answers what the lectures ask aloud, by question."""
    growth, ridge = result.growth, result.ridge
    begun, short, long = (row[6] for row in result.intensity)
    alone, most = result.intensity[0, 0], result.intensity[2, -1]
    saved = growth.all_without[-1] / growth.all_with[-1]
    return {
        "Do we cache Q?": (
            "No. The query of a position is met once, by the keys before it, in the "
            "step in which its token is fed; a later token brings a query of its own. "
            "Keys and values are met again by every later query: they are kept, "
            f"{result.kept.small:,.0f} bytes a token of LLaMA-7B. Queries would be "
            "half as much again, never read."
        ),
        "What happens at b = s = 1?": (
            "Every matrix meets a single column: two operations for each weight, two "
            f"bytes read for it, {alone:.2f} operations a byte. {result.device} needs "
            f"{ridge:.0f} to keep its units busy, so they are "
            f"{100 * alone / ridge:.1f} % of the time: memory alone decides."
        ),
        "What does a batch do to intensity?": (
            "Weights are read once for all: operations a byte grow with the batch, "
            f"{begun:.0f} at 64 sequences of LLaMA-7B that have just begun. Keys "
            "and values are each sequence's own and grow with it: with 128 tokens kept "
            f"of each {short:.0f} are left, with 2,048 {long:.1f}, and at "
            f"a batch of 512 no more than {most:.1f}."
        ),
        "What does the cache save?": (
            f"At {growth.length[-1]:,} tokens {saved:,.0f} times the operations: "
            "without it every token is fed again for each new one, t^2 / 2 tokens "
            "instead of t, and attention t^3 / 3 pairs instead of t^2 / 2."
        ),
    }
