"""All implementations for a shape: kernels of this project, and peers in JAX.

Peers in other frameworks run in separate processes, only in `bench kernels`.
"""

import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.harness.kernels import calls, jax_peers
from experiments.harness.kernels.calls import Implementation, KernelRun
from pallas_kernels import row_packing
from pallas_kernels.bench import (
    AttentionProblem,
    CopyProblem,
    GroupedProblem,
    GroupedSpec,
    Spec,
)
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.page_ops import copy
from pallas_kernels.paged_attention import api, decode_plan, dispatch, merging
from pallas_kernels.paged_attention.decode_plan import DecodePlan


def implementations_of(spec: Spec | GroupedSpec) -> list[Implementation]:
    """Returns all implementations for a spec, those of this project first."""
    if spec.kind == "grouped":
        peers = {
            "XLA ragged_dot": functools.partial(
                jax_peers.run_grouped_matmul, lax.ragged_dot
            ),
            "XLA all experts": jax_peers.all_experts,
            "Pallas ragged_dot": jax_peers.ragged_dot,
        }
        return _implementations(grouped_api.GroupedImplementation, _multiply, peers)
    if spec.kind == "copy":  # XLA's copy is the reference implementation
        return _implementations(copy.CopyImplementation, _copy, {})
    return attention_implementations()


def attention_implementations() -> list[Implementation]:
    """Returns all implementations of paged attention, those of this project first."""
    peers = {
        "XLA gather": jax_peers.gather_and_sum,
        "XLA contiguous": functools.partial(jax_peers.contiguous, "xla"),
        "XLA head-major": jax_peers.head_major,
        "cuDNN contiguous": functools.partial(jax_peers.contiguous, "cudnn"),
        "Pallas Triton": jax_peers.triton,
    }
    return _implementations(api.AttentionImplementation, _attend, peers)


def _implementations(
    names: typing.TypeAliasType,
    own: Callable[[Any, Any], KernelRun],
    peers: dict[str, Callable[[Any], KernelRun]],
) -> list[Implementation]:
    """Returns the implementations of a literal type, then the peers."""
    own_implementations = {
        x: functools.partial(own, x) for x in typing.get_args(names.__value__)
    }
    implementations = own_implementations | peers
    return [Implementation(x, x in peers, call) for x, call in implementations.items()]


def _attend(name: Any, problem: AttentionProblem) -> KernelRun:
    """Prepares paged attention; a plan, if there is one, is made in advance."""
    q, k_pages = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (problem.q, problem.k_pages)
    )
    rows = (problem.positions, problem.slots)
    trees = {"context": problem.context, "ancestors": problem.ancestors}
    window = problem.options.get("window")

    @jax.jit
    def make_plan(page_ids, positions, slots, trees):
        options: dict[str, Any] = trees | {"window": window, "implementation": name}
        options |= {"value_width": problem.options.get("value_width")}
        return api.make_plan(q, k_pages, page_ids, positions, slots, **options)

    def attend(trees, plan, *arrays):
        options = trees | problem.options
        return api.paged_attention(
            *arrays, **options, implementation=name, plan=plan
        ).out

    def plan_anew(index: int) -> Any:
        # A plan depends on lengths and not on page ids: equal for all turns.
        return make_plan(problem.page_ids[0], *rows, trees)

    plan, pages = plan_anew(0), (problem.k_pages, problem.v_pages)
    turns = [
        (trees, plan, problem.q, *pages, page_ids, *rows)
        for page_ids in problem.page_ids
    ]
    run = calls.make_run(problem, attend, turns)
    if plan is None:
        return run
    # Only the kernel for few rows per slot has partial results to merge.
    merge = (
        None if plan.few is None else make_merge_call(problem, plan.few, plan.tiling)
    )
    return run._replace(plan=plan_anew, merge=merge)


def make_merge_call(
    problem: AttentionProblem, plan: DecodePlan, tilings: dispatch.KernelTilings
) -> Callable[[int], Any]:
    """Returns a call that merges random partial results of the decode kernel's shapes.

    Args:
      problem: attention problem.
      plan: decode plan of the problem.
      tilings: tilings; the decode tiling is used.
    """
    heads, tiling = problem.spec.heads, tilings.decode
    items, group = decode_plan.item_heads(heads.q_heads, heads.kv_heads)
    *blocks, width = jax.eval_shape(
        lambda q: row_packing.pack_queries(q, plan.packing, kv_heads=items), problem.q
    ).shape
    blocks = (*blocks, heads.value_width or width)
    parts = (tiling.num_programs, 2, *blocks[2:])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (blocks, blocks[:-1], parts, parts[:-1])
    states = merging.PartialStates(
        *map(functools.partial(jax.random.normal, dtype=jnp.float32), keys, shapes)
    )
    merge = functools.partial(
        merging.merge_and_unpack, group=group, tiling=tiling, dtype=problem.q.dtype
    )
    merge = jax.jit(merge)
    return lambda index: merge(states, plan.schedule.ends, plan.packing)


def _copy(name: Any, problem: CopyProblem) -> KernelRun:
    """Prepares copies in place: every call gets the pages of the previous one."""
    jitted = jax.jit(
        lambda pages, source, target: copy.copy_pages(
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

    return KernelRun(call, error)


def _multiply(name: Any, problem: GroupedProblem) -> KernelRun:
    """Prepares grouped products; grouping rows into blocks is part of the call."""
    grouped_api.choose_grouped_matmul(problem.x, problem.w, implementation=name)
    function = functools.partial(grouped_api.grouped_matmul, implementation=name)
    return jax_peers.run_grouped_matmul(function, problem)
