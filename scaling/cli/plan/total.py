"""The cheapest model to train and to serve, as a document: `jaxkv plan --serve`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from scaling.calibration import (
    JOULES_PER_KWH,
    PUBLISHED_LOOPS,
    LatencyLimits,
    MeasuredServer,
    find_outside_sizes,
    load_loops,
    make_replica,
    predict_training_watts,
    sizes_of_server,
)
from scaling.cli.plan.find import design_document, fit_warnings, to_optimum
from scaling.cli.plan.options import PlanOptions, parse_limits
from scaling.cli.plan.serving import (
    CostUnit,
    ServedLoad,
    ServedSizes,
    parse_served_load,
    serve_designs,
)
from scaling.costs import find_device
from scaling.laws import Optimum
from scaling.plan import (
    DAY_S,
    HOUR_S,
    CostOptimum,
    CostSpread,
    PlanCase,
    ServingLadder,
    cheapest_model,
    design_ladder,
    ladder_cost,
    loss_interval,
    make_loss_model,
    total_cost,
    total_cost_spread,
)

_BEYOND = 1.1
"""Largest size of the ladder over the compute optimum."""


class TotalPlan(NamedTuple):
    """A plan of training and serving, with all that its figure needs."""

    load: ServedLoad
    sizes: ServedSizes
    ladders: list[ServingLadder]
    """Cost of serving: at the mode of the fit of servers, then for draws."""
    flop_cost: float
    """Price of an operation in training, in the unit of the plan."""
    unit: CostUnit
    optimum: CostOptimum
    chinchilla: Optimum
    """Model that is cheapest to train at the loss of the optimum."""
    document: dict[str, Any]


def find_total_plan(options: PlanOptions, case: PlanCase) -> TotalPlan:
    """Finds the model of least loss, or of least cost, with its serving.

    Raises:
      ValueError: there is no device or price, the load or the fit cannot be read, no
        server meets the objective, or no size can be trained and served.
    """
    offer = case.offer
    if offer is None:
        raise ValueError(f"--serve {options.serve} needs --gpu NAME:USD_PER_HOUR")
    load = parse_served_load(options.serve, options.serve_days * DAY_S)
    limits = LatencyLimits(*parse_limits(options.objective))
    if load.rate_per_s and limits == LatencyLimits():
        raise ValueError(
            f"--serve {options.serve} needs --objective, such as "
            "ttft_mean=1,tpot_mean=0.05"
        )
    unit: CostUnit = options.unit
    flop_costs = find_flop_costs(case)
    flop_cost = flop_costs[unit]
    if flop_cost is None:
        missing = "a price" if unit == "usd" else "a known board power"
        raise ValueError(f"--gpu {offer.name}: --serve in {unit} needs {missing}")
    aim: dict[str, Any] = {"flop_cost": flop_cost}
    if case.target_loss is None:
        aim["budget"] = case.flops * flop_cost
    else:
        aim["target_loss"] = case.target_loss
    laws = _resampled_laws(case)
    free = case.allocate()
    designs = design_ladder(case.family, _BEYOND * free.num_params)
    calibration = load_loops(options.coefficients or PUBLISHED_LOOPS)
    sizes = serve_designs(
        designs,
        case.offers,
        (load.prompt_tokens, load.answer_tokens),
        limits,
        calibration,
        num_draws=options.draws,
    )
    is_whole = options.whole_servers
    ladders = sizes.ladders(load, unit, is_whole=is_whole)
    if not np.isfinite(ladders[0].cost).any():
        raise ValueError(_explain_misses(options, sizes))
    try:
        best = total_cost(case.loss_model.powers, ladders[0], **aim)
    except ValueError as error:
        raise ValueError(f"--serve {options.serve}: {error}") from None
    spread = total_cost_spread(laws, ladders[1:], **aim, level=case.level)
    # The same search among the designs alone.
    steps = ladders[0]._replace(replica=np.arange(len(designs)))
    exact = total_cost(case.loss_model.powers, steps, **aim)
    place = int(np.argmin(np.abs(sizes.num_params - exact.num_params)))
    costs = sizes.costs(load, unit, is_whole=is_whole)
    kind = int(costs[0, place].argmin())
    chinchilla = cheapest_model(case.loss_model.powers, best.loss)
    document = _describe(case, best, spread, flop_costs)
    document |= {
        "unit": unit,
        "load": load._asdict() | {"num_requests": load.num_requests},
        "objective": limits._asdict(),
        "is_whole": is_whole,
    }
    document |= _price(options, load, sizes, (place, kind), document)
    document["architecture"] = design_document(
        case._replace(flops=document["train_flops"]),
        Optimum(best.num_params, best.num_tokens, best.loss),
        designs[place],
    )
    document["memory_bytes"] = document["architecture"]["memory_bytes"]["total"]
    document["comparison"] = _compare(options, case, load, ladders[0], flop_cost, best)
    document["warnings"] = [
        *fit_warnings(case, document["train_flops"]),
        *_warnings(options, document, spread, best),
    ]
    if load.rate_per_s:
        server = _server(sizes, place, kind, load)
        fitted = calibration.fit_of(server)
        outside = find_outside_sizes(fitted.sizes, sizes_of_server(server))
        document["serving"]["outside_fitted"] = [*outside]
        document["serving"]["has_device"] = (
            server.device.name in fitted.groups["device"]
        )
    return TotalPlan(load, sizes, ladders, flop_cost, unit, best, chinchilla, document)


def find_flop_costs(case: PlanCase) -> dict[CostUnit, float | None]:
    """Returns the price of an operation in training in USD and in J, where known."""
    offer = case.offer
    assert offer is not None
    rate = offer.flops_per_s * case.mfu
    usd = None
    if offer.usd_per_hour is not None:
        usd = offer.usd_per_hour / HOUR_S / rate
    watts = predict_training_watts(find_device(offer.name), case.mfu)
    return {"usd": usd, "joules": watts / rate if watts > 0 else None}


def _resampled_laws(case: PlanCase) -> list[Any]:
    """Returns the terms of the loss of each resample of a fit; else the law alone."""
    fit = case.loss_model.fit
    law = case.loss_model.law
    powers = []
    if fit is not None and fit.samples is not None:
        for sample in fit.sampled():
            named = dict(zip(law.coefficients, map(float, sample), strict=True))
            try:
                powers.append(make_loss_model(law.name, law, named).powers)
            except ValueError:  # a resample without an optimum
                continue
    return powers or [case.loss_model.powers]


def _explain_misses(options: PlanOptions, sizes: ServedSizes) -> str:
    first_s = sizes.goodput.first_token_s[0]
    token_s = sizes.goodput.token_s[0]
    return (
        f"--objective {options.objective}: no server of {sizes.kinds[0].offer.name} "
        f"meets it: one request of the smallest design has a first token after "
        f"{first_s.min():.3g} s and {token_s.min():.3g} s per token"
    )


def _describe(
    case: PlanCase,
    best: CostOptimum,
    spread: CostSpread | None,
    flop_costs: dict[CostUnit, float | None],
) -> dict[str, Any]:
    """Returns N, D, loss and the cost of training, with intervals."""
    loss_model = case.loss_model
    flops = 6 * best.num_params * best.num_tokens
    optimum = Optimum(best.num_params, best.num_tokens, best.loss)
    loss_ends = loss_interval(case, optimum, "confidence")
    if case.target_loss is None and spread is not None:
        loss_ends = spread.loss
    device_s = case.bill(flops).device_s
    number, duration_s = case.division(device_s)
    priced = {unit: price and flops * price for unit, price in flop_costs.items()}
    assert case.offer is not None
    return {
        "device": case.offer.name,
        "mfu": case.mfu,
        "target_loss": case.target_loss,
        "law": loss_model.name,
        "formula": loss_model.law.formula,
        "coefficients": dict(loss_model.coefficients),
        "count": case.family.count,
        **to_optimum(optimum),
        "serving_cost": best.serving_cost,
        "interval": loss_ends,
        "num_params_interval": spread and spread.num_params,
        "num_tokens_interval": spread and spread.num_tokens,
        "cost_interval": spread and spread.cost,
        "serving_interval": spread and spread.serving_cost,
        "level": case.level,
        "num_draws": spread and spread.num_draws,
        "num_without": spread and spread.num_without,
        "train_flops": flops,
        "training_usd": priced["usd"],
        "training_joules": priced["joules"],
        "device_s": device_s,
        "num_devices": number,
        "duration_s": duration_s,
    }


def _server(
    sizes: ServedSizes, place: int, kind: int, load: ServedLoad
) -> MeasuredServer:
    """Returns the server of a design with the concurrency of its largest load."""
    replica = sizes.kinds[kind]
    server = make_replica(
        sizes.designs[place].model,
        find_device(replica.offer.name),
        replica.num_devices,
        prompt_tokens=load.prompt_tokens,
        answer_tokens=load.answer_tokens,
    )
    concurrency = float(sizes.goodput.concurrency[0, place, kind])
    return dataclasses.replace(server, concurrency=concurrency)


def _price(
    options: PlanOptions,
    load: ServedLoad,
    sizes: ServedSizes,
    at: tuple[int, int],
    document: dict[str, Any],
) -> dict[str, Any]:
    """Returns the cost of serving, the devices, and the server of the architecture."""
    place, kind = at
    is_whole = options.whole_servers
    replica = sizes.kinds[kind]
    goodput = [x[:, place, kind] for x in sizes.goodput]
    concurrency, rate, first_s, token_s = goodput
    unit = options.unit
    serving = {
        x: sizes.costs(load, x, is_whole=is_whole)[:, place, kind]
        for x in ("usd", "joules")
    }
    terms: dict[str, float | None] = {
        name: float(x[0]) if np.isfinite(x[0]) else None for name, x in serving.items()
    }
    num_replicas = sizes.num_replicas(load, is_whole=is_whole)[0, place, kind]
    devices = math.ceil(float(num_replicas) * (1 - 1e-9)) * replica.num_devices
    # The cost in the other unit is that of the nearest design.
    result: dict[str, Any] = {"devices": devices}
    for name in ("usd", "joules"):
        training = document[f"training_{name}"]
        part = document["serving_cost"] if name == unit else terms[name]
        total = None if training is None or part is None else training + part
        result |= {f"serving_{name}": part}
        result["cost_usd" if name == "usd" else "joules"] = total
    if not load.rate_per_s:
        return result | {"serving": None}

    def estimate(values: np.ndarray) -> dict[str, Any]:
        tail = (1 - options.level) / 2
        ends = [float(values[0])] * 2
        if len(values) > 1:
            ends = np.quantile(values[1:], [tail, 1 - tail], method="nearest").tolist()
        return {"median": float(values[0]), "interval": ends}

    answers: dict[str, Any] = {}
    for name, values in serving.items():
        if terms[name] is None:
            continue
        answers[f"{name}_per_answer"] = estimate(values / load.num_requests)
        tokens = load.num_requests * load.answer_tokens / 1e6
        answers[f"{name}_per_million_tokens"] = estimate(values / tokens)
        if name == "joules" and options.grams_per_kwh is not None:
            grams = values * options.grams_per_kwh / JOULES_PER_KWH
            answers["grams_per_answer"] = estimate(grams / load.num_requests)
            answers["grams_per_million_tokens"] = estimate(grams / tokens)
    design = sizes.designs[place]
    flops = 2 * design.num_params * (load.prompt_tokens + load.answer_tokens) * rate[0]
    peak = replica.offer.flops_per_s * replica.num_devices
    return result | {
        "serving": {
            "device": replica.offer.name,
            "devices_per_server": replica.num_devices,
            "num_servers": float(num_replicas),
            "concurrency": float(concurrency[0]),
            "requests_per_s": estimate(rate),
            "ttft_s": float(first_s[0]),
            "tpot_s": float(token_s[0]),
            "mfu": flops / peak,
            **answers,
        }
    }


def _compare(
    options: PlanOptions,
    case: PlanCase,
    load: ServedLoad,
    ladder: ServingLadder,
    flop_cost: float,
    best: CostOptimum,
) -> dict[str, dict[str, float]]:
    """Returns models of the same loss by rule, at the prices of the plan."""
    powers = case.loss_model.powers
    serve_mfu = options.serve_mfu or case.mfu
    closed = cheapest_model(
        powers, best.loss, inference_tokens=load.num_tokens * case.mfu / serve_mfu
    )
    models = {"training_only": cheapest_model(powers, best.loss), "closed_form": closed}
    rows = {}
    for name, model in models.items():
        training = 6 * flop_cost * model.num_params * model.num_tokens
        serving = ladder_cost(ladder, model.num_params)
        rows[name] = to_optimum(model) | {
            "training_cost": training,
            "serving_cost": serving,
            "cost": training + serving,
            "saved": 1 - best.cost / (training + serving),
        }
    return rows


def _warnings(
    options: PlanOptions,
    document: dict[str, Any],
    spread: CostSpread | None,
    best: CostOptimum,
) -> Iterator[str]:
    if best.is_edge:
        yield (
            f"{best.num_params:.3g} parameters are an end of the ladder of sizes: a "
            "smaller one may be better"
        )
    if spread is None:
        yield "too few draws of law and servers have an optimum: no interval"
    elif spread.num_without:
        yield (
            f"{spread.num_without} of {spread.num_draws} draws of law and servers have "
            "no optimum: the intervals are without them"
        )
    serving = document["serving"]
    if serving is not None and serving["num_servers"] < 0.5:
        yield (
            f"the load takes {serving['num_servers']:.2g} of a server of "
            f"{serving['devices_per_server']}: --whole-servers pays for all of it"
        )
