"""Everyone who is timed on a shape. Ours go through the doors, under every name there.

Peers of jax are in `peers.jax_peers`; those of other frameworks run elsewhere.
"""

import functools
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.kernels import calls
from experiments.bench.kernels.calls import MAX_ERROR, Budget, Implementation, Run
from experiments.bench.kernels.peers import jax_peers
from experiments.bench.peer_process import PeerProcess
from pallas_kernels import row_packing
from pallas_kernels.bench import (
    CopyProblem,
    GroupedProblem,
    GroupedSpec,
    Problem,
    Spec,
    Timing,
)
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.page_ops import copy
from pallas_kernels.paged_attention import api, dispatch, merging
from pallas_kernels.paged_attention.decode_plan import DecodePlan

FOLDER = Path(__file__).with_name("peers")
ELSEWHERE = {
    "torch SDPA": (FOLDER / "sdpa.py", "Sdpa"),
    "torch cuDNN": (FOLDER / "sdpa.py", "CuDnn"),
    "FlexAttention": (FOLDER / "flex.py", "Flex"),
    "FlexAttention paged": (FOLDER / "flex.py", "FlexPaged"),
    "FlashInfer": (FOLDER / "flashinfer_peer.py", "FlashInfer"),
}
"""Peers of other frameworks, in processes of their own: file and class by name."""
SHARE = 0.1
"""Of the time, for each: some compile for seconds a shape."""


def of(spec: Spec | GroupedSpec) -> list[Implementation]:
    """All that do the work of a spec here, ours first."""
    if isinstance(spec, GroupedSpec):
        return of_products()
    return of_copies() if spec.kind == "copy" else of_attention()


def of_attention() -> list[Implementation]:
    """All that attend to pages, ours first."""
    peers = {
        "XLA gather": jax_peers.gather_and_sum,
        "XLA contiguous": functools.partial(jax_peers.contiguous, "xla"),
        "XLA head-major": jax_peers.head_major,
        "cuDNN contiguous": functools.partial(jax_peers.contiguous, "cudnn"),
        "Pallas Triton": jax_peers.triton,
    }
    return _everyone(api.AttentionImplementation, _attend, peers)


def of_copies() -> list[Implementation]:
    """All that copy pages, ours first; XLA's own way is our reference."""
    return _everyone(copy.CopyImplementation, _copy, {})


def of_products() -> list[Implementation]:
    """All that multiply rows by the weights of their group, ours first."""
    peers = {
        "XLA ragged_dot": functools.partial(jax_peers.multiply, lax.ragged_dot),
        "XLA all experts": jax_peers.all_experts,
        "Pallas ragged_dot": jax_peers.ragged_dot,
    }
    return _everyone(grouped_api.GroupedImplementation, _multiply, peers)


def elsewhere(peer: PeerProcess, budget: Budget, num_calls: int) -> Implementation:
    """A peer that is ready, as something to time.

    Args:
      peer: of `ELSEWHERE`.
      budget: of time; who has not answered when it is over is ended.
      num_calls: calls that it times.
    """

    def prepare(problem: Problem) -> Run:
        said = peer.ask(_question(problem, num_calls), budget.left_s())
        if "refused" in said:
            raise ValueError(said["refused"])
        timing = dict.fromkeys(Timing._fields) | said["timing"]
        return Run(
            call=lambda index: None,
            error=lambda: said["error"],
            measure=lambda: Timing(**timing),
            plan_s=said["plan_s"],
            how=said["how"],
        )

    return Implementation(peer.name, True, prepare, SHARE)


def _everyone(
    names: typing.TypeAliasType,
    ours: Callable[[Any, Any], Run],
    peers: dict[str, Callable[[Any], Run]],
) -> list[Implementation]:
    """Ours under every name of a literal, then peers."""
    mine = {x: functools.partial(ours, x) for x in typing.get_args(names.__value__)}
    everyone = mine | peers
    return [Implementation(x, x in peers, call) for x, call in everyone.items()]


def _attend(name: Any, problem: Problem) -> Run:
    """The plan, where there is one, is made before."""
    q, k_pages = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (problem.q, problem.k_pages)
    )
    rows = (problem.positions, problem.slots)
    options = {"context": problem.context, "ancestors": problem.ancestors}

    @jax.jit
    def make_plan(page_ids, positions, slots, options):
        return api.make_plan(
            q, k_pages, page_ids, positions, slots, **options, implementation=name
        )

    def attend(options, plan, *arrays):
        return api.paged_attention(
            *arrays, **options, implementation=name, plan=plan
        ).out

    def plan_anew(index: int) -> Any:
        # It knows lengths and no pages: the same for all turns.
        return make_plan(problem.page_ids[0], *rows, options)

    plan, pages = plan_anew(0), (problem.k_pages, problem.v_pages)
    turns = [
        (options, plan, problem.q, *pages, page_ids, *rows)
        for page_ids in problem.page_ids
    ]
    run = calls.make_run(problem, attend, turns)
    if plan is None:
        return run
    # That of rows of slots with few of them; others leave nothing to merge.
    merge = None if plan.few is None else merge_alone(problem, plan.few, plan.tiling)
    return run._replace(plan=plan_anew, merge=merge)


def merge_alone(
    problem: Problem, plan: DecodePlan, tilings: dispatch.Tilings
) -> Callable[[int], Any]:
    """Makes a call that merges states of the shapes that the decode kernel leaves.

    Args:
      problem: what is attended to.
      plan: made for it.
      tilings: it is made with that of decode.
    """
    heads, tiling = problem.spec.heads, tilings.decode
    blocks = jax.eval_shape(
        lambda q: row_packing.pack_queries(q, plan.packing, kv_heads=heads.kv_heads),
        problem.q,
    ).shape
    parts = (tiling.num_programs, 2, *blocks[2:])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (blocks, blocks[:-1], parts, parts[:-1])
    states = merging.CutStates(
        *map(functools.partial(jax.random.normal, dtype=jnp.float32), keys, shapes)
    )
    group = problem.spec.heads.q_heads // problem.spec.heads.kv_heads
    merge = functools.partial(
        merging.merge_and_unpack, group=group, tiling=tiling, dtype=problem.q.dtype
    )
    merge = jax.jit(merge)
    return lambda index: merge(states, plan.schedule.ends, plan.packing)


def _copy(name: Any, problem: CopyProblem) -> Run:
    """Copies in place: every call takes the pages that the last one left."""
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

    return Run(call, error)


def _multiply(name: Any, problem: GroupedProblem) -> Run:
    """Cutting rows into blocks is part of the call."""
    grouped_api.choose(problem.x, problem.w, implementation=name)
    function = functools.partial(grouped_api.grouped_matmul, implementation=name)
    return jax_peers.multiply(function, problem)


def _question(problem: Problem, num_calls: int) -> dict[str, Any]:
    """Describes a problem to a peer, which draws its own numbers."""
    spec, kin = problem.spec, problem.ancestors
    trees = (spec.batch, spec.rows, spec.rows)
    return {
        "contexts": spec.contexts().tolist(),
        "rows": spec.rows,
        "shared": spec.shared,
        "heads": list(spec.heads),
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "ancestors": None if kin is None else kin.reshape(trees).tolist(),
        "num_turns": problem.num_turns,
        "num_calls": num_calls,
        "max_error": MAX_ERROR[spec.dtype],
    }
