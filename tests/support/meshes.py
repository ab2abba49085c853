"""What is divided over the devices that a CPU plays.

A small model to be trained, and its windows; and requests of all kinds for an engine.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxkv
from jaxkv.engine import EngineConfig
from jaxkv.models import ModelConfig, paged
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
BATCH, SEQ = 4, 32
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
"""An engine whose pages are few: prompts are found again, requests swapped."""
PROMPTS = [list(range(3, 20)), list(range(3, 17)), [5, 9, 5, 9, 5], [7] * 11]
ASKS = [
    Sampling(max_tokens=14, temperature=0.7, seed=1, n=2),
    Sampling.greedy(max_tokens=16, logprobs=2),
    Sampling(max_tokens=9, beam_width=2),
    Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=5),
]


def answers(folder: Path, mesh: Mesh | None, **fields: Any) -> list[Any]:
    """The tokens of all answers of an engine, which `ALL_AT_ONCE` bounds."""
    return answers_of(jaxkv.Engine.load(folder, mesh=mesh, **(ALL_AT_ONCE | fields)))


def engine_on(
    config: ModelConfig, params: Any, mesh: Mesh | None, **fields: Any
) -> jaxkv.Engine:
    """An engine of a model that lies in no folder, which `ALL_AT_ONCE` bounds."""
    bounds = EngineConfig(**(ALL_AT_ONCE | fields))
    if mesh is not None:
        params = tensor.place_params(config, params, mesh)
        config = tensor.fit(
            config, layout.degree_of(mesh), num_expert=layout.experts_of(mesh)
        )
    pages = paged.make_pages(config, bounds)
    forward = paged.PagedForward(config)
    return jaxkv.Engine(params, forward, pages, bounds, mesh=mesh)


def answers_of(engine: jaxkv.Engine) -> list[Any]:
    """The tokens of all answers; devices have the same afterwards."""
    found = engine.generate(PROMPTS, ASKS)
    check_the_same_everywhere(engine)
    return [[each.tokens for each in one.answers] for one in found]


def check_the_same_everywhere(engine: jaxkv.Engine) -> None:
    """What every device has of the state is the same on all."""
    for leaf in jax.tree.leaves(engine.core.state):
        if leaf.sharding.is_fully_replicated:
            first, *others = (np.asarray(x.data) for x in leaf.addressable_shards)
            for other in others:
                np.testing.assert_array_equal(first, other)
