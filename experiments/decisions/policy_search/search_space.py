"""Points of the search: weights of a policy and rates of prefix eviction."""

import numpy as np
from jaxtyping import Float

from jaxkv.memory import MAX_RATE_MS, LinearEviction, linear_eviction
from jaxkv.scheduling import LinearScore, linear_score

ADMISSION = ("new_tokens", "cached_tokens", "predicted_tokens", "priority", "younger")
"""Searched features of waiting requests."""
VICTIM = ("length", "younger")
"""Searched features of running requests."""
EVICTION = ("session_ms", "priority_ms", "page_ms")
"""Searched rates of `LinearEviction`, and their values at a coordinate of 1."""
EVICTION_UNIT_MS = (2000, 50, 20)
RULES: tuple[dict[str, float], ...] = (
    {},
    {"new_tokens": 1.0},
    {"new_tokens": 1.0, "session_ms": 1.0},
    {"new_tokens": 1.0, "priority": -0.3},
    {"new_tokens": 1.0, "cached_tokens": -0.2},
    {"predicted_tokens": 1.0},
    {"younger": 1.0},
    {"younger": 1.0, "session_ms": 1.0},
    {"cached_tokens": -1.0},
    {"cached_tokens": -1.0, "page_ms": 1.0},
    {"priority": 1.0},
    {"priority": -1.0, "priority_ms": 1.0},
)
"""Rules of the first stage: first come; fewest new tokens, with the most attained job
or the longest cached prefix or eviction of the youngest job first; shortest context;
oldest job; longest cached prefix; least and most attained job."""
POINT_SIZE = len(ADMISSION) + len(VICTIM) + 3 + len(EVICTION)
"""Coordinates of a point of the search."""


def rules_of(point: Float[np.ndarray, " size"]) -> tuple[LinearScore, LinearEviction]:
    """Returns the rules of a point; those of the origin are FCFS with ageing and LRU.

    The coordinates are the weights of `ADMISSION` and `VICTIM`; logarithms of ageing
    and of the chunk size; the watermark; and the rates of eviction.
    """
    weights = np.clip(point, -9.99, 9.99).tolist()
    end = len(ADMISSION)
    start = len(ADMISSION) + len(VICTIM)
    age, chunk, watermark = weights[start : start + 3]
    rates = np.multiply(weights[start + 3 :], EVICTION_UNIT_MS)
    rates = np.clip(np.round(rates), -MAX_RATE_MS, MAX_RATE_MS).astype(int).tolist()
    policy = linear_score(
        admission=dict(zip(ADMISSION, weights[:end], strict=True)),
        victim=dict(zip(VICTIM, weights[end:start], strict=True)),
        age_per_s=float(np.clip(0.01 * 10.0 ** (0.7 * age), 0.01, 9.99)),
        chunk_size=int(np.clip(2.0 ** (11 + chunk), 64, 2048)),
        watermark=int(np.clip(50 * watermark, 0, 1000)),
    )
    return policy, linear_eviction(**dict(zip(EVICTION, rates, strict=True)))


def point_of(rule: dict[str, float]) -> Float[np.ndarray, " size"]:
    """Returns the point of a rule of `RULES`, with little ageing and whole chunks."""
    names = (*ADMISSION, *[""] * (len(VICTIM) + 3), *EVICTION)
    return np.array([rule.get(name, 0.0) for name in names])
