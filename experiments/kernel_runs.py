"""Kernels and their peers on one shape, ready to be called and checked.

Ours go through the doors, under every name that the doors know. Peers do the same work
in the layouts they ask for; bringing keys and values there is not timed.
"""

import importlib
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention, copying, problems, targets
from pallas_kernels.benchmarking import Timing
from pallas_kernels.problems import CopyProblem, Problem

MAX_SCORE_BYTES = 12_000_000_000
"""Scores that a peer without blocks would have to hold."""


class Run(NamedTuple):
    """An implementation on a shape.

    Attributes:
      call: makes call number i; returns arrays to wait for.
      error: how far a result is from the right one, as `problems.error` says it.
      measure: times so many calls, elsewhere; None where `call` is timed here.
    """

    call: Callable[[int], Any]
    error: Callable[[], float]
    measure: Callable[[int], Timing] | None = None


class Implementation(NamedTuple):
    """Something that is timed.

    Attributes:
      name: as rows give it.
      is_peer: whether it is held against ours.
      prepare: makes a run; refuses with a ValueError that says why.
    """

    name: str
    is_peer: bool
    prepare: Callable[[Any], Run]


def of_attention() -> list[Implementation]:
    """All that attend to pages, ours first."""
    names = typing.get_args(attention.AttentionImplementation.__value__)
    ours = [
        Implementation(name, False, lambda problem, name=name: _ours(problem, name))
        for name in names
    ]
    peers = {
        "XLA gather": _gather_and_sum,
        "XLA contiguous": lambda problem: _contiguous(problem, "xla"),
        "cuDNN contiguous": lambda problem: _contiguous(problem, "cudnn"),
        "Pallas Triton": _triton,
    }
    return [*ours, *(Implementation(x, True, prepare) for x, prepare in peers.items())]


def of_copies() -> list[Implementation]:
    """All that copy pages, ours first; XLA's own way is our reference."""
    names = typing.get_args(copying.CopyImplementation.__value__)
    return [
        Implementation(name, False, lambda problem, name=name: _copy(problem, name))
        for name in names
    ]


def _run(problem: Problem, function: Callable[..., Any], turns: list[Any]) -> Run:
    """Makes a run of a function of the queries and of what turns."""
    jitted = jax.jit(function)

    def call(index: int) -> jax.Array:
        return jitted(problem.q, *turns[index % len(turns)])

    return Run(call, lambda: problems.error(problem, call(0)))


def _ours(problem: Problem, name: Any) -> Run:
    """Goes through the door; the plan, where there is one, is part of the call."""

    def attend(q, k_pages, v_pages, page_ids, positions, slots, context, ancestors):
        return attention.paged_attention(
            *(q, k_pages, v_pages, page_ids, positions, slots),
            context=context,
            ancestors=ancestors,
            implementation=name,
        ).out

    rest = (problem.positions, problem.slots, problem.context, problem.ancestors)
    turns = [
        (problem.k_pages, problem.v_pages, page_ids, *rest)
        for page_ids in problem.page_ids
    ]
    return _run(problem, attend, turns)


def _gather_and_sum(problem: Problem) -> Run:
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
    return _run(problem, attend, turns)


def _contiguous(problem: Problem, implementation: Any) -> Run:
    """`jax.nn.dot_product_attention` on keys and values without pages."""
    spec, heads = problem.spec, problem.spec.heads
    if implementation == "cudnn":
        if targets.current().platform != "gpu":
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
    return _run(problem, attend, turns)


def _triton(problem: Problem) -> Run:
    """The paged attention of jax itself, deprecated: pages lie head after head."""
    spec = problem.spec
    if targets.current().platform != "gpu":
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

    return _run(problem, attend, [(k, v, page_ids) for page_ids in tables])


def _copy(problem: CopyProblem, name: Any) -> Run:
    """Copies in place: every call takes the pages that the last one left."""
    jitted = jax.jit(
        lambda pages, source, target: copying.copy_pages(
            pages, source, target, disjoint=True, implementation=name
        ),
        donate_argnums=0,
    )
    pages = [jnp.copy(problem.pages)]

    def call(index: int) -> None:
        pages[0] = jitted(pages[0], problem.source, problem.target)
        pages[0].block_until_ready()

    def error() -> float:
        call(0)
        wanted = problem.pages.at[problem.target].set(problem.pages[problem.source])
        return 0.0 if bool(jnp.all(wanted == pages[0])) else float("nan")

    return Run(call, error)


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
