"""Seeded bugs in the kernels: the emulator detects each of them."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper import decode_body, prefill_body, softmax
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import NOTICED, run, run_prefill, seed_bug
from tests.support.kernel_cases import assert_within_rule, make_case

# Two tiles of three heads each: both rings wrap around once.
TO_DECODE = make_case([(64, 1)], page_size=64, kv_heads=3, group=1)
CHUNK = make_case([(120, 2)], page_size=64, kv_heads=1, group=3)


TRIES = 25
"""Emulations of which one must detect a bug: the emulator's threads determine which
accesses overlap. The last wait of the prefill kernel shows in one run of three."""


def decode(stages: int = 2) -> Any:
    return run(TO_DECODE, Tiling(num_programs=1, stages=stages))


def prefill() -> Any:
    return run_prefill(CHUNK, Tiling(num_programs=1, stages=2, block_rows=128))


def notices(emulated: Callable[[], Any]) -> bool:
    """Returns True if the emulator detects a bug."""
    try:
        emulated()
    except RuntimeError as error:
        if not re.search(NOTICED, str(error)):
            raise
        return True
    return False


K_FULL = "plgpu.barrier_wait(shared.k_full.at[stage])"
V_FULL = K_FULL.replace("k_full", "v_full")
K_FREE = "plgpu.barrier_arrive(shared.k_free.at[stage])"
V_FREE = K_FREE.replace("k_free", "v_free")
BETWEEN = "\n            "
OF_BOTH = {
    "back-pressure": ("plgpu.barrier_wait(free.at[stage])", "pass"),
    "wait for keys": (K_FULL, "pass"),
    "commit": ("= lse\n        plgpu.commit_smem()", "= lse"),
}
MORE_OF_BOTH = {
    "wait for results": ("plgpu.wait_smem_to_gmem(0)", "pass"),
    "wait for the last results": (
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n        shared.out[",
        "shared.out[",
    ),
}
OF_ROWS = "out = softmax.add_product(state.out, weights, values, emulated)"
OF_ROWS_FREE = "plgpu.barrier_arrive(v_free.at[stage])"
DECODE_BUGS = OF_BOTH | {
    "early release": (
        OF_ROWS + BETWEEN + OF_ROWS_FREE,
        OF_ROWS_FREE + BETWEEN + OF_ROWS,
    ),
}
MORE_DECODE_BUGS = MORE_OF_BOTH | {
    "wait for values": (V_FULL, "pass"),
    "back-pressure of queries": ("plgpu.barrier_wait(shared.q_free.at[stage])", "pass"),
}
OF_CHUNK = "out = softmax.add_product(state.out, weights, values, emulated, meanwhile)"
SCORES = "scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))"
Q_FULL = "plgpu.barrier_wait(shared.q_full.at[half])"
Q_FREE = "plgpu.barrier_arrive(shared.q_free.at[half])"
PREFILL_BUGS = OF_BOTH | {
    "early release": (OF_CHUNK + BETWEEN + V_FREE, V_FREE + BETWEEN + OF_CHUNK),
}
MORE_PREFILL_BUGS = MORE_OF_BOTH | {
    "wait for values": (f"if not masked:\n                {V_FULL}", "pass"),
    "early release of keys": (SCORES + BETWEEN + K_FREE, K_FREE + BETWEEN + SCORES),
    "early release of queries": (Q_FULL, f"{Q_FREE}\n        {Q_FULL}"),
}


def trials(bugs: dict[str, tuple[str, str]], more: dict[str, tuple[str, str]]) -> Any:
    """Some of the bugs; the slow suite has `more`."""
    slow = [pytest.param(*more[name], id=name, marks=pytest.mark.slow) for name in more]
    return pytest.mark.parametrize(
        ("removed", "added"),
        [*(pytest.param(*bugs[name], id=name) for name in bugs), *slow],
    )


@pytest.mark.thorough
@trials(DECODE_BUGS, MORE_DECODE_BUGS)
def test_bugs_of_the_decode_kernel_are_caught(
    monkeypatch: pytest.MonkeyPatch, removed: str, added: str
) -> None:
    seed_bug(monkeypatch, decode_body, removed, added)
    # With few stages, keys that are still in use also delay the queries.
    stages = 6 if "q_free" in removed else 2
    assert any(notices(lambda: decode(stages)) for _ in range(TRIES))


@pytest.mark.thorough
@trials(PREFILL_BUGS, MORE_PREFILL_BUGS)
def test_bugs_of_the_prefill_kernel_are_caught(
    monkeypatch: pytest.MonkeyPatch, removed: str, added: str
) -> None:
    seed_bug(monkeypatch, prefill_body, removed, added)
    assert any(notices(prefill) for _ in range(TRIES))


@pytest.mark.thorough
def test_masked_values_must_be_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_body, "_clear", lambda *_: None)
    assert np.isnan(decode()[0]).any()
    monkeypatch.setattr(softmax, "clear_unseen", lambda *_: None)
    assert np.isnan(prefill()[0]).any()


@pytest.mark.thorough
def test_without_a_bug_no_error_is_raised() -> None:
    assert_within_rule(TO_DECODE, *decode())
    assert_within_rule(CHUNK, *prefill())
