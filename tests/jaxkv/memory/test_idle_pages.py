"""Ranks of idle pages."""

import types
from typing import Any

import jax.numpy as jnp

from jaxkv.memory.prefixes import idle_pages
from tests.support.trees import ints


def test_pages_before_an_idle_page_get_its_rank() -> None:
    idle: Any = types.SimpleNamespace(rank=ints(0, 0, 0))
    joins = jnp.array([[False, True]])
    ranked = jnp.zeros_like(joins)
    rows = ints(2, 0)[None, :]
    ranks = idle_pages._raise_ranks(idle, rows, ranked, joins, ints(0, 5)[None, :])
    assert ranks.tolist() == [5, 0, 5]
