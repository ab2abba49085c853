"""`jaxkv fit`: from a log to coefficients, warnings, frontiers, and a folder."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt

from scaling.cli import FitConfig
from scaling.cli.fit import drawing, fitting, grids, report
from scaling.cli.fit.groups import FitGroup
from scaling.cli.fit.report import metrics, summary
from scaling.fits import (
    Objective,
    describe_thinning,
    from_json,
    levenberg_marquardt,
    profile,
)
from scaling.fits import fit as fit_law
from scaling.frontiers import (
    Frontier,
    PowerLaw,
    bootstrap_frontier,
    frontier_set,
    isoflop,
)
from scaling.frontiers.frontier import Minima
from scaling.frontiers.groups import find_run_groups
from scaling.laws import CHINCHILLA, simulate_isoflop_runs
from scaling.logs import read_log
from tests.support import traces
from tests.support.commands import Command, assert_refused, document
from tests.support.impatience import Stopping
from tests.support.mutation import replace

ALPHA = 0.36
BETA = 0.38


def loss(num_params: Any, num_tokens: Any) -> Any:
    return 1.6 + 60 * num_params**-ALPHA + 250 * num_tokens**-BETA


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sweep: 5 budgets, 7 sizes, one diverged run, and curves."""
    folder = tmp_path_factory.mktemp("sweep")
    noise = np.random.default_rng(0).normal(0, 0.002, 35)
    runs = []
    curves = []
    for budget in np.geomspace(1e14, 9e15, 5):
        for share in np.geomspace(0.25, 4, 7):
            n = 0.3 * (budget / 6) ** 0.48 * share
            d = budget / (6 * n)
            i = len(runs)
            run = {
                "run_id": f"r{i}",
                "status": "completed",
                "num_params": 1.1 * n,
                "num_params_non_embedding": n,
                "num_tokens": d,
                "flops": 6 * n * d,
                "loss": loss(n, d) * np.exp(noise[i]),
            }
            runs.append(run | ({"status": "diverged", "loss": None} if i == 9 else {}))
            for num_tokens in np.geomspace(0.02, 1, 20) * d:
                point = {"run_id": f"r{i}", "step": 1, "num_tokens": num_tokens}
                curves.append(
                    point | {"flops": 6 * n * num_tokens, "loss": loss(n, num_tokens)}
                )
    for name, rows in (("runs", runs), ("curves", curves)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


OF_THE_SWEEP = {
    "law": "chinchilla",
    "num_points": 34,
    "count": "non-embedding",
    "status": "converged",
    "notes": ["1 row left out by status: 1 diverged"],
}


@pytest.mark.slow
def test_a_sweep_is_fitted_without_flags(jaxkv: Command, sweep: Path) -> None:
    args = ("fit", str(sweep), "--count", "non-embedding", "--bootstrap", "200")
    status, out, err = jaxkv(*args, "--out", "here", "--json")
    assert status == 0, err
    assert "chinchilla: 200 of 200 resamples" in err
    document = json.loads(out)
    assert {name: document[name] for name in OF_THE_SWEEP} == OF_THE_SWEEP
    assert document["held_out"]["num_points"] == 21
    assert document["held_out"]["mean_error"] < 0.01
    a = BETA / (ALPHA + BETA)
    low, high = document["exponent_intervals"]["a"]
    assert low < a < high
    for name, value in {"alpha": ALPHA, "beta": BETA, "E": 1.6}.items():
        low, high = document["intervals"][name]
        assert low < document["coefficients"][name] < high
        assert low < value < high
    by_method = {frontier["method"]: frontier for frontier in document["frontiers"]}
    for method in ("parabola", "akima", "projection", "envelope"):
        assert by_method[method]["num_resamples"] > 150
        assert (
            by_method[method]["a_interval"][0] < a < by_method[method]["a_interval"][1]
        )
    assert (
        by_method["parabola"]["num_minima"] == by_method["parabola"]["num_budgets"] == 5
    )
    assert by_method["envelope"]["num_budgets"] == 500
    assert {"parabola, corrected", "parabola of 3", "parabola of 7"} <= by_method.keys()

    folder = Path("here")
    fit_text = (folder / "fit.json").read_text()
    result = from_json(fit_text)
    assert result.coefficients == document["coefficients"]
    assert json.loads(fit_text)["count"] == "non-embedding"
    config = json.loads((folder / "config.json").read_text())
    assert config["log"] == str(sweep)
    report = (folder / "report.md").read_text()
    assert "| alpha | 0.3" in report
    assert "| parabola | 5 of 5 |" in report
    assert (folder / "figure.svg").exists()

    # Again from its config into the same folder, with tables as output.
    again = ("fit", "--config", "here/config.json", "--out", "here")
    status, out, err = jaxkv(*again)
    assert status == 0, err
    assert json.loads((folder / "fit.json").read_text()) == json.loads(fit_text)
    assert "a: N* ~ C^a" in out
    assert "report: here/report.md" in out


def fitted(**config: Any) -> dict[str, Any]:
    return json.loads(fitting.fit_log(FitConfig(**config)).document)


@pytest.mark.slow
def test_published_coefficients_come_out_of_published_runs() -> None:
    path = traces.find("losses/gadre_c4.csv")
    rule = "N <= 0.42e9 and token_multiplier == 20 or N < 2e7 and token_multiplier==320"
    fit_report = fitted(
        log=str(path),
        law="over-training",
        where=rule,
        loss_kind="mse",
        space="linear",
        bootstrap=0,
    )
    # Gadre et al. 2024, arXiv:2403.08540: five runs, least squares.
    published = {"a": 113.69, "b": 189.52, "eta": -0.24247, "E": 1.50825}
    assert fit_report["coefficients"] == pytest.approx(published, rel=1e-4)
    assert fit_report["coefficients"]["E"] == pytest.approx(1.50825, abs=2e-5)
    assert fit_report["warnings"][0].startswith("5 points are few for 4 coefficients")
    held = fit_report["held_out"]
    assert held["num_points"] == 29
    assert held["mean_error"] < 0.03
    # With the published coefficients, on the held-out runs.
    log = read_log(path)
    others = log.take(~log.select(rule))
    n, d = (others.columns[name] for name in ("num_params", "num_tokens"))
    eta = published["eta"]
    law = published["E"] + 113.69 * n**eta + 189.52 * 6 ** (eta / 2) * d**eta
    error = np.log(law / others.columns["loss"])
    assert held["mean_error"] == pytest.approx(np.abs(error).mean(), rel=0.01)
    assert held["last_error"] == pytest.approx(error[n.argmax()], rel=0.01)
    assert fit_report["frontiers"] == []


@pytest.mark.slow
def test_several_laws_are_fitted_and_tabulated(sweep: Path) -> None:
    config = FitConfig(
        log=str(sweep),
        law="chinchilla, kaplan-d",
        hold_out="flops > 5e15",
        bootstrap=0,
    )
    result = fitting.fit_log(config)
    document = metrics(result)
    assert [fit["law"] for fit in document["fits"]] == ["chinchilla", "kaplan-d"]
    assert [fit["held_out"]["num_points"] for fit in document["fits"]] == [7, 7]
    errors = [fit["held_out"]["mean_error"] for fit in document["fits"]]
    assert errors[0] < 0.02 < errors[1]
    assert document["coefficients"] == document["fits"][0]["coefficients"]
    output = "".join(map(repr, summary(result)))
    assert "Held out: 7 of 34 runs." in output
    assert "kaplan-d" in output


@pytest.mark.thorough
def test_a_log_with_one_input_is_fitted_by_one_input_laws(jaxkv: Command) -> None:
    sizes = np.geomspace(1e7, 1e10, 12)
    rows = "".join(f"{n!r},{(8.8e13 / n) ** 0.076!r}\n" for n in sizes.tolist())
    Path("log.csv").write_text(f"params,loss\n{rows}")
    args = ("log.csv", "--law", "kaplan-n", "--bootstrap", "0", "--out", "o")
    fit_report = document(jaxkv, "fit", *args)
    assert fit_report["coefficients"] == pytest.approx({"Nc": 8.8e13, "alpha": 0.076})
    assert fit_report["held_out"]["num_points"] == 4
    assert fit_report["held_out"]["mean_error"] < 1e-6
    assert fit_report["frontiers"] == []
    assert "no isoFLOP groups, no envelope: the log has no D" in fit_report["notes"]
    assert "parameters" in Path("o/figure.svg").read_text()
    line = "kaplan-n does not define how loss falls with parameters and with"
    assert_refused(jaxkv, "plan --flops 1e20 --law o", line)


@pytest.mark.slow
def test_each_group_is_fitted_separately(jaxkv: Command, sweep: Path) -> None:
    lines = ["N,D,data,loss"]
    rng = np.random.default_rng(1)
    for data, shift in (("web", 0.0), ("code", -0.5), ("few", 0.0)):
        for budget in np.geomspace(1e14, 9e15, 4):
            for share in np.geomspace(0.25, 4, 6):
                n = 0.3 * (budget / 6) ** 0.48 * share
                d = budget / 6 / n
                noisy_loss = (loss(n, d) + shift) * np.exp(rng.normal(0, 0.002))
                if data != "few" or len(lines) < 52:
                    lines.append(f"{n:.17g},{d:.17g},{data},{noisy_loss:.17g}")
    Path("log.csv").write_text("\n".join(lines) + "\n")
    alone = document(jaxkv, "fit", "log.csv", "--bootstrap", "0")
    (output,) = [x for x in alone["warnings"] if "groups the runs" in x]
    assert output.startswith("data is not used, and groups the runs (web, code, few)")
    args = ("log.csv", "--by", "data", "--bootstrap", "50", "--out", "o")
    fit_report = document(jaxkv, "fit", *args)
    fits = fit_report["fits"]
    assert (fit_report["by"], fit_report["group"]) == ("data", "web")
    assert [(fit["group"], fit["num_points"]) for fit in fits] == [
        ("web", 24),
        ("code", 24),
    ]
    floors = [fit["coefficients"]["E"] for fit in fits]
    assert floors[0] - floors[1] == pytest.approx(0.5, abs=0.15)
    assert fits[0]["coefficients"] == fit_report["coefficients"]
    (left,) = [x for x in fit_report["warnings"] if "not fitted" in x]
    assert left == (
        "data few: not fitted: 3 points are too few for the 5 coefficients of "
        "chinchilla"
    )
    assert {frontier["group"] for frontier in fit_report["frontiers"]} == {
        "web",
        "code",
    }
    # Equal to fits of separate logs.
    only = ("--where", "data == 'code'", "--ignore", "data != 'code'")
    one = document(jaxkv, "fit", "log.csv", "--bootstrap", "50", *only)
    for name in ("coefficients", "intervals"):
        assert one[name] == fits[1][name]
    assert "chinchilla, code" in Path("o/report.md").read_text()
    shape = ("--vocab-size", "256", "--sequence", "128")
    code = ("--target-loss", "2.0", "--law", "o", "--group", "code")
    assert document(jaxkv, "plan", *code, *shape)["coefficients"] == one["coefficients"]
    line = "no group can be fitted, such as D "
    assert_refused(jaxkv, "fit log.csv --by D --bootstrap 0", line)


@pytest.mark.slow
def test_given_coefficients_reach_report_and_plan(jaxkv: Command, sweep: Path) -> None:
    args = (str(sweep), "--count", "non-embedding", "--bootstrap", "50", "--out", "o")
    flags = ("--fix", "E=1.6", "--bound", "alpha=0.1:0.5")
    fit_report = document(jaxkv, "fit", *args, *flags)
    assert fit_report["coefficients"]["E"] == 1.6
    assert fit_report["intervals"]["E"] == [1.6, 1.6]
    assert fit_report["bounds"] == {"alpha": [0.1, 0.5]}
    assert "| E | 1.6 | given |" in Path("o/report.md").read_text()
    plan = document(jaxkv, "plan", "--flops", "1e18", "--law", "o")
    assert fit_report["fixed"] == plan["fixed"] == {"E": 1.6}


def test_curves_of_one_size_have_no_envelope(tmp_path: Path) -> None:
    d = np.geomspace(1e9, 1e11, 30).tolist()
    rows = "".join(f"a,1e8,{x!r},{loss(1e8, x)!r}\n" for x in d)
    log = tmp_path / "log.csv"
    log.write_text(f"run,N,D,loss\n{rows}")
    fit_report = fitted(log=str(log), law="kaplan-d", bootstrap=0)
    assert fit_report["frontiers"] == []
    assert (
        "no envelope: curves of 1 size: below 3, the best one has no neighbour on "
        "either side" in fit_report["notes"]
    )


@pytest.mark.slow
def test_ctrl_c_keeps_the_completed_fits(sweep: Path) -> None:
    config = FitConfig(log=str(sweep), law="chinchilla,kaplan-d")
    result = fitting.fit_log(config, Stopping(1))
    document = json.loads(result.document)
    for fit in (document, *document["others"]):
        assert fit["samples"] is None
        assert fit["intervals"]
        assert any("interrupted" in line for line in fit["warnings"])
    assert {frontier["num_resamples"] for frontier in document["frontiers"]} == {0}


@pytest.mark.thorough
def test_the_objective_contour_has_its_minimum_at_the_fit(sweep: Path) -> None:
    log = read_log(sweep)
    fit = fit_law(CHINCHILLA, log.columns)
    names = profile.choose_pair(fit)
    assert names == ("alpha", "beta")
    alpha, beta = (fit.coefficients[name] for name in names)
    x = alpha * np.array([0.8, 1.0, 1.3])
    y = beta * np.array([1.0, 1.2])
    contour = profile.profile_objective(fit, log.columns, names, x, y)
    np.testing.assert_allclose(contour[0, 1], fit.objective, rtol=1e-8)
    assert (np.delete(contour.ravel(), 1) > 1.5 * fit.objective).all()
    # With the exponents held, least squares of the loss is linear in E, A and B.
    objective = Objective("mse", space="linear")
    squares = fit_law(CHINCHILLA, log.columns, objective=objective)
    n, d, losses = (log.columns[c] for c in ("num_params", "num_tokens", "loss"))
    design = np.stack([np.ones_like(n), n ** -x[0], d ** -y[1]], 1)
    left = losses - design @ np.linalg.lstsq(design, losses)[0]
    contour = profile.profile_objective(squares, log.columns, names, x[:1], y[1:])
    np.testing.assert_allclose(contour, [[(left**2).sum() / 2]], rtol=1e-6)


@pytest.mark.thorough
def test_long_logs_report_subsampling(sweep: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(levenberg_marquardt, "MAX_EXACT_ROWS", 30)
    monkeypatch.setattr(grids, "MAX_GRID_ROWS", 20)
    monkeypatch.setattr(drawing, "MAX_DOTS", 25)
    monkeypatch.setattr(frontier_set, "MAX_GROUPED", 28)
    replace(monkeypatch, profile, "profile_objective", None)  # it is not called
    config = FitConfig(log=str(sweep), bootstrap=50)
    result = fitting.fit_log(config)
    document = json.loads(result.document)
    assert document["notes"][2:] == [
        describe_thinning(34),
        "the contour of the objective is not drawn: more than 20 rows",
        "the figure has dots for 25 of 34 rows",
        "isoFLOP minima are found from 28 of 34 grouped runs",
    ]
    assert document["num_points"] == 34
    assert set(np.bincount(result.group[result.group >= 0])) == {5, 6}
    assert result.contour.objective.size == 0
    assert result.contour.x_samples.size == 50
    figure, axes = plt.subplots(2, 2)
    drawing.plot(axes, result)
    assert axes[1, 1].get_title() == "chinchilla: where resamples ended"
    assert len(axes[0, 0].collections[0].get_offsets()) == 25
    plt.close(figure)


# Peak memory of the process itself: `ru_maxrss` starts with that of its parent.
FIT_AND_TELL_MEMORY = """if True:
    import sys
    from pathlib import Path
    from jaxkv.cli import main as cli
    status = cli.main(sys.argv[1:])
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line for line in lines if line.startswith("VmHWM")), file=sys.stderr)
    sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="no /proc/self/status"
)
def test_a_hundred_thousand_rows_take_little_memory(tmp_path: Path) -> None:
    runs = simulate_isoflop_runs(100_000)
    rows = np.stack([*runs.values()], 1)
    log = tmp_path / "log.csv"
    np.savetxt(log, rows, "%.8g", ",", header=",".join(runs), comments="")
    args = ["fit", str(log), "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", FIT_AND_TELL_MEMORY, *args, "--bootstrap", "400"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    low, high = json.loads(done.stdout)["exponent_intervals"]["a"]
    assert low < 0.36 / 0.7 < high
    assert int(done.stderr.split("VmHWM:")[1].split()[0]) < 1.5e6, "kilobytes"


@pytest.mark.slow
def test_a_doubtful_surface_gives_no_correction(tmp_path: Path) -> None:
    flops = np.repeat(np.geomspace(6e18, 3e21, 4), 7)
    n = 0.1 * flops**0.5 * 10 ** np.tile(np.linspace(-0.5, 0.5, 7), 4)
    losses = 1.8 + 420 * n**-0.34 + 1500 * (flops / 6 / n) ** -0.36
    losses *= np.exp(0.005 * np.random.default_rng(0).normal(size=28))
    for scale in (1.0, 1.4):
        losses[27] *= scale
        rows = np.stack([n, flops, losses], 1)
        log = tmp_path / f"log{scale}.csv"
        np.savetxt(log, rows, "%.10g", ",", header="N,C,loss", comments="")
        document = fitted(log=str(log), bootstrap=100)
        exponents = {
            frontier["method"]: frontier["a"] for frontier in document["frontiers"]
        }
        is_sound = scale == 1
        assert ("parabola, corrected" in exponents) == is_sound
        assert document["shift"].startswith("The surface by projection" * is_sound)
        assert exponents["projection, robust"] == pytest.approx(0.514, abs=0.02)
        reported = [line for line in document["notes"] if "bias of parabolas" in line]
        assert len(reported) == (not is_sound)
        sizes = document["residual_sizes"]
        assert sizes["half"] < sizes["most"] < sizes["worst"]
        if is_sound:
            assert document["warnings"] == document["frontier_warnings"] == []
            assert sizes["worst"] < 0.02
            continue
        assert document["shift"] == ""
        assert sizes["worst"] == pytest.approx(np.log(1.4), abs=0.02)
        output = document["frontier_warnings"]
        assert any("projection: a few runs decide the surface" in x for x in output)
        assert any("the methods contradict each other" in x for x in output)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "LOG is missing"),
        ("no.csv", "no.csv: cannot be read"),
        ("log.csv --law chinchila", "no law 'chinchila'"),
        ("log.csv --law ,", "must name a law"),
        ("log.csv --law chinchilla,learning-rate", "laws of different targets"),
        ("log.csv --where N>9", "the rule selects no row to fit"),
        ("log.csv --where M>9", "no column 'M'; one of N, D, loss, row"),
        (
            "log.csv --where N>1 --hold-out N>1",
            "--where and --hold-out must not be given together",
        ),
        ("log.csv --columns U", "--columns U: must be INPUT=COLUMN"),
        ("log.csv --law data-constrained", "the law reads num_unique_tokens; name"),
        ("log.csv --ignore row==2", "2 points are too few for the 5 coefficients"),
        ("log.csv --law kaplan-n --ignore row==2", "num_params is the same in all 2"),
        ("log.csv --bootstrap -1", "jaxkv: bootstrap=-1 must be at least 0"),
        ("log.csv --bootstrap 1", "jaxkv: bootstrap=1 must be 0 or at least 2"),
        ("log.csv --loss-kindd mse", "did you mean --loss-kind?"),
        ("log.csv --level 2", "jaxkv: level=2.0 must be in (0, 1)"),
        ("log.csv --law power-floor --ignore row==1", "2 points are too few for the 3"),
        ("log.csv --by data", "log.csv: no column 'data'; there is N, D, loss"),
        ("log.csv --by ,", "--by ,: must name a column"),
        ("log.csv --last-of run", "--last-of run: no such column; there is N, D, los"),
        ("log.csv --columns U=N", "--columns U: no law has this input: unknown input"),
        ("log.csv --n N --columns num_params=D", "--n N and --columns num_params=D;"),
        ("log.csv --fix E", "--fix E: must be NAME=VALUE with a finite number, not ''"),
        ("log.csv --fix E=1 E=2", "--fix and --bound must name each coefficient once"),
        ("log.csv --bound E=3", "--bound E=3: must be NAME=LOW:HIGH"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    jaxkv: Command, args: str, line: str
) -> None:
    Path("log.csv").write_text("N,D,loss\n1,2,3\n4,5,3\n1,7,2\n")
    assert_refused(jaxkv, f"fit {args}", line)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_held_out_rows_give_no_warnings(tmp_path: Path) -> None:
    rows = ["params,D,val/loss,lr,kept"]
    for n in (10, 30, 100, 300):
        for d in (2e8, 6e8, 2e9, 6e9):
            rows.append(f"{n},{d},{loss(n * 1e6, d):.6f},1,yes")
            rows += [f"{n},{d},{2 * loss(n * 1e6, d):.6f},2,no"] * (n == 300)
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows))
    config: dict[str, Any] = {"log": str(path), "bootstrap": 0, "n_unit": 1e6}
    config["n"] = "params"
    ruled = FitConfig(**config, where="kept == 'yes' and params < 2.5e8")
    document = json.loads(fitting.fit_log(ruled).document)
    assert document["num_points"] == 12
    assert not document["log_warnings"]
    note = "rules compare params times 1e+06, the unit of its flag"
    assert note in document["notes"]


def test_uninformative_intervals_are_unknown() -> None:
    written = report._interval
    assert written((0.3, 0.4), 0.35) == "0.3 to 0.4"
    assert written((1e-9, 1.8), 1.6) == "1e-09 to 1.8"
    for pair in ((1e-300, 1e300), (3.0, math.inf), (None, 2.0), (-math.inf, 1.0)):
        assert written(pair, 400.0) == "unknown"
    assert written((-3.0, 4.1), share=True) == "unknown"
    assert written((0.42, 0.5), share=True) == "0.42 to 0.5"
    assert written(None) == "-"


def test_disjoint_intervals_give_a_warning() -> None:
    data = {
        "num_params": np.repeat([1e7, 3e7, 1e8, 3e8], 4),
        "num_tokens": np.tile([2e8, 6e8, 2e9, 6e9], 4),
    }
    data["loss"] = loss(*data.values())
    fit_result = fit_law(CHINCHILLA, data)
    law = PowerLaw(1.0, 0.6, (0.58, 0.62))
    minima = Minima.nowhere(1, 2, 0)
    flops = np.array([1e18, 1e19])
    parabola = Frontier("parabola", flops, minima, law, None, None, 10, ())
    near = parabola._replace(
        method="akima", num_params=PowerLaw(1.0, 0.595, (0.59, 0.6))
    )
    envelope = parabola._replace(method=frontier_set.ENVELOPE)
    apart = frontier_set.FrontierSet(
        frontier_set._NO_GROUPS, [parabola, near, envelope], [], None, [], []
    )
    [line] = report.disjoint_intervals([fit_result], apart)
    assert line.startswith("intervals of a, N* ~ C^a, do not overlap: chinchilla 0.5")
    assert "parabola 0.600 (0.580 to 0.620); akima 0.595 (0.590 to 0.600)" in line
    assert frontier_set.ENVELOPE not in line
    assert not report.disjoint_intervals([], apart)
    other = parabola._replace(method="x", num_params=PowerLaw(1.0, 0.5, (0.49, 0.51)))
    assert report.disjoint_intervals([], apart._replace(frontiers=[parabola, other]))


def test_parabolas_of_two_parts_are_drawn_through_their_own_runs() -> None:
    """Losses are parabolas in log N; the last run is held out."""
    place = np.repeat([7.9, 8.1, 7.8, 8.2], 5)
    flops = np.repeat([1e18, 1e19, 2e18, 2e19], 5)
    num_params = np.tile(np.geomspace(1e7, 1e9, 5), 4)
    losses = 3 + 0.5 * (np.log10(num_params) - place) ** 2
    parts = []
    for first in (0, 10):
        some = slice(first, first + 10)
        n, c = num_params[some], flops[some]
        groups = find_run_groups(n, c / 6 / n, c, losses[some])
        frontier = bootstrap_frontier(
            frontier_set.PARABOLA,
            isoflop.by_parabola(groups),
            groups.flops,
            groups.strata,
            resamples=0,
        )
        rows = (np.arange(21) >= first) & (np.arange(21) < first + 10)
        rows[20] = first == 10
        frontiers = frontier_set.FrontierSet(groups, [frontier], [], None, [], [])
        parts.append(FitGroup("", rows, [], frontiers))
    drawn = grids.find_parabolas(parts, np.arange(21) < 20)
    assert drawn.group.tolist() == [*np.repeat(np.arange(4), 5), -1]
    x, y = drawn.curves
    np.testing.assert_allclose(x[:, [0, -1]], [[1e7, 1e9]] * 4)
    expected = 3 + 0.5 * (np.log10(x) - place[::5, None]) ** 2
    np.testing.assert_allclose(y, expected, rtol=1e-9)
    np.testing.assert_allclose(drawn.minima.x, 10 ** place[::5], rtol=1e-9)
    np.testing.assert_allclose(drawn.minima.y, 3, rtol=1e-9)
