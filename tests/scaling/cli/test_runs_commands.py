"""`jaxkv compare` and `jaxkv next` read a log of runs."""

import csv
from pathlib import Path

import numpy as np
import pytest

from scaling.laws import simulate_isoflop_runs
from tests.support.commands import assert_refused, command, document, words

SPEEDUP = 1.5


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a log of two optimizers, one with 1.5 times the compute for its loss."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("logs") / "optimizers.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["optimizer", "C", "loss"])
        for name, factor in (("adam", 1.0), ("muon", SPEEDUP)):
            for flops in np.geomspace(1e17, 1e20, 12):
                loss = 1.7 + 2e3 * (flops * factor) ** -0.154
                noisy = loss * np.exp(0.001 * rng.standard_normal())
                writer.writerow([name, flops, noisy])
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("floor", ["shared", "free", "1.7"])
def test_the_speedup_is_that_of_the_simulated_runs(
    optimizers: Path, floor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    called = command(capsys, "compare", str(optimizers))
    flags = ("--by", "optimizer", "--floor", floor, "--bootstrap", "200")
    answer = document(called, *flags)
    (speedup,) = answer["speedups"]
    assert speedup["group"] == "muon"
    np.testing.assert_allclose(speedup["ratio"], SPEEDUP, rtol=0.06)
    low, high = (np.array(speedup[name]) for name in ("low", "high"))
    assert (low < high).all()
    assert ((low < SPEEDUP) & (high > SPEEDUP)).sum() >= 1
    floors = [group["coefficients"]["E"] for group in answer["groups"]]
    assert (len({*floors}) == 1) is (floor != "free")
    if floor == "shared":
        # At equal exponents and floors the ratio is a power of the excess losses.
        adam, muon = (group["coefficients"] for group in answer["groups"])
        for loss, ratio in zip(speedup["loss"], speedup["ratio"], strict=True):
            needed = [((loss - x["E"]) / x["a"]) ** (-1 / x["b"]) for x in (adam, muon)]
            assert ratio == pytest.approx(needed[0] / needed[1], rel=1e-3)
        assert "compute of adam over that of each group" in words(called, *flags)


@pytest.mark.thorough
def test_one_floor_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "floors.csv"
    lines = ["data,C,loss"]
    for name, floor in (("a", 1.7), ("b", 2.2)):
        for flops in np.geomspace(1e17, 1e21, 14):
            lines.append(f"{name},{flops},{floor + 2e3 * flops**-0.154:.5f}")
    path.write_text("\n".join(lines) + "\n")
    answer = document(
        command(capsys, "compare", str(path)), "--by", "data", "--bootstrap", "20"
    )
    assert any("one floor does not fit" in line for line in answer["warnings"])


def test_bad_options_are_refused(
    optimizers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = command(capsys, "compare", str(optimizers))
    assert_refused(compared, "", "--by must name a column")
    assert_refused(compared, "--by seed", "no column 'seed'")
    assert_refused(compared, "--by optimizer --baseline sgd", "must be one of adam")
    assert_refused(compared, "--by optimizer --floor high", "shared, free or a number")
    followed = command(capsys, "next", str(optimizers))
    assert_refused(followed, "", "two of N, D and C are needed")
    assert_refused(followed, "--budget -1", "must be above 0")


@pytest.mark.thorough
@pytest.mark.parametrize("ask", ["loss", "exponent", "size"])
def test_next_runs_are_within_the_budget_and_lower_the_error(
    ask: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = simulate_isoflop_runs(noise="normal")
    path = tmp_path / "runs.csv"
    rows = zip(
        *(runs[x][::4] for x in ("num_params", "num_tokens", "loss")), strict=True
    )
    path.write_text("N,D,loss\n" + "\n".join(",".join(map(str, x)) for x in rows))
    called = command(capsys, "next", str(path))
    answer = document(called, "--budget", "1e21", "--ask", ask, "--bootstrap", "200")
    errors = [run["standard_error_after"] for run in answer["runs"]]
    assert sum(run["flops"] for run in answer["runs"]) <= 1e21
    assert errors
    assert all(np.diff([answer["standard_error"], *errors]) < 0)


@pytest.mark.slow
def test_all_laws_are_ranked_by_their_held_out_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = simulate_isoflop_runs(noise="normal")
    path = tmp_path / "runs.csv"
    columns = [runs[x][::4] for x in ("num_params", "num_tokens", "loss")]
    lines = [",".join(map(str, row)) for row in np.stack(columns, 1)]
    path.write_text("\n".join(["N,D,loss", *lines]))
    called = command(capsys, "fit", str(path), "--out", str(tmp_path / "law"))
    answer = document(called, "--law", "all", "--bootstrap", "0")
    errors = [fit["held_out"]["mean_error"] for fit in answer["fits"]]
    assert len(errors) > 5
    assert errors == sorted(errors)
    laws = [fit["law"] for fit in answer["fits"]]
    assert laws.index("chinchilla") < laws.index("kaplan-n")
    assert not {"rosenfeld", "over-training"} & {*laws}
    assert_refused(called, "--law all --by N", "exclude each other")
