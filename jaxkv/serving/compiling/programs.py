"""Compiled programs of an engine, for one device or for a mesh.

All engines of a process with equal configurations share them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from jaxkv import engine
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import EngineState
from jaxkv.memory import Eviction, Pages, Prefix, Staging, export_prefix, import_prefix
from jaxkv.parallel import REPLICATED, map_over_mesh, place_state, specs_on, state_specs
from jaxkv.serving import host_swap
from pallas_kernels import devices


class Programs(NamedTuple):
    """Jitted functions; all consume the state, or the staging buffer.

    Attributes:
      run_steps: `step.run_steps`; all arguments after params, state and clock by name.
      submit: `requests.submit`.
      cancel: `requests.cancel`.
      drain: `requests.drain`.
      forget_kv: `plan_application.forget_kv`.
      move: `host_swap.apply_transfer`.
      take_out: `prefix_transfer.export_prefix`; consumes no argument.
      bring_in: `prefix_transfer.import_prefix`.
    """

    run_steps: Any
    submit: jax.stages.Wrapped
    cancel: jax.stages.Wrapped
    drain: jax.stages.Wrapped
    forget_kv: jax.stages.Wrapped
    move: jax.stages.Wrapped
    take_out: jax.stages.Wrapped
    bring_in: jax.stages.Wrapped


class ProgramShardings(NamedTuple):
    """Mesh and shardings that programs are compiled for; hashable.

    Attributes:
      mesh: the devices.
      specs: partition specs of the leaves of parameters and state, in order.
      trees: tree structures of parameters and state.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]
    trees: tuple[jax.tree_util.PyTreeDef, jax.tree_util.PyTreeDef]


def _take_out(state: EngineState, prefix: Prefix) -> tuple[Pages, Int32[Array, ""]]:
    assert state.prefixes is not None
    return export_prefix(state.pages, state.prefixes, prefix)


def _bring_in(
    state: EngineState, prefix: Prefix, sent: Pages, rule: Eviction | None
) -> tuple[EngineState, Int32[Array, ""]]:
    assert state.prefixes is not None
    pages, pool, cache, num = import_prefix(
        state.pages, state.pool, state.prefixes, prefix, sent, rule
    )
    return state._replace(pages=pages, pool=pool, prefixes=cache), num


_STEP_OPTIONS: Any = {
    "static_argnames": (
        "config",
        "forward",
        "logits_fn",
        "speculation",
        "may_draft",
        "kinds",
    ),
    "donate_argnames": "state",
    "compiler_options": devices.COMPILER_OPTIONS,
}

make_state = jax.jit(engine.init, static_argnames="config")
"""`engine.init` as one program, where operation by operation would be some thirty; the
pages are passed through."""

LOCAL = Programs(
    jax.jit(engine.run_steps, **_STEP_OPTIONS),
    jax.jit(engine.submit, static_argnames="config", donate_argnames="state"),
    jax.jit(engine.cancel, donate_argnames="state"),
    jax.jit(engine.drain, donate_argnames="state"),
    jax.jit(engine.forget_kv, static_argnames="config", donate_argnames="state"),
    jax.jit(host_swap.apply_transfer, donate_argnames="staging"),
    jax.jit(_take_out),
    jax.jit(_bring_in, donate_argnames="state"),
)
"""Programs for one device."""


@functools.cache
def mesh_programs(how: ProgramShardings) -> Programs:
    """Returns the programs for a mesh.

    Every device runs the whole program with its part of the pages. Devices communicate
    only where the layers do; replicated parts of the state stay equal, since all
    devices compute the same.
    """
    weights, state_of = map(jax.tree.unflatten, how.trees, how.specs)
    replicated = REPLICATED
    staging_of = state_of.staging
    out_specs = state_of, replicated

    def mapped(
        function: Callable,
        *in_specs: PyTree[PartitionSpec],
        out_specs: PyTree[PartitionSpec],
    ) -> Callable:
        return map_over_mesh(function, how.mesh, in_specs, out_specs)

    def run_steps(params, state, clock, *, policy, eviction, grammars=None, **static):
        def run(params, state, clock, policy, eviction, grammars):
            return engine.run_steps(
                params,
                state,
                clock,
                policy=policy,
                eviction=eviction,
                grammars=grammars,
                **static,
            )

        in_specs = weights, state_of, *(replicated,) * 4
        over_mesh = mapped(run, *in_specs, out_specs=out_specs)
        return over_mesh(params, state, clock, policy, eviction, grammars)

    def submit(state, batch, *, config):
        run = functools.partial(engine.submit, config=config)
        return mapped(run, state_of, replicated, out_specs=out_specs)(state, batch)

    def cancel(state, request_ids, samples, *, eviction):
        def run(state, request_ids, samples, eviction):
            return engine.cancel(state, request_ids, samples, eviction=eviction)

        in_specs = state_of, replicated, replicated, replicated
        over_mesh = mapped(run, *in_specs, out_specs=state_of)
        return over_mesh(state, request_ids, samples, eviction)

    def forget_kv(state, *, config, eviction):
        def run(state, eviction):
            return engine.forget_kv(state, config=config, eviction=eviction)

        return mapped(run, state_of, replicated, out_specs=state_of)(state, eviction)

    drain = mapped(engine.drain, state_of, out_specs=out_specs)
    # Transfers between host and staging buffer have the sharding of its pages.
    kind: Any = host_swap.HostTransfer  # of specs, not of arrays
    moves_of = kind(*[replicated] * len(kind._fields))
    if isinstance(staging_of, Staging):
        moves_of = moves_of._replace(pages=staging_of.pages)
    move = mapped(
        host_swap.apply_transfer, staging_of, replicated, moves_of, out_specs=staging_of
    )
    pages_of = state_of.pages
    take_out = mapped(_take_out, state_of, replicated, out_specs=(pages_of, replicated))
    in_specs = state_of, replicated, pages_of, replicated
    bring_in = mapped(_bring_in, *in_specs, out_specs=out_specs)
    return Programs(
        jax.jit(run_steps, **_STEP_OPTIONS),
        jax.jit(submit, static_argnames="config", donate_argnames="state"),
        jax.jit(cancel, donate_argnums=0),
        jax.jit(drain, donate_argnums=0),
        jax.jit(forget_kv, static_argnames="config", donate_argnames="state"),
        jax.jit(move, donate_argnums=0),
        jax.jit(take_out),
        jax.jit(bring_in, donate_argnums=0),
    )


def select_programs(
    params: PyTree[ArrayOrShape], state: EngineState, mesh: Mesh | None
) -> tuple[Programs, EngineState]:
    """Returns the programs, and the state placed on their devices.

    Raises:
      ValueError: the parameters are not on the mesh, or it does not divide the pages.
    """
    if mesh is None:
        return LOCAL, state
    specs = specs_on(params, mesh)
    state = place_state(state, mesh)
    return mesh_programs(program_shardings(mesh, specs, state_specs(state))), state


def program_shardings(
    mesh: Mesh, params: PyTree[PartitionSpec], state: PyTree[PartitionSpec]
) -> ProgramShardings:
    """Describes the partition specs of parameters and state."""
    flat = [jax.tree.flatten(tree) for tree in (params, state)]
    return ProgramShardings(mesh, *zip(*((tuple(a), b) for a, b in flat), strict=True))
