"""The hour with a GPU: parts, shares, calls that go on, by a clock that is not real."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.device import (
    checks,
    experiment,
    parts,
    timeline,
    twins,
    worker,
)
from experiments.bench.device.experiment import Config
from experiments.bench.device.parts import Part, Piece
from jaxkv.progress import Quiet
from tests.support.commands import Command


class Clock(Quiet):
    """Time that passes only where somebody works, and a call's end in it."""

    def __init__(self, left_s: float = math.inf) -> None:
        self.now_s, self.end_s = 0.0, left_s

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
    """Makes a call of fake parts; gives rows, and the pieces in order of work."""

    def make(left_s: float, *fakes: Part) -> Any:
        clock = Clock(left_s)
        monkeypatch.setattr(parts, "now_s", lambda: clock.now_s)
        monkeypatch.setattr(
            experiment.time, "sleep", lambda s: setattr(clock, "now_s", clock.end_s)
        )
        log: list[tuple[str, ...]] = []

        def timed(part: Part) -> Part:
            def answer(names: Sequence[str], *args: Any) -> list[Piece]:
                log.append((part.name, *names))
                _, soft_s, kill_s = args
                assert soft_s <= kill_s <= clock.left_s
                worked: Any = part.answer
                found, seconds = worked(names, *args)
                clock.now_s += seconds
                return found

            return part._replace(answer=answer)

        monkeypatch.setattr(parts, "of", lambda size: tuple(map(timed, fakes)))
        rows = experiment.run(Config(folder=str(tmp_path)), clock)
        return rows, log

    return make


def fake(
    name: str, num: int, each_s: float, share: float = 0.5, at_once: int = 1
) -> Part:
    """A part whose pieces take so long each, and are cut at their share."""

    def answer(names: Sequence[str], folder: Path, soft_s: float, kill_s: float) -> Any:
        fit = [x for i, x in enumerate(names) if i * each_s <= soft_s]
        return [Piece(x, {"by": name}) for x in fit], each_s * len(fit)

    names = tuple(f"{name}{i}" for i in range(num))
    return Part(name, share, names, answer, 10.0, at_once)


def done(rows: list[dict[str, Any]]) -> set[str]:
    return {row["name"] for row in rows if row["found"]}


def test_calls_share_the_work_and_the_next_goes_on(call: Any) -> None:
    slow, quick = fake("slow", 8, 40.0), fake("quick", 3, 20.0)
    rows, log = call(203.0, slow, quick)
    # Half of 200 s is the first part's; the second has its turn before that goes on.
    slow_first = [("slow", f"slow{i}") for i in range(3)]
    assert log[:4] == [*slow_first, ("quick", "quick0")]
    assert {x for _, x in log} == done(rows)
    before = done(rows)
    rows, log = call(1000.0, slow, quick)
    assert not {x[1] for x in log} & before
    assert done(rows) == {*slow.names, *quick.names}
    rows, log = call(1000.0, slow, quick)
    assert log == []


def test_what_is_recorded_is_on_the_disk_at_once(call: Any, tmp_path: Path) -> None:
    def broken(*args: Any) -> Any:
        raise KeyboardInterrupt

    parts_ = fake("a", 2, 10.0), fake("b", 1, 1.0)._replace(answer=broken)
    with pytest.raises(KeyboardInterrupt):
        call(500.0, *parts_)
    lines = (tmp_path / experiment.FILE).read_text().splitlines()
    assert [json.loads(x)["name"] for x in lines] == ["a0", "a1"]


def test_a_failure_is_tried_again_in_another_call_and_then_no_more(call: Any) -> None:
    def fail(names: Sequence[str], *args: Any) -> Any:
        return [Piece(names[0], note="status 1: boom")], 20.0

    fails = fake("f", 1, 1.0)._replace(answer=fail)
    for tries in (1, 2):
        (row,), log = call(500.0, fails)
        assert len(log) == 1
        assert (row["tries"], row["note"]) == (tries, "status 1: boom")
    _, log = call(500.0, fails)
    assert log == []
    assert experiment.failed([row]) == ["f f0: status 1: boom"]


def test_a_piece_cut_by_the_end_of_a_call_has_not_failed(call: Any) -> None:
    def cut(names: Sequence[str], folder: Path, soft_s: float, kill_s: float) -> Any:
        return [Piece(names[0], note=parts.KILLED)], kill_s

    long = fake("long", 1, 1.0)._replace(answer=cut)
    rows, _ = call(103.0, fake("first", 1, 60.0), long)
    assert [(x["name"], x["tries"]) for x in rows] == [("first0", 1), ("long0", 0)]
    # It had all of the second call: that is a try.
    rows, _ = call(103.0, long)
    assert [(x["name"], x["tries"]) for x in rows] == [("first0", 1), ("long0", 1)]


def test_a_worker_that_breaks_down_loses_a_piece() -> None:
    lines = ['{"begins": "a"}', '{"name": "a", "found": {"x": 1}}', '{"begins": "b"}']
    found = parts.read_lines([*lines, '{"na'], ("a", "b", "c"), "status -11: crash")
    assert found == [Piece("a", {"x": 1}), Piece("b", note="status -11: crash")]
    # Where its time was over it has begun no more.
    assert parts.read_lines(lines[:2], ("a", "b"), "") == found[:1]
    # Where it never came to begin, the first one is to blame.
    assert parts.read_lines([], ("a",), "no jax") == [Piece("a", note="no jax")]


def test_the_worker_tells_what_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(size: str, name: str) -> dict[str, Any]:
        if name == "bad":
            raise RuntimeError("no room\nand more")
        return {"size": size}

    monkeypatch.setitem(worker.PARTS, "correctness", check)
    file = tmp_path / "said"
    worker.main("correctness", "tiny", str(file), "60", "bad", "good")
    found = parts.read_lines(file.read_text().splitlines(), ("bad", "good"), "")
    assert found == [
        Piece("bad", note="RuntimeError: no room"),
        Piece("good", {"size": "tiny"}),
    ]
    worker.main("correctness", "tiny", str(tmp_path / "none"), "-1", "good")
    assert not (tmp_path / "none").exists()


def test_a_process_that_does_not_end_is_ended() -> None:
    import sys

    said = parts.execute([sys.executable, "-c", "import time; time.sleep(60)"], 0.3)
    assert said[0] is None
    assert parts.why(*said[::2]).startswith(parts.KILLED)
    status, out, err = parts.execute(
        [sys.executable, "-c", "import sys; print(1); sys.exit('bad\\nworse')"], 30
    )
    assert (status, out.strip()) == (1, "1")
    assert parts.why(status, err) == "status 1: worse"


def test_the_time_line_by_hand() -> None:
    event = timeline.Event
    ran = [event("a", 0, 10), event("b", 5, 10), event("a", 30, 10)]
    found = timeline.tell(ran, 2)
    assert found["launches_per_step"] == 1.5
    assert found["busy_share"] == pytest.approx(25 / 40)
    first = found["kernels"][0]
    assert first == {"name": "a", "per_step": 1.0, "seconds_per_step": 10e-9}
    with pytest.raises(ValueError, match="saw nothing"):
        timeline.tell([], 1)


@pytest.mark.thorough
def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.check("tiny", "softcap-decode")
    assert right["implementations"][0]["right"]
    found = checks.api.paged_attention

    def wrong(*args: Any, implementation: Any, **options: Any) -> Any:
        state = found(*args, implementation=implementation, **options)
        calls.append(1)
        return state._replace(out=state.out * (1.1 if len(calls) > 1 else 1.0))

    calls: list[int] = []
    monkeypatch.setattr(checks.api, "paged_attention", wrong)
    told = checks.check("tiny", "softcap-decode")
    row = {"part": "correctness", "name": "softcap-decode", "found": told}
    assert experiment.wrong([row]) == ["softcap-decode: reference, error=0.1"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", twins.CHECKS)
def test_formulas_agree_and_tell_of_what_does_not(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reference, kernel = checks.check("tiny", name)["implementations"]
    assert reference["right"]
    assert reference["error"] < 1e-5
    assert "not a GPU" in kernel["note"]  # on a CPU it is told why, and nothing fails
    called = "rotate_and_write" if name == "rotary-write" else "flash_attention"
    place = twins.rotary_write if name == "rotary-write" else twins
    right = getattr(place, called)

    def told(change: Callable[[Any], Any]) -> bool:
        wrong = lambda *args, **options: change(right(*args, **options))  # noqa: E731
        monkeypatch.setattr(place, called, wrong)
        return twins.check("tiny", name)[0]["right"]

    assert told(lambda found: found)
    if name == "rotary-write":
        for field in ("q", "packed_q", "k_pages", "v_pages"):
            assert not told(
                lambda x, field=field: x._replace(**{field: 1.01 * getattr(x, field)})
            )
        # A place that nobody writes to.
        assert not told(lambda x: x._replace(k_pages=x.k_pages.at[0, 0, 0, 0].add(1.0)))
    else:
        assert not told(lambda x: (1.01 * x[0], x[1]))
        if name != "flash-gradient":
            assert not told(lambda x: (x[0], x[1] + 0.01))


def test_parts_that_there_are_not_are_refused(jaxkv: Command) -> None:
    with pytest.raises(ValueError, match="only='sleep' must be 'correctness'"):
        Config(only=("sleep",))
