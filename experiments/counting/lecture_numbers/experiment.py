"""Do the lectures' own numbers on serving follow from memory and bandwidth?

Each number that the lectures quote is compared with the bound from bytes and
operations: the GPUs that hold the weights, the time to read them 256 times, the request
rate of a GPU, the size of keys and values, and the growth of attention with and without
a KV cache. The ratio of a quoted time to its bound is the implied efficiency. No number
is fitted.
"""

import math
from collections.abc import Iterator

from experiments import lab
from experiments.counting.lecture_numbers import bounds, drawing
from experiments.counting.lecture_numbers.bounds import Config, Result

CONFIGS = {"paper": Config(), "smoke": Config(tokens=16)}


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares every quoted number with its bound."""
    latencies = result.latencies
    requests = result.requests
    cache_sizes = result.kept
    need = latencies.num_devices.tolist()
    weights = latencies.weight_bytes.tolist()
    largest = lab.format_bytes(weights[0])
    filled_gb = weights[0] / 9e9
    yield lab.measured(
        "gpt3_175b", need[0], weights=largest, need=need[0], filled_gb=filled_gb
    )
    for row in latency_rows(result):
        bound = row["bound_s"]
        quoted = row["lecture_s"]
        used = row["cards_used"]
        yield lab.measured(
            "latency" if used == 1 else "latency_of_several",
            bound,
            published=quoted,
            size=row["model"].upper().replace("GPT3-", "GPT-3 "),
            tokens=latencies.tokens,
            percent=100 * bound / quoted,
            used=used,
            turns_s=row["in_turn_s"],
            least=math.ceil(row["in_turn_s"] / quoted),
        )
    yield lab.measured("one_each", max(need[1:]), weights=lab.format_bytes(weights[1]))
    together = requests.together
    share = f"{100 / together:.0f} %" if together else "no share"
    yield lab.measured(
        "several_at_a_time",
        together,
        batch=requests.batch,
        share=share,
        single=requests.alone,
    )
    yield lab.measured(
        "llama_70b", cache_sizes.devices_70b, tokens=cache_sizes.tokens_70b
    )
    yield lab.measured("token_of_7b", cache_sizes.small / 1e6)
    yield lab.measured("token_of_13b", cache_sizes.large / 1e6)
    yield lab.measured(
        "request", cache_sizes.request / 2**30, gb=cache_sizes.request / 1e9
    )
    growth = result.growth
    before, last = growth.length[-2:].tolist()
    for statement, values, exponent in (
        ("without a cache attention's work grows as t^3", growth.scores_without, 3),
        ("with one as t^2", growth.scores_with, 2),
    ):
        slope = math.log2(values[-1] / values[-2])
        yield lab.measured(
            "growth",
            slope,
            published=exponent,
            statement=statement,
            before=before,
            last=last,
        )


def latency_rows(result: Result) -> list[lab.Row]:
    """Returns the table of latencies, one row per model."""
    latencies = result.latencies
    return lab.to_rows(
        {
            "model": latencies.model,
            "weight_bytes": latencies.weight_bytes,
            "cards_for_weights": latencies.num_devices,
            "cards_used": latencies.used,
            "bound_s": latencies.bound_s,
            "in_turn_s": latencies.turns_s,
            "lecture_s": latencies.lecture_s,
            "implied_share": latencies.implied_share,
        }
    )


def metrics(result: Result) -> dict[str, object]:
    """Returns bounds and implied efficiencies."""
    return {
        "device": result.device,
        "ridge_flops_per_byte": result.ridge,
        "requests_per_s_alone": result.requests.alone,
        "requests_per_s_together": result.requests.together,
        "requests_together": result.requests.batch,
        **lab.field_values(result.kept),
        "latencies": latency_rows(result),
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Tabulates the latencies, and answers the questions asked in the lectures."""
    heads = ("model", "weights", "GPUs", "bound", "lecture", "implied")
    rows = [
        (
            row["model"],
            lab.format_bytes(row["weight_bytes"]),
            f"{row['cards_used']}",
            lab.format_seconds(row["bound_s"]),
            lab.format_seconds(row["lecture_s"]),
            lab.format_percent(row["implied_share"]),
        )
        for row in latency_rows(result)
    ]
    note = (
        "Bound: time to read weights, keys and values once for each of "
        f"{result.latencies.tokens} tokens at the bandwidth of all GPUs "
        f"({result.device}). Implied: share of that bandwidth which the lecture's "
        "time implies."
    )
    spoken = [lab.paragraph(*pair) for pair in spoken_answers(result).items()]
    return [lab.Sheet("one request", heads, rows, note), *spoken]


def spoken_answers(result: Result) -> dict[str, str]:
    """Returns answers to questions asked in the lectures, by question."""
    growth = result.growth
    ridge = result.ridge
    begun, short, long = (row[6] for row in result.intensity)
    alone = result.intensity[0, 0]
    intensity = result.intensity[2, -1]
    saved = growth.all_without[-1] / growth.all_with[-1]
    return {
        "Do we cache Q?": (
            "No. The query of a token is used only in the step that feeds the token; "
            "every later token has its own query. Keys and values are used by all "
            f"later queries, so they are cached: {result.kept.small:,.0f} bytes per "
            "token of LLaMA-7B. Cached queries would add half of that and would never "
            "be read."
        ),
        "Which limit binds at b = s = 1?": (
            "Every matrix is multiplied by a single column: two operations per weight "
            f"and two bytes read, {alone:.2f} operations per byte. {result.device} "
            f"needs {ridge:.0f} to be compute-bound, so its units are busy for "
            f"{100 * alone / ridge:.1f} % of the time: the step is memory-bound."
        ),
        "How does a batch change the intensity?": (
            "Weights are read once for the whole batch, so operations per byte grow "
            f"with the batch: {begun:.0f} for 64 sequences of LLaMA-7B without "
            "context. Keys and values are not shared and grow with each sequence: "
            f"with 128 cached tokens per sequence the intensity is {short:.0f}, with "
            f"2,048 tokens {long:.1f}, and at most {intensity:.1f} at a batch of 512."
        ),
        "How much does the KV cache save?": (
            f"At {growth.length[-1]:,} tokens it saves a factor of {saved:,.0f} in "
            "operations. Without the cache, every step feeds all earlier tokens "
            "again: t^2 / 2 tokens instead of t, and t^3 / 3 pairs of attention "
            "instead of t^2 / 2."
        ),
    }


STUDY = lab.Study(
    CONFIGS,
    Result,
    bounds.run,
    drawing.plot,
    claims,
    summary,
    metrics,
    panels=lab.Panels(3, 1, 3.0),
)
