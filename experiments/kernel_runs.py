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

from pallas_kernels import (
    attention,
    copying,
    merging,
    packing,
    planning,
    problems,
    targets,
)
from pallas_kernels.benchmarking import Timing
from pallas_kernels.problems import CopyProblem, Problem
from pallas_kernels.specs import Spec

MAX_ERROR = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest error, by type, with which an answer counts as one."""
MAX_SCORE_BYTES = 12_000_000_000
"""Scores that a peer without blocks would have to hold."""


class Run(NamedTuple):
    """An implementation on a shape.

    Attributes:
      call: makes call number i; returns arrays to wait for.
      error: how far a result is from the right one, as `problems.error` says it.
      measure: gives the times of calls made elsewhere; None where `call` is timed here.
      plan: makes what `call` was given ready, once a step for all layers, and is timed
        apart; None where there is nothing to prepare.
      merge: puts arrays together as `call` does when its kernel is done, and is timed
        apart, too; None where there is nothing to merge.
      plan_s: seconds of a plan that was timed elsewhere.
      how: the way it was done, where there are several.
    """

    call: Callable[[int], Any]
    error: Callable[[], float]
    measure: Callable[[], Timing] | None = None
    plan: Callable[[int], Any] | None = None
    merge: Callable[[int], Any] | None = None
    plan_s: float | None = None
    how: str = ""


class Implementation(NamedTuple):
    """Something that is timed.

    Attributes:
      name: as rows give it.
      is_peer: whether it is held against ours.
      prepare: makes a run; refuses with a ValueError that says why.
      has_share: whether it may use a share of the time alone.
    """

    name: str
    is_peer: bool
    prepare: Callable[[Any], Run]
    has_share: bool = False


def of(spec: Spec) -> list[Implementation]:
    """All that do the work of a spec here, ours first."""
    return of_copies() if spec.kind == "copy" else of_attention()


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
        "XLA head-major": _head_major,
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
    """Goes through the door; the plan, where there is one, is made before."""
    q, k_pages = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (problem.q, problem.k_pages)
    )

    @jax.jit
    def make_plan(page_ids, positions, slots, context, ancestors):
        return attention.make_plan(
            *(q, k_pages, page_ids, positions, slots),
            context=context,
            ancestors=ancestors,
            implementation=name,
        )

    def attend(
        q, k_pages, v_pages, page_ids, positions, slots, context, ancestors, plan
    ):
        return attention.paged_attention(
            *(q, k_pages, v_pages, page_ids, positions, slots),
            context=context,
            ancestors=ancestors,
            implementation=name,
            plan=plan,
        ).out

    rest = (problem.positions, problem.slots, problem.context, problem.ancestors)
    # It knows lengths and no pages: the same for all turns.
    plan = make_plan(problem.page_ids[0], *rest)
    turns = [
        (problem.k_pages, problem.v_pages, page_ids, *rest, plan)
        for page_ids in problem.page_ids
    ]
    run = _run(problem, attend, turns)
    if plan is None:
        return run
    run = run._replace(plan=lambda index: make_plan(problem.page_ids[0], *rest))
    if isinstance(plan, planning.Plan):
        run = run._replace(merge=merge_alone(problem, plan))
    return run


def merge_alone(problem: Problem, plan: planning.Plan) -> Callable[[int], Any]:
    """Makes a call that merges states of the shapes that the decode kernel leaves.

    Args:
      problem: what is attended to.
      plan: made for it.
    """
    heads, schedule = problem.spec.heads, plan.schedule
    blocks = jax.eval_shape(
        lambda q: packing.pack_queries(q, plan.packing, kv_heads=heads.kv_heads),
        problem.q,
    ).shape
    parts = (*schedule.cut_of.shape, *blocks[2:])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (blocks, blocks[:-1], parts, parts[:-1])
    states = [
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    merge = jax.jit(merging.merge_parts)
    return lambda index: merge(*states, schedule.cut_of, schedule.cut_items)


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


def _head_major(problem: Problem) -> Run:
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
