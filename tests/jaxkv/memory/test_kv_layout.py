"""Layouts: a layout with a single leaf works in every operation on pages."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling, memory
from jaxkv.disaggregation import page_messages
from jaxkv.engine import EngineParts, init
from jaxkv.memory import (
    DEFAULT_LAYOUT,
    KVLayout,
    Pages,
    Rows,
    expand_pages,
    gather_pages,
    move_tokens,
    scatter_pages,
    to_host,
)
from jaxkv.memory.page_pool import NO_PAGE
from jaxkv.models import TENSOR
from jaxkv.parallel import pages_specs
from jaxkv.scheduling import fcfs
from jaxkv.serving import LOCAL, HostSpace
from pallas_kernels import quantizing
from pallas_kernels.page_ops import write_rotated_kv
from pallas_kernels.paged_attention import decode_plan
from tests.support import engines, row_layout
from tests.support.asks import groups
from tests.support.attention_cases import attend_arrays, check, make_case, oracle
from tests.support.folders import GOLDEN, ROOT
from tests.support.row_layout import VALUE_WIDTH, WIDTH
from tests.support.trees import assert_same, ints

BOUNDS = dataclasses.replace(engines.TIGHT, num_pages=7)
KINDS: Any = ("model", "int8")


def filled(kind: Any, seed: int = 0) -> Pages:
    """Returns pages of rows with distinct numbers."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(BOUNDS, kv_dtype=kind)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.integers(-99, 99, x.shape), x.dtype),
        row_layout.make_pages(config),
    )


def test_only_memory_accesses_the_leaves() -> None:
    """Checks names and positions of the fields of `Pages`."""
    leaf = re.compile(r"\bpages\.[kv]\b|\bpages\)?\[:2\]|_replace\([kv]=|Pages\([kv]=")
    accesses = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for package in ("jaxkv", "scaling", "experiments")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parent != ROOT / "jaxkv" / "memory"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if leaf.search(line)
    ]
    assert not accesses, "\n".join(accesses)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_as_written(kind: Any) -> None:
    pages = filled(kind)
    rng = np.random.default_rng(1)
    new = rng.normal(size=(3, 1, WIDTH)).astype(np.float32)
    page_ids = ints(5, 2, NO_PAGE).reshape(1, 3)
    rows = Rows(ints(0, 0, 0), ints(0, 6, 9), ints(0, 0, 0), page_ids, ints(0))
    after = pages.layout.write(pages, 1, jnp.asarray(new), None, rows)
    k, v = after.layout.read(after, 1, page_ids)
    assert k.shape == (1, 12, 1, WIDTH)
    atol = 0 if kind == "model" else np.abs(new).max() / 127
    np.testing.assert_allclose(k[0, [0, 6]], new[:2], rtol=0, atol=atol)
    assert not np.asarray(k[0, 8:]).any()
    np.testing.assert_array_equal(v, k[..., :VALUE_WIDTH])
    for layer, ids in ((0, page_ids), (1, ints(0, 1, 3, 4, 6).reshape(1, 5))):
        before, now = (x.layout.read(x, layer, ids)[0] for x in (pages, after))
        np.testing.assert_array_equal(now, before)


def test_layout_refuses_surplus_or_missing_values() -> None:
    pages = DEFAULT_LAYOUT.make((1, 2, 1, 4, 2), "float32")
    rows = Rows(ints(0), ints(0), None, ints(0).reshape(1, 1), ints(0))
    row = jnp.zeros((1, 1, 2))
    layout = KVLayout("model", 1)
    with pytest.raises(ValueError, match="v=None must be an array for KVLayout"):
        pages.layout.write(pages, 0, row, None, rows)
    with pytest.raises(ValueError, match=r"must be None for KVLayout.*value_width=1"):
        layout.write(layout.make((1, 2, 1, 4, 2), "float32"), 0, row, row, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_move_through_host_memory(kind: Any) -> None:
    """Covers host memory, a message, and a copy from page to page."""
    receiver_pages = filled(kind)
    sender_pages = filled(kind, 1)
    ids = ints(4, 0, 3)
    taken = to_host(gather_pages(sender_pages, ids), slice(2))
    assert_same(taken, to_host(sender_pages, np.array([4, 0])))
    layout_identity = {"layout": "rows"}
    message = page_messages.pack(taken, [1] * 8, 0, layout_identity)
    sent = page_messages.unpack(message, receiver_pages, layout_identity).pages
    assert jax.tree.structure(sent) == jax.tree.structure(receiver_pages)
    wide = expand_pages(sent, 5, slice(2))
    after = jax.jit(scatter_pages)(
        receiver_pages, ints(6, 1, NO_PAGE, NO_PAGE, NO_PAGE), wide
    )
    moved = memory.copy(
        receiver_pages, ints(4, NO_PAGE, 0), ints(6, 2, 1), origin=sender_pages
    )
    assert_same(after, moved)
    for old, new, source in zip(
        *map(jax.tree.leaves, (receiver_pages, after, sender_pages)), strict=True
    ):
        np.testing.assert_array_equal(new[:, [6, 1]], source[:, [4, 0]])
        other_pages = [0, 2, 3, 4, 5]
        np.testing.assert_array_equal(new[:, other_pages], old[:, other_pages])
    header = json.loads(message.header)
    header["leaves"][-1][1][1] = 1  # leaves of unequal numbers of pages
    wrong = message._replace(header=json.dumps(header))
    if kind == "int8":
        with pytest.raises(ValueError, match=r"pages of float32 \(2, 1, .* must be"):
            page_messages.unpack(wrong, receiver_pages, layout_identity)
    full = DEFAULT_LAYOUT.make((2, 7, 1, 4, WIDTH), "float32")
    with pytest.raises(ValueError, match=r"arrays of pages must be|must be float32"):
        page_messages.unpack(
            message, jax.tree.map(lambda x: x[..., :3], full), layout_identity
        )


def test_move_covers_all_leaves() -> None:
    rows = filled("model")
    [leaf] = jax.tree.leaves(rows)
    full = Pages(leaf, leaf, DEFAULT_LAYOUT)
    page_ids = ints(5, 0, 2, 3, 6, NO_PAGE).reshape(2, 3)
    source = ints(4, 6, 7, 2, 3, 7)
    target = ints(4, 5, 6, 1, 2, -1)
    move = jax.jit(move_tokens)
    places = page_ids, source.reshape(2, 3), target.reshape(2, 3)
    [moved_leaf], (wanted, _) = (
        jax.tree.leaves(move(x, *places)) for x in (rows, full)
    )
    assert not np.array_equal(moved_leaf, jax.tree.leaves(rows)[0])
    np.testing.assert_array_equal(moved_leaf, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_has_all_leaves(kind: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(engines.TIGHT, kv_dtype=kind)
    pages = jax.tree.map(
        lambda x: jnp.asarray(
            np.random.default_rng(2).integers(-9, 9, x.shape), x.dtype
        ),
        row_layout.make_pages(config),
    )
    state = init(config, pages)
    folder = jaxkv.save_state(tmp_path / "state", state, config)
    loaded = jaxkv.load_state(folder, config, row_layout.make_pages(config))
    assert_same(loaded, state)
    assert loaded.pages.layout == KVLayout(kind, VALUE_WIDTH)
    full = KVLayout(kind).make((2, 16, 1, 4, WIDTH), "float32")
    with pytest.raises(ValueError, match=r"pages\.v\S* is absent in the snapshot"):
        jaxkv.load_state(folder, config, full)


def test_shared_head_is_not_divided() -> None:
    specs = pages_specs(filled("model"))
    assert all(TENSOR not in spec for spec in jax.tree.leaves(specs))
    full = DEFAULT_LAYOUT.make((1, 2, 2, 4, 2), "float32")
    leaves = jax.tree.leaves(pages_specs(full)._replace(features=None))
    assert [spec[2] for spec in leaves] == [TENSOR, TENSOR]


def narrow_values(case: Any) -> Any:
    """Values narrower than the keys."""
    return case._replace(v_pages=case.v_pages[..., :5])


@pytest.mark.parametrize("runs", [[(9, 1), (3, 1)], [(0, 9), (6, 3)]])
def test_attention_with_narrow_values(runs: Any) -> None:
    decode = runs[0][1] == 1
    case = make_case(np.random.default_rng(0), runs, decode=decode)
    out, lse = oracle(case)
    apart = narrow_values(case)
    attention = attend_arrays(*map(_array, apart))
    assert attention.out.shape == (*case.q.shape[:2], 5)
    check(attention, (out[..., :5], lse))
    # Of values that are a part of the keys; keys of no row are NaN.
    part = case._replace(v_pages=case.k_pages)
    out, lse = oracle(part)
    arrays = list(map(_array, part))
    arrays[2] = None
    for numerics in ("fast", "reproducible") if decode else ("fast",):
        attention = attend_arrays(*arrays, value_width=3, numerics=numerics)
        check(attention, (out[..., :3], lse))


def _array(x: Any) -> Any:
    return None if x is None else jnp.asarray(x)


def test_attention_with_shared_scale() -> None:
    case = make_case(np.random.default_rng(3), [(9, 1), (3, 1)], decode=True)
    case = case._replace(k_pages=np.nan_to_num(case.k_pages))
    numbers, scales = quantizing.quantize(jnp.asarray(case.k_pages), "int8")
    q, _, _, *where = map(_array, case)
    both = attend_arrays(
        q, numbers, None, *where, k_scales=scales, value_width=VALUE_WIDTH - 2
    )
    worth = np.asarray(quantizing.dequantize(numbers, scales))
    out, lse = oracle(case._replace(k_pages=worth, v_pages=worth))
    check(both, (out[..., : VALUE_WIDTH - 2], lse))
    with pytest.raises(ValueError, match="v_scales must be given for 8-bit pages"):
        attend_arrays(
            q, numbers, None, *where, k_scales=scales, v_scales=scales, value_width=2
        )


def test_invalid_value_widths_are_refused() -> None:
    case = make_case(np.random.default_rng(0), [(3, 1)], decode=True)
    q, k, v, *where = map(_array, case)
    attend = attend_arrays
    for width in (None, 0, 9):
        allowed = rf"value_width={width} must be in \[1, 8\]"
        with pytest.raises(ValueError, match=allowed):
            attend(q, k, None, *where, value_width=width)
    with pytest.raises(ValueError, match="value_width=5 must be None when"):
        attend(q, k, v, *where, value_width=5)
    with pytest.raises(ValueError, match="up to the last axis"):
        attend(q, k, v[:, :, :2], *where)
    wide = jax.ShapeDtypeStruct((4, 8, 128), "bfloat16")
    pages = jax.ShapeDtypeStruct((9, 2, 16, 128), "bfloat16")
    assert decode_plan.decode_unsupported_reason(wide, pages) is None
    assert (
        decode_plan.decode_unsupported_reason(wide, pages, 64)
        == "value_width=64 must be head_dim=128"
    )
    rotate = inspect.unwrap(write_rotated_kv)
    cos_sin: Any = None
    with pytest.raises(ValueError, match=r"v_pages.shape\[3\]=4 must be qkv.shape"):
        rotate(jnp.zeros((1, 2, 4, 8)), cos_sin, k, v[..., :4], ints(0), ints(0))


def load(layout: Any, **fields: Any) -> jaxkv.Engine:
    bounds: Any = {"num_pages": 20, "page_size": 4, "max_slots": 2, "max_length": 40}
    return jaxkv.Engine.load(GOLDEN / "llama", layout=layout, **bounds, **fields)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"layout": KVLayout}, "must be a KVLayout or None, not a class"),
        ({"kv_dtype": "int8"}, "layout=JoinedLayout("),
        ({"evict": "quest", "evict_budget": 8}, "needs pages of K and V only, with eq"),
    ],
)
def test_a_layout_that_pages_cannot_have(fields: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        load(**{"layout": row_layout.JoinedLayout(), **fields})
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_engine_serves_a_layout_of_a_subclass() -> None:
    prompts = [list(range(3, 30)), [5, 6, 7]] * 2
    answers = []
    for layout in (None, row_layout.JoinedLayout()):
        engine = load(layout, prefix_cache=True)
        completions = engine.generate(prompts, Sampling.greedy(max_tokens=8))
        answers.append([completion.tokens for completion in completions])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_engine_with_row_layout() -> None:
    """Forks, copies, preemption and swapping to the host do not change answers."""
    asks = groups(1, 16)
    answers = []
    for config in (engines.ROOMY, dataclasses.replace(engines.TIGHT, max_swap_pages=8)):
        config = dataclasses.replace(config, kv_dtype="int8")
        space = HostSpace(16, LOCAL.move)
        run = engines.serve(
            asks,
            config,
            fcfs(preemption="swap"),
            state=init(config, row_layout.make_pages(config)),
            weights=row_layout.params(),
            forward=row_layout.forward,
            host=space if config.max_swap_pages else None,
        )
        answers.append({name: outcome.tokens for name, outcome in run.outcomes.items()})
    assert answers[0] == answers[1]
    assert run.info.num_swapped_out.sum() > 5
    assert run.info.num_copied.sum() > 0
    assert run.info.asks_host.any()


@pytest.mark.slow
def test_prefix_transfer_with_row_layout() -> None:
    config = dataclasses.replace(engines.SERVED, prefix_cache=True, kv_dtype="int8")

    def engine() -> jaxkv.Engine:
        pages = row_layout.make_pages(config)
        parts = EngineParts(row_layout.params(), row_layout.forward, pages, config)
        return jaxkv.Engine(parts)

    prompt = list(range(3, 30))
    ask = Sampling.greedy(max_tokens=8)
    sender = engine()
    receiver = engine()
    [wanted] = sender.generate([prompt], ask)
    sent, num = sender.take_prefix(prompt)
    assert num == 6
    assert receiver.bring_prefix(prompt, sent) == num
    [completion] = receiver.generate([prompt], ask)
    assert completion.num_cached == num * config.page_size
    assert completion.tokens == wanted.tokens
    forked = sender.fork()
    assert_same(forked.state.pages, sender.state.pages)
