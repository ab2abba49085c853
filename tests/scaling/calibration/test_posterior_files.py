"""Files of posteriors."""

import json
from pathlib import Path

import numpy as np
import pytest

from scaling.calibration import (
    PRIOR,
    RequestNoise,
    ServerPosterior,
    load_posterior,
    save_posterior,
)


@pytest.fixture
def posterior() -> ServerPosterior:
    rng = np.random.default_rng(0)
    return ServerPosterior(
        deviations=rng.normal(size=(4, len(PRIOR))),
        residuals={"llama-2-7b": rng.normal(size=(4, 2))},
        num_stages={"llama-2-7b": 3},
        stages=("a/0", "a/1", "b/0"),
        mode=rng.normal(size=len(PRIOR)),
        corrections=rng.normal(size=(3, 2)),
        num_effective=12.5,
        devices=("h100",),
        noise=RequestNoise(np.array([0.03, 0.05]), np.array([0.7, 0.9])),
    )


def test_a_written_posterior_is_read_back(
    tmp_path: Path, posterior: ServerPosterior
) -> None:
    save_posterior(tmp_path / "p.json", posterior)
    loaded_posterior = load_posterior(tmp_path / "p.json")
    for name in ("deviations", "mode", "corrections"):
        np.testing.assert_allclose(
            getattr(loaded_posterior, name), getattr(posterior, name), atol=1e-4
        )
    np.testing.assert_allclose(
        loaded_posterior.residuals["llama-2-7b"],
        posterior.residuals["llama-2-7b"],
        rtol=1e-5,
    )
    assert loaded_posterior.stages == posterior.stages
    assert loaded_posterior.num_stages == posterior.num_stages
    assert loaded_posterior.devices == ("h100",)
    assert loaded_posterior.num_effective == 12.5
    assert loaded_posterior.noise is not None
    np.testing.assert_allclose(loaded_posterior.noise.doubt, [0.7, 0.9])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cost_version",), 7, "cost_version=7 must be 1"),
        (("coefficients", "step_s", "draws"), [1.0, -1.0], "no posterior of servers"),
        (("coefficients", "step_s"), 3, "no posterior of servers"),
        (("coefficients",), {}, "coefficients must be"),
        (("request_noise", "scale"), [-1.0, 0.1], "request_noise must have two"),
        (("models", "llama-2-7b", "residuals"), [[0.0], [0.0]], "must have 4 draws"),
        (("models",), [], "no posterior of servers"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, posterior: ServerPosterior, path: tuple, value: object, message: str
) -> None:
    file = tmp_path / "p.json"
    save_posterior(file, posterior)
    document = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as error:
        load_posterior(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)
