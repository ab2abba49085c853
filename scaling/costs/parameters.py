"""Parameter counts of a model: weight by weight, and by every convention.

The weights are a list, and every count is a sum over it: with or without embeddings,
with all experts or the active ones, of matrix products only, of one device of many.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from scaling.shapes import AttentionShape, HeadAttention, LayerSizes, ModelShape

type Place = (
    Literal[
        "first", "every", "attention", "recurrent", "dense", "mixture", "last", "ahead"
    ]
    | LayerSizes
)
"""Position in the model: before the layers; in every layer, in those with attention or
a recurrent state where a model has both, in those with a dense or an expert FFN, or in
those of some sizes; after them; in layers for multi-token prediction."""

type Split = Literal["none", "heads", "kv_heads", "mlp", "vocab", "experts"]
"""Axis by which tensor (or expert) parallelism divides a weight."""


class Weight(NamedTuple):
    """One parameter tensor.

    Attributes:
      part: part of the model: embedding, positions, attention, recurrent, mlp,
        experts, layer inputs, norms, head.
      name: description of the weight.
      formula: size in the letters of `shapes.description`.
      size: number of parameters.
      place: position in the model.
      stored: copies in such a place: e routed experts; 0 for a head that is tied to the
        embedding.
      active: copies that a token uses: k of e.
      applied: matrix products of a token with it; 0 for norms, biases and embeddings.
      split: axis of division over devices.
    """

    part: str
    name: str
    formula: str
    size: int
    place: Place
    stored: int = 1
    active: int = 1
    applied: int = 0
    split: Split = "none"


QUANTIZED_BYTES = {
    "int8": 1,
    "fp8": 1 + 4 / 128,
    "mxfp4": 1 / 2 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Bytes of a weight in 8 or 4 bits, with the scales of its block."""
_UNQUANTIZED = ("router", "shared gate", "key and value, up", "rate", "decay")
_UNQUANTIZED += ("decay and rate",)


def bytes_of_weight(
    weight: Weight, weights: str, weight_bytes: int | float
) -> int | float:
    """Returns the bytes of each number of a weight.

    Args:
      weight: the weight.
      weights: a key of `QUANTIZED_BYTES` for the weights of the layers' products, as
        `jaxkv.Engine.load` takes it; "model" for `weight_bytes`.
      weight_bytes: bytes of a number of all other weights.
    """
    is_product = weight.applied and weight.part != "head"
    if weights == "model" or not is_product or weight.name in _UNQUANTIZED:
        return weight_bytes
    return QUANTIZED_BYTES[weights]


class ParameterCounts(NamedTuple):
    """Parameter counts; papers use each of them as N.

    Attributes:
      total: all parameters, a tied head counted once.
      non_embedding: without token and position embeddings, and without the head
        (Kaplan et al. 2020, arXiv:2001.08361, section 1.3).
      matmul: weights that a token is multiplied with: the head, tied or not, and of a
        mixture of experts the active ones; no embedding, norm or bias.
      active: parameters of the total that a token uses.
      active_non_embedding: `active` without token and position embeddings, as mixtures
        of experts are quoted; includes an untied head, not a tied one.
      matmul_total: as `matmul`, with every expert.
      ahead: parameters of the layers for multi-token prediction, which the total
        excludes; embedding and head that they share are not counted.
    """

    total: int
    non_embedding: int
    matmul: int
    active: int
    active_non_embedding: int
    matmul_total: int
    ahead: int


def count_parameters(model: ModelShape) -> ParameterCounts:
    """Counts a model's parameters.

    Llama-2-7B: 6,738,415,616 in total, 6,476,271,616 of them outside embeddings, and
    6,607,077,376 that a token is multiplied with.
    """
    return count_weights(list_weights(model), place_counts(model))


def count_weights(
    listed: Iterable[Weight], places: Mapping[Place, int]
) -> ParameterCounts:
    """Counts weights by every convention, each times the number of its places."""
    sizes = [(w, w.size * places[w.place]) for w in listed]
    inside = [(w, size) for w, size in sizes if w.place != "ahead"]
    tables = ("embedding", "positions", "head")
    looked_up = sum(s for w, s in inside if w.part in ("embedding", "positions"))
    active = sum(s * w.active for w, s in inside)
    return ParameterCounts(
        total=sum(s * w.stored for w, s in inside),
        non_embedding=sum(s * w.stored for w, s in inside if w.part not in tables),
        matmul=sum(s * w.applied for w, s in inside),
        active=active,
        active_non_embedding=active - looked_up,
        matmul_total=sum(s * max(w.stored, w.applied) for w, s in inside if w.applied),
        ahead=sum(s * w.stored for w, s in sizes if w.place == "ahead"),
    )


def place_counts(model: ModelShape) -> dict[Place, int]:
    """Returns the number of each place in the model."""
    return {
        "first": 1,
        "every": model.num_layers,
        "attention": model.num_attention_layers,
        "recurrent": model.num_recurrent_layers,
        "dense": model.num_dense_layers,
        "mixture": model.num_mixture_layers,
        "last": 1,
        "ahead": model.num_ahead_layers,
        **Counter(model.layer_sizes),
    }


@functools.lru_cache(maxsize=64)
def list_weights(model: ModelShape) -> tuple[Weight, ...]:
    """Lists every weight of a model, once per place.

    Sources: Touvron et al. 2023, arXiv:2302.13971, section 2.2 (Llama); Brown et al.
    2020, arXiv:2005.14165, section 2.1 (GPT); Jiang et al. 2024, arXiv:2401.04088,
    section 2 (Mixtral); DeepSeek-AI 2024, arXiv:2412.19437, section 2 (MLA, shared and
    routed experts, multi-token prediction); transformers' `Gemma4TextModel`.
    """
    h = model.hidden_size
    v = model.vocab_size
    rows = model.position_rows
    weights = [Weight("embedding", "tokens", "v h", v * h, "first", split="vocab")]
    if rows:
        weights.append(Weight("positions", "positions", "r h", rows * h, "first"))
    if p := model.layer_input_size:
        num = model.num_layers
        part = functools.partial(Weight, "layer inputs", place="first")
        table = Weight("embedding", "by layer", "v L p", v * num * p, "first")
        weights.append(table._replace(split="vocab"))
        weights.append(part("projection", "h L p", h * num * p, applied=1))
        weights.append(part("norm of projections", "p", p))
    layers = []
    for sizes in dict.fromkeys(model.layer_sizes):
        parts = (
            *_attention(model, sizes.attention, sizes),
            *_mlp(model, sizes.mlp_size, sizes),
        )
        layers += [x._replace(name=f"{x.name}, {sizes.label}") for x in parts]
    if model.num_attention_layers and not model.layer_sizes:
        is_every = model.num_attention_layers == model.num_layers
        place = "every" if is_every else "attention"
        layers += _attention(model, model.attention, place)
    layers += _recurrent(model)
    if model.num_dense_layers and not model.layer_sizes:
        layers += _mlp(model, model.mlp_size, "dense")
    if model.num_mixture_layers:
        layers += _experts(model)
    if p:
        part = functools.partial(Weight, "layer inputs", place="every")
        layers.append(part("gate and up", "2 h p", 2 * h * p, applied=1))
        layers.append(_norms(model, "norm of layer inputs", 1, "every"))
    if model.layer_scale:
        layers.append(Weight("norms", "layer scale", "1", 1, "every"))
    layers.append(_norms(model, "block norms", model.norms_per_layer, "every"))
    weights += [*layers, _norms(model, "final norm", 1, "last")]
    stored = int(not model.tie_embeddings)
    head = Weight("head", "head", "v h", v * h, "last", stored, stored, 1, "vocab")
    weights.append(head)
    if model.num_ahead_layers:
        # A layer like the last one, and a projection that joins it: DeepSeek-AI 2024,
        # arXiv:2412.19437, section 2.2.
        kinds = ("every", "mixture" if model.mixture_layers[-1] else "dense")
        weights += [x._replace(place="ahead") for x in layers if x.place in kinds]
        weights.append(Weight("ahead", "join", "2 h h", 2 * h * h, "ahead", applied=1))
        names = ("embedding norm", "hidden norm", "final norm")
        weights += [_norms(model, name, 1, "ahead") for name in names]
    return tuple(weights)


def _attention(model: ModelShape, a: AttentionShape, place: Place) -> Iterable[Weight]:
    plain = functools.partial(Weight, "attention", place=place)
    weight = functools.partial(plain, applied=1)
    h = model.hidden_size
    n = a.num_q_heads
    if isinstance(a, HeadAttention):
        m = a.num_kv_heads
        d = a.head_dim
        yield weight("query", "h n d", h * n * d, split="heads")
        # Matrices of keys and values: one if both are equal, none if they are shared.
        times = 0 if a.shares_kv else 2 - a.keys_are_values
        keys = functools.partial(Weight, "attention", place=place, split="kv_heads")
        letters = "2 " if times == 2 else ""
        if times:
            name = "key and value"
            yield keys(name, f"{letters}h m d", times * h * m * d, applied=1)
        yield weight("output", "n d h", n * d * h, split="heads")
        if a.out_gate:
            yield weight("output gate", "h n d", h * n * d, split="heads")
            if a.qkv_bias:
                yield plain("output gate bias", "n d", n * d, split="heads")
        if a.qkv_bias:
            yield plain("query bias", "n d", n * d, split="heads")
            if times:
                yield keys("key and value bias", f"{letters}m d", times * m * d)
        if a.out_bias:
            yield plain("output bias", "h", h)
        if a.qk_norm and a.qk_norm_over == "layer":
            yield plain("query and key norms", "(n + m) d", (n + m) * d, split="heads")
        elif a.qk_norm and a.shares_kv:
            yield plain("query norm", "d", d)
        elif a.qk_norm and model.norm != "plain":
            yield plain("query and key norms", "2 d", 2 * d)
        if a.sinks:
            yield plain("sinks", "n", n, split="heads")
        return
    q_width = n * a.key_dim
    if (q := a.q_rank) is None:
        yield weight("query", "h n (dn + dr)", h * q_width, split="heads")
    else:
        yield weight("query, down", "h q", h * q)
        yield plain("query norm", "q", q)
        yield weight("query, up", "q n (dn + dr)", q * q_width, split="heads")
    c = a.kv_rank
    yield weight("latent, down", "h (c + dr)", h * (c + a.rope_dim))
    yield plain("latent norm", "c", c)
    up = c * n * (a.nope_dim + a.value_dim)
    yield weight("key and value, up", "c n (dn + dv)", up, split="heads")
    yield weight("output", "n dv h", n * a.value_dim * h, split="heads")


def _recurrent(model: ModelShape) -> Iterable[Weight]:
    if not model.num_recurrent_layers:
        return
    r = model.recurrent
    assert r is not None  # a ModelShape with recurrent layers has their shape
    plain = functools.partial(Weight, "recurrent", place="recurrent")
    weight = functools.partial(plain, applied=1, split="heads")
    h = model.hidden_size
    nv = r.num_value_heads
    dv = r.value_dim
    values = r.num_outputs
    channels = r.num_channels
    if r.kind == "conv":
        yield weight("inputs and gates", "3 h dv", 3 * h * dv)
        yield weight("output", "dv h", dv * h)
        yield plain("convolution", "dv w", r.kernel_size * dv)
        if r.conv_bias:
            yield plain("convolution bias", "dv", dv)
        if r.projection_bias:
            yield plain("biases of projections", "3 dv + h", 3 * dv + h)
        return
    yield weight("query, key, value", "h (2 nk dk + nv dv)", h * channels)
    yield weight("output", "nv dv h", values * h)
    yield plain("convolution", "(2 nk dk + nv dv) w", r.kernel_size * channels)
    if r.conv_bias:
        yield plain("convolution bias", "2 nk dk + nv dv", channels)
    if r.kind == "kda":
        # Gate and decay have a layer of the width of a head between.
        decays = nv * r.key_dim
        yield weight("output gate, down and up", "h dv + nv dv dv", (h + values) * dv)
        yield weight("decay, down and up", "h dv + nv dk dv", (h + decays) * dv)
        yield weight("rate", "h nv", h * nv)
        yield plain("decay biases", "nv dk + nv", decays + nv)
        yield plain("output norm", "dv", dv)
        return
    yield weight("output gate", "h nv dv", h * values)
    if r.kind == "gdn":
        yield weight("decay and rate", "2 h nv", 2 * h * nv)
        yield plain("decay biases", "2 nv", 2 * nv)
        yield plain("output norm", "dv", dv)
        return
    yield weight("decay", "h nv", h * nv)
    yield plain("decay biases and skip", "3 nv", 3 * nv)
    yield plain("output norm", "nv dv", values)
    if r.projection_bias:
        size = channels + values + nv + h
        yield plain("biases of projections", "2 nk dk + 2 nv dv + nv + h", size)


def _mlp(model: ModelShape, i: int, place: Place) -> Iterable[Weight]:
    h = model.hidden_size
    up = 1 + model.gated
    weight = functools.partial(Weight, "mlp", place=place)
    times = "2 " if model.gated else ""
    name = "gate and up" if model.gated else "up"
    yield weight(name, f"{times}h i", up * h * i, applied=1, split="mlp")
    yield weight("down", "i h", i * h, applied=1, split="mlp")
    if model.mlp_bias:
        yield weight("up bias", f"{times}i", up * i, split="mlp")
        yield weight("down bias", "h", h)


def _experts(model: ModelShape) -> Iterable[Weight]:
    x = model.experts
    h = model.hidden_size
    assert x is not None  # a ModelShape with mixture layers has experts
    e = x.num_experts
    k = x.top_k
    matrices = 2 + model.gated
    width = x.latent_size or h
    letter = "h" if x.latent_size is None else "l"
    plain = functools.partial(Weight, "experts", place="mixture")
    weight = functools.partial(plain, applied=1)
    routed = {"stored": e, "active": k, "applied": k, "split": "experts"}
    size = matrices * width * x.size
    yield plain("routed", f"{matrices} {letter} j", size, **routed)
    if x.latent_size is not None:
        yield weight("latent, down and up", "2 h l", 2 * h * width)
    yield weight("router", "e h", e * h)
    if x.beside_mlp:
        yield plain("scales of router and experts", "h + e", h + e)
        yield _norms(model, "norms of experts and MLP", 3, "mixture")
    if x.gate_bias:
        yield plain("routing correction", "e", e)
    if x.router_bias:
        yield plain("router bias", "e", e)
    if x.expert_bias:
        up = 1 + model.gated
        size = up * x.size + h
        yield plain("routed biases", f"{up} j + h", size, **{**routed, "applied": 0})
    if size := x.shared_size:
        yield weight("shared", f"{matrices} h js", matrices * h * size, split="mlp")
    if x.shared_gate:
        yield weight("shared gate", "h", h)


def _norms(model: ModelShape, name: str, count: int, place: Place) -> Weight:
    vectors = count * {"layer": 2, "rms": 1, "plain": 0}[model.norm]
    formula = "h" if vectors == 1 else f"{vectors} h"
    return Weight("norms", name, formula, vectors * model.hidden_size, place)
