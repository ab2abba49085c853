"""The reader of measured servers."""

from pathlib import Path

import pytest

from scaling import shapes
from scaling.calibration import read_measured_stages
from tests.support.folders import GOLDEN, ROOT

STAGES = GOLDEN / "vllm_stages.csv"
PUBLISHED = ROOT.parent / "shared" / "data" / "vllm_h100" / "runs.csv"


def edited(folder: Path, **cells: str) -> Path:
    """A copy of the table with other cells in its second row."""
    names, first, second = (x.split(",") for x in STAGES.read_text().split())
    for name, value in cells.items():
        second[names.index(name)] = value
    path = folder / "edited.csv"
    path.write_text("\n".join(",".join(row) for row in (names, first, second)))
    return path


def test_stages_of_a_table() -> None:
    first, second = read_measured_stages(STAGES)
    assert (first.name, first.device, first.block_size) == ("made-up-7b/0", "h100", 16)
    assert (first.tensor_parallel, second.tensor_parallel) == (1, 2)
    assert (first.arrivals, second.arrivals) == ("constant", "poisson")
    assert (first.rate_per_s, second.rate_per_s) == (5.0, 2.5)
    assert (first.num_prompts, first.prompt_tokens, first.num_blocks) == (
        12,
        190.5,
        None,
    )
    assert (first.is_overloaded, second.is_overloaded) == (False, True)
    assert first.end_to_end_s == (0.5, 0.48, 0.7)
    assert first.first_token_s == (0.02, 0.019, 0.05)
    # 40 gaps take 0.48 s: the client counted two chunks for a token.
    assert first.inter_token_s == pytest.approx((0.012, 0.0118, 0.018))


@pytest.mark.parametrize("num_columns", [16, 18])
def test_a_table_without_latencies_describes_servers(
    tmp_path: Path, num_columns: int
) -> None:
    """Columns 17 and 18 count requests."""
    rows = [x.split(",")[:num_columns] for x in STAGES.read_text().split()]
    path = tmp_path / "servers.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    first, _ = read_measured_stages(path)
    assert (first.end_to_end_s, first.first_token_s, first.inter_token_s) == (None,) * 3
    assert (first.prompt_tokens, first.max_prompt_tokens) == (192, 192)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"rate_per_s": "0"}, "rate_per_s='0' must be a number above 0"),
        ({"rate_per_s": "fast"}, "rate_per_s='fast' must be a number above 0"),
        ({"answer_tokens": "-3"}, "answer_tokens='-3' must be a number at least 1"),
        ({"prompt_tokens_max": "99"}, "prompt_tokens_max='99' must be at least 190.5"),
        ({"max_num_seqs": "1.5"}, "max_num_seqs='1.5' must be a whole number"),
        ({"arrivals": "bursts"}, "arrivals='bursts' must be constant or poisson"),
        ({"model": ""}, "model='' must be a name"),
        ({"max_model_len": "200"}, "max_model_len='200' must be at least 237"),
        ({"ttft_s_mean": "2"}, "e2e_s_mean='0.9' must be at least ttft_s_mean=2"),
        ({"e2e_s_p99": "0.5"}, "e2e_s_p99='0.5' must be at least e2e_s_median=0.88"),
        ({"e2e_s_p99": "nan"}, "e2e_s_p99='nan' must be a number above 0"),
    ],
)
def test_cells_out_of_range_are_refused(
    tmp_path: Path, cells: dict[str, str], message: str
) -> None:
    path = edited(tmp_path, **cells)
    with pytest.raises(ValueError, match=r"edited\.csv: row 2 \(line 3\): ") as error:
        read_measured_stages(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_repeated_stages_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, run="made-up-7b", stage="0")
    line = r"row 2 \(line 3\): run='made-up-7b' and stage=0 are those of row 1"
    with pytest.raises(ValueError, match=line):
        read_measured_stages(path)


@pytest.mark.parametrize(
    ("cells", "doubt"),
    [
        (
            {"e2e_s_mean": "900", "ttft_s_mean": "50"},
            "21.25 s per token follow from e2e_s_mean=900",
        ),
        (
            {"tpot_s_mean": "10.5", "tpot_s_median": "10.4", "tpot_s_p99": "20"},
            "tpot_s_mean=10.5, and 0.02125 s per token",
        ),
        ({"duration_s": "60000"}, "rate_per_s * duration_s is 1.5e+05 requests"),
        ({"rate_per_s": "150"}, "rate_per_s * duration_s is 9,000 requests"),
        ({"rate_per_s": "0.85"}, "rate_per_s * duration_s is 51 requests"),
        (
            {"duration_s": "0.6", "rate_per_s": "250", "failures": "0"},
            "e2e_s_mean=0.9 exceeds duration_s=0.6 without failures",
        ),
    ],
)
def test_numbers_in_another_unit_are_doubted(
    tmp_path: Path, cells: dict[str, str], doubt: str
) -> None:
    path = edited(tmp_path, **cells)
    with pytest.warns(UserWarning, match="edited") as warned:
        read_measured_stages(path)
    (line,) = (str(x.message) for x in warned)
    assert line.startswith(f"{path}: row 2 (line 3): ")
    assert doubt in line
    assert line.endswith("?")


def test_a_table_in_milliseconds_is_one_doubt(tmp_path: Path) -> None:
    names, *rows = (x.split(",") for x in STAGES.read_text().split())
    for row in rows:
        for i, name in enumerate(names):
            if name.startswith(("e2e_s", "ttft_s", "tpot_s")):
                row[i] = str(1e3 * float(row[i]))
    path = tmp_path / "ms.csv"
    path.write_text("\n".join(",".join(row) for row in (names, *rows)))
    line = r"in milliseconds\? \(1 more rows\)"
    with pytest.warns(UserWarning, match=line) as warned:
        read_measured_stages(path)
    assert len(warned) == 1


def test_missing_columns_and_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("run,stage,model\na,0,b\n")
    with pytest.raises(ValueError, match="lacks the columns tensor_parallel, max_mod"):
        read_measured_stages(path)
    path.write_text("run,stage,model\n")
    with pytest.raises(ValueError, match=r"short\.csv"):
        read_measured_stages(path)


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is absent")
def test_the_published_servers() -> None:
    stages = read_measured_stages(PUBLISHED)
    assert len(stages) == 18
    assert sum(not stage.is_overloaded for stage in stages) == 15
    assert len({stage.run for stage in stages}) == 12
    names = {shapes.describe_checkpoint(stage.model).name for stage in stages}
    assert names == {"llama-2-7b", "codellama-34b", "mixtral-8x7b"}
    first = stages[0]
    assert first.inter_token_s is not None
    assert first.inter_token_s.mean == pytest.approx((1.81032 - 0.0250366) / 246)
