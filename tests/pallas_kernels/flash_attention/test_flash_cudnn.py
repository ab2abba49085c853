"""flash_attention by cuDNN: lowered without a GPU, gradients with a substitute."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from pallas_kernels import bench, devices
from pallas_kernels.flash_attention import tiled
from pallas_kernels.flash_attention.tiled import flash_attention
from tests.support.flash_cases import draw, total
from tests.support.mutation import replace


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    target = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: target)


def calls(
    *, head_dim: int = 128, dtype: Any = jnp.bfloat16, keys: int = 128, **options: Any
) -> list[str]:
    """Names of cuDNN's calls in a gradient with respect to the output."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(flash_attention(q, k, v, **options)[0].astype(jnp.float32))

    q, k = (jax.ShapeDtypeStruct((2, n, 4, head_dim), dtype) for n in (128, keys))
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return sorted(set(re.findall(r"__cudnn\$(\w+)", text)))


@pytest.mark.usefixtures("on_a_gpu")
def test_cudnn_serves_supported_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # The version comes from the library, which is absent here.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    both = ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert calls() == both
    assert calls(head_dim=64, dtype=jnp.float16, window=9) == both
    assert calls(causal=False, keys=256) == both
    assert calls(implementation="reference") == []
    assert calls(dtype=jnp.float32) == []
    assert calls(head_dim=256) == []
    assert calls(keys=256) == []


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(head_dim=256), "head_dim is 256, not a multiple of 8 up to 128"),
        (dict(dtype=jnp.float32), "the type is float32"),
        (dict(keys=256), "there are fewer queries than keys"),
    ],
)
def test_a_refusal_of_cudnn_has_a_reason(sizes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        calls(implementation="cudnn", **sizes)


def test_an_old_gpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    target = devices.Target("gpu", "Tesla T4", 40, "7.5")
    replace(monkeypatch, devices, "current_target", lambda: target)
    assert calls() == []
    with pytest.raises(ValueError, match=r"compute capability 7.5, not 8.0"):
        calls(implementation="cudnn")


@pytest.mark.thorough
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_of_both_results(
    monkeypatch: pytest.MonkeyPatch, of_lse: bool
) -> None:
    """The substitute has no gradient of the log-sum-exp, like cuDNN."""
    served = []

    def stand_in(q: Any, k: Any, v: Any, sizes: Any) -> Any:
        served.append(sizes.window)
        out, lse = bench.attention(q, k, v, causal=sizes.causal, window=sizes.window)
        return out, jax.lax.stop_gradient(lse)

    monkeypatch.setattr(tiled, "_cudnn", stand_in)
    monkeypatch.setattr(tiled, "_not_cudnn", lambda *_: "")
    arrays = draw(24, 24, 4, 2, 16, "float32")

    def loss(attend: Any, *arrays: Any) -> Any:
        if of_lse:
            return total(attend, *arrays)
        out, _ = attend(*arrays)
        return jnp.sum(jnp.sin(out))

    grad = partial(jax.grad, argnums=(0, 1, 2))
    expected = grad(partial(loss, partial(bench.attention, window=7)))(*arrays)
    grads = jax.jit(grad(partial(loss, partial(flash_attention, window=7))))(*arrays)
    assert served == [7]
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)
