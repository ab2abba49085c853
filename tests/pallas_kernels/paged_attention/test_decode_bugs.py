"""Bugs seeded into the decode kernel: the emulator notices every one of them."""

import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper import decode_body
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import NOTICED, run, seed_bug
from tests.support.kernel_cases import assert_within_rule, make_case

K_FULL = "plgpu.barrier_wait(shared.k_full.at[stage])"
V_FREE = "plgpu.barrier_arrive(shared.v_free.at[stage])"
PRODUCT = "out = softmax.add_product(state.out, weights, shared.v.at[stage], emulated)"
BETWEEN = "\n            "
BUGS = {
    "back-pressure": ("plgpu.barrier_wait(free.at[stage])", "pass", 2),
    "wait for keys": (K_FULL, "pass", 2),
    "early release": (PRODUCT + BETWEEN + V_FREE, V_FREE + BETWEEN + PRODUCT, 2),
    "commit": ("= lse\n        plgpu.commit_smem()", "= lse", 2),
}
MORE_BUGS = {
    "wait for values": (K_FULL.replace("k_full", "v_full"), "pass", 2),
    "back-pressure of queries": (
        "plgpu.barrier_wait(shared.q_free.at[stage])",
        "pass",
        6,  # else keys that are not free yet hold the queries back, too
    ),
    "wait for results": ("plgpu.wait_smem_to_gmem(0)", "pass", 2),
    "wait for the last results": (
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        "pass",
        2,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("removed", "added", "stages"),
    [
        *(pytest.param(*bug, id=name) for name, bug in BUGS.items()),
        *(
            pytest.param(*bug, id=name, marks=pytest.mark.slow)
            for name, bug in MORE_BUGS.items()
        ),
    ],
)
def test_seeded_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, removed: str, added: str, stages: int
) -> None:
    seed_bug(monkeypatch, decode_body, removed, added)
    with pytest.raises(RuntimeError, match=NOTICED):
        run(TINY, Tiling(num_programs=1, stages=stages))


def test_values_that_nobody_sees_must_be_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_body, "_clear", lambda *_: None)
    out, _ = run(TINY, Tiling(num_programs=1, stages=2))
    assert np.isnan(out).any()


def test_without_a_bug_nothing_is_caught() -> None:
    assert_within_rule(TINY, *run(TINY, Tiling(num_programs=1, stages=2)))


TINY = make_case([(64, 1)], page_size=64, kv_heads=3, group=1)
"""Two tiles of three heads: both rings turn once."""
