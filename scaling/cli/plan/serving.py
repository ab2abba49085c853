"""Time, energy and money of serving a planned model, by fits of public servers."""

from typing import Any, NamedTuple

import numpy as np

from jaxkv.report import Sheet
from scaling.calibration import (
    ENERGY_DISCREPANCY,
    INTERVAL_HALF,
    JOULES_PER_KWH,
    PUBLISHED_LOOPS,
    MeasuredServer,
    count_server,
    find_outside_sizes,
    load_loops,
    predict_servers,
    sizes_of_server,
)
from scaling.cli.plan.options import PlanOptions
from scaling.costs import find_device
from scaling.plan import HOUR_S, Offer
from scaling.shapes import ModelShape

_DEGREES = (1, 2, 4, 8)


class ServedLoad(NamedTuple):
    """A constant number of requests of fixed lengths."""

    prompt_tokens: int
    answer_tokens: int
    concurrency: int


def parse_served_load(text: str) -> ServedLoad:
    """Parses `PROMPT:ANSWER:REQUESTS`.

    Raises:
      ValueError: the text has another form, or a number is below 1.
    """
    words = text.split(":")
    if len(words) != 3 or not all(x.isdecimal() and 0 < int(x) < 2**29 for x in words):
        raise ValueError(
            f"--serve {text}: must be PROMPT:ANSWER:REQUESTS, such as 1024:256:32, "
            "each a whole number from 1"
        )
    return ServedLoad(*map(int, words))


def find_serving(
    options: PlanOptions, model: ModelShape, offer: Offer | None
) -> dict[str, Any]:
    """Predicts a vLLM server of a dense model in 16 bits on the offered device.

    Raises:
      ValueError: there is no device, it is unknown, the model does not fit into 8 of
        them, or the fit cannot be read.
    """
    load = parse_served_load(options.serve)
    if offer is None:
        raise ValueError(f"--serve {options.serve} needs --gpu NAME:USD_PER_HOUR")
    device = find_device(offer.name)
    servers = [
        MeasuredServer(
            name=model.name,
            engine="vllm",
            checkpoint=model.name,
            model=model,
            device=device,
            weight_format="bf16",
            num_devices=degree,
            data_parallel=1,
            expert_parallel=1,
            concurrency=float(load.concurrency),
            prompt_tokens=float(load.prompt_tokens),
            answer_tokens=float(load.answer_tokens),
        )
        for degree in _DEGREES
    ]
    needed = load.prompt_tokens + load.answer_tokens
    fitting = (x for x in servers if float(count_server(x).kv_capacity) >= needed)
    if (server := next(fitting, None)) is None:
        raise ValueError(
            f"--serve {options.serve}: {_DEGREES[-1]} {device.name} do not hold the "
            "weights in 16 bits and one request"
        )
    calibration = load_loops(options.coefficients or PUBLISHED_LOOPS)
    predicted = predict_servers([server], calibration)
    running = float(predicted.num_running[0])
    low, high = (
        float(x[0, 0] / predicted.median_s[0, 0])
        for x in (predicted.low_s, predicted.high_s)
    )
    device_s = server.num_devices * float(predicted.mean_token_s[0]) / running
    energy = float(predicted.token_joules[0])
    ends = np.exp(INTERVAL_HALF * ENERGY_DISCREPANCY * np.array([-1, 1])).tolist()
    # Of a token: name, value, and the ends of its interval relative to the value.
    quantities = {"usd": (offer.usd_per_hour, [low, high]), "joules": (energy, ends)}
    values: dict[str, Any] = {}
    for name, (value, factors) in quantities.items():
        if value is None or not np.isfinite(value):
            continue
        token = value * device_s / HOUR_S if name == "usd" else value
        for unit, tokens in (
            ("per_answer", load.answer_tokens),
            ("per_million_tokens", 1e6),
        ):
            values[f"{name}_{unit}"] = _estimate(token * tokens, factors)
            if name == "joules" and options.grams_per_kwh is not None:
                grams = token * tokens * options.grams_per_kwh / JOULES_PER_KWH
                values[f"grams_{unit}"] = _estimate(grams, factors)
    fitted = calibration.fit_of(server)
    return {
        "device": device.name,
        "num_devices": server.num_devices,
        **load._asdict(),
        "num_running": running,
        "token_s": _estimate(float(predicted.median_s[0, 0]), [low, high]),
        **values,
        "outside_fitted": [*find_outside_sizes(fitted.sizes, sizes_of_server(server))],
        "has_device": device.name in fitted.groups["device"],
    }


def _estimate(value: float, factors: list[float]) -> dict[str, Any]:
    return {"median": value, "interval": [value * x for x in factors]}


_LABELS = {
    "token_s": ("time per token [ms]", 1e3),
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


def serving_sheet(serving: dict[str, Any]) -> Sheet:
    """Returns the table of a served model."""
    rows = [("devices", f"{serving['num_devices']} x {serving['device']}")]
    rows.append(("requests that run", f"{serving['num_running']:,.0f}"))
    for name, (label, scale) in _LABELS.items():
        if name in serving:
            value = serving[name]
            low, high = (f"{scale * x:.3g}" for x in value["interval"])
            rows.append((label, f"{scale * value['median']:.3g} [{low}, {high}]"))
    note = (
        f"{serving['concurrency']:,} requests with prompts of "
        f"{serving['prompt_tokens']:,} and answers of {serving['answer_tokens']:,} "
        "tokens on vLLM in 16 bits, by a fit of public servers; 90 % intervals of a "
        "model that it did not see."
    )
    if serving["outside_fitted"]:
        names = ", ".join(serving["outside_fitted"])
        note += f" Outside the fitted loads, so wider: {names}."
    if not serving["has_device"]:
        note += f" No server on {serving['device']} was fitted."
    return Sheet("What does an answer cost?", ("", ""), rows, note)
