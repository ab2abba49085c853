"""Shortest job first changes the order of requests, and not their tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from experiments.examples import shortest_job_first
from experiments.examples.shortest_job_first import ShortestJobFirst
from tests.support import engines
from tests.support.engines import TIGHT, greedy
from tests.support.plans import counts, plan_of


def test_tokens_of_cached_pages_are_not_fed() -> None:
    c = counts([], [12, 8, 9], free_pages=1)
    c = c._replace(
        waiting_cached=jnp.asarray([8, 0, 0, 0], jnp.int32),
        waiting_pages=jnp.asarray([1, 2, 3, 0], jnp.int32),
    )
    plan = plan_of(c, ShortestJobFirst(jaxkv.fcfs()))
    assert np.flatnonzero(plan.admit).tolist() == [0]


@pytest.mark.thorough
def test_shortest_job_first_lowers_latency_and_finishes_long_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    latency = shortest_job_first.main()  # NaN if a request is unfinished
    assert latency["shortest job"] < 0.5 * latency["first come"]
    assert capsys.readouterr().out.count("s per token") == 2


@pytest.mark.slow
def test_shortest_job_first_gives_the_answers_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    sizes = (28, 20, 3, 9, 25, 2, 14, 5, 30, 4)
    asks = [
        greedy(100 + i, rng.integers(0, 61, size).tolist(), 12)
        for i, size in enumerate(sizes)
    ]
    run = engines.serve(asks, TIGHT, ShortestJobFirst(jaxkv.fcfs()))
    engines.assert_equal_plain(run, asks, TIGHT)
    assert int(np.asarray(run.info.num_preempted).sum()) > 0
    begun = [name for name in run.info.request_id.ravel().tolist() if name >= 0]
    first = {name: begun.index(name) for name in run.outcomes}
    assert first[105] < first[100]  # the shortest before the first
