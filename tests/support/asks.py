"""Workloads for a small engine: single requests, groups, and shared prefixes."""

import functools

import numpy as np

from tests.support import engines
from tests.support.engines import TIGHT, Ask, pages_of


@functools.cache
def singles(seed: int = 0, num: int = 24) -> tuple[Ask, ...]:
    """Requests of every kind, some with log-probabilities."""
    return tuple(engines.random_asks(np.random.default_rng(seed), num, scores=True))


@functools.cache
def groups(seed: int = 0, num: int = 16) -> tuple[Ask, ...]:
    """Requests with up to four answers that fit into the tight pool."""
    rng = np.random.default_rng([seed, 5])
    asks = engines.random_asks(
        rng, num, max_prompt=20, max_answer=12, scores=True, max_n=3
    )
    return tuple(ask for ask in asks if pages_of(ask) <= TIGHT.num_pages)


@functools.cache
def alike(seed: int = 0, num: int = 24) -> tuple[Ask, ...]:
    """Requests of every kind; most begin with one of two texts."""
    rng = np.random.default_rng([seed, 9])
    texts = [rng.integers(0, 61, 18).tolist() for _ in range(2)]
    asks = []
    for ask in engines.random_asks(
        rng, num, max_prompt=10, max_answer=10, scores=True, max_n=3
    ):
        begin = texts[rng.integers(2)][: rng.integers(8, 19)]
        asks.append(ask._replace(prompt=begin + ask.prompt))
    return tuple(ask for ask in asks if pages_of(ask) <= TIGHT.num_pages)
