"""Named shapes: hand-computed counts, arrays, and the checks of results."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import SETS, problems, specs
from pallas_kernels.bench.specs import Spec
from pallas_kernels.paged_attention import paged_attention

TINY = [spec for spec in SETS["tiny"] if isinstance(spec, Spec) and spec.kind != "copy"]
OTHERS = [
    Spec(
        kind="decode",
        batch=2,
        context=21,
        heads=specs.TINY_LATENT,
        page_size=8,
        dtype="float32",
    ),
    Spec(
        kind="prefix",
        batch=3,
        context=40,
        shared=24,
        heads=specs.TINY,
        page_size=8,
        dtype="float32",
    ),
    Spec(
        kind="prefill",
        batch=2,
        rows=19,
        heads=specs.TINY,
        page_size=8,
        dtype="float32",
    ),
]


def test_names_are_complete() -> None:
    for shapes in SETS.values():
        assert len({spec.name for spec in shapes}) == len(shapes)
        assert len(set(shapes)) == len(shapes)
    spec_names = [spec.name for spec in SETS["real"]]
    assert "decode-b8-8k-32x8-p16" in spec_names
    assert "decode-b32-4k-9x3d64-p16" in spec_names
    assert "tree-b8-t26-8k-32x8-p16" in spec_names
    assert "prefix-b64-s8k-8448-32x8-p16" in spec_names
    assert "decode-b64-8k-32x8-p16-one_long" in spec_names
    assert SETS["tiny"][0].name == "decode-b3-40-4x2d16-p8-uniform-float32"


def test_counts_equal_hand_computed_ones() -> None:
    one = Spec(kind="decode", batch=1, context=1024)
    # 1025 tokens, 2 x 8 KV heads of 128 numbers; 2 x 32 heads of queries and results.
    assert one.bytes == (1025 * 16 + 64) * 128 * 2
    assert one.flops == 1025 * 4 * 32 * 128
    prefix = Spec(kind="prefix", batch=64, context=8192 + 256, shared=8192)
    assert prefix.bytes == ((8192 + 64 * 257) * 16 + 64 * 64) * 128 * 2
    assert prefix.flops == 64 * 8449 * 4 * 32 * 128
    prefill = Spec(kind="prefill", batch=2, rows=512)
    assert prefill.flops == 2 * (512 * 513 // 2) * 4 * 32 * 128
    copy = Spec(kind="copy", batch=64)
    assert copy.bytes == 64 * 2 * 8 * 16 * 128 * 2
    assert copy.flops == 0
    # A latent row is read once as keys and values, and once more by heads 64 to 127.
    latent = dataclasses.replace(one, heads=specs.DEEPSEEK_V3_LATENT, page_size=64)
    assert latent.bytes == (2 * 1025 * 576 + 128 * (576 + 512)) * 2
    assert latent.flops == 1025 * 2 * 128 * (576 + 512)
    lite = dataclasses.replace(latent, heads=specs.DEEPSEEK_V2_LITE_LATENT)
    assert lite.bytes == (1025 * 576 + 16 * (576 + 512)) * 2
    half = dataclasses.replace(one, dtype="float32")
    assert half.bytes == 2 * one.bytes


@pytest.mark.parametrize("lengths", ["equal", "uniform", "lognormal", "one_long"])
def test_contexts_have_the_requested_spread(lengths: Any) -> None:
    spec = Spec(kind="decode", batch=64, context=4096, shared=64, lengths=lengths)
    contexts = spec.contexts()
    assert contexts.max() == 4096
    assert contexts.min() >= 64
    np.testing.assert_array_equal(contexts, spec.contexts())
    if lengths != "equal":
        assert contexts.mean() < 0.75 * 4096
    if lengths == "one_long":
        assert sorted(contexts)[-2] == 64 + (4096 - 64) / 16


@pytest.mark.parametrize("spec", [*TINY, *OTHERS], ids=lambda spec: spec.name)
def test_the_reference_solves_the_problem(spec: Spec) -> None:
    problem = problems.make_attention(spec, num_turns=2)

    @jax.jit
    def attend(page_ids: jax.Array) -> jax.Array:
        view = problem.view(page_ids)
        return paged_attention(problem.q, problem.kv, view, problem.scoring).out

    for turn in range(2):
        out = attend(problem.page_ids[turn])
        # Its samples are from the first table.
        assert (problem.error(out) < 1e-5) == (turn == 0)
    pages = np.asarray(problem.page_ids)
    owned = [set(table[table < len(problem.k_pages)]) for table in pages]
    assert not owned[0] & owned[1]
    # Unused pages, and positions that no row attends to, are NaN.
    num_pages = len(problem.k_pages)
    assert num_pages == sum(map(len, owned)) + problems.NUM_SPARE
    tokens = spec.shared + int(np.sum(problem.lengths() - spec.shared))
    per_token = spec.heads.kv_heads * spec.heads.head_dim
    assert int(jnp.sum(~jnp.isnan(problem.k_pages))) == 2 * tokens * per_token
    assert (problem.v_pages is None) == (spec.heads == specs.TINY_LATENT)


def test_a_wrong_answer_fails_the_check() -> None:
    problem = problems.make_attention(TINY[0])
    rows, head, expected = problem.samples[0]
    group = expected.shape[1]
    out = np.zeros(problem.q.shape, np.float32)
    assert problem.error(jnp.asarray(out)) == pytest.approx(1)
    for rows, head, expected in problem.samples:
        out[rows, head * group : (head + 1) * group] = expected
    assert problem.error(jnp.asarray(out)) < 1e-6
    out[rows[0], head * group, 0] = np.nan
    assert np.isnan(problem.error(jnp.asarray(out)))


def test_ancestors_form_a_tree() -> None:
    spec = next(spec for spec in TINY if spec.kind == "tree")
    problem = problems.make_attention(spec)
    masks = np.asarray(problem.ancestors).reshape(spec.batch, spec.rows, spec.rows)
    for mask in masks:
        for row in range(spec.rows):
            assert mask[row, row]
            assert not mask[row, row + 1 :].any()
            # Ancestors of ancestors are ancestors.
            for kin in np.flatnonzero(mask[row]):
                assert not (mask[kin] & ~mask[row]).any()


def test_copies_read_no_target() -> None:
    spec = next(spec for spec in SETS["tiny"] if spec.kind == "copy")
    assert isinstance(spec, Spec)
    problem = problems.make_copy(spec)
    ids = np.concatenate([problem.source, problem.target])
    assert sorted(ids) == list(range(2 * spec.batch))
    assert problem.pages.nbytes == 2 * spec.batch * spec.page_bytes


def test_invalid_shapes_are_refused() -> None:
    make: Any = inspect.unwrap(Spec)
    with pytest.raises(ValueError, match=r"batch=0"):
        make(kind="decode", batch=0)
    with pytest.raises(ValueError, match=r"shared=24 must be whole pages"):
        make(kind="prefix", batch=1, context=40, shared=24)
