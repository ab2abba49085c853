"""The kernel benchmark: document, rejected results, and times."""

import dataclasses
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.kernels import experiment, peer_frameworks, report
from experiments.bench.kernels.experiment import Config
from experiments.framework import load_experiment
from experiments.harness import Implementation, KernelRun
from experiments.harness.kernels import calls, runs
from experiments.harness.peers import peer_process
from jaxkv.progress import Quiet
from jaxkv.report import Sheet
from pallas_kernels import devices
from pallas_kernels.bench import (
    SETS,
    Ceilings,
    Spec,
    Timing,
    compile_function,
    num_turns,
    problems,
    specs,
    unavailable_reason,
)
from pallas_kernels.bench import timing as bench_timing
from pallas_kernels.bench.timing import _cupti, _queue
from pallas_kernels.devices import Target
from pallas_kernels.paged_attention import KernelTilings, decode_plan, merging, stream_k
from tests.support import smoke
from tests.support.commands import Command, document
from tests.support.mutation import replace

KEYS = {
    *("spec", "implementation", "seconds", "error"),
    *("bytes", "flops", "fraction", "ratio"),
    *("call_s", "plan_s", "plan_per_layer_s", "merge_s", "t0_s"),
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces all implementations by one kernel and one peer."""

    def install(**calls: Any) -> None:
        systems = [
            Implementation(name, name != "ours", call, 0.1 if name == "shared" else 1.0)
            for name, call in calls.items()
        ]
        replace(monkeypatch, runs, "attention_implementations", lambda: systems)

    return install


def tiny(kind: str) -> Spec:
    spec = next(spec for spec in SETS["tiny"] if spec.kind == kind)
    assert isinstance(spec, Spec)
    return spec


def right(problem: problems.AttentionProblem) -> KernelRun:
    return KernelRun(lambda index: jnp.zeros(()), lambda: 1e-6)


@pytest.mark.slow
def test_bench_kernels_document(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a borrowed machine without tyro.
    monkeypatch.setitem(sys.modules, "tyro", None)
    document_report = document(jaxkv, "bench", "kernels", "smoke", "--out", "run")
    assert document_report["device"] == "cpu"
    assert document_report["ceilings"].keys() == set(Ceilings._fields)
    rows = document_report["rows"]
    absent = document_report["absent"]
    assert all(row.keys() >= KEYS for row in rows)
    spec_names = [spec.name for spec in SETS["tiny"]]
    *attention, copy, products = spec_names
    assert list(dict.fromkeys(row["spec"] for row in rows)) == spec_names
    for row in rows:
        assert row["seconds"] > 0
        assert row["error"] < 1e-5
        assert row["clock"] == "wall"
    by_name = {(row["spec"], row["implementation"]): row for row in rows}
    peers_of = dict.fromkeys(attention, ("XLA gather", "XLA contiguous"))
    peers_of[products] = ("XLA ragged_dot", "XLA all experts")
    for name, names in peers_of.items():
        peers = [row for row in rows if row["spec"] == name and row["is_peer"]]
        assert {*names} <= {peer["implementation"] for peer in peers}
        best = min(peer["seconds"] for peer in peers)
        ours = by_name[name, "reference"]
        assert ours["ratio"] == pytest.approx(best / ours["seconds"])
    assert by_name[copy, "reference"]["error"] == 0
    reasons = {row["implementation"]: row["note"] for row in absent}
    assert reasons["cuDNN contiguous"] == "cuDNN needs a GPU"
    assert "is a cpu, not a GPU" in reasons["mosaic_gpu"]
    assert Path("run/figure.png").stat().st_size > 10_000
    assert "XLA gather" in Path("run/report.md").read_text("utf-8")


def test_incorrect_or_failing_kernels_are_not_timed(few: Any) -> None:
    def broken(problem: problems.AttentionProblem) -> KernelRun:
        raise RuntimeError("out of memory\nand a long story")

    few(ours=lambda problem: right(problem)._replace(error=lambda: 0.5), theirs=broken)
    result = experiment.run(Config(shapes="tiny", only="decode"))
    ours, peer_row = result[1:]
    assert ours["note"] == "incorrect result: error=0.5"
    assert peer_row["note"] == "RuntimeError: out of memory"
    assert ours["seconds"] is ours["ratio"] is peer_row["seconds"] is None
    assert not experiment.metrics(result)["rows"]
    (_, sheet) = report.summary(result)
    assert isinstance(sheet, Sheet)
    assert [row[0] for row in sheet.rows] == ["ours", "theirs"]
    nan = lambda problem: right(problem)._replace(error=lambda: float("nan"))  # noqa: E731
    few(ours=nan, theirs=nan)
    assert experiment.run(Config(shapes="tiny", only="decode"))[1]["seconds"] is None


@pytest.mark.slow
def test_a_stopped_run_has_complete_shapes(few: Any) -> None:
    class Impatient(Quiet):
        """Stops before the second shape."""

        def track(self, items: Any, label: str, unit: str) -> Any:
            yield next(iter(items))

    (study,) = load_experiment("bench_kernels").studies
    few(ours=right, theirs=right)
    result = experiment.run(Config(shapes="tiny", num_calls=2), Impatient())
    assert len({row["spec"] for row in result[1:]}) == 1
    assert {row["implementation"] for row in result[1:]} == {"ours", "theirs"}
    for partial_rows in (result, result[:1]):
        assert smoke.draw(study, partial_rows)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["decode", "tree", "chunk"])
def test_every_implementation_is_correct_in_every_turn(kind: str) -> None:
    """Peers use their own layout of keys, and a different page table in every call."""
    spec = tiny(kind)
    problem = problems.make_attention(spec, num_turns=2)
    outs = {}
    for implementation in runs.attention_implementations():
        try:
            run = implementation.prepare(problem)
            outs[implementation.name] = [run.call(index) for index in range(3)]
        except ValueError:
            continue
    ours = outs.pop("reference")
    assert len(outs) == 3
    for peer_outs in outs.values():
        for selected, other in zip(ours, peer_outs, strict=True):
            assert jnp.allclose(selected, other, atol=1e-5)
    assert not jnp.allclose(ours[0], ours[1], atol=1e-2)
    assert jnp.array_equal(ours[0], ours[2])


FAKE = """
import json, sys
if sys.argv[2] == "FlashInfer":
    print(json.dumps({"absent": "no such thing"}), flush=True)
    sys.exit()
if sys.argv[2] != "Sdpa":
    sys.exit(3)
print(json.dumps({"version": "7"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["heads"] == [4, 2, 16] and len(asked["contexts"]) > 1
    assert (asked["page_size"], asked["max_error"]) == (8, 2e-3)
    if asked["ancestors"]:
        assert asked["ancestors"][0][0] == [True] + [False] * 4
        print(json.dumps({"refused": "no trees"}), flush=True)
        continue
    timing = {"seconds": 1e-9, "spread": None, "clock": "cupti"}
    timing |= {"num_kernels": 1, "longest_s": 1e-9}
    answer = {"error": 1e-7, "timing": timing, "plan_s": 3.2e-5, "how": "best"}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow
def test_peers_answer_from_separate_processes(
    few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "MAIN", tmp_path / "fake.py")
    few(ours=right, theirs=right)
    config = Config(shapes="tiny", num_calls=2, peer_python=Path(sys.executable))
    head, *rows = experiment.run(config)
    assert head["peers"] == {"torch SDPA": "7"}
    output = {row["spec"]: row for row in rows if row["implementation"] == "torch SDPA"}
    assert len(output) == len(SETS["tiny"]) - 2  # not of copies, nor of products
    for name, row in output.items():
        if name.startswith("tree"):
            assert (row["seconds"], row["note"]) == (None, "no trees")
        else:
            assert (row["seconds"], row["ratio"]) == (1e-9, 1)
            assert row["num_kernels"] == 1
            # A peer's plan is not part of its time.
            assert row["plan_per_layer_s"] == pytest.approx(1e-6)
            assert row["how"] == "best"
    notes = {row["implementation"]: row["note"] for row in rows if row["note"]}
    assert notes["FlashInfer"] == "no such thing"
    assert notes["torch cuDNN"] == "ended early: no error message"
    ours = [row for row in rows if row["implementation"] == "ours"]
    assert all(row["ratio"] < 1 for row in ours if not row["spec"].startswith("tree"))


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="it is installed here"
)
def test_the_real_script_reports_missing_libraries(few: Any) -> None:
    few(ours=right, theirs=right)
    config = Config(shapes="tiny", only="decode", peer_python=Path(sys.executable))
    head, *rows = experiment.run(config)
    assert head["peers"] == {}
    notes = {row["implementation"]: row["note"] for row in rows if row["note"]}
    assert notes.keys() == peer_frameworks.PEERS.keys()
    # The missing module is a library, not a file of this project.
    libraries = dict.fromkeys(notes, "torch") | {"FlashInfer": "flashinfer"}
    for name, note in notes.items():
        assert note == f"No module named '{libraries[name]}'"


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the calls that would run on an H200, without running them."""
    call_args: list[Any] = []

    def prepare(*args: Any) -> KernelRun:
        call_args.append(args)
        return KernelRun(lambda index: None, lambda: 0.0)

    replace(monkeypatch, calls, "make_run", prepare)
    h200 = Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: h200)
    return call_args


def compiled(prepared: list[Any]) -> list[Any]:
    # Code of the peers raises warnings.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return [compile_function(run, *turns[0]) for _, run, turns in prepared]


without_a_compiler = pytest.mark.skipif(
    unavailable_reason() is not None, reason="no compiler for GPUs"
)


@pytest.mark.slow
@without_a_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["decode", "tree", "chunk"])
def test_all_attention_kernels_compile_for_an_h200(
    kind: Any, prepared: list[Any]
) -> None:
    """Compiles without a GPU; cuDNN needs one to compile."""
    rows = 1 if kind == "decode" else 26
    problem = problems.make_attention(Spec(kind=kind, batch=2, context=300, rows=rows))
    for implementation in runs.attention_implementations():
        if implementation.name == "cuDNN contiguous":
            continue
        try:
            implementation.prepare(problem)
        except ValueError:
            assert (implementation.name, kind) != ("Pallas Triton", "decode")
    assert len(compiled(prepared)) >= 3


def test_the_plan_time_is_shared_by_the_layers(
    few: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are fake, with a different value for each kind of call."""
    one, two, three = (lambda index, n=n: n for n in (1, 2, 3))
    seconds = {one: 1.0, two: 32.0, three: 0.25}

    def measure(call: Any, *, num_calls: int) -> Timing:
        return Timing(seconds[call], None, 5, None, "cupti")

    ceilings = Ceilings(1.0, 1.0, 1.0, 0.125, "cupti")
    replace(monkeypatch, bench_timing, "measure", measure)
    replace(monkeypatch, bench_timing, "measure_ceilings", lambda **sizes: ceilings)
    empty = lambda num_kernels: Timing(num_kernels * 0.1, None, None, None, "cupti")  # noqa: E731
    replace(monkeypatch, bench_timing, "measure_empty", empty)
    few(
        ours=lambda problem: KernelRun(one, lambda: 0.0, plan=two, merge=three),
        theirs=lambda problem: KernelRun(one, lambda: 0.0, plan_s=32.0),
    )
    _, ours, peer_row = experiment.run(Config(shapes="tiny", only="decode"))
    assert (ours["call_s"], ours["seconds"], ours["merge_s"]) == (1.0, 2.0, 0.25)
    assert (peer_row["call_s"], peer_row["seconds"], peer_row["merge_s"]) == (
        1.0,
        1.0,
        None,
    )
    for row in (ours, peer_row):
        assert (row["plan_s"], row["plan_per_layer_s"]) == (32.0, 1.0)
        assert row["t0_s"] == 0.5
    assert ours["ratio"] == 0.5
    spec = SETS["tiny"][0]
    floor_s = ceilings.floor_s(spec.bytes, spec.flops)
    assert ours["excess_s"] == 2.0 - floor_s
    assert ours["target_s"] == pytest.approx(floor_s / 0.9 + 0.5)


@pytest.mark.thorough
def test_the_merge_call_gets_the_kernel_output_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = tiny("chunk")
    problem = problems.make_attention(spec)
    tiling = stream_k.default_decode_tiling(head_dim=64, num_programs=3)
    make_plan = functools.partial(
        decode_plan.plan_decode,
        num_slots=spec.batch,
        kv_heads=spec.heads.kv_heads,
        group=2,
        tiling=tiling,
    )
    plan = jax.jit(make_plan)(problem.positions, problem.slots)
    call_args: list[Any] = []
    replace(
        monkeypatch,
        merging,
        "merge_and_unpack",
        lambda *args, **_: call_args.extend(args),
    )
    tilings = KernelTilings(decode=tiling, prefill=tiling)
    runs.make_merge_call(problem, plan, tilings)(0)
    # 2 blocks with room for all 18 tokens and 2 query heads, 40 rows; 3 programs.
    states, ends = call_args[:2]
    assert [x.shape for x in states] == [
        (2, 2, 40, 16),
        (2, 2, 40),
        (3, 2, 40, 16),
        (3, 2, 40),
    ]
    assert ends.shape == (2,)


@pytest.mark.slow
def test_no_measurement_starts_after_the_time_limit(
    few: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    replace(monkeypatch, peer_frameworks, "now_s", lambda: clock[0])

    def taking(seconds: float) -> Any:
        def prepare(problem: problems.AttentionProblem) -> KernelRun:
            clock[0] += seconds
            return right(problem)

        return prepare

    few(ours=taking(30.0), theirs=taking(10.0), shared=taking(11.0))
    config = Config(shapes="tiny", num_calls=2, max_s=100.0)
    result = experiment.run(config)
    output = [(row["implementation"], row["note"]) for row in result[1:10]]
    share = "skipped: its share of the time, 10 s, was over"
    over = "skipped: the 100 s were over"
    # 51 s, 91 s, 121 s: work that has started is finished.
    assert output[:6] == [
        ("ours", ""),
        ("theirs", ""),
        ("shared", ""),
        ("ours", ""),
        ("theirs", ""),
        ("shared", share),
    ]
    assert output[6:] == [("ours", ""), ("theirs", over), ("shared", over)]
    # The quick config ends earlier.
    clock[0] = 0.0
    quick = experiment.run(dataclasses.replace(config, quick=True))
    assert quick[0]["max_s"] == 40.0
    assert [row["note"] for row in quick[1:4]] == ["", "", over.replace("100", "40")]


def test_informative_shapes_come_first() -> None:
    chosen = experiment._choose(Config(), "gpu")
    quick, real = (SETS[name] for name in ("quick", "real"))
    assert {*chosen[: len(quick)]} == {*quick}
    assert sorted(map(str, chosen)) == sorted(map(str, real))


def test_a_peer_that_does_not_answer_is_ended(
    few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = """print('{"version": "1"}', flush=True)"""
    (tmp_path / "silent.py").write_text(f"import time\n{says}\ntime.sleep(99)")
    monkeypatch.setattr(peer_process, "MAIN", tmp_path / "silent.py")
    monkeypatch.setattr(peer_frameworks, "PEERS", {"one": ("", "")})
    few(ours=right)
    config = Config(
        shapes="tiny",
        only="decode",
        num_calls=2,
        max_s=2.0,
        peer_python=Path(sys.executable),
    )
    *_, row = experiment.run(config)
    assert row["implementation"] == "one"
    assert re.fullmatch(r"ended after [12] s without an answer", row["note"])


@pytest.mark.slow
@without_a_compiler
def test_all_grouped_matmuls_compile_for_an_h200(prepared: list[Any]) -> None:
    experts = specs.ExpertShape(8, 2, 256, 512)
    spec = specs.GroupedSpec(tokens=40, experts=experts)
    problem = problems.make_grouped(spec)
    for implementation in runs.implementations_of(spec):
        implementation.prepare(problem)
    kernels = [len(report.kernels) for report in compiled(prepared)]
    assert kernels == [0, 1, 0, 0, 1]


def test_floor_and_target_equal_hand_computed_values() -> None:
    ceilings = Ceilings(4e12, 4.4e12, 8e14, 2e-6, "cupti")
    # Reading is faster than copying; the larger of memory and compute time counts.
    assert ceilings.floor_s(4_400_000_000, 0) == pytest.approx(1e-3)
    assert ceilings.floor_s(4_400_000, 8 * 10**12) == pytest.approx(1e-2)
    ceilings = Ceilings(4.3e12, 4e12, 8e14, 5e-6, "cupti")
    seconds = ceilings.target_s(33_600_000, 0)
    assert seconds == pytest.approx(13.7e-6, rel=1e-2)
    assert ceilings.target_s(33_600_000, 0, 15e-6) == pytest.approx(seconds + 10e-6)


def test_turns_exceed_the_cache() -> None:
    cache = 62_914_560
    assert num_turns(4_214_784, "NVIDIA H200") == 60
    assert num_turns(4 * cache, "NVIDIA H200") == 1
    assert num_turns(4 * cache - 1, "NVIDIA H200") == 2
    assert num_turns(1000, "cpu") == 1


def test_kernel_times_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler is a fake with the results of a GPU."""
    indices: list[int] = []

    def measure(function: Any, *, aggregate: bool, iterations: int) -> Any:
        # A function that is jitted again would lose its turns.
        assert isinstance(function, jax.stages.Wrapped)
        assert not aggregate

        def run() -> Any:
            for _ in range(1 + iterations):  # with a warm-up call
                function()
            return None, [[("a", 1.0), ("b", n)] for n in range(iterations)]

        return run

    monkeypatch.setattr(profiler, "measure", measure)
    timing = _cupti(indices.append, 5)
    assert indices == [0, 1, 2, 3, 4, 5]
    assert timing is not None
    # Milliseconds 1 to 5.
    assert timing.seconds == pytest.approx(3e-3)
    # Range of five values, relative to their median.
    assert timing.spread == pytest.approx((5 - 1) / 3)
    assert timing.num_kernels == 2
    # 0 to 4 ms of the first kernel, always 1 ms of the second.
    assert timing.longest_s == pytest.approx(2e-3)
    assert timing.clock == "cupti"


def test_without_cupti_the_queue_is_timed() -> None:
    add = jax.jit(lambda x: x + 1)
    x = jnp.zeros((3,))
    assert _cupti(lambda index: add(x), 2) is None
    timing = _queue(lambda index: add(x), 2)
    assert timing.clock == "queue"
    assert timing.seconds > 0


def test_unknown_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"config\.only='unknown' is in no name"):
        experiment.run(Config(shapes="tiny", only="unknown"))
