"""Tensor parallelism: results equal those of one device, and bytes the formulas."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import files, models
from jaxkv.models import (
    AttentionKind,
    Experts,
    ModelConfig,
    RecurrenceConfig,
    load_model,
)
from jaxkv.parallel import (
    REPLICATED,
    collectives,
    make_mesh,
    map_over_mesh,
    specs_on,
    tensor,
)
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig
from scaling.costs import Layout, decode_traffic
from scaling.shapes import describe_config
from tests.support import engines
from tests.support.folders import GOLDEN
from tests.support.marks import one_quick
from tests.support.meshes import (
    ALL_AT_ONCE,
    MODEL,
    PROMPTS,
    answers,
    answers_of,
    engine_on,
)

FAMILIES = (
    "llama",
    "gpt2",
    "opt",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_neox",
    "gemma3",
    "glm4",
    "phi3",
    "glm4_moe",
    "gpt_oss",
)
BUNDLED = files.BUNDLED / "stdlib-bytes"
FEW = Experts(num_experts=4, top_k=2, size=24)
EIGHT = dataclasses.replace(FEW, num_experts=8)
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


def on_mesh(config: ModelConfig, params: Any, degree: int) -> tuple[Any, Any]:
    """Compiles the forward pass on a mesh for `TOKENS`; returns it and parameters."""
    mesh = make_mesh(tensor=degree)
    fitted = tensor.fit_config(config, degree)
    placed = tensor.place_params(config, params, mesh)
    run = map_over_mesh(
        functools.partial(models.logits, config=fitted),
        mesh,
        (specs_on(placed, mesh), REPLICATED),
        REPLICATED,
    )
    return jax.jit(run).lower(placed, jnp.asarray(TOKENS)).compile(), placed


def large(program: Any) -> list[collectives.Collective]:
    exchanges = collectives.find_collectives(program.as_text())
    assert all(exchange.is_sure for exchange in exchanges)
    return [exchange for exchange in exchanges if exchange.sent(rank=2)]


@pytest.mark.parametrize(
    ("family", "degree"),
    one_quick([("llama", 4), ("gpt2", 2), ("qwen2", 2), ("qwen2_moe", 2)]),
)
def test_logits_are_those_of_one_device(family: str, degree: int) -> None:
    check_family(family, degree)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_device_everywhere(family: str, degree: int) -> None:
    check_family(family, degree)


@pytest.mark.thorough
def test_norms_over_all_heads_need_a_kv_head_on_each_device() -> None:
    check_family("olmo2", 2)
    config = load_model(GOLDEN / "olmo2").config
    with pytest.raises(ValueError, match="num_kv_heads=2 must be a multiple of the"):
        tensor.fit_config(config, 4)


def check_family(family: str, degree: int) -> None:
    """Checks logits, and bytes against the formula."""
    loaded = load_model(GOLDEN / family)
    config = loaded.config
    params = loaded.params
    program, placed = on_mesh(config, params, degree)
    sharded_logits = np.asarray(program(placed, jnp.asarray(TOKENS)))
    full_logits = models.logits(params, jnp.asarray(TOKENS), config=config)
    np.testing.assert_allclose(sharded_logits, full_logits, rtol=0, atol=1e-4)
    # Padding words are sent, too.
    words = config.vocab_size + -config.vocab_size % degree
    padded = dataclasses.replace(describe_config(config), vocab_size=words)
    formula = decode_traffic(
        padded, Layout(tensor=degree), batch=TOKENS.size, number_bytes=4
    )
    sent = sum(exchange.sent(rank=2) for exchange in large(program))
    assert sent == sum(term.forward for term in formula)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_bytes_grow_with_the_layers(num_layers: int) -> None:
    config = dataclasses.replace(engines.MODEL, num_layers=num_layers, vocab_size=64)
    program, _ = on_mesh(config, engines.params(config), 2)
    exchanges = large(program)
    reduces = [exchange for exchange in exchanges if exchange.kind == "all-reduce"]
    assert len(reduces) == 1 + 2 * num_layers
    block = TOKENS.size * config.hidden_size * 4
    assert {exchange.sent(rank=2) for exchange in reduces} == {2 * 1 / 2 * block}
    assert [exchange.kind for exchange in exchanges if exchange not in reduces] == [
        "all-gather"
    ]


def test_surplus_collectives_are_detected() -> None:
    config = dataclasses.replace(engines.MODEL, vocab_size=64)
    mesh = make_mesh(tensor=2)
    placed = tensor.place_params(config, engines.params(config), mesh)

    def wasteful(params: Any, tokens: Any) -> Any:
        logits = models.logits(params, tokens, config=config)
        return jax.lax.psum(logits, "tensor")

    specs = specs_on(placed, mesh), REPLICATED
    run = map_over_mesh(wasteful, mesh, specs, REPLICATED)
    program = jax.jit(run).lower(placed, jnp.asarray(TOKENS)).compile()
    formula = decode_traffic(
        describe_config(config),
        Layout(tensor=2),
        batch=TOKENS.size,
        number_bytes=4,
    )
    more = sum(exchange.sent(rank=2) for exchange in large(program))
    assert more - sum(term.forward for term in formula) == TOKENS.size * 64 * 4


def test_trips_of_loops_are_counted() -> None:
    mesh = make_mesh(tensor=4)

    def looped(x: Any) -> Any:
        one = lambda _, x: jax.lax.psum(x, "tensor") * 0.25  # noqa: E731
        x = jax.lax.fori_loop(0, 5, one, x)
        return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: one(0, x) - 1.0, x)

    run = map_over_mesh(looped, mesh, REPLICATED, REPLICATED)
    text = str(jax.jit(run).lower(jnp.ones((3, 7))).compile().as_text())
    by_certainty = {
        exchange.is_sure: exchange for exchange in collectives.find_collectives(text)
    }
    assert by_certainty[True].trips == 5
    assert by_certainty[True].sent() == 2 * 3 / 4 * 3 * 7 * 4 * 5
    assert by_certainty[False].trips == 1


@pytest.mark.parametrize(
    ("fields", "degree", "message"),
    [
        ({"num_q_heads": 6, "num_kv_heads": 3}, 4, "num_q_heads=6 must be a multiple"),
        ({"num_q_heads": 12, "num_kv_heads": 3}, 2, "num_kv_heads=3 must be a multi"),
        ({"mlp_size": 42}, 4, "mlp_size=42 must be a multiple"),
        ({"experts": Experts(num_experts=4, top_k=2, size=18)}, 4, "experts.size=18 m"),
        (
            {
                "recurrence": RecurrenceConfig(
                    num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=4
                ),
                "other_attention": (AttentionKind(is_recurrent=True),),
                "attention_pattern": (0, 1),
            },
            2,
            "tensor=2 must be 1: recurrent layers are not divided",
        ),
    ],
)
def test_indivisible_sizes_are_refused(
    fields: dict[str, Any], degree: int, message: str
) -> None:
    config = dataclasses.replace(engines.MODEL, **fields)
    with pytest.raises(ValueError, match=message):
        tensor.fit_config(config, degree)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor=9 must be in \[1, 8\]"):
        make_mesh(tensor=9)


def test_parameters_on_another_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match=r"params\['embed'\].* must be on mesh"):
        specs_on(engines.params(), make_mesh(tensor=2))


def test_devices_receive_their_parts_only() -> None:
    mesh = make_mesh(tensor=4)
    place = functools.partial(tensor.make_placer, mesh=mesh)
    placed_params = load_model(GOLDEN / "llama", place=place).params
    layer = placed_params["layers"][0]
    for weight, axis in ((layer["up"], 1), (layer["down"], 1), (layer["out"], 1)):
        array = weight["weight"]
        shards = [shard.data.shape[axis] for shard in array.addressable_shards]
        assert shards == [array.shape[axis] // 4] * 4
    # Two KV heads: each is copied, with half of its queries.
    plain = load_model(GOLDEN / "llama").params["layers"][0]
    qkv = np.asarray(layer["qkv"]["weight"])
    full_weight = np.asarray(plain["qkv"]["weight"])
    assert (len(qkv), len(full_weight)) == (4, 2)
    np.testing.assert_array_equal(
        qkv[:, -2:], np.repeat(full_weight[:, -2:], 2, axis=0)
    )
    np.testing.assert_array_equal(
        qkv[:, :-2].reshape(-1), full_weight[:, :-2].reshape(-1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_answers_are_those_of_one_device(degree: int) -> None:
    folder = GOLDEN / "llama"
    assert answers(folder, make_mesh(tensor=degree)) == answers(folder, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "fields"),
    [
        ({"tensor": 8}, {}),
        ({"tensor": 2, "context": 2, "expert": 2}, {"experts": FEW}),
        ({"context": 8}, {}),
        ({"expert": 8}, {"experts": EIGHT}),
    ],
    ids=["tp=8", "2 x 2 x 2", "cp=8", "ep=8"],
)
def test_answers_of_eight_devices(degrees: Any, fields: Any) -> None:
    """Eight query heads and four KV heads, which are copied for eight devices."""
    config = dataclasses.replace(MODEL, **fields)
    params = engines.params(config)
    mesh = make_mesh(**degrees)
    sizes: Any = {"num_pages": 20, "page_size": 8}
    engine = engine_on(config, params, mesh, **sizes)
    if degrees == {"tensor": 8}:
        pages = engine.state.pages
        assert pages.num_kv_heads == 8
        for leaf in jax.tree.leaves(pages):
            assert [x.data.shape[2] for x in leaf.addressable_shards] == [1] * 8
    assert answers_of(engine) == answers_of(engine_on(config, params, None, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["draft-model", pytest.param("ngram", marks=pytest.mark.slow)]
)
def test_speculation_keeps_the_answers(method: Any) -> None:
    folder = GOLDEN / "llama"
    draft = folder if method == "draft-model" else None
    how = SpeculationConfig(method, draft_folder=draft)
    fields: Any = {"max_drafts": 3, "token_budget": 32, "speculate": how}
    assert answers(folder, make_mesh(tensor=2), **fields) == answers(folder, None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_trained_heads_keep_the_answers(method: Any) -> None:
    fields: Any = {
        "max_slots": 4,
        "max_length": 96,
        "num_pages": 40,
        "token_budget": 80,
    }
    asks = [Sampling.greedy(max_tokens=40), Sampling(max_tokens=40, seed=3)]
    token_lists = []
    for mesh in (None, make_mesh(tensor=2), make_mesh(tensor=4)):
        folder = files.BUNDLED / f"stdlib-bytes-{method}"
        heads = SpeculationConfig(method, heads_folder=folder)
        how: Any = {} if mesh is None else {"speculate": heads}
        engine = jaxkv.Engine.load(BUNDLED, mesh=mesh, **fields, **how)
        completions = engine.generate(["import os\n", "class A:\n"], asks)
        token_lists.append([one.answers[0].tokens for one in completions])
    assert token_lists[0] == token_lists[1] == token_lists[2]


@pytest.mark.slow
def test_pages_are_never_sent_nor_copied() -> None:
    mesh = make_mesh(tensor=2)
    sizes = []
    names = "page_size", "max_slots", "max_length", "token_budget"
    bounds: Any = {name: ALL_AT_ONCE[name] for name in names}
    for num_pages in (61, 610):
        fields: Any = bounds | {"num_pages": num_pages}
        engine = jaxkv.Engine.load(GOLDEN / "llama", mesh=mesh, **fields)
        program = engine.lower().compile()
        for exchange in collectives.find_collectives(program.as_text()):
            assert all(num_pages not in sides for _, sides in exchange.shapes)
            assert exchange.kind in ("all-reduce", "all-gather")
        memory = program.memory_analysis()
        pool = sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves(engine.state.pages)
        )
        sizes.append((memory.temp_size_in_bytes, pool))
    (small, small_pool), (big, big_pool) = sizes
    assert big - small < 0.05 * (big_pool - small_pool)


@pytest.mark.slow
def test_a_mesh_gives_the_same_bits_in_any_batch() -> None:
    fields: Any = ALL_AT_ONCE | {"numerics": "reproducible", "max_beams": 0}
    engine = jaxkv.Engine.load(GOLDEN / "llama", mesh=make_mesh(tensor=2), **fields)
    asks = [Sampling(max_tokens=12, seed=i, logprobs=2) for i in range(len(PROMPTS))]
    together = engine.generate(PROMPTS, asks)
    alone = [engine.generate([p], ask)[0] for p, ask in zip(PROMPTS, asks, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.answers == other.answers
