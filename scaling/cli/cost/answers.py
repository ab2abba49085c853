"""Answers to the lecture's questions about a model, with its numbers."""

import dataclasses

from jaxkv.report import format_bytes, format_flops, format_percent, format_seconds
from scaling.cli.cost.case import CostCase
from scaling.costs import (
    Layout,
    count_parameters,
    decode_work,
    find_compute_bound_size,
    forward_terms,
    prefill_work,
    total_flops,
    training_memory,
    training_step_flops,
    training_traffic,
    twice_pairs,
)
from scaling.shapes import MixtureShape, ModelShape


def answer_questions(case: CostCase) -> list[tuple[str, str]]:
    """Returns all questions with their answers."""
    boundaries = "Activations of layers with sizes of their own are not counted."
    if case.has_activations:
        boundaries = _boundaries(case)
    return [
        ("Why does training take 3 forward passes?", _times_three(case)),
        ("Q1: memory with checkpoints at layer boundaries?", boundaries),
        ("Q2: how much does a pipeline send?", _pipeline(case)),
        ("Which terms grow with s squared, which with h?", _quadratic(case)),
        ("How does a mixture of experts change the costs?", _mixture(case)),
        ("When is serving compute-bound, when memory-bound?", _serving(case)),
    ]


def _times_three(case: CostCase) -> str:
    step = case.evaluate(training_step_flops)
    return (
        "The forward pass computes each product y = W x once. The backward pass "
        "computes two products of the same size: W' dy for the gradient of the input "
        "and dy x' for the gradient of W; for attention scores, one for the queries "
        f"and one for the keys. Forward: {format_flops(step.forward)}; backward: "
        f"{format_flops(step.backward)}; training step: "
        f"{format_flops(step.model)}."
    )


def _boundaries(case: CostCase) -> str:
    memory, plain = (
        case.evaluate(training_memory, layout=Layout(), checkpointing=policy)
        for policy in ("boundary", "none")
    )
    again = case.evaluate(training_step_flops, checkpointing="full").recomputed
    return (
        f"Each layer keeps its input, {case.bytes_per_param.weight} b s h bytes: "
        f"{memory.activations:,.0f} bytes ({memory.activations / 2**30:.3g} GiB) over "
        f"{case.model.num_layers} layers, without the embedding. At the peak one layer "
        f"is recomputed, which adds {format_bytes(memory.recomputed)}. "
        "Without checkpoints the layers keep "
        f"{format_bytes(plain.activations)}. The cost of checkpoints "
        "is a second forward pass of the layers, "
        f"{format_flops(again)}."
    )


def _pipeline(case: CostCase) -> str:
    tokens = case.batch * case.sequence
    sent = tokens * case.model.hidden_size * 2
    stages = max(case.layout.pipeline, 2)
    if case.layout.pipeline == 1:
        layers = case.model.num_layers
        stages = next((p for p in (8, 4, 2, 3, 5) if layers % p == 0), layers)
    step = case.evaluate(training_step_flops)
    once = step.forward / stages / case.device.bfloat16
    link = sent / case.device.link
    return (
        "One activation of b s h numbers forward and its gradient backward at each of "
        f"the p - 1 stage boundaries: {sent:,} bytes per direction and micro-batch for "
        f"every p. On the {case.device.link / 1e9:.0f} GB/s link of {case.device.name} "
        f"the transfer takes {format_seconds(link)}, "
        f"{format_percent(link / once)} of the time of the forward products of "
        f"one of {stages} stages at peak. It is small compared with the pipeline "
        "bubble, (p - 1) / (g + p - 1) of the time with g micro-batches."
    )


def _quadratic(case: CostCase) -> str:
    terms = case.evaluate(forward_terms)
    model = case.model
    square = sum(x.flops for x in terms if x.growth == "s^2")
    total = total_flops(terms)
    wide = case.evaluate(forward_terms, model=dataclasses.replace(model, windows=()))
    wide_square = sum(x.flops for x in wide if x.growth == "s^2")
    # Operations of a pair, summed over layers without windows.
    pair_flops = wide_square / twice_pairs(case.sequence, 0, None, case.attention)
    half = 1 if case.attention == "causal" else 2
    equal = 2 * count_parameters(model).matmul / (pair_flops * half)
    answer = (
        "Only attention scores and the weighted sum of values: each query attends to "
        "each key, 4 n d s operations per token and layer. For this model they are "
        f"{format_percent(square / total)} of the forward pass, and half of it "
        f"at s = {equal:,.0f}"
    )
    if any(model.windows):
        answer += " without sliding windows; layers with a window grow with s"
    return (
        f"{answer}. Projections and FFN grow with s h^2, head and embedding with h, "
        "norms with s h. The attention weights take 2 n s^2 bytes per layer if they "
        "are kept, and 4 n s with tiled attention; K and V grow with s."
    )


def _mixture(case: CostCase) -> str:
    model = case.model
    if model.num_mixture_layers:
        return _real_mixture(case)
    mixed = dataclasses.replace(
        model,
        experts=MixtureShape(
            num_experts=8,
            top_k=2,
            size=model.mlp_size,
            beside_mlp=bool(model.layer_sizes),
        ),
        mixture_layers=(True,),
        branches=_exchange(model.branches, "dense", "mixture"),
    )
    now = count_parameters(model)
    then = count_parameters(mixed)
    return (
        f"{model.name} has no experts. With 8 experts of the width of its FFN, 2 of "
        f"them per token, it would have {then.total / now.total:.2f} times the "
        f"parameters ({then.total / 1e9:.4g} G), "
        f"{format_bytes(16 * then.total)} of training memory for weights and "
        f"optimizer, and {_growth(model, mixed, case)} times the operations. "
        f"{_where(mixed, case)}"
    )


def _real_mixture(case: CostCase) -> str:
    model = case.model
    x = case.model.experts
    assert x is not None
    size = x.top_k * x.size + x.shared_size
    plain = dataclasses.replace(
        model,
        experts=None,
        mlp_size=size,
        layer_sizes=tuple(
            dataclasses.replace(x, mlp_size=x.mlp_size + size)
            for x in model.layer_sizes
        ),
        mixture_layers=(),
        branches=_exchange(model.branches, "mixture", "dense"),
        num_ahead_layers=0,
    )
    now = count_parameters(model)
    dense = count_parameters(plain)
    return (
        f"Of {now.total / 1e9:.4g} G parameters a token uses {now.active / 1e9:.4g} G. "
        "A dense model whose FFN has the width of a token's experts would have "
        f"{dense.total / 1e9:.4g} G. The mixture has {now.total / dense.total:.3g} "
        "times the parameters and their memory "
        f"({format_bytes(16 * now.total)} for weights and optimizer), at "
        f"{_growth(plain, model, case)} times the operations, including the router. A "
        "decode step reads the experts to which its batch is routed: few for one "
        f"sequence, and nearly all for a moderate batch. {_where(model, case)}"
    )


def _exchange[T](values: tuple[T, ...], old: T, new: T) -> tuple[T, ...]:
    """Returns values with `old` replaced by `new`."""
    return tuple(new if x == old else x for x in values)


def _growth(before: ModelShape, after: ModelShape, case: CostCase) -> str:
    one, other = (
        total_flops(forward_terms(x, sequence=case.sequence)) for x in (before, after)
    )
    return f"{other / one:.2f}"


def _where(model: ModelShape, case: CostCase) -> str:
    """Compares tensor and expert parallelism, over the most devices that both allow."""
    x = model.experts
    assert x is not None
    if model.num_recurrent_layers or model.layer_sizes:
        sort = "Layers of different sizes" if model.layer_sizes else "Recurrent layers"
        return f"{sort} are not divided over devices yet."
    for p in (8, 4, 2):
        sizes = (model.attention.num_q_heads, model.mlp_size, x.num_experts, x.size)
        shared = model.attention.num_kv_heads
        if any(size % p for size in sizes) or (shared % p and p % shared):
            continue
        # Equal total tokens: tensor parallelism processes p times a device's batch.
        tensor, expert = (
            training_traffic(model, layout, batch=batch, sequence=case.sequence)
            for layout, batch in (
                (Layout(tensor=p), case.batch * p),
                (Layout(expert=p, data=p), case.batch),
            )
        )
        sent = [
            sum(t.forward for t in traffic if t.scheme == scheme)
            for traffic, scheme in ((tensor, "tensor"), (expert, "expert"))
        ]
        return (
            f"Over {p} devices with {case.batch} x {case.sequence} tokens each, tensor "
            "parallelism divides every matrix, also those of attention, and sends "
            f"{format_bytes(sent[0])} per device in the forward pass. Expert "
            "parallelism keeps each expert whole and sends "
            f"{format_bytes(sent[1])}, k copies of each token per direction, but "
            "replicates all other weights and waits for the most loaded expert."
        )
    return "No small number of devices divides all dimensions evenly."


def _serving(case: CostCase) -> str:
    ridge = case.ridge

    def decode(batch: int) -> float:
        return case.evaluate(decode_work, batch=batch).intensity

    def prefill(prompt: int) -> float:
        return case.evaluate(prefill_work, prompt=prompt).intensity

    batch = find_compute_bound_size(lambda size: decode(size) > ridge)
    prompt = find_compute_bound_size(
        lambda size: prefill(size) > ridge, max_size=1 << 20
    )
    decoding = (
        f"compute-bound from {batch:,} sequences"
        if batch is not None
        else "memory-bound at every batch size, because K and V limit it to "
        f"{decode(1 << 20):.3g} operations per byte"
    )
    reading = "memory-bound at every length"
    if prompt is not None:
        reading = f"compute-bound from {prompt:,} tokens"
    return (
        f"{case.device.name} is compute-bound above {ridge:.0f} operations per byte. A "
        "decode step reads every weight for one token per sequence: "
        f"{decode(1):.2f} operations per byte for one sequence, and more in a batch, "
        f"whose sequences share the weights. With {case.sequence:,} cached tokens per "
        f"sequence, decoding is {decoding}. Prefill uses each weight for every token "
        f"of the prompt and is {reading}."
    )
