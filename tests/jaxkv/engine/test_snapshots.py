"""Snapshots loaded by another process, under other policies, and repeatedly."""

import dataclasses
import functools
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxkv
from jaxkv import clock, engine, scheduling
from jaxkv.engine import StepInfo, snapshots
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.models import PagedForward
from jaxkv.scheduling import Policy
from tests.support import engines
from tests.support.engine_programs import pages_of
from tests.support.engines import MODEL, Ask
from tests.support.folders import ROOT

# Too few pages for all requests, so that some wait and some are preempted.
CONFIG = dataclasses.replace(
    engines.TIGHT,
    max_slots=4,
    max_sequences=24,
    submit_width=24,
    max_logit_rows=0,
    max_logprobs=0,
)
REPRODUCIBLE = dataclasses.replace(CONFIG, numerics="reproducible")
FCFS = scheduling.fcfs()

# Not donated, so that a state can be continued several times.
run_steps: Any = jax.jit(
    engine.run_steps,
    static_argnames=("config", "forward", "logits_fn", "num_steps"),
)


class Rest(NamedTuple):
    """Results of a continued state."""

    state: EngineState
    outcomes: dict[Any, engines.Outcome]
    infos: list[StepInfo]

    @property
    def tokens(self) -> dict[Any, list[int]]:
        return {name: outcome.tokens for name, outcome in self.outcomes.items()}


def go_on(
    state: EngineState,
    config: EngineConfig,
    policy: Policy = FCFS,
    num_calls: int = 60,
) -> Rest:
    """Continues a state for some calls, and drains it between them."""
    outcomes: dict[Any, engines.Outcome] = {}
    infos = []
    forward = PagedForward(MODEL, config.numerics)
    for call in range(num_calls):
        state, info = run_steps(
            engines.params(),
            state,
            clock.from_seconds(1.0 + call),
            config=config,
            forward=forward,
            policy=policy,
        )
        infos.append(jax.tree.map(np.asarray, info))
        engines.assert_sound(infos[-1])
        state, sequences = engines.drain(state)
        outcomes |= engines.outcomes_of(sequences)
    return Rest(state, outcomes, infos)


@functools.cache
def asks() -> tuple[Ask, ...]:
    """Requests that arrive together, some with several answers."""
    rng = np.random.default_rng(3)
    return tuple(engines.random_asks(rng, 10, max_prompt=20, max_answer=24, max_n=3))


def busy(config: EngineConfig) -> EngineState:
    """A busy engine with running, waiting and preempted requests."""
    continuation = go_on(engines.submitted(asks(), config), config, num_calls=3)
    assert (np.asarray(continuation.state.slots.sequence) >= 0).sum() > 1
    assert int(continuation.state.ledger.num_waiting) > 0
    assert sum(int(info.num_preempted.sum()) for info in continuation.infos) > 0
    return continuation.state


def raw(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bits of every array: NaN equals NaN, 0 differs from -0."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(leaf.dtype.name, leaf.shape, leaf.tobytes()) for leaf in leaves]


def named(continuation: Rest) -> dict[str, list[int]]:
    """The answers in a form for JSON."""
    return {str(name): tokens for name, tokens in continuation.tokens.items()}


def main(folder: str, numerics: Any) -> None:
    """Loads a snapshot and continues it; the other process runs this function."""
    config = dataclasses.replace(CONFIG, numerics=numerics)
    root = Path(folder)
    state = jaxkv.load_state(root / "busy", config, pages_of(MODEL, config))
    continuation = go_on(state, config)
    jaxkv.save_state(root / "end", continuation.state, config)
    (root / "tokens.json").write_text(json.dumps(named(continuation)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "numerics", ["fast", pytest.param("reproducible", marks=pytest.mark.slow)]
)
def test_another_process_continues_bit_for_bit(numerics: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, numerics=numerics)
    state = busy(config)
    before = raw(state)
    jaxkv.save_state(tmp_path / "busy", state, config)
    assert raw(state) == before
    continuation = go_on(state, config)
    code = """
import sys
from tests.jaxkv.engine import test_snapshots as t
t.main(*sys.argv[1:])
"""
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), numerics],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    assert json.loads((tmp_path / "tokens.json").read_text()) == named(continuation)
    assert continuation.tokens
    end = jaxkv.load_state(tmp_path / "end", config, pages_of(MODEL, config))
    engines.assert_empty(end)
    assert raw(end) == raw(continuation.state)


@pytest.mark.slow
def test_one_state_branches_into_several_policies(tmp_path: Path) -> None:
    start = busy(REPRODUCIBLE)
    folder = jaxkv.save_state(tmp_path / "state", start, REPRODUCIBLE)
    state = jaxkv.load_state(folder, REPRODUCIBLE, pages_of(MODEL, REPRODUCIBLE))
    rules = [
        FCFS,
        scheduling.fcfs(chunk_size=3),
        scheduling.fcfs(watermark=4),
        scheduling.static(),
    ]
    continuations = [go_on(state, REPRODUCIBLE, policy) for policy in rules]
    assert raw(state) == raw(start)
    plain = engines.plain(asks(), REPRODUCIBLE)
    for continuation in continuations:
        engines.assert_empty(continuation.state)
        assert continuation.tokens == continuations[0].tokens
        assert all(
            plain[name][0] == tokens for name, tokens in continuation.tokens.items()
        )
    # The schedules differed.
    ways = {
        b"".join(info.num_rows.tobytes() for info in continuation.infos)
        for continuation in continuations
    }
    assert len(ways) > 2


@pytest.mark.thorough
def test_a_rewound_state_replays_itself(tmp_path: Path) -> None:
    state = busy(CONFIG)
    folder = jaxkv.save_state(tmp_path / "state", state, CONFIG)
    first = go_on(state, CONFIG, num_calls=3)
    for _ in range(2):
        again = jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))
        replay = go_on(again, CONFIG, num_calls=3)
        assert raw(replay.state) == raw(first.state)
        assert raw(replay.infos) == raw(first.infos)


@pytest.mark.thorough
def test_a_loaded_state_needs_no_program_of_its_own(tmp_path: Path) -> None:
    state = engines.submitted(asks(), CONFIG)
    folder = jaxkv.save_state(tmp_path / "state", state, CONFIG)
    go_on(go_on(state, CONFIG, num_calls=1).state, CONFIG, num_calls=1)
    num_programs = run_steps._cache_size()
    loaded = jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))
    go_on(loaded, CONFIG, num_calls=1)
    assert run_steps._cache_size() == num_programs


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_bit_of_every_type_comes_back(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = engines.start(CONFIG, dtype=dtype)
    # Random bits: NaN with any payload, infinities, subnormals. And -0 everywhere,
    # which a writer that omits zeros must not omit.
    leaves, tree = jax.tree.flatten(state.pages)
    shape = leaves[0].shape
    kind = jnp.dtype(dtype)
    bits = rng.bytes(leaves[0].size * kind.itemsize)
    k = jnp.asarray(np.frombuffer(bits, kind).reshape(shape))
    assert raw(k)[0][2] == bits
    v = jnp.asarray(-np.zeros(shape, kind))
    state = state._replace(pages=jax.tree.unflatten(tree, [k, v]))
    folder = jaxkv.save_state(tmp_path / "state", state, CONFIG)
    loaded = jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG, dtype=dtype))
    assert raw(loaded) == raw(state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert loaded.sequences.top_ids.size == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of an idle engine; tests must not change it."""
    folder = tmp_path_factory.mktemp("snapshots") / "state"
    return jaxkv.save_state(folder, engines.start(CONFIG), CONFIG)


def refusal(folder: Path, config: EngineConfig = CONFIG, pages: Any = None) -> str:
    """Returns the one-line message of a refused snapshot."""
    pages = pages_of(MODEL, config) if pages is None else pages
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        jaxkv.load_state(folder, config, pages)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_another_configuration_is_refused_by_name(saved: Path) -> None:
    other = dataclasses.replace(CONFIG, max_slots=3, numerics="reproducible")
    message = refusal(saved, other)
    assert message == (
        f"{saved}: is of another configuration: "
        "max_slots is 4 in the snapshot, 3 asked; "
        "numerics is fast in the snapshot, reproducible asked"
    )
    assert "seed is 0 in the snapshot, 7 asked" in refusal(
        saved, dataclasses.replace(CONFIG, seed=7)
    )


def test_another_model_is_refused_by_its_pages(saved: Path) -> None:
    other = dataclasses.replace(MODEL, num_layers=3)
    assert refusal(saved, pages=pages_of(other, CONFIG)) == (
        f"{saved}: holds other arrays: "
        "pages.k is float32[2, 16, 2, 4, 8] in the snapshot, "
        "float32[3, 16, 2, 4, 8] asked; "
        "pages.v is float32[2, 16, 2, 4, 8] in the snapshot, "
        "float32[3, 16, 2, 4, 8] asked"
    )
    assert "bfloat16" in refusal(saved, pages=pages_of(MODEL, CONFIG, dtype="bfloat16"))


def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the snapshot that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_snapshots_of_other_versions_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    path = folder / snapshots.SNAPSHOT_FILE
    header = json.loads(path.read_text())
    del header["config"]["seed"]
    header["config"]["fancy"] = True
    path.write_text(json.dumps(header))
    message = refusal(folder)
    assert "seed is absent in the snapshot, 0 asked" in message
    assert "fancy is True in the snapshot, absent asked" in message
    header = json.loads((saved / snapshots.SNAPSHOT_FILE).read_text())
    del header["arrays"]["pool.ref"]
    path.write_text(json.dumps(header))
    assert "pool.ref is absent in the snapshot, int32[16] asked" in refusal(folder)


def test_other_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    assert "no such snapshot" in refusal(tmp_path / "nowhere")
    assert "snapshot.json: no such file" in refusal(tmp_path)
    folder = copied(saved, tmp_path)
    path = folder / snapshots.SNAPSHOT_FILE
    original = path.read_text()
    for text in ("", original[: len(original) // 2], "[]", "{}", '{"config": 3}'):
        path.write_text(text)
        assert "snapshot.json" in refusal(folder)


def test_every_damaged_file_is_found(saved: Path, tmp_path: Path) -> None:
    names = list(json.loads((saved / snapshots.SNAPSHOT_FILE).read_text())["files"])
    assert len(names) > 3
    folder = copied(saved, tmp_path)
    for name in names:
        path = folder / snapshots.ARRAYS / name
        original = path.read_bytes()
        changed = bytearray(original)
        changed[len(original) // 2] ^= 1
        for damaged in (original[:-1], b"", bytes(changed)):
            path.write_bytes(damaged)
            assert f"{path}: is damaged" in refusal(folder)
        path.unlink()
        assert f"{path}: is missing" in refusal(folder)
        path.write_bytes(original)
    assert raw(jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))) == raw(
        engines.start(CONFIG)
    )


def test_files_that_the_header_does_not_list_are_refused(
    saved: Path, tmp_path: Path
) -> None:
    folder = copied(saved, tmp_path)
    extra = folder / snapshots.ARRAYS / "more"
    extra.write_bytes(b"x")
    assert f"{extra}: is not listed in snapshot.json" in refusal(folder)
    extra.unlink()
    path = folder / snapshots.SNAPSHOT_FILE
    header = json.loads(path.read_text())
    name = next(iter(header["files"]))
    path.write_text(json.dumps(header | {"files": {}}))
    assert "is not listed in snapshot.json" in refusal(folder)
    path.write_text(json.dumps(header | {"files": header["files"] | {"gone": None}}))
    assert "gone: is missing" in refusal(folder)
    path.write_text(json.dumps(header | {"files": header["files"] | {name: None}}))
    assert f"{name}: is damaged" in refusal(folder)


def test_a_full_disk_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = engines.start(CONFIG)
    folder = tmp_path / "state"
    jaxkv.save_state(folder, state, CONFIG)
    rng = np.random.default_rng(0)
    pages = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape).astype("float32")), state.pages
    )
    later = state._replace(pages=pages)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a file above the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        with pytest.raises(ValueError, match="cannot be written") as caught:
            jaxkv.save_state(folder, later, CONFIG, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"{folder}: cannot be written: File too large"
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert raw(jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))) == raw(state)


def test_an_existing_snapshot_is_replaced_only_on_request(tmp_path: Path) -> None:
    state = engines.start(CONFIG)
    later = engines.submitted(asks(), CONFIG)
    folder = tmp_path / "state"
    folder.mkdir()  # An empty folder may be replaced.
    jaxkv.save_state(folder, state, CONFIG)
    with pytest.raises(ValueError, match="already exists; pass overwrite=True"):
        jaxkv.save_state(folder, later, CONFIG)
    assert raw(jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))) == raw(state)
    jaxkv.save_state(folder, later, CONFIG, overwrite=True)
    assert raw(jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))) == raw(later)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no snapshot"):
        jaxkv.save_state(other, state, CONFIG, overwrite=True)
    assert (other / "notes.txt").read_text() == "mine"


def test_a_state_of_another_configuration_is_not_saved(tmp_path: Path) -> None:
    other = dataclasses.replace(CONFIG, max_slots=3)
    with pytest.raises(ValueError, match=r"table\.length is int32\[4\] in the state"):
        jaxkv.save_state(tmp_path / "state", engines.start(CONFIG), other)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_call_keeps_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = engines.start(CONFIG)
    folder = tmp_path / "state"
    later = engines.submitted(asks(), CONFIG)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            jaxkv.save_state(folder, state, CONFIG)
    assert not list(tmp_path.iterdir())
    jaxkv.save_state(folder, state, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "_digests", fail)
        with pytest.raises(KeyboardInterrupt):
            jaxkv.save_state(folder, later, CONFIG, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert raw(jaxkv.load_state(folder, CONFIG, pages_of(MODEL, CONFIG))) == raw(state)


def test_pages_in_host_memory_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, max_swap_pages=4)
    state = engines.start(config)
    saved = jaxkv.save_state(tmp_path / "state", state, config)
    assert raw(jaxkv.load_state(saved, config, pages_of(MODEL, config))) == raw(state)
    assert state.staging is not None
    away = state.staging.on_host.at[1].set(True)
    state = state._replace(staging=state.staging._replace(on_host=away))
    with pytest.raises(ValueError, match="are in host memory"):
        jaxkv.save_state(tmp_path / "other", state, config)
    assert not (tmp_path / "other").exists()
