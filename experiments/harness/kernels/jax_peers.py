"""Attention and grouped matrix products of JAX itself, as peers.

Converting keys and values to the layout of a peer is not timed.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.kernels import calls
from experiments.harness.kernels.calls import KernelRun
from pallas_kernels import devices
from pallas_kernels.bench import AttentionProblem, GroupedProblem, Spec

MAX_PEER_BYTES = 12_000_000_000
"""Largest intermediate array of a peer: scores, or products of all rows with all
experts."""


def gather_and_sum(problem: AttentionProblem) -> KernelRun:
    """Gathers all pages of all sequences and attends with plain operations."""
    spec = problem.spec
    length = problem.page_ids.shape[2] * problem.spec.page_size
    _limit_scores(spec, length)
    shape = (spec.batch, length, spec.heads.kv_heads, -1)

    def attend(q, page_ids, mask, *pages):
        arrays = [x[page_ids].swapaxes(2, 3).reshape(shape) for x in pages]
        v = arrays[-1][..., : spec.heads.value_width]
        return _sum(spec, "bshd", q, arrays[0], v, mask)

    mask = jnp.asarray(_make_mask(problem, length))
    pages = [problem.k_pages, problem.v_pages]
    pages = [jnp.nan_to_num(x) for x in pages if x is not None]
    turns = [(problem.q, ids, mask, *pages) for ids in _within(problem)]
    return calls.make_run(problem, attend, turns)


def contiguous(
    implementation: Literal["xla", "cudnn"], problem: AttentionProblem
) -> KernelRun:
    """`jax.nn.dot_product_attention` on contiguous keys and values."""
    spec = problem.spec
    heads = problem.spec.heads
    length = int(problem.lengths().max())
    if implementation == "xla":
        _limit_scores(spec, length)
    else:
        _ask_for_gpu("cuDNN needs a GPU")
        if spec.dtype == "float32":
            raise ValueError("cuDNN takes bfloat16 and float16")
    options: dict[str, Any] = {}
    mask = []
    if spec.kind == "prefill":
        options["is_causal"] = True
    elif spec.rows == 1:
        options["key_value_seq_lengths"] = jnp.asarray(problem.lengths(), jnp.int32)
    else:
        mask = [jnp.asarray(_make_mask(problem, length))[:, None]]

    def attend(q, k, v, *mask):
        q = q.reshape(spec.batch, spec.rows, heads.q_heads, heads.head_dim)
        out = jax.nn.dot_product_attention(
            q, k, v, None, *mask, implementation=implementation, **options
        )
        return out.reshape(-1, heads.q_heads, heads.head_dim)

    return calls.make_run(problem, attend, _without_pages(problem, length, 2, mask))


def head_major(problem: AttentionProblem) -> KernelRun:
    """Attention by two matrix products on contiguous keys and values, head-major."""
    spec = problem.spec
    length = int(problem.lengths().max())
    _limit_scores(spec, length)
    visible = _make_mask(problem, length)
    # No mask if every row sees all positions.
    mask = [] if visible.all() else [jnp.asarray(visible)]
    attend = functools.partial(_sum, spec, "bhsd")
    return calls.make_run(problem, attend, _without_pages(problem, length, 1, mask))


def triton(problem: AttentionProblem) -> KernelRun:
    """Deprecated paged attention of JAX (Triton), with head-major pages."""
    spec = problem.spec
    _ask_for_gpu("Triton needs a GPU")
    if spec.rows > 1:
        raise ValueError("needs one row per sequence")
    # Imported by a string: it is a peer, like another framework.
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    k, v = (
        jnp.nan_to_num(x).swapaxes(0, 1) for x in (problem.k_pages, _values(problem))
    )
    lengths = jnp.asarray(problem.lengths(), jnp.int32)
    scale = spec.heads.head_dim**-0.5
    tables = _within(problem)
    # Table lengths must be multiples of the split.
    tables = jnp.pad(tables, [(0, 0), (0, 0), (0, -tables.shape[2] % 16)])

    def attend(q, k, v, page_ids):
        q = q * jnp.asarray(scale, q.dtype)
        return module.paged_attention(q, k, v, page_ids, lengths)

    turns = [(problem.q, k, v, page_ids) for page_ids in tables]
    return calls.make_run(problem, attend, turns)


def run_grouped_matmul(
    function: Callable[..., jax.Array], problem: GroupedProblem
) -> KernelRun:
    """Prepares a grouped matrix product, `function(rows, weights, group_sizes)`."""
    turns = [(problem.x, problem.w, sizes) for sizes in problem.group_sizes]
    return calls.make_run(problem, function, turns)


def all_experts(problem: GroupedProblem) -> KernelRun:
    """Multiplies every row with every expert, and selects that of its own expert."""
    spec = problem.spec
    product_bytes = spec.experts.groups * problem.x.nbytes * spec.columns // spec.width
    if product_bytes > MAX_PEER_BYTES:
        raise ValueError(f"{product_bytes=} must be at most {MAX_PEER_BYTES}")

    def by_all(x, w, group_sizes):
        row = jnp.arange(x.shape[0])
        ends = jnp.cumsum(group_sizes)
        group = jnp.sum(ends[None, :] <= row[:, None], axis=1)
        everywhere = jnp.einsum("ri,gio->gro", x, w)
        return jnp.take_along_axis(everywhere, group[None, :, None], axis=0)[0]

    return run_grouped_matmul(by_all, problem)


def ragged_dot(problem: GroupedProblem) -> KernelRun:
    """Example kernel of JAX, in Mosaic GPU as well, with its own block sizes."""
    spec = problem.spec
    _ask_for_gpu("its kernel needs a GPU")
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    few = spec.num_rows <= 64 * spec.experts.groups

    def in_blocks(x, w, group_sizes):
        return module.ragged_dot(
            x,
            w,
            group_sizes=group_sizes,
            block_m=64 if few else 128,
            block_n=128,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=8 if spec.columns % (8 * 128) == 0 else 1,
        )

    return run_grouped_matmul(in_blocks, problem)


def _values(problem: AttentionProblem) -> jax.Array:
    """Returns the values; raises an error for latent rows, which have none."""
    if problem.v_pages is None:
        raise ValueError("it needs values besides the keys, unlike latent rows")
    return problem.v_pages


def _ask_for_gpu(why: str) -> None:
    if devices.current_target().platform != "gpu":
        raise ValueError(why)


def _limit_scores(spec: Spec, length: int) -> None:
    score_bytes = 4 * spec.batch * spec.rows * spec.heads.q_heads * length
    if score_bytes > MAX_PEER_BYTES:
        raise ValueError(f"{score_bytes=} must be at most {MAX_PEER_BYTES}")


def _sum(
    spec: Spec, order: str, q: jax.Array, k: jax.Array, v: jax.Array, *masks: jax.Array
) -> jax.Array:
    """Computes attention for keys and values with axes in the order `order`."""
    heads = spec.heads
    q = q.reshape(spec.batch, spec.rows, heads.kv_heads, -1, heads.head_dim)
    scores = jnp.einsum(f"bthgd,{order}->bhgts", q, k).astype(jnp.float32)
    scores = scores * heads.head_dim**-0.5
    for mask in masks:
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(f"bhgts,{order}->bthgd", weights, v)
    return out.reshape(-1, heads.q_heads, v.shape[-1])


def _without_pages(
    problem: AttentionProblem, length: int, head_axis: int, mask: list[jax.Array]
) -> list[tuple[jax.Array, ...]]:
    """Returns the arguments of all turns, with contiguous keys, values and a mask."""
    spec = problem.spec
    num_heads = problem.spec.heads.kv_heads
    middle = (num_heads, -1) if head_axis == 1 else (-1, num_heads)

    @jax.jit
    def lay_out(pages, page_ids):
        # Heads are axis 2, between pages and positions within a page.
        kv = jnp.nan_to_num(pages)[page_ids].swapaxes(head_axis, head_axis + 1)
        kv = kv.reshape(spec.batch, *middle, spec.heads.head_dim)
        return jax.lax.slice_in_dim(kv, 0, length, axis=3 - head_axis)

    pools = (problem.k_pages, _values(problem))
    return [
        (problem.q, *(lay_out(pages, ids) for pages in pools), *mask)
        for ids in _within(problem)
    ]


def _make_mask(problem: AttentionProblem, length: int) -> np.ndarray:
    """Returns the mask of visible positions per row: `[batch, rows, length]`."""
    spec = problem.spec
    every = range(spec.batch)
    return np.stack(
        [problem.attention_mask(i, np.arange(spec.rows), length) for i in every]
    )


def _within(problem: AttentionProblem) -> jax.Array:
    """Returns the page tables with ids clipped to the pool."""
    return jnp.minimum(problem.page_ids, problem.k_pages.shape[0] - 1)
