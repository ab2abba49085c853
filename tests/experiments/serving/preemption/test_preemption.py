"""Cost of preemption, counted from traces of one workload under many settings."""

import dataclasses
from typing import Any, get_args

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.serving.preemption import measurement, serving
from experiments.serving.preemption.measurement import Config, Result
from experiments.serving.preemption.serving import PreemptionSetting, Servings
from jaxkv.models import load_model
from jaxkv.progress import QUIET
from jaxkv.report import field_values, read_run
from jaxkv.scheduling import Victim
from tests.support import smoke
from tests.support.folders import RECORDS
from tests.support.impatience import Impatient, Stopping

STUDY = measurement.STUDY
SMOKE = measurement.CONFIGS["smoke"]
WHOLE = dataclasses.replace(
    SMOKE, host_shares=(0.0,), host_share=1 / 4, page_sizes=(4, 16)
)


@pytest.fixture(scope="module")
def model() -> str:
    return smoke.model(72)


@pytest.fixture(scope="module")
def full_result(model: str) -> Result:
    """A run of every part; the smoke run has no host memory and times no restore."""
    return measurement.run(dataclasses.replace(WHOLE, model=model))


@pytest.fixture(scope="module")
def result(model: str) -> Result:
    """The smoke run with a smaller model."""
    config = dataclasses.replace(SMOKE, model=model)
    return measurement.run(config)


def served(result: Result) -> Servings:
    """Returns all servings in one table."""
    tables = field_values(result).values()
    return Servings.joined(x for x in tables if isinstance(x, Servings))


def rows(servings: Servings, **wanted: Any) -> Servings:
    """Returns the servings that match, at least 1."""
    matches = servings.where(**wanted)
    assert len(matches)
    return matches


TRACE = [
    # Requests in 3 slots and the tokens that they feed; * ends the request.
    ("7:5 8:9 -", "both are read"),
    ("7:1 8:1 -", ""),
    ("7:1 - -", "8 is preempted with 10 tokens"),
    ("7:1* - -", "7 completes; 8 is still away"),
    ("- 9:4 -", "9 overtakes"),
    ("8:0 9:1 -", "8 is back with its pages"),
    ("8:1 9:1* -", ""),
    ("- - -", "8 is preempted with 11; no request runs"),
    ("- 8:6 -", "it is fed again, in two parts"),
    ("- 8:6* 5:3*", "with its last token; 5 is let in before that"),
]


def test_preemptions_are_counted_as_by_hand() -> None:
    cells = [line.split() for line, _ in TRACE]
    names = [[int(c.split(":")[0]) if c != "-" else -1 for c in row] for row in cells]
    fed = [
        [int(c.split(":")[1].strip("*")) if c != "-" else 0 for c in row]
        for row in cells
    ]
    ended = [["*" in c for c in row] for row in cells]
    story = serving.count_preemptions(
        np.array(names), np.array(fed), np.array(ended), page_size=4
    )
    assert story == {
        "num_preempted": 2,
        "num_returned": 1,
        "pages_moved": 2 * 3,
        "num_fed": int(np.sum(fed)),
        "num_recomputed": 11,
        "num_overtaken": 2,
        "steps": 9,
    }


@pytest.mark.slow
def test_answers_do_not_depend_on_preemption(result: Result) -> None:
    all_ = served(result)
    assert len(all_.name) >= 18
    assert not all_.num_different.any()
    # Preemption occurs in most settings.
    assert (all_.num_preempted > 0).sum() >= 15
    # Tokens computed once are equal in all settings.
    assert len(set((all_.num_fed - all_.num_recomputed).tolist())) == 1


@pytest.mark.slow
def test_no_preemption_with_enough_pages(result: Result) -> None:
    roomy = rows(result.ways, name="room for all")
    assert not roomy.num_preempted.any()
    assert not roomy.num_recomputed.any()
    tight = rows(result.ways, name="recompute")
    assert tight.num_preempted > 2
    assert tight.steps > roomy.steps
    # Each token of prompts and answers is fed once, except the last of an answer.
    lost = tight.num_recomputed[0]
    assert tight.num_fed[0] == roomy.num_fed[0] + lost
    assert tight.recomputed_share[0] == lost / (roomy.num_fed[0] + lost)


@pytest.mark.slow
def test_no_recomputation_with_enough_swap_space(result: Result) -> None:
    swap = rows(served(result), preemption="swap", host_pages=0)
    roomy = swap.swap_pages >= swap.pool_pages
    assert roomy.sum() >= 6
    assert not swap.num_recomputed[roomy].any()
    assert not swap.num_fallbacks[roomy].any()
    assert (swap.num_returned[roomy] == swap.num_preempted[roomy]).all()
    # As many pages come back as left, and a request has at least one.
    assert (swap.pages_moved[roomy] >= 2 * swap.num_preempted[roomy]).all()
    again = rows(served(result), preemption="recompute")
    assert not again.pages_moved.any()
    assert (again.num_fallbacks == again.num_preempted).all()


@pytest.mark.slow
def test_hold_new_admits_no_request_before_preempted_ones(result: Result) -> None:
    held = rows(result.ways, hold_new=True)
    assert held.preemption.tolist() == ["recompute", "swap"]
    assert (held.num_preempted > 0).all()
    assert not held.num_overtaken.any()
    assert rows(result.ways, name="swap").num_overtaken > 0


@pytest.mark.slow
def test_rules_choose_different_victims(result: Result) -> None:
    for preemption_ in ("recompute", "swap"):
        rules = rows(result.victims, preemption=preemption_)
        assert sorted(rules.victim) == sorted(get_args(Victim.__value__))
        assert len({*rules.num_fed.tolist()} | {*rules.steps.tolist()}) > 2
    # The ways use the first rule.
    latest = rows(result.victims, victim="latest", preemption="recompute")
    assert latest.num_fed == rows(result.ways, name="recompute").num_fed


@pytest.mark.slow
def test_a_watermark_reduces_recomputation(result: Result) -> None:
    marks = result.watermarks
    assert marks.watermark[0] == 0
    assert marks.num_fed[0] == rows(result.ways, name="recompute").num_fed
    assert marks.recomputed_share[-1] < marks.recomputed_share[0]


@pytest.mark.slow
def test_too_small_a_swap_space_is_used_in_part(result: Result) -> None:
    spaces = result.spaces
    again = rows(result.ways, name="recompute")
    assert spaces.swap_pages[0] == 0
    for name in ("num_fed", "num_preempted", "steps", "num_overtaken"):
        assert getattr(spaces, name)[0] == getattr(again, name)[0]
    assert (spaces.num_fallbacks[1:-1] > 0).all()
    assert (spaces.num_swapped_out[1:-1] > 0).all()
    assert (np.diff(spaces.num_fallbacks) <= 0).all()
    assert spaces.num_recomputed[-1] == 0


@pytest.mark.slow
def test_hidden_swap_pages_equal_a_smaller_buffer(full_result: Result) -> None:
    assert full_result.hosts.host_pages[0] == 0
    assert (full_result.hosts.swap_pages == full_result.hosts.swap_pages[0]).all()
    hidden = rows(full_result.spaces, swap_pages=full_result.hosts.swap_pages[0])
    for name in ("num_fed", "num_preempted", "num_recomputed", "pages_moved", "steps"):
        assert getattr(hidden, name) == getattr(full_result.hosts, name)[0]


@pytest.mark.slow
def test_hidden_pool_pages_equal_a_smaller_pool(result: Result) -> None:
    """Compares a real pool of that size with a part of a larger pool."""
    for preemption_ in ("recompute", "swap"):
        real = rows(result.ways, name=preemption_)
        hidden = rows(
            result.pools, preemption=preemption_, pool_pages=real.pool_pages[0]
        )
        for name in ("num_fed", "num_preempted", "pages_moved", "steps"):
            assert getattr(hidden, name) == getattr(real, name)


@pytest.mark.slow
def test_times_of_a_restore(full_result: Result) -> None:
    moves = full_result.moves
    assert moves.page_size.tolist() == list(WHOLE.page_sizes)
    assert (moves.num_tokens == moves.num_tokens[0]).all()
    # Keys and values of one head of eight dimensions, in float32.
    assert (moves.num_bytes == 2 * 8 * 4 * moves.num_tokens).all()
    for name in ("recompute_s", "out_s", "in_s", "host_out_s", "host_in_s"):
        times_s = getattr(moves, name)
        assert times_s.shape == (len(moves.page_size), WHOLE.move_repeats)
        assert (times_s > 0).all()
    assert (moves.swap_through_host_s > moves.swap_s).all()


@pytest.mark.slow
def test_claims_follow_from_the_result(full_result: Result) -> None:
    measured = smoke.measured_values(measurement.claims(full_result))
    assert measured["no answer depends on which requests are preempted, or how"] == 0
    assert (
        measured["with swap space as large as the pool no token is computed again"] == 0
    )
    assert (
        measured["no new request is admitted until all preempted ones have completed"]
        == 0
    )
    again = rows(full_result.ways, name="recompute")
    left = "swapping without swap space is recomputation"
    assert measured[left] == again.num_recomputed[0]
    pools = rows(full_result.pools, preemption="recompute")
    share = 100 * max(pools.num_recomputed / pools.num_fed)
    claim_text = "most compute is recomputation when the pool is small enough"
    assert measured[claim_text] == pytest.approx(share)
    rules = rows(full_result.victims, preemption="recompute")
    spared = 1 - min(rules.num_recomputed / rules.num_fed) / again.recomputed_share[0]
    best = "choosing other victims saves half of the recomputation"
    assert measured[best] == pytest.approx(spared)
    smoke_run = smoke.run("preemption")
    assert list(smoke_run.metrics) == list(Result.columns())
    assert smoke_run.metrics["ways"][0]["name"] == "room for all"
    assert "room for all" in (smoke_run.folder / "figure.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("label", ["recompute and swap", "watermarks"])
def test_a_stopped_run_keeps_finished_settings(model: str, label: str) -> None:
    config = dataclasses.replace(SMOKE, model=model)
    result = measurement.run(config, Impatient(label))
    assert len(result.ways.name) == (1 if label == "recompute and swap" else 5)
    assert len(result.watermarks.name) == (1 if label == "watermarks" else 0)
    assert len(result.spaces.name) == len(result.moves.page_size) == 0
    measured = smoke.measured_values(measurement.claims(result))
    assert not measured.get("no answer depends on which requests are preempted, or how")
    assert STUDY.metrics(result)["ways"][0]["num_preempted"] == 0
    assert len(STUDY.report_parts(result)) >= 1
    assert smoke.draw(STUDY, result)


@pytest.mark.slow
def test_an_empty_run_is_drawn_and_judged(model: str) -> None:
    config = dataclasses.replace(SMOKE, model=model)
    result = measurement.run(config, Stopping(0))
    assert measurement.claims(result) == []
    assert STUDY.report_parts(result) == []
    assert smoke.draw(STUDY, result)


def test_a_setting_must_fit_its_engine(model: str) -> None:
    loaded = load_model(model)
    requests, _ = measurement.cut_prompts(SMOKE, loaded)
    ways = [
        (PreemptionSetting("large", 21), measurement.tight_engine_config(SMOKE, 20, 4))
    ]
    with pytest.raises(ValueError, match="needs more pages"):
        serving.serve_settings(
            loaded, requests, [("large", "too large", 1, ways)], QUIET
        )


def test_the_model_must_be_long_enough(model: str) -> None:
    with pytest.raises(ValueError, match="max_length=513 must be at most"):
        measurement.run(Config(model=model))


def test_the_record_shows_cheap_preemption() -> None:
    folder = RECORDS / "preemption"
    run = read_run(folder, load_experiment("preemption"))
    ways = run.result.ways
    hosts = run.result.hosts
    again = rows(ways, name="recompute")
    # Holding new requests costs more steps than preemption.
    assert rows(ways, name="recompute, hold new").steps > 1.2 * again.steps
    assert (hosts.num_recomputed[1:] < hosts.num_recomputed[0]).all()
    # Only the rule that prefers long answers costs more than the default.
    victims = run.result.victims
    dearer = victims.name[victims.recomputed_share > again.recomputed_share]
    assert dearer.tolist() == ["recompute, longest_remaining"]
