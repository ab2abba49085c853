"""Measures the load that a chat service sustains with paged memory.

Reproduces figure 17 of the PagedAttention paper in simulated time. A prompt is the last
1,024 tokens of a conversation, an answer has at most 1,024 tokens, and the KV cache is
dropped between rounds. Lengths follow this project's own law: conversations of several
rounds with ShareGPT's mean lengths.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import drawings, runs, settings
from jaxkv import workloads
from jaxkv.workloads import (
    SHAREGPT,
    Fixed,
    Lengths,
    Load,
    Pair,
    load_ratio,
    num_requests_for,
)

HISTORY = 1024
"""Largest number of tokens of a prompt, and of an answer."""
AXIS = 0.8
"""End of the published axis, in requests/s."""
SYSTEMS: tuple[settings.System, ...] = (*settings.ORCAS, "paged")


class Config(lab.ConfigRecord):
    """Conversations and their arrival rates."""

    rounds_before: lab.NonNegativeFloat = 3.0
    """Mean number of earlier rounds of a conversation, geometrically distributed. The
    paper states only that most prompts have the full 1,024 tokens."""
    hours: lab.PositiveFloat = 1.0
    """Hours of simulated load."""
    num_rates: Annotated[int, lab.Range(2)] = 8
    """Number of rates, evenly spaced up to `most`."""
    num_near: lab.NonNegativeInt = 4
    """Further rates where latency rises from 0.1 to 0.9 s/token."""
    most: lab.PositiveFloat = 1.2
    """Highest rate in requests/s; the published axis ends at 0.8."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""


CONFIGS = {"smoke": Config(hours=0.02, num_rates=2, num_near=0), "paper": Config()}


def draw_conversations(config: Config, law: Pair = SHAREGPT) -> Load:
    """Draws rounds of independent conversations.

    A prompt is the conversation so far with the new question, its last 1,024 tokens.

    Args:
      config: rounds, duration and seed.
      law: distribution of the lengths of a round.
    """
    rng = np.random.default_rng(config.seed)
    seconds = 3600 * config.hours
    num = num_requests_for(config.most, seconds)
    # Number of failures of a geometric law with this mean.
    before = rng.geometric(1 / (1 + config.rounds_before), num) - 1
    rounds = law.draw(rng, num + int(before.sum()))
    total = rounds.prompt[num:] + rounds.output[num:]
    ends = np.cumsum(before)
    sums = np.concatenate([[0], np.cumsum(total)])
    history = sums[ends] - sums[ends - before]
    tokens = Lengths(
        np.minimum(history + rounds.prompt[:num], HISTORY).astype(np.int32),
        np.minimum(rounds.output[:num], HISTORY),
    )
    return Load(workloads.poisson(rng, rate=1.0, num=num), tokens, seconds)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Serves the conversations with every system."""
    requests = draw_conversations(config)
    prompt, output = requests.tokens
    # Slots follow from the mean prompt, which is longer than that of a single round.
    law = dataclasses.replace(SHAREGPT, prompt=Fixed(tokens=int(prompt.mean())))
    length_stats = {
        "prompt_tokens": float(prompt.mean()),
        "output_tokens": float(output.mean()),
        "full_share": float(np.mean(prompt == HISTORY)),
    }
    rows = runs.explore_rates(
        runs.Setting(settings.SERVERS["13B"], law),
        requests,
        SYSTEMS,
        config.most * np.arange(1, config.num_rates + 1) / config.num_rates,
        num_near=config.num_near,
        max_rate=config.most,
        progress=progress,
    )
    return [length_stats | row for row in rows]


def plot(axes: np.ndarray, result: list[lab.Row]) -> None:
    """Draws latency against rate, and the ratio of loads against the latency bound."""
    latency, ratio = axes
    curves = runs.latency_curves(result)
    loads = runs.sustained_loads(result)
    title = "OPT-13B: latency of chat by load"
    if "paged" in loads:
        title = f"OPT-13B sustains {loads['paged'].rate:.2f} chats/s with pages"
    runs.draw_curves(latency, result, title)
    lab.draw_reference_line(latency, AXIS, "end of the paper's axis", along="y")
    latency.set_xlim(left=0)
    latency.legend()
    bounds = np.linspace(*runs.LATENCY_RANGE, 33)
    gains = [0.0]
    for system, curve in curves.items():
        if system != "paged" and "paged" in curves:
            gain = [load_ratio(curves["paged"], curve, x) for x in bounds]
            lab.draw_curve(ratio, bounds, gain, system, f"over {system}", markevery=8)
            gains.append(load_ratio(curves["paged"], curve, runs.LATENCY_BOUND))
    lab.draw_reference_line(ratio, 2, "the paper's")
    title = "Load with pages over Orca's"
    if gains[1:]:
        title = (
            f"Pages sustain {min(gains[1:]):.2f} to {max(gains):.2f} times the load, "
        )
        title += "not 2" if max(gains) < 2 else "the paper 2"
    x = "bound on the latency [s/token]"
    y = "load of paged / Orca's [ratio]"
    lab.set_labels(ratio, title, x, y, ylim=(0, None))
    ratio.legend()


@lab.claims_file(__file__).judge
def claims(result: list[lab.Row]) -> Iterator[lab.MeasuredValue]:
    """Compares the figure's claims with the simulation."""
    loads = runs.sustained_loads(result)
    if len(loads) < len(SYSTEMS):
        return
    orcas = [loads[name].rate for name in settings.ORCAS]
    span = "; ".join(f"{name} {loads[name].text}" for name in SYSTEMS)
    yield lab.measured("history", float(result[0]["full_share"]), differs=True)
    yield lab.measured("alike", max(orcas) / min(orcas))
    for name in settings.ORCAS:
        times = loads["paged"].rate / loads[name].rate
        drawn_times = drawings.drawn_ratio("17", name, runs.LATENCY_BOUND)
        highest = drawings.highest_ratio("17", name, runs.LATENCY_RANGE)
        words: dict[str, Any] = {"name": name, "bound": runs.LATENCY_BOUND}
        yield lab.measured(
            "twice", times, span=span, drawn=drawn_times, highest=highest, **words
        )
        yield lab.measured("drawn", times, published=drawn_times, **words)


def metrics(result: list[lab.Row]) -> dict[str, object]:
    """Returns the load that each system sustains, and every row."""
    return {"capacities": runs.sustained_rows(result), "rows": result}


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Returns a table of the systems at the rates that they sustain."""
    loads = runs.sustained_loads(result)
    if not loads:
        return []
    rows = []
    for name, selected in runs.group_rows(result, "system").items():
        rate = loads[name].rate
        end = min(selected, key=lambda row: abs(row["rate_per_s"] - rate))
        times = loads["paged"].rate / rate if "paged" in loads else None
        rows.append(end | {"sustained": loads[name].text, "times": times})
    columns = {
        "system": "system",
        "requests/s": "sustained",
        "paged, times": "times",
        "batch": "batch",
        "tokens": "tokens_share",
        "recomputed": "recomputed_share",
    }
    note = (
        "Prompts have {prompt_tokens:.0f} tokens on average, {full_share:.1%} all of "
        "1,024; answers {output_tokens:.0f}. Tokens: share of the memory that holds "
        "keys and values near that rate."
    ).format_map(result[0])
    title = f"requests/s at {runs.LATENCY_BOUND} s a token"
    return [lab.row_sheet(title, rows, columns, note)]


STUDY = lab.Study(
    CONFIGS, list, run, plot, claims, summary, metrics, panels=lab.Panels(1, 2, 3.4)
)
