"""Requests that wait on the host."""

from typing import Any

from jaxkv import Sampling
from jaxkv.serving.request_tracker import RequestTracker
from jaxkv.serving.requests import RequestRecord
from tests.support import engines


def test_a_request_is_submitted_at_its_arrival() -> None:
    config: Any = engines.TIGHT
    tracker = RequestTracker(config)
    record = RequestRecord(
        request_id=0,
        prompt=[1],
        sampling=Sampling(),
        arrival_s=2.0,
        end_tokens=(),
        answers=[],
    )
    tracker.add(record)
    assert tracker.next_batch(1.5) == []
    assert tracker.has_work(2.0)
    assert tracker.next_batch(2.0) == [record]
