"""The search: parts of the hours, its objective, and ratios recomputed by loops."""

import hashlib
import importlib.util
import json
import math

import numpy as np
import pytest

from experiments.decisions.policy_search import experiment, loads, search_space
from experiments.decisions.policy_search.config import Config
from experiments.decisions.policy_search.hour_simulation import HourMetrics
from experiments.decisions.policy_search.loads import Hour, HourSplit
from experiments.decisions.policy_search.optimizer import CMASearch, RandomSearch
from jaxkv.scheduling import (
    LinearScore,
    find_eviction,
    find_policy,
    format_linear_score,
    linear_score,
)
from tests.support import smoke

HAS_EXTRA = importlib.util.find_spec("cmaes") is not None
NEEDS_EXTRA = pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'search'")
SMOKE: Config = experiment.CONFIGS["smoke"]


def test_committed_parts_follow_the_hashes_of_names() -> None:
    committed = json.loads(experiment.SPLIT.read_text())
    config = experiment.CONFIGS["cpu"]
    by_traffic: dict[str, list[str]] = {}
    for name in committed:
        by_traffic.setdefault(name.rpartition("/")[0], []).append(name)
    assert len(by_traffic) == len(config.traffics) + len(config.recorded)
    for traffic, names in by_traffic.items():
        is_recorded = traffic in config.recorded
        shares = config.recorded_hours if is_recorded else config.hours
        assert len(names) == sum(shares)
        keys = {hashlib.sha256(x.encode()).hexdigest(): x for x in names}
        parts = [committed[keys[key]][0] for key in sorted(keys)]
        expected: list[str] = []
        for part, num in zip(loads.PARTS, shares, strict=True):
            expected += [part] * num
        assert parts == expected


def test_hours_have_their_committed_contents() -> None:
    """One drawn hour; `HourSplit` compares each hour that it reads."""
    families, _ = experiment.make_families(experiment.CONFIGS["cpu"])
    split = families[0].split
    name = next(x for x, part in split.parts.items() if part == "train")
    hour = split.hour(name)
    committed = json.loads(experiment.SPLIT.read_text())
    assert hour.digest == committed[name][1]
    changed = HourSplit({name: "train"}, lambda _: hour, {name: "0" * 64})
    with pytest.raises(ValueError, match=f"{name}: SHA-256 .* must be 000"):
        changed.hours("train")


def small_hour(name: str) -> Hour:
    return loads.read_session_hour(name, loads.TRAFFICS["short"], num_jobs=2, rate=1.0)


def test_test_hours_cannot_be_read_before_the_search_has_ended() -> None:
    parts = {"a/0": "train", "a/1": "validation", "a/2": "test"}
    split = HourSplit(parts, small_hour, {})
    split.hours("train")
    with pytest.raises(RuntimeError, match="must not be read before the search"):
        split.hours("test")
    assert split.names_read == ["a/0"]
    split.hour("a/2")  # past the guard
    assert split.num_early == 1
    split.search_ended = True
    assert [x.name for x in split.hours("test")] == ["a/2"]
    assert split.num_early == 1


def test_hours_tell_a_policy_only_the_past() -> None:
    hour = small_hour("sessions/short/0")
    attributes = hour.workload.attributes
    assert attributes is not None
    prompt = np.asarray(hour.workload.prompt)
    np.testing.assert_array_equal(attributes.session, hour.job)
    np.testing.assert_array_equal(
        attributes.predicted_length, prompt + loads.MEAN_ANSWER
    )
    np.testing.assert_array_equal(attributes.deadline_ms, prompt + 1000)
    first = np.unique(hour.job, return_index=True)[1]
    assert (np.asarray(attributes.priority)[first] == 0).all()
    oracle = hour.with_oracle().attributes
    assert oracle is not None
    order = np.argsort(hour.remaining, kind="stable")
    assert (np.diff(np.asarray(oracle.priority)[order]) >= 0).all()


def test_the_objective_is_zero_for_the_base_and_weights_its_terms() -> None:
    base = [HourMetrics(*np.array([[10.0], [20.0], [0.8]]))] * 2
    assert experiment.search_objective(SMOKE, base, base).tolist() == [0.0]
    ours = [HourMetrics(*np.array([[9.0], [30.0], [0.9]])), base[0]]
    expected = math.log(0.9) - 0.2 * 0.1 + 0.1 * math.log(1.5)
    [value] = experiment.search_objective(SMOKE, ours, base)
    assert value == pytest.approx(expected / 2)


def test_points_are_rules() -> None:
    plain, lru = search_space.rules_of(np.zeros(search_space.POINT_SIZE))
    assert not plain.admission.any()
    assert (int(plain.age_per_s), int(plain.chunk_size)) == (1, 2048)
    assert [int(x) for x in lru] == [100, 0, 0, 0]
    far, evicts = search_space.rules_of(np.full(search_space.POINT_SIZE, 50.0))
    assert (int(far.age_per_s), int(far.chunk_size)) == (999, 2048)
    assert [int(x) for x in evicts] == [100, 10_000, 500, 200]
    rule = {"younger": 1.0, "session_ms": 1.0}
    oldest, young = search_space.rules_of(search_space.point_of(rule))
    same = linear_score(admission={"younger": 1.0}, age_per_s=0.01, chunk_size=2048)
    for ours, theirs in zip(oldest, same, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [int(x) for x in young] == [100, 2000, 0, 0]


def test_hours_have_different_recorded_sessions() -> None:
    hours = [small_hour(f"sessions/short/{i}") for i in range(3)]
    w = hours[0].workload
    assert w.chains is not None
    prompt, output, after = (np.asarray(x) for x in (w.prompt, w.output, w.after))
    later = after[:, 0] >= 0
    assert later.sum() >= 4
    assert (prompt[later] > (prompt + output)[after[later, 0]]).all()
    np.testing.assert_array_equal(w.chains.index, hours[0].job)
    sizes = {tuple(np.asarray(x.workload.prompt).tolist()) for x in hours}
    assert len(sizes) == 3


@NEEDS_EXTRA
def test_searches_minimise_a_sphere() -> None:
    best = {}
    for kind in (CMASearch, RandomSearch):
        search = kind(np.zeros(3), population=8, sigma=0.5, seed=0)
        least = math.inf
        for _ in range(30):
            points = search.ask()
            values = ((points - 1.0) ** 2).sum(axis=1)
            search.tell(points, values)
            least = min(least, float(values.min()))
        best[kind] = least
    assert best[CMASearch] < 1e-3 < best[RandomSearch]


def test_without_the_extra_the_experiment_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x: None if x == "cmaes" else find(x)
    )
    line = r"policy_search needs cmaes: pip install 'jaxkv\[search\]'"
    with pytest.raises(ValueError, match=line):
        experiment.run(SMOKE)


@NEEDS_EXTRA
@pytest.mark.slow
def test_a_run_tests_after_its_search_and_serves_the_winner(tmp_path) -> None:
    saved = smoke.run("policy_search")
    result = saved.result
    assert result.num_early == result.num_faults == 0
    table = result.hours
    assert {*table.policy} == {
        *(experiment.FOUND, experiment.RANDOM, experiment.OLDEST),
        *(experiment.BASE, "vLLM", experiment.ORACLE),
    }
    for row in range(len(result.ratios)):
        x = {name: getattr(result.ratios, name)[row] for name in ("test", "policy")}
        ours = table.where(**x).job_p90_s
        base = table.where(test=x["test"], policy=experiment.BASE).job_p90_s
        logs = [math.log(a / b) for a, b in zip(ours, base, strict=True)]
        mean = math.exp(sum(logs) / len(logs))
        assert result.ratios.p90_ratio[row] == pytest.approx(mean)
    path = tmp_path / "policy.json"
    path.write_text(result.winners.policy_file[0])
    winner = find_policy(str(path))
    assert isinstance(winner, LinearScore)
    eviction = find_eviction(str(path))
    assert format_linear_score(winner, eviction) == path.read_text()
