"""The tables of `jaxkv cost`, the way the lecture draws them: term, formula, number."""

import dataclasses
from collections import Counter

from experiments.cli.cost import device_tables
from experiments.cli.cost.case import Case
from experiments.framework import Sheet, units
from scaling.costs import activations, flops, memory, parameters
from scaling.shapes import HeadAttention


def sheets(case: Case) -> list[Sheet]:
    """Lays out everything that is counted."""
    found = [_shape(case), _weights(case), _conventions(case), *_flops(case)]
    found += [_memory(case), _activations(case), _one_layer(case)]
    return [*found, *device_tables.sheets(case)]


def symbols(case: Case) -> dict[str, int]:
    """The letters of the formulas and what they are here."""
    model, a = case.model, case.model.attention
    found = {
        "b": case.batch,
        "s": case.sequence,
        "h": model.hidden_size,
        "L": model.num_layers,
        "n": a.num_q_heads,
    }
    if isinstance(a, HeadAttention):
        found |= {"m": a.num_kv_heads, "d": a.head_dim}
    else:
        found |= {"q": a.q_rank} if a.q_rank else {}
        found |= {"c": a.kv_rank, "dn": a.nope_dim, "dr": a.rope_dim}
        found |= {"dv": a.value_dim}
    found |= {"i": model.mlp_size} if model.num_dense_layers else {}
    if x := model.experts:
        found |= {"e": x.num_experts, "k": x.top_k, "j": x.size}
        found |= {"js": x.shared_size} if x.shared_size else {}
    found |= {"v": model.vocab_size}
    return found | ({"r": model.position_rows} if model.position_rows else {})


_MEANINGS = {
    "b": "sequences",
    "s": "tokens of each",
    "h": "hidden size",
    "L": "layers",
    "n": "query heads",
    "m": "KV heads",
    "d": "head size",
    "q": "width of the query latent",
    "c": "width of the KV latent",
    "dn": "head size without positions",
    "dr": "rotary head size",
    "dv": "value head size",
    "i": "FFN width",
    "e": "routed experts",
    "k": "experts of a token",
    "j": "FFN width of an expert",
    "js": "FFN width of all shared experts",
    "v": "vocabulary",
    "r": "rows of the position table",
}


def _shape(case: Case) -> Sheet:
    rows = [(x, f"{value:,}", _MEANINGS[x]) for x, value in symbols(case).items()]
    notes = []
    windows = Counter(x for x in case.model.windows if x)
    for window, layers in windows.items():
        notes.append(
            f"{layers} of {case.model.num_layers} layers see {window:,} tokens."
        )
    if case.model.num_mixture_layers not in (0, case.model.num_layers):
        notes.append(f"{case.model.num_mixture_layers} layers are mixtures.")
    return Sheet(case.model.name, ("symbol", "value", "meaning"), rows, " ".join(notes))


def _weights(case: Case) -> Sheet:
    rows, places = [], parameters.copies(case.model)
    listed = [x for x in parameters.weights(case.model) if x.place != "ahead"]
    for weight in listed:
        count = places[weight.place] * weight.stored
        name = (
            weight.name
            if weight.part in weight.name
            else f"{weight.part}: {weight.name}"
        )
        total = f"{weight.size * count:,}" if weight.stored else "tied"
        rows.append((name, weight.formula, f"{weight.size:,}", f"{count:,}", total))
    if ahead := parameters.parameters(case.model).ahead:
        number = case.model.num_ahead_layers
        each = f"{ahead // number:,}"
        rows.append(
            ("layer that predicts ahead", "", each, f"{number:,}", f"{ahead:,}")
        )
    heads = ("weight", "size", "each", "times", "parameters")
    return Sheet("parameters", heads, rows)


def _conventions(case: Case) -> Sheet:
    p = parameters.parameters(case.model)
    rows = [
        ("total", p.total, "everything, a tied head once"),
        ("non-embedding", p.non_embedding, "without tables and head"),
        ("matmul", p.matmul, "what a token is multiplied with, the head included"),
    ]
    if case.model.num_mixture_layers:
        rows += [
            ("matmul, all experts", p.matmul_total, "the same with every expert"),
            ("active", p.active, "what a token uses"),
            (
                "active, non-embedding",
                p.active_non_embedding,
                "without the tables",
            ),
        ]
    if p.ahead:
        rows.append(
            ("ahead", p.ahead, "layers that predict further ahead, not in total")
        )
    table = [(name, f"{value:,}", what) for name, value, what in rows]
    return Sheet("what N can mean", ("convention", "parameters", "counts"), table)


def _flops(case: Case) -> list[Sheet]:
    terms, tokens = case.of(flops.forward), case.batch * case.sequence
    step, params = case.of(flops.training), parameters.parameters(case.model)
    whole = flops.total(terms)
    rows = [
        (
            f"{x.part}: {x.name}" if x.part != x.name else x.name,
            x.formula,
            units.flops(x.flops / tokens),
            units.share(x.flops / whole),
            x.growth,
        )
        for x in terms
    ]
    t = "t = s" if case.attention == "full" else "t = s/2 on average"
    note = f"Attention is counted {case.attention}: {t}, in a window at most that."
    heads = ("product", "per token", "a token", "share", "grows with")
    sums = [
        ("forward", "X", step.forward),
        ("backward", "2 X", step.backward),
        ("training", "3 X", step.model),
        ("recomputed", f"checkpointing: {case.checkpointing}", step.recomputed),
        ("for comparison", "6 N, total", 6 * params.total * tokens),
        ("for comparison", "6 N, matmul", 6 * params.matmul * tokens),
    ]
    if case.model.experts is not None:
        active = params.active_non_embedding
        sums.append(("for comparison", "6 N, active", 6 * active * tokens))
    table = [
        (name, formula, units.flops(value / tokens), units.flops(value))
        for name, formula, value in sums
        if value
    ]
    more = ("pass", "formula", "a token", "b s tokens")
    return [
        Sheet("operations, forward", heads, rows, note),
        Sheet("operations of a step", more, table),
    ]


def _memory(case: Case) -> Sheet:
    found, each = case.of(memory.training), case.bytes_per_param
    where = "activations of the layers"
    formulas = {
        "weights": f"{each.weight} N",
        "gradients": f"{each.gradient} N",
        "master": f"{each.master} N",
        "moments": f"{each.moments} N",
        "activations": f"checkpointing: {case.checkpointing}",
        "recomputed": "one layer",
        "ends": "inputs of final norm and head",
        "logits": "4 b s v",
        "logits_gradient": "4 b s v",
    }
    rows = [
        (
            where if name == "activations" else name.replace("_", " "),
            formulas[name],
            value,
        )
        for name, value in found._asdict().items()
        if value
    ]
    rows.append(("total", "", found.total))
    table = [(name, what, units.size(value)) for name, what, value in rows]
    fits = "fits" if found.total <= case.device.memory_bytes else "does not fit"
    devices = case.layout.num_devices
    where = "the device" if devices == 1 else f"the fullest of {devices:,} devices"
    note = (
        f"On {where}; it {fits} in the {units.size(case.device.memory_bytes)} of "
        f"{case.device.name}. Workspace and fragmentation are not counted."
    )
    return Sheet("training memory", ("term", "formula", "bytes"), table, note)


def one_layer(case: Case) -> dict[str, int | float]:
    """The last layer alone, trained with checkpoints at layer boundaries.

    The course's assignment asks for these: its parameters, the operations of its
    forward pass, and its memory at the peak, when it is computed again.
    """
    model = case.model
    last = dataclasses.replace(
        model,
        num_layers=1,
        windows=model.windows[-1:],
        mixture_layers=model.mixture_layers[-1:],
        num_ahead_layers=0,
    )
    places = parameters.copies(last) | {"first": 0, "last": 0}
    size = sum(x.size * x.stored * places[x.place] for x in parameters.weights(last))
    terms = flops.forward(
        last,
        batch=case.batch,
        sequence=case.sequence,
        attention=case.attention,
    )
    tokens, each = case.batch * case.sequence, case.bytes_per_param.weight
    sums = activations.per_token(case.stored, last)
    kept = sums[last.mixture_layers[0]] * tokens
    boundary = tokens * model.hidden_size * each
    return {
        "num_params": size,
        "forward_flops": sum(x.flops for x in terms if x.part != "head"),
        "weight_bytes": each * size,
        "boundary_bytes": boundary,
        "activation_bytes": kept,
        "peak_bytes": each * size + boundary + kept,
    }


def _one_layer(case: Case) -> Sheet:
    found = one_layer(case)
    rows = [
        ("parameters", f"{found['num_params']:,.0f}"),
        ("operations forward", units.flops(found["forward_flops"])),
        ("weights", units.size(found["weight_bytes"])),
        ("its input, kept at the boundary", units.size(found["boundary_bytes"])),
        ("its activations while it is computed again",
         units.size(found["activation_bytes"])),
        ("weights, input and activations", units.size(found["peak_bytes"])),
    ]  # fmt: skip
    title = f"one layer, {case.batch} x {case.sequence:,} tokens"
    return Sheet(title, ("", "value"), rows)


def _activations(case: Case) -> Sheet:
    tensors = case.stored
    divided = {"no": "", "sequence": "tp, with sp"}
    rows: list[tuple[str, ...]] = [
        (x.name, x.part, x.formula, f"{x.bytes:,}", divided.get(x.divided, "tp"))
        for x in tensors
    ]
    dense, mixed = activations.per_token(tensors, case.model)
    if case.model.num_dense_layers:
        rows.append(("a layer", "", "", f"{dense:,.0f}", ""))
    if case.model.num_mixture_layers:
        rows.append(("a mixed layer", "", "", f"{mixed:,.0f}", ""))
    heads = ("tensor", "part", "per token", "bytes", "divided by")
    return Sheet("what a layer keeps for the backward pass", heads, rows)
