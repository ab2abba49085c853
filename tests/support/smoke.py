"""Smoke runs of all experiments: once per process, in a temporary folder."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.framework import load_experiment
from jaxkv.cli import run as cli_run
from jaxkv.plotting import render_figure
from jaxkv.report import SMOKE, Claim, SavedRun, Study, read_run
from tests.support import engines, texts

QUICK = {"bench_fit", "cost_check"}
"""Experiments whose smoke run takes a few seconds."""
SLOW = {
    *"""agents batching bench_decode bench_device bench_kernels bench_launches
    bench_simulate bench_start bundled_heads bundled_model calibration causes
    chatbot chunked_prefill counterfactual deepseek disaggregation
    expert_parallel experts fit_coverage flash_attention forecasting grpo
    isoflop jacobi known_entropy kv_cache kv_eviction latency_vs_rate
    learning_rate long_context memory_waste page_size page_tables
    policy_search preemption prefix_caching public_forecasts public_servers
    rivals rollout_mismatch sharing small_weights speculation speculation_zoo
    total_cost""".split()
}
"""Experiments whose smoke run is slow."""

TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 5, "input_length": 700, "output_length": 1, "hash_ids": [3, 4]},
    {"timestamp": 9, "input_length": 1536, "output_length": 2, "hash_ids": [0, 1, 5]},
]
"""A recorded trace: 8 chunks, 2 of them repeated."""


@functools.cache
def folder() -> Path:
    """Returns the folder of the runs, deleted with the process."""
    _folder = tempfile.TemporaryDirectory(prefix="jaxkv-smoke-")
    _folders.append(_folder)
    return Path(_folder.name)


_folders: list[tempfile.TemporaryDirectory] = []


@functools.cache
def model(max_positions: int) -> str:
    """Returns the folder of a tiny model with room for `max_positions` tokens."""
    return engines.save_tiny_model(
        folder() / f"model_{max_positions}", max_positions=max_positions
    )


def _served(max_positions: int) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"model": model(max_positions)}


def _recorded(config: Any) -> dict[str, Any]:
    path = folder() / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return {"trace": str(path)}


def _swept(config: Any) -> dict[str, Any]:
    return {"folder": str(folder() / "sweep"), "keep_models": True}


def _trained(config: Any) -> dict[str, Any]:
    # A small text, since the standard library takes 1 s to read.
    pattern = texts.write_functions(folder() / "text", num=30, times=20)
    corpus = dataclasses.replace(config.trunk.corpus, pattern=pattern, held_out=0.2)
    return {
        "trunk": dataclasses.replace(config.trunk, corpus=corpus),
        "folder": str(folder() / "trained"),
        "export": str(folder() / "exported"),
    }


def _drafting(config: Any) -> dict[str, Any]:
    pattern = texts.write_functions(folder() / "drafted", num=30, times=20)

    def on_that(recipe: Any) -> Any:
        corpus = dataclasses.replace(recipe.run.corpus, pattern=pattern, held_out=0.2)
        run = dataclasses.replace(recipe.run, corpus=corpus)
        return dataclasses.replace(recipe, run=run)

    return {
        "medusa": on_that(config.medusa),
        "eagle": on_that(config.eagle),
        "export": str(folder() / "drafts"),
    }


def _small_text(config: Any) -> dict[str, Any]:
    place = folder() / "small_text"
    pattern = f"{place}/*.py"
    if not place.is_dir():
        texts.write_functions(place, num=30, times=20)
    return {"corpus": dataclasses.replace(config.corpus, pattern=pattern, held_out=0.2)}


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bench_device": lambda _: {"folder": str(folder() / "device")},
    "bundled_heads": _drafting,
    "bundled_model": _trained,
    "deepseek": _small_text,
    "demo": _served(64),
    "isoflop": _swept,
    "jacobi": _served(64),
    "kv_eviction": _served(72),
    "preemption": _served(72),
    "prefix_caching": _recorded,
    "sharing": _served(208),
    "small_weights": lambda _: {"models": (model(64),)},
    "speculation": _served(64),
    "speculation_zoo": _served(64),
}
"""Changes of the smoke configs: small models, and other folders."""


def measured_values(claims: Iterable[Claim]) -> dict[str, float]:
    """Returns measured numbers by claim; tests assert these, not the verdicts."""
    listed = list(claims)
    by_claim = {claim.claim: claim.ours for claim in listed}
    assert len(by_claim) == len(listed)
    return by_claim


def draw(study: Study, result: Any) -> dict[str, bytes]:
    """Renders the files of a figure from a result without a folder."""
    return render_figure(
        lambda axes: study.plot(axes, result),
        panels=study.panels[:2],
        size_inches=study.panels.size_inches,
    )


@functools.cache
def run(name: str) -> SavedRun:
    """Returns the run folder of an experiment's smoke config."""
    experiment = load_experiment(name)
    config = experiment.configs["smoke"]
    config = dataclasses.replace(config, **CHANGES.get(name, lambda _: {})(config))
    out = folder() / "runs" / name
    cli_run.run_study(experiment, config, out, config_name=SMOKE)
    return read_run(out, experiment)
