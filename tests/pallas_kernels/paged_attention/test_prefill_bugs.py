"""Bugs seeded into the prefill kernel: the emulator notices every one of them."""

import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper import prefill_body, softmax
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import NOTICED, run_prefill, seed_bug
from tests.support.kernel_cases import assert_within_rule, make_case

K_FULL = "plgpu.barrier_wait(shared.k_full.at[stage])"
V_FREE = "plgpu.barrier_arrive(shared.v_free.at[stage])"
PRODUCT = "out = softmax.add_product(state.out, weights, values, emulated, meanwhile)"
SCORES = "scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))"
K_FREE = V_FREE.replace("v_free", "k_free")
BETWEEN = "\n            "
BUGS = {
    "back-pressure": ("plgpu.barrier_wait(free.at[stage])", "pass"),
    "wait for keys": (K_FULL, "pass"),
    "early release": (PRODUCT + BETWEEN + V_FREE, V_FREE + BETWEEN + PRODUCT),
    "commit": ("= lse\n        plgpu.commit_smem()", "= lse"),
}
MORE_BUGS = {
    "wait for values": (
        "if not masked:\n                plgpu.barrier_wait(shared.v_full.at[stage])",
        "pass",
    ),
    "early release of keys": (SCORES + BETWEEN + K_FREE, K_FREE + BETWEEN + SCORES),
    "early release of queries": (
        "plgpu.barrier_wait(shared.q_full.at[q_stage])",
        "plgpu.barrier_arrive(shared.q_free.at[q_stage])\n        "
        "plgpu.barrier_wait(shared.q_full.at[q_stage])",
    ),
    "wait for results": ("plgpu.wait_smem_to_gmem(0)", "pass"),
    "wait for the last results": (
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        "pass",
    ),
}


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        *(pytest.param(*bug, id=name) for name, bug in BUGS.items()),
        *(
            pytest.param(*bug, id=name, marks=pytest.mark.slow)
            for name, bug in MORE_BUGS.items()
        ),
    ],
)
def test_seeded_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, removed: str, added: str
) -> None:
    seed_bug(monkeypatch, prefill_body, removed, added)
    with pytest.raises(RuntimeError, match=NOTICED):
        run_prefill(TINY, ONE)


def test_values_that_nobody_sees_must_be_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softmax, "clear", lambda *_: None)
    out, _ = run_prefill(TINY, ONE)
    assert np.isnan(out).any()


def test_without_a_bug_nothing_is_caught() -> None:
    assert_within_rule(TINY, *run_prefill(TINY, ONE))


ONE = Tiling(num_programs=1, stages=2, block_rows=128)
TINY = make_case([(120, 2)], page_size=64, kv_heads=1, group=3)
"""Two tiles of three heads: both rings turn once."""
