"""The demo: both policies serve the same requests, and its metrics are right."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli import commands
from experiments.harness import cut_held_out_prompts, draw_ragged_lengths
from experiments.serving.demo import experiment
from jaxkv.cli import CommandOutput
from jaxkv.cli.main import COMMANDS
from jaxkv.engine import StepInfo
from jaxkv.plotting import timelines
from jaxkv.report import Sheet, Verdicts
from jaxkv.sampling import Sampling
from jaxkv.serving import Completion, FinishedAnswer
from jaxkv.text import ByteTokenizer
from tests.support import smoke
from tests.support.commands import Command, assert_refused, document
from tests.support.impatience import Stopping

STUDY = experiment.STUDY


@pytest.fixture(scope="module")
def model() -> str:
    return smoke.model(64)


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return smoke.run("demo").result


@pytest.mark.thorough
def test_both_policies_give_every_request_the_same_answer(
    result: experiment.Result,
) -> None:
    assert result.static.is_done.all()
    assert result.continuous.is_done.all()
    np.testing.assert_array_equal(result.static.text, result.continuous.text)
    np.testing.assert_array_equal(
        result.static.num_tokens, result.continuous.num_tokens
    )


@pytest.mark.thorough
def test_the_json_output_has_its_documented_keys(model: str, jaxkv: Command) -> None:
    report = document(jaxkv, "demo", "smoke", "--model", model, "--out", "x")
    assert Path(report["out"]) == Path("x")
    for name in ("static", "continuous"):
        assert report[name].keys() >= {
            *("tokens_per_s", "steps", "mean_latency_s", "p95_latency_s"),
            "kv_utilisation",
        }
        assert all(value > 0 for value in report[name].values())
    assert report["same_answers"] == report["requests"] == 6


@pytest.mark.thorough
def test_static_batching_reserves_more_memory_for_longer(
    result: experiment.Result,
) -> None:
    config = experiment.CONFIGS["smoke"]
    static = result.static
    continuous = result.continuous
    assert len(static.num_rows) > len(continuous.num_rows)
    assert static.held.any()
    assert not continuous.held.any()
    # Static batching reserves the longest case for every slot.
    pages = config.max_slots * config.max_length // config.page_size
    assert set(static.used_pages.tolist()) == {pages}
    numbers = experiment.serving_metrics(continuous)
    assert (
        numbers["kv_utilisation"] > experiment.serving_metrics(static)["kv_utilisation"]
    )


@pytest.mark.thorough
def test_the_steps_contain_every_token_of_every_request(
    result: experiment.Result,
) -> None:
    for served in (result.static, result.continuous):
        for i, prompt in enumerate(result.prompt):
            fed = served.num_rows[served.request_id == i].sum()
            # The last generated token is not fed.
            assert fed == len(prompt.encode()) + served.num_tokens[i] - 1


@pytest.mark.thorough
def test_the_report_shows_prompts_and_answers() -> None:
    report = (smoke.run("demo").folder / "report.md").read_text()
    for phrase in ("Given:", "Written:", "6 of 6 answers are the same under both."):
        assert phrase in report


@pytest.mark.thorough
def test_a_stopped_run_keeps_finished_requests(model: str) -> None:
    config = dataclasses.replace(experiment.CONFIGS["smoke"], model=model)
    result = experiment.run(config, Stopping(1))
    assert 0 < result.static.is_done.sum() < config.num_requests
    assert not result.continuous.is_done.any()
    assert experiment.metrics(result)["continuous"]["tokens_per_s"] is None
    assert experiment.claims(result) == []
    table, *_ = experiment.summary(result)
    assert isinstance(table, Sheet)
    assert table.note.startswith("Stopped early: ")
    assert smoke.draw(STUDY, result)


def test_the_model_must_have_text_and_room(model: str) -> None:
    with pytest.raises(ValueError, match="max_length=512 must be at most"):
        experiment.run(experiment.Config(model=model))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--top-p 0", "top_p=0.0 must be in (0, 1]"),
        ("--temperature -1", "temperature=-1.0 must be"),
        ("--token-budget 1", "token_budget=1 must be at least"),
        ("--max-length 100000", "max_length=100000 must be at most"),
        ("--model nope", "unknown model 'nope'"),
        ("--model broken", "broken/model.safetensors: "),
        ("--out kept", "kept: holds files that are not a run"),
        ("--out kept/notes/run", "cannot be written"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    flags: str, line: str, model: str, tmp_path: Path, jaxkv: Command
) -> None:
    Path("kept").mkdir()
    Path("kept/notes").write_text("mine")
    shutil.copytree(model, "broken")
    weights = Path("broken/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    before = {*tmp_path.rglob("*")}
    for out in ("", "--out new"):
        assert_refused(jaxkv, f"demo {out} {flags}", line)
    assert {*tmp_path.rglob("*")} == before


def test_lengths_vary_within_their_bounds() -> None:
    sizes = draw_ragged_lengths(np.random.default_rng(0), (16, 192), 0.9, 2000)
    assert min(sizes) == 16
    assert max(sizes) == 192
    assert 50 < np.median(sizes) < 61  # the middle is 55.4
    again = draw_ragged_lengths(np.random.default_rng(0), (16, 192), 0.9, 2000)
    assert sizes == again


def test_prompts_are_held_out_text_from_the_start_of_a_line() -> None:
    from scaling.corpora import STANDARD_LIBRARY, load_documents

    rng = np.random.default_rng(1)
    sizes = [5, 60, 10_000_000]
    tokenizer = ByteTokenizer(257)
    ask = Sampling.greedy()
    requests = cut_held_out_prompts(tokenizer, sizes, [ask] * 3, rng)
    texts = [x.text.decode() for x in load_documents(STANDARD_LIBRARY).held_out]
    assert [len(request.tokens) for request in requests[:2]] == sizes[:2]
    for request in requests:
        assert any(("\n" + text).find("\n" + request.text) >= 0 for text in texts)


def test_serving_metrics_equal_those_by_hand() -> None:
    def answer(name: int, tokens: int, arrival_s: float, finish_s: float) -> Completion:
        fields: dict[str, Any] = dict.fromkeys(Completion._fields)
        one: dict[str, Any] = dict.fromkeys(FinishedAnswer._fields)
        one |= {"tokens": [0] * tokens, "reason": "length"}
        fields |= {"request_id": name, "answers": [FinishedAnswer(**one)]}
        fields |= {"arrival_s": arrival_s, "finish_s": finish_s}
        return Completion(**fields)

    rows = np.array([[3, 0], [1, 4], [0, 0], [1, 1]])
    ids = np.where(rows > 0, [[0, 1]] * 4, -1)
    fields: dict[str, Any] = dict.fromkeys(StepInfo._fields)
    fields |= {"request_id": ids, "num_rows": rows, "held": rows > 9}
    fields["used_pages"] = np.array([1, 2, 2, 3])
    fields["used_places"] = np.array([3, 8, 8, 6])
    info = StepInfo(**fields)
    served = experiment.collect_record(
        info,
        {0: answer(0, 3, 1.0, 2.0), 1: answer(1, 2, 1.0, 4.0)},
        experiment.Config(num_requests=3, max_slots=2, page_size=4),
        compile_s=9.0,
    )
    assert served.is_done.tolist() == [True, True, False]
    assert experiment.serving_metrics(served) == {
        "tokens_per_s": 5 / 3,
        "steps": 3,
        "mean_latency_s": 2.0,
        "p95_latency_s": pytest.approx(1.0 + 0.95 * 2.0),
        "kv_utilisation": pytest.approx((3 / 4 + 8 / 8 + 6 / 12) / 3),
        "slot_utilisation": pytest.approx(5 / 6),
        "duration_s": 3.0,
        "compile_s": 9.0,
    }


def test_spans_end_where_a_slot_changes() -> None:
    values = np.array([[0, 5], [0, -1], [2, -1]])
    assert list(timelines.split_into_spans(values)) == [
        (0, 0, 0, 2),
        (0, 2, 2, 3),
        (1, 5, 0, 1),
        (1, -1, 1, 3),
    ]
    assert list(timelines.split_into_spans(np.zeros((0, 2), int))) == []


def test_the_last_lines_are_results_and_next_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"steps": 1515, "kv_utilisation": 0.273}
    metrics = {"static": numbers, "continuous": {"steps": 0, "kv_utilisation": None}}
    parts = [Sheet("served", ("", ""), []), Verdicts([])]
    output = CommandOutput({"metrics": metrics}, parts, ["report: x"])
    monkeypatch.setattr(commands, "_run", lambda *args: output)
    answer = commands.demo([])
    assert answer.parts == parts[:1]  # the claims are in the report
    assert answer.lines[:2] == [
        "report: x",
        "static batching took 1,515 steps, and 27 % of the KV memory that it reserved "
        "held tokens",
    ]
    steps = [line.split()[:3] for line in answer.lines[4:]]
    assert [words[0] for words in steps] == ["serve", "fit", "teach"]
    assert {words[2] for words in steps} <= {*COMMANDS}
