"""Files that failed when others tried the project, with right values."""

import csv

import pytest

from jaxkv.workloads import cached_tokens, read_recording
from scaling import shapes
from scaling.calibration import num_kv_blocks
from scaling.costs import find_device
from tests.support.folders import ROOT

CASES = ROOT.parent / "shared" / "cases" / "2026-11"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not there")


def test_ids_of_chunks_with_several_lengths() -> None:
    recording = read_recording(CASES / "contradicting_ids.jsonl")
    assert list(cached_tokens(recording)) == [0, 600, 1024]
    assert recording.doubts


def test_a_row_on_another_clock() -> None:
    [doubt] = read_recording(CASES / "two_clocks.csv").doubts
    assert "row 10" in doubt or "line 10" in doubt


def test_blocks_of_vllm() -> None:
    with (CASES / "kv_blocks.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        num_blocks = num_kv_blocks(
            shapes.describe(row["model"].lower()),
            find_device(row["device"]),
            tensor_parallel=int(row["tensor_parallel"]),
        )
        assert num_blocks == pytest.approx(int(row["num_kv_blocks_vllm"]), rel=0.003)
