"""The GPU benchmark: parts, time shares and resumed calls, with a fake clock."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.bench.decode import timeline
from experiments.bench.device import experiment, worker
from experiments.bench.device.experiment import Config
from experiments.bench.kernels import checks
from experiments.harness.kernels import runs
from jaxkv.progress import Quiet
from tests.support.commands import Command
from tests.support.mutation import replace


class Part(NamedTuple):
    """A fake part: names of pieces, and the seconds of each."""

    name: str
    names: tuple[str, ...]
    answer: Callable[[Sequence[str], float, float], tuple[list[dict[str, Any]], float]]
    at_once: int = 1


class Clock(Quiet):
    """A clock that advances only during work, with the end of a call."""

    def __init__(self, left_s: float = math.inf) -> None:
        self.now_s = 0.0
        self.end_s = left_s

    @property
    def left_s(self) -> float:
        return self.end_s - self.now_s

    @property
    def stopped(self) -> bool:
        return self.now_s >= self.end_s


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[list[dict[str, Any]], list[tuple[str, ...]]]]:
    """Runs a call of fake parts; returns rows, and the pieces in order of work."""

    def make(left_s: float, *fakes: Part) -> Any:
        clock = Clock(left_s)
        replace(monkeypatch, experiment, "now_s", lambda: clock.now_s)
        monkeypatch.setattr(
            experiment.time, "sleep", lambda s: setattr(clock, "now_s", clock.end_s)
        )
        log: list[tuple[str, ...]] = []
        by_name = {x.name: x for x in fakes}

        def answer(
            words: tuple[Any, ...], names: Sequence[str], limits_s: tuple[float, float]
        ) -> Iterator[dict[str, Any]]:
            log.append((words[0], *names))
            soft_s, kill_s = limits_s
            assert soft_s <= kill_s <= clock.left_s
            answer_rows, seconds = by_name[words[0]].answer(names, soft_s, kill_s)
            clock.now_s += seconds
            yield from (
                {"seconds": seconds / len(answer_rows), **x} for x in answer_rows
            )

        names_of = {x.name: x.names for x in fakes}
        parts = {x.name: (0.5, 10.0, x.at_once) for x in fakes}
        monkeypatch.setattr(experiment, "BENCH_PARTS", parts)
        replace(monkeypatch, experiment, "pieces_by_part", lambda size: names_of)
        replace(monkeypatch, experiment, "answer_pieces", answer)
        rows = experiment.run(Config(folder=str(tmp_path)), clock)
        return rows, log

    return make


def fake(name: str, num: int, each_s: float) -> Part:
    """Makes a part with a given time per piece, which is cut at its share."""

    def answer(names: Sequence[str], soft_s: float, kill_s: float) -> Any:
        fit = [x for i, x in enumerate(names) if i * each_s <= soft_s]
        return [{"name": x, "found": {"by": name}} for x in fit], each_s * len(fit)

    return Part(name, tuple(f"{name}{i}" for i in range(num)), answer)


def done(rows: list[dict[str, Any]]) -> set[str]:
    return {row["name"] for row in rows if row["found"]}


def test_a_call_continues_the_pieces_of_the_previous_call(call: Any) -> None:
    slow = fake("slow", 8, 40.0)
    quick = fake("quick", 3, 20.0)
    rows, log = call(203.0, slow, quick)
    # Half of 200 s is for the first part; then the second part runs.
    slow_first = [("slow", f"slow{i}") for i in range(3)]
    assert log[:4] == [*slow_first, ("quick", "quick0")]
    assert {x for _, x in log} == done(rows)
    before = done(rows)
    rows, log = call(1000.0, slow, quick)
    assert not {x[1] for x in log} & before
    assert done(rows) == {*slow.names, *quick.names}
    rows, log = call(1000.0, slow, quick)
    assert log == []


def test_each_piece_is_written_to_disk_immediately(call: Any, tmp_path: Path) -> None:
    def broken(*args: Any) -> Any:
        raise KeyboardInterrupt

    parts_ = fake("a", 2, 10.0), fake("b", 1, 1.0)._replace(answer=broken)
    with pytest.raises(KeyboardInterrupt):
        call(500.0, *parts_)
    lines = (tmp_path / experiment.PARTS_FILE).read_text().splitlines()
    assert [json.loads(x)["name"] for x in lines] == ["a0", "a1"]


def test_a_failed_piece_is_retried_once_in_a_later_call(call: Any) -> None:
    def fail(names: Sequence[str], *args: Any) -> Any:
        return [{"name": names[0], "note": "boom"}], 20.0

    fails = fake("f", 1, 1.0)._replace(answer=fail)
    for tries in (1, 2):
        (row,), log = call(500.0, fails)
        assert len(log) == 1
        assert (row["tries"], row["note"]) == (tries, "boom")
    _, log = call(500.0, fails)
    assert log == []
    assert experiment.metrics([row])["failed"] == ["f f0: boom"]


def test_a_piece_cut_by_the_time_limit_does_not_count_as_failed(call: Any) -> None:
    def cut(names: Sequence[str], soft_s: float, kill_s: float) -> Any:
        return [{"name": names[0], "note": worker.KILLED}], kill_s

    long = fake("long", 1, 1.0)._replace(answer=cut)
    rows, _ = call(103.0, fake("first", 1, 60.0), long)
    assert [(x["name"], x["tries"]) for x in rows] == [("first0", 1), ("long0", 0)]
    # The piece had the whole second call, so it counts as a try.
    rows, _ = call(103.0, long)
    assert [(x["name"], x["tries"]) for x in rows] == [("first0", 1), ("long0", 1)]


@pytest.mark.slow
def test_a_worker_answers_until_it_fails_or_is_killed(tmp_path: Path) -> None:
    """Asks for a known feature, an unknown one, and one after the failure."""
    words = ("correctness", "tiny", tmp_path)
    names = ["softcap-decode", "no such shape", "sinks-decode"]
    good, bad = experiment.answer_pieces(words, names, (60.0, 120.0))
    assert good["found"]["implementations"][0]["right"]
    assert good["seconds"] > bad["seconds"]
    assert (bad["name"], bad["goes_on"]) == ("no such shape", False)
    assert bad["note"] == "correctness: ended early: KeyError: 'no such shape'"
    [killed] = experiment.answer_pieces(words, names, (60.0, 0.0))
    assert (killed["name"], killed["note"]) == (names[0], worker.KILLED)
    assert not list(experiment.answer_pieces(words, names, (-1.0, 60.0)))


def test_timeline_equals_hand_computed_values() -> None:
    event = timeline.KernelEvent
    ran = [event("a", 0, 10), event("b", 5, 10), event("a", 30, 10)]
    summary = timeline.summarize_events(ran, 2)
    assert summary["launches_per_step"] == 1.5
    assert summary["busy_share"] == pytest.approx(25 / 40)
    first = summary["kernels"][0]
    assert first == {"name": "a", "per_step": 1.0, "seconds_per_step": 10e-9}
    with pytest.raises(ValueError, match="recorded no operation"):
        timeline.summarize_events([], 1)


@pytest.mark.thorough
def test_a_wrong_kernel_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.check_kernel("tiny", "softcap-decode")
    assert right["implementations"][0]["right"]
    original = runs.paged_attention

    def wrong(*args: Any, **options: Any) -> Any:
        state = original(*args, **options)
        return state._replace(out=state.out * 1.1)

    replace(monkeypatch, runs, "paged_attention", wrong)
    result = checks.check_kernel("tiny", "softcap-decode")
    row = {"part": "correctness", "name": "softcap-decode", "found": result}
    metrics = experiment.metrics([row])
    assert metrics["wrong"] == ["softcap-decode: reference, error=0.1"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", checks.FORMULAS)
def test_formula_checks_detect_seeded_errors(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reference, kernel = checks.check_kernel("tiny", name)["implementations"]
    assert reference["right"]
    assert reference["error"] < 1e-5
    assert "not a GPU" in kernel["note"]  # the reason for the missing result on a CPU
    called = "write_rotated_kv" if name == "rotary-write" else "flash_attention"
    right = getattr(checks, called)

    def output(change: Callable[[Any], Any]) -> bool:
        wrong = lambda *args, **options: change(right(*args, **options))  # noqa: E731
        monkeypatch.setattr(checks, called, wrong)
        return checks.check_kernel("tiny", name)["implementations"][0]["right"]

    assert output(lambda mutant: mutant)
    if name == "rotary-write":
        for field in ("q", "packed_q", "k_pages", "v_pages"):
            assert not output(
                lambda x, field=field: x._replace(**{field: 1.01 * getattr(x, field)})
            )
        # A position that is not written.
        assert not output(
            lambda x: x._replace(k_pages=x.k_pages.at[0, 0, 0, 0].add(1.0))
        )
    else:
        assert not output(lambda x: (1.01 * x[0], x[1]))
        if name != "flash-gradient":
            assert not output(lambda x: (x[0], x[1] + 0.01))


def test_unknown_parts_are_rejected(jaxkv: Command) -> None:
    with pytest.raises(
        ValueError, match=r"only=.*'sleep'.* must be of .*'correctness'"
    ):
        Config(only=("sleep",))
