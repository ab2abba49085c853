"""jax's own ways to attend, beside ours: over pages, and over contiguous memory.

Bringing keys and values into the layout that each asks for is not timed.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.kernels import calls
from experiments.bench.kernels.calls import Run
from pallas_kernels import devices
from pallas_kernels.bench import Problem

MAX_SCORE_BYTES = 12_000_000_000
"""Scores that a peer without blocks would have to hold."""


def gather_and_sum(problem: Problem) -> Run:
    """Gathers all pages of all sequences and sums, as one would write it."""
    spec, length = problem.spec, problem.page_ids.shape[2] * problem.spec.page_size
    _limit_scores(problem, length)
    batch, rows, heads = spec.batch, spec.rows, spec.heads
    scale = heads.head_dim**-0.5

    def attend(q, k_pages, v_pages, page_ids, seen):
        k, v = (
            x[page_ids].swapaxes(2, 3).reshape(batch, length, heads.kv_heads, -1)
            for x in (k_pages, v_pages)
        )
        q = q.reshape(batch, rows, heads.kv_heads, -1, heads.head_dim)
        scores = jnp.einsum("bthgd,bshd->bhgts", q, k).astype(jnp.float32) * scale
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhgts,bshd->bthgd", weights, v)
        return out.reshape(batch * rows, heads.q_heads, heads.head_dim)

    seen = jnp.asarray(_seen(problem, length))
    k, v = (jnp.nan_to_num(x) for x in (problem.k_pages, problem.v_pages))
    turns = [(k, v, ids, seen) for ids in _within(problem)]
    return calls.make_run(problem, attend, turns)


def contiguous(problem: Problem, implementation: Any) -> Run:
    """`jax.nn.dot_product_attention` on keys and values without pages."""
    spec, heads = problem.spec, problem.spec.heads
    if implementation == "cudnn":
        if devices.current().platform != "gpu":
            raise ValueError("cuDNN needs a GPU")
        if spec.dtype == "float32":
            raise ValueError("cuDNN takes bfloat16 and float16")
    length = int(problem.lengths().max())
    if implementation == "xla":
        _limit_scores(problem, length)
    shape = (spec.batch, -1, heads.kv_heads, heads.head_dim)

    def lay_out(pages, page_ids):
        found = jnp.nan_to_num(pages)[page_ids].swapaxes(2, 3).reshape(shape)
        return found[:, :length]

    straighten = jax.jit(lay_out)
    options: dict[str, Any] = {}
    mask = []
    if spec.kind == "prefill":
        options["is_causal"] = True
    elif spec.rows == 1:
        options["key_value_seq_lengths"] = jnp.asarray(problem.lengths(), jnp.int32)
    else:
        mask = [jnp.asarray(_seen(problem, length))[:, None]]

    def attend(q, k, v, *mask):
        q = q.reshape(spec.batch, spec.rows, heads.q_heads, heads.head_dim)
        out = jax.nn.dot_product_attention(
            *(q, k, v, None, *mask), implementation=implementation, **options
        )
        return out.reshape(-1, heads.q_heads, heads.head_dim)

    turns = [
        (straighten(problem.k_pages, ids), straighten(problem.v_pages, ids), *mask)
        for ids in _within(problem)
    ]
    return calls.make_run(problem, attend, turns)


def head_major(problem: Problem) -> Run:
    """Two products on keys and values without pages, each head's side by side."""
    spec, heads = problem.spec, problem.spec.heads
    length = int(problem.lengths().max())
    _limit_scores(problem, length)
    shape = (spec.batch, heads.kv_heads, -1, heads.head_dim)
    by_head = (spec.batch, spec.rows, heads.kv_heads, -1, heads.head_dim)
    scale = heads.head_dim**-0.5

    def lay_out(pages, page_ids):
        found = jnp.nan_to_num(pages)[page_ids].swapaxes(1, 2).reshape(shape)
        return found[:, :, :length]

    straighten = jax.jit(lay_out)
    seen = _seen(problem, length)
    # Where all of them see all there is, nobody would ask.
    mask = [] if seen.all() else [jnp.asarray(seen)]

    def attend(q, k, v, *mask):
        scores = jnp.einsum("bthgd,bhsd->bhgts", q.reshape(by_head), k)
        scores = scores.astype(jnp.float32) * scale
        for seen in mask:
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhgts,bhsd->bthgd", weights, v)
        return out.reshape(-1, heads.q_heads, heads.head_dim)

    turns = [
        (straighten(problem.k_pages, ids), straighten(problem.v_pages, ids), *mask)
        for ids in _within(problem)
    ]
    return calls.make_run(problem, attend, turns)


def triton(problem: Problem) -> Run:
    """The paged attention of jax itself, deprecated: pages lie head after head."""
    spec = problem.spec
    if devices.current().platform != "gpu":
        raise ValueError("Triton needs a GPU")
    if spec.rows > 1:
        raise ValueError("one row a sequence is all it takes")
    # Not imported by name: it is a peer here, as another framework would be.
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    k, v = (
        jnp.nan_to_num(x).swapaxes(0, 1) for x in (problem.k_pages, problem.v_pages)
    )
    lengths = jnp.asarray(problem.lengths(), jnp.int32)
    scale = spec.heads.head_dim**-0.5
    tables = _within(problem)
    # Tables must be whole splits.
    width = -(-tables.shape[2] // 16) * 16
    tables = jnp.pad(tables, [(0, 0), (0, 0), (0, width - tables.shape[2])])

    def attend(q, k, v, page_ids):
        q = q * jnp.asarray(scale, q.dtype)
        return module.paged_attention(q, k, v, page_ids, lengths)

    return calls.make_run(problem, attend, [(k, v, page_ids) for page_ids in tables])


def _limit_scores(problem: Problem, length: int) -> None:
    spec = problem.spec
    score_bytes = 4 * spec.batch * spec.rows * spec.heads.q_heads * length
    if score_bytes > MAX_SCORE_BYTES:
        raise ValueError(f"{score_bytes=} of scores are more than {MAX_SCORE_BYTES}")


def _seen(problem: Problem, length: int) -> np.ndarray:
    """Which places each row sees: `[batch, rows, length]`."""
    spec, place = problem.spec, np.arange(length)
    shape = (spec.batch, spec.rows, length)
    if problem.ancestors is None:
        position = np.asarray(problem.positions)
        return (place[None, :] <= position[:, None]).reshape(shape)
    seen = np.zeros(shape, bool)
    masks = np.asarray(problem.ancestors).reshape(spec.batch, spec.rows, -1)
    for row, mask, context in zip(seen, masks, spec.contexts(), strict=True):
        row[:, :context] = True
        row[:, context : context + spec.rows] = mask
    return seen


def _within(problem: Problem) -> jax.Array:
    """The tables with a page of the pool in every place."""
    return jnp.minimum(problem.page_ids, problem.k_pages.shape[0] - 1)
