"""Simulated preemption: arithmetic by hand, claims on synthetic numbers."""

import numpy as np
import pytest

from experiments.framework.registry import studies_of
from experiments.serving.preemption import simulation
from experiments.serving.preemption.simulation import Config, Result, SimulatedServings
from jaxkv.report import Sheet
from tests.support import smoke

(STUDY,) = studies_of(simulation)


def made_up() -> Result:
    """Returns rows whose recomputed share halves with each watermark."""
    rows = []
    for way in simulation.list_settings(3):
        share = 0.2 / 2 ** simulation.WATERMARK_PAGES.index(way.watermark)
        share *= 1.0 if way.victim == "latest" else 0.75
        latency = {"recompute": 0.05, "swap": 0.05}.get(way.preemption, 0.5)
        rows.append((*way, 10, share * (1 + (way.seed - 3) / 10), latency, 0.0))
    return Result(SimulatedServings.of(rows))


def test_moving_a_page_is_two_transfers_a_layer() -> None:
    assert simulation.page_bytes(16) == 13_107_200
    assert simulation.swap_s(16) == pytest.approx(0.844e-3, rel=0.01)
    # 500 tokens occupy 32 pages, which are swapped out and in.
    assert simulation.restore_s(500, 16) == pytest.approx(0.054, rel=0.01)
    assert simulation.recompute_s(512) == pytest.approx(0.0942, rel=0.01)


def test_claims_take_means_over_draws() -> None:
    found = {claim.claim: claim for claim in simulation.claims(made_up())}
    free = found["computed again with 0 of 983 pages kept free"]
    assert free.ours == pytest.approx(20 * 1.15)
    victims = found["choosing other victims saves half of the recomputation"]
    assert victims.ours == pytest.approx(0.25)
    as_fast, small, held, _ = [
        claim for name, claim in found.items() if name.startswith("end to end")
    ]
    assert (as_fast.ours, small.ours, held.ours) == pytest.approx((1.0, 1.0, 0.1))


def test_figure_and_tables_show_the_simulation() -> None:
    result = made_up()
    files = smoke.draw(STUDY, result)
    assert files["figure.png"].startswith(b"\x89PNG")
    sheets = [x for x in STUDY.report_parts(result) if isinstance(x, Sheet)]
    rules = len(simulation.VICTIM_RULES)
    moves = len(simulation.PREEMPTIONS)
    marks = len(simulation.WATERMARK_PAGES)
    sizes = len(simulation.PAGE_SIZES)
    assert [len(x.rows) for x in sheets] == [rules * marks, sizes, moves * sizes]
    found = STUDY.metrics(result)
    assert len(found["simulated"]) == len(simulation.list_settings(0))
    assert len(found["bring_back"]) == sizes
    assert not simulation.claims(Result(SimulatedServings.of([])))[:-2]


@pytest.mark.slow
def test_every_setting_is_simulated() -> None:
    found = simulation.run(Config(simulated_requests=80)).simulated
    assert (found.recomputed_share[found.preemption != "recompute"] == 0).all()
    assert np.isfinite(found.normalised_s).all()
