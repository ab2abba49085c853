"""Report of a plan, step by step: prices, operations, N, D, loss and architecture."""

import math
from collections.abc import Iterator
from typing import Any

from jaxkv.report import Sheet, format_bytes, format_count, numbered_list, paragraph
from scaling.cli.plan.options import PlanOptions
from scaling.plan import DAY_S, HOUR_S, LossModel, PlanCase, lifetime_flops

type PlanDocument = dict[str, Any]
"""Document of a plan, or a part of it."""


def plan_sheets(
    options: PlanOptions, case: PlanCase, document: PlanDocument
) -> list[Sheet]:
    """Returns the plan, followed by the steps of its derivation."""
    steps = [
        step._replace(title=f"{number}. {step.title}")
        for number, step in enumerate(_steps(options, case, document), 1)
    ]
    doubts = document["warnings"]
    return [
        Sheet("plan", ("", ""), list(_plan(document))),
        *steps,
        *([numbered_list("warnings", doubts)] if doubts else []),
    ]


def _plan(document: PlanDocument) -> Iterator[tuple[str, str]]:
    level = f"{document['level']:.0%} interval"
    if document["device"] is not None:
        yield "device", document["device"]
    yield "operations", f"{document['flops']:.4g} FLOPs"
    if document["flops_interval"] is not None:
        low, high = document["flops_interval"]
        upper = "infinity" if math.isinf(high) else f"{high:.4g}"
        yield level, f"{low:.4g} to {upper} FLOPs"
    num_params = format_count(document["num_params"], ".4g", " ")
    yield "parameters N", f"{num_params} ({document['count']})"
    yield "tokens D", format_count(document["num_tokens"], ".4g", " ")
    yield "tokens per parameter", f"{document['tokens_per_param']:.3g}"
    yield "loss", f"{document['loss']:.4f} nats per token"
    if document["interval"] is not None:
        yield level, _range(document["interval"], ".4f")
    if (ratio := document.get("extrapolation")) is not None:
        yield "over the largest fitted run", f"{ratio:,.3g} times its operations"
    yield "architecture", _short(document["architecture"])
    yield "its parameters", f"{_counted(document, 'architecture'):,}"
    if document["cost_usd"] is not None:
        yield "cost", f"{document['cost_usd']:,.0f} USD"
        if (ends := document.get("cost_usd_interval")) is not None:
            yield level, f"{_range(ends, ',.0f')} USD"
    if document["device_s"] is not None:
        yield "device-hours of training", f"{document['device_s'] / HOUR_S:,.0f}"
    if document["num_devices"] is not None:
        yield "devices", f"{document['num_devices']:,}"
    if document["duration_s"] is not None:
        yield "duration", f"{document['duration_s'] / DAY_S:,.3g} days"


def _steps(
    options: PlanOptions, case: PlanCase, document: PlanDocument
) -> Iterator[Sheet]:
    if case.offers:
        yield _devices(case, document)
    yield paragraph("How many operations?", _operations(options, case))
    yield paragraph("Which N and D?", _division(case, document))
    if case.served:
        yield _serving(options, case, document)
    if case.unique_tokens is not None:
        text = _repeating(case, document, case.unique_tokens)
        yield paragraph("How does limited data change the plan?", text)
    yield _loss(case, document)
    yield _architecture(case, document)
    yield paragraph(
        "How do exact operation counts change the plan?", _exact(case, document)
    )
    if case.offer is not None:
        yield paragraph("How long?", _time(document))


def _devices(case: PlanCase, document: PlanDocument) -> Sheet:
    mfu = case.mfu
    rows = []
    for x, offer in zip(document["offers"], case.offers, strict=True):
        rate = x["flops_per_s"]
        price = x["usd_per_hour"]
        per_usd = x["flops_per_usd"]
        is_best = offer is case.offer and len(case.offers) > 1
        rows.append(
            (
                x["name"],
                "-" if price is None else f"{price:g}",
                f"{rate / 1e12:g}",
                f"{rate * mfu / 1e12:.4g}",
                "-" if per_usd is None else f"{per_usd:.4g}",
                "best" if is_best else "",
            )
        )
    heads = ("device", "USD an hour", "TFLOP/s", f"at {mfu:.0%}", "FLOPs per USD", "")
    note = "Operations per dollar: TFLOP/s x MFU x 3600 s / price."
    if len(rows) > 1:
        note += (
            " The MFU is equal for all devices, so "
            f"{document['device']} is best at every MFU."
        )
    return Sheet("Which device?", heads, rows, note)


def _operations(options: PlanOptions, case: PlanCase) -> str:
    flops = case.flops
    offer = case.offer
    if options.flops is not None:
        return f"The budget is given: C = {flops:.4g} FLOPs."
    if options.target_loss is not None:
        return (
            f"The loss is given: L = {options.target_loss:g}. The smallest budget "
            f"whose best N and D reach it is C = {flops:.4g} FLOPs: these N and D "
            "follow below."
        )
    assert offer is not None
    reached = f"{offer.flops_per_s:.4g} FLOP/s x {options.mfu:g} MFU"
    if options.budget_usd is not None:
        assert offer.usd_per_hour is not None
        hours = options.budget_usd / offer.usd_per_hour
        return (
            f"C = {options.budget_usd:,.10g} USD / {offer.usd_per_hour:g} USD an hour "
            f"= {hours:,.10g} device-hours; x 3600 s x {reached} = {flops:.4g} FLOPs."
        )
    if options.budget_joules is not None:
        return (
            f"C = {options.budget_joules:,.10g} J / the energy of an operation at "
            f"{options.mfu:g} MFU = {flops:.4g} FLOPs."
        )
    return (
        f"C = {options.devices:,} devices x {options.days:g} days x 86,400 s x "
        f"{reached} = C = {flops:.4g} FLOPs."
    )


def _division(case: PlanCase, document: PlanDocument) -> str:
    free = document["compute_optimum"]
    searched = document["num_params_searched"]
    loss_model = case.loss_model
    p = case.loss_model.powers
    a = p.beta / (p.alpha + p.beta)
    ratio = (p.alpha * p.A / (p.beta * p.B)) ** (1 / (p.alpha + p.beta))
    text = (
        f"The law {loss_model.name}: L = {loss_model.law.formula}, with "
        f"{_numbers(loss_model)}.{_plain(loss_model)} Training takes C = 6 N D, "
        "so D = C / (6 N), and dL/dN = 0 where alpha A / N^alpha = beta B / D^beta. In "
        "closed form N* = G (C/6)^a with a = beta / (alpha + beta) = "
        f"{p.beta:.4g} / {p.alpha + p.beta:.4g} = {a:.4g} and G = (alpha A / (beta "
        f"B))^(1 / (alpha + beta)) = {ratio:.4g}: N* = {free['num_params']:.4g}, D* = "
        f"{free['num_tokens']:.4g}, {free['tokens_per_param']:.3g} tokens per "
        "parameter."
    )
    if not case.served and case.unique_tokens is None:
        text += (
            " A numerical search along 6 N D = C finds N = "
            f"{searched:.6g} (closed form {free['num_params']:.6g})."
        )
    return text


def _serving(options: PlanOptions, case: PlanCase, document: PlanDocument) -> Sheet:
    served = case.served
    serve = options.serve_mfu
    rows = []
    models = {
        "training only": document["training_optimum"],
        "same loss": document["equal_loss"],
        "the plan": document,
    }
    for name, x in models.items():
        num_params = x["num_params"]
        num_tokens = x["num_tokens"]
        amounts = (
            lifetime_flops(num_params, num_tokens),
            2 * num_params * served,
            lifetime_flops(num_params, num_tokens, served),
        )
        sizes = f"{num_params:.4g}", f"{num_tokens:.4g}", f"{x['loss']:.4f}"
        rows.append((name, *sizes, *(f"{amount:.4g}" for amount in amounts)))
    weighed = ""
    if serve is not None:
        factor = options.mfu / serve
        weighed = f", weighed x {factor:.3g} for serving's MFU of {serve:g}"
    note = (
        f"Serving {options.inference_tokens:.4g} tokens takes 2 N each{weighed}. At "
        "the same loss, a smaller model that trains longer saves "
        f"{100 * document['equal_loss']['saved']:.3g} % of the sum. The plan is the "
        "last row: training and serving together use the budget (Sardana et al. 2024, "
        "arXiv:2401.00448)."
    )
    if options.unique_tokens is not None:
        note += f" No row has more than {options.unique_tokens:.4g} unique tokens."
    heads = ("", "N", "D", "loss", "to train", "to serve", "both")
    return Sheet("How much does serving cost?", heads, rows, note)


def _repeating(case: PlanCase, document: PlanDocument, unique: float) -> str:
    if document["num_tokens"] <= unique:
        return f"The {unique:.4g} unique tokens are enough: no token is repeated."
    sizes, tokens = case.worth(document["num_params"], document["num_tokens"])
    halves = case.loss_model.half_lives
    new = case._replace(unique_tokens=None).allocate()
    return (
        f"The {unique:.4g} unique tokens are fewer than the {new.num_tokens:.4g} of "
        "the optimum. The value of repetitions decays, D' = U (1 + R_D* (1 - "
        "exp(-R_D / R_D*))) with R_D = D/U - 1 and R_D* = "
        f"{halves.tokens:.3g}, as does that of parameters beyond the optimum for U "
        f"(R_N* = {halves.params:.3g}). A search along the budget's curve finds N = "
        f"{document['num_params']:.4g} and D = {document['num_tokens']:.4g}: "
        f"{document['epochs']:.3g} epochs, worth {tokens:.4g} new tokens and "
        f"{sizes:.4g} parameters. The loss is {document['loss']:.4f}; with new data it "
        f"would be {new.loss:.4f} (Muennighoff et al. 2023, arXiv:2305.16264)."
    )


def _loss(case: PlanCase, document: PlanDocument) -> Sheet:
    p = case.loss_model.powers
    confidence = document["interval"]
    sizes, tokens = case.worth(document["num_params"], document["num_tokens"])
    terms = (
        ("floor", "E", p.floor),
        ("too few parameters", "A / N^alpha", p.A * sizes**-p.alpha),
        ("too few tokens", "B / D^beta", p.B * tokens**-p.beta),
    )
    rows = [(name, formula, f"{value:.4f}") for name, formula, value in terms]
    if p.outer != 1:
        note = f"The loss is E + (A / N^alpha + B / D^beta)^{p.outer:.4g}"
    else:
        note = "The loss is their sum"
    note += f", {document['loss']:.4f} nats per token. "
    if case.loss_model.fit is None:
        note += "Published constants come without an interval."
    elif confidence is None or document["prediction_interval"] is None:
        note += "The fit has no interval for it."
    else:
        note += (
            f"{case.level:.0%} interval of the law {_range(confidence, '.4f')}, "
            f"of a run {_range(document['prediction_interval'], '.4f')}."
        )
    if document["num_params_interval"] is not None:
        note += f" N* {_range(document['num_params_interval'], '.3g')}, "
        note += f"D* {_range(document['num_tokens_interval'], '.3g')}, "
        note += f"loss of their optima {_range(document['optimum_loss_interval'])}."
    return Sheet("Which loss?", ("term", "formula", "value"), rows, note)


def _plain(loss_model: LossModel) -> str:
    """Returns the law as a sum of two powers, if its coefficients differ from that."""
    p = loss_model.powers
    if {"A", "B", "alpha", "beta"} <= {*loss_model.coefficients}:
        return ""
    inner = f"{p.A:.4g} / N^{p.alpha:.4g} + {p.B:.4g} / D^{p.beta:.4g}"
    outer = inner if p.outer == 1 else f"({inner})^{p.outer:.4g}"
    return f" As floor + A / N^alpha + B / D^beta: {p.floor:.4g} + {outer}."


def _numbers(loss_model: LossModel) -> str:
    fixed_names = {} if loss_model.fit is None else loss_model.fit.fixed
    return ", ".join(
        f"{name} = {value:.4g}{' (given)' if name in fixed_names else ''}"
        for name, value in loss_model.coefficients.items()
    )


def _architecture(case: PlanCase, document: PlanDocument) -> Sheet:
    """Returns the design nearest to N with its counts and memory."""
    has = document["architecture"]
    counts = document["architecture"]["num_params"]
    width = has["hidden_size"]
    mlp = has["mlp_size"]
    rows = [
        ("width h", f"{width:,}"),
        ("layers", f"{has['num_layers']:,}"),
        ("query heads", f"{has['num_q_heads']:,} of {has['head_dim']}"),
        ("KV heads", f"{has['num_kv_heads']:,}"),
        ("FFN width", f"{mlp:,} ({mlp / width:.2f} h)"),
        ("vocabulary", f"{has['vocab_size']:,}"),
        ("parameters, total", f"{counts['total']:,}"),
        ("non-embedding", f"{counts['non_embedding']:,}"),
        ("matmul", f"{counts['matmul']:,}"),
        ("training memory", format_bytes(document["memory_bytes"])),
        ("K and V of a token", format_bytes(has["kv_bytes_per_token"])),
    ]
    held = ""
    if has["min_devices"] is not None and case.offer is not None:
        size = format_bytes(case.offer.memory_bytes)
        held = f": at least {has['min_devices']} {case.offer.name} of {size}"
    note = (
        "The Llama-style design on the grid that is nearest in "
        f"{case.family.count} parameters: {100 * has['off']:+.3g} % from N."
        f"{_as_fitted(case)} Memory: one sequence of {case.family.sequence:,} tokens, "
        f"checkpoints at layer boundaries, 16 bytes per parameter{held}."
    )
    return Sheet("Which architecture?", ("", ""), rows, note)


def _as_fitted(case: PlanCase) -> str:
    """Returns the properties that the architecture shares with the fitted runs."""
    family = case.family
    fitted = case.loss_model.shape
    words = {"vocab_size": "vocabulary", "sequence": "length of sequences"}
    if family.tie_embeddings:
        words["tie_embeddings"] = "tied embeddings"
    same = [words[name] for name in words if fitted.get(name) == getattr(family, name)]
    return f" As in the runs that were fitted: {', '.join(same)}." if same else ""


def _exact(case: PlanCase, document: PlanDocument) -> str:
    """Explains the operations that 6 N D omits, and the best exact design."""
    has = document["architecture"]
    other = document["exact_optimum"]
    tokens = document["num_tokens"]
    token_flops = has["train_flops_per_token"]
    text = (
        "With all products counted, including attention over "
        f"{case.family.sequence:,} tokens ({case.family.attention}), this design takes "
        f"{token_flops:.4g} FLOPs per token to train, "
        f"{token_flops / (6 * _counted(document, 'architecture')):.3f} times 6 N. "
    )
    if has["loss"] is not None:
        text += (
            f"So the budget trains it on {has['num_tokens']:.4g} tokens, not "
            f"{tokens:.4g}: loss {has['loss']:.4f}. "
        )
    if has["device_s"] is not None:
        usd = has["cost_usd"]
        text += f"All {tokens:.4g} take {has['device_s'] / HOUR_S:,.0f} device-hours"
        text += ". " if usd is None else f", {usd:,.0f} USD. "
    return text + (
        "The best of all designs with exact counts: "
        f"{_short(other)}, {_counted(document, 'exact_optimum'):,} parameters on "
        f"{other['num_tokens']:.4g} tokens, loss {other['loss']:.4f}."
    )


def _time(document: PlanDocument) -> str:
    """Explains the duration of training and the number of devices."""
    device_s, number, duration_s = (
        document[name] for name in ("device_s", "num_devices", "duration_s")
    )
    text = (
        f"Training takes {device_s:.4g} seconds of one {document['device']}: "
        f"{device_s / HOUR_S:,.0f} device-hours"
    )
    if number is None or duration_s is None:
        return f"{text}. --days determines --devices, and vice versa."
    return (
        f"{text}; on {number:,} of them {duration_s / DAY_S:,.4g} days, at the "
        "same utilization."
    )


def _counted(document: PlanDocument, design: str) -> int:
    """Returns the parameters of a design, by the convention of N."""
    return document[design]["num_params"][document["count"].replace("-", "_")]


def _short(shape: PlanDocument) -> str:
    """Returns a design in one line."""
    return (
        f"{shape['num_layers']} layers x {shape['hidden_size']:,}, "
        f"{shape['num_q_heads']} heads ({shape['num_kv_heads']} KV), "
        f"FFN {shape['mlp_size']:,}"
    )


def _range(ends: tuple[float, float], form: str = ".4f") -> str:
    """Returns an interval as text; "unknown" if an end is infinite or too far away."""
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)) or high > _MAX_BAND_RATIO * abs(
        low
    ):
        return "unknown"
    return f"{low:{form}} to {high:{form}}"


_MAX_BAND_RATIO = 1e8
"""Ratio of the ends from which an interval is uninformative."""
