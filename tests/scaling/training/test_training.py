"""Training: it learns, counts correctly, and survives interruptions."""

import contextlib
import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import init_params, param_shapes
from jaxkv.progress import Quiet
from scaling import training
from scaling.corpora import (
    END_TOKEN,
    CorpusConfig,
    Document,
    encode_documents,
    load_documents,
    open_corpus,
)
from scaling.costs import Layout, parse_layout
from scaling.training import (
    TrainResult,
    compiled_steps,
    init_train_state,
    objectives,
    optimizers,
    train_in_memory,
)
from scaling.training.recipes import (
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
    TrainConfig,
)
from tests.support import mutation, texts
from tests.support.folders import ROOT
from tests.support.impatience import Stopping
from tests.support.mutation import Bug
from tests.support.shapes import SMALL

MODEL = SMALL


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    pattern = texts.write_functions(tmp_path / "text")
    return TrainConfig(
        model=MODEL,
        corpus=CorpusConfig(pattern=pattern, held_out=0.2),
        batch_size=4,
        seq_len=16,
        num_steps=12,
        warmup_steps=3,
        cooldown_steps=4,
        learning_rate=1e-2,
        report_every=3,
        checkpoint_every=4,
    )


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def without_time(curve: list[dict]) -> list[dict]:
    return [{k: v for k, v in x.items() if k != "duration_s"} for x in curve]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param("muon", marks=pytest.mark.slow), "adamw"]
)
def test_it_learns(config: TrainConfig, tmp_path: Path, kind) -> None:
    optimizer = OptimizerConfig(kind=kind)
    config = dataclasses.replace(config, optimizer=optimizer, num_steps=60)
    progress = Stopping(10**9, "show")
    result = training.train(config, tmp_path / "out", progress=progress)
    assert result.status == "done"
    losses = [line["loss"] for line in result.curve]
    assert abs(losses[0] - math.log(257)) < 1.0
    assert losses[-1] < 2.6
    assert isinstance(config.corpus, CorpusConfig)
    split = load_documents(config.corpus)
    score = objectives.score_documents(
        result.params, split.held_out, model=MODEL, seq_len=16
    )
    assert score.bits_per_byte < 4.5
    assert progress.done[-1] == progress.total == 60 * 4 * 16
    per_epoch = len(encode_documents(split.train)) // 16
    assert result.curve[-1]["epoch"] == pytest.approx(60 * 4 / per_epoch)
    folder = tmp_path / "out"
    written = [json.loads(x) for x in (folder / "curve.jsonl").read_text().splitlines()]
    assert written == result.curve
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["56", "60"]


def assert_same_run(run: TrainResult, expected: TrainResult) -> None:
    assert equal(run.params, expected.params)
    assert without_time(run.curve) == without_time(expected.curve)


NUM_TOKENS = 50_000
"""Vocabulary of the synthetic streams, the same so that one program reads all."""


@pytest.mark.thorough
def test_dice_cannot_be_predicted_better_than_their_entropy() -> None:
    rng = np.random.default_rng(0)
    stream = jnp.asarray(rng.choice([65, 66, 67, 68], NUM_TOKENS).astype(np.uint16))
    optimizer = OptimizerConfig()
    seed = jnp.int32(0)
    state = init_train_state(MODEL, optimizer, seed)
    warm = LearningRateSchedule.constant(1e-2)._replace(warmup=jnp.int32(5))
    schedule = warm._replace(cooldown=jnp.int32(200), end=jnp.int32(400))
    call = compiled_steps(MODEL, optimizer, 4, 16)
    state, _ = call(state, stream, schedule, seed, jnp.int32(390))
    _, info = call(state, stream, schedule, seed, jnp.int32(10))
    assert abs(float(info.loss) - math.log(4)) < 0.05


@pytest.mark.thorough
def test_a_resumed_run_equals_the_uninterrupted_one(
    config: TrainConfig, tmp_path: Path
) -> None:
    unbroken = training.train(config, tmp_path / "unbroken")
    out = tmp_path / "broken"
    first = training.train(config, out, progress=Stopping(2, "show"))
    assert first.status == "stopped"
    assert int(first.curve[-1]["step"]) == 4
    # Interrupted within a report, without a request: the report's state is saved.
    second = training.train(
        config, out, progress=Stopping(2, "show", KeyboardInterrupt())
    )
    assert second.status == "stopped"
    assert second.checkpoint == out / "checkpoints" / "8"
    third = training.train(config, out)
    assert third.status == "done"
    assert_same_run(third, unbroken)
    # A finished run is not trained again.
    assert without_time(training.train(config, out).curve) == without_time(third.curve)


@pytest.mark.thorough
def test_incomplete_output_of_a_killed_run_is_repaired(
    config: TrainConfig, tmp_path: Path
) -> None:
    unbroken = training.train(config, tmp_path / "unbroken")
    out = tmp_path / "out"
    # A crash in the third report: the last checkpoint is that of step 4.
    with pytest.raises(RuntimeError):
        training.train(config, out, progress=Stopping(3, "show", RuntimeError()))
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["4"]
    with (out / "curve.jsonl").open("a") as file:
        file.write('{"step": 7, "los')
    (out / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir()
    result = training.train(config, out)
    assert_same_run(result, unbroken)
    assert len((out / "curve.jsonl").read_text().splitlines()) == len(result.curve)


@contextlib.contextmanager
def files_no_larger_than(num_bytes: int) -> Generator[None]:
    """Makes the system refuse larger files, like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.thorough
def test_a_full_disk_raises_an_error_and_keeps_the_checkpoints(
    config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with (
        files_no_larger_than(10),
        pytest.raises(ValueError, match=r"config.json: cannot be written: File too"),
    ):
        training.train(config, out)
    assert not [path for path in out.rglob("*") if path.is_file()]
    training.train(config, out, progress=Stopping(1, "show"))  # three steps
    with (
        files_no_larger_than(2000),
        pytest.raises(ValueError, match=r"checkpoints/4: cannot be written: File too"),
    ):
        training.train(config, out)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["3"]
    assert "Traceback" not in capfd.readouterr().err
    unbroken = training.train(config, tmp_path / "unbroken")
    result = training.train(config, out)
    assert_same_run(result, unbroken)


@pytest.mark.thorough
def test_a_cooldown_branches_off_a_trunk(config: TrainConfig, tmp_path: Path) -> None:
    full_run = training.train(config, tmp_path / "whole")
    trunk = dataclasses.replace(config, num_steps=8, cooldown_steps=0)
    at = training.train(trunk, tmp_path / "trunk").checkpoint
    branch = training.train(config, tmp_path / "branch", start=at)
    assert equal(branch.params, full_run.params)
    # Its curve counts its own tokens.
    assert branch.curve[-1]["tokens"] == 4 * 4 * 16
    longer = dataclasses.replace(config, seq_len=32, batch_size=2)
    assert training.train(longer, tmp_path / "longer", start=at).status == "done"


@pytest.mark.slow
def test_a_run_on_a_mesh_is_kept_whole(config: TrainConfig, tmp_path: Path) -> None:
    """A mesh resumes it bit for bit, and another layout does, too."""
    model = dataclasses.replace(MODEL, num_kv_heads=2)
    config = dataclasses.replace(config, model=model)
    layout = parse_layout("tp=2,dp=2", zero=1)
    divided = dataclasses.replace(config, how=StepConfig(layout=layout))
    unbroken = training.train(divided, tmp_path / "unbroken")
    out = tmp_path / "broken"
    first = training.train(divided, out, progress=Stopping(2, "show"))
    assert (first.status, int(first.state.step)) == ("stopped", 4)
    other = training.train(config, tmp_path / "other", start=first.checkpoint)
    assert_same_run(training.train(divided, out), unbroken)
    shapes = param_shapes(model)
    for a, b, x in zip(
        *(jax.tree.leaves(x) for x in (other.params, unbroken.params, shapes)),
        strict=True,
    ):
        assert a.shape == b.shape == x.shape
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_run_in_memory_is_the_one_on_disk(
    config: TrainConfig, tmp_path: Path
) -> None:
    on_disk = training.train(config, tmp_path / "out")
    corpus = open_corpus(config.corpus)
    logged: list[dict] = []

    class Logging(Quiet):
        def log(self, step: int, numbers: Mapping[str, int | float]) -> None:
            logged.append({"step": step, **numbers})

    in_memory = train_in_memory(config, corpus, progress=Logging())
    assert in_memory.checkpoint is None
    assert equal(in_memory.state, on_disk.state)  # logging changes no bit
    assert logged == in_memory.curve
    # It stops at steps without a checkpoint.
    assert [line["step"] for line in in_memory.curve] == [3, 6, 9, 12]
    losses = {line["step"]: line["loss"] for line in on_disk.curve}
    assert in_memory.curve[0]["loss"] == losses[3]
    progress = Stopping(2, "show")
    half = train_in_memory(config, corpus, progress=progress)
    assert half.status == "stopped"
    assert progress.done == [3 * 64, 6 * 64]
    second_half = train_in_memory(config, corpus, start=half.state)
    assert equal(second_half.state, on_disk.state)
    assert second_half.curve[-1]["tokens"] == 6 * 64
    assert [x["loss"] for x in half.curve + second_half.curve] == [
        x["loss"] for x in in_memory.curve
    ]
    with pytest.raises(ValueError, match=r"must be at least corpus\.vocab_size=300"):
        train_in_memory(config, corpus._replace(vocab_size=300))


def test_one_compilation_for_all_lengths_rates_and_seeds(config: TrainConfig) -> None:
    call = compiled_steps(MODEL, config.optimizer, 4, 16)
    stream = jnp.zeros((NUM_TOKENS,), jnp.uint16)
    state = init_train_state(MODEL, config.optimizer, jnp.int32(0))
    call(state, stream, LearningRateSchedule.of(config), jnp.int32(0), jnp.int32(3))
    num_programs = call._cache_size()
    for num_steps, rate, kind in ((1, 1e-3, "cosine"), (2, 1e-2, "stable")):
        changed: Any = {"learning_rate": rate, "schedule": kind}
        schedule = LearningRateSchedule.of(dataclasses.replace(config, **changed))
        call(state, stream, schedule, jnp.int32(num_steps), jnp.int32(num_steps))
    assert call._cache_size() == num_programs


def test_divergence_is_a_result_with_the_last_whole_state(
    config: TrainConfig, tmp_path: Path
) -> None:
    # A rate at which float32 overflows within the first reports.
    config = dataclasses.replace(config, learning_rate=1e30, warmup_steps=0)
    result = training.train(config, tmp_path / "out")
    assert result.status == "diverged"
    assert all(math.isfinite(line["loss"]) for line in result.curve)
    finite = jax.tree.map(lambda p: bool(jnp.isfinite(p).all()), result.params)
    assert result.curve or jax.tree.all(finite)


@pytest.mark.thorough
def test_muon_takes_matrices_and_adam_the_rest() -> None:
    model = dataclasses.replace(MODEL, qkv_bias=True)
    state = init_train_state(model, OptimizerConfig(weight_decay=0.0), jnp.int32(0))
    update = jax.jit(
        optimizers.make_optimizer(OptimizerConfig(weight_decay=0.0)).update
    )
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state.params
    )
    updates: Any = update(grads, state.moments, state.params)[0]
    layer = updates["layers"][0]
    # Every head's query is a separate matrix with singular values near one.
    queries = np.asarray(layer["qkv"]["weight"]).reshape(-1, 8, 16)
    singular = np.linalg.svd(queries, compute_uv=False) / (0.2 * math.sqrt(16))
    assert singular.shape == (4, 8)
    assert ((0.5 < singular) & (singular < 1.5)).all()
    # Adam's first step has the same size for each parameter.
    for leaf in (layer["qkv"]["bias"], updates["embed"]["weight"]):
        size = np.abs(np.asarray(leaf))
        np.testing.assert_allclose(size, np.full_like(size, size.mean()), rtol=1e-2)


def test_score_counts_every_byte_and_end_once(tmp_path: Path) -> None:
    texts = [b"abcdefg", b"x", b"0123456789abcde"]
    documents = [Document(str(t), tmp_path, t) for t in texts]
    windows, counts = objectives.cut_windows(documents, 8)
    scored_tokens = windows[:, 1:][counts]
    assert scored_tokens.tolist() == encode_documents(documents).tolist()
    assert windows[0, 0] == windows[1, 0] == windows[2, 0] == END_TOKEN
    assert windows[3, 0] == ord("7")
    # A uniform model needs log2(257) bits for each.
    nothing = jax.tree.map(jnp.zeros_like, init_params(MODEL, jax.random.key(0)))
    for batch_size in (1, 3):
        score = objectives.score_documents(
            nothing, documents, model=MODEL, seq_len=8, batch_size=batch_size
        )
        assert score.num_tokens == 26
        assert score.loss == pytest.approx(math.log(257), rel=1e-5)
        assert score.bits_per_byte == pytest.approx(math.log2(257) * 26 / 23, rel=1e-5)
    with pytest.raises(ValueError, match="no documents"):
        objectives.score_documents(nothing, [], model=MODEL, seq_len=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"warmup_steps": 13}, "warmup_steps=13 must be in"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"seq_len": 65}, "seq_len=65 must be at most"),
        (
            {"model": dataclasses.replace(MODEL, vocab_size=256)},
            "must be at least .*257",
        ),
        ({"how": StepConfig(layout=Layout(tensor=2))}, "num_kv_heads=1 must be a"),
        ({"how": StepConfig(layout=Layout(data=3))}, "batch_size=4 must be a"),
        ({"how": StepConfig(layout=Layout(data=2, zero=2))}, "zero=2 must be 0 or 1"),
        (
            {
                "optimizer": OptimizerConfig(kind="adafactor"),
                "how": StepConfig(layout=Layout(ulysses=2)),
            },
            "needs whole parameters",
        ),
    ],
)
def test_impossible_recipes_are_refused(config: TrainConfig, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)
    with pytest.raises(ValueError, match=r"beta1=1\.0 must be in"):
        OptimizerConfig(beta1=1.0)


def test_the_folder_of_another_run_is_refused(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, num_steps=4, cooldown_steps=0)
    out = tmp_path / "out"
    at = training.train(config, out).checkpoint
    optimizer = OptimizerConfig(momentum=0.5)
    with pytest.raises(ValueError, match=r"differs in \['optimizer.momentum'\]$"):
        training.train(dataclasses.replace(config, optimizer=optimizer), out)
    (tmp_path / "text" / "more.py").write_text("more")
    (tmp_path / "text" / "most.py").write_text("most")
    with pytest.raises(ValueError, match=r"differs in \['corpus_sha256'\]$"):
        training.train(config, out)
    with pytest.raises(ValueError, match="no such checkpoint"):
        training.train(config, tmp_path / "new", start=tmp_path / "missing")
    wider = dataclasses.replace(MODEL, mlp_size=32)
    wider = dataclasses.replace(config, model=wider)
    with pytest.raises(ValueError, match="cannot be continued"):
        training.train(wider, tmp_path / "new", start=at)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_interval(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, num_steps=400, checkpoint_every=20)
    unbroken = training.train(config, tmp_path / "unbroken")
    out = tmp_path / "killed"
    program = (
        "import sys, pathlib\n"
        "from jaxkv.models.config import *\nfrom scaling.corpora.corpora import *\n"
        "from scaling.training.recipes import *\nfrom scaling.training import train\n"
        f"train({config!r}, pathlib.Path({str(out)!r}))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for num_lines in (5, 40, 90):
        process = subprocess.Popen([sys.executable, "-c", program], env=env)
        curve = out / "curve.jsonl"
        limit = time.monotonic() + 120
        while not curve.exists() or len(curve.read_text().splitlines()) < num_lines:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        reported = json.loads(curve.read_text().splitlines()[num_lines - 1])["step"]
        steps = [
            int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit()
        ]
        assert max(steps, default=0) >= reported - config.checkpoint_every
    result = training.train(config, out)
    assert_same_run(result, unbroken)


@pytest.mark.parametrize(
    ("name", "removed", "added"),
    [
        ("score_documents", "losses * counts[start:end]", "losses"),
        ("score_documents", "nats / num_tokens", "nats / counts.size"),
        ("score_documents", "count_bytes(documents)", "num_tokens"),
        ("cut_windows", "start + seq_len) < num)", "start + seq_len) < num - 1)"),
        ("cut_windows", "[np.int32(END_TOKEN)], text]", "text[:1], text]"),
    ],
)
def test_a_seeded_bug_of_a_score_is_detected(
    name: str, removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = test_score_counts_every_byte_and_end_once
    bug = Bug(objectives, name, removed, added, check, (Path(),))
    mutation.assert_noticed(monkeypatch, bug)
