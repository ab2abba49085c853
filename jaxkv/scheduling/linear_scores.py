"""A policy with weights: requests are admitted and preempted by a linear score.

The score of a waiting request is the weighted sum of its features, minus its waiting
time in s times a rate of ageing; the lowest score is admitted first. Of the running
requests, the one with the highest score by other weights is preempted first. All other
decisions are those of `FCFS`.

All arithmetic is in integers: weights are multiples of 0.01, and logarithms have steps
of 1/64. Engine, simulator and any mapped program therefore order equally. Weights are
arrays, so that `vmap` maps a population of policies.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkv import arrays, validation
from jaxkv.memory import LinearEviction
from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.attributes import NO_DEADLINE, NO_SESSION
from jaxkv.scheduling.interface import NO_LIMIT, Counts, Plan

KIND = "linear_score"
"""Name of the policy in a policy file."""
ADMISSION_FEATURES = {
    "new_tokens": "log2(1 + tokens to feed)",
    "cached_tokens": "log2(1 + tokens in the prefix cache)",
    "predicted_tokens": "log2(1 + predicted length, or the limit)",
    "waited": "log2(1 + waiting time in ms)",
    "slack": "log2(1 + ms to the deadline), 30 without one",
    "priority": "priority / 64",
    "younger": "log2(1 + session - smallest session that is visible)",
    "session_running": "log2(1 + running sequences of the session)",
    "session_waiting": "log2(1 + other waiting requests of the session)",
}
"""Features of a waiting request, and their definitions."""
VICTIM_FEATURES = {
    "length": "log2(1 + tokens in K and V)",
    "owned_pages": "log2(1 + pages that preemption frees)",
    "recompute": "log2(1 + tokens to recompute)",
    "remaining": "log2(1 + predicted tokens to come)",
    "lived": "log2(1 + ms since the arrival)",
    "priority": "priority / 64",
    "younger": "log2(1 + session - smallest session that is visible)",
}
"""Features of a running request, and their definitions."""

MAX_WEIGHT = 10.0
"""Largest absolute value of a weight."""
_UNIT = 64
"""Steps of a logarithm, and of a priority."""
_PER_WEIGHT = 100
"""Steps of a weight of 1."""
_MAX_AGE_MS = 1 << 22
"""Longest time that ages a request further: 70 minutes."""
_MAX_DIFFERENCE = 31.25
"""Largest difference between two values of a feature, that of the priority."""


class LinearScore(NamedTuple):
    """Admission and preemption in the order of linear scores; see the module."""

    admission: Int32[Array, " features"]
    """Weights of `ADMISSION_FEATURES`, in hundredths. A positive weight delays."""
    victim: Int32[Array, " features"]
    """Weights of `VICTIM_FEATURES`, in hundredths. A positive weight preempts first."""
    age_per_s: Int32[Array, ""]
    """Decrease of the score in each second of waiting, in hundredths."""
    chunk_size: Int32[Array, ""]
    """Largest number of rows of one prompt in a step."""
    watermark: Int32[Array, ""]
    """Pages kept free at admission while any sequence runs."""

    holds_finished = False

    @property
    def overtaking_s(self) -> float:
        """Bound in s: a request is overtaken only by those that arrive within it.

        Infinite without ageing. A request ages for 70 minutes at most.
        """
        rate = float(self.age_per_s) / _PER_WEIGHT
        weights = np.abs(np.asarray(self.admission)) / _PER_WEIGHT
        bound_s = float(weights.sum()) * _MAX_DIFFERENCE / rate if rate > 0 else np.inf
        return bound_s if bound_s * 1000 <= _MAX_AGE_MS else np.inf

    def plan(self, counts: Counts) -> Plan:
        """Plans one step by `FCFS`, in the order of the scores."""
        c = interface.skip_unmarked(counts)
        waited_ms = _waited_ms(c)
        score = self.admission @ admission_features(c)
        # 64 / 1000 times ms and rate, below 2^29 for 70 minutes at the largest rate.
        age = (waited_ms >> 4) * self.age_per_s // 125 * 128
        worst = self.victim @ victim_features(c)
        if c.group is not None:  # sequences of a request are preempted together
            worst = arrays.take(worst, c.group, fill=0)
        a = interface.attributes_of(c.attributes)
        c = c._replace(attributes=a._replace(priority=worst))
        inner = first_come.fcfs(victim="least_urgent")
        inner = inner._replace(chunk_size=self.chunk_size, watermark=self.watermark)
        return interface.plan_by(inner, c, score - age)


def log2_units(x: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Returns 64 log2(1 + x) of x in [0, 2^30), interpolated linearly and rounded down.

    The error is below 0.09 * 64 + 1. Negative values count as 0.
    """
    x = jnp.clip(x, 0, (1 << 30) - 1) + 1
    power = 31 - jax.lax.clz(x)
    fraction = x - jnp.left_shift(1, power)
    # A product would exceed an int32: the leading 6 bits after the first are taken.
    up = jnp.left_shift(fraction, jnp.maximum(6 - power, 0))
    return power * _UNIT + jnp.right_shift(up, jnp.maximum(power - 6, 0))


def _waited_ms(c: Counts) -> Int32[Array, " head"]:
    a = interface.attributes_of(c.waiting_attributes)
    arrival_ms = jnp.broadcast_to(jnp.asarray(a.arrival_ms, jnp.int32), c.waiting.shape)
    return jnp.clip(-arrival_ms, 0, _MAX_AGE_MS)


class _Sessions(NamedTuple):
    """Sessions of the waiting and the running requests, and the oldest one."""

    waiting: Int32[Array, " head"]
    running: Int32[Array, " order"]
    oldest: Int32[Array, ""]

    @classmethod
    def of(cls, c: Counts) -> "_Sessions":
        waiting, running = (
            jnp.broadcast_to(
                jnp.asarray(interface.attributes_of(x).session, jnp.int32), shape
            )
            for x, shape in (
                (c.waiting_attributes, c.waiting.shape),
                (c.attributes, c.running.shape),
            )
        )
        waiting = jnp.where(c.waiting, waiting, NO_SESSION)
        running = jnp.where(c.running, running, NO_SESSION)
        every = jnp.concatenate([waiting, running])
        oldest = jnp.min(jnp.where(every == NO_SESSION, 2**31 - 1, every))
        return cls(waiting, running, oldest)

    def younger(self, session: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Returns the feature "younger"; 0 without a session."""
        return log2_units(jnp.where(session == NO_SESSION, 0, session - self.oldest))


def admission_features(c: Counts) -> Int32[Array, "features head"]:
    """Returns 64 times the `ADMISSION_FEATURES` of the waiting requests."""
    a = interface.attributes_of(c.waiting_attributes)
    sessions = _Sessions.of(c)
    session = sessions.waiting
    is_named = (session != NO_SESSION)[:, None]
    runs = is_named & (session[:, None] == sessions.running[None, :])
    waits = is_named & (session[:, None] == session[None, :])
    columns = (
        log2_units(c.waiting_tokens - c.waiting_cached),
        log2_units(c.waiting_cached),
        log2_units(a.predicted_length),
        log2_units(_waited_ms(c)),
        jnp.where(a.deadline_ms >= NO_DEADLINE, 30 * _UNIT, log2_units(a.deadline_ms)),
        a.priority,
        sessions.younger(session),
        log2_units(jnp.sum(runs, axis=1, dtype=jnp.int32)),
        log2_units(jnp.sum(waits, axis=1, dtype=jnp.int32) - 1),
    )
    return _stack(columns, c.waiting)


def victim_features(c: Counts) -> Int32[Array, "features order"]:
    """Returns 64 times the `VICTIM_FEATURES` of the running requests."""
    a = interface.attributes_of(c.attributes)
    sessions = _Sessions.of(c)
    columns = (
        log2_units(c.length),
        log2_units(arrays.reduce_groups(c.owned_pages, c.group, "add")),
        log2_units(arrays.reduce_groups(c.owned_tokens, c.group, "add")),
        log2_units(a.predicted_length - c.length),
        log2_units(-a.arrival_ms),
        a.priority,
        sessions.younger(sessions.running),
    )
    return _stack(columns, c.running)


def _stack(columns: tuple[Array | int, ...], mask: Array) -> Int32[Array, "features n"]:
    rows = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), mask.shape) for x in columns]
    return jnp.where(mask[None, :], jnp.stack(rows), 0)


@validation.checks_numbers(age_per_s="[0, 10]", watermark=0)
def linear_score(
    *,
    admission: Mapping[str, int | float] | None = None,
    victim: Mapping[str, int | float] | None = None,
    age_per_s: int | float = 0.0,
    chunk_size: int | None = None,
    watermark: int = 0,
) -> LinearScore:
    """Makes a `LinearScore`; weights are rounded to hundredths.

    Without weights, all scores are equal, and the policy is `FCFS`.

    Args:
      admission: weights by the names of `ADMISSION_FEATURES`; a positive weight admits
        requests with large values later.
      victim: weights by the names of `VICTIM_FEATURES`; a positive weight preempts
        requests with large values first.
      age_per_s: decrease of the admission score in each second of waiting.
      chunk_size: largest number of rows of one prompt in a step; None means no bound
        except the token budget.
      watermark: pages kept free at admission while any sequence runs.

    Raises:
      ValueError: a name is unknown, or a value is out of its range.
    """
    top = MAX_WEIGHT
    vectors = []
    for name, values, features in (
        ("admission", admission, ADMISSION_FEATURES),
        ("victim", victim, VICTIM_FEATURES),
    ):
        validation.instance(name, values, Mapping, type(None))
        weights = dict(values or {})
        if unknown := [x for x in weights if x not in features]:
            raise ValueError(
                f"{name}={validation.format_value(unknown[0])} must be one of "
                f"{', '.join(features)}"
            )
        numbers = [
            validation.number(
                f"{name}.{x}",
                weights.get(x, 0.0),
                low=-top,
                high=top,
                hint=f"in [-{top:g}, {top:g}]",
            )
            for x in features
        ]
        vectors.append(
            jnp.asarray(np.round(np.multiply(numbers, _PER_WEIGHT)), "int32")
        )
    age = validation.number(
        "age_per_s", age_per_s, low=0.0, high=top, hint=f"in [0, {top:g}]"
    )
    chunk = NO_LIMIT if chunk_size is None else chunk_size
    return LinearScore(
        *vectors,
        age_per_s=jnp.asarray(round(age * _PER_WEIGHT), jnp.int32),
        chunk_size=jnp.asarray(
            validation.integer("chunk_size", chunk, low=1), jnp.int32
        ),
        watermark=jnp.asarray(validation.integer("watermark", watermark), jnp.int32),
    )


def weights_of(policy: LinearScore) -> dict[str, object]:
    """Returns the arguments of `linear_score` that make the policy."""

    def named(weights: Array, features: Mapping[str, str]) -> dict[str, float]:
        numbers = (np.asarray(weights) / _PER_WEIGHT).tolist()
        return {x: w for x, w in zip(features, numbers, strict=True) if w}

    chunk = int(policy.chunk_size)
    return {
        "admission": named(policy.admission, ADMISSION_FEATURES),
        "victim": named(policy.victim, VICTIM_FEATURES),
        "age_per_s": float(policy.age_per_s) / _PER_WEIGHT,
        "chunk_size": None if chunk == NO_LIMIT else chunk,
        "watermark": int(policy.watermark),
    }


def format_formula(policy: LinearScore, eviction: LinearEviction | None = None) -> str:
    """Returns all scores and the bounds as a line, such as `0.5 new_tokens`."""
    sums = []
    for weights, features, rate in (
        (policy.admission, ADMISSION_FEATURES, float(policy.age_per_s)),
        (policy.victim, VICTIM_FEATURES, 0.0),
    ):
        pairs = [*zip(np.asarray(weights).tolist(), features, strict=True)]
        pairs.append((-rate, "waited_s"))
        terms = (
            f" {'-' if weight < 0 else '+'} {abs(weight) / _PER_WEIGHT:g} {name}"
            for weight, name in pairs
            if weight
        )
        sums.append("".join(terms).removeprefix(" + ").strip() or "0")
    chunk = int(policy.chunk_size)
    bounds = "" if chunk == NO_LIMIT else f"; chunks of at most {chunk} tokens"
    if int(policy.watermark):
        bounds += f"; {int(policy.watermark)} pages kept free"
    text = f"admit the lowest {sums[0]}; preempt the highest {sums[1]}{bounds}"
    if eviction is not None:
        recency, *rates = (int(x) for x in eviction)
        rates[0] = -rates[0]
        terms = [f"{recency / 100:g} released_s"] if recency else []
        terms += [
            f"{rate / 1000:+g} {name}"
            for rate, name in zip(rates, ("session", "priority", "pages"), strict=True)
            if rate
        ]
        text += f"; evict the lowest {' '.join(terms) or '0'}"
    return text
