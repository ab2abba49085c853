"""Memory waste: closed forms, and the record against the published figures."""

import numpy as np
import pytest

from experiments.cli import results_page
from experiments.framework import load_experiment
from experiments.serving.latency_vs_rate import published as latency_vs_rate_published
from experiments.serving.latency_vs_rate.settings import SERVERS
from experiments.serving.memory_waste import experiment
from jaxkv.report import read_run
from tests.support import smoke

PLACES = 15_728
approx = pytest.approx


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return smoke.run("memory_waste").result


@pytest.mark.slow
def test_every_token_place_has_a_use(result: experiment.Result) -> None:
    uses = result.waste.uses
    batch = result.waste.batch
    np.testing.assert_allclose(uses.sum(axis=2), 1)
    assert uses.min() >= 0
    # Seven of the longest sequences fit, and leave 1,392 places unused.
    assert batch[0] == pytest.approx(7, rel=1e-3)
    np.testing.assert_allclose(uses[0, 0, 3], 1 - 7 * 2048 / PLACES, rtol=1e-3)
    # With a known length only the place of the last token is wasted.
    np.testing.assert_allclose(uses[2, :, 2], batch[2] / PLACES, rtol=1e-5)
    assert (np.diff(uses[:, 0, 0]) > 0).all()
    assert (np.diff(batch[:, 0]) > 0).all()


@pytest.mark.slow
def test_memory_grows_with_requests(result: experiment.Result) -> None:
    growth = result.growth
    assert result.weight_bytes + result.kv_bytes < result.memory_bytes
    full = result.weight_bytes + result.kv_bytes
    # Contiguous systems are full at the batch size that they reach.
    fits = np.isfinite(growth.memory_bytes)
    assert fits.sum(axis=1)[:3].tolist() == np.round(result.waste.batch[:3, 0]).tolist()
    assert np.nanmax(growth.memory_bytes) < 1.05 * full
    last = [np.nanmax(line) for line in growth.tokens_per_s]
    assert (np.diff(last) > 0).all()


@pytest.mark.slow
def test_claims_follow_from_the_result(result: experiment.Result) -> None:
    measured = smoke.measured_values(experiment.claims(result))
    gpu = "OPT-13B on an A100 of 40 GB: share "
    assert measured.pop(gpu + "of the weights") == 100 * 2 * 12_853_473_280 / 40e9
    assert measured.pop(gpu + "left for keys and values") == 100 * 12 * 2**30 / 40e9
    served = "OPT-13B, ShareGPT, 2 requests/s: "
    batches = {}
    for name, uses, batch in zip(
        result.system.tolist(), result.waste.uses, result.waste.batch, strict=True
    ):
        by = latency_vs_rate_published.name_in_sentence(name)
        batches[name] = sum(batch) / len(batch)
        shares = [100 * sum(x[kind] for x in uses) / len(uses) for kind in (0, 1, 2)]
        assert measured.pop(f"{by}: token states") == approx(shares[0])
        if name != "paged":
            assert measured.pop(f"{by}: reservation") == approx(shares[1])
            assert measured.pop(f"{by}: internal waste") == approx(shares[2])
            assert measured.pop(f"{by}: external waste and rest") == approx(
                100 - sum(shares)
            )
        else:
            waste = 100 * (1 - shares[0] / sum(shares))
            assert measured.pop(f"{by}: waste within the pages in use") == approx(waste)
    for name in ("Orca (Oracle)", "Orca (Max)"):
        times = measured.pop(f"{served}times the requests of {name} at once")
        assert times == approx(batches["paged"] / batches[name])
    assert not measured


def test_the_record_has_the_published_setting() -> None:
    folder = results_page.RECORDS / "memory_waste"
    ran = read_run(folder, load_experiment("memory_waste"))
    assert ran.config == experiment.CONFIGS["paper"]
    mean_percent = 100 * ran.result.waste.uses.mean(axis=1)
    for i, name in enumerate(map(str, ran.result.system)):
        published = experiment.CLAIMS.published("uses")[name]
        shares = dict(zip(experiment.USES.values(), mean_percent[i], strict=True))
        assert len(published) == (1 if name == "paged" else 4)
        for use, printed in published.items():
            assert shares[use] == pytest.approx(printed, abs=3)


def test_places_follow_from_bytes() -> None:
    assert [server.num_places for server in SERVERS.values()] == [15_728, 9557, 60_074]
