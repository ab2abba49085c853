"""The compiler's plan parsed as a tree: nesting, and the launches of a route."""

from pathlib import Path

import pytest

from pallas_kernels.bench import launches
from pallas_kernels.bench.launches import Route

# XLA's dump: headers of regions between lines; the first of a loop is not indented.
PLAN = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source | sink] first grid: [1, 1, 1] threads: [4, 1, 1]
    002: kCopy         [source | sink] kCopy
003: kWhile         [prev=000 (1) | sink]
condition:
    004: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        005: kCublasLtMatmul [source | sink] kCublasLtMatmul
        006: kWhile        [prev=005 (1) | next=009 (2)]
condition:
            007: kCustomKernel [source | sink] any grid: [1, 1, 1]
          body:
            008: kCustomKernel [source | sink] one grid: [1, 1, 1]
        016: kWhile        [prev=006 (1) | next=009 (2)]
condition:
            No thunks.          body:
            017: kCustomKernel [source | sink] never grid: [1, 1, 1]
        009: kConditional  [prev=006 (1) | sink]
          false_branch:
            010: kCustomKernel [source | sink] draw grid: [1, 1, 1]
            011: kCustomKernel [source | sink] more grid: [1, 1, 1]
          true_branch:
            012: kCopy [source | sink] kCopy
        013: kAsyncStart   [source | sink] stream=computation_stream[0], async_id=13
            014: kDynamicSliceFusion [source | sink] params=1, results=1
                015: kCopy [source | sink] kCopy
"""
SCOPES = {
    "while.3": "jit(run)/while",
    "dot.5": "jit(run)/while/body/forward/dot_general",
    "while.6": "jit(run)/while/body/forward/decode/while",
    "one.8": "jit(run)/while/body/forward/decode/while/body/add",
    "while.16": "jit(run)/while/body/forward/decode/while",
    "cond.9": "jit(run)/while/body/emit/sampled/cond",
    "draw.10": "jit(run)/while/body/emit/sampled/cond/branch_1_fun/exp",
}


@pytest.fixture
def plan(tmp_path: Path) -> list[launches.Thunk]:
    names = {int(name.partition(".")[2]): name for name in SCOPES}
    metadata = "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n'
        f"    thunk_id: {number}\n  }}\n}}\n"
        for number, name in names.items()
    )
    trips = ', backend_config={"known_trip_count":{"n":"4"}}'
    text = "".join(
        f"  %{name} = f32[4] fusion(%x){trips if name == 'while.3' else ''},"
        f' metadata={{op_name="{scope}"}}\n'
        for name, scope in SCOPES.items()
    )
    for ending, content in (
        ("sm_9.0a_gpu_after_optimizations.txt", text),
        ("thunk_metadata.txt", metadata),
        ("thunk_sequence_after_thunk_passes.txt", PLAN),
    ):
        (tmp_path / f"module_0001.jit_run.{ending}").write_text(content)
    return launches.read_plan(tmp_path)


def test_nesting_of_the_plan(plan: list[launches.Thunk]) -> None:
    kinds = {
        thunk.name: [around.kind for around in inside]
        for thunk, inside in launches.walk_thunks(plan)
        if thunk.name
    }
    body = ["While", "CommandBuffer"]
    assert kinds == {
        "while.3": [],
        "dot.5": body,
        "while.6": body,
        "one.8": [*body, "While"],
        "while.16": body,
        "cond.9": body,
        "draw.10": [*body, "Conditional"],
    }
    [_, scan] = plan
    assert scan.trips == 4
    assert {x: len(held) for x, held in scan.regions.items()} == {
        "condition": 1,
        "body": 1,
    }


@pytest.mark.parametrize(
    ("decode", "sampled", "launched"),
    [
        # Two launches before the scan: the product and a slice's copy. The scan's
        # condition has no kernel; a loop's with a kernel runs once more than the
        # body; a branch counts its content.
        (0, 0, 4 + 1 + 0 + 1),
        (1, 0, 4 + 3 + 1 + 1),
        (3, 1, 4 + 7 + 3 + 2),
    ],
)
def test_a_route_runs_its_branches(
    plan: list[launches.Thunk], decode: int, sampled: int, launched: int
) -> None:
    route = Route("made up", {"decode": decode, "sampled": sampled})
    assert (
        sum(times for _, times, _ in launches.executed_launches(plan, route))
        == launched
    )


def test_a_missing_choice_is_named(plan: list[launches.Thunk]) -> None:
    with pytest.raises(ValueError, match=r"While while\.6 in .* has no choice"):
        [*launches.executed_launches(plan, Route("short", {"sampled": 1}))]


def test_a_folder_must_hold_one_program(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 0 files \*\.thunk_metadata"):
        launches.read_plan(tmp_path)
