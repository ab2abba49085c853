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
from pallas_kernels.grouped_matmul import (
    GroupedImplementation,
    choose_grouped_matmul,
    grouped_matmul,
)
from pallas_kernels.page_ops import CopyImplementation, copy_pages
from pallas_kernels.paged_attention import (
    AttentionImplementation,
    DecodePlan,
    KernelTilings,
    PagedKV,
    PartialStates,
    RowView,
    StepPlan,
    item_heads,
    merge_and_unpack,
    paged_attention,
)
from pallas_kernels.paged_attention import make_plan as attention_plan


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
        return _implementations(GroupedImplementation, _multiply, peers)
    if spec.kind == "copy":  # XLA's copy is the reference implementation
        return _implementations(CopyImplementation, _copy, {})
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
    return _implementations(AttentionImplementation, _attend, peers)


def _implementations(
    names: typing.TypeAliasType,
    prepare: Callable[[Any, Any], KernelRun],
    peers: dict[str, Callable[..., KernelRun]],
) -> list[Implementation]:
    """Returns the implementations of a literal type, then the peers."""
    own_implementations = {
        x: functools.partial(prepare, x) for x in typing.get_args(names.__value__)
    }
    implementations = own_implementations | peers
    return [Implementation(x, x in peers, call) for x, call in implementations.items()]


def _attend(name: AttentionImplementation, problem: AttentionProblem) -> KernelRun:
    """Prepares paged attention; a plan, if there is one, is made in advance."""
    q, k_pages = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (problem.q, problem.k_pages)
    )
    window = problem.options.get("window")

    @jax.jit
    def make_plan(*rows):
        view = RowView(*rows, window=window)
        width = problem.kv.value_width
        return attention_plan(q, k_pages, view, value_width=width, implementation=name)

    def attend(plan, q, k_pages, v_pages, *rows):
        kv = PagedKV(k_pages, v_pages, *problem.kv[2:])
        view = RowView(*rows, window=window)
        return paged_attention(
            q, kv, view, problem.scoring, plan=plan, implementation=name
        ).out

    def plan_anew(index: int) -> StepPlan | None:
        # A plan depends on lengths and not on page ids: equal for all turns.
        return make_plan(*problem.view(problem.page_ids[0])[:-1])

    plan = plan_anew(0)
    turns = [
        (plan, *arrays, *problem.view(page_ids)[:-1])
        for page_ids in problem.page_ids
        for arrays in [(problem.q, problem.k_pages, problem.v_pages)]
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
    problem: AttentionProblem, plan: DecodePlan, tilings: KernelTilings
) -> Callable[[int], jax.Array]:
    """Returns a call that merges random partial results of the decode kernel's shapes.

    Args:
      problem: attention problem.
      plan: decode plan of the problem.
      tilings: tilings; the decode tiling is used.
    """
    heads = problem.spec.heads
    tiling = tilings.decode
    items, group = item_heads(heads.q_heads, heads.kv_heads)
    *blocks, width = jax.eval_shape(
        lambda q: row_packing.pack_queries(q, plan.packing, kv_heads=items), problem.q
    ).shape
    blocks = (*blocks, heads.value_width or width)
    parts = (tiling.num_programs, 2, *blocks[2:])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (blocks, blocks[:-1], parts, parts[:-1])
    states = PartialStates(
        *map(functools.partial(jax.random.normal, dtype=jnp.float32), keys, shapes)
    )
    merge = functools.partial(
        merge_and_unpack, group=group, tiling=tiling, dtype=problem.q.dtype
    )
    merge = jax.jit(merge)
    return lambda index: merge(states, plan.schedule.ends, plan.packing)


def _copy(name: CopyImplementation, problem: CopyProblem) -> KernelRun:
    """Prepares copies in place: every call gets the pages of the previous one."""
    jitted = jax.jit(
        lambda pages, source, target: copy_pages(
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


def _multiply(name: GroupedImplementation, problem: GroupedProblem) -> KernelRun:
    """Prepares grouped products; grouping rows into blocks is part of the call."""
    choose_grouped_matmul(problem.x, problem.w, implementation=name)
    function = functools.partial(grouped_matmul, implementation=name)
    return jax_peers.run_grouped_matmul(function, problem)
