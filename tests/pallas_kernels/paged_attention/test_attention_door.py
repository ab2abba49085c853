"""Kernels chosen by the public function, their rows, and the engine's forward pass."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import EngineConfig
from jaxkv.memory import Rows
from jaxkv.models import ModelConfig, PagedForward, make_model_pages, param_shapes
from pallas_kernels import devices
from pallas_kernels.paged_attention import api, decode_plan, dispatch, prefill_plan
from pallas_kernels.paged_attention.hopper import decode, prefill
from tests.support import emulating
from tests.support.attention_cases import attend_arrays
from tests.support.kernel_cases import assert_within_rule, make_case
from tests.support.mutation import replace

pytestmark = pytest.mark.usefixtures("full_optimization")

H200 = devices.Target("gpu", "NVIDIA H200", 132, "9.0")


MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    num_layers=3,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=64,
    max_positions=128,
)
CONFIG = EngineConfig(
    num_pages=12, page_size=16, max_slots=2, max_length=64, token_budget=16
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the public function target an H200."""
    replace(monkeypatch, devices, "current_target", lambda: H200)


@pytest.fixture
def emulated(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulates the kernels and records those that run."""
    ran: list[str] = []
    with emulating.emulator_of_races() as interpret:
        for module, name in (
            (decode, "attend_decode"),
            (prefill, "attend_prefill"),
        ):
            attend = getattr(module, name)

            def traced(
                *arguments: Any,
                _attend: Any = attend,
                _name: str = module.__name__,
                **fields: Any,
            ) -> Any:
                ran.append(_name.rpartition(".")[2])
                return _attend(*arguments, **fields | {"interpret": interpret})

            replace(monkeypatch, module, name, traced)
        yield ran


@pytest.mark.thorough
def test_a_step_of_decode_and_chunks(emulated: list[str]) -> None:
    """64 rows of two query heads per KV head are few, 65 are many."""
    case = make_case(
        [(7, 65), (40, 1), (0, 0), (5, 2)],
        page_size=16,
        kv_heads=1,
        group=2,
        padding=1,
        window=60,
        softcap=2.0,
        sinks=np.asarray([0.5, -1.0]),
    )
    arrays = case.arrays()
    names = ("q", "k_pages", "v_pages", "page_ids", "positions", "slots")

    @jax.jit
    def attend(arrays: dict[str, Any]) -> api.AttentionState:
        return attend_arrays(
            *(arrays[name] for name in names),
            window=case.window,
            softcap=case.softcap,
            sinks=arrays["sinks"],
            implementation="mosaic_gpu",
            tiling=emulating.TILINGS,
        )

    state = jax.block_until_ready(attend(arrays))
    assert emulated == ["decode", "prefill"]
    assert state.out.dtype == jnp.bfloat16
    assert_within_rule(case, state.out.astype(jnp.float32), state.lse)


def plan_of(num_rows: int, num_slots: int, **others: Any) -> dispatch.StepPlan:
    row = jax.ShapeDtypeStruct((num_rows,), jnp.int32)

    def plan(positions: jax.Array, slots: jax.Array) -> dispatch.StepPlan:
        fields: dict[str, Any] = {"slots": slots} | others
        return dispatch.make_step_plan(
            positions,
            **fields,
            num_slots=num_slots,
            kv_heads=2,
            group=4,
            head_dim=128,
        )

    return jax.eval_shape(plan, row, row)


@pytest.mark.thorough
@pytest.mark.usefixtures("hopper")
def test_a_plan_keeps_its_tiling() -> None:
    case = make_case([(7, 2)], page_size=16, kv_heads=1, group=2)
    arrays = case.arrays()
    q, k, ids, *rows = (
        arrays[name] for name in ("q", "k_pages", "page_ids", "positions", "slots")
    )
    view = api.RowView(ids, *rows)
    plan = api.make_plan(q, k, view, tiling=emulating.TILINGS)
    own_plan = api.make_plan(q, k, view)
    assert plan is not None
    assert own_plan is not None
    assert plan.tiling == emulating.TILINGS
    assert own_plan.tiling == dispatch.default_tilings(64)


def test_one_kernel_runs_if_shapes_decide() -> None:
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    kin = {"context": ints(3), "ancestors": jnp.zeros((99, 9), bool)}
    for alone in (
        plan_of(3, 3, slots=None),
        plan_of(99, 3, slots=None),
        plan_of(99, 3, slots=None, **kin),
        plan_of(32, 3),
    ):
        assert alone.few is not None
        assert alone.prefill is None
    assert plan_of(512, 1).few is None
    assert plan_of(99, 3, **kin).prefill is not None
    both = plan_of(4096, 64)
    assert both.prefill is not None
    # At most 32 rows per slot in blocks of 16, not 4096 rows of any slot.
    assert both.few is not None
    assert both.few.low.shape == (128,)
    assert both.prefill.tiles.shape[1] == (4096 + 64 * 134) // 128


@pytest.mark.thorough
def test_few_rows_fill_no_more_blocks_than_planned() -> None:
    """Every slot has the most rows that count as few: all blocks are used."""
    slots = np.repeat(np.arange(5), 32)
    positions = np.tile(np.arange(32), 5)
    step_plan = dispatch.make_step_plan(
        *(jnp.asarray(x, jnp.int32) for x in (positions, slots)),
        num_slots=5,
        kv_heads=1,
        group=4,
        head_dim=64,
    )
    assert step_plan.few is not None
    assert step_plan.prefill is not None
    assert step_plan.few.low.shape == (10,)
    assert (np.asarray(step_plan.few.packing.block) < 10).all()
    assert not step_plan.prefill.tiles[prefill_plan.NUM_KV].any()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "q and pages must both be bfloat16"),
        (dict(head_dim=80), "head_dim=80 must be 64, 128 or 256"),
        (dict(page_size=8), "page_size=8 must be a power of two"),
        (dict(group=65), "group=65 query heads"),
        (dict(numerics="reproducible"), "numerics='reproducible' needs sums"),
    ],
)
def test_unsupported_sizes_go_to_the_reference(change, reason: str) -> None:
    sizes: Any = dict(dtype="bfloat16", head_dim=64, page_size=16, group=4)
    sizes |= change
    numerics = sizes.pop("numerics", "fast")
    shape = (3, 2 * sizes["group"], sizes["head_dim"])
    q = jax.ShapeDtypeStruct(shape, sizes["dtype"])
    pages = (5, 2, sizes["page_size"], sizes["head_dim"])
    k = jax.ShapeDtypeStruct(pages, sizes["dtype"])
    assert api.choose_attention(q, k, numerics=numerics) == "reference"
    with pytest.raises(ValueError, match=reason):
        api.choose_attention(q, k, numerics=numerics, implementation="mosaic_gpu")


def test_another_gpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(
        monkeypatch, devices, "current_target", lambda: H200._replace(capability="8.0")
    )
    q = jax.ShapeDtypeStruct((3, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((5, 2, 16, 64), jnp.bfloat16)
    assert api.choose_attention(q, k) == "reference"
    with pytest.raises(ValueError, match=r"compute capability 8.0, not 9.0; 'refer"):
        api.choose_attention(q, k, implementation="mosaic_gpu")


@pytest.mark.usefixtures("hopper")
def test_a_forward_pass_plans_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []
    make = decode_plan.plan_decode

    def counted(*arguments: Any, **fields: Any) -> Any:
        plans.append(fields["group"])
        return make(*arguments, **fields)

    replace(monkeypatch, decode_plan, "plan_decode", counted)
    params = param_shapes(MODEL, dtype="bfloat16")
    pages = jax.eval_shape(lambda: make_model_pages(MODEL, CONFIG, dtype="bfloat16"))
    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    blank: Any = Rows  # of shapes, not of arrays
    rows = blank(
        token=row,
        position=row,
        slot=row,
        page_ids=jax.ShapeDtypeStruct((2, 4), jnp.int32),
        logit_rows=jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    forward = PagedForward(MODEL)
    lowered = jax.jit(forward, donate_argnums=1).trace(params, pages, rows)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert plans == [2]
    # One function for all layers: rotation and write, attention, and the merge of its
    # parts.
    assert text.count("custom_call @mosaic_gpu") == 3
    assert len(re.findall(r"call @\w*_run_layer", text)) == MODEL.num_layers
