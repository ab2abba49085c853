"""A plan said step by step: from prices to operations, N, D, loss and architecture."""

import math
from collections.abc import Iterator

from experiments.cli.plan import architectures
from experiments.cli.plan.case import DAY_S, Case, device_seconds, division, price
from experiments.cli.plan.find import Found
from experiments.framework import Sheet
from scaling.plan import budgets


def sheets(case: Case, found: Found) -> list[Sheet]:
    """Lays out the plan, and then the steps to it."""
    steps = [
        step._replace(title=f"{number}. {step.title}")
        for number, step in enumerate(_steps(case, found), 1)
    ]
    doubts = [(f"{i}.", line) for i, line in enumerate(found.warnings, 1)]
    return [
        Sheet("plan", ("", ""), list(_plan(case, found))),
        *steps,
        *([Sheet("warnings", ("", ""), doubts)] if doubts else []),
    ]


def _plan(case: Case, found: Found) -> Iterator[tuple[str, str]]:
    best, options = found.optimum, case.options
    device_s = architectures.train_s(case, found)
    number, duration_s = division(case, device_s)
    if case.offer is not None:
        yield "device", case.offer.name
    yield "operations", f"{case.flops:.4g} FLOPs"
    if found.spread is not None and found.spread.flops is not None:
        low, high = found.spread.flops
        most = "no end" if math.isinf(high) else f"{high:.4g}"
        yield f"{options.level:.0%} interval", f"{low:.4g} to {most} FLOPs"
    yield "parameters N", f"{architectures.big(best.num_params)} ({case.family.count})"
    yield "tokens D", architectures.big(best.num_tokens)
    yield "tokens per parameter", f"{best.num_tokens / best.num_params:.3g}"
    yield "loss", f"{best.loss:.4f} nats per token"
    if found.confidence is not None:
        low, high = found.confidence
        yield f"{options.level:.0%} interval", f"{low:.4f} to {high:.4f}"
    yield "architecture", architectures.short(found.design)
    yield "its parameters", f"{found.design.num_params:,}"
    whole_s = device_seconds(case, case.flops)
    if (cost := price(case, whole_s)) is not None:
        yield "cost", f"{cost:,.0f} USD"
    if device_s is not None:
        yield "device-hours of training", f"{device_s / 3600:,.0f}"
    if number is not None:
        yield "devices", f"{number:,}"
    if duration_s is not None:
        yield "duration", f"{duration_s / DAY_S:,.3g} days"


def _steps(case: Case, found: Found) -> Iterator[Sheet]:
    if case.offers:
        yield _devices(case)
    yield _operations(case)
    yield _division(case, found)
    if case.served:
        yield _serving(case, found)
    if case.options.unique_tokens is not None:
        yield _repeating(case, found)
    yield _loss(case, found)
    yield architectures.nearest(case, found)
    yield architectures.exact(case, found)
    if case.offer is not None:
        yield architectures.time(case, found)


def _devices(case: Case) -> Sheet:
    mfu, offer = case.options.mfu, case.offer
    assert offer is not None
    rows = []
    for x in case.offers:
        priced = x.usd_per_hour is not None
        rows.append(
            (
                x.name,
                f"{x.usd_per_hour:g}" if priced else "-",
                f"{x.flops_per_s / 1e12:g}",
                f"{x.flops_per_s * mfu / 1e12:.4g}",
                f"{x.flops_per_usd(mfu):.4g}" if priced else "-",
                "best" if x is offer and len(case.offers) > 1 else "",
            )
        )
    heads = ("device", "USD an hour", "TFLOP/s", f"at {mfu:.0%}", "FLOPs per USD", "")
    note = "Operations per dollar: TFLOP/s x MFU x 3600 s / price."
    if len(rows) > 1:
        note += f" The MFU is the same for all, so {offer.name} wins at any."
    return Sheet("Which device?", heads, rows, note)


def _operations(case: Case) -> Sheet:
    options, offer = case.options, case.offer
    if options.flops is not None:
        said = f"The budget is given: C = {case.flops:.4g} FLOPs."
    elif options.target_loss is not None:
        said = (
            f"The loss is given: L = {options.target_loss:g}. The smallest budget "
            f"whose best N and D reach it is C = {case.flops:.4g} FLOPs: that N and D "
            "follow below, and the loss comes out as it was asked for."
        )
    elif options.budget_usd is not None:
        assert offer is not None
        assert offer.usd_per_hour is not None
        hours = options.budget_usd / offer.usd_per_hour
        said = (
            f"C = {options.budget_usd:,.10g} USD / {offer.usd_per_hour:g} USD an hour "
            f"= {hours:,.10g} device-hours; x 3600 s x {offer.flops_per_s:.4g} FLOP/s "
            f"x {options.mfu:g} MFU = {case.flops:.4g} FLOPs."
        )
    else:
        assert offer is not None
        said = (
            f"C = {options.devices:,} devices x {options.days:g} days x 86,400 s x "
            f"{offer.flops_per_s:.4g} FLOP/s x {options.mfu:g} MFU = C = "
            f"{case.flops:.4g} FLOPs."
        )
    return architectures.words("How many operations?", said)


def _division(case: Case, found: Found) -> Sheet:
    p, free = case.belief.powers, found.free
    a = p.beta / (p.alpha + p.beta)
    ratio = (p.alpha * p.A / (p.beta * p.B)) ** (1 / (p.alpha + p.beta))
    said = (
        f"The law {case.belief.name}: L = {case.belief.law.formula}, with "
        f"{_numbers(case)}.{_plain(case)} Training takes C = 6 N D, so D = C / (6 N), "
        "and dL/dN = 0 where alpha A / N^alpha = beta B / D^beta. In closed form N* = "
        "G (C/6)^a with a = beta / (alpha + beta) = "
        f"{p.beta:.4g} / {p.alpha + p.beta:.4g} = {a:.4g} and G = (alpha A / (beta "
        f"B))^(1 / (alpha + beta)) = {ratio:.4g}: N* = {free.num_params:.4g}, D* = "
        f"{free.num_tokens:.4g}, {free.num_tokens / free.num_params:.3g} tokens per "
        "parameter."
    )
    if not case.served and case.options.unique_tokens is None:
        said += (
            " A search along 6 N D = C, which knows none of this, finds N = "
            f"{found.searched:.6g} (closed form {free.num_params:.6g})."
        )
    return architectures.words("Which N and D?", said)


def _serving(case: Case, found: Found) -> Sheet:
    best, free, equal = found.optimum, found.free, found.equal
    tokens = case.options.inference_tokens
    serve = case.options.serve_mfu
    rows = []
    for name, x in (
        ("training only", free),
        ("same loss", equal),
        ("the plan", best),
    ):
        training, serving = 6 * x.num_params * x.num_tokens, 2 * x.num_params
        whole = training + serving * case.served
        rows.append(
            (
                name,
                f"{x.num_params:.4g}",
                f"{x.num_tokens:.4g}",
                f"{x.loss:.4f}",
                f"{training:.4g}",
                f"{serving * case.served:.4g}",
                f"{whole:.4g}",
            )
        )
    saved = 1 - budgets.operations(
        equal.num_params, equal.num_tokens, case.served
    ) / budgets.operations(free.num_params, free.num_tokens, case.served)
    weighed = ""
    if serve is not None:
        factor = case.options.mfu / serve
        weighed = f", weighed x {factor:.3g} for serving's MFU of {serve:g}"
    note = (
        f"Serving {tokens:.4g} tokens takes 2 N each{weighed}. At the same loss a "
        f"smaller model that trains longer saves {100 * saved:.3g} % of both. The plan "
        "is the last row: training and serving together take the budget (Sardana et "
        "al. 2024, arXiv:2401.00448)."
    )
    if case.options.unique_tokens is not None:
        note += " Repetition, below, is part of it."
    heads = ("", "N", "D", "loss", "to train", "to serve", "both")
    return Sheet("And what serving costs?", heads, rows, note)


def _repeating(case: Case, found: Found) -> Sheet:
    unique, best = case.options.unique_tokens, found.optimum
    assert unique is not None
    if best.num_tokens <= unique:
        said = f"The {unique:.4g} unique tokens are enough: nothing repeats."
        return architectures.words("And if data is limited?", said)
    sizes, tokens = case.worth(best.num_params, best.num_tokens)
    halves = case.belief.half_lives
    new = budgets.allocate(case.belief.powers, case.flops, inference_tokens=case.served)
    said = (
        f"The {unique:.4g} unique tokens are fewer than the {new.num_tokens:.4g} that "
        "would be best. A repetition is worth less and less, D' = U (1 + R_D* (1 - "
        "exp(-R_D / R_D*))) with R_D = D/U - 1 and R_D* = "
        f"{halves.tokens:.3g}, and so are parameters beyond what suits U (R_N* = "
        f"{halves.params:.3g}). A search along the budget's curve finds N = "
        f"{best.num_params:.4g} and D = {best.num_tokens:.4g}: "
        f"{best.num_tokens / unique:.3g} epochs, worth {tokens:.4g} new tokens and "
        f"{sizes:.4g} parameters. The loss is {best.loss:.4f}, with new data it were "
        f"{new.loss:.4f} (Muennighoff et al. 2023, arXiv:2305.16264)."
    )
    return architectures.words("And if data is limited?", said)


def _loss(case: Case, found: Found) -> Sheet:
    p, best = case.belief.powers, found.optimum
    sizes, tokens = case.worth(best.num_params, best.num_tokens)
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
    note += f", {best.loss:.4f} nats per token. "
    if case.belief.fit is None:
        note += "Published constants come without an interval."
    elif found.confidence is None or found.prediction is None:
        note += "The fit has no interval for it."
    else:
        (low, high), (least, most) = found.confidence, found.prediction
        note += (
            f"{case.options.level:.0%} interval of the law {low:.4f} to {high:.4f}, of "
            f"a run {least:.4f} to {most:.4f}."
        )
    if found.spread is not None:
        (low, high), (least, most) = found.spread.params, found.spread.tokens
        note += f" N* {low:.3g} to {high:.3g}, D* {least:.3g} to {most:.3g}."
    return Sheet("Which loss?", ("term", "formula", "value"), rows, note)


def _plain(case: Case) -> str:
    """The law as a sum of two powers, where its own letters are others."""
    p = case.belief.powers
    if {"A", "B", "alpha", "beta"} <= set(case.belief.coefficients):
        return ""
    inner = f"{p.A:.4g} / N^{p.alpha:.4g} + {p.B:.4g} / D^{p.beta:.4g}"
    outer = inner if p.outer == 1 else f"({inner})^{p.outer:.4g}"
    return f" With A / N^alpha + B / D^beta for what falls: {p.floor:.4g} + {outer}."


def _numbers(case: Case) -> str:
    pairs = case.belief.coefficients.items()
    fit = case.belief.fit
    given = {} if fit is None else fit.fixed
    return ", ".join(
        f"{name} = {value:.4g}{' (given)' if name in given else ''}"
        for name, value in pairs
    )
