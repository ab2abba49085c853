"""Latencies, goodput and gaps against cases worked by hand."""

import numpy as np
import pytest

from jaxkv.workloads import metrics

ARRIVAL = np.array([0.0, 0.0, 1.0, 5.0])
FIRST = np.array([0.5, 1.0, 1.5, np.nan])
FINISH = np.array([1.0, 2.0, 1.5, np.nan])
OUTPUT = np.array([10, 100, 1, 7])


def test_latencies_over_unserved_requests_are_nan() -> None:
    """No request is dropped silently; the caller chooses which requests count."""
    with pytest.warns(
        UserWarning, match="latency is NaN: 1 of 4 requests have no value"
    ):
        assert np.isnan(metrics.normalised_latency_s(ARRIVAL, FINISH, OUTPUT))
    # A request that never arrived does not count as unserved.
    came = np.where(np.isnan(FINISH), np.nan, ARRIVAL)
    mean = metrics.normalised_latency_s(came, FINISH, OUTPUT)
    np.testing.assert_allclose(mean, (0.1 + 0.02 + 0.5) / 3)
    np.testing.assert_allclose(metrics.share_served(FINISH), 0.75)
    gap = metrics.time_per_output_token_s(FIRST, FINISH, OUTPUT)
    np.testing.assert_allclose(gap, [0.5 / 9, 1 / 99, 0, np.nan])
    first = metrics.time_to_first_token_s(ARRIVAL, FIRST)
    with pytest.warns(UserWarning, match="percentile 50 is NaN: 1 of 4 requests have"):
        assert np.isnan(metrics.percentile(first[None], 50)).all()
    is_served = np.isfinite(first)[None]
    assert metrics.percentile(first[None], 50, is_asked=is_served).tolist() == [0.5]
    nothing = np.full((2, 3), np.nan)
    none = np.zeros((2, 3), bool)
    assert np.isnan(metrics.percentile(nothing, 99, is_asked=none)).all()
    with pytest.raises(ValueError, match=r"percent=101 must be in \[0, 100\]"):
        metrics.percentile(first, 101)


def test_unanswered_requests_miss_the_objectives() -> None:
    met = metrics.attainment(
        ARRIVAL, FIRST, FINISH, OUTPUT, metrics.Objectives(0.5, 0.06)
    )
    assert met == 0.5  # the first and the third of four


def test_rates_at_a_crossing_are_interpolated() -> None:
    rates = np.array([1.0, 2.0, 3.0])
    goodput = metrics.goodput(rates, np.array([1.0, 0.95, 0.85]))
    np.testing.assert_allclose(goodput, 2.5)
    assert metrics.goodput(rates, np.array([0.8, 0.95, 0.85])) == 0.0
    assert metrics.goodput(rates, np.ones(3)) == 3.0
    latency = np.array([0.1, 0.3, np.nan])
    capacity = metrics.capacity(rates, latency, at_most_s=0.2)
    np.testing.assert_allclose(capacity, 1.5)
    assert metrics.capacity(rates, latency, at_most_s=0.4) == 2.0
    with pytest.raises(ValueError, match="ascend"):
        metrics.goodput(rates[::-1], np.ones(3))


def test_gaps_between_tokens_span_the_steps_that_stall() -> None:
    drew = np.array([[4, -1], [4, 7], [-1, -1], [7, 4], [-1, 4]])
    gaps = metrics.gaps_between_tokens(drew, np.array([1.0, 2.0, 4.0, 7.0, 8.0]))
    assert gaps.sequence.tolist() == [4, 4, 4, 7]
    assert gaps.seconds.tolist() == [1.0, 5.0, 1.0, 5.0]


def test_tokens_of_one_step_have_gaps_of_zero() -> None:
    drew = np.array([[4, 7], [7, 4]])
    num_drawn = np.array([[2, 1], [3, 1]])
    gaps = metrics.gaps_between_tokens(drew, np.array([1.0, 2.5]), num_drawn)
    assert gaps.sequence.tolist() == [4, 4, 7, 7, 7]
    assert gaps.seconds.tolist() == [0.0, 1.5, 1.5, 0.0, 0.0]


def test_shares() -> None:
    np.testing.assert_allclose(
        metrics.shared_page_saving(np.array(20.0), np.array(80.0)), 0.2
    )
    np.testing.assert_allclose(metrics.recomputed_share(np.array(5), np.array(50)), 0.1)
    np.testing.assert_allclose(metrics.md1_waiting_s(2.0, 0.3), 0.225)
    with pytest.raises(ValueError, match="must be in"):
        metrics.md1_waiting_s(4.0, 0.3)


def test_a_job_ends_with_its_last_answer() -> None:
    arrival = np.array([0.0, 5.0, 1.0, np.nan, 2.0, 7.0])
    finish = np.array([2.0, 9.0, 3.0, np.nan, 2.5, 8.0])
    session = np.array([4, 4, 1, 1, 7, -1])
    jobs = metrics.find_jobs(arrival, finish, session)
    np.testing.assert_allclose(jobs.arrival_s, [1, 0, 2])
    np.testing.assert_allclose(jobs.latency_s, [np.nan, 9, 0.5])
    np.testing.assert_allclose(jobs.jobs_per_hour(), 2 / (9 / 3600))
    np.testing.assert_allclose(jobs.jobs_per_hour(since_s=3.0, until_s=13.0), 360)
    assert np.isnan(jobs.jobs_per_hour(since_s=9.5))
    both = np.stack([arrival, arrival + 1]), np.stack([finish, finish])
    members = metrics.find_jobs(*both, session)
    assert members.latency_s.shape == (2, 3)
    np.testing.assert_allclose(members.latency_s[1], [np.nan, 8, -0.5])
    with pytest.raises(ValueError, match="equally many sessions"):
        metrics.find_jobs(*both, np.stack([session, session * 0]))
