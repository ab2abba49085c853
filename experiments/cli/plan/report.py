"""A plan said step by step: from prices to operations, N, D, loss and architecture."""

import math
from collections.abc import Iterator

from experiments.cli.plan import find
from experiments.cli.plan.command import Options
from experiments.cli.plan.document import shape
from experiments.cli.plan.find import Found
from experiments.framework import Sheet, units
from scaling.costs import serving
from scaling.plan import Belief, Design, budgets
from scaling.plan.pricing import DAY_S


def sheets(options: Options, found: Found) -> list[Sheet]:
    """Lays out the plan, and then the steps to it."""
    steps = [
        step._replace(title=f"{number}. {step.title}")
        for number, step in enumerate(_steps(options, found), 1)
    ]
    doubts = [(f"{i}.", line) for i, line in enumerate(find.warnings(found), 1)]
    return [
        Sheet("plan", ("", ""), list(_plan(found))),
        *steps,
        *([Sheet("warnings", ("", ""), doubts)] if doubts else []),
    ]


def _plan(found: Found) -> Iterator[tuple[str, str]]:
    case, best, train = found.case, found.optimum, found.training
    number, duration_s = found.division
    level = f"{case.level:.0%} interval"
    if case.offer is not None:
        yield "device", case.offer.name
    yield "operations", f"{case.flops:.4g} FLOPs"
    if found.spread is not None and found.spread.flops is not None:
        low, high = found.spread.flops
        most = "no end" if math.isinf(high) else f"{high:.4g}"
        yield level, f"{low:.4g} to {most} FLOPs"
    yield "parameters N", f"{_big(best.num_params)} ({case.family.count})"
    yield "tokens D", _big(best.num_tokens)
    yield "tokens per parameter", f"{found.tokens_per_param:.3g}"
    yield "loss", f"{best.loss:.4f} nats per token"
    if found.confidence is not None:
        yield level, _range(found.confidence, ".4f")
    yield "architecture", _short(found.design)
    yield "its parameters", f"{found.design.num_params:,}"
    if (usd := case.bill(case.flops).usd) is not None:
        yield "cost", f"{usd:,.0f} USD"
    if train.device_s is not None:
        yield "device-hours of training", f"{train.device_hours:,.0f}"
    if number is not None:
        yield "devices", f"{number:,}"
    if duration_s is not None:
        yield "duration", f"{duration_s / DAY_S:,.3g} days"


def _steps(options: Options, found: Found) -> Iterator[Sheet]:
    case = found.case
    if case.offers:
        yield _devices(found)
    yield _words("How many operations?", _operations(options, found))
    yield _words("Which N and D?", _division(found))
    if case.served:
        yield _serving(options, found)
    if case.unique_tokens is not None:
        yield _words("And if data is limited?", _repeating(found, case.unique_tokens))
    yield _loss(found)
    yield _architecture(found)
    yield _words("And if every operation counts?", _exact(found))
    if case.offer is not None:
        yield _words("How long?", _time(found, case.offer.name))


def _devices(found: Found) -> Sheet:
    mfu, offer, offers = found.case.mfu, found.case.offer, found.case.offers
    assert offer is not None
    rows = []
    for x in offers:
        priced = x.usd_per_hour is not None
        rows.append(
            (
                x.name,
                f"{x.usd_per_hour:g}" if priced else "-",
                f"{x.flops_per_s / 1e12:g}",
                f"{x.flops_per_s * mfu / 1e12:.4g}",
                f"{x.flops_per_usd(mfu):.4g}" if priced else "-",
                "best" if x is offer and len(offers) > 1 else "",
            )
        )
    heads = ("device", "USD an hour", "TFLOP/s", f"at {mfu:.0%}", "FLOPs per USD", "")
    note = "Operations per dollar: TFLOP/s x MFU x 3600 s / price."
    if len(rows) > 1:
        note += f" The MFU is the same for all, so {offer.name} wins at any."
    return Sheet("Which device?", heads, rows, note)


def _operations(options: Options, found: Found) -> str:
    flops, offer = found.case.flops, found.case.offer
    if options.flops is not None:
        return f"The budget is given: C = {flops:.4g} FLOPs."
    if options.target_loss is not None:
        return (
            f"The loss is given: L = {options.target_loss:g}. The smallest budget "
            f"whose best N and D reach it is C = {flops:.4g} FLOPs: that N and D "
            "follow below, and the loss comes out as it was asked for."
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
    return (
        f"C = {options.devices:,} devices x {options.days:g} days x 86,400 s x "
        f"{reached} = C = {flops:.4g} FLOPs."
    )


def _division(found: Found) -> str:
    case, free = found.case, found.free
    belief, p = case.belief, case.belief.powers
    a = p.beta / (p.alpha + p.beta)
    ratio = (p.alpha * p.A / (p.beta * p.B)) ** (1 / (p.alpha + p.beta))
    said = (
        f"The law {belief.name}: L = {belief.law.formula}, with "
        f"{_numbers(belief)}.{_plain(belief)} Training takes C = 6 N D, so D = C / "
        "(6 N), and dL/dN = 0 where alpha A / N^alpha = beta B / D^beta. In closed "
        "form N* = G (C/6)^a with a = beta / (alpha + beta) = "
        f"{p.beta:.4g} / {p.alpha + p.beta:.4g} = {a:.4g} and G = (alpha A / (beta "
        f"B))^(1 / (alpha + beta)) = {ratio:.4g}: N* = {free.num_params:.4g}, D* = "
        f"{free.num_tokens:.4g}, {free.num_tokens / free.num_params:.3g} tokens per "
        "parameter."
    )
    if not case.served and case.unique_tokens is None:
        said += (
            " A search along 6 N D = C, which knows none of this, finds N = "
            f"{found.searched:.6g} (closed form {free.num_params:.6g})."
        )
    return said


def _serving(options: Options, found: Found) -> Sheet:
    served, serve = found.case.served, options.serve_mfu
    rows = []
    models = {
        "training only": found.free,
        "same loss": found.equal,
        "the plan": found.optimum,
    }
    for name, x in models.items():
        training = budgets.operations(x.num_params, x.num_tokens)
        amounts = (training, 2 * x.num_params * served, found.operations(x))
        sizes = f"{x.num_params:.4g}", f"{x.num_tokens:.4g}", f"{x.loss:.4f}"
        rows.append((name, *sizes, *(f"{amount:.4g}" for amount in amounts)))
    weighed = ""
    if serve is not None:
        factor = options.mfu / serve
        weighed = f", weighed x {factor:.3g} for serving's MFU of {serve:g}"
    note = (
        f"Serving {options.inference_tokens:.4g} tokens takes 2 N each{weighed}. At "
        "the same loss a smaller model that trains longer saves "
        f"{100 * found.saved:.3g} % of both. The plan is the last row: training and "
        "serving together take the budget (Sardana et al. 2024, arXiv:2401.00448)."
    )
    if options.unique_tokens is not None:
        note += " Repetition, below, is part of it."
    heads = ("", "N", "D", "loss", "to train", "to serve", "both")
    return Sheet("And what serving costs?", heads, rows, note)


def _repeating(found: Found, unique: float) -> str:
    case, best = found.case, found.optimum
    if best.num_tokens <= unique:
        return f"The {unique:.4g} unique tokens are enough: nothing repeats."
    sizes, tokens = case.worth(best.num_params, best.num_tokens)
    halves, new = case.belief.half_lives, case._replace(unique_tokens=None).allocate()
    return (
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


def _loss(found: Found) -> Sheet:
    case, p, best = found.case, found.case.belief.powers, found.optimum
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
        note += (
            f"{case.level:.0%} interval of the law {_range(found.confidence, '.4f')}, "
            f"of a run {_range(found.prediction, '.4f')}."
        )
    if (spread := found.spread) is not None:
        note += (
            f" N* {_range(spread.params, '.3g')}, D* {_range(spread.tokens, '.3g')}."
        )
    return Sheet("Which loss?", ("term", "formula", "value"), rows, note)


def _plain(belief: Belief) -> str:
    """The law as a sum of two powers, where its own letters are others."""
    p = belief.powers
    if {"A", "B", "alpha", "beta"} <= {*belief.coefficients}:
        return ""
    inner = f"{p.A:.4g} / N^{p.alpha:.4g} + {p.B:.4g} / D^{p.beta:.4g}"
    outer = inner if p.outer == 1 else f"({inner})^{p.outer:.4g}"
    return f" With A / N^alpha + B / D^beta for what falls: {p.floor:.4g} + {outer}."


def _numbers(belief: Belief) -> str:
    given = {} if belief.fit is None else belief.fit.fixed
    return ", ".join(
        f"{name} = {value:.4g}{' (given)' if name in given else ''}"
        for name, value in belief.coefficients.items()
    )


def _architecture(found: Found) -> Sheet:
    """Shows the design nearest to N with its counts and memory."""
    case, has, counts = (
        found.case,
        shape(found.design),
        shape(found.design)["num_params"],
    )
    width, mlp = has["hidden_size"], has["mlp_size"]
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
        ("training memory", units.size(found.memory.total)),
        (
            "K and V of a token",
            units.size(serving.kv_bytes_per_token(found.design.model)),
        ),
    ]
    needed, held = found.min_devices, ""
    if needed is not None and case.offer is not None:
        size = units.size(case.offer.memory_bytes)
        held = f": at least {needed} {case.offer.name} of {size}"
    note = (
        "Of all designs of Llama's kind on the grid, the nearest in "
        f"{case.family.count} parameters: {100 * found.off:+.3g} % from N."
        f"{_as_fitted(found)} Memory is that of one sequence of "
        f"{case.family.sequence:,} tokens, checkpoints at layer boundaries, 16 bytes "
        f"a parameter{held}."
    )
    return Sheet("Which architecture?", ("", ""), rows, note)


def _as_fitted(found: Found) -> str:
    """Says what the architecture has from the runs that were fitted."""
    family, fitted = found.case.family, found.case.belief.shape
    words = {"vocab_size": "vocabulary", "sequence": "length of sequences"}
    if family.tie_embeddings:
        words["tie_embeddings"] = "tied embeddings"
    same = [words[name] for name in words if fitted.get(name) == getattr(family, name)]
    return f" As in the runs that were fitted: {', '.join(same)}." if same else ""


def _exact(found: Found) -> str:
    """Says what 6 N D leaves out, and which design is best without it."""
    design, best, family = found.design, found.optimum, found.case.family
    ratio = design.flops_per_token / (6 * design.num_params)
    other, tokens, loss = found.exact
    said = (
        f"Counting every product, attention over {family.sequence:,} tokens "
        f"({family.attention}) too, this design takes "
        f"{design.flops_per_token:.4g} FLOPs a token to train, {ratio:.3f} times 6 N. "
    )
    if found.design_loss is not None:
        said += (
            f"So the budget trains it on {found.design_tokens:.4g} tokens, not "
            f"{best.num_tokens:.4g}: loss {found.design_loss:.4f}. "
        )
    train = found.exact_training
    if train.device_s is not None:
        said += f"All {best.num_tokens:.4g} take {train.device_hours:,.0f} device-hours"
        said += ". " if train.usd is None else f", {train.usd:,.0f} USD. "
    return said + (
        f"The best of all designs when each pays for its own operations: "
        f"{_short(other)}, {other.num_params:,} parameters on {tokens:.4g} tokens, "
        f"loss {loss:.4f}."
    )


def _time(found: Found, device: str) -> str:
    """Says how long training takes, on how many devices."""
    train, (number, duration_s) = found.training, found.division
    said = (
        f"Training takes {train.device_s:.4g} seconds of one {device}: "
        f"{train.device_hours:,.0f} device-hours"
    )
    if number is None or duration_s is None:
        return f"{said}. --days or --devices gives the other of the two."
    return (
        f"{said}; on {number:,} of them {duration_s / DAY_S:,.4g} days, if the "
        "utilisation holds at that number."
    )


def _short(design: Design) -> str:
    """Names a design in a line."""
    has = shape(design)
    return (
        f"{has['num_layers']} layers x {has['hidden_size']:,}, {has['num_q_heads']} "
        f"heads ({has['num_kv_heads']} KV), FFN {has['mlp_size']:,}"
    )


def _big(value: float) -> str:
    """Writes a number of parameters or tokens: 47.48 B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.4g} {letter}"
    return f"{value:.4g}"


def _range(ends: tuple[float, float], form: str) -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def _words(title: str, said: str) -> Sheet:
    """Lays out a paragraph with a title."""
    return Sheet(title, ("",), [(said,)])
