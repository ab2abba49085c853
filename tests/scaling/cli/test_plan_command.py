"""`jaxkv plan`: the plan of the lecture, fits with intervals, and errors."""

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaling import fits
from scaling.cli.plan import find
from scaling.fits import to_json
from scaling.laws import CHINCHILLA, CONSTANTS, compute_optimum
from scaling.plan import budgets
from tests.support.commands import Command, assert_refused, document, words

GPUS = "--gpu a100:4.0:312 --gpu v100:2.5:125 --gpu t4:1.0:65 --mfu 0.4"
LECTURE = f"{GPUS} --budget-usd 5e6"
SMALL = "--vocab-size 256 --sequence 128 --tie-embeddings --attention causal"


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit of a surface with a known optimum, and its folder."""
    rng = np.random.default_rng(0)
    flops = np.repeat(np.geomspace(1e18, 1e21, 5), 8)
    num_params = 0.1 * flops**0.5 * 10 ** rng.uniform(-0.6, 0.6, 40)
    num_tokens = flops / (6 * num_params)
    loss = 1.8 + 420 / num_params**0.34 + 1500 / num_tokens**0.36
    data = {
        "num_params": num_params,
        "num_tokens": num_tokens,
        "flops": flops,
        "loss": loss * np.exp(rng.normal(0, 0.003, 40)),
    }
    fit_result = fits.fit(CHINCHILLA, data)
    fit_result = fits.bootstrap(fit_result, data, num_resamples=60)
    document = to_json(fit_result) | {"count": "non-embedding", "others": []}
    folder = tmp_path_factory.mktemp("fit")
    (folder / "fit.json").write_text(json.dumps(document))
    return folder


def planned(jaxkv: Command, args: str) -> dict[str, Any]:
    return document(jaxkv, "plan", *args.split())


def reported(jaxkv: Command, args: str) -> str:
    return words(jaxkv, "plan", *args.split())


THE_LECTURE_S = {
    "flops": (5.616e23, 1e-12),
    "num_params": (4.74762e10, 1e-5),
    "num_tokens": (1.97151e12, 1e-5),
    "tokens_per_param": (41.526, 2e-5),
    "loss": (1.896964, 5e-7),
    "cost_usd": (5e6, 1e-12),
    "device_s": (1.25e6 * 3600, 1e-12),
}
"""Numbers, and how far off they may be."""


def test_the_plan_of_the_lecture(jaxkv: Command) -> None:
    plan = planned(jaxkv, LECTURE)
    for name, (number, error) in THE_LECTURE_S.items():
        assert plan[name] == pytest.approx(number, rel=error), name
    assert plan["num_params_searched"] == pytest.approx(plan["num_params"], rel=1e-6)
    for name in ("interval", "num_devices", "duration_s"):
        assert plan[name] is None
    output = (plan["device"], plan["warnings"], plan["count"])
    assert output == ("a100", [], "total")
    shape = plan["architecture"]
    assert abs(shape["num_params"]["total"] / plan["num_params"] - 1) < 1e-3
    # The counts of a layer, by hand.
    h = shape["hidden_size"]
    i = shape["mlp_size"]
    kv = shape["num_kv_heads"] * shape["head_dim"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h
    total = 2 * 32_000 * h + shape["num_layers"] * layer + h
    assert shape["num_params"]["total"] == total
    assert plan["memory_bytes"] > 16 * total
    assert shape["min_devices"] == -(-plan["memory_bytes"] // 80e9)
    # Attention costs more than 6 N, so the budget trains on fewer tokens.
    assert shape["cost_usd"] > 5e6
    spent = shape["num_tokens"] * shape["train_flops_per_token"]
    assert spent == pytest.approx(plan["flops"], rel=1e-12)
    assert plan["exact_optimum"]["loss"] <= shape["loss"]


def test_the_plan_is_explained_step_by_step(jaxkv: Command) -> None:
    output = reported(jaxkv, f"{LECTURE} --days 60")
    for part in (
        "a100 4 312 124.8 1.123e+17 best v100 2.5 125 50 7.2e+16 t4 1 65 26 9.36e+16",
        "5,000,000 USD / 4 USD an hour = 1,250,000 device-hours",
        "= 5.616e+23 FLOPs",
        "0.29 / 0.63 = 0.4603",
        "N* = 4.748e+10, D* = 1.972e+12, 41.5 tokens per parameter",
        "finds N = 4.74762e+10 (closed form 4.74762e+10)",
        "too few tokens B / D^beta 0.1117",
        "without an interval",
        "on 869 of them 59.93 days",
    ):
        assert part in output


def test_days_and_devices_determine_each_other(jaxkv: Command) -> None:
    days = planned(jaxkv, f"{LECTURE} --days 60")
    assert days["num_devices"] == 869
    assert days["duration_s"] == pytest.approx(days["device_s"] / 869, rel=1e-12)
    devices = planned(jaxkv, f"{LECTURE} --devices 1000")
    assert devices["duration_s"] == pytest.approx(4.5e6, rel=1e-12)
    few = planned(jaxkv, f"{LECTURE} --devices 2")
    assert "2 devices cannot hold a training step" in few["warnings"][0]
    # Days and devices together are a budget.
    both = planned(jaxkv, "--gpu h100:2 --mfu 0.5 --devices 64 --days 10")
    assert both["flops"] == pytest.approx(64 * 864_000 * 989.4e12 * 0.5, rel=1e-12)
    assert both["cost_usd"] == pytest.approx(64 * 240 * 2, rel=1e-12)


def test_a_budget_in_flops_is_enough(jaxkv: Command) -> None:
    plan = planned(jaxkv, "--flops 5.76e23 --law hoffmann-tex")
    assert plan["num_params"] == pytest.approx(4.036e10, rel=1e-3)
    assert (plan["device"], plan["cost_usd"], plan["device_s"]) == (None, None, None)
    small = planned(jaxkv, f"--flops 1e15 --count non-embedding {SMALL}")
    counts = small["architecture"]["num_params"]
    assert counts["non_embedding"] == pytest.approx(small["num_params"], rel=0.02)
    assert (
        counts["total"] - counts["non_embedding"]
        == 256 * (small["architecture"]["hidden_size"])
    )


def test_serving_and_repetition(jaxkv: Command) -> None:
    plain = planned(jaxkv, LECTURE)
    served = planned(jaxkv, f"{LECTURE} --inference-tokens 2e12")
    assert served["num_params"] < plain["num_params"]
    assert served["compute_optimum"]["num_params"] == plain["num_params"]
    spent = served["train_flops"] + served["serve_flops"]
    assert spent == pytest.approx(plain["flops"], rel=1e-9)
    assert served["equal_loss"]["loss"] == pytest.approx(plain["loss"], rel=1e-12)
    assert 0 < served["equal_loss"]["saved"] < 0.2
    hours = served["device_s"] + served["serve_device_s"]
    assert hours == pytest.approx(plain["device_s"], rel=1e-9)
    # Serving at half the MFU counts twice.
    args = f"{LECTURE} --inference-tokens 1e12 --serve-mfu 0.2"
    assert planned(jaxkv, args)["num_params"] == served["num_params"]
    few = planned(jaxkv, f"{LECTURE} --unique-tokens 2e11")
    assert few["epochs"] == pytest.approx(few["num_tokens"] / 2e11, rel=1e-12)
    assert few["epochs"] > 4
    assert few["loss"] > plain["loss"]
    assert few["num_params_searched"] == pytest.approx(few["num_params"], rel=1e-6)
    assert planned(jaxkv, f"{LECTURE} --unique-tokens 1e13")["epochs"] == 1
    (output,) = planned(jaxkv, f"{LECTURE} --unique-tokens 1e9")["warnings"]
    assert "half of the budget would reach a loss of 2.5977" in output
    output = reported(jaxkv, f"{args} --unique-tokens 2e11")
    assert "weighed x 2 for serving's MFU of 0.2" in output
    assert "with new data it would be" in output


def test_designs_of_equal_loss_respect_the_unique_tokens(jaxkv: Command) -> None:
    args = "--flops 1e22 --law hoffmann --inference-tokens 1e12"
    free = planned(jaxkv, args)
    limited = planned(jaxkv, f"{args} --unique-tokens 2e10")
    assert limited["compute_optimum"] == free["compute_optimum"]
    assert free["training_optimum"] == free["compute_optimum"]
    training = limited["training_optimum"]
    assert training["num_params"] == pytest.approx(4.266e9, rel=1e-3)
    assert training["num_tokens"] == pytest.approx(3.907e11, rel=1e-3)
    assert training["loss"] == pytest.approx(2.2154, abs=5e-5)
    same = limited["equal_loss"]
    assert same["loss"] == pytest.approx(training["loss"], rel=1e-9)
    assert same["num_params"] < training["num_params"]
    assert 0 < same["saved"] < 0.2
    output = reported(jaxkv, f"{args} --unique-tokens 2e10")
    assert "training only 4.266e+09 3.907e+11 2.2154" in output
    assert "same loss 3.443e+09 5.139e+11 2.2154" in output


def test_a_fit_gives_intervals_and_its_parameter_count(
    jaxkv: Command, fit: Path
) -> None:
    args = f"--flops 1e22 --law {fit} {SMALL}"
    plan = planned(jaxkv, args)
    truth = compute_optimum(
        CHINCHILLA, dict(A=420, B=1500, E=1.8, alpha=0.34, beta=0.36), 1e22
    )
    low, high = plan["interval"]
    assert low < plan["loss"] < high
    assert low < truth.loss < high
    lowest, highest = plan["prediction_interval"]
    assert highest - lowest > high - low
    low, high = plan["num_params_interval"]
    assert low < truth.num_params < high
    assert plan["count"] == "non-embedding"
    counted = plan["architecture"]["num_params"]["non_embedding"]
    assert counted == pytest.approx(plan["num_params"], rel=2e-3)
    assert not [x for x in plan["warnings"] if "times the operations" in x]
    far = planned(jaxkv, f"--flops 1e24 --law {fit}/fit.json --count total")
    output = " ".join(far["warnings"])
    assert "times the operations of the largest run" in output
    assert "counted non-embedding parameters, --count is total" in output
    limits = f"{args} --unique-tokens 1e10 --inference-tokens 1e10"
    low, high = planned(jaxkv, limits)["interval"]
    assert low < high
    assert "90% interval of the law" in reported(jaxkv, args)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (9.0, []),
        (11.0, ["the operations of the largest run that was fitted"]),
        (150.0, ["was fitted; beyond 100 times intervals hold no promise"]),
    ],
)
def test_a_plan_warns_by_its_distance_from_the_fitted_runs(
    ratio: float, expected: list[str]
) -> None:
    ranges = {"flops": (1e18, 2e20)}
    result: Any = types.SimpleNamespace(ranges=ranges, warnings=[])
    law: Any = types.SimpleNamespace(fit=result, doubts=())
    case: Any = types.SimpleNamespace(loss_model=law)
    flops = ratio * 2e20
    assert find.extrapolation_ratio(case, flops) == pytest.approx(ratio)
    warnings = [*find.fit_warnings(case, flops)]
    assert len(warnings) == len(expected)
    for warning, end in zip(warnings, expected, strict=True):
        assert warning.startswith(f"training takes {ratio:,.3g} times")
        assert warning.endswith(end)
    law.fit = None
    assert find.extrapolation_ratio(case, flops) is None
    assert not [*find.fit_warnings(case, flops)]


def test_the_smallest_budget_that_reaches_a_loss(jaxkv: Command, fit: Path) -> None:
    plan = planned(jaxkv, "--target-loss 2.0 --gpu a100:4.0:312 --days 30")
    assert plan["target_loss"] == 2.0
    assert plan["flops"] == pytest.approx(4.249004e22, rel=1e-6)
    assert plan["loss"] == pytest.approx(2.0, rel=1e-12)
    assert plan["flops_interval"] is None
    assert plan["cost_usd"] == pytest.approx(
        plan["flops"] / 312e12 / 0.4 / 3600 * 4, rel=1e-9
    )
    assert plan["duration_s"] == pytest.approx(30 * 86400, rel=0.02)
    # The plan for that budget is the same.
    again = planned(jaxkv, f"--flops {plan['flops']!r}")
    assert again["num_params"] == pytest.approx(plan["num_params"], rel=1e-9)
    assert again["architecture"]["num_layers"] == plan["architecture"]["num_layers"]

    fitted = planned(jaxkv, f"--target-loss 2.1 --law {fit} {SMALL}")
    powers = CHINCHILLA.two_powers
    assert powers is not None
    truth = powers(dict(A=420, B=1500, E=1.8, alpha=0.34, beta=0.36))
    low, high = fitted["flops_interval"]
    assert low < fitted["flops"] < high
    assert low < budgets.needed_budget(truth, 2.1) < high
    near = planned(jaxkv, f"--target-loss 1.83 --law {fit} {SMALL}")
    assert near["flops_interval"][1] is None
    output = " ".join(near["warnings"])
    assert "in some resamples no budget reaches a loss of 1.83" in output
    output = reported(jaxkv, f"--target-loss 2.1 --law {fit} {SMALL}")
    assert (
        "The loss is given: L = 2.1. The smallest budget whose best N and D" in output
    )
    assert f"{low:.4g} to {high:.4g} FLOPs" in output

    limits = "--target-loss 2.1 --inference-tokens 1e12 --unique-tokens 5e10"
    limited = planned(jaxkv, limits)
    assert limited["loss"] == pytest.approx(2.1, rel=1e-9)
    assert limited["epochs"] > 1
    spent = limited["train_flops"] + limited["serve_flops"]
    assert spent == pytest.approx(limited["flops"], rel=1e-9)
    assert limited["flops"] > planned(jaxkv, limits[:42])["flops"]


def test_a_plan_uses_the_fit_of_the_selected_group(jaxkv: Command, fit: Path) -> None:
    plain = json.loads((fit / "fit.json").read_text())
    other = plain | {"group": "b", "coefficients": plain["coefficients"] | {"E": 1.5}}
    other["fixed"] = {"E": 1.5}
    groups = plain | {"by": "data", "group": "a", "others": [other]}
    groups["log_warnings"] = ["bpb looks like bits"]
    Path("groups.json").write_text(json.dumps(groups))
    args = f"--flops 1e22 --law groups.json {SMALL}"
    first = planned(jaxkv, f"{args} --group a")
    assert first["loss"] == planned(jaxkv, f"--flops 1e22 --law {fit} {SMALL}")["loss"]
    assert first["law"] == "groups.json (data a)"
    assert first["warnings"][0] == "bpb looks like bits"
    second = planned(jaxkv, f"{args} --group b")
    assert second["loss"] < first["loss"] - 0.2
    assert (first["fixed"], second["fixed"]) == ({}, {"E": 1.5})
    assert "E = 1.5 (given)" in reported(jaxkv, f"{args} --group b")
    for more, line in (
        ("", "it has a law for each data; give --group, one of: a, b"),
        (" --group c", "unknown --group 'c'; one of: a, b"),
    ):
        assert_refused(jaxkv, f"plan {args}{more}", line)


OBJECTIVE = "--objective ttft_mean=1,tpot_mean=0.05"
SERVE = f"--gpu h100:2.5 --kv-heads 8 {OBJECTIVE} --draws 20"


@pytest.mark.thorough
def test_a_budget_of_training_and_serving(jaxkv: Command) -> None:
    args = f"{SERVE} --budget-usd 2e5 --grams-per-kwh 360"
    plan = planned(jaxkv, f"{args} --serve 1024:256:10 --serve-days 730")
    spent = plan["training_usd"] + plan["serving_usd"]
    assert spent == pytest.approx(2e5, rel=1e-9)
    assert plan["cost_usd"] == pytest.approx(2e5, rel=1e-9)
    flops = 6 * plan["num_params"] * plan["num_tokens"]
    assert plan["training_usd"] == pytest.approx(
        flops / (989.4e12 * 0.4) / 3600 * 2.5, rel=1e-9
    )
    powers = budgets.law_two_powers(CHINCHILLA, CONSTANTS["lecture"])
    loss = budgets.budget_loss(powers, plan["num_params"], plan["num_tokens"])
    assert plan["loss"] == pytest.approx(loss, rel=1e-12)
    low, high = plan["num_params_interval"]
    assert low <= plan["num_params"] <= high
    low, high = plan["interval"]
    assert low < plan["loss"] < high
    serving = plan["serving"]
    assert serving["ttft_s"] <= 1 + 1e-6
    assert serving["tpot_s"] <= 0.05 + 1e-6
    requests = 10 * 730 * 86_400
    answer = serving["usd_per_answer"]["median"]
    shape = plan["architecture"]
    # The server is that of a design; the plan is between two designs.
    assert answer * requests == pytest.approx(plan["serving_usd"], rel=0.08)
    assert abs(shape["off"]) < 0.1
    hours = plan["devices"] * 730 * 24
    assert plan["serving_usd"] <= hours * 2.5 * 1.08
    grams = serving["grams_per_answer"]["median"]
    assert grams == pytest.approx(serving["joules_per_answer"]["median"] * 1e-4)
    assert plan["joules"] == pytest.approx(
        plan["training_joules"] + plan["serving_joules"], rel=1e-12
    )
    rule = plan["comparison"]["training_only"]
    assert rule["num_params"] > plan["num_params"]
    assert rule["saved"] > 0
    output = reported(jaxkv, f"{args} --serve 1024:256:10 --serve-days 730")
    for part in ("How much does serving cost?", "cheapest to train", "an answer [g of"):
        assert part in output
    # Twice the days: a smaller model, and a higher loss.
    longer = planned(jaxkv, f"{args} --serve 1024:256:10 --serve-days 1460")
    assert longer["num_params"] <= plan["num_params"]
    assert longer["loss"] > plan["loss"]
    nothing = planned(jaxkv, f"{args} --serve 1024:256:0")
    free = planned(jaxkv, "--gpu h100:2.5 --budget-usd 2e5")
    for name in ("num_params", "num_tokens", "loss"):
        assert nothing[name] == pytest.approx(free[name], rel=1e-6), name
    assert (nothing["devices"], nothing["serving_usd"]) == (0, 0)
    assert nothing["serving"] is None


@pytest.mark.slow
def test_the_least_cost_of_a_loss(jaxkv: Command, fit: Path) -> None:
    Path("load.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n0,1000,200\n1,1048,312\n2,1024,256\n"
    )
    args = f"{SERVE} --target-loss 2.1 --law {fit}"
    plan = planned(jaxkv, f"{args} --serve load.csv --plot --out plan")
    assert plan["loss"] == pytest.approx(2.1, rel=1e-9)
    assert plan["load"]["rate_per_s"] == 1.0
    assert plan["load"]["prompt_tokens"] == pytest.approx(1024)
    low, high = plan["cost_interval"]
    assert low < plan["cost_usd"] < high
    assert plan["interval"][0] < 2.1 < plan["interval"][1]
    assert Path("plan/figure.png").read_bytes()[:4] == b"\x89PNG"
    # A server that is idle most of the time is paid in full.
    whole = planned(jaxkv, f"{args} --serve load.csv --whole-servers")
    assert any("--whole-servers" in line for line in plan["warnings"])
    assert whole["serving_usd"] == pytest.approx(365 * 24 * 2.5, rel=1e-9)
    assert (whole["devices"], whole["serving"]["num_servers"]) == (1, 1)
    assert whole["cost_usd"] > plan["cost_usd"]
    energy = planned(jaxkv, f"{args} --serve load.csv --least joules")
    assert energy["joules"] <= plan["joules"] * 1.01
    assert energy["unit"] == "joules"
    budget = energy["joules"]
    again = planned(
        jaxkv, f"{SERVE} --law {fit} --serve load.csv --budget-joules {budget!r}"
    )
    # The ladder begins at another size.
    assert again["loss"] == pytest.approx(2.1, rel=1e-4)
    with_watts = planned(jaxkv, f"--gpu h100 --budget-joules {budget!r}")
    assert with_watts["flops"] == pytest.approx(budget / 700 * 989.4e12 * 0.4, rel=1e-9)


def test_the_folder(jaxkv: Command) -> None:
    plan = planned(jaxkv, f"{LECTURE} --plot --out here")
    stored_plan = json.loads(Path("here/plan.json").read_text())
    assert stored_plan["num_params"] == plan["num_params"]
    assert Path("here/figure.png").read_bytes()[:4] == b"\x89PNG"
    assert b"tokens per parameter" in Path("here/figure.svg").read_bytes()
    cost = document(jaxkv, "cost", "here/architecture.json")
    assert cost["num_params"] == plan["architecture"]["num_params"]


TARGET = "--target-loss 2 --gpu t4:1"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            "",
            "a budget is missing; one of: --budget-usd, --budget-joules, --flops, --da",
        ),
        ("--days 3", "a budget is missing"),
        ("--flops 1e20 --budget-usd 5", "--budget-usd and --flops: give exactly one"),
        (f"{LECTURE} --days 1 --devices 5", "give exactly one budget"),
        ("--budget-usd 5e6", "--budget-usd needs --gpu NAME:USD_PER_HOUR:TFLOPS"),
        ("--days 3 --devices 3", "--days with --devices needs --gpu"),
        ("--budget-usd 5e6 --gpu a100:x:312", "'x' is no positive price"),
        ("--budget-usd 5e6 --gpu b999:4", "--gpu unknown device 'b999'"),
        ("--budget-usd -5 --gpu a100:4:312", "--budget-usd -5: must be in [1e-06"),
        ("--flops nan", "--flops nan: must be in"),
        ("--flops 1e20 --mfu 0", "--mfu 0: must be in (0, 1]"),
        ("--flops 1e20 --serve-mfu 2", "--serve-mfu 2: must be in (0, 1]"),
        ("--flops 1e20 --inference-tokens -1", "--inference-tokens -1: must be in"),
        ("--flops 1e20 --serve 9:9:9", "--flops and --serve exclude each other"),
        ("--target-loss 2 --serve 9:9:9", "--serve 9:9:9 needs --gpu"),
        (f"{TARGET} --serve 9:9", "must be PROMPT:ANSWER:RATE"),
        (f"{TARGET} --serve 9:0:9", "--serve 9:0:9: ANSWER must be in [1, "),
        (f"{TARGET} --serve 9:9:-1", "--serve 9:9:-1: RATE must be in [0, 1e+09]"),
        (f"{TARGET} --serve 9:9:9", "--serve 9:9:9 needs --objective, such as"),
        (f"{TARGET} --serve 9:9:9 --objective ttft=1", "must be ttft_mean or tpot_mea"),
        (f"{TARGET} --serve 9:9:9 --objective e2e_mean=1", "e2e_mean: must be"),
        (f"{TARGET} --serve 9:9:9 --unique-tokens 9", "and --serve exclude each other"),
        (f"{TARGET} --serve 9:9:9 --inference-tokens 9", "--inference-tokens and --s"),
        (f"{TARGET} --serve 9:9:9 --serve-days -1", "--serve-days -1: must be in"),
        ("--target-loss 1 --gpu t4:1 --serve 9:9:9", "must be above the floor"),
        ("--target-loss 2 --gpu t4:0 --serve 9:9:9", "'0' is no positive price"),
        ("--target-loss 2 --gpu t4 --serve 9:9:0", "t4: --serve in usd needs a price"),
        ("--budget-usd 9 --gpu t4:1 --serve 9:9:0 --least joules", "has its unit"),
        ("--budget-joules 9 --gpu b300:1", "the power of b300 is unknown"),
        ("--flops 1e20 --objective ttft_mean=1", "--objective needs --serve"),
        ("--flops 1e20 --whole-servers", "--whole-servers needs --serve"),
        ("--flops 1e20 --grams-per-kwh 4", "--grams-per-kwh needs --serve"),
        ("--flops 1e20 --unique-tokens 0", "--unique-tokens 0: must be in"),
        ("--flops 1e20 --devices 0", "--devices 0: must be in"),
        ("--flops 1e20 --level 1", "--level 1: must be in (0, 1)"),
        ("--flops 1e20 --vocab-size 0", "vocab_size=0 must be in"),
        ("--flops 1e20 --law lectures", "unknown law 'lectures'"),
        ("--flops 1e20 --law lectur", "file or folder; did you mean lecture?"),
        ("--flops 1e20 --law chinchila", "did you mean chinchilla or chinchilla-tied?"),
        ("--flops 1e20 --law bad.jsn", "bad.jsn', no such file or folder; did you mea"),
        ("--flops 1e20 --law ./bad.jsn", "no such file or folder; did you mean bad"),
        ("--flops 1e20 --law /dev/zero", "it is a device, not a file"),
        ("--flops 1e20 --group a", "--group a: --law lecture is not a fit of groups"),
        ("--target-loss 1", "--target-loss 1 by lecture: target=1 must be above the f"),
        ("--target-loss nan", "--target-loss nan: must be in"),
        ("--target-loss 2 --flops 1e20", "--flops and --target-loss: give exactly one"),
        ("--target-loss 1.8 --unique-tokens 1e10", "be reached with 1e+10 unique"),
        ("--target-loss 30", "30: a budget of 1.263e+10 FLOPs is too small"),
        ("--flops 1e20 --law chinchilla", "no published constants here"),
        ("--flops 1e20 --law here/fit.json", "no such file or folder"),
        ("--flops 1e20 --law bad.json", "bad.json: not a fit.json"),
        ("--flops 1e20 --law .", "fit.json"),
        ("--flops 1e20 --count some", "--count"),
        ("--flops 1e9", "a budget of 1e+09 FLOPs is too small for any design"),
        ("--flops 1e12", "; with --vocab-size in [1, 5,991] there are smaller designs"),
        ("--flops 1e14 --sequence 900000000", "; a smaller --sequence might do"),
        ("--flops 1e20 --law odd.json", "odd.json: shape={'vocab_size': '9'} must"),
        ("--flops 1e-3", "too small for any design"),
        (f"{GPUS} --budget-usd 1e30", "too large for any design"),
        ("--flops 1e32", "too large for any design: 2.981e+14 parameters (total)"),
        ("--flops 1e31", "the largest design has 29,390,700,609,536 with"),
        ("--flops 1e20 --inference-tokens 1e30", "1e+30 tokens to serve is too small"),
        ("--flops 1e20 --unique-tokens 1", "1 unique tokens is too small for any"),
        ("--flops 1e20 --out bad.json", "bad.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    jaxkv: Command, fit: Path, args: str, line: str
) -> None:
    Path("bad.json").write_text("{")
    odd = json.loads((fit / "fit.json").read_text()) | {"shape": {"vocab_size": "9"}}
    Path("odd.json").write_text(json.dumps(odd))
    assert_refused(jaxkv, f"plan {args}", line)
