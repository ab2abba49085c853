"""The viewer: traces in files, the page and its numbers, pictures, Perfetto files."""

import base64
import collections
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.report.viewer import (
    RunTrace,
    draw_step,
    list_events,
    make_perfetto_trace,
    page,
    render_viewer,
    run_events,
)
from tests.support import engines
from tests.support.commands import assert_refused, command, document
from tests.support.folders import ROOT

HOSTILE = "<script>document.title = 'changed'</script><!-- & \u2028 </p> \"'"
"""A prompt that a page must show as text."""
RUNS = {x.stem: RunTrace.read(x) for x in (ROOT / "docs" / "gallery").glob("*.npz")}
TRACE = RUNS["preemption"]
TRACE = TRACE._replace(
    requests=(TRACE.requests[0]._replace(prompt=HOSTILE), *TRACE.requests[1:])
)
NUM = TRACE.num_steps
START_S = TRACE.start_s - TRACE.start_s[0]
TYPES = {"i1": np.int8, "i2": np.int16, "i4": np.int32}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def table_counts(trace: RunTrace, step: int) -> collections.Counter[int]:
    """Counts the entries of each page in the page tables of a step, one by one."""
    return collections.Counter(
        page_id
        for row in np.asarray(trace.pages.page_ids[step]).tolist()
        for page_id in row
        if page_id >= 0
    )


def assert_tables_explain_the_pool(trace: RunTrace) -> None:
    for step in range(trace.num_steps):
        counts = table_counts(trace, step)
        assert trace.info.used_pages[step] == len(counts)
        cached = np.asarray(trace.pages.is_cached[step]).astype(int)
        expected = [counts[x] for x in range(trace.num_pages)] + cached
        np.testing.assert_array_equal(trace.pages.ref[step], expected)


def assert_events_count(trace: RunTrace) -> None:
    """Asserts that events are as many as the engine's own counts."""
    kinds = collections.Counter(x.kind for x in list_events(trace))
    info = trace.info
    pairs = {*zip(*np.nonzero(np.asarray(info.reason)), strict=True)}
    assert kinds["copied"] == info.num_copied.sum()
    assert sum(kinds[x] for x in kinds if x.startswith("ended")) == len(pairs)
    # A request with several sequences is one event.
    num_preempted = kinds["preempted"] + kinds["swapped out"]
    assert bool(num_preempted) == bool(info.num_preempted.sum())
    assert num_preempted <= info.num_preempted.sum()
    assert kinds["resumed"] + kinds["swapped in"] <= num_preempted


def page_document(content: str) -> dict[str, Any]:
    text = re.findall(r'<script id="data" type="application/json">(.*?)<', content)[0]
    return json.loads(text)


def unpacked(column: dict[str, Any], num_steps: int) -> np.ndarray:
    """Decodes a column of the page, step by step."""

    def numbers(part: list[str]) -> np.ndarray:
        return np.frombuffer(base64.b64decode(part[1]), TYPES[part[0]]).astype(int)

    if "whole" in column:
        return numbers(column["whole"]).reshape(num_steps, -1)
    counts, places, values = map(numbers, column["changes"])
    row = np.zeros(column["width"], int)
    rows = []
    at = 0
    for count in counts:
        row[places[at : at + count]] = values[at : at + count]
        at += count
        rows.append(row.copy())
    return np.array(rows)


def beside_each_other(trace: RunTrace, copies: int, num_steps: int) -> RunTrace:
    """Returns copies of a run side by side, repeated in time."""
    steps = np.resize(np.arange(trace.num_steps), num_steps)
    num_requests = len(trace.requests)

    def wide(x: Any, shift: int = 0) -> Any:
        if x.ndim == 1:
            return x[steps] * copies
        parts = [
            np.where(x[steps] >= 0, x[steps] + i * shift, -1) for i in range(copies)
        ]
        return np.concatenate(parts, axis=1)

    pages = jax.tree.map(wide, trace.pages)._replace(
        page_ids=wide(trace.pages.page_ids, trace.num_pages),
        queue=wide(trace.pages.queue, num_requests),
    )
    info = jax.tree.map(wide, trace.info)._replace(
        request_id=wide(trace.info.request_id, num_requests), pages=pages
    )
    requests = tuple(
        x._replace(request_id=x.request_id + i * num_requests)
        for i in range(copies)
        for x in trace.requests
    )
    return RunTrace(np.arange(num_steps) * 0.01, info, trace.page_size, requests)


def test_the_gallery_has_what_its_page_describes() -> None:
    page_text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert {*re.findall(r"gallery/(\w+)\.html", page_text)} == {*RUNS}
    assert RUNS["copy_on_write"].info.num_copied.sum() > 1
    assert RUNS["preemption"].info.num_preempted.sum() > 1
    assert RUNS["shared_prefixes"].pages.num_cached.any()
    speculative = RUNS["speculative_decoding"]
    assert (speculative.info.num_emitted > 1)[speculative.num_drafts > 0].any()


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_explains_its_pool_and_events(name: str) -> None:
    trace = RUNS[name]
    assert_tables_explain_the_pool(trace)
    assert_events_count(trace)
    lives = run_events.trace_lives(trace)
    for step in range(trace.num_steps):
        running = {*np.asarray(trace.info.request_id[step]).tolist()} - {-1}
        states = {i for i, x in enumerate(lives[step].tolist()) if x >= 3}
        assert states == running


def test_a_file_keeps_the_trace(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.npz")
    other = RunTrace.read(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, tuple(TRACE), tuple(other))
    assert repr(other) == repr(TRACE)
    assert other.part(3, 5).num_steps == 3
    with pytest.raises(ValueError, match=r"last=145 must be in \[0, 144\]"):
        TRACE.part(0, NUM)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("version", 2, "version=2 must be 1"),
        ("pages.page_ids", np.zeros((NUM, 3, 2), int), "do not fit together"),
        ("pages.copied_to", np.full((NUM, 4), 32), "do not fit together"),
        ("requests", np.zeros(1, np.uint8), "is not a trace"),
        ("num_rows", None, "is not a trace: 'num_rows'"),
    ],
)
def test_other_files_are_refused(name: str, value: Any, line: str, tmp_path) -> None:
    path = tmp_path / "a.npz"
    TRACE.save(path)
    arrays = dict(np.load(path)) | {name: value}
    np.savez(path, **{key: x for key, x in arrays.items() if x is not None})
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as error:
        RunTrace.read(path)
    assert line in str(error.value)


def test_columns_are_decoded_to_their_values() -> None:
    rng = np.random.default_rng(0)
    steady = np.cumsum(rng.random((50, 90)) < 0.01, axis=0) - 3
    for values in (steady, rng.integers(-40_000, 40_000, (50, 9)), steady > 0):
        column: Any = json.loads(json.dumps(page.encode_column(values)))
        np.testing.assert_array_equal(unpacked(column, 50), values)
    assert "changes" in page.encode_column(steady)


def test_a_page_of_500_steps_is_small_and_loads_nothing() -> None:
    trace = beside_each_other(TRACE, 8, 500)
    assert trace.info.used_pages.max() > 200
    content = render_viewer(trace)
    assert len(content.encode()) < 2_000_000
    data = page_document(content)
    for name, values in (
        ("pageIds", trace.pages.page_ids.reshape(500, -1)),
        ("ref", trace.pages.ref),
        ("request", trace.info.request_id),
    ):
        np.testing.assert_array_equal(unpacked(data["columns"][name], 500), values)
    shell = content.replace(json.dumps(data, separators=(",", ":")), "")
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|import\(|fetch\(", shell)
    assert "innerHTML" not in content


def test_a_long_run_needs_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PAGE_STEPS", 39)
    with pytest.raises(ValueError, match=r"num_steps=145 must be in \[1, 39\]"):
        render_viewer(TRACE)
    assert TRACE._repr_html_() == "<code>" + html.escape(repr(TRACE)) + "</code>"


def test_texts_of_users_are_data() -> None:
    content = render_viewer(TRACE, title="<b>&")
    assert content.count("<script") == content.count("</script>") == 2
    assert "<b>&" not in content
    data = page_document(content)
    assert data["requests"][0]["prompt"] == HOSTILE
    frame = TRACE._repr_html_()
    assert frame.count("<") == 2
    assert HOSTILE not in frame
    inner = re.findall('srcdoc="(.*)"', html.unescape(frame), re.DOTALL)[0]
    assert page_document(inner)["requests"][0]["prompt"] == HOSTILE


def test_colours_have_contrast() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            x / 12.92 if x < 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
        ]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    text = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
    inks = re.findall("--(?:ink|soft): (#[0-9a-f]{6});", text)
    assert len(inks) == 2
    pairs = [("#000000", color) for color in (*page.OWNER_COLORS, "#dddddd")]
    pairs += [(ink, "#f4f4f4") for ink in inks]
    for ink, ground in pairs:
        ratio = (luminance(ground) + 0.05) / (luminance(ink) + 0.05)
        assert ratio >= 4.5, (ink, ground)


@pytest.mark.parametrize(("name", "step"), [("preemption", 67), ("copy_on_write", 20)])
def test_a_picture_has_the_pages_of_its_step(name: str, step: int) -> None:
    trace = RUNS[name]
    root = ElementTree.fromstring(draw_step(trace, step))
    texts = [x.text or "" for x in root.iter() if x.tag.endswith("text")]
    counts = table_counts(trace, step)
    running = (trace.info.request_id[step] >= 0).sum()
    assert texts[0] == (
        f"step {step}: {running} running, {trace.info.num_waiting[step]} waiting, "
        f"{len(counts)} of 32 pages in use"
    )
    shared = [f"\N{MULTIPLICATION SIGN}{x}" for x in counts.values() if x > 1]
    assert [x for x in texts if x[:1] == "\N{MULTIPLICATION SIGN}"] == shared
    with pytest.raises(ValueError, match=r"step=145 must be in \[0, 144\]"):
        draw_step(TRACE, NUM)


def test_a_perfetto_file_has_the_steps_of_every_slot() -> None:
    events = json.loads(make_perfetto_trace(TRACE))["traceEvents"]
    for slot in range(4):
        spans = [
            x
            for x in events
            if x["ph"] == "X" and x["tid"] == slot and "," in x["name"]
        ]
        running = TRACE.info.request_id[:, slot] >= 0
        durations = np.diff(START_S, append=2 * START_S[-1] - START_S[-2])
        total_s = sum(x["dur"] for x in spans) / 1e6
        assert total_s == pytest.approx(durations[running].sum(), abs=1e-5)
    used = [x["args"]["pages in use"] for x in events if x["name"] == "pages in use"]
    assert used == TRACE.info.used_pages.tolist()


def test_the_command_writes_its_files(capsys, tmp_path: Path) -> None:
    call = command(capsys, "view", str(tmp_path))
    TRACE.save(tmp_path / "trace.npz")
    report = document(call)
    assert report["files"] == [str(tmp_path / "trace.html")]
    assert (report["num_steps"], report["num_requests"]) == (NUM, len(TRACE.requests))
    assert (tmp_path / "trace.html").read_text() == render_viewer(
        TRACE, title=tmp_path.stem
    )
    names = "a.svg", "a.json", "a.png"
    flags = zip(("--svg", "--perfetto", "--gantt"), names, strict=True)
    words = [word for flag, name in flags for word in (flag, str(tmp_path / name))]
    document(call, *words, "--step", "7", "--first", "5", "--last", "20")
    assert (tmp_path / "a.svg").read_text() == draw_step(TRACE, 7)
    assert (tmp_path / "a.json").read_text() == make_perfetto_trace(TRACE.part(5, 20))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert_refused(call, "--last 145", "last=145 must be in [0, 144]")
    assert_refused(call, "--gantt a.txt", "--gantt a.txt: must end in .svg or .png")
    assert_refused(
        command(capsys, "view"), "nowhere.npz", "nowhere.npz: is not a trace"
    )
    assert_refused(command(capsys, "view"), "", "TRACE is missing")


def shown(path: Path, address: str) -> dict[str, str]:
    """Returns the texts of elements with an id, after the page's script has run."""
    assert BROWSER is not None
    flags = "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"
    words = [BROWSER, *flags, f"--user-data-dir={path.parent / 'profile'}"]
    result = subprocess.run(
        [*words, f"{path.as_uri()}#{address}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    dom = result.stdout
    assert "<title>&lt;i&gt;</title>" in dom
    parts = re.findall(r'<(\w+)\b[^>]* id="(\w+)"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    return {name: html.unescape(text) for _, name, text in parts} | {"dom": dom}


@pytest.mark.thorough
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("step", [0, 67, 144])
def test_a_browser_shows_the_numbers_of_the_trace(step: int, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(render_viewer(TRACE, title="<i>"), encoding="utf-8")
    texts = shown(path, f"step={step}&request=0")
    counts = table_counts(TRACE, step)
    assert texts["running"] == str((TRACE.info.request_id[step] >= 0).sum())
    assert texts["waiting"] == str(TRACE.info.num_waiting[step])
    assert texts["used"] == str(TRACE.info.used_pages[step]) == str(len(counts))
    assert texts["shared"] == str(sum(x > 1 for x in counts.values()))
    assert texts["free"] == str((TRACE.pages.ref[step] == 0).sum())
    assert texts["clock"].endswith(f"144, {START_S[step]:.3f} s")
    # The prompt of request 0 is text of the selection, not an element.
    assert html.escape(HOSTILE, quote=False) in texts["dom"]
    labels = re.findall(r'aria-label="page (\d+): reference count (\d+)', texts["dom"])
    assert {int(x): int(n) for x, n in labels} == counts
    events = [x.text for x in list_events(TRACE) if x.step == step]
    assert re.findall("<li>([^<]*)</li>", texts["events"]) == events


@pytest.mark.thorough
def test_an_engine_records_what_it_did(tmp_path: Path) -> None:
    model = engines.save_tiny_model(tmp_path, max_positions=64)
    bounds: dict[str, Any] = dict(num_pages=20, page_size=4, max_slots=4, max_length=64)
    bounds |= dict(token_budget=16, steps_per_call=4, prefix_cache=True)
    engine = jaxkv.Engine.load(model, record_pages=True, **bounds)
    with pytest.raises(ValueError, match="must have a step with a request"):
        RunTrace.of_engine(engine)
    start = "the same start of all "
    for i in range(5):
        num = 2 if i == 1 else 1
        ask = jaxkv.Sampling(max_tokens=24, ignore_eos=True, seed=i, n=num)
        engine.submit(start + str(i), ask)
    answers = {
        x.completion.request_id: x.completion for x in engine.stream() if x.completion
    }
    trace = RunTrace.of_engine(engine)
    assert_tables_explain_the_pool(trace)
    assert_events_count(trace)
    kinds = {x.kind for x in list_events(trace)}
    assert kinds >= {"admitted", "prefix", "copied", "preempted", "resumed"}
    for request in trace.requests:
        answer = answers[request.request_id]
        assert request.prompt == start + str(request.request_id)
        assert len(request.answers) == len(answer.answers)
        decode = engine.tokenizer.decode
        assert request.answers == [decode(x.tokens) for x in answer.answers]
    hits = {x.request: x.a for x in list_events(trace) if x.kind == "prefix"}
    for name, num in hits.items():
        assert 0 < num <= answers[name].num_cached
    quiet = jaxkv.Engine.load(model, keep_trace=True, **bounds)
    with pytest.raises(ValueError, match="record_pages=False must be True"):
        RunTrace.of_engine(quiet)


@pytest.mark.slow
def test_generate_keeps_a_trace(capsys, tmp_path: Path) -> None:
    model = engines.save_tiny_model(tmp_path / "model", max_positions=256)
    path = tmp_path / "trace.npz"
    words = "--prompt", "abc", "--n", "2", "--max-tokens", "9"
    answers = document(command(capsys, "generate", model, *words, "--trace", str(path)))
    trace = RunTrace.read(path)
    assert_tables_explain_the_pool(trace)
    assert trace.requests[0].prompt == "abc"
    assert trace.info.num_emitted.sum() == sum(
        len(x["tokens"]) for x in answers["completions"]
    )
