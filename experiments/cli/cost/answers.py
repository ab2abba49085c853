"""The lecture's questions about a model, answered in words with its numbers."""

import dataclasses

from experiments.cli.cost.case import Case
from experiments.framework import units
from scaling.costs import Layout, flops, memory, parameters, serving, traffic
from scaling.shapes import MixtureShape, ModelShape


def answers(case: Case) -> list[tuple[str, str]]:
    """Answers every question, a pair of question and answer each."""
    return [
        ("Why times 3?", _times_three(case)),
        ("Q1: memory with checkpoints at layer boundaries?", _boundaries(case)),
        ("Q2: what does a pipeline send?", _pipeline(case)),
        ("Which terms grow with s squared, which with h?", _quadratic(case)),
        ("What does a mixture of experts change?", _mixture(case)),
        ("When is serving bound by products, when by memory?", _serving(case)),
    ]


def _times_three(case: Case) -> str:
    step = case.of(flops.training_step_flops)
    return (
        "A product y = W x is made once forward. Backward makes two of its size: W' dy "
        "for what came before, dy x' for the gradient of W; of attention's scores one "
        "for queries and one for keys. So forward "
        f"{units.flops(step.forward)}, backward {units.flops(step.backward)}, a step "
        f"{units.flops(step.model)}."
    )


def _boundaries(case: Case) -> str:
    found, plain = (
        case.of(memory.training_memory, layout=Layout(), checkpointing=policy)
        for policy in ("boundary", "none")
    )
    again = case.of(flops.training_step_flops, checkpointing="full").recomputed
    return (
        f"Each layer keeps its input, {case.bytes_per_param.weight} b s h bytes: "
        f"{found.activations:,.0f} bytes ({found.activations / 2**30:.3g} GiB) over "
        f"{case.model.num_layers} layers, the embedding left out. At the peak one "
        f"layer is computed again, {units.size(found.recomputed)} more. Without "
        f"checkpoints the layers keep {units.size(plain.activations)}; the price is a "
        f"second forward pass of the layers, {units.flops(again)}."
    )


def _pipeline(case: Case) -> str:
    tokens = case.batch * case.sequence
    sent = tokens * case.model.hidden_size * 2
    stages = max(case.layout.pipeline, 2)
    if case.layout.pipeline == 1:
        layers = case.model.num_layers
        stages = next((p for p in (8, 4, 2, 3, 5) if layers % p == 0), layers)
    once = case.of(flops.training_step_flops).forward / stages / case.device.bfloat16
    link = sent / case.device.link
    return (
        f"One activation of b s h numbers at each of the p - 1 boundaries, and its "
        f"gradient back: {sent:,} bytes each way and micro-batch, whatever p. On the "
        f"{case.device.link / 1e9:.0f} GB/s link of {case.device.name} that is "
        f"{units.seconds(link)}, {units.share(link / once)} of the forward products of "
        f"one of {stages} stages at peak: little beside the idle share "
        "(p - 1) / (g + p - 1) of g micro-batches."
    )


def _quadratic(case: Case) -> str:
    terms, model = case.of(flops.forward_terms), case.model
    square = sum(x.flops for x in terms if x.growth == "s^2")
    whole = flops.total_flops(terms)
    seen = model.over_layers(
        lambda window: flops.twice_pairs(case.sequence, 0, window, case.attention)
    )
    each = square / seen  # of a pair, summed over layers without windows
    half = 1 if case.attention == "causal" else 2
    equal = (
        2 * parameters.count_parameters(model).matmul / (each * half * model.num_layers)
    )
    said = (
        "Scores and values alone: every query meets every key, 4 n d s operations a "
        f"token and layer. Here {units.share(square / whole)} of the forward pass; as "
        f"much as all else at s = {equal:,.0f}"
    )
    if any(model.windows):
        said += " if no layer had a window; layers that have one grow with s alone"
    return (
        f"{said}. Projections and FFN grow with s h^2, head and embedding with h, "
        "norms with s h. In memory the weights of attention take 2 n s^2 bytes a layer "
        "if they are kept, in tiles 4 n s; K and V grow with s."
    )


def _mixture(case: Case) -> str:
    model = case.model
    if model.num_mixture_layers:
        return _real_mixture(case)
    mixed = dataclasses.replace(
        model,
        experts=MixtureShape(num_experts=8, top_k=2, size=model.mlp_size),
        mixture_layers=(True,),
    )
    now, then = parameters.count_parameters(model), parameters.count_parameters(mixed)
    return (
        f"{model.name} has none. With 8 experts of its FFN's width, 2 of them for a "
        f"token, parameters would grow {then.total / now.total:.2f} times to "
        f"{then.total / 1e9:.4g} G, and with them training memory for weights and "
        f"optimizer to {units.size(16 * then.total)}; operations only "
        f"{_growth(model, mixed, case)} times. {_where(mixed, case)}"
    )


def _real_mixture(case: Case) -> str:
    model, x = case.model, case.model.experts
    assert x is not None
    size = x.top_k * x.size + x.shared_size
    plain = dataclasses.replace(
        model, experts=None, mlp_size=size, mixture_layers=(), num_ahead_layers=0
    )
    now, dense = parameters.count_parameters(model), parameters.count_parameters(plain)
    return (
        f"Of {now.total / 1e9:.4g} G parameters a token uses {now.active / 1e9:.4g} G. "
        f"A dense model of the width that a token meets would have "
        f"{dense.total / 1e9:.4g} G: the mixture has {now.total / dense.total:.3g} "
        f"times the parameters, and memory for them ({units.size(16 * now.total)} for "
        f"weights and optimizer), at {_growth(plain, model, case)} times the "
        "operations, the router's among them. A decoding step reads the experts that "
        f"its batch meets: few for one sequence, soon all. {_where(model, case)}"
    )


def _growth(before: ModelShape, after: ModelShape, case: Case) -> str:
    one, other = (
        flops.total_flops(flops.forward_terms(x, sequence=case.sequence))
        for x in (before, after)
    )
    return f"{other / one:.2f}"


def _where(model: ModelShape, case: Case) -> str:
    """Tensor against expert parallelism, over as many devices as both allow."""
    x = model.experts
    assert x is not None
    for p in (8, 4, 2):
        sizes = (model.attention.num_q_heads, model.mlp_size, x.num_experts, x.size)
        shared = model.attention.num_kv_heads
        if any(size % p for size in sizes) or (shared % p and p % shared):
            continue
        # As many tokens in all: tensor parallelism works on p times a device's batch.
        tensor, expert = (
            traffic.training_traffic(model, layout, batch=batch, sequence=case.sequence)
            for layout, batch in (
                (Layout(tensor=p), case.batch * p),
                (Layout(expert=p, data=p), case.batch),
            )
        )
        sent = [
            sum(t.forward for t in found if t.scheme == scheme)
            for found, scheme in ((tensor, "tensor"), (expert, "expert"))
        ]
        return (
            f"Over {p} devices with {case.batch} x {case.sequence} tokens each, tensor "
            "parallelism cuts every matrix, attention's too, and sends "
            f"{units.size(sent[0])} a device forward; expert parallelism keeps experts "
            f"whole and sends {units.size(sent[1])}, k tokens' worth each way, but "
            "copies the rest and waits for the busiest expert."
        )
    return "Few devices divide all of it evenly."


def _serving(case: Case) -> str:
    ridge = case.ridge

    def decode(batch: int) -> float:
        return case.of(serving.decode_work, batch=batch).intensity

    def prefill(prompt: int) -> float:
        return case.of(serving.prefill_work, prompt=prompt).intensity

    batch = serving.find_compute_bound_size(lambda size: decode(size) > ridge)
    prompt = serving.find_compute_bound_size(
        lambda size: prefill(size) > ridge, most=1 << 20
    )
    decoding = (
        f"from {batch:,} sequences on"
        if batch is not None
        else f"at no batch: K and V hold it below {decode(1 << 20):.3g}"
    )
    reading = f"from {prompt:,} tokens on" if prompt is not None else "at no length"
    return (
        f"{case.device.name} is bound by products above {ridge:.0f} operations a byte. "
        "A step of decoding reads every weight for one token a sequence: "
        f"{decode(1):.2f} operations a byte for one sequence, more with each that "
        f"shares the weights. With {case.sequence:,} tokens kept of each, products "
        f"bind {decoding}. A prompt uses a weight for every token: there they bind "
        f"{reading}."
    )
