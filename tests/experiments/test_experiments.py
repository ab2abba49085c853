"""Common tests of all experiments; findings have separate tests."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from experiments import framework
from experiments.framework import load_experiment
from jaxkv.report import dumps, name_verdict, render_report, run_folder
from pallas_kernels.bench import unavailable_reason
from scaling.corpora import LanguageConfig
from tests.support import figures, smoke
from tests.support.folders import RECORDS


def marked(name: str) -> Any:
    mark = pytest.mark.slow if name in smoke.SLOW else pytest.mark.thorough
    marks = [] if name in smoke.QUICK else [mark]
    if name == "bench_launches" and (reason := unavailable_reason()) is not None:
        marks.append(pytest.mark.skip(reason))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(entry.name) for entry in framework.entries()])
def test_a_smoke_run_writes_a_complete_folder(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke_run = smoke.run(name)
    experiment = load_experiment(name)
    further = smoke_run.study.files(smoke_run.result)
    result = "runs.jsonl" if isinstance(smoke_run.result, list) else "result.npz"
    files = {path.name: path.read_bytes() for path in smoke_run.folder.iterdir()}
    panels = {name for name in files if name.startswith("figure-")}
    # Every panel has both files, numbered from 1; a single one is the figure.
    num = len(panels) // 2
    assert num != 1
    numbers = range(1, num + 1)
    kinds = ("svg", "png")
    assert panels == {f"figure-{i}.{kind}" for i in numbers for kind in kinds}
    assert files.keys() == {
        *("config.json", "env.json", "claims.json"),
        *("figure.svg", "figure.png", "figure.csv"),
        *("report.md", result, *further, *panels),
    }
    assert smoke_run.env["experiment"] == name
    assert smoke_run.env["status"] == "done"
    # All files except the config and the result are derived from these two.
    assert files["claims.json"].decode() == dumps(smoke_run.claims)
    for file, text in further.items():
        assert files[file].decode() == text
    run_folder.draw_figure(smoke_run)
    assert (smoke_run.folder / "figure.svg").read_bytes() == files["figure.svg"]
    assert len(files["figure.png"]) > 10_000
    report = files["report.md"].decode()
    assert report.startswith(f"# {experiment.question}\n")
    for claim in smoke_run.claims:
        assert f"* **{name_verdict(claim.verdict)}**: {claim.claim}; " in report
        # A smoke run is too small for claims on GPUs.
        assert (claim.verdict == "not judged") == claim.needs_size
    assert dumps(smoke_run.metrics)
    assert len(smoke_run.parts) > bool(smoke_run.claims)
    if name in smoke.QUICK or name in WITHOUT_RECORD:
        sheet = figures.draw_sheet(
            lambda: smoke.draw(smoke_run.study, smoke_run.result), monkeypatch
        )
        assert figures.faults(sheet) == []


WITHOUT_RECORD = ("flash_attention", "kv_cache")
"""Experiments without a record, whose figure is checked here."""


def test_records_belong_to_known_experiments() -> None:
    entry_names = {entry.name for entry in framework.entries()}
    assert {record_of(name)[0] for name in RECORDED} <= entry_names
    assert len(RECORDED) > 20


RECORDED = sorted(path.parent.name for path in RECORDS.glob("*/claims.json"))


def record_of(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns a the experiment of its shipped claims."""
    env = json.loads((RECORDS / name / "env.json").read_text("utf-8"))
    claims = json.loads((RECORDS / name / "claims.json").read_text("utf-8"))
    return env["experiment"], claims


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_gets_the_same_verdicts_again(name: str) -> None:
    experiment, shipped = record_of(name)
    stored_run = run_folder.read_run(RECORDS / name, load_experiment(experiment))
    again = json.loads(dumps(stored_run.claims))
    assert [row["claim"] for row in again] == [row["claim"] for row in shipped]
    for actual, expected in zip(again, shipped, strict=True):
        for key in ("ours", "published"):
            actual_numbers, expected_numbers = (
                np.array(row.pop(key), float) for row in (actual, dict(expected))
            )
            np.testing.assert_allclose(
                actual_numbers, expected_numbers, rtol=1e-12, err_msg=key
            )
            del expected[key]
        assert actual == expected
    dumps(stored_run.metrics)
    assert stored_run.parts
    if "yardstick_s" in stored_run.env:  # made by `jaxkv records`
        report = (RECORDS / name / "report.md").read_text("utf-8")
        assert report == render_report(
            load_experiment(experiment).question,
            stored_run.config,
            stored_run.env,
            stored_run.parts,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_a_record_has_the_figure_of_its_arrays(name: str) -> None:
    """Plotted data are equal; pixels depend on the fonts of a machine."""
    path = RECORDS / name / "figure.csv"
    if not path.exists():
        pytest.skip("made by an earlier version, without plotted data")
    run = run_folder.read_run(RECORDS / name, load_experiment(record_of(name)[0]))
    assert smoke.draw(run.study, run.result)["figure.csv"].decode() == path.read_text()


OF_SMOKE = ("batching", "bench_simulate", "rivals")
"""Experiments whose smoke config is changed, instead of the default."""

# By experiment, and by config for an experiment with several studies.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "agents": [
        ({"num_seeds": 0}, "num_seeds=0 must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
    ],
    "policy_search": [
        ({"traffics": ("calls",)}, "traffics='calls' must be 'all'"),
        ({"traffics": ()}, "traffics=() must have at least one traffic"),
        ({"hours": (1, 2)}, "hours=(1, 2) must be three numbers"),
        ({"jobs_per_s": (1.0,), "traffics": ("wide", "chains")}, "must have a rate"),
        ({"rivals": ("quickest",)}, "rivals"),
    ],
    "batching": [
        ({"limits": ()}, "limits=() must be ascending, from 1"),
        ({"limits": (8, 4)}, "limits=(8, 4) must be ascending"),
        ({"deviations": (-1.0,)}, "deviations=(-1.0,) must be ascending, from 0"),
        ({"clients": (9,)}, "must be at most max_slots=8"),
        ({"num_places": 31}, "must hold a prompt and its longest output, 32 tokens"),
        ({"num_requests": 0}, "num_requests=0 must be at least 1"),
        ({"mean_output_tokens": 0.0}, "mean_output_tokens=0.0 must be"),
    ],
    "counterfactual": [
        ({"levels_ms": ()}, "levels_ms=() must have at least one entry"),
        ({"drafters": ("ngram",)}, "must begin with 'none'"),
        ({"num_seeds": 1}, "num_seeds=1 must be"),
        ({"num_pages": 2}, "num_pages=2 must hold a prompt and its longest answer"),
    ],
    "bench_fit": [
        ({"num_points": 15}, "num_points=15 must be at least 16"),
        ({"num_pieces": 0}, "num_pieces=0 must be in"),
    ],
    "bench_kernels": [({"num_calls": 1}, "num_calls=1")],
    "bench_launches": [
        ({"num_layers": ()}, "num_layers=() must be 1 or more"),
        ({"num_layers": (2, 0)}, "num_layers=(2, 0) must be at least 1"),
        ({"max_slots": 0}, "max_slots=0 must be at least 1"),
        ({"head_dim": 96}, "head_dim=96"),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
    ],
    "bench_device": [
        ({"only": ("sleep",)}, "only=('sleep',) must be of"),
        ({"max_s": 0.0}, "max_s=0.0 must be above 0"),
    ],
    "bench_simulate": [({"num_python": 9}, "num_python=9 must be in [1, ")],
    "bench_start": [({"rounds": 0}, "rounds=0 must be at least 1")],
    "bench_train": [
        ({"width": (6,)}, "width=(6,) must be multiples of"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
    ],
    "bench_decode": [
        ({"batch": ()}, "batch="),
        ({"batch": (0,)}, "batch="),
        ({"contexts": ()}, "contexts=()"),
        ({"contexts": (128, 0)}, "contexts=(128, 0)"),
        ({"turn_s": 0.0}, "turn_s=0.0"),
        ({"rounds": 0}, "rounds=0"),
        ({"output_tokens": 16}, "output_tokens=16 must be more than"),
        ({"speculate": "ngram", "output_tokens": 64}, "must be more than 64"),
        ({"token_budget": 16}, "token_budget=16"),
    ],
    "chatbot": [
        ({"hours": 0.0}, "hours=0.0 must be above 0"),
        ({"num_rates": 1}, "must be at least 2"),
        ({"rounds_before": -1.0}, "must be at least 0"),
    ],
    "chunked_prefill": [
        ({"models": ("GPT-5",)}, "must be 1 or more of"),
        ({"shares": (0.5, 0.1)}, "must be 2 or more, ascending"),
        ({"budgets": (64, 128)}, "must be at least 128"),
        ({"seconds": 0.0}, "seconds=0.0 must be above 0"),
    ],
    "cost_check": [
        ({"hidden_size": 100}, "hidden_size=100"),
        ({"sequence": 256}, "sequence=256"),
        ({"families": ("mamba",)}, "mamba"),
        ({"batch": 1}, "batch=1"),
    ],
    "long_context": [
        ({"layouts": ()}, "must be 1 or more"),
        ({"layouts": ("dp=2",)}, "must not have dp"),
        ({"layouts": ("ring=3",)}, "ring=3 must divide"),
        ({"sequences": (2048, 1024)}, "must be ascending"),
    ],
    "parallelism": [
        ({"model": "gpt-5"}, "gpt-5"),
        ({"sequence": 256}, "sequence=256"),
        ({"layouts": ()}, "must be 1 or more"),
        ({"layouts": ("tp=5",)}, "tensor"),
        ({"layouts": ("dp=3",)}, "must be a multiple of dp=3's dp"),
    ],
    "deepseek": [
        ({"kinds": ("mamba",)}, "kinds=('mamba',) must be of"),
        ({"num_seeds": 0}, "num_seeds=0 must be at least 1"),
        ({"num_steps": 9}, "num_steps=9 must be at least 10"),
        ({"num_windows": 1}, "num_windows=1 must be at least 2"),
        ({"batches": (8, 1)}, "batches=(8, 1) must be ascending"),
        ({"batches": (1, 3)}, "num_prompts=16 must be a multiple of"),
    ],
    "demo": [
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"max_slots": 0}, "max_slots=0 must be at least 1"),
        ({"num_requests": -1}, "num_requests=-1 must be at least 1"),
        ({"sigma": float("nan")}, "sigma=nan must be at least 0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"sigma": -1.0}, "sigma=-1.0 must be at least 0"),
        ({"max_length": 64}, "more than max_length=64"),
        ({"output_tokens": (3, 2)}, "output_tokens=(3, 2)"),
    ],
    "disaggregation": [
        ({"applications": ("chess",)}, "must be of"),
        ({"shares": (0.5,)}, "must be 2 or more, ascending"),
        ({"links": (0.0,)}, "must be above 0"),
        ({"queue_loads": (1.0,)}, "must be in"),
    ],
    "expert_parallel": [
        ({"devices": (3,)}, "must be a multiple of 3 devices"),
        ({"devices": (8, 2)}, "devices=(8, 2) must be ascending"),
        ({"num_experts": 12}, "expert=8 must divide the 12 experts"),
        ({"capacities": ()}, "capacities=() must be ascending"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
    ],
    "experts": [
        ({"widths": (16, 24)}, "must be 3 or more, ascending"),
        ({"widths": (12, 24, 32)}, "must be multiples of 8"),
        ({"num_tuned": 0}, "need num_tuned of at least 1"),
        ({"learning_rates": ()}, "must be 1 or more"),
        ({"num_threads": 0}, "must be at least 1"),
    ],
    "fit_coverage": [
        ({"sizes": (5,)}, "sizes=(5,) must be at least 10"),
        ({"num_resamples": 19}, "must be at least 20"),
    ],
    "flash_attention": [
        ({"lengths": (4,)}, "lengths=(4,) must be 2 or more, ascending, from 1"),
        ({"contexts": (8, 4)}, "contexts=(8, 4) must be 2 or more, ascending"),
        ({"num_q_heads": 3}, "must be a multiple of"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
    ],
    "forecasting": [
        ({"num_resamples": 0}, "num_resamples=0 must be at least 1"),
        ({"num_orders": 0}, "num_orders=0 must be at least 1"),
    ],
    "grpo": [
        ({"tasks": ()}, "tasks=() must be 1 or more of"),
        ({"mismatches": ("luck",)}, "mismatches=('luck',) must be of"),
        ({"num_seeds": 1}, "num_seeds=1 must be at least 2"),
        ({"num_rollouts": 15}, "num_rollouts=15 must be a multiple of num_call=10"),
        ({"num_compared": 300}, "num_compared=300 must be at most num_rollouts=200"),
    ],
    "known_entropy": [
        ({"widths": (6,)}, "must be multiples of 4"),
        ({"lengths": (2**30,)}, "must be at least the longest"),
        (
            {"source": LanguageConfig(kind="markov")},
            "source.kind='markov' must be zipf",
        ),
    ],
    "kv_cache": [
        ({"lengths": (4,)}, "lengths=(4,) must be 2 or more, ascending, from 2"),
        ({"lengths": (1, 4)}, "lengths=(1, 4) must be"),
        ({"counted_lengths": (9, 9)}, "counted_lengths=(9, 9) must be"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
    ],
    "latency_vs_rate azure": [
        ({"traces": ("azure",)}, "must be 1 or more of"),
        ({"device": "a900"}, "unknown device"),
        ({"models": ("llama-2-70b",)}, "do not fit 1 x"),
    ],
    "latency_vs_rate policies": [
        ({"rate_factor": 0.0}, "rate_factor=0.0 must be above 0"),
        ({"prediction_sigma": -0.5}, "prediction_sigma=-0.5 must be at least 0"),
        ({"num_devices": 0}, "num_devices=0 must be at least 1"),
        ({"first_requests": 0}, "first_requests=0 must be at least 1"),
        ({"model": "llama-2-70b"}, "do not fit 1 x"),
    ],
    "latency_vs_rate": [
        ({"panels": ("12g",)}, "must be of"),
        ({"systems": ("vLLM",)}, "must be of"),
        ({"hours_share": 0.0}, "hours_share=0.0 must be in"),
        ({"num_rates": 1}, "num_rates=1 must be"),
        ({"num_near": -1}, "num_near=-1 must be at least 0"),
    ],
    "lecture_numbers paper": [({"tokens": 0}, "tokens=0 must be")],
    "mean_estimation": [
        ({"num_sizes": 2}, "num_sizes=2 must be at least 3"),
        ({"max_samples": 64}, "max_samples=64 must be at least 8 times"),
    ],
    "memory_waste": [
        ({"rate": 0.0}, "rate=0.0 must be in"),
        ({"warm_up_s": 4000.0}, "must lie within"),
        ({"num_seeds": 0}, "num_seeds=0 must be"),
        ({"step_scales": (0.0,)}, "must be above 0"),
    ],
    "page_size": [
        ({"contexts": (64, 32)}, "must be ascending"),
        ({"page_sizes": ()}, "must be ascending"),
        ({"num_q_heads": 3}, "must be a multiple of"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"num_calls": 1}, "num_calls=1 must be at least 2"),
    ],
    "page_tables": [({"seed": -1}, "seed=-1 must be in")],
    "preemption": [
        ({"num_requests": 0}, "num_requests=0 must be at least 1"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"prompt_tokens": (9, 8)}, "must be in order"),
        ({"pool_share": 0.0}, "pool_share=0.0 must be in"),
        ({"pool_shares": (1.5,)}, "must be in"),
        ({"swap_shares": (-0.1,)}, "must be in"),
        ({"page_sizes": (0,)}, "must be at least 1"),
        ({"sigma": float("nan")}, "sigma=nan must be at least 0"),
    ],
    "rivals": [
        ({"sides": ("mamba",)}, "sides='mamba' must be in"),
        ({"sides": ("lstm", "lstm")}, "must be different"),
        ({"sizes": (9, 9)}, "must be different"),
        ({"horizons": (20, 10)}, "must be ascending, from 5"),
        ({"seeds": (1, 1)}, "must be different"),
        ({"num_threads": 0}, "must be at least 1"),
    ],
    "sharing paper": [({"num_simulated": 0}, "num_simulated=0 must be at least 1")],
    "sharing": [
        ({"answers": (1, 2)}, "answers=(1, 2) must be in"),
        ({"answers": (9,)}, "answers=(9,) must be in"),
        ({"widths": ()}, "widths=() must not be empty"),
        ({"max_slots": 3}, "max_slots=3 must be at least 4"),
        ({"num_long": 0}, "num_long=0 must be at least 1"),
        ({"prefixes": (0,)}, "prefixes=(0,) must be at least 1"),
        ({"own_tokens": (9, 8)}, "must be in order"),
        ({"length_scale": 0.0}, "length_scale=0.0 must be in"),
        ({"prefixes": (1000,)}, "may need 1128 tokens"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
    "jacobi": [
        ({"output_tokens": 256}, "output_tokens=256 must be more than 256"),
        ({"lengths": (8, 4)}, "lengths=(8, 4) must be ascending"),
        ({"picture_tokens": 0}, "picture_tokens=0 must be at least 1"),
        ({"temperatures": (3.0,)}, "must be in [0, 2]"),
    ],
    "speculation": [
        ({"output_tokens": 256}, "output_tokens=256 must be more than 256"),
        ({"ways": ("medusa",)}, "must be of"),
        ({"batches": (1, 2)}, "batches=(1, 2) must be ascending, from 2"),
        ({"acceptances": (1.5,)}, "must be in [0, 1]"),
        ({"num_coins": 3}, "num_coins=3 must be at least"),
    ],
    "total_cost": [
        ({"offer": "h100"}, "offer='h100' must have a price"),
        ({"offer": "b999:1"}, "unknown device 'b999'"),
        ({"rates": (3.0, 1.0)}, "rates=(3.0, 1.0) must be ascending"),
        ({"traffics": ("9:9",)}, "traffics='9:9' must be PROMPT:ANSWER:FIRST_S"),
        ({"num_sizes": 7}, "num_sizes=7 must be at least 8"),
    ],
    "kv_eviction": [
        ({"budgets": (384,)}, "budgets=(384,) must be below prompt_tokens=384"),
        ({"rules": ("lru",)}, "must be of"),
    ],
    "small_weights": [
        ({"models": ()}, "models=() must be 1 or more"),
        ({"formats": ("int3",)}, "must be of"),
        ({"num_sequences": 1}, "num_sequences=1 must be at least 2"),
    ],
    "speculation_zoo": [
        ({"output_tokens": 272}, "output_tokens=272 must be more than 272"),
        ({"ways": (("plain", 1),)}, "self.ways"),
        ({"ways": (("n-gram, adaptive", 2),)}, "self.ways"),
        ({"adaptive": (("n-gram", 2),)}, "self.adaptive"),
        ({"ways": (("n-gram", 0),)}, "drafts of n-gram"),
        ({"batches": (2, 1)}, "batches=(2, 1) must be ascending"),
        ({"adaptive_rounds": 0}, "adaptive_rounds=0 must be at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_invalid_configs_are_rejected(
    name: str, fields: dict[str, Any], line: str
) -> None:
    experiment, _, config_name = name.partition(" ")
    config = load_experiment(experiment).configs[config_name or "smoke"]
    base = config if name in OF_SMOKE else type(config)()
    with pytest.raises(ValueError, match=re.escape(line)):
        dataclasses.replace(base, **fields)
