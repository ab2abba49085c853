"""Inspection of an engine: names, short forms, page tables, data frames."""

import inspect
import os
import pkgutil
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import files
from jaxkv.engine import EngineState
from jaxkv.memory import PageTableView, SlotPages
from jaxkv.report import Ints, ResultTable, column
from jaxkv.sampling import Sampling
from jaxkv.serving import outputs
from jaxkv.serving.compiling import compilation_cache
from jaxkv.simulation import results
from jaxkv.speculation import SpeculationConfig
from jaxkv.workloads import dataframes
from tests.support import engines
from tests.support.folders import ROOT, TOKENIZED

GREEDY = Sampling.greedy(max_tokens=9, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11] * 9]


@pytest.fixture(scope="module")
def engine() -> jaxkv.Engine:
    return jaxkv.Engine.load(TOKENIZED, keep_trace=True, **vars(engines.SERVED))


def test_the_package_lists_its_names() -> None:
    packages = {*dir(jaxkv)} - {*jaxkv.__all__, "__version__"}
    assert packages == {x.name for x in pkgutil.iter_modules(jaxkv.__path__)} - {
        *("arrays", "clock", "progress", "validation")
    }
    assert {x for x in packages if inspect.ismodule(getattr(jaxkv, x))} == packages
    page = str(jaxkv.__doc__)
    # The page lists each public name once, and no other name.
    names = re.split("Public names by purpose:|Sub-packages have", page)[1]
    words = re.findall(r"(?<!`)\b\w+", names)
    assert {name: words.count(name) for name in jaxkv.__all__} == dict.fromkeys(
        jaxkv.__all__, 1
    )
    assert {x for x in words if x != x.lower() or "_" in x} <= {*jaxkv.__all__}
    assert page.splitlines()[0] in pydoc.render_doc(jaxkv)
    assert not hasattr(jaxkv, "engines")
    code = "import jaxkv, sys; dir(jaxkv); assert 'jaxkv.serving' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_short_forms_are_a_line(engine: jaxkv.Engine) -> None:
    [done] = engine.generate(PROMPTS[:1], GREEDY)
    state = engine.state
    trace = engine.trace
    shapes = jax.eval_shape(lambda: state)
    for value in (engine, state, shapes, done, trace, trace[0]):
        for text in (repr(value), str(value)):
            assert "\n" not in text
            assert len(text) < 200, text
    assert repr(done).startswith("Completion(request_id=")
    assert "9 tokens" in repr(done)
    assert repr(done.text)[1:9] in repr(done)
    assert repr(engine).startswith("Engine(24 pages of 4, 3 slots of 64 tokens")
    assert repr(trace).startswith(f"Trace({len(trace)} calls, {4 * len(trace)} steps)")
    assert list(trace) == trace


def test_page_tables_belong_to_the_events_so_far(engine: jaxkv.Engine) -> None:
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    token_counts = dict(zip(names, map(len, PROMPTS), strict=True))
    ended = set[int]()
    num_seen = 0
    last = None
    for event in engine.stream():
        token_counts[event.request_id] += len(event.tokens)
        if event.reason is not None:
            ended.add(event.request_id)
        table = engine.page_table()
        if table is last:
            continue
        num_seen += 1
        for slot in table.slots:
            # A sampled token is written when it is fed, in the next step; an event of
            # the same call may not be delivered yet.
            token_count = token_counts[slot.request_id]
            assert (
                token_count - 1
                <= slot.num_tokens
                <= token_count + engine.config.steps_per_call
            )
            assert len(slot.page_ids) >= -(-slot.num_tokens // 4)
            if slot.request_id not in ended:
                assert slot.request_id in token_counts
        assert not {slot.request_id for slot in table.slots} & ended
    assert num_seen > 3
    assert engine.page_table().slots == ()


def test_a_page_table_is_that_of_the_calls_read(engine: jaxkv.Engine) -> None:
    # The device is ahead; the view equals the table of a plain run bit for bit.
    engine.submit(PROMPTS[1], GREEDY)
    shown = []
    for event in engine.stream():
        if event.tokens:
            [slot] = engine.page_table().slots or [None]
            shown.append((len(event.tokens), slot and slot.num_tokens))
    token_counts, lengths = zip(*shown, strict=True)
    expected = [5 + sum(token_counts[: i + 1]) for i in range(len(token_counts))]
    assert [x for x in lengths if x is not None] == expected[: len(expected) - 1]
    assert lengths[-1] is None  # it has ended, and its pages are free


VIEW = PageTableView(
    slots=(SlotPages(0, 7, 0, 6, (3, 1)), SlotPages(2, 7, 1, 5, (3, *range(40, 60)))),
    page_size=4,
    num_pages=64,
)


def test_page_tables_are_text_and_html() -> None:
    lines = str(VIEW).splitlines()
    assert lines[0] == "22 of 64 pages of 4 tokens in use, 1 shared"
    assert lines[2].split() == ["0", "7", "0", "6", "3*", "1"]
    assert lines[3].endswith(" ... 5 more")
    assert repr(VIEW) == str(VIEW)
    html = VIEW._repr_html_()
    assert html.count("<tr>") == 3
    assert "<b>3</b> 1" in html
    assert "59" in html


# Data frames


class Frame(dict):
    """Fake data frame of pandas or polars."""


@pytest.fixture(params=["pandas", "polars"])
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in dataframes.FRAME_LIBRARIES:
        module: Any = types.ModuleType(name)
        module.DataFrame = Frame
        monkeypatch.setitem(
            sys.modules, name, module if name == request.param else None
        )
    return request.param


class Counts(ResultTable):
    """A table of an experiment."""

    num: Ints = column("numbers")


def test_traces_results_and_logs_become_data_frames(
    engine: jaxkv.Engine, library: str, tmp_path: Path
) -> None:
    from scaling.logs import read_log

    engine.generate(PROMPTS, GREEDY)
    frame = engine.trace.to_dataframe()
    num_steps = sum(len(info.enough) for info in engine.trace)
    assert {len(values) for values in frame.values()} == {num_steps}
    emitted = sum(int(np.sum(info.num_emitted)) for info in engine.trace)
    assert int(np.sum(frame["num_emitted"])) == emitted > 0
    assert {"step", "used_pages", "num_waiting"} <= frame.keys()
    info = jax.tree.map(lambda x: x[None], engine.trace[0])
    start_s = np.zeros((1, len(info.enough[0])))
    trace = results.StepTrace(start_s, info).to_dataframe()
    assert trace["member"].tolist() == [0] * start_s.size
    assert len(repr(results.StepTrace(start_s, info))) < 100
    assert Counts.of([[1], [2]]).to_dataframe()["num"].tolist() == [1, 2]
    (tmp_path / "log.csv").write_text("N,D,loss\n1e8,2e9,3.0\n2e8,2e9,2.9\n")
    log = read_log(tmp_path / "log.csv").to_dataframe()
    assert log["loss"].tolist() == [3.0, 2.9]


def test_without_a_library_one_line_names_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in dataframes.FRAME_LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs pandas or polars; `pip ") as caught:
        outputs.Trace().to_dataframe()
    assert "\n" not in str(caught.value)


# Save, restore, fork


def test_a_fork_continues_like_its_original(engine: jaxkv.Engine) -> None:
    engine.submit("def bisect_left(a", GREEDY, request_id=70)
    stream = engine.stream()
    first = next(stream)
    before = len(engine.tracker.records)
    other = engine.fork(policy=jaxkv.fcfs(chunk_size=2))
    assert other.tokenizer is engine.tokenizer
    assert len(other.tracker.records) == before == 1

    def remaining_tokens(events: Any) -> list[Any]:
        return [(x.request_id, x.tokens, x.text, x.reason) for x in events]

    assert remaining_tokens(other.stream()) == remaining_tokens(engine.stream())
    assert first.request_id == 70
    assert other.state is not engine.state
    engines.assert_empty(engine.state)
    engines.assert_empty(other.state)


def test_a_restored_engine_replays(engine: jaxkv.Engine, tmp_path: Path) -> None:
    ask = Sampling(max_tokens=9, seed=3)
    assert engine.save(tmp_path / "saved") == tmp_path / "saved"
    done = [engine.generate(PROMPTS, ask)]
    engine.restore(tmp_path / "saved")
    done.append(engine.generate(PROMPTS, ask))
    answers_by_run = [[(x.tokens, x.num_cached) for x in batch] for batch in done]
    assert answers_by_run[0] == answers_by_run[1]
    engine.submit(PROMPTS[0], GREEDY)
    for call in (engine.save, engine.restore):
        with pytest.raises(ValueError, match="1 requests are not complete; an engine"):
            call(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    list(engine.stream())
    with pytest.raises(ValueError, match="no such snapshot"):
        engine.restore(tmp_path / "again")


# Models by name


def test_models_are_found_by_path_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = ROOT / "jaxkv" / "bundled_models" / "stdlib-bytes"
    monkeypatch.chdir(tmp_path)
    assert files.model_folder("stdlib-bytes") == bundled
    assert files.model_folder(bundled) == bundled
    names = ["stdlib-bytes", "stdlib-bytes-deepseek"]
    assert [*files.bundled_models()] == names
    assert jaxkv.bundled_model() == bundled
    (tmp_path / "experiments").mkdir()  # a user's package of the same name
    (tmp_path / "experiments" / "__init__.py").touch()
    code = "import jaxkv; print(jaxkv.bundled_model('stdlib-bytes-eagle'))"
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert ran.stdout == f"{bundled}-eagle\n", ran.stderr
    with pytest.raises(ValueError, match="must be one of: stdlib-bytes, stdlib-"):
        jaxkv.bundled_model("stdlib")
    (tmp_path / "stdlib-bytes").mkdir()
    assert files.model_folder("stdlib-bytes") == Path("stdlib-bytes")
    load: Any = jaxkv.Engine.load
    lines = {
        "Qwen/Qwen3-0.6B": "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`",
        "stdlib-byte": "unknown model 'stdlib-byte'; did you mean stdlib-bytes or ",
        str(tmp_path / "nowhere"): "no such folder",
    }
    for name, line in lines.items():
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            load(name)
        assert "\n" not in str(caught.value)


def test_a_bundled_model_loads_by_its_name() -> None:
    engine = jaxkv.Engine.load("stdlib-bytes", num_pages=8, max_length=64)
    assert engine.tokenizer is not None
    with pytest.raises(ValueError, match="needs max_length=242 or more, or steps_per_"):
        jaxkv.Engine.load(
            "stdlib-bytes",
            speculate=SpeculationConfig("ngram", adaptive=True),
            max_length=128,
        )


# Compiled programs

CODE = """if True:
    import jax, jaxkv
    from jaxkv.serving.compiling import compilation_cache as cache
    cache.NOTICE_S = 0.05
    CHANGE
    engine = jaxkv.Engine.load("FOLDER", num_pages=8, max_length=32)
    again = jaxkv.Engine.load("FOLDER", num_pages=8, max_length=32)
    import time
    with cache.notify_if_slow():
        time.sleep(0.2)
    with cache.notify_if_slow():
        pass
    known = jax.config.values
    print(known["jax_compilation_cache_dir"], known["jax_compilation_cache_max_size"])
"""


def loading(home: Path, change: str = "", **variables: str) -> tuple[str, list[str]]:
    code = CODE.replace("FOLDER", str(TOKENIZED)).replace("CHANGE", change)
    environment = {"PATH": "/usr/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": str(home)} | variables,
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr.splitlines()


@pytest.mark.slow
def test_programs_are_cached_unless_a_cache_is_configured(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch()
    notice = "jaxkv: compiling, which takes more than 0.05 s"
    reads = "; the next start of the same configuration takes less"
    folder = home / ".cache" / "jaxkv"
    said = f"jaxkv: compiled programs are kept in {folder}; "
    said += "JAX_ENABLE_COMPILATION_CACHE=false disables this"
    out, lines = loading(home)
    assert out == f"{folder} {compilation_cache.MAX_CACHE_BYTES}"
    assert lines == [said, notice + reads]
    off = ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, "None -1", notice)
    user_cache = (
        {"JAX_COMPILATION_CACHE_DIR": f"{home}/x"},
        f"{home}/x -1",
        notice + reads,
    )
    bad = ({"XDG_CACHE_HOME": f"{home}/file"}, "None -1", notice)
    for variables, expected, line in (off, user_cache, bad):
        assert loading(home, **variables) == (expected, [line])
    set_by = "jax.config.update('jax_compilation_cache_dir', '/tmp/own')"
    assert loading(home, set_by) == ("/tmp/own -1", [notice + reads])


def test_importing_sets_no_cache_and_tests_keep_theirs() -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.keep_programs()
    assert jax.config.values["jax_compilation_cache_dir"] == before
    assert EngineState.__repr__ is not tuple.__repr__


def test_compile_time_is_counted(engine: jaxkv.Engine) -> None:
    engine.generate(PROMPTS[:1], GREEDY)
    before = engine.compile_s
    assert before > 0
    engine.generate(PROMPTS[:1], GREEDY)
    assert engine.compile_s == before
