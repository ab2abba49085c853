"""The engine's program, compiled from shapes, and the copies in its text."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv import parallel, scheduling
from jaxkv.engine import EngineConfig, Speculation, init, run_steps
from jaxkv.models import (
    ModelConfig,
    PagedForward,
    make_model_pages,
    param_axes,
    param_shapes,
)
from jaxkv.parallel import degree_of, experts_of, fit_config, param_specs, state_specs
from jaxkv.scheduling import Policy
from jaxkv.serving.compiling import programs

UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""XLA assigns buffers before LLVM, so LLVM's optimization level can be 0."""
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=32,
    max_positions=256,
)


CONFIG = EngineConfig(
    page_size=16, max_slots=4, max_length=256, token_budget=64, steps_per_call=4
)


SMALL = 1024
LARGE = 16384
"""Pages in the two pools; 12.6 and 201 MB."""


def pages_of(model: ModelConfig, config: EngineConfig, dtype: Any = "float32") -> Any:
    return jax.eval_shape(lambda: make_model_pages(model, config, dtype=dtype))


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def steps(
    num_pages: int,
    numerics: Any = "fast",
    policy: Policy | None = None,
    *,
    model: ModelConfig = MODEL,
    config: EngineConfig = CONFIG,
    dtype: Any = "float32",
    stacked: bool = False,
    speculation: Speculation | None = None,
) -> tuple[Any, Any, Any]:
    """Returns `run_steps`, the shapes of its arguments, and those of its pages."""
    config = dataclasses.replace(config, num_pages=num_pages, numerics=numerics)
    pages = pages_of(model, config, dtype)
    # The pages as an argument: `init` would allocate them.
    memory = None if speculation is None else speculation.drafter.init(config)
    state = jax.eval_shape(functools.partial(init, config), pages, memory)
    run = functools.partial(
        run_steps,
        config=config,
        forward=PagedForward(model, numerics),
        policy=scheduling.fcfs() if policy is None else policy,
        speculation=speculation,
    )
    clock = jax.ShapeDtypeStruct((2,), jnp.int32)
    params = param_shapes(model, dtype=dtype, stacked=stacked)
    return run, (params, state, clock), pages


def steps_on(
    mesh: Mesh, *, model: ModelConfig, config: EngineConfig, dtype: Any
) -> tuple[Any, Any, Any]:
    """As `steps`, for an engine on a mesh of devices that need not exist.

    Returns:
      `run_steps`; the shapes of its arguments, with shardings; and the shapes of one
      device's pages.
    """
    fitted = fit_config(model, degree_of(mesh), num_expert=experts_of(mesh))
    _, (params, state, clock), _ = steps(
        config.num_pages, model=fitted, config=config, dtype=dtype
    )
    weights = param_specs(param_axes(fitted), mesh)
    parts = state_specs(state)
    sharded_programs = programs.mesh_programs(
        programs.program_shardings(mesh, weights, parts)
    )

    def run(params: Any, state: Any, clock: Any) -> Any:
        # As the engine does: compiler options apply only to the outermost jit.
        return sharded_programs.run_steps.__wrapped__(
            params,
            state,
            clock,
            policy=scheduling.fcfs(),
            eviction=None,
            config=config,
            forward=PagedForward(fitted),
            logits_fn=None,
            speculation=None,
        )

    def with_shardings(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            tree,
            parallel.shardings(tree, specs, mesh),
        )

    params = with_shardings(params, weights)
    state = with_shardings(state, parts)
    local_pages = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype),
        state.pages,
    )
    return run, (params, state, clock), local_pages


def compile_steps(*args: Any, **options: Any) -> tuple[Any, Any]:
    """The program of `run_steps`, and the shapes of its pages."""
    run, arguments, pages = steps(*args, **options)
    lowered = jax.jit(run, donate_argnums=1).lower(*arguments)
    return lowered.compile(UNOPTIMISED), pages


def temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def copies(program: Any, pages: Any) -> list[str]:
    """Returns the copies in a program that are as large as the first leaf."""
    return large_copies(program.as_text(), pages)


def large_copies(text: str, pages: Any) -> list[str]:
    size = jax.tree.leaves(pages)[0].size
    copy_lines = []
    for line in text.splitlines():
        match = re.search(r"= \w+\[([\d,]*)\]\S* copy(-start)?\(", line)
        if match and math.prod(int(n) for n in match[1].split(",") if n) >= size:
            copy_lines.append(line.strip())
    return copy_lines
