"""Report of a plan with servers: the best model, its load, its costs, and others."""

import math
from collections.abc import Iterator
from typing import Any

from jaxkv.report import Sheet, format_bytes, format_count, numbered_list
from scaling.calibration import JOULES_PER_KWH
from scaling.cli.plan.total import TotalPlan
from scaling.plan import DAY_S, HOUR_S

_COST_UNITS = {"usd": ("USD", 1.0), "joules": ("kWh", 1 / JOULES_PER_KWH)}
"""Printed unit of a cost, and the factor to it."""

_ANSWERS = {
    "usd_per_answer": ("thousand answers [USD]", 1e3),
    "usd_per_million_tokens": ("million tokens of answers [USD]", 1.0),
    "joules_per_answer": ("an answer [J]", 1.0),
    "joules_per_million_tokens": (
        "million tokens of answers [kWh]",
        1 / JOULES_PER_KWH,
    ),
    "grams_per_answer": ("an answer [g of CO2]", 1.0),
    "grams_per_million_tokens": ("million tokens of answers [kg of CO2]", 1e-3),
}


def total_sheets(plan: TotalPlan) -> list[Sheet]:
    """Returns the plan, the comparison, the servers, and warnings."""
    document = plan.document
    sheets = [Sheet("plan", ("", ""), list(_plan(document))), _comparison(document)]
    if document["serving"] is not None:
        sheets.append(_servers(document))
    if document["warnings"]:
        sheets.append(numbered_list("warnings", document["warnings"]))
    return sheets


def _plan(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    level = f"{document['level']:.0%} interval"
    name, factor = _COST_UNITS[document["unit"]]

    def interval(key: str, form: str, scale: float = 1.0) -> Iterator[tuple[str, str]]:
        if document[key] is not None:
            low, high = (x * scale for x in document[key])
            yield level, f"{low:{form}} to {high:{form}}"

    yield "device", document["device"]
    num_params = format_count(document["num_params"], ".4g", " ")
    yield "parameters N", f"{num_params} ({document['count']})"
    yield from interval("num_params_interval", ".3g")
    yield "tokens D", format_count(document["num_tokens"], ".4g", " ")
    yield from interval("num_tokens_interval", ".3g")
    yield "tokens per parameter", f"{document['tokens_per_param']:.3g}"
    yield "loss", f"{document['loss']:.4f} nats per token"
    yield from interval("interval", ".4f")
    for key, unit in (("usd", "USD"), ("joules", "kWh")):
        scale = _COST_UNITS[key][1]
        for label, part in (
            ("training", f"training_{key}"),
            ("serving", f"serving_{key}"),
        ):
            if document[part] is not None:
                yield label, f"{document[part] * scale:,.4g} {unit}"
            if label == "serving" and key == document["unit"]:
                yield from interval("serving_interval", ".4g", factor)
    total = document["cost_usd" if name == "USD" else "joules"]
    yield "both", f"{total * factor:,.4g} {name}"
    if document["target_loss"] is not None:
        yield from interval("cost_interval", ".4g", factor)
    yield "devices that serve", f"{document['devices']:,}"
    shape = document["architecture"]
    yield (
        "architecture",
        (
            f"{shape['num_layers']} layers x {shape['hidden_size']:,}, "
            f"{shape['num_q_heads']} heads ({shape['num_kv_heads']} KV), "
            f"FFN {shape['mlp_size']:,}"
        ),
    )
    yield "its parameters", f"{shape['num_params']['total']:,}"
    yield "training memory", format_bytes(document["memory_bytes"])
    yield "device-hours of training", f"{document['device_s'] / HOUR_S:,.0f}"
    if document["num_devices"] is not None:
        yield "devices of training", f"{document['num_devices']:,}"
    if document["duration_s"] is not None:
        yield "duration of training", f"{document['duration_s'] / DAY_S:,.3g} days"


def _comparison(document: dict[str, Any]) -> Sheet:
    name, factor = _COST_UNITS[document["unit"]]
    unit = document["unit"]
    own = {
        "training_cost": document[f"training_{unit}"],
        "serving_cost": document["serving_cost"],
        "saved": 0.0,
    }
    own["cost"] = own["training_cost"] + own["serving_cost"]
    comparison = document["comparison"]
    rows = []
    for title, x in (
        ("cheapest to train", comparison["training_only"]),
        ("2 N per token served", comparison["closed_form"]),
        ("the plan", document | own),
    ):
        costs = (x[key] * factor for key in ("training_cost", "serving_cost", "cost"))
        rows.append(
            (
                title,
                f"{x['num_params']:.4g}",
                f"{x['num_tokens']:.4g}",
                *(f"{value:,.4g}" for value in costs),
            )
        )
    load = document["load"]
    tokens = load["num_requests"] * (load["prompt_tokens"] + load["answer_tokens"])
    saved = comparison["training_only"]["saved"]
    note = (
        f"All have a loss of {document['loss']:.4f}. First: the compute optimum "
        "(Hoffmann et al. 2022). Second: the optimum if each of "
        f"{tokens:.4g} tokens takes 2 N operations at the MFU of --serve-mfu (Sardana "
        "et al. 2024, arXiv:2401.00448), at the costs of the servers. The plan costs "
        f"{100 * saved:.3g} % less than the first."
    )
    heads = ("", "N", "D", f"training [{name}]", f"serving [{name}]", f"both [{name}]")
    return Sheet("How much does serving cost?", heads, rows, note)


def _servers(document: dict[str, Any]) -> Sheet:
    serving = document["serving"]
    load = document["load"]
    rate = serving["requests_per_s"]
    low, high = (f"{x:.3g}" for x in rate["interval"])
    rows = [
        ("device", f"{serving['devices_per_server']} x {serving['device']}"),
        ("servers", f"{serving['num_servers']:,.3g}"),
        ("requests at a time, each", f"{serving['concurrency']:,.0f}"),
        ("requests per second, each", f"{rate['median']:.3g} [{low}, {high}]"),
        ("time to the first token [ms]", f"{1e3 * serving['ttft_s']:.3g}"),
        ("time per token [ms]", f"{1e3 * serving['tpot_s']:.3g}"),
        ("2 N operations per token, of the peak", f"{serving['mfu']:.1%}"),
    ]
    for name, (label, scale) in _ANSWERS.items():
        if name in serving:
            low, high = (f"{scale * x:.3g}" for x in serving[name]["interval"])
            value = f"{scale * serving[name]['median']:.3g}"
            rows.append((label, f"{value} [{low}, {high}]"))
    limits = document["objective"]
    words = [
        f"{label} within {limits[key]:g} s"
        for label, key in (("first tokens", "first_token_s"), ("tokens", "token_s"))
        if math.isfinite(limits[key])
    ]
    note = (
        f"{load['rate_per_s']:.4g} requests per second with prompts of "
        f"{load['prompt_tokens']:,.4g} and answers of {load['answer_tokens']:,.4g} "
        f"tokens for {load['duration_s'] / DAY_S:,.4g} days, "
        f"{load['num_requests']:.4g} in all, on vLLM in 16 bits, with mean "
        f"{' and '.join(words)}, by a fit of public servers. {document['level']:.0%} "
        "intervals of a model that it did not see. "
    )
    note += (
        "Whole servers are paid all the time."
        if document["is_whole"]
        else "The share of the servers that the load takes is paid."
    )
    if serving["outside_fitted"]:
        names = ", ".join(serving["outside_fitted"])
        note += f" Outside the fitted loads, so wider: {names}."
    if not serving["has_device"]:
        note += f" No server on {serving['device']} was fitted."
    return Sheet("Which servers?", ("", ""), rows, note)
