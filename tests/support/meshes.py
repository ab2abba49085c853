"""Models, windows and requests to distribute over simulated CPU devices.

A small model for training with its windows, and requests of all kinds for an engine.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxkv
from jaxkv.engine import EngineConfig, EngineParts
from jaxkv.memory import Rows
from jaxkv.models import ModelConfig, PagedForward, make_model_pages
from jaxkv.parallel import layout, tensor
from jaxkv.sampling import Sampling

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=48,
    max_positions=64,
)
BATCH = 4
SEQ = 32
WINDOWS = np.asarray(
    jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, 61), np.int32
)

ALL_AT_ONCE: dict[str, Any] = {
    "num_pages": 24,
    "page_size": 4,
    "max_slots": 4,
    "max_length": 64,
    "token_budget": 24,
    "max_swap_pages": 8,
    "max_beams": 2,
    "max_logprobs": 2,
    "prefix_cache": True,
    "debug": True,
}
"""An engine with few pages: prefix cache hits and swapping occur."""
PAGE_SIZE = 8
LENGTHS = 13, 7
"""Tokens of two prompts of two chunks each: 16 rows, which eight devices
divide, and 4, which all eight devices replicate."""
CHUNKS = (0, 9), (9, 13)
PROMPTS = [list(range(3, 20)), list(range(3, 17)), [5, 9, 5, 9, 5], [7] * 11]
ASKS = [
    Sampling(max_tokens=14, temperature=0.7, seed=1, n=2),
    Sampling.greedy(max_tokens=16, logprobs=2),
    Sampling(max_tokens=9, beam_width=2),
    Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=5),
]


def answers(folder: Path, mesh: Mesh | None, **fields: Any) -> list[Any]:
    """Returns the tokens of all answers of an engine with `ALL_AT_ONCE`."""
    return answers_of(jaxkv.Engine.load(folder, mesh=mesh, **(ALL_AT_ONCE | fields)))


def engine_on(
    config: ModelConfig, params: Any, mesh: Mesh | None, **fields: Any
) -> jaxkv.Engine:
    """Makes an engine with `ALL_AT_ONCE` of a model without a folder."""
    bounds = EngineConfig(**(ALL_AT_ONCE | fields))
    if mesh is not None:
        params = tensor.place_params(config, params, mesh)
        config = tensor.fit_config(
            config, layout.degree_of(mesh), num_expert=layout.experts_of(mesh)
        )
    pages = make_model_pages(config, bounds)
    forward = PagedForward(config)
    return jaxkv.Engine(EngineParts(params, forward, pages, bounds, mesh=mesh))


def answers_of(engine: jaxkv.Engine) -> list[Any]:
    """Returns the tokens of all answers, and checks replicated state."""
    completions = engine.generate(PROMPTS, ASKS)
    check_the_same_everywhere(engine)
    return [[answer.tokens for answer in one.answers] for one in completions]


def check_the_same_everywhere(engine: jaxkv.Engine) -> None:
    """Asserts that replicated state is equal on all devices."""
    for leaf in jax.tree.leaves(engine.state):
        if leaf.sharding.is_fully_replicated:
            first, *others = (np.asarray(x.data) for x in leaf.addressable_shards)
            for other in others:
                np.testing.assert_array_equal(first, other)


def divided(
    config: ModelConfig,
    params: Any,
    mesh: Mesh,
    page_size: int = PAGE_SIZE,
    taps: tuple[int, ...] = (),
) -> tuple[Any, Any, Any]:
    """Returns a jitted forward step, its parameters, and empty pages."""
    degree = layout.degree_of(mesh)
    num_expert = layout.experts_of(mesh)
    params = tensor.place_params(config, params, mesh)
    config = tensor.fit_config(config, degree, num_expert=num_expert)
    sizes = EngineConfig(num_pages=11, page_size=page_size, max_length=16)
    pages = make_model_pages(config, sizes, taps=taps)
    specs = layout.pages_specs(pages)
    pages = layout.place_tree(pages, specs, mesh)

    def run(params: Any, pages: Any, rows: Any) -> Any:
        outputs = PagedForward(config, taps=taps)(params, pages, rows)
        return outputs.logits, outputs.pages

    mapped = layout.map_over_mesh(
        run,
        mesh,
        (layout.specs_on(params, mesh), specs, layout.REPLICATED),
        (layout.REPLICATED, specs),
    )
    return jax.jit(mapped, donate_argnums=1), params, pages


def chunk(first: int, end: int) -> Rows:
    """Returns rows `first` to `end` of both prompts, clipped to their lengths."""
    positions = [
        np.arange(first, max(first, min(end, n)), dtype=np.int32) for n in LENGTHS
    ]
    slot = np.repeat(np.arange(2, dtype=np.int32), [len(x) for x in positions])
    position = np.concatenate(positions)
    return Rows(
        token=jnp.asarray(position + 3 + 20 * slot),
        position=jnp.asarray(position),
        slot=jnp.asarray(slot),
        page_ids=jnp.asarray([[7, 2], [5, -1]], jnp.int32),
        logit_rows=jnp.arange(len(slot), dtype=jnp.int32),
    )
