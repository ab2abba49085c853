"""Batching: the lectures' pictures, and step counts from a plain loop."""

import dataclasses
import heapq

import numpy as np
import pytest

from experiments.serving.batching import experiment, lectures, sweeps
from experiments.serving.batching.experiment import CONFIGS, Config, Result
from tests.support import smoke

STUDY = experiment.STUDY
SMOKE = CONFIGS["smoke"]


@pytest.fixture(scope="module")
def result() -> Result:
    return smoke.run("batching").result


@pytest.mark.slow
def test_slots_fill_as_in_the_lectures(result: Result) -> None:
    static = result.static_sequences
    continuous = result.continuous_sequences
    assert lectures.grid_rows(static) == [*lectures.STATIC]
    assert lectures.grid_rows(continuous) == [*lectures.CONTINUOUS]
    # "Sequence 3 finished after two iterations", sequence 2 after six.
    assert result.static_sequences.last[:4].tolist() == [3, 6, 2, 3]
    # Six cells are idle in one and used in the other: 32 - 6.
    assert lectures.count_equal_cells(static, lectures.CONTINUOUS) == 26


@pytest.mark.slow
def test_requests_join_batches_as_in_the_lectures(result: Result) -> None:
    assert lectures.batch_names(result.continuous_requests) == [
        "R1 R2",
        "R1 R2 R3",
        "R1 R3 R4",
        "R1 R3 R4",
        "R3 R4 R5",
        "R5",
    ]
    waited = lectures.batch_names(result.static_requests)
    assert waited[:5] == ["R1 R2", "R1 R2", "R1", "R1", "R3 R4 R5"]
    assert lectures.count_joined(result.static_requests) == 0
    assert lectures.count_joined(result.continuous_requests) == 2


def steps_by_hand(output: np.ndarray, slots: int) -> list[int]:
    """Returns the steps of static batching and of continuous batching."""
    batches = [output[k : k + slots] for k in range(0, output.size, slots)]
    ends = [0] * slots
    for tokens in output.tolist():
        heapq.heappush(ends, heapq.heappop(ends) + tokens)
    return [sum(int(batch.max()) for batch in batches), max(ends)]


@pytest.mark.slow
def test_steps_equal_those_of_a_plain_loop(result: Result) -> None:
    steps = result.limits.steps[:, :, 0]
    for i, (load, longest) in enumerate(sweeps.limited_loads(SMOKE)):
        slots = sweeps.num_reserved_slots(SMOKE, longest)
        expected = steps_by_hand(np.asarray(load.output), slots)
        assert steps[:2, i].tolist() == expected
    assert (steps[2] <= steps[1]).all()


@pytest.mark.slow
def test_steps_of_a_real_model_equal_those_of_a_plain_loop() -> None:
    config = dataclasses.replace(
        CONFIGS["real"],
        num_places=3 * 48,
        prompt_tokens=8,
        mean_output_tokens=12.0,
        limits=(40,),
        deviations=(0.0, 1.0),
        clients=(1, 2),
        num_requests=10,
        num_seeds=1,
    )
    result = experiment.run(config)
    assert result.num_slots == 3
    for i, (load, _) in enumerate(sweeps.spread_loads(config)):
        expected = steps_by_hand(np.asarray(load.output), 3)
        assert result.deviations.steps[:2, i, 0].tolist() == expected
    assert (result.deviations.tokens_per_s > 0).all()
    assert (result.clients.tokens_per_s > 0).all()
    assert not result.limits.value.size
    assert len(experiment.claims(result)) == 7
    assert smoke.draw(STUDY, result)


@pytest.mark.slow
def test_only_uneven_outputs_gain_from_continuous_batching(result: Result) -> None:
    deviations = result.deviations
    assert deviations.deviation[0, 0] == 0
    static, continuous = deviations.means
    assert continuous[0] == pytest.approx(static[0])
    assert continuous[1] > 1.2 * static[1]


@pytest.mark.slow
def test_pages_gain_most(result: Result) -> None:
    limits = experiment.metrics(result)["limits"]
    best, *_, worst = result.limits.means[::-1]  # paged and static batching
    assert [row["gain"] for row in limits] == pytest.approx((best / worst).tolist())
    assert limits[-1]["gain"] > limits[0]["gain"] > 1


def test_an_unknown_cost_model_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown cost model 'abacus'"):
        experiment.run(Config(cost="abacus"))
