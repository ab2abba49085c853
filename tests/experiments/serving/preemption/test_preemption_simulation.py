"""Simulated preemption: arithmetic by hand, claims on synthetic numbers."""

import numpy as np
import pytest

from experiments.serving.preemption import simulation
from experiments.serving.preemption.simulation import Config, Result, SimulatedServings
from jaxkv.report import Sheet
from tests.support import smoke

STUDY = simulation.STUDY


def made_up() -> Result:
    """Returns rows whose recomputed share halves with each watermark."""
    rows = []
    for setting in simulation.list_settings(3):
        share = 0.2 / 2 ** simulation.WATERMARK_PAGES.index(setting.watermark)
        share *= 1.0 if setting.victim == "latest" else 0.75
        latency = {"recompute": 0.05, "swap": 0.05}.get(setting.preemption, 0.5)
        rows.append((*setting, 10, share * (1 + (setting.seed - 3) / 10), latency, 0.0))
    return Result(SimulatedServings.of(rows))


def test_moving_a_page_is_two_transfers_a_layer() -> None:
    assert simulation.page_bytes(16) == 13_107_200
    assert simulation.swap_s(16) == pytest.approx(0.844e-3, rel=0.01)
    # 500 tokens occupy 32 pages, which are swapped out and in.
    assert simulation.restore_s(500, 16) == pytest.approx(0.054, rel=0.01)
    assert simulation.recompute_s(512) == pytest.approx(0.0942, rel=0.01)


def test_claims_are_measured() -> None:
    by_claim = {claim.claim: claim for claim in simulation.claims(made_up())}
    victims = by_claim["choosing other victims saves half of the recomputation"]
    assert victims.ours == pytest.approx(0.25)
    as_fast, small, held, _ = [
        claim for name, claim in by_claim.items() if name.startswith("end to end")
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
    metrics = STUDY.metrics(result)
    assert len(metrics["simulated"]) == len(simulation.list_settings(0))
    assert len(metrics["bring_back"]) == sizes
    assert not simulation.claims(Result(SimulatedServings.of([])))[:-2]


@pytest.mark.slow
def test_every_setting_is_simulated() -> None:
    table = simulation.run(Config(simulated_requests=80)).simulated
    assert (table.recomputed_share[table.preemption != "recompute"] == 0).all()
    assert np.isfinite(table.normalised_s).all()
