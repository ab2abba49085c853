"""Rules of eviction: a custom rule, the rules of the package, and errors."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.memory.prefixes import prefix_eviction
from jaxkv.models import PagedForward
from jaxkv.sampling import Sampling
from tests.support import engines
from tests.support.engines import Ask

# [example: a rule of eviction]


class KeepPrefixes(NamedTuple):
    """Evicts pages deep in a sequence first, even if they were used recently."""

    def priority(self, uses: prefix_eviction.Uses) -> jax.Array:
        return -uses.depth


# [end of the example]

CONFIG = dataclasses.replace(engines.SERVED, num_pages=16, prefix_cache=True)
FORWARD = PagedForward(engines.MODEL, CONFIG.numerics)
LENGTH = 40
"""Returns the tokens of a prompt, which takes 10 or 11 of the 16 pages."""


def prompts() -> list[Ask]:
    rng = np.random.default_rng(2)
    wish = Sampling.greedy(max_tokens=4, ignore_eos=True)
    return [Ask(name, rng.integers(0, 61, LENGTH).tolist(), wish) for name in range(5)]


def cached_tokens(rule: prefix_eviction.Eviction) -> list[int]:
    """Returns the cached tokens of each prompt when all are sent a second time."""
    first = engines.serve(prompts(), CONFIG, eviction=rule)
    again = engines.serve(prompts(), CONFIG, state=first.state, eviction=rule)
    assert again.tokens == first.tokens
    return [again.outcomes[ask.request_id].num_cached for ask in prompts()]


@pytest.mark.slow
def test_custom_rule_decides_evictions() -> None:
    # A cycle larger than the cache: the next prompt is always the one evicted last.
    assert cached_tokens(prefix_eviction.LRU()) == [0] * 5
    num_cached = cached_tokens(KeepPrefixes())
    assert sum(num_cached) > 0
    assert max(num_cached) < LENGTH // 2


class FloatPriority(NamedTuple):
    """A rule with invalid ranks: floats."""

    def priority(self, uses: prefix_eviction.Uses) -> Any:
        return uses.depth / 2


def test_ranks_of_another_type_are_refused() -> None:
    state = jax.eval_shape(lambda: engines.start(CONFIG))
    with pytest.raises(
        ValueError, match="FloatPriority ranks pages by float32, not by int32"
    ):
        jax.eval_shape(
            lambda state: jaxkv.cancel(
                state, jnp.zeros(1, jnp.int32), eviction=FloatPriority()
            ),
            state,
        )


@pytest.mark.slow
def test_engine_uses_the_given_rule() -> None:
    pages = engines.start(CONFIG).pages
    parts = EngineParts(engines.params(), FORWARD, pages, CONFIG)
    engine = jaxkv.Engine(parts, EngineRules(eviction=KeepPrefixes()))
    cached_counts = []
    for ask in [*prompts(), *prompts()]:
        [done] = engine.generate([ask.prompt], ask.sampling)
        cached_counts.append(done.num_cached)
    assert sum(cached_counts) > 0
