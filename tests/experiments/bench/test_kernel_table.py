"""The README's table of kernels, generated from the record of a device."""

from pathlib import Path
from typing import Any

import pytest

from experiments.bench.kernels import report
from experiments.bench.kernels.experiment import Config, _row
from experiments.framework import load_experiment
from jaxkv.plotting import style
from jaxkv.report import begin_run, finish_run
from pallas_kernels.bench import SETS, Ceilings
from tests.support.mutation import replace

ONE, TWO, COPY = (SETS["quick"][i] for i in (0, 2, 8))


def row(spec: Any, name: str, seconds: float | None, **fields: Any) -> Any:
    """Returns a row as the benchmark writes it."""
    ours = ("mosaic_gpu", "reference")
    timed = {"seconds": seconds, "fraction": 0.5, "target_s": 2e-4, "error": 1e-3}
    empty = _row(spec, name, name not in ours)
    return empty | timed | fields


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes run folders of synthetic results, without figures."""
    replace(monkeypatch, style, "render_figure", lambda *args, **sizes: {})

    def make(device: str, *, interrupted: bool = False) -> Path:
        folder = tmp_path / "run"
        head = {
            "device": device,
            "ceilings": Ceilings(4.3e12, 4.4e12, 7.9e14, 2e-6, "cupti")._asdict(),
            "peers": {"FlashInfer": "0.6.7"},
            "num_layers": 32,
            "max_s": 480.0,
        }
        rows = [
            row(ONE, "reference", 9e-5),
            row(ONE, "mosaic_gpu", 8e-6),
            row(ONE, "FlashInfer", 9.6e-6, how="decode, tensor cores"),
            row(ONE, "XLA gather", 5e-5),
            row(TWO, "reference", None, note="skipped"),
            row(TWO, "mosaic_gpu", 6e-4),
            row(TWO, "XLA gather", 3e-4),
            row(COPY, "mosaic_gpu", None, note="it broke"),
        ]
        experiment = load_experiment("bench_kernels")
        begin_run(folder, experiment, Config())
        result = [head, *rows]
        finish_run(folder, experiment, result, duration_s=1.0, interrupted=interrupted)
        return folder

    return make


def test_a_line_for_each_shape(record: Any) -> None:
    heads, _, one, two, copy, _, caption = report.kernel_table(
        record("NVIDIA H200")
    ).split("\n")
    assert heads.startswith("| shape | bytes | jaxkv | best peer |")
    assert one == (
        "| decode-b1-1k-32x8-p16 | 4.21 MB | **8 us** |"
        " 9.6 us (FlashInfer (decode, tensor cores)) | 1.20 | 50.0 % | 200 us |"
    )
    # The peer is faster.
    assert "| 600 us | **300 us (XLA gather)** | 0.50 |" in two
    assert "| not timed: it broke | - | - |" in copy
    assert len({line.count("|") for line in (heads, one, two, copy)}) == 1
    for output in ("NVIDIA H200; 20", "FlashInfer 0.6.7", "copy 4.3 TB/s", "CUPTI"):
        assert output in caption


def test_incomplete_or_cpu_records_are_rejected(record: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was made on a CPU"):
        report.kernel_table(record("cpu"))
    with pytest.raises(ValueError, match="only a whole run counts"):
        report.kernel_table(record("NVIDIA H200", interrupted=True))
    with pytest.raises(ValueError, match="missing"):
        report.kernel_table(tmp_path / "missing")
