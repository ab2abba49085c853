"""Memory and its waste: closed forms, and what the record says of the figures."""

import dataclasses

import numpy as np
import pytest

from experiments.cli import results_page
from experiments.framework import registry, run_folder
from experiments.plotting import style
from experiments.serving.latency_vs_rate.settings import SERVERS
from experiments.serving.memory_waste import experiment
from experiments.serving.memory_waste.experiment import Config
from experiments.serving.memory_waste.published import USES

PLACES = 15_728


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return experiment.run(experiment.CONFIGS["smoke"])


def test_every_place_is_something(result: experiment.Result) -> None:
    uses, batch = result.waste.uses, result.waste.batch
    np.testing.assert_allclose(uses.sum(axis=2), 1)
    assert uses.min() >= 0
    # Seven of the longest sequences fit, and leave 1,392 places to nobody.
    assert batch[0] == pytest.approx(7, rel=1e-3)
    np.testing.assert_allclose(uses[0, 0, 3], 1 - 7 * 2048 / PLACES, rtol=1e-3)
    # Whose length is known wastes the place of the last token, which is never written.
    np.testing.assert_allclose(uses[2, :, 2], batch[2] / PLACES, rtol=1e-5)
    assert (np.diff(uses[:, 0, 0]) > 0).all()
    assert (np.diff(batch[:, 0]) > 0).all()


def test_memory_grows_with_requests(result: experiment.Result) -> None:
    growth = result.growth
    assert result.weight_bytes + result.kv_bytes < result.memory_bytes
    full = result.weight_bytes + result.kv_bytes
    # Contiguous systems are full at the batch that they reach.
    fits = np.isfinite(growth.memory_bytes)
    assert fits.sum(axis=1)[:3].tolist() == np.round(result.waste.batch[:3, 0]).tolist()
    assert np.nanmax(growth.memory_bytes) < 1.05 * full
    last = [np.nanmax(line) for line in growth.tokens_per_s]
    assert (np.diff(last) > 0).all()


def test_it_is_drawn_and_judged(result: experiment.Result) -> None:
    assert len(experiment.claims(result)) == 22
    files = style.render(
        lambda axes: experiment.plot(axes, result), panels=experiment.PANELS
    )
    assert all(files.values())


def test_the_record_is_of_the_published_setting_and_says_what_misses() -> None:
    folder = results_page.RECORDS / "memory_waste"
    ran = run_folder.read(folder, registry.load("memory_waste"))
    assert ran.config == experiment.CONFIGS["paper"]
    found = 100 * ran.result.waste.uses.mean(axis=1)
    for i, name in enumerate(map(str, ran.result.system)):
        for ours, published in zip(found[i], USES[name], strict=True):
            if published is not None:
                assert ours == pytest.approx(published, abs=3)
    said = (folder / "claims.json").read_text("utf-8")
    for claim in ran.claims:
        assert claim.claim in said


def test_places_follow_from_bytes() -> None:
    assert [server.num_places for server in SERVERS.values()] == [15_728, 9557, 60_074]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "rate=0.0 must be in"),
        ({"warm_up_s": 4000.0}, "must lie within"),
        ({"num_seeds": 0}, "num_seeds=0 must be"),
        ({"step_scales": (0.0,)}, "must be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config(), **changes)
