"""Both kernels through the door: who takes which rows, and one result of all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices
from pallas_kernels.paged_attention import api, dispatch
from pallas_kernels.paged_attention.hopper import decode, prefill
from tests.support import emulating
from tests.support.kernel_cases import assert_within_rule, make_case

H200 = devices.Target("gpu", "NVIDIA H200", 132, "9.0")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The door believes in an H200; its kernels are emulated, and say who ran."""
    ran: list[str] = []
    monkeypatch.setattr(devices, "current", lambda: H200)
    with emulating.emulator_of_races() as interpret:
        for module in (decode, prefill):
            attend = functools.partial(module.attend, interpret=interpret)

            def told(*arguments, _attend=attend, _name=module.__name__, **fields):
                ran.append(_name.rpartition(".")[2])
                return _attend(*arguments, **fields)

            monkeypatch.setattr(module, "attend", told)
        yield ran


@pytest.mark.thorough
def test_a_step_of_decode_and_chunks(emulated: list[str]) -> None:
    """64 rows of two query heads a KV head are few, 65 are many."""
    case = make_case(
        [(7, 65), (40, 1), (0, 0), (5, 2)],
        page_size=16,
        kv_heads=1,
        group=2,
        padding=1,
        window=60,
        sinks=np.asarray([0.5, -1.0]),
    )
    arrays = case.arrays()
    names = ("q", "k_pages", "v_pages", "page_ids", "positions", "slots")

    @jax.jit
    def attend(arrays: dict[str, Any]) -> api.AttentionState:
        return api.paged_attention(
            *(arrays[name] for name in names),
            window=case.window,
            sinks=arrays["sinks"],
            implementation="mosaic_gpu",
            tiling=emulating.TILINGS,
        )

    found = jax.block_until_ready(attend(arrays))
    assert emulated == ["decode", "prefill"]
    assert found.out.dtype == jnp.bfloat16
    assert_within_rule(case, found.out.astype(jnp.float32), found.lse)


def plan_of(num_rows: int, num_slots: int, **others: Any) -> dispatch.StepPlan:
    row = jax.ShapeDtypeStruct((num_rows,), jnp.int32)

    def plan(positions: jax.Array, slots: jax.Array) -> dispatch.StepPlan:
        fields: dict[str, Any] = {"slots": slots} | others
        return dispatch.make_plan(
            positions,
            **fields,
            num_slots=num_slots,
            kv_heads=2,
            group=4,
            head_dim=128,
        )

    return jax.eval_shape(plan, row, row)


def test_a_tiling_that_is_not_the_plan_s_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "current", lambda: H200)
    case = make_case([(7, 2)], page_size=16, kv_heads=1, group=2)
    arrays = case.arrays()
    q, k, v, ids, *rows = (
        arrays[name]
        for name in ("q", "k_pages", "v_pages", "page_ids", "positions", "slots")
    )
    plan = api.make_plan(q, k, ids, *rows, tiling=emulating.TILINGS)
    own = api.make_plan(q, k, ids, *rows)
    assert plan is not None
    assert own is not None
    assert plan.tiling == emulating.TILINGS
    assert own.tiling == dispatch.default_tilings(64)
    with pytest.raises(ValueError, match="must be that of the plan"):
        api.paged_attention(
            *(q, k, v, ids, *rows), plan=plan, tiling=dispatch.default_tilings(64)
        )


def test_what_shapes_decide_runs_one_kernel() -> None:
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    kin = {"context": ints(3), "ancestors": jnp.zeros((512, 9), bool)}
    for alone in (
        plan_of(3, 3, slots=None),
        plan_of(32, 3),
        plan_of(512, 3, **kin),
    ):
        assert alone.few is not None
        assert alone.many is None
    assert plan_of(512, 1).few is None
    both = plan_of(4096, 64)
    assert both.many is not None
    # At most 32 rows a slot in blocks of 16, not 4096 of any.
    assert both.few is not None
    assert both.few.low.shape == (128,)
    assert both.many.row.shape == ((4096 + 64 * 134) // 128,)


@pytest.mark.thorough
def test_few_rows_fill_no_more_blocks_than_planned() -> None:
    """Every slot with as many rows as are few: the blocks are just enough."""
    slots = np.repeat(np.arange(5), 32)
    positions = np.tile(np.arange(32), 5)
    made = dispatch.make_plan(
        *(jnp.asarray(x, jnp.int32) for x in (positions, slots)),
        num_slots=5,
        kv_heads=1,
        group=4,
        head_dim=64,
    )
    assert made.few is not None
    assert made.many is not None
    assert made.few.low.shape == (10,)
    assert (np.asarray(made.few.packing.block) < 10).all()
    assert made.many.num_used.tolist() == [0]
