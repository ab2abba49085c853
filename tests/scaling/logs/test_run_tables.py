"""Tables of tasks and of tuned runs: sizes from names, columns, rejected rows."""

import json
from pathlib import Path

import pytest

from scaling.logs import parse_run_size, parse_task, read_task_runs, read_tuned_runs
from scaling.logs.run_sizes import parse_run_name
from tests.support.refusals import refused

TASK = parse_task("quiz=bpb,acc,0.25")


def write(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def test_sizes_are_read_from_text_and_names() -> None:
    assert parse_run_size("7B:4T") == (7e9, 4e12)
    assert parse_run_size("6.9e9:3.9e12") == (6.9e9, 3.9e12)
    assert parse_run_size("537M:10B").label == "537M:10B"
    for text in ("7B", "7B:x", "7B:4T:1", "0:4T", "-1:4T", "7B:nan"):
        with refused(f"{text!r} must be PARAMETERS:TOKENS, such as 7B:4T"):
            parse_run_size(text)
    name = parse_run_name("190M-0.5xC-rerun")
    assert name is not None
    assert name.run_size == (190e6, 190e6 * 10)
    name = parse_run_name("13B-5T")
    assert name is not None
    assert name.run_size == (13e9, 5e12)
    assert parse_run_name("13B-5Tx") is None
    assert parse_run_name("final") is None


def test_parameters_of_a_size_follow_from_its_longest_run(tmp_path: Path) -> None:
    text = "run,throughput/total_tokens,bpb,acc\n190M-1xC,3.9e9,1.2,0.3\n"
    text += "190M-10xC,3.8e10,1.0,0.4\n"
    runs = read_task_runs(write(tmp_path, text), [TASK], hold_out="D > 1e10")
    assert runs.num_params.tolist() == [1.9e8, 1.9e8]
    assert runs.num_tokens.tolist() == [3.9e9, 3.8e10]
    assert runs.loss["quiz"].tolist() == [1.2, 1.0]
    assert runs.accuracy["quiz"].tolist() == [0.3, 0.4]
    assert runs.is_held_out.tolist() == [False, True]
    text = "run,N,D,bpb\nx,1e9,2e10,\n7B-4T,7e9,,0.9\n"
    runs = read_task_runs(write(tmp_path, text), [TASK], needs_metrics=False)
    assert runs.num_params.tolist() == [1e9, 7e9]
    assert runs.num_tokens.tolist() == [2e10, 4e12]  # of the name
    assert str(runs.loss["quiz"].tolist()) == "[nan, 0.9]"
    assert str(runs.accuracy["quiz"].tolist()) == "[nan, nan]"


def test_a_mean_of_columns_has_their_weights(tmp_path: Path) -> None:
    task = TASK._replace(loss=("x", "y"), accuracy=("u", "v"), weights=(0.25, 0.75))
    text = "N,D,x,y,u,v\n1e9,2e10,1,2,0.2,0.6\n"
    runs = read_task_runs(write(tmp_path, text), [task])
    assert runs.loss["quiz"][0] == pytest.approx(1.75)
    assert runs.accuracy["quiz"][0] == pytest.approx(0.5)
    assert runs.names == ("1B:20B",)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "run,bpb,acc\nx,1,0.5\n",
            "no parameters and tokens; --n and --d name columns",
        ),
        ("N,D,bpb\n1,1,1\n", "no column 'acc' of task quiz"),
        ("N,D,bpb,acc\n1,1,1,1.5\n", "acc=1.5 must be in [0, 1]"),
        ("N,D,bpb,acc\n1,1,0,0.5\n", "bpb=0 must be in (0, inf)"),
        ("N,D,bpb,acc\n1,1,,0.5\n", "bpb is missing"),
        ("N,D,bpb,acc\n-1,1,1,0.5\n", "N=-1 must be in (0, inf)"),
    ],
)
def test_bad_tables_of_tasks_are_refused(tmp_path: Path, text: str, line: str) -> None:
    with refused(line):
        read_task_runs(write(tmp_path, text), [TASK])


def test_bad_tasks_are_refused() -> None:
    with refused("no task 'arc'; there are mmlu, hellaswag"):
        parse_task("arc")
    for text in ("quiz=bpb,acc", "quiz=bpb,acc,1", "=bpb,acc,0.5", "quiz=a,b,c"):
        with refused(f"{text!r} must be NAME=LOSS,ACCURACY,CHANCE"):
            parse_task(text)


def test_tuned_runs_are_cells_and_diverged_ones_are_left_out(tmp_path: Path) -> None:
    rows = [
        "1e9,3e8,2e10,0.001,64,2.5",
        "1e9,3e8,2e10,0.002,64,nan",
        "1e9,3e8,2e10,0.004,128,2.4",
        "1e9,3e8,4e10,0.004,128,2.3",
    ]
    text = "N,Na,D,lr,bs,smooth loss\n" + "\n".join(rows) + "\n"
    path = write(tmp_path, text)
    cells, num_dropped = read_tuned_runs(path, hold_out="D > 3e10")
    assert num_dropped == 1
    # Active parameters have priority.
    assert [cell.size for cell in cells] == [(3e8, 2e10), (3e8, 4e10)]
    assert [cell.is_held_out for cell in cells] == [False, True]
    assert cells[0].rate.tolist() == [0.001, 0.004]
    assert cells[0].batch[cells[0].best] == 128
    with refused("selects 1 of the 2 runs of 300M:20B; it must select whole cells"):
        read_tuned_runs(path, hold_out="lr > 0.003 and D < 3e10")
    with refused("no column for batch; --batch names one of N, D, lr, loss"):
        read_tuned_runs(write(tmp_path, "N,D,lr,loss\n1,1,1,1\n"))
    with refused("bs=0 must be in (0, inf)"):
        read_tuned_runs(write(tmp_path, "N,D,lr,bs,loss\n1,1,1,0,1\n"))
    with refused("no run has a loss in column 'loss'"):
        read_tuned_runs(write(tmp_path, "N,D,lr,bs,loss\n1,1,1,1,\n"))


def test_the_folder_of_a_sweep_is_a_table_of_tuned_runs(tmp_path: Path) -> None:
    runs = [
        sweep_run("wsd", 0.001, 512, 2.5),
        sweep_run("wsd", 0.002, 1024, 2.4),
        sweep_run("cosine", 0.002, 1024, 2.45),
        sweep_run("wsd", 0.9, 1024, None),
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, runs)) + "\n")
    (cell,), num_dropped = read_tuned_runs(tmp_path, where="schedule == 'wsd'")
    assert num_dropped == 1
    assert cell.size == (1e6, 2e7)
    assert cell.batch.tolist() == [512, 1024]
    assert cell.loss.tolist() == [2.5, 2.4]
    with refused("--where schedule == 'wds': selects no row"):
        read_tuned_runs(tmp_path, where="schedule == 'wds'")


def sweep_run(
    schedule: str, rate: float, batch: int, loss: float | None
) -> dict[str, object]:
    return {
        "num_params": 2_000_000,
        "num_params_active": 1_000_000,
        "num_tokens": 20_000_000,
        "loss": loss,
        "schedule": schedule,
        "learning_rate": rate,
        "batch_tokens": batch,
    }
