"""Training on a mesh: loss and gradient of one device, and bytes as in formulas."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import (
    AttentionKind,
    Experts,
    LatentConfig,
    ModelConfig,
    RecurrenceConfig,
    init_params,
    is_selection_bias,
)
from jaxkv.parallel import experts, find_collectives, zigzag_order
from scaling.costs import parse_layout, training_traffic
from scaling.shapes import describe_config
from scaling.training import (
    check_trainable,
    divided_gradient,
    gather_tree,
    make_training_mesh,
    objectives,
    place_training_tree,
)
from scaling.training.recipes import StepConfig
from tests.support.marks import one_quick
from tests.support.meshes import BATCH, MODEL, SEQ, WINDOWS
from tests.support.mutation import replace

OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "num_kv_heads": 8,
        "vocab_size": 61,
    },
    "untied": {"tie_embeddings": False, "num_kv_heads": 2, "qk_norm": True},
    "latent": {
        "num_q_heads": 4,
        "head_dim": 18,
        "latent": LatentConfig(
            kv_rank=16, q_rank=14, nope_dim=12, rope_dim=6, value_dim=10
        ),
    },
    "recurrent": {
        "norm": "rms_offset",
        "recurrence": RecurrenceConfig(
            num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5
        ),
        "other_attention": (AttentionKind(positions="none", is_recurrent=True),),
        "attention_pattern": (1, 0),
    },
    "latent, queries not compressed": {
        "num_q_heads": 4,
        "head_dim": 18,
        "latent": LatentConfig(kv_rank=16, nope_dim=12, rope_dim=6, value_dim=10),
    },
}
MIXTURE = {"experts": Experts(num_experts=8, top_k=2, size=24)}
OTHERS["recurrent, experts"] = OTHERS["recurrent"] | MIXTURE
SHARED: dict[str, Any] = {
    "experts": Experts(
        **{"num_experts": 8, "top_k": 3, "size": 24, "shared_size": 16},
        **{"shared_gate": True, "renormalise": False, "num_dense_layers": 1},
    )
}
NARROW: dict[str, Any] = {"experts": Experts(num_experts=8, top_k=2, size=18)}
BALANCED: dict[str, Any] = {
    "experts": Experts(num_experts=8, top_k=2, size=24, balance_weight=0.5)
}
BIASED: dict[str, Any] = {
    "experts": Experts(
        **{"num_experts": 8, "top_k": 3, "size": 24, "shared_size": 16},
        **{"scoring": "sigmoid", "gate_bias": True, "bias_rate": 0.01},
        **{"num_groups": 4, "top_groups": 2, "scale": 2.5, "balance_weight": 0.5},
    )
}
LAYOUTS = (
    "tp=2",
    "tp=4",
    "tp=2,sp",
    "tp=4,sp",
    "dp=2",
    "dp=4",
    "ulysses=2",
    "ulysses=8",
    "ring=2",
    "ring=4",
    "ring=8",
    "tp=2,dp=2",
    "ring=2,ulysses=2",
    "tp=2,sp,ring=2,dp=2",
    "tp=2,dp=2,ulysses=2",
)
QUICK = ("tp=2,sp", "ring=2,ulysses=2")
THOROUGH = ("tp=2,sp,ring=2,dp=2", "ulysses=8")


def check(
    layout: str, windows: Any = WINDOWS, *, remat: bool = False, **fields: Any
) -> None:
    """Checks loss, gradient and bytes of a layout."""
    config = dataclasses.replace(MODEL, **fields)
    divided = parse_layout(layout)
    check_trainable(config, divided, sequence_length=windows.shape[1] - 1)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jax.random.normal(jax.random.key(1), x.shape) / 8
            if is_selection_bias(path)
            else x
        ),
        init_params(config, jax.random.key(0)),
    )
    windows = jnp.asarray(windows)
    placed = place_training_tree(config, divided, params)
    how = StepConfig(layout=divided, remat=remat)
    run = jax.jit(divided_gradient(config, how))
    program = run.lower(placed, windows).compile()
    loss, grads = program(placed, windows)
    grads = gather_tree(config, divided, grads)
    (_, expected_loss), expected = jax.value_and_grad(
        lambda params: objectives.mean_loss(params, windows, model=config),
        has_aux=True,
    )(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for grad, one in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(grad, one, rtol=0, atol=1e-4 * np.abs(one).max())
    if config.num_layers > 1:
        check_bytes(config, divided, program, remat=remat)


def check_bytes(
    config: ModelConfig, layout: Any, program: Any, *, remat: bool = False
) -> None:
    """Checks that the bytes sent by the program equal those of the formulas."""
    exchanges = find_collectives(str(program.as_text()))
    assert all(exchange.is_sure for exchange in exchanges)
    formula = formula_of(config, layout, remat=remat)
    assert sum(exchange.sent(rank=1) for exchange in exchanges) == formula
    # Only the loss itself is extra: a number from every device.
    small_exchanges = [
        exchange
        for exchange in exchanges
        if exchange.sent() and not exchange.sent(rank=1)
    ]
    assert all(
        kind == "f32" and not sides for x in small_exchanges for kind, sides in x.shapes
    )


def formula_of(config: ModelConfig, layout: Any, *, remat: bool = False) -> float:
    """Bytes that a device sends, by `traffic`."""
    formula = training_traffic(
        describe_config(config),
        layout,
        batch=BATCH // layout.data,
        sequence=SEQ,
        number_bytes=4,
        gradient_bytes=4,
        remat=remat,
    )
    return sum(term.forward + term.backward for term in formula)


@pytest.mark.parametrize("layout", one_quick(QUICK))
def test_a_mesh_gives_the_gradient_of_one_device(layout: str) -> None:
    check(layout)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", THOROUGH)
def test_all_kinds_give_the_gradient_of_one_device(layout: str) -> None:
    check(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted({*LAYOUTS} - {*QUICK, *THOROUGH}))
def test_every_layout_gives_the_gradient_of_one_device(layout: str) -> None:
    check(layout)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "tp=2,sp"),
        pytest.param("untied", "ulysses=4", marks=pytest.mark.slow),
        pytest.param("gpt2", "ulysses=4", marks=pytest.mark.slow),
        pytest.param("untied", "tp=2,sp", marks=pytest.mark.slow),
        ("latent", "tp=2,ring=2"),
        pytest.param("recurrent", "dp=2", marks=pytest.mark.slow),
        pytest.param("recurrent, experts", "ep=2,dp=2,gather", marks=pytest.mark.slow),
        *(
            pytest.param("latent", layout, marks=pytest.mark.slow)
            for layout in ("tp=2", "tp=2,sp", "ulysses=2", "ring=2,ulysses=2")
        ),
        pytest.param("latent, queries not compressed", "tp=2", marks=pytest.mark.slow),
    ],
)
def test_other_families_too(name: str, layout: str) -> None:
    check(layout, **OTHERS[name])


LONG = np.random.default_rng(0).integers(0, 61, (2, 513), np.int32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ulysses=2", marks=pytest.mark.slow),
        "ring=2",
        pytest.param("dp=2", marks=pytest.mark.slow),
        pytest.param("tp=2,sp", marks=pytest.mark.slow),
        pytest.param("ring=2,ulysses=2,dp=2", marks=pytest.mark.slow),
    ],
)
def test_sequences_of_several_tiles_too(layout: str) -> None:
    """Attention uses loops then, whose carries need types with the mesh axes."""
    check(layout, LONG, num_layers=1, max_positions=512)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param("ep=4,gather", MIXTURE, marks=pytest.mark.thorough),
        pytest.param("ep=2,dp=4,capacity=4", MIXTURE, marks=pytest.mark.thorough),
        pytest.param("tp=2,sp", SHARED, marks=pytest.mark.slow),
        pytest.param("ep=2,ulysses=2,dp=2,gather", SHARED, marks=pytest.mark.slow),
        pytest.param("dp=2", BALANCED, marks=pytest.mark.slow),
        pytest.param("ep=2,dp=4,gather", BIASED, marks=pytest.mark.slow),
        pytest.param("tp=2,sp", BIASED, marks=pytest.mark.slow),
        pytest.param("tp=2,dp=2", BIASED, marks=pytest.mark.slow),
        pytest.param("ep=4,capacity=4", BIASED, marks=pytest.mark.slow),
        pytest.param("ring=2,dp=2", BIASED, marks=pytest.mark.slow),
        pytest.param("tp=2,dp=2", BALANCED, marks=pytest.mark.slow),
        pytest.param("ep=2,dp=4,gather", BALANCED, marks=pytest.mark.slow),
        pytest.param("ep=4,capacity=4", BALANCED, marks=pytest.mark.slow),
        pytest.param("tp=4,dp=2", SHARED, marks=pytest.mark.slow),
        pytest.param("tp=2", MIXTURE, marks=pytest.mark.slow),
        pytest.param("ring=2,dp=2", MIXTURE, marks=pytest.mark.slow),
        pytest.param("ep=4,capacity=4", SHARED, marks=pytest.mark.slow),
        pytest.param("ep=2,ring=2,dp=2,capacity=4", SHARED, marks=pytest.mark.slow),
    ],
)
def test_mixtures_too(layout: str, fields: dict[str, Any]) -> None:
    """The capacity of each expert is large enough that no row is dropped.

    The load-balancing loss covers the rows of all devices, and so does the gradient of
    selection biases, which is the load.
    """
    check(layout, **fields)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("tp=2,sp", {}),
        ("ring=2,ulysses=2", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("tp=4,dp=2", {}),
                ("tp=2", {"num_layers": 4}),
                ("ulysses=2", {"num_layers": 4}),
                ("ring=4", {"num_layers": 4}),
                ("tp=2,sp,ring=2,dp=2", {}),
                ("tp=2,sp", OTHERS["gpt2"]),
                ("tp=2,sp", SHARED),
                ("tp=2", SHARED),
                ("ep=4,gather", MIXTURE),
                ("ep=2,dp=4,capacity=4", MIXTURE),
                ("ep=2,dp=4,gather", BALANCED),
            )
        ),
    ],
)
def test_recomputation_repeats_traffic(layout: str, fields: dict[str, Any]) -> None:
    check(layout, remat=True, **fields)


def compiled(config: ModelConfig, layout: Any, **how: Any) -> Any:
    params = init_params(config, jax.random.key(0))
    placed = place_training_tree(config, layout, params)
    run = jax.jit(divided_gradient(config, StepConfig(layout=layout, **how)))
    return run.lower(placed, jnp.asarray(WINDOWS)).compile()


@pytest.mark.thorough
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("tp=2", {}),
        pytest.param("ep=2,gather", MIXTURE, marks=pytest.mark.slow),
        pytest.param("ep=2,capacity=4", MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_bytes_grow_with_the_layers(
    layout: str, fields: dict[str, Any], num_layers: int
) -> None:
    config = dataclasses.replace(MODEL, num_layers=num_layers, **fields)
    how = parse_layout(layout)
    check_bytes(config, how, compiled(config, how))


@pytest.mark.thorough
def test_bytes_of_micro_batches_one_after_another() -> None:
    """Gradients of weights are exchanged once, other tensors twice."""
    layout = parse_layout("tp=2,sp,dp=2")
    program = compiled(MODEL, layout, accumulation=2)
    exchanges = find_collectives(str(program.as_text()))
    assert {exchange.trips for exchange in exchanges} == {1, 2}
    formula = training_traffic(
        describe_config(MODEL),
        layout,
        batch=BATCH // 4,
        sequence=SEQ,
        number_bytes=4,
        gradient_bytes=4,
        micro_batches=2,
    )
    expected = sum(term.forward + term.backward for term in formula)
    assert sum(exchange.sent(rank=1) for exchange in exchanges) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "function_name", ["gather_rows", pytest.param("exchange", marks=pytest.mark.slow)]
)
def test_an_extra_exchange_is_counted(
    function_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug gathers rows twice, in every mixture."""
    original = getattr(experts, function_name)

    def wasteful(x: Any, *args: Any, **how: Any) -> Any:
        more = jax.lax.all_gather(jax.lax.stop_gradient(x * 2), "expert", tiled=True)
        return original(x, *args, **how) + 1e-9 * more[: len(x)]

    replace(monkeypatch, experts, function_name, wasteful)
    how = {"gather_rows": "ep=2,gather", "exchange": "ep=2,capacity=4"}[function_name]
    layout = parse_layout(how)
    config = dataclasses.replace(MODEL, **MIXTURE)
    exchanges = find_collectives(str(compiled(config, layout).as_text()))
    sent = sum(exchange.sent(rank=1) for exchange in exchanges)
    rows = BATCH // 2 * SEQ
    more = rows * MODEL.hidden_size * 4 * MODEL.num_layers
    assert sent - formula_of(config, layout) == more


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("tp=8", {}, "num_kv_heads=4 must be a multiple of tensor=8"),
        ("pp=2,ring=2", {}, "must have pipeline or ring"),
        ("pp=3", {}, "pipeline=3 must divide the 2 layers"),
        ("tp=4", NARROW, "tensor=4 must divide the 18 experts' width"),
        ("ring=2", {"window": 8}, "window=8 must be None"),
        ("ring=3", {}, "ring=3 must divide the 32 tokens"),
        ("ulysses=3", {}, "ulysses=3 must divide the 8 query heads"),
        ("ep=2,gather", {}, "expert=2 needs a mixture"),
        ("ep=2", MIXTURE, "expert=2 needs gather, or a capacity"),
        ("ep=3,gather", MIXTURE, "expert=3 must divide the 8 experts"),
        ("ep=2,tp=2,gather", MIXTURE, "must have expert or tensor, not both"),
        ("ep=2,ulysses=2,gather", MIXTURE, "expert=2 must divide data=1"),
        ("pp=2,dp=2", SHARED, "num_dense_layers=1 must be 0 with pipeline stages"),
        (
            "pp=2,dp=2",
            {"num_ahead_layers": 1},
            "num_ahead_layers=1 must be 0 with pipeline stages",
        ),
        ("tp=3", {"num_kv_heads": 3, "num_q_heads": 9}, "tensor=3 must divide the 32"),
        *(
            (layout, OTHERS["recurrent"], f"{name}=2 must be 1: the recurrent layers")
            for layout, name in (
                ("tp=2,sp", "tensor"),
                ("pp=2,dp=2", "pipeline"),
                ("ring=2", "ring"),
                ("ulysses=2", "ulysses"),
            )
        ),
    ],
)
def test_indivisible_layouts_are_refused(
    layout: str, fields: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(MODEL, **({"mlp_size": 32} | fields))
    with pytest.raises(ValueError, match=message):
        check_trainable(config, parse_layout(layout), sequence_length=SEQ)


def test_a_ring_is_fair() -> None:
    """Under a causal mask every device of a zigzag has as many pairs to compute."""
    order = zigzag_order(48, ring=4).reshape(4, -1)
    assert sorted(order.reshape(-1).tolist()) == list(range(48))
    num_keys = (order + 1).sum(axis=1)
    assert len({*num_keys.tolist()}) == 1


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for 16 devices, 8 are there"):
        make_training_mesh(parse_layout("dp=16"))
