"""Compares static and continuous batching: throughput and latency.

Two pictures from lectures are reproduced with the engine's scheduler: sequences S1 to
S7 in 4 slots, and requests R1 to R5 with a batch limit of 3. Then throughput is swept
over the spread of output lengths under static batching, continuous batching that
reserves the longest sequence, and continuous batching with pages. Memory and the cost
of a step are equal. A last sweep varies the batch size. Requests are preempted only
when pages run out.

`real` serves the bundled model on this machine under both policies. `paper` simulates
OPT-13B on an A100-40GB with prompts of 512 tokens and exponential outputs of mean 128
tokens, as published; outputs above the limit are redrawn.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments import lab
from experiments.harness import load_text_model
from experiments.serving.batching import lectures, serving, sweeps
from experiments.serving.batching.lectures import IterationSpans
from experiments.serving.batching.sweeps import (
    SYSTEMS,
    ClientLatencies,
    Config,
    ThroughputSweep,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PUBLISHED_LIMITS = ([32.0, 128.0, 512.0, 1536.0], "opt-13b-a100-40gb")
"""Published output limits in tokens, and their cost model."""
CLAIMS = lab.claims_file(__file__)


CONFIGS = {
    "smoke": Config(
        num_places=160,
        prompt_tokens=8,
        mean_output_tokens=8.0,
        limits=(4, 16, 24),
        deviations=(0.0, 1.0),
        clients=(1, 4),
        num_requests=24,
        num_seeds=1,
        max_slots=8,
    ),
    "paper": Config(),
    "real": Config(
        model="stdlib-bytes",
        num_places=8 * 256,
        prompt_tokens=32,
        mean_output_tokens=48.0,
        limits=(224,),
        deviations=(0.0, 0.5, 1.0, 1.5),
        clients=(1, 2, 4, 8, 16),
        num_requests=64,
        num_seeds=2,
        max_slots=16,
    ),
}


class Result(lab.ResultRecord):
    """Sweeps, and the token times of the lectures' pictures."""

    limits: ThroughputSweep = lab.column(
        "all `SYSTEMS`, by output limit; empty if served"
    )
    deviations: ThroughputSweep = lab.column(
        "static and continuous, by spread of outputs"
    )
    clients: ClientLatencies = lab.column("by concurrent clients")
    static_sequences: IterationSpans = lab.column("S1 to S7, static batching")
    continuous_sequences: IterationSpans = lab.column("S1 to S7, continuous batching")
    static_requests: IterationSpans = lab.column("R1 to R5, static batching")
    continuous_requests: IterationSpans = lab.column("R1 to R5, continuous batching")
    where: str = lab.column("cost model or device")
    num_slots: int = lab.column("slots of the systems in `deviations`")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates every sweep, or serves the spread and client sweeps with a model."""
    model = None
    limits = config.limits
    where = config.cost
    if config.model:
        model = load_text_model(config.model, max_length=config.longest)
        limits = ()
        where = jax.devices()[0].device_kind
    static, other = sweeps.simulate_sweeps(config, progress, sweeps=model is None)
    if model:
        uneven = serving.serve_uneven(config, model, progress)
        static["deviations"], other["deviations"] = uneven
        other["clients"] = [*serving.serve_batches(config, model, progress)]
    by_limit = (static["limits"], other["limits"], other["paged"])
    by_spread = (static["deviations"], other["deviations"])
    first, second = zip(static["pictures"], other["pictures"], strict=True)
    return Result(
        sweeps.throughput_sweep(config, limits, *by_limit),
        sweeps.throughput_sweep(config, config.deviations, *by_spread),
        sweeps.client_latencies(config, other["clients"]),
        *(run.times for run in (*first, *second)),
        where=where,
        num_slots=sweeps.num_reserved_slots(config, config.longest),
    )


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the pictures and those sweeps that were run."""
    for name, times, picture in (
        ("static", result.static_sequences, lectures.STATIC),
        ("continuous", result.continuous_sequences, lectures.CONTINUOUS),
    ):
        yield lab.measured(
            "cells", lectures.count_equal_cells(times, picture), name=name
        )
    batches = lectures.batch_names(result.continuous_requests)[
        : len(lectures.BATCH_CONTENTS)
    ]
    equal = sum(x == y for x, y in zip(batches, lectures.BATCH_CONTENTS, strict=False))
    yield lab.measured("iterations", equal, batches=", then ".join(batches))
    yield lab.measured("joined", lectures.count_joined(result.static_requests))
    swept = result.limits
    if swept.value.size:
        static, continuous, paged = swept.means
        gain = continuous / static
        more = paged / continuous
        gains, pages = (
            ", ".join(
                f"{x:.2f} up to {y:,.0f}" for x, y in zip(z, swept.value, strict=True)
            )
            for z in (gain, more)
        )
        longest = swept.value[-1]
        yield lab.measured("never_slower", gain.min(), gains=gains)
        yield lab.measured("growth", np.diff(gain).min())
        yield lab.measured("continuous", gain[-1], longest=longest)
        yield lab.measured("paged", paged[-1] / static[-1], longest=longest)
        yield lab.measured("doubled", more.min(), pages=pages)
    client_sweep = result.clients
    uneven = result.deviations
    if len(client_sweep):
        max_clients = client_sweep.clients[-1]
        rates = client_sweep.tokens_per_s
        took_s = client_sweep.s_per_token
        fastest = client_sweep.clients[took_s.argmin()]
        yield lab.measured(
            "alone", fastest, most=max_clients, times=took_s[-1] / took_s[0]
        )
        has_rates = np.isfinite(rates).any()
        best = client_sweep.clients[np.nanargmax(rates)] if has_rates else np.nan
        yield lab.measured(
            "largest", best, published=float(max_clients), times=rates[-1] / rates[0]
        )
    if uneven.value[0] == 0:
        fewer = (uneven.steps[0, 0] / uneven.steps[1, 0]).mean()
        yield lab.measured("equal", fewer, differs=not result.limits.value.size)


def metrics(result: Result) -> dict[str, Any]:
    """Returns the pictures as text, and all throughputs."""
    return {
        "where": result.where,
        "sequences_static": lectures.grid_rows(result.static_sequences),
        "sequences_continuous": lectures.grid_rows(result.continuous_sequences),
        "requests_static": lectures.batch_names(result.static_requests),
        "requests_continuous": lectures.batch_names(result.continuous_requests),
        "limits": result.limits.rows("longest"),
        "deviations": result.deviations.rows("deviation"),
        "clients": result.clients.rows(),
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of the pictures and the sweeps."""
    numbers = metrics(result)
    names = [f"T{i + 1}" for i in range(lectures.PLACES)]
    both = (numbers["requests_static"], numbers["requests_continuous"])
    turns = enumerate(itertools.zip_longest(*both, fillvalue=""), 1)
    heads = ("iteration", "request by request", "iteration by iteration")
    tables = {
        "exponential outputs up to a limit": numbers["limits"],
        "outputs of equal means": numbers["deviations"],
    }
    return [
        *(
            lab.Sheet(
                f"{x} batching", names, [y.split() for y in numbers[f"sequences_{x}"]]
            )
            for x in ("static", "continuous")
        ),
        lab.Sheet(
            "R1 to R5, three at a time", heads, [(str(i), *row) for i, row in turns]
        ),
        *lab.metric_sheets({title: x for title, x in tables.items() if x}),
        result.clients.sheet("requests side by side"),
    ]


SYSTEM_NAMES = ("static", "continuous", "continuous, paged")
"""Labels of `SYSTEMS` in figures."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the pictures and the sweeps on 4 rows of 2 axes."""
    for ax, spans, name in (
        (axes[0, 0], result.static_sequences, "static"),
        (axes[0, 1], result.continuous_sequences, "continuous"),
    ):
        title = f"{name.capitalize()} batching: tokens in each slot"
        lectures.draw_grid(ax, spans, title)
    for ax, spans, name in (
        (axes[1, 0], result.static_requests, "request"),
        (axes[1, 1], result.continuous_requests, "iteration"),
    ):
        steps = int(spans.last.max())
        title = f"Scheduling {name} by {name} takes {steps} iterations"
        lectures.draw_iterations(ax, spans, title, is_static=name == "request")
    (rate, gain), limits = axes[2:, 0], result.limits
    if limits.value.size:
        _draw_speeds(rate, limits)
        # Throughput over that of static batching, and the published end points.
        gains = limits.means / limits.means[0]
        longest = _PUBLISHED_LIMITS[0][-1]
        for i, name in enumerate(SYSTEM_NAMES[1:], 1):
            lab.draw_curve(gain, limits.value, gains[i], name, name)
            look = {"linestyle": "", "markersize": 7, "markerfacecolor": "none"}
            look["marker"] = lab.system_style(name).marker
            reference = [CLAIMS.published(SYSTEMS[i])]
            label = f"published, {name}"
            lab.draw_curve(gain, [longest], reference, "published", label, **look)
        lab.draw_reference_line(gain, 1)
        gain.set(ylabel="over static [ratio]", ylim=(0, None))
        gain.legend()
        title = f"Up to {limits.value[-1]:,.0f} tokens an answer, static batching "
        rate.set_title(f"{title}falls to {limits.means[0][-1]:.0f} tokens/s")
        best = zip(SYSTEM_NAMES[1:], gains[1:].max(axis=1), strict=True)
        title = ", ".join(f"{max_gain:.1f} times: {name}" for name, max_gain in best)
        gain.set_title(f"Up to {title}")
    for ax in (rate, gain):
        if limits.value.size:
            lab.use_powers_of_two(ax)
            ax.set(xticks=limits.value, xlabel="limit of outputs [tokens]")
        else:
            ax.remove()
    _draw_speeds(axes[2, 1], result.deviations)
    spread = "deviation / mean of outputs [ratio]"
    title = "Equal means"
    if result.deviations.value.size:
        means = [x[-1] / x[0] for x in result.deviations.means]
        title = f"Lengths that vary leave static batching {100 * means[0]:.0f} %, "
        title += f"continuous {100 * means[1]:.0f} % of its rate"
    axes[2, 1].set(xlabel=spread, title=title)
    _draw_clients(axes[3, 1], result.clients)


def _draw_speeds(ax: "Axes", sweep: ThroughputSweep) -> None:
    rows = zip(SYSTEM_NAMES, sweep.means, sweep.tokens_per_s, strict=False)
    for name, mean, seeds in rows:
        lab.draw_curve(ax, sweep.value, mean, name, name)
        if seeds.shape[1] > 1:
            low = seeds.min(axis=1)
            high = seeds.max(axis=1)
            lab.shade_band(
                ax, sweep.value, low, high, lab.system_style(name).color, 0.2
            )
    ax.set(ylabel="throughput [tokens/s]", ylim=(0, None))
    ax.legend()


def _draw_clients(ax: "Axes", latencies: ClientLatencies) -> None:
    token_ms = 1e3 * latencies.s_per_token
    lab.draw_curve(ax, token_ms, latencies.tokens_per_s, "continuous, paged")
    rows = [*zip(latencies.clients, token_ms, latencies.tokens_per_s, strict=True)]
    for clients, *at in rows:
        lab.annotate(ax, str(clients), at, (6, -4), va="top")
    title = "Requests served together"
    if rows:
        (few, slow, less), (batch, fast, more) = rows[0], rows[-1]
        title = f"{batch} requests together: {more / less:.0f} times the throughput of "
        title += f"{few}, {fast / slow:.2f} times the latency"
    x = "time of a token, points: requests [ms]"
    y = "throughput [tokens/s]"
    lab.set_labels(ax, title, x, y, yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.margins(x=0.1, y=0.12)


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(4, 2, 3.3)
)
