"""The linear score: integer logarithms, orders of requests, and its bound."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.scheduling import RequestAttributes, linear_score
from jaxkv.scheduling.linear_scores import log2_units
from tests.support.plans import LINE, counts, plan_of


def attributes(**columns: list[int]) -> Any:
    zeros = np.zeros(LINE, np.int32)
    default: Any = RequestAttributes()
    return RequestAttributes(
        **{
            name: np.asarray(columns[name], np.int32)
            if name in columns
            else zeros + getattr(default, name)
            for name in RequestAttributes._fields
        }
    )


def test_integer_logarithms_interpolate_between_powers_of_two() -> None:
    rng = np.random.default_rng(0)
    x = np.unique(np.concatenate([np.arange(300), rng.integers(0, 1 << 30, 2000)]))
    exact = np.log2(1.0 + x)
    floor = np.floor(exact + 1e-12)
    twin = np.floor(64 * (floor + (1.0 + x) / 2.0**floor - 1))
    ours = np.asarray(log2_units(jnp.asarray(x, jnp.int32)))
    np.testing.assert_array_equal(ours, twin)
    assert np.abs(ours / 64 - exact).max() < 0.11
    assert log2_units(jnp.int32(-5)) == 0
    assert log2_units(jnp.int32(2**31 - 1)) == 64 * 30


def first_admitted(policy: scheduling.LinearScore, **more: Any) -> int:
    """Returns the request that an engine with one free slot admits."""
    c = counts([(9, 8, 3), (9, 8, 3), (9, 8, 3), None], [12, 4, 8, 6], free_pages=9)
    c = c._replace(**more)
    admit = np.asarray(plan_of(c, policy).admit)
    assert admit.sum() == 1
    return int(admit.argmax())


@pytest.mark.parametrize(
    ("name", "columns", "low", "high"),
    [
        ("new_tokens", {}, 1, 0),
        ("predicted_tokens", {"predicted_length": [9, 30, 20, 8]}, 3, 1),
        ("waited", {"arrival_ms": [-9, -7000, -80, -8]}, 3, 1),
        ("slack", {"deadline_ms": [400, 2**30, 200, 300]}, 2, 1),
        ("priority", {"priority": [0, 5, -3, 2]}, 2, 1),
        ("younger", {"session": [7, 3, 9, 30]}, 1, 3),
        ("session_waiting", {"session": [4, 4, 4, -1]}, 3, 0),
    ],
)
def test_each_feature_orders_the_queue(
    name: str, columns: dict[str, list[int]], low: int, high: int
) -> None:
    asked = attributes(**columns)
    for weight, expected in ((1.0, low), (-1.0, high)):
        policy = linear_score(admission={name: weight})
        assert first_admitted(policy, waiting_attributes=asked) == expected
    # Equal scores keep the order of arrival.
    assert first_admitted(linear_score(), waiting_attributes=asked) == 0


def test_running_sequences_of_a_session_count() -> None:
    asked = attributes(session=[1, 1, 2, 3])
    runs = attributes(session=[1, 1, 3, 0])
    fields: Any = {"waiting_attributes": asked, "attributes": runs}
    for weight, expected in ((1.0, 2), (-1.0, 0)):
        policy = linear_score(admission={"session_running": weight})
        assert first_admitted(policy, **fields) == expected


def test_ageing_overtakes_a_score() -> None:
    # 12 tokens against 4: log2(13 / 5) is 1.4, which 0.5 per s outweighs in 3 s.
    for waited_s, expected in ((2, 1), (4, 0)):
        asked = attributes(arrival_ms=[-1000 * waited_s, 0, 0, 0])
        policy = linear_score(admission={"new_tokens": 1.0}, age_per_s=0.5)
        assert first_admitted(policy, waiting_attributes=asked) == expected


@pytest.mark.parametrize(
    ("name", "weight", "out"),
    [
        ("length", 1.0, 2),
        ("length", -1.0, 1),
        ("priority", 1.0, 1),
        ("remaining", 1.0, 3),
    ],
)
def test_the_highest_victim_score_is_preempted(
    name: str, weight: float, out: int
) -> None:
    line: Any = [(13, 12, 3), (9, 8, 2), (17, 16, 4), (13, 12, 3)]
    runs = attributes(priority=[0, 7, 1, 1], predicted_length=[20, 20, 20, 60])
    c = counts(line, free_pages=2)._replace(attributes=runs)
    plan = plan_of(c, linear_score(victim={name: weight}))
    assert np.flatnonzero(np.asarray(plan.preempt)).tolist() == [out]


def test_no_weights_are_first_come_first_served() -> None:
    c = counts([(9, 8, 2), (16, 3, 4)], [7, 12, 5], free_pages=9)
    ours, plain = (plan_of(c, x) for x in (linear_score(), scheduling.fcfs()))
    for name, value in plain._asdict().items():
        if value is not None:
            np.testing.assert_array_equal(getattr(ours, name), value, name)


def test_the_bound_of_overtaking() -> None:
    policy = linear_score(admission={"new_tokens": 1.0, "younger": -0.5}, age_per_s=0.1)
    assert policy.overtaking_s == pytest.approx(1.5 * 31.25 / 0.1)
    assert linear_score().overtaking_s == math.inf
    assert linear_score(admission={"younger": 5}, age_per_s=0.01).overtaking_s > 1e9


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"admission": {"size": 1.0}}, "admission='size' must be one of new_tokens"),
        ({"victim": {"length": 11}}, r"victim.length=11 must be in \[-10, 10\]"),
        ({"age_per_s": -1}, r"age_per_s=-1 must be in \[0, 10\]"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"watermark": -1}, "watermark=-1"),
    ],
)
def test_weights_out_of_range_are_refused(fields: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        linear_score(**fields)
