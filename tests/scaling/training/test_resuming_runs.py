"""Checkpoints: damaged files are named, and a run continues from a whole one."""

import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxkv import files
from jaxkv.parallel import gather_numbers
from scaling import training
from scaling.corpora import CorpusConfig
from scaling.costs import Layout, parse_layout
from scaling.sweeps import branching, paused
from scaling.training import (
    TrainResult,
    init_train_state,
    restore_checkpoint,
    run_folder,
    save_checkpoint,
)
from scaling.training.recipes import OptimizerConfig, StepConfig, TrainConfig
from scaling.training.step import TrainState
from tests.support import texts
from tests.support.impatience import Stopping
from tests.support.refusals import refused
from tests.support.shapes import SMALL

MODEL = dataclasses.replace(SMALL, num_kv_heads=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    pattern = texts.write_functions(tmp_path_factory.mktemp("corpus") / "text")
    return TrainConfig(
        model=MODEL,
        corpus=CorpusConfig(pattern=pattern, held_out=0.2),
        optimizer=OptimizerConfig(kind="adamw"),
        batch_size=4,
        seq_len=16,
        num_steps=12,
        warmup_steps=3,
        cooldown_steps=4,
        learning_rate=1e-2,
        report_every=3,
        checkpoint_every=4,
    )


@pytest.fixture(scope="module")
def state(config: TrainConfig) -> TrainState:
    """A state after three steps, with numbers of both signs."""
    begun = init_train_state(config.model, config.optimizer, jnp.int32(0))
    moved = jax.tree.map(lambda x: x.at[..., :1].set(-0.0), begun.params)
    return begun._replace(params=moved, step=jnp.int32(3))


def raw(state: TrainState) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damages(path: Path, rng: random.Random, num: int = 6) -> Iterator[str]:
    """Damages a file in `num` ways, one after another, and restores it."""
    content = path.read_bytes()
    place = rng.randrange(len(content))
    flipped = bytearray(content)
    flipped[place] ^= 1 << rng.randrange(8)
    ways = {
        "flipped": bytes(flipped),
        "cut off": content[:place],
        "empty": b"",
        "longer": content + b"\n",
        "missing": None,
        "a folder": None,
    }
    for what in rng.sample([*ways], num):
        path.unlink()
        if (data := ways[what]) is not None:
            path.write_bytes(data)
        elif what == "a folder":
            path.mkdir()
        yield what
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)


@pytest.fixture
def rng() -> random.Random:
    """A generator with another seed in every run of the tests."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"{seed=}")
    return random.Random(seed)


def test_every_damaged_file_is_named_in_a_line(
    state: TrainState,
    tmp_path: Path,
    rng: random.Random,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "3"
    save_checkpoint(folder, state)
    assert raw(restore_checkpoint(folder, state)) == raw(state)
    paths = all_files(folder)
    assert len(paths) > 10
    for path in paths:
        for _ in damages(path, rng):
            with refused(f"{path}: is "):
                restore_checkpoint(folder, state)
    for extra in ("one", "state/d/more", ".hidden"):
        (folder / extra).write_text("")
        with refused(f"{folder / extra}: is not listed in SHA256SUMS"):
            restore_checkpoint(folder, state)
        (folder / extra).unlink()
    assert raw(restore_checkpoint(folder, state)) == raw(state)
    assert capfd.readouterr().err == ""


def test_a_checkpoint_without_digests_is_refused(
    state: TrainState, tmp_path: Path
) -> None:
    """Earlier versions wrote them, with the arrays in the folder itself."""
    with files.silencing_orbax(), ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "3", state)
    with refused(f"{tmp_path / '3' / 'SHA256SUMS'}: is missing"):
        restore_checkpoint(tmp_path / "3", state)


def test_the_list_of_digests_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("abc")
    files.write_checksums(tmp_path)
    line, seal = (tmp_path / files.DIGESTS).read_text().splitlines()
    # FIPS 180-2, appendix B.1.
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert line == f"{abc}  a/b"
    assert seal.startswith("# ")  # sha256sum skips it
    files.verify_checksums(tmp_path)


def test_another_model_is_refused_without_noise(
    config: TrainConfig,
    state: TrainState,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    save_checkpoint(tmp_path / "3", state)
    wider = dataclasses.replace(MODEL, mlp_size=32, num_layers=2)
    like = init_train_state(wider, config.optimizer, jnp.int32(0))
    with refused(f"{tmp_path / '3'}: cannot be continued: "):
        restore_checkpoint(tmp_path / "3", like)
    assert capfd.readouterr().err == ""


def test_every_damaged_file_of_a_paused_sweep_is_named(
    state: TrainState, tmp_path: Path, rng: random.Random
) -> None:
    lanes = branching.BatchedRuns(state, 3, np.ones(1, bool), (((1.5, 5.0),),), 0.25)
    half = branching.PausedRuns(1, lanes, lanes)
    folder = tmp_path / "group"
    paused.save_paused(folder, half)
    paused_sweep = paused.load_paused(folder, state)
    assert paused_sweep is not None
    assert paused_sweep.branch is not None
    assert raw(paused_sweep.branch.state) == raw(state)
    assert paused_sweep.trunk._replace(state=state, alive=lanes.alive) == lanes
    paths = all_files(folder)
    assert len(paths) > 20
    for path in paths:
        for _ in damages(path, rng, 1):
            line = f"{folder}: cannot be continued; delete it: {path}: is "
            with refused(line):
                paused.load_paused(folder, state)
    (folder / "more").write_text("")
    with refused(f"{folder / 'more'}: is not listed"):
        paused.load_paused(folder, state)


def outcome[T](call: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """Returns the result of a call; or None, and the error message."""
    try:
        return call(*args), ""
    except ValueError as error:
        line = str(error)
    assert "\n" not in line
    return None, line


LINE = {"step": 3, "tokens": 192, "epoch": 0.1, "loss": 5.0, "duration_s": 1.0}


@pytest.fixture
def begun(config: TrainConfig, state: TrainState, tmp_path: Path) -> Path:
    """The folder of a run with checkpoints of steps 0 and 3; no program is compiled."""
    out = tmp_path / "out"
    stopped = training.train(config, out, progress=Stopping(0))
    assert stopped.checkpoint == out / "checkpoints" / "0"
    run = (stopped.checkpoint / run_folder.RUN_FILE).read_text()
    curve = json.dumps(LINE) + "\n"
    notes = {run_folder.RUN_FILE: run, run_folder.CURVE: curve}
    save_checkpoint(out / "checkpoints" / "3", state, notes)
    (out / run_folder.CURVE).write_text(curve)
    return out


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def go_on(config: TrainConfig, out: Path, **settings: Any) -> TrainResult:
    """Resumes a run, and stops it before its next step."""
    return training.train(config, out, progress=Stopping(0), **settings)


def test_a_run_continues_from_the_newest_whole_checkpoint(
    config: TrainConfig, state: TrainState, begun: Path, rng: random.Random
) -> None:
    for resume in ("last", "previous"):
        resumed_run = go_on(config, begun, resume=resume)
        assert raw(resumed_run.state) == raw(state)
        assert resumed_run.curve == [LINE]
    path = begun / "checkpoints" / "3" / "state" / "_METADATA"
    for _ in damages(path, rng):
        with refused(f"{path}: is ", "; --resume previous (or deleting "):
            go_on(config, begun)
    assert names(begun) == ["0", "3"]
    path.write_text("")
    with pytest.warns(
        UserWarning, match=r"/3/state/_METADATA: is .*; going on from .*"
    ):
        resumed_run = go_on(config, begun, resume="previous")
    assert (int(resumed_run.state.step), resumed_run.curve) == (0, [])
    assert names(begun) == ["0"]
    assert (begun / run_folder.CURVE).read_text() == ""
    (begun / "checkpoints" / "0" / files.DIGESTS).unlink()
    with refused("0/SHA256SUMS: is missing", "no checkpoint is whole"):
        go_on(config, begun, resume="previous")
    assert names(begun) == ["0"]


def test_a_checkpoint_of_another_step_is_refused(
    config: TrainConfig, begun: Path
) -> None:
    (begun / "checkpoints" / "3").rename(begun / "checkpoints" / "6")
    with refused("checkpoints/6: holds the state of step=3"):
        go_on(config, begun)


def test_files_next_to_the_checkpoints_change_no_run(
    config: TrainConfig, state: TrainState, begun: Path, rng: random.Random
) -> None:
    """The curve comes from the checkpoint; a damaged config raises an error."""
    for name in ("config.json", run_folder.CURVE):
        path = begun / name
        num_refused = 0
        content = path.read_bytes()
        for what in damages(path, rng):
            resumed_run, line = outcome(go_on, config, begun)
            if resumed_run is None:
                assert str(path) in line or "holds another run" in line
                num_refused += 1
            else:
                assert what != "missing" or name == run_folder.CURVE
                assert raw(resumed_run.state) == raw(state)
                assert resumed_run.curve == [LINE]
        assert path.read_bytes() == content
        assert num_refused >= 4 if name == "config.json" else num_refused == 1


def test_the_first_step_is_that_of_the_checkpoint(
    config: TrainConfig, begun: Path
) -> None:
    path = begun / "config.json"
    changed = json.loads(path.read_text()) | {"first_step": 1}
    path.write_text(json.dumps(changed))
    with refused(f"{path}: first_step=1 must be 0"):
        go_on(config, begun)


def test_another_layout_resumes_the_same_bits(
    config: TrainConfig, state: TrainState, begun: Path
) -> None:
    layout = parse_layout("tp=2,dp=2", zero=1)
    divided = dataclasses.replace(config, how=StepConfig(layout=layout))
    message = r"up to 3 were divided as num_processes=1, later ones as tensor=2,data=2"
    with pytest.warns(UserWarning, match=message):
        resumed_run = go_on(divided, begun)
    assert raw(resumed_run.state) == raw(state)
    assert raw(go_on(config, begun).state) == raw(state)


def test_a_layout_that_changes_more_than_rounding_is_kept(tmp_path: Path) -> None:
    def described(experts: object, accumulation: int, **layout: Any) -> dict[str, Any]:
        full = dataclasses.asdict(Layout(**layout))
        how = {"dtype": "float32", "accumulation": accumulation, "layout": full}
        return {"model": {"experts": experts}, "how": how}

    folders = map(str, itertools.count())

    def is_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
        out = tmp_path / next(folders)
        run_folder.RunFolder(out, before, 0).close()
        folder, line = outcome(run_folder.RunFolder, out, now, 0)
        if folder is None:
            assert "holds another run; differs in ['how.layout" in line
            return False
        folder.close()
        return True

    assert is_same(described(None, 4), described(None, 4, tensor=2, data=2, zero=1))
    mixture: Any = {"num_experts": 4}
    assert is_same(described(mixture, 1), described(mixture, 1, data=2))
    assert not is_same(described(mixture, 2), described(mixture, 2, data=2))
    dropping = described(mixture, 1, data=4, expert=4, capacity=1.25)
    assert not is_same(dropping, described(mixture, 1, data=4, expert=4, gather=True))
    assert not is_same(described(mixture, 1), dropping)
    assert not is_same(dropping, described(mixture, 1, data=4, expert=2, capacity=1.25))


def test_numbers_of_one_process_are_its_own() -> None:
    assert gather_numbers(3) == [3]


@pytest.mark.slow
def test_losses_after_a_change_of_layout_agree(
    config: TrainConfig, tmp_path: Path
) -> None:
    unbroken = training.train(config, tmp_path / "unbroken")
    out = tmp_path / "changed"
    half = training.train(config, out, progress=Stopping(2, "show"))
    assert int(half.state.step) == 4
    layout = parse_layout("tp=2,dp=2", zero=1)
    divided = dataclasses.replace(config, how=StepConfig(layout=layout))
    with pytest.warns(UserWarning, match="agree with those of the unbroken run"):
        resumed_run = training.train(divided, out)
    assert resumed_run.status == "done"
    for line, expected in zip(resumed_run.curve, unbroken.curve, strict=True):
        assert line["step"] == expected["step"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    run_fields = json.loads(
        (out / "checkpoints" / "12" / run_folder.RUN_FILE).read_text()
    )
    assert [piece["first_step"] for piece in run_fields["divided"]] == [0, 4]


@pytest.mark.parametrize(
    "num",
    [
        pytest.param(25, marks=pytest.mark.thorough),
        pytest.param(400, marks=pytest.mark.slow),
    ],
)
def test_no_damage_ends_in_other_weights(
    num: int,
    config: TrainConfig,
    tmp_path: Path,
    rng: random.Random,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Damages any file of a folder: an error names it, or the run is unchanged."""
    full_run = training.train(config, tmp_path / "whole")
    out = tmp_path / "out"
    num_refused = 0
    paths = [x.relative_to(tmp_path / "whole") for x in all_files(tmp_path / "whole")]
    for _ in range(num):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", out)
        name = rng.choice(paths)
        what = next(damages(out / name, rng, 1))
        resumed_run, line = outcome(training.train, config, out)
        if resumed_run is None:
            assert str(out) in line, (name, what)
            num_refused += 1
        else:
            assert raw(resumed_run.state) == raw(full_run.state), (name, what)
            assert resumed_run.curve == full_run.curve, (name, what)
    assert num_refused > num // 5  # found at once, or not read yet
    assert capfd.readouterr().err == ""
