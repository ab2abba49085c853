"""Tables and sentences of `jaxkv simulate`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.report import Sheet, format_percent, format_rate
from jaxkv.workloads import SustainedRate
from scaling.calibration import (
    JOULES_PER_KWH,
    MeasurementGain,
    OutsideSize,
    ServerPosterior,
    noise_quantile,
)
from scaling.cli.simulate.case import REQUESTS_FOR, ServerCase
from scaling.cli.simulate.summary import LEVEL, PROBABILITIES

_NUM_MEASUREMENTS = 3
_ENERGY_LABELS = {
    "watts": ("power [W]", 1.0),
    "joules_per_answer": ("an answer [J]", 1.0),
    "joules_per_token": ("token of an answer [J]", 1.0),
    "joules_per_million_tokens": (
        "million tokens of answers [kWh]",
        1 / JOULES_PER_KWH,
    ),
    "grams_per_answer": ("an answer [g of CO2]", 1.0),
    "grams_per_million_tokens": ("million tokens of answers [kg of CO2]", 1e-3),
}
_LATENCY_LABELS = {
    "e2e_s": ("end to end [s]", 1.0),
    "ttft_s": ("first token [ms]", 1e3),
    "tpot_s": ("per token [ms]", 1e3),
}


def server_sheet(case: ServerCase) -> Sheet:
    """Returns the table of the server."""
    setup = case.setup
    rows = [
        ("model", setup.model.name),
        ("devices", f"{setup.tensor_parallel} x {setup.device.name}"),
        ("policy", case.policy_name),
        ("K/V blocks", f"{setup.num_kv_blocks:,} of {setup.block_size} tokens"),
        ("sequences, at most", f"{setup.max_num_seqs:,}"),
        ("tokens per step, at most", f"{setup.max_num_batched_tokens:,}"),
        ("tokens per sequence, at most", f"{setup.max_model_len:,}"),
    ]
    return Sheet("Server", ("", ""), rows)


def run_sheets(document: dict[str, Any]) -> list[Sheet]:
    """Returns the tables of one load."""
    rows = [
        (
            name,
            *(
                format_estimate(document[kind], name, scale)
                for kind, (_, scale) in _LATENCY_LABELS.items()
            ),
        )
        for name in REQUESTS_FOR
    ]
    heads = ("", *(head for head, _ in _LATENCY_LABELS.values()))
    percent = f"{100 * LEVEL:.0f} %"
    latencies = Sheet(
        "Latency",
        heads,
        rows,
        f"Median of the draws, and the interval that holds {percent} of them.",
    )
    memory = document["memory"]
    pairs = [
        ("offered [requests/s]", format_rate(document["rate_per_s"])),
        ("finished [requests/s]", format_rate(document["requests_per_s"])),
        ("tokens of answers [1/s]", format_rate(document["tokens_per_s"])),
    ]
    if document["goodput"] is not None:
        good = format_estimate(document["goodput"], "per_s", 1.0)
        pairs.append(("within all limits [requests/s]", good))
    for name in ("mean", "p99", "peak"):
        if memory[f"{name}_share"] is not None:
            share = format_estimate(memory, f"{name}_share", 100)
            pairs.append((f"blocks in use, {name} [%]", share))
    if (usd := document["usd"]) is not None:
        million = format_estimate(usd, "per_million_tokens", 1.0)
        pairs += [
            ("thousand answers [USD]", format_estimate(usd, "per_answer", 1e3)),
            ("million tokens of answers [USD]", million),
        ]
    if (energy := document["energy"]) is not None:
        pairs += [
            (label, format_estimate(energy, name, scale))
            for name, (label, scale) in _ENERGY_LABELS.items()
            if name in energy
        ]
    sheets = [latencies, Sheet("Throughput and memory", ("", ""), pairs)]
    if (sessions := document["sessions"]) is not None:
        duration = sessions["duration_s"]
        rows = [(x, format_estimate(duration, x, 1.0)) for x in duration["interval"]]
        note = (
            f"From the first request of a session to its last token, {sessions['num']} "
            "sessions. The interval is over the draws, without the discrepancy of the "
            "model."
        )
        sheets.append(Sheet("Sessions", ("", "duration [s]"), rows, note))
    return sheets


def sweep_sheet(rows: Sequence[dict[str, Any]]) -> Sheet:
    """Returns the table of a sweep."""
    has_objective = rows[0]["objective_probability"] is not None
    heads = ["rate [1/s]", *(["met"] if has_objective else [])]
    heads += ["first token p99 [ms]", "end to end mean [s]", "per token p99 [ms]"]
    heads += ["blocks used", "queue grows"]
    cells = []
    for row in rows:
        cell = [format_rate(row["rate_per_s"])]
        if has_objective:
            cell.append(f"{100 * row['objective_probability']:.0f} %")
        cell += [
            format_estimate(row["ttft_s"], "p99", 1e3),
            format_estimate(row["e2e_s"], "mean", 1.0),
            format_estimate(row["tpot_s"], "p99", 1e3).partition(" ")[0],
            f"{100 * row['memory']['mean_share']:.0f} %",
            f"{100 * row['overloaded_share']:.0f} %",
        ]
        cells.append(tuple(cell))
    note = "met: probability that the objective is met. " if has_objective else ""
    note += "queue grows: share of the draws that are overloaded in the window."
    return Sheet("Sweep", heads, cells, note)


def objective_sheet(
    case: ServerCase,
    rows: Sequence[dict[str, Any]],
    largest: dict[float, SustainedRate],
) -> Sheet:
    """Returns the table of the objective's probability, or of its largest rates."""
    title = f"Objective: {', '.join(x.text for x in case.objectives)}"
    if not largest:
        probability = format_percent(rows[0]["objective_probability"])
        return Sheet(title, ("", ""), [("probability", probability)])
    cells = [(f"{100 * x:.0f} %", largest[x].text) for x in PROBABILITIES]
    return Sheet(title, ("probability", "largest rate [requests/s]"), cells)


def measurement_sheet(gains: Sequence[MeasurementGain]) -> Sheet:
    """Returns the table of the loads that would narrow the intervals most."""
    rows = [
        (
            format_rate(float(gain.load.rate_per_s)),
            f"{gain.load.prompt_tokens:,.0f}",
            f"{gain.load.answer_tokens:,.0f}",
            f"{gain.end_to_end:.2f}",
            f"{gain.first_token:.2f}",
        )
        for gain in gains[:_NUM_MEASUREMENTS]
    ]
    heads = ("rate [1/s]", "prompt", "answer", "end to end", "first token")
    note = (
        "Stages of this server, and the width of the 90 % interval after one of them "
        "is measured, over that of today."
    )
    return Sheet("Measure next", heads, rows, note)


def basis_sheet(case: ServerCase, outside: dict[str, OutsideSize]) -> Sheet:
    """Returns the table of the window and of the data of the coefficients.

    Args:
      case: the case.
      outside: sizes of its loads that the fitted stages do not cover.
    """
    load = case.loads[0]
    nums = case.num_measured
    device = case.setup.device.name
    windows = [x.window_s for x in case.loads]
    window = f"{windows[0]:.4g} s"
    num = f"{nums[0]:,} requests"
    if len(nums) > 1:
        if min(windows) < max(windows):
            window = f"{min(windows):.4g} to {max(windows):.4g} s"
        num = f"{min(nums):,} to {max(nums):,} requests at each rate"
    rows = [
        (
            "window",
            f"{window} after a warm-up of {load.warm_up_s:g} s, {num}, "
            f"{len(case.posterior.deviations)} draws",
        ),
        *fitted_rows(case.posterior),
    ]
    model_note = f"{case.fitted_model} is one of the fitted models"
    if case.fitted_model is None:
        model_note = (
            "not fitted: the intervals have the assumed discrepancy of an unseen model"
        )
    rows.append(("model", model_note))
    if device not in case.posterior.devices:
        rows.append(
            (
                "device",
                f"warning: no stage on {device} was fitted, so its shares of the data "
                "sheet's rates are assumed to be the same",
            )
        )
    rows += [("load", f"warning: {x}") for x in describe_outside(outside)]
    rows += [("input", f"warning: {x}") for x in case.doubts]
    return Sheet("Basis", ("", ""), rows)


_SIZE_PHRASES = {
    "prompt_tokens": "prompts of {} tokens",
    "answer_tokens": "answers of {} tokens",
    "batch": "a batch of {}",
}


def describe_outside(outside: dict[str, OutsideSize]) -> list[str]:
    """Returns a line for each size that the fitted stages do not cover."""
    return [
        f"{_SIZE_PHRASES[name].format(_short(x.value))}, and {_short(x.low)} to "
        f"{_short(x.high)} were fitted: intervals are wider for it"
        for name, x in outside.items()
    ]


def fitted_rows(posterior: ServerPosterior) -> list[tuple[str, str]]:
    """Returns the rows about the data of the coefficients."""
    models = ", ".join(posterior.residuals)
    devices = ", ".join(posterior.devices) or "unknown devices"
    fitted = (
        "mean end-to-end and median first-token times of "
        f"{len(posterior.stages)} load stages of {models} on {devices}"
    )
    if not models:
        fitted = f"times of {posterior.stages[0]}, on {devices}"
    return [
        ("fitted", fitted),
        ("percentiles", _describe_noise(posterior)),
    ]


def _describe_noise(posterior: ServerPosterior) -> str:
    if posterior.noise is None:
        return "no noise of requests: measured P90 and P99 may be higher"
    ends = np.exp(noise_quantile(0.99) * posterior.noise.scale) - 1
    whole, first = (f"{100 * x:.0f} %" for x in ends)
    return (
        "P90 and P99 have the noise of requests of these stages, stalls and start-up "
        f"included: P99 {whole} above the median end to end, and {first} at the first "
        "token"
    )


def format_estimate(estimate: dict[str, Any], name: str, scale: float) -> str:
    """Formats a statistic with its interval: 4.62 [4.31, 4.98]; "-" for none."""
    if estimate[name] is None:
        return "-"
    low, high = (_short(scale * x) for x in estimate["interval"][name])
    return f"{_short(scale * estimate[name])} [{low}, {high}]"


def _short(value: float) -> str:
    """Formats three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
