"""The tables of `jaxkv cost`, the way the lecture draws them: term, formula, number."""

from collections import Counter
from typing import TYPE_CHECKING

from experiments import units
from experiments.reporting import Sheet
from scaling import (
    costs,
    costs_activations,
    costs_flops,
    costs_memory,
    costs_serving,
)
from scaling.descriptions import HeadAttention

if TYPE_CHECKING:
    from experiments.costing import Case


def sheets(case: "Case") -> list[Sheet]:
    """Lays out everything that is counted."""
    found = [_shape(case), _weights(case), _conventions(case), *_flops(case)]
    found += [_memory(case), _activations(case), _serving(case)]
    return [*found, *_traffic(case), _device(case)]


def symbols(case: "Case") -> dict[str, int]:
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


def _shape(case: "Case") -> Sheet:
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


def _weights(case: "Case") -> Sheet:
    rows, places = [], costs.copies(case.model)
    listed = [x for x in costs.weights(case.model) if x.place != "ahead"]
    for weight in listed:
        count = places[weight.place] * weight.stored
        name = (
            weight.name
            if weight.part in weight.name
            else f"{weight.part}: {weight.name}"
        )
        total = f"{weight.size * count:,}" if weight.stored else "tied"
        rows.append((name, weight.formula, f"{weight.size:,}", f"{count:,}", total))
    if ahead := costs.parameters(case.model).ahead:
        number = case.model.num_ahead_layers
        each = f"{ahead // number:,}"
        rows.append(
            ("layer that predicts ahead", "", each, f"{number:,}", f"{ahead:,}")
        )
    heads = ("weight", "size", "each", "times", "parameters")
    return Sheet("parameters", heads, rows)


def _conventions(case: "Case") -> Sheet:
    p = costs.parameters(case.model)
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
                "without the input table",
            ),
        ]
    if p.ahead:
        rows.append(
            ("ahead", p.ahead, "layers that predict further ahead, not in total")
        )
    table = [(name, f"{value:,}", what) for name, value, what in rows]
    return Sheet("what N can mean", ("convention", "parameters", "counts"), table)


def _flops(case: "Case") -> list[Sheet]:
    terms, tokens = case.forward(), case.batch * case.sequence
    step, params = case.training(), costs.parameters(case.model)
    whole = costs_flops.total(terms)
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
    t = "t = s" if case.options.attention == "full" else "t = s/2 on average"
    note = (
        f"Attention is counted {case.options.attention}: {t}, in a window at most that."
    )
    heads = ("product", "per token", "a token", "share", "grows with")
    sums = [
        ("forward", "X", step.forward),
        ("backward", "2 X", step.backward),
        ("training", "3 X", step.model),
        ("recomputed", f"checkpointing: {case.options.checkpoint}", step.recomputed),
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


def _memory(case: "Case") -> Sheet:
    found, each = case.memory(), case.bytes_per_param
    where = "activations of the layers"
    formulas = {
        "weights": f"{each.weight} N",
        "gradients": f"{each.gradient} N",
        "master": f"{each.master} N",
        "moments": f"{each.moments} N",
        "activations": f"checkpointing: {case.options.checkpoint}",
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


def _activations(case: "Case") -> Sheet:
    options = case.options
    tensors = costs_activations.stored(
        case.model,
        sequence=case.sequence,
        flash=options.flash,
        dropout=options.dropout,
        number_bytes=case.bytes_per_param.weight,
    )
    divided = {"no": "", "sequence": "tp, with sp"}
    rows: list[tuple[str, ...]] = [
        (x.name, x.part, x.formula, f"{x.bytes:,}", divided.get(x.divided, "tp"))
        for x in tensors
    ]
    dense, mixed = costs_activations.per_token(tensors, case.model)
    if case.model.num_dense_layers:
        rows.append(("a layer", "", "", f"{dense:,.0f}", ""))
    if case.model.num_mixture_layers:
        rows.append(("a mixed layer", "", "", f"{mixed:,.0f}", ""))
    heads = ("tensor", "part", "per token", "bytes", "divided by")
    return Sheet("what a layer keeps for the backward pass", heads, rows)


def _serving(case: "Case") -> Sheet:
    rows = []
    for name, work in (("prefill", case.prefill()), ("decode, a step", case.decode())):
        line = case.roofline(work)
        rows.append(
            (
                name,
                units.flops(work.flops),
                units.size(work.weight_bytes),
                units.size(work.kv_bytes),
                units.rate(work.intensity),
                units.seconds(line.compute_s),
                units.seconds(line.memory_s),
                line.bound,
            )
        )
    heads = ("step", "operations", "weights", "K and V", "op/byte")
    dtype, d = case.options.dtype, case.device
    per_token = costs_serving.kv_bytes_per_token(case.model, kv_bytes=case.weight_bytes)
    kept = costs_serving.kv_bytes_of(
        case.model, case.sequence, kv_bytes=case.weight_bytes
    )
    fit = costs_serving.max_batch(
        case.model,
        d,
        context=case.sequence,
        num_devices=case.layout.sharing,
        weight_bytes=case.weight_bytes,
        kv_bytes=case.weight_bytes,
    )
    note = (
        f"K and V: {per_token:,.0f} bytes a token, {units.size(kept)} for s tokens. "
        f"{case.layout.sharing:,} x {d.name} ({d.rate(dtype) / 1e12:,.0f} TFLOP/s "
        f"{dtype}, {d.bandwidth / 1e9:,.0f} GB/s): products take the time from "
        f"{d.ridge(dtype):.0f} op/byte on; beside the weights {fit:,} such sequences "
        "fit."
    )
    more = ("products", "memory", "bound by")
    return Sheet("serving, at best", (*heads, *more), rows, note)


def _traffic(case: "Case") -> list[Sheet]:
    rows = [
        (
            f"{x.scheme}: {x.name}",
            x.formula,
            units.size(x.forward),
            units.size(x.backward),
        )
        for x in case.traffic()
    ]
    if not rows:
        return []
    heads = ("exchange", "per device", "forward", "backward")
    note = "Bytes that a device sends in one step of one micro-batch."
    return [Sheet("communication", heads, rows, note)]


def per_device(case: "Case") -> dict[str, float]:
    """What one device has to hold and to do in a training step of a micro-batch.

    Operations are those of an average device; the ends of a pipeline have more.
    """
    layout, d = case.layout, case.device
    step = case.training()
    flops = (step.model + step.recomputed) / (
        layout.tensor * layout.pipeline * layout.context
    )
    sent = sum(x.forward + x.backward for x in case.traffic())
    stages = range(layout.pipeline)
    held = [costs_memory.held(case.model, layout, stage=x) for x in stages]
    kv = costs_serving.kv_bytes_per_token(case.model, kv_bytes=case.weight_bytes)
    if isinstance(case.model.attention, HeadAttention):
        kv /= min(layout.tensor, case.model.attention.num_kv_heads)
    return {
        "num_params": max(map(sum, held)),
        "flops": flops,
        "compute_s": flops / d.bfloat16,
        "sent_bytes": sent,
        "link_s": sent / d.link,
        "kv_bytes_per_token": kv / layout.pipeline,
    }


def _device(case: "Case") -> Sheet:
    found, d = per_device(case), case.device
    rows = [
        ("parameters of the fullest", f"{found['num_params']:,.0f}"),
        ("operations of a training step", units.flops(found["flops"])),
        ("their time at peak", units.seconds(found["compute_s"])),
    ]
    if found["sent_bytes"]:
        rows += [
            ("bytes sent", units.size(found["sent_bytes"])),
            ("their time on the link", units.seconds(found["link_s"])),
        ]
    rows.append(("K and V of a token", f"{found['kv_bytes_per_token']:,.0f} bytes"))
    measured = [
        f"{rate:.0f} {unit}"
        for rate, unit in (
            (d.measured_products / 1e12, "TFLOP/s"),
            (d.measured_bandwidth / 1e9, "GB/s"),
        )
        if rate
    ]
    note = (
        f"{d.name}: {d.bfloat16 / 1e12:,.0f} TFLOP/s in 16 bits, "
        f"{units.size(d.memory_bytes)}, link {d.link / 1e9:.0f} GB/s one way "
        f"({d.source})."
    )
    if measured:
        note += f" Measured at best: {', '.join(measured)} ({d.measured_source})."
    title = f"one of {case.layout.num_devices:,} devices"
    return Sheet(title, ("a micro-batch", "value"), rows, note)
