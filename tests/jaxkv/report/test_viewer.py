"""The viewer: traces in files, the page and its numbers, pictures, Perfetto files."""

import base64
import collections
import dataclasses
import functools
import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import Speculation, init
from jaxkv.models import Experts, PagedForward, make_model_pages
from jaxkv.report.viewer import (
    RunTrace,
    draw_run,
    draw_step,
    list_events,
    make_perfetto_trace,
    page,
    render_viewer,
    run_events,
)
from jaxkv.serving.outputs import RequestPrompt, Trace, TraceCall
from jaxkv.speculation import NGram, SharedNoiseVerifier
from tests.support import engines
from tests.support.browser import browse
from tests.support.commands import assert_refused, command, document
from tests.support.folders import ROOT

HOSTILE = "<script>document.title = 'changed'</script><!-- & \u2028 </p> \"'"
"""A prompt that a page must show as text."""
GALLERY = ROOT / "docs" / "gallery"
RUNS = {x.stem: RunTrace.read(x) for x in GALLERY.glob("*.npz")}
TABLE_RUNS = [name for name, run in RUNS.items() if run.has_tables]
TRACE = RUNS["preemption"]
TRACE = TRACE._replace(
    requests=(TRACE.requests[0]._replace(prompt=HOSTILE), *TRACE.requests[1:])
)
NUM = TRACE.num_steps
START_S = TRACE.start_s - TRACE.start_s[0]
TYPES = {"i1": np.int8, "i2": np.int16, "i4": np.int32}


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
    return trace._replace(
        start_s=np.arange(num_steps) * 0.01,
        info=info,
        num_pages=copies * trace.num_pages,
        requests=requests,
    )


def test_the_gallery_has_what_its_page_describes() -> None:
    page_text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert {*re.findall(r"gallery/(\w+)\.html", page_text)} == {*RUNS}
    assert RUNS["copy_on_write"].info.num_copied.sum() > 1
    assert RUNS["preemption"].info.num_preempted.sum() > 1
    assert RUNS["shared_prefixes"].pages.num_cached.any()
    speculative = RUNS["speculative_decoding"]
    assert (speculative.info.num_emitted > 1)[speculative.num_drafts > 0].any()
    seen = {name: {x.kind for x in list_events(run)} for name, run in RUNS.items()}
    assert seen["swapping"] >= {"swapped out", "swapped in", "to host"}
    assert seen["pages_under_load"] >= {"prefix", "copied", "preempted", "resumed"}
    assert "released" in seen["sliding_window"]
    assert seen["recurrent_states"] >= {"checkpoint", "prefix"}
    assert max(path.stat().st_size for path in GALLERY.glob("*.npz")) < 60_000


@pytest.mark.parametrize("name", TABLE_RUNS)
def test_a_trace_explains_its_pool_and_events(name: str) -> None:
    trace = RUNS[name]
    assert_tables_explain_the_pool(trace)
    assert_events_count(trace)
    lives = run_events.trace_lives(trace)
    for step in range(trace.num_steps):
        running = {*np.asarray(trace.info.request_id[step]).tolist()} - {-1}
        states = {i for i, x in enumerate(lives[step].tolist()) if x >= 3}
        assert states == running


@pytest.mark.parametrize("name", ["token_trees", "speculative_decoding"])
def test_an_accepted_path_is_the_emitted_tokens(name: str) -> None:
    trace = RUNS[name]
    info = trace.info
    pages: Any = trace.pages
    num_forks = 0
    for step, slot in np.argwhere(trace.num_drafts > 0).tolist():
        num = trace.num_drafts[step, slot]
        tokens, parents, path = (
            x[step, slot].tolist()
            for x in (pages.draft_tokens, pages.draft_parents, pages.draft_path)
        )
        assert [x >= 0 for x in tokens] == [i < num for i in range(len(tokens))]
        num_forks += len({*parents[:num]}) < num
        places = [x for x in path if x]
        # An answer may end before its last draft.
        emitted = info.tokens[step, slot, : info.num_emitted[step, slot]].tolist()
        accepted = [tokens[x - 1] for x in places]
        assert accepted[: len(emitted) - 1] == emitted[: len(accepted)][:-1] or (
            accepted == emitted[:-1]
        )
        assert [parents[x - 1] for x in places] == [0, *places][: len(places)]
        assert trace.token_texts[str(tokens[0])] != ""
    assert bool(num_forks) == (name == "token_trees")


def test_states_windows_and_experts_are_accounted_for() -> None:
    pages: Any = RUNS["recurrent_states"].pages
    for ids, ref in zip(pages.state_ids, pages.state_ref, strict=True):
        counts = collections.Counter(ids[ids >= 0].tolist())
        assert ref.tolist() == [counts[x] for x in range(len(ref))]
    trace = RUNS["sliding_window"]
    windowed: Any = trace.pages
    window = 24
    for step, slot in np.argwhere(trace.info.request_id >= 0).tolist():
        ids = windowed.window_ids[step, slot]
        end = windowed.length[step, slot] + trace.info.num_rows[step, slot]
        first = max(windowed.length[step, slot] + 1 - window, 0) // trace.page_size
        column = np.arange(len(ids))
        is_mapped = (column >= first) & (column < -(-end // trace.page_size))
        np.testing.assert_array_equal(ids >= 0, is_mapped)
    trace = RUNS["mixture_of_experts"]
    loads = trace.expert_loads
    assert loads is not None
    assert loads.shape[1:] == (2, 16)
    rows = trace.info.num_rows.sum(1)
    np.testing.assert_array_equal(loads.sum(2), np.stack([4 * rows] * 2, axis=1))


def test_a_simulated_run_counts_pages() -> None:
    trace = RUNS["simulated_load"]
    info = trace.info
    assert not trace.has_tables
    assert info.num_preempted.any()
    ends = trace.pages.length + info.num_rows
    pages = np.where(info.request_id >= 0, -(-ends // trace.page_size), 0)
    np.testing.assert_array_equal(info.used_pages, pages.sum(1))
    assert_events_count(trace)
    for request in trace.requests:
        at = info.request_id == request.request_id
        assert (info.reason[at] > 0).sum() == 1
        # The last token of an answer is not fed.
        fed = request.num_prompt_tokens + info.num_emitted[at].sum() - 1
        assert (trace.pages.length + info.num_rows)[at][-1] == fed
    with pytest.raises(ValueError, match="has no page tables to draw"):
        draw_step(trace, 0)
    data = page_document(render_viewer(trace))["runs"][0]
    assert data["columns"]["ref"]["width"] == 0


def test_a_bounded_trace_keeps_the_requests_of_its_steps() -> None:
    trace = Trace()
    trace.max_steps = 20
    names = [x.request_id for x in TRACE.requests]
    for start in range(0, NUM - 4, 4):
        info = TRACE.part(start, start + 3).info
        new = names if start == 0 else []
        requests = tuple(RequestPrompt(name, [name], 1, 0.0) for name in new)
        trace.add(info, TraceCall(start, start + 4, requests))
        num_steps = sum(len(x.enough) for x in trace)
        assert num_steps == min(start + 4, 20)
        assert len(trace.calls) == len(trace)
        first = max(start - 16, 0)
        queue = TRACE.pages.queue[first : start + 4]
        running = TRACE.info.request_id[first : start + 4]
        alive = {*queue.ravel().tolist(), *running.ravel().tolist()} - {-1}
        assert {x.request_id for x in trace.calls[0].requests} == alive
    assert len(alive) < len(names)
    trace.clear()
    assert trace.calls == []


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
        ("version", 1, "version=1 must be 2"),
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
    data = page_document(content)["runs"][0]
    for name, values in (
        ("pageIds", trace.pages.page_ids.reshape(500, -1)),
        ("ref", trace.pages.ref),
        ("request", trace.info.request_id),
    ):
        np.testing.assert_array_equal(unpacked(data["columns"][name], 500), values)
    document = page_document(content)
    shell = content.replace(json.dumps(document, separators=(",", ":")), "")
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|import\(|fetch\(", shell)
    assert "innerHTML" not in content


def test_a_long_run_needs_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PAGE_STEPS", 39)
    with pytest.raises(ValueError, match=r"num_steps=145 must be in \[1, 39\]"):
        render_viewer(TRACE)
    for traces, names in (((), ()), ((TRACE,), ["a"]), ((TRACE, TRACE), ["a"])):
        with pytest.raises(ValueError, match=f"one for each of {len(traces)} runs"):
            render_viewer(*traces, names=names)
    assert TRACE._repr_html_() == "<code>" + html.escape(repr(TRACE)) + "</code>"


def test_texts_of_users_are_data() -> None:
    content = render_viewer(TRACE, title="<b>&")
    assert content.count("<script") == content.count("</script>") == 2
    assert "<b>&" not in content
    data = page_document(content)["runs"][0]
    assert data["requests"][0]["prompt"] == HOSTILE
    frame = TRACE._repr_html_()
    assert frame.count("<") == 2
    assert HOSTILE not in frame
    inner = re.findall('srcdoc="(.*)"', html.unescape(frame), re.DOTALL)[0]
    assert page_document(inner)["runs"][0]["requests"][0]["prompt"] == HOSTILE


def test_colours_have_contrast() -> None:
    text = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
    inks = re.findall("--(?:ink|soft): (#[0-9a-f]{6});", text)
    assert len(inks) == 2
    pairs = [("#000000", color) for color in (*page.OWNER_COLORS, "#dddddd")]
    pairs += [(ink, "#f4f4f4") for ink in inks]
    for ink, ground in pairs:
        assert contrast(ink, ground) >= 4.5, (ink, ground)


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


def test_an_animation_shows_every_step() -> None:
    num = 20
    text = draw_run(TRACE.part(60, 60 + num - 1))
    root = ElementTree.fromstring(text)
    assert not [x for x in root.iter() if x.tag.endswith(("script", "image"))]
    texts = [x for x in root.iter() if x.tag.endswith("text") and len(x)]
    titles = {str(x[0].tail).partition(":")[0]: x[0] for x in texts}
    for i in range(num):
        fields = titles[f"step {i}"].attrib
        assert (fields["dur"], fields["repeatCount"]) == ("6.667s", "indefinite")
        starts = [float(x) * num for x in fields["keyTimes"].split(";")]
        shows = dict(zip(starts, fields["values"].split(";"), strict=True))
        assert shows[i] == "1"
        assert [*shows.values()].count("1") == 1
    committed = ROOT / "docs" / "figures" / "pages_under_load.svg"
    assert committed.read_text() == draw_run(RUNS["pages_under_load"])
    assert committed.stat().st_size < 500_000


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
    RUNS["token_trees"].save(tmp_path / "b.npz")
    pair = command(capsys, "view", str(tmp_path), str(tmp_path / "b.npz"))
    name = "trace-b.html"
    assert document(pair)["files"] == [str(tmp_path / name)]
    runs = page_document((tmp_path / name).read_text())["runs"]
    assert [x["name"] for x in runs] == [tmp_path.stem, "b"]
    line = "--svg a.svg: needs one TRACE, not 2"
    assert_refused(pair, "--svg a.svg", line)
    assert_refused(
        command(capsys, "view"), "nowhere.npz", "nowhere.npz: is not a trace"
    )
    assert_refused(command(capsys, "view"), "", "TRACE is missing")


SCRIPT = (ROOT / "tests" / "support" / "use_viewer.js").read_text(encoding="utf-8")
"""Uses two runs by mouse and keyboard, and replaces the page by what it showed."""


def contrast(ink: str, ground: str) -> float:
    """Returns the contrast of two colours by WCAG 2, `#rrggbb` or `rgb(r, g, b)`."""

    def luminance(color: str) -> float:
        parts = (
            [int(color[i : i + 2], 16) for i in (1, 3, 5)]
            if color[0] == "#"
            else ([int(x) for x in re.findall(r"\d+", color)[:3]])
        )
        linear = [
            x / 255 / 12.92 if x < 10.3 else ((x / 255 + 0.055) / 1.055) ** 2.4
            for x in parts
        ]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722))) + 0.05

    light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
    return light / dark


@pytest.mark.thorough
def test_a_browser_shows_the_numbers_of_the_traces(tmp_path: Path) -> None:
    second = RUNS["token_trees"]
    tree_step = int(np.argmax((second.num_drafts > 0).any(1)))
    content = render_viewer(TRACE, second, title="<i>", names=["a", "b"])
    script = f"<script>{SCRIPT.replace('TREE_STEP', str(tree_step))}</script>"
    path = tmp_path / "run.html"
    path.write_text(content.replace("</body>", script + "</body>"), encoding="utf-8")
    shown = browse(path.as_uri(), tmp_path / "profile", "--window-size=1280,720")
    log = json.loads(html.unescape(re.findall("<pre>(.*)</pre>", shown)[0]))
    assert log["title"] == "<i>"
    for step, views in zip((0, 67, 144), log["steps"], strict=True):
        for trace, view in zip((TRACE, second), views, strict=True):
            at = min(step, trace.num_steps - 1)
            counts = table_counts(trace, at)
            numbers = view["numbers"]
            assert numbers["running"] == str((trace.info.request_id[at] >= 0).sum())
            assert numbers["waiting"] == str(trace.info.num_waiting[at])
            assert numbers["used"] == str(trace.info.used_pages[at])
            assert numbers["shared"] == str(sum(x > 1 for x in counts.values()))
            assert numbers["free"] == str((trace.pages.ref[at] == 0).sum())
            time_s = trace.start_s[at] - trace.start_s[0]
            assert numbers["time"].startswith(f"{time_s:.3f} s")
            assert ("ended" in numbers["time"]) == (step != at)
            found = [
                re.findall(r"page (\d+): reference count (\d+)", x)
                for x in view["labels"]
            ]
            assert {int(x): int(n) for [(x, n)] in filter(None, found)} == counts
            events = [x.text for x in list_events(trace) if x.step == step]
            assert view["events"] == events
    clocks = [f"step {i} of 0\N{EN DASH}144" for i in (0, 1, 2, 1, 144, 0, 0, 0)]
    assert log["keys"][::2] == clocks
    assert log["keys"][1::2] == ["play"] * 6 + ["pause", "play"]
    # Page 3 at step 67, and its holders.
    (slot,) = np.flatnonzero((TRACE.pages.page_ids[67] == 3).any(1)).tolist()
    place = TRACE.pages.page_ids[67, slot].tolist().index(3)
    tokens = f"tokens {8 * place}\N{EN DASH}{8 * place + 7}"
    request = TRACE.info.request_id[67, slot]
    assert log["page"].endswith(f"slot {slot}, {tokens}: request {request}")
    assert [x.partition(":")[0] for x in log["picked"]] == ["page 3"]
    life = [x for x in list_events(TRACE) if x.request == 0]
    assert log["life"][1] == HOSTILE
    assert log["life"][3] == TRACE.requests[0].answers[0]
    assert log["events"] == [f"step {x.step} {x.text}" for x in life]
    slots = np.flatnonzero(second.num_drafts[tree_step])
    tree_pages: Any = second.pages
    assert len(log["trees"]) == len(slots)
    for slot, nodes in zip(slots, log["trees"], strict=True):
        path_of_slot = tree_pages.draft_path[tree_step, slot]
        assert len(nodes) == second.num_drafts[tree_step, slot]
        accepted = [x for x in nodes if x[1] == "accepted"]
        assert len(accepted) == (path_of_slot > 0).sum()
        assert len({x[2] for x in nodes}) == len(nodes)
    assert len(log["texts"]) > 100
    small = [x for x in log["texts"] if x[0] < 18 or contrast(x[1], x[2]) < 4.5]
    assert small == []
    assert (log["unnamed"], log["width"] <= 1280) == (0, True)


@pytest.mark.slow
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
def test_steps_without_drafts_have_records_of_the_same_shapes() -> None:
    model = dataclasses.replace(
        engines.MODEL, experts=Experts(num_experts=4, top_k=2, size=12)
    )
    config = dataclasses.replace(
        engines.TIGHT, max_drafts=3, record_pages=True, record_routes=True
    )
    speculation = Speculation(NGram(), SharedNoiseVerifier())
    pages = make_model_pages(model, config, record_routes=True)
    state = init(config, pages, speculation.drafter.init(config))
    with_drafts, without = (
        jax.eval_shape(
            functools.partial(
                jaxkv.run_steps,
                config=config,
                forward=PagedForward(model, config.numerics),
                speculation=speculation,
                may_draft=may_draft,
            ),
            engines.params(model),
            state,
            jax.numpy.zeros(2, int),
            policy=jaxkv.fcfs(),
        )[1]
        for may_draft in (True, False)
    )
    assert jax.tree.map(lambda x: x.shape, with_drafts) == jax.tree.map(
        lambda x: x.shape, without
    )
    assert with_drafts.pages.routes.shape == (4, 32, 2, 2)


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
