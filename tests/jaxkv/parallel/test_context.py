"""Pages of every sequence on several devices: the answers of one, and what is sent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.memory import page_parts
from jaxkv.models import checkpoints
from jaxkv.parallel import collectives, layout, make_mesh
from jaxkv.sampling import Sampling
from tests.support.folders import GOLDEN

pytestmark = pytest.mark.usefixtures("fast_compile")

ALL_AT_ONCE: dict[str, Any] = {
    "num_pages": 20,
    "page_size": 8,
    "max_slots": 4,
    "max_length": 64,
    "token_budget": 24,
    "max_swap_pages": 8,
    "max_beams": 2,
    "max_logprobs": 2,
    "prefix_cache": True,
    "debug": True,
}
"""The smallest parts are of one token, on eight devices."""
PROMPTS = [list(range(3, 20)), list(range(3, 17)), [5, 9, 5, 9, 5], [7] * 11]
ASKS = [
    Sampling(max_tokens=14, temperature=0.7, seed=1, n=2),
    Sampling.greedy(max_tokens=16, logprobs=2),
    Sampling(max_tokens=9, beam_width=2),
    Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=5),
]


def answers(mesh: Any, family: str = "llama", **fields: Any) -> list[Any]:
    engine = jaxkv.Engine.load(
        GOLDEN / family, mesh=mesh, **(ALL_AT_ONCE | fields)
    )
    found = engine.generate(PROMPTS, ASKS)
    return [[each.tokens for each in one.answers] for one in found]


@pytest.mark.thorough
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_answers_are_those_of_one_device(degree: int) -> None:
    assert answers(make_mesh(context=degree)) == answers(None)
