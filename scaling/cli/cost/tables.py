"""Tables of `jaxkv cost` in the lecture's form: term, formula, number."""

import dataclasses
from collections import Counter
from typing import Any

from jaxkv.report import Sheet, format_bytes, format_flops, format_percent
from scaling.cli.cost import device_tables
from scaling.cli.cost.case import CostCase
from scaling.costs import (
    count_parameters,
    forward_terms,
    layer_bytes,
    list_weights,
    place_counts,
    total_flops,
    training_memory,
    training_step_flops,
)
from scaling.shapes import HeadAttention


def cost_sheets(case: CostCase, document: dict[str, Any]) -> list[Sheet]:
    """Returns all tables; `document` has the numbers that are also in the JSON."""
    sheets = [_shape(case), _weights(case), _conventions(case), *_flops(case)]
    if case.has_activations:
        sheets += [_memory(case), _activations(case)]
        sheets.append(_one_layer(case, document["one_layer"]))
    return [*sheets, *device_tables.device_sheets(case, document)]


def symbols(case: CostCase) -> list[tuple[str, int, str]]:
    """Returns the symbols of the formulas with values and meanings."""
    model = case.model
    a = case.model.attention
    x = case.model.experts
    rows = [
        ("b", case.batch, "sequences"),
        ("s", case.sequence, "tokens of each"),
        ("h", model.hidden_size, "hidden size"),
        ("L", model.num_layers, "layers"),
        ("n", a.num_q_heads, "query heads"),
    ]
    if model.layer_sizes:  # d, m and i are in the names of weights
        rows.append(("p", model.layer_input_size, "width of the inputs by layer"))
    elif isinstance(a, HeadAttention):
        rows.append(("m", a.num_kv_heads, "KV heads"))
        rows.append(("d", a.head_dim, "head size"))
    else:
        rows += [
            ("q", a.q_rank or 0, "width of the query latent"),
            ("c", a.kv_rank, "width of the KV latent"),
            ("dn", a.nope_dim, "head size without positions"),
            ("dr", a.rope_dim, "rotary head size"),
            ("dv", a.value_dim, "value head size"),
        ]
    if (r := model.recurrent) is not None:
        rows += [
            ("nk", r.num_key_heads, "key heads of recurrent layers"),
            ("nv", r.num_value_heads, "their value heads"),
            ("dk", r.key_dim, "their key size"),
            ("dv", r.value_dim, "their value size"),
            ("w", r.kernel_size, "tokens of their convolution"),
        ]
    if model.num_dense_layers and not model.layer_sizes:
        rows.append(("i", model.mlp_size, "FFN width"))
    if x is not None:
        rows += [
            ("e", x.num_experts, "routed experts"),
            ("k", x.top_k, "experts of a token"),
            ("j", x.size, "FFN width of an expert"),
            ("l", x.latent_size or 0, "width of the inputs of experts"),
            ("js", x.shared_size, "FFN width of all shared experts"),
        ]
    rows.append(("v", model.vocab_size, "vocabulary"))
    rows.append(("r", model.position_rows, "rows of the position table"))
    return [row for row in rows if row[1]]


def _shape(case: CostCase) -> Sheet:
    model = case.model
    rows = [(x, f"{value:,}", meaning) for x, value, meaning in symbols(case)]
    notes = [
        f"{layers} of {model.num_layers} layers see {window:,} tokens."
        for window, layers in Counter(filter(None, model.windows)).items()
    ]
    if model.num_recurrent_layers:
        notes.append(
            f"{model.num_recurrent_layers} of {model.num_layers} layers have a state "
            "in place of K and V."
        )
    if model.layer_sizes:
        num_shared = sum(
            not shape.cached_numbers for _, shape in model.attention_layers
        )
        notes.append(
            "Layers have d, m and i of their own. "
            f"{num_shared} of {model.num_layers} layers read K and V of earlier ones. "
            "Activations of such layers, and so training memory, are not counted."
        )
    if model.branches:
        notes.append("A layer has one branch.")
    if model.num_mixture_layers not in (0, model.num_layers):
        notes.append(f"{model.num_mixture_layers} layers are mixtures.")
    return Sheet(model.name, ("symbol", "value", "meaning"), rows, " ".join(notes))


def _weights(case: CostCase) -> Sheet:
    rows = []
    places = place_counts(case.model)
    for x in list_weights(case.model):
        if x.place == "ahead":
            continue
        count = places[x.place] * x.stored
        total = f"{x.size * count:,}" if x.stored else "tied"
        name = x.name if x.part in x.name else f"{x.part}: {x.name}"
        rows.append((name, x.formula, f"{x.size:,}", f"{count:,}", total))
    if ahead := count_parameters(case.model).ahead:
        number = case.model.num_ahead_layers
        sizes = f"{ahead // number:,}", f"{number:,}", f"{ahead:,}"
        rows.append(("layer for multi-token prediction", "", *sizes))
    heads = ("weight", "size", "each", "times", "parameters")
    return Sheet("parameters", heads, rows)


def _conventions(case: CostCase) -> Sheet:
    p = count_parameters(case.model)
    rows = [
        ("total", p.total, "everything, a tied head once"),
        ("non-embedding", p.non_embedding, "without tables and head"),
        ("matmul", p.matmul, "matrices that multiply a token, including the head"),
    ]
    if case.model.num_mixture_layers:
        rows += [
            ("matmul, all experts", p.matmul_total, "the same with every expert"),
            ("active", p.active, "parameters that a token uses"),
            ("active, non-embedding", p.active_non_embedding, "without the tables"),
        ]
    if p.ahead:
        meaning = "layers for multi-token prediction, not in total"
        rows.append(("ahead", p.ahead, meaning))
    table = [(name, f"{value:,}", meaning) for name, value, meaning in rows]
    return Sheet("conventions for N", ("convention", "parameters", "counts"), table)


def _flops(case: CostCase) -> list[Sheet]:
    terms = case.evaluate(forward_terms)
    tokens = case.batch * case.sequence
    step = case.evaluate(training_step_flops)
    params = count_parameters(case.model)
    total = total_flops(terms)
    rows = []
    for x in terms:
        name = x.name if x.part == x.name else f"{x.part}: {x.name}"
        token_flops = format_flops(x.flops / tokens)
        share = format_percent(x.flops / total)
        rows.append((name, x.formula, token_flops, share, x.growth))
    t = "t = s" if case.attention == "full" else "t = s/2 on average"
    note = f"Attention pairs: {case.attention}, {t}, at most the window."
    heads = ("product", "per token", "a token", "share", "grows with")
    compared = {"total": params.total, "matmul": params.matmul}
    if case.model.experts is not None:
        compared["active"] = params.active_non_embedding
    sums = [
        ("forward", "X", step.forward),
        ("backward", "2 X", step.backward),
        ("training", "3 X", step.model),
        ("recomputed", f"checkpointing: {case.checkpointing}", step.recomputed),
        *(
            ("for comparison", f"6 N, {name}", 6 * number * tokens)
            for name, number in compared.items()
        ),
    ]
    table = [
        (name, formula, format_flops(value / tokens), format_flops(value))
        for name, formula, value in sums
        if value
    ]
    more = ("pass", "formula", "a token", "b s tokens")
    return [
        Sheet("operations, forward", heads, rows, note),
        Sheet("operations of a step", more, table),
    ]


def _memory(case: CostCase) -> Sheet:
    memory = case.evaluate(training_memory)
    param_bytes = case.bytes_per_param
    formulas = {
        "weights": f"{param_bytes.weight} N",
        "gradients": f"{param_bytes.gradient} N",
        "master": f"{param_bytes.master} N",
        "moments": f"{param_bytes.moments} N",
        "activations": f"checkpointing: {case.checkpointing}",
        "recomputed": "one layer",
        "ends": "inputs of final norm and head",
        "logits": "4 b s v",
        "logits_gradient": "4 b s v",
    }
    names = {"activations": "activations of the layers"}
    rows = [
        (
            names.get(name, name.replace("_", " ")),
            formulas[name],
            format_bytes(value),
        )
        for name, value in memory._asdict().items()
        if value
    ]
    rows.append(("total", "", format_bytes(memory.total)))
    fits = "fits" if memory.total <= case.device.memory_bytes else "does not fit"
    devices = case.layout.num_devices
    where = "the device" if devices == 1 else f"the fullest of {devices:,} devices"
    note = (
        f"On {where}. It {fits} in the {format_bytes(case.device.memory_bytes)} "
        f"of {case.device.name}. Workspace and fragmentation are not counted."
    )
    return Sheet("training memory", ("term", "formula", "bytes"), rows, note)


def one_layer(case: CostCase) -> dict[str, int | float]:
    """Returns the costs of the last layer, with checkpoints at layer boundaries.

    Required by the course's assignment: parameters, operations of the forward pass, and
    peak memory during recomputation.
    """
    model = case.model
    last = dataclasses.replace(
        model,
        num_layers=1,
        windows=model.windows[-1:],
        mixture_layers=model.mixture_layers[-1:],
        recurrent_layers=model.recurrent_layers[-1:],
        branches=model.branches[-1:],
        num_ahead_layers=0,
    )
    places = place_counts(last) | {"first": 0, "last": 0}
    size = sum(x.size * x.stored * places[x.place] for x in list_weights(last))
    terms = case.evaluate(forward_terms, model=last)
    tokens = case.batch * case.sequence
    weight_bytes = case.bytes_per_param.weight
    [token_bytes] = layer_bytes(case.stored, last, [0])
    boundary = tokens * model.hidden_size * weight_bytes
    return {
        "num_params": size,
        "forward_flops": sum(x.flops for x in terms if x.part != "head"),
        "weight_bytes": weight_bytes * size,
        "boundary_bytes": boundary,
        "activation_bytes": token_bytes * tokens,
        "peak_bytes": weight_bytes * size + boundary + token_bytes * tokens,
    }


def _one_layer(case: CostCase, numbers: dict[str, Any]) -> Sheet:
    size = {
        "weights": numbers["weight_bytes"],
        "input, kept at the boundary": numbers["boundary_bytes"],
        "activations during recomputation": numbers["activation_bytes"],
        "weights, input and activations": numbers["peak_bytes"],
    }
    rows = [
        ("parameters", f"{numbers['num_params']:,.0f}"),
        ("operations forward", format_flops(numbers["forward_flops"])),
        *((name, format_bytes(value)) for name, value in size.items()),
    ]
    title = f"one layer, {case.batch} x {case.sequence:,} tokens"
    return Sheet(title, ("", "value"), rows)


def _activations(case: CostCase) -> Sheet:
    tensors = case.stored
    divided = {"no": "", "sequence": "tp, with sp"}
    rows: list[tuple[str, ...]] = [
        (x.name, x.part, x.formula, f"{x.bytes:,}", divided.get(x.divided, "tp"))
        for x in tensors
    ]
    model = case.model
    names: dict[object, str] = {
        "attention": "an attention layer",
        "recurrent": "a recurrent layer",
        "dense": "an FFN layer",
        "mixture": "a mixed layer",
    }
    sizes = {}
    for layer, size in enumerate(layer_bytes(tensors, model, range(model.num_layers))):
        first, *second = model.sorts_of(layer)
        name = names[first]
        if second and first == "attention":
            name = "a layer" if second == ["dense"] else "a mixed layer"
        sizes[name] = size
    rows += [(name, "", "", f"{size:,.0f}", "") for name, size in sizes.items()]
    heads = ("tensor", "part", "per token", "bytes", "divided by")
    return Sheet("activations that a layer keeps for the backward pass", heads, rows)
