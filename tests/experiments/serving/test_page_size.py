"""Page sizes: measured shapes, choice of implementations, and claims."""

import json
import math
from typing import Any

import numpy as np
import pytest

from experiments.harness import Implementation, KernelRun
from experiments.harness.kernels import runs
from experiments.serving.page_size import attention, experiment, serving
from experiments.serving.page_size.attention import CONFIGS, Config
from experiments.serving.page_size.serving import Result, Serving
from jaxkv.report import Experiment, config_dumps
from pallas_kernels.bench import Timing, timing
from tests.support import smoke
from tests.support.mutation import replace


@pytest.mark.slow
def test_smoke_measures_every_shape() -> None:
    config = CONFIGS["smoke"]
    result = smoke.run("page_size").result
    latency = result.latency
    assert result.page_size.tolist() == [*config.page_sizes]
    assert latency.batch.tolist() == [2, 2]
    assert latency.context.tolist() == [32, 64]
    for field in (latency.paged_s, latency.contiguous_s, latency.ratio):
        assert field.shape == (2, 2)
        assert (field > 0).all()
    assert (latency.error < 1e-5).all()
    assert (result.device, result.clock, result.paged) == ("cpu", "wall", "reference")
    # Of pages of 16, the paper's: each the middle of two rounds.
    assert result.page_size[1] == 16
    low, high = attention.claims(result)
    assert (low.ours, high.ours) == (*sorted(latency.ratio[:, 1].tolist()),)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces timings and implementations by known ones."""

    def implement(name: str, seconds: float, error: float = 0.0) -> Implementation:
        def prepare(problem: Any) -> KernelRun:
            if name == "reference" and problem.spec.page_size == 4:
                raise ValueError("no pages of 4")
            return KernelRun(lambda index: seconds, lambda: error)

        return Implementation(name, name != "reference", prepare)

    everyone = [
        implement("reference", 6.0),
        implement("XLA head-major", 1.0, error=1.0),  # fast, but wrong
        implement("XLA contiguous", 4.0),
        implement("cuDNN contiguous", 5.0),
        implement("XLA gather", 2.0),  # over pages
    ]
    replace(monkeypatch, runs, "attention_implementations", lambda: everyone)

    def measure(call: Any, *, num_calls: int) -> Timing:
        seconds = call(0)
        return Timing(seconds if isinstance(seconds, float) else 0, 0, 1, 0, "cupti")

    replace(monkeypatch, timing, "measure", measure)


@pytest.mark.usefixtures("made_up")
def test_contiguous_attention_is_the_fastest_correct_one() -> None:
    result = attention.run(CONFIGS["smoke"])
    assert result.latency.contiguous_s[:, 1].tolist() == [4.0, 4.0]
    assert result.latency.ratio[:, 1].tolist() == [1.5, 1.5]
    # Unsupported page sizes are left out, and drawn as a gap.
    assert np.isnan(result.latency.ratio[:, 0]).all()
    low, high = attention.claims(result)
    assert (low.ours, high.ours, low.published, high.published) == (1.5, 1.5, 1.2, 1.26)
    row, _ = attention.metrics(result)["latency"]
    assert row["ratio, 16"] == 1.5
    assert row["ratio, 16 / 16"] == 1.0
    assert math.isnan(row["ratio, 4"])


def test_unused_places_are_judged_before_a_step_writes() -> None:
    # The next steps of 30 sequences fill 1.6 % of 15,728 places.
    row = ("ShareGPT", 2.2, 16, 0.9, 30.0, 0.9713, 0.0143, 1.0)
    result = Result(Serving.of([row]))
    half = serving.claims(result)[-1]
    assert half.published == pytest.approx(100 * 30 * 8.5 / 15728)
    assert half.ours == pytest.approx(1.43 + 100 * 30 / 15728)
    assert half.verdict == "holds"


@pytest.mark.slow
def test_workloads_are_simulated_with_pages_of_every_size() -> None:
    config = serving.Config(hours=0.01, page_sizes=(16, 256))
    result = serving.run(config)
    rows = result.serving
    assert rows.page_size.tolist() == [16, 256] * 4
    assert ((rows.tokens + rows.unused)[rows.rate < 2] < 1).all()
    assert (np.diff(rows.unused.reshape(4, 2)) > 0).all()
    study = serving.STUDY
    files = smoke.draw(study, result)
    assert files["figure.png"].startswith(b"\x89PNG")
    assert len(study.metrics(result)["serving"]) == 8


def test_an_older_config_chooses_its_study() -> None:
    page_experiment = Experiment("page_size", "How large?", experiment.STUDIES)
    plain = json.loads(config_dumps(Config()))
    for hours, kind in ((0.0, Config), (0.25, serving.Config)):
        text = json.dumps(plain | {"hours": hours, "seed": 3})
        config = page_experiment.config_loads(text, "config.json")
        assert type(config) is kind
        assert config.page_sizes == Config().page_sizes
    assert (config.hours, config.seed) == (0.25, 3)
    with pytest.raises(ValueError, match="unknown field 'hourz'; did you mean hours"):
        page_experiment.config_loads('{"hours": 1, "hourz": 2}', "config.json")
