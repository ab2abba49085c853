"""Times of calls in rotation."""

import pytest

from experiments.harness import timing


def test_the_warm_up_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_call(call):
        return call(), None

    times = {"first": iter((9.0, 1.0, 2.0)), "second": iter((8.0, 3.0, 3.0))}
    calls = [lambda name=name: next(times[name]) for name in times]
    monkeypatch.setattr(timing, "time_call", time_call)
    assert timing.median_seconds(calls, 2) == [1.5, 3.0]
