"""The decode kernel through the door and through the engine's forward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import state
from jaxkv.memory import kv_pages
from jaxkv.models import config, paged, transformer
from pallas_kernels import devices
from pallas_kernels.paged_attention import api, decode_plan
from pallas_kernels.paged_attention.hopper import decode
from tests.support import emulating
from tests.support.attention_cases import make_case

H200 = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
MODEL = config.ModelConfig(
    vocab_size=64,
    hidden_size=128,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=64,
    max_positions=128,
)
CONFIG = state.EngineConfig(
    num_pages=12, page_size=16, max_slots=2, max_length=64, token_budget=16
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the door believe that programs are made for an H200."""
    monkeypatch.setattr(devices, "current", lambda: H200)


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
def test_what_is_out_of_its_range_goes_to_the_reference(change, reason: str) -> None:
    sizes: Any = dict(dtype="bfloat16", head_dim=64, page_size=16, group=4)
    sizes |= change
    numerics = sizes.pop("numerics", "fast")
    shape = (3, 2 * sizes["group"], sizes["head_dim"])
    q = jax.ShapeDtypeStruct(shape, sizes["dtype"])
    pages = (5, 2, sizes["page_size"], sizes["head_dim"])
    k = jax.ShapeDtypeStruct(pages, sizes["dtype"])
    assert api.choose(q, k, numerics=numerics) == "reference"
    with pytest.raises(ValueError, match=reason):
        api.choose(q, k, numerics=numerics, implementation="mosaic_gpu")


def test_another_gpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: H200._replace(capability="8.0"))
    q = jax.ShapeDtypeStruct((3, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((5, 2, 16, 64), jnp.bfloat16)
    assert api.choose(q, k) == "reference"
    with pytest.raises(ValueError, match=r"compute capability 8.0, not 9.0; 'refer"):
        api.choose(q, k, implementation="mosaic_gpu")


@pytest.mark.thorough
@pytest.mark.usefixtures("hopper")
def test_the_door_opens_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        np.random.default_rng(0),
        [(20, 3), (0, 0), (33, 1)],
        page_size=16,
        kv_heads=1,
        group=2,
        head_dim=64,
        padding=2,
    )
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in case[:3]]
    rest = [jnp.asarray(x) for x in case[3:]]
    features: Any = dict(softcap=2.0, sinks=jnp.asarray([0.5, -1.0], jnp.float32))
    expected = api.paged_attention(
        *narrow, *rest, implementation="reference", **features
    )
    attend = decode.attend
    with emulating.emulator_of_races() as interpret:
        emulated = functools.partial(attend, interpret=interpret)
        monkeypatch.setattr(decode, "attend", emulated)
        found = api.paged_attention(
            *narrow, *rest, **features, tiling=emulating.TILINGS
        )
        found = jax.block_until_ready(found)
    assert found.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found.out, np.float32),
        np.asarray(expected.out, np.float32),
        atol=0.02,
    )
    np.testing.assert_allclose(found.lse, expected.lse, atol=1e-2)


@pytest.mark.usefixtures("hopper")
def test_a_forward_pass_plans_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []
    make = decode_plan.make_plan

    def counted(*arguments: Any, **fields: Any) -> Any:
        plans.append(fields["group"])
        return make(*arguments, **fields)

    monkeypatch.setattr(decode_plan, "make_plan", counted)
    params = transformer.param_shapes(MODEL, dtype="bfloat16")
    pages = jax.eval_shape(lambda: paged.make_pages(MODEL, CONFIG, dtype="bfloat16"))
    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    blank: Any = kv_pages.Rows  # of shapes, not of arrays
    rows = blank(
        token=row,
        position=row,
        slot=row,
        page_ids=jax.ShapeDtypeStruct((2, 4), jnp.int32),
        logit_rows=jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    forward = paged.PagedForward(MODEL)
    lowered = jax.jit(forward, donate_argnums=1).trace(params, pages, rows)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert plans == [2]
    assert text.count("custom_call @mosaic_gpu") == MODEL.num_layers
