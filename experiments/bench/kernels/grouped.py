"""Grouped products and their peers on one shape, ready to be called and checked."""

import importlib
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.kernels.calls import Implementation, Run
from pallas_kernels import devices
from pallas_kernels.bench import GroupedProblem, grouped_specs
from pallas_kernels.grouped_matmul import api

MAX_PRODUCT_BYTES = 12_000_000_000
"""Products of all rows with all experts that a peer would have to hold."""


def of_products() -> list[Implementation]:
    """All that multiply rows by the weights of their group, ours first."""
    names = typing.get_args(api.GroupedImplementation.__value__)
    ours = [
        Implementation(name, False, lambda problem, name=name: _ours(problem, name))
        for name in names
    ]
    peers = {
        "XLA ragged_dot": lambda problem: _run(problem, lax.ragged_dot),
        "XLA all experts": _all_experts,
        "Pallas ragged_dot": _pallas,
    }
    return [*ours, *(Implementation(x, True, prepare) for x, prepare in peers.items())]


def _run(problem: GroupedProblem, function: Callable[..., Any]) -> Run:
    """Makes a run of a function of rows, weights and sizes."""
    jitted, sizes = jax.jit(function), list(problem.group_sizes)

    def call(index: int) -> jax.Array:
        return jitted(problem.x, problem.w, sizes[index % len(sizes)])

    return Run(call, lambda: grouped_specs.error(problem, call(0)))


def _ours(problem: GroupedProblem, name: Any) -> Run:
    """Goes through the door; cutting rows into blocks is part of the call."""
    api.choose(problem.x, problem.w, implementation=name)
    return _run(
        problem, lambda *arrays: api.grouped_matmul(*arrays, implementation=name)
    )


def _all_experts(problem: GroupedProblem) -> Run:
    """Every row at every expert, and then the one that was asked for."""
    spec = problem.spec
    product_bytes = spec.experts.groups * problem.x.nbytes * spec.columns // spec.width
    if product_bytes > MAX_PRODUCT_BYTES:
        raise ValueError(f"{product_bytes=} are more than {MAX_PRODUCT_BYTES}")

    def multiply(x, w, group_sizes):
        row, ends = jnp.arange(x.shape[0]), jnp.cumsum(group_sizes)
        group = jnp.sum(ends[None, :] <= row[:, None], axis=1)
        everywhere = jnp.einsum("ri,gio->gro", x, w)
        return jnp.take_along_axis(everywhere, group[None, :, None], axis=0)[0]

    return _run(problem, multiply)


def _pallas(problem: GroupedProblem) -> Run:
    """The example of jax itself, in Mosaic too, with sizes of its own list."""
    spec = problem.spec
    if devices.current().platform != "gpu":
        raise ValueError("its kernel needs a GPU")
    # Not imported by name: it is a peer here, as another framework would be.
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    few = spec.num_rows <= 64 * spec.experts.groups

    def multiply(x, w, group_sizes):
        return module.ragged_dot(
            *(x, w),
            group_sizes=group_sizes,
            block_m=64 if few else 128,
            block_n=128,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=8 if spec.columns % (8 * 128) == 0 else 1,
        )

    return _run(problem, multiply)
