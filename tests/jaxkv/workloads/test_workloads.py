"""Workloads: distributions have their moments; files are read completely or refused."""

import gzip
import inspect
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import clock
from jaxkv.scheduling import NO_LIMIT, RequestAttributes
from jaxkv.text import ByteTokenizer
from jaxkv.workloads import arrivals, lengths, recordings, sharegpt
from jaxkv.workloads.lengths import (
    ALPACA,
    SHAREGPT,
    Fixed,
    Gamma,
    Histogram,
    LogNormal,
    Pair,
    Uniform,
)
from tests.support import traces

# Calls without type annotations, which the test runner would check first.
make: Any = inspect.unwrap(arrivals.make_workload)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("law", "deviation"),
    [
        (Fixed(tokens=7), 0.0),
        (Uniform(low=1, high=9), np.sqrt(80 / 12)),
        (LogNormal(mean=300.0, sigma=0.8), 300 * np.sqrt(np.expm1(0.64))),
        (Gamma(mean=300.0, shape=1.3), 300 / np.sqrt(1.3)),
        # Two bars of width 6 whose middles are 4 and 16.
        (Histogram(first=1.0, width=6.0, counts=(3, 0, 3)), np.sqrt(36 + 36 / 12)),
    ],
)
def test_distributions_have_their_moments(
    law: lengths.LengthDistribution, deviation: float
) -> None:
    samples = law.draw(rng(), 200_000)
    assert samples.mean() == pytest.approx(law.mean, rel=0.01)
    assert samples.std() == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("pair", [SHAREGPT, ALPACA])
def test_published_means_are_those_within_the_bounds(pair: Pair) -> None:
    prompt, output = pair.draw(rng(1), 200_000)
    assert prompt.mean() == pytest.approx(pair.prompt.mean, rel=0.01)
    assert output.mean() == pytest.approx(pair.output.mean, rel=0.01)
    assert min(prompt.min(), output.min()) == 1
    assert prompt.max() <= 1024
    assert (prompt + output).max() <= 2048


def test_the_shape_of_sharegpt_follows_from_figure_2() -> None:
    """Orca (Max) has reserved 0.133 of 15,728 places for future tokens of 7
    requests."""
    output = SHAREGPT.draw(rng(2), 200_000).output.astype(float)
    still_to_come = (output**2).mean() / (2 * output.mean())
    assert still_to_come == pytest.approx(0.133 * 15_728 / 7, rel=0.04)


def test_bounds_that_reject_all_pairs_are_refused() -> None:
    pair = Pair(prompt=Fixed(tokens=9), output=Fixed(tokens=9), max_length=17)
    with pytest.raises(ValueError, match="99 % of pairs exceed the bounds"):
        pair.draw(rng(), 5)
    law = Gamma(mean=100.0, shape=1.0)
    pair = Pair(prompt=law, output=law, max_length=120, keeps_means=True)
    with pytest.raises(ValueError, match="no scale gives the means"):
        pair.draw(rng(), 5)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_their_bursts(cv: float) -> None:
    arrival = arrivals.bursty(rng(), rate=4.0, num=100_000, cv=cv)
    gaps = np.diff(arrival, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25 * cv, rel=0.03, abs=1e-9)


def test_gaps_of_poisson_are_exponential() -> None:
    """A gap exceeds x means with probability e^-x."""
    arrival = arrivals.poisson(rng(), rate=10.0, num=50_000)
    gaps = np.diff(arrival) * 10
    for x in (0.1, 1.0, 3.0):
        assert (gaps > x).mean() == pytest.approx(np.exp(-x), abs=0.01)


def test_a_seed_gives_the_same_requests_at_every_rate() -> None:
    slow, fast = (
        arrivals.open_loop(rng(5), SHAREGPT, rate=rate, num=50) for rate in (1.0, 4.0)
    )
    np.testing.assert_array_equal(slow.prompt, fast.prompt)
    np.testing.assert_array_equal(slow.output, fast.output)
    times = [clock.to_seconds(np.asarray(w.arrival)) for w in (slow, fast)]
    np.testing.assert_allclose(times[0], 4 * times[1], atol=4e-6)


def test_a_closed_loop_has_its_clients() -> None:
    law = Pair(prompt=Fixed(tokens=3), output=Fixed(tokens=2))
    closed = arrivals.closed_loop(rng(), law, clients=2, num=3)
    assert int(closed.clients) == 2
    assert not closed.arrival.any()
    assert int(arrivals.open_loop(rng(), law, rate=1.0, num=3).clients) == NO_LIMIT


TWO = np.array([1, 2])


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: arrivals.poisson(rng(), rate=0.0, num=3), "rate=0.0 must be above 0"),
        (lambda: arrivals.poisson(rng(), rate=-1.0, num=3), "rate=-1.0 must be"),
        (lambda: arrivals.poisson(rng(), rate=np.nan, num=3), "rate=nan must be"),
        (lambda: arrivals.poisson(rng(), rate=1.0, num=0), "num=0 must be at"),
        (lambda: arrivals.bursty(rng(), rate=1.0, num=1, cv=-1.0), "cv=-1.0 must be"),
        (
            lambda: arrivals.make_workload(TWO[::-1], TWO, TWO),
            "request 1: arrives at 1.0 s, b",
        ),
        (
            lambda: arrivals.make_workload(-TWO, TWO, TWO),
            "request 0: arrives at -1.0 s, not",
        ),
        (
            lambda: arrivals.make_workload(TWO * np.nan, TWO, TWO),
            "request 0: arrives at nan",
        ),
        (lambda: arrivals.make_workload(TWO, TWO, TWO - 1), "request 0: has output=0"),
        (
            lambda: arrivals.make_workload(TWO, TWO * 2**29, TWO),
            "request 1: has prompt=107",
        ),
        (
            lambda: arrivals.make_workload(TWO[:0], TWO[:0], TWO[:0]),
            "columns of one length",
        ),
        (lambda: arrivals.make_workload(TWO, TWO, TWO, clients=0), "clients=0 must be"),
        (lambda: make(TWO, TWO * 1.7, TWO), "prompt must be whole numbers, not float6"),
        (lambda: make(TWO, TWO, TWO * np.nan), "output must be whole numbers, not flo"),
        (lambda: make(TWO, TWO, TWO, samples=1.5), "samples must be whole numbers"),
        (lambda: make(TWO, TWO, TWO, clients=1.5), "clients=1.5 must be at least 1"),
        (lambda: make(TWO.astype(str), TWO, TWO), "arrival_s must be numbers, not <U"),
        (lambda: make(TWO, [1, "2"], TWO), "prompt must be whole numbers, not <U"),
        (lambda: make(TWO, TWO, TWO[:1]), "columns of one length"),
        (lambda: SHAREGPT.draw(rng(), 0), "num=0 must be at least 1"),
        (lambda: Gamma(mean=0.0, shape=1.0), "mean=0.0 must be in"),
        (lambda: Gamma(mean=9.0, shape=0.0), "shape=0.0 must be above 0"),
        (lambda: Histogram(first=1, width=0, counts=(1,)), "width=0 must be above 0"),
        (lambda: Histogram(first=1, width=2, counts=(0,)), "counts=(0,) must have one"),
        (lambda: LogNormal(mean=9.0, sigma=-1.0), "sigma=-1.0 must be at least 0"),
        (lambda: Uniform(low=3, high=2), "must be in order"),
        (lambda: Fixed(tokens=0), "tokens=0 must be in"),
    ],
)
def test_invalid_workloads_are_refused(build: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        build()
    assert "\n" not in str(caught.value)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:01.2500000,10,3
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,20,0,20,API log
118,ChatGPT,1087,230,1317,Conversation log
"""
PLAIN = "arrival_s, prompt_tokens ,output_tokens\n\n1.5,3,4\n1.5,5,6\n"
MOONCAKE = """{"timestamp": 100, "input_length": 600, "output_length": 5, \
"hash_ids": [0, 1]}
{"timestamp": 2600, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 3]}

{"timestamp": 2600, "input_length": 512, "output_length": 1, "hash_ids": [0]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "requests"
    path.write_text(text, "utf-8")
    return path


def test_azures_times_count_from_the_first(tmp_path: Path) -> None:
    recording = recordings.read_recording(write(tmp_path, AZURE))
    assert recording.arrival_s.tolist() == [0.0, 1.75]
    assert recording.prompt.tolist() == [374, 10]
    assert recording.output.tolist() == [44, 3]
    assert recording.chunk_ids is None
    with pytest.raises(ValueError, match="has no chunk ids"):
        recordings.num_known_chunks(recording)


def test_burstgpts_failures_are_refused_or_counted(tmp_path: Path) -> None:
    path = write(tmp_path, BURST)
    with pytest.raises(ValueError, match="line 3: the output has 0 tokens"):
        recordings.read_recording(path)
    recording = recordings.read_recording(path, skip_empty=True)
    assert recording.num_empty == 1
    assert recording.arrival_s.tolist() == [0.0, 113.0]
    assert recording.output.tolist() == [18, 230]


def test_plain_times_stay_as_they_are(tmp_path: Path) -> None:
    recording = recordings.read_recording(write(tmp_path, PLAIN))
    w = recording.workload()
    assert clock.to_seconds(np.asarray(w.arrival)).tolist() == [1.5, 1.5]
    assert w.prompt.tolist() == [3, 5]
    assert np.isnan(recording.rate)
    with pytest.raises(ValueError, match="came at once have no rate"):
        recording.at_rate(1.0)


def test_mooncakes_chunks_are_shared_between_prompts(tmp_path: Path) -> None:
    recording = recordings.read_recording(write(tmp_path, MOONCAKE))
    assert recording.arrival_s.tolist() == [0.0, 2.5, 2.5]
    assert recording.chunk_ids is not None
    assert [ids.tolist() for ids in recording.chunk_ids] == [[0, 1], [0, 2, 3], [0]]
    assert recordings.num_known_chunks(recording).tolist() == [0, 1, 1]


def test_a_replay_keeps_its_pattern_at_another_rate(tmp_path: Path) -> None:
    recording = recordings.read_recording(write(tmp_path, MOONCAKE))
    assert recording.rate == pytest.approx(0.8)
    faster = recording.at_rate(8.0)
    assert faster.rate == pytest.approx(8.0)
    assert faster.arrival_s == pytest.approx([0.0, 0.25, 0.25])
    closed = recording.workload(clients=2)
    assert not closed.arrival.any()
    with pytest.raises(ValueError, match=r"rate=0\.0 must be above 0"):
        recording.at_rate(0.0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "its columns are ; known are: TIMESTAMP, ContextTokens"),
        ("a,b\n1,2\n", "its columns are a, b; known are"),
        (PLAIN[:40], "holds no requests"),
        (PLAIN + "2,-2,3\n", "line 5: the prompt has -2 tokens"),
        (PLAIN + "2,2,-3\n", "line 5: the output has -3 tokens"),
        (PLAIN + "2,2\n", "line 5: 2 cells, the header has 3"),
        (PLAIN + "2,2.5,1\n", "line 5: prompt_tokens='2.5' is not whole"),
        (PLAIN + "nan,2,1\n", "line 5: arrival_s='nan' is not a time"),
        (PLAIN + f"2,2,{2**31}\n", "line 5: the output has 2147483648 tokens"),
        (PLAIN.replace("1.5,3", "-1.5,3"), "line 3: arrives at -1.5 s, before 0"),
        (PLAIN + '2,"2,1\n', "unexpected end of data"),
        (AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP='yesterday' is not a time"),
        (MOONCAKE + "[1]", "line 5: holds list, not an object"),
        (MOONCAKE + '{"timestamp"', "line 5: not JSON"),
        (MOONCAKE + '{"timestamp": 9e3}', "line 5: has no input_length"),
        (
            MOONCAKE.replace("[0]", "[0, 9]"),
            "line 4: 2 hash_ids for 512 tokens, 512 to each",
        ),
        (MOONCAKE.replace("[0]", '"0"'), "line 4: hash_ids is not a list"),
        (MOONCAKE.replace("512,", "51.5,"), "line 4: input_length=51.5 is not whole"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        recordings.read_recording(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_dates_without_a_zone_are_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        header = AZURE.partition("\n")[0]
        # Nights of daylight saving changes in Europe and America.
        dates = [
            [
                "2023-10-29 01:59:59.0000000",
                "2023-10-29T02:30:00",
                "2023-10-29 03:00:01",
            ],
            ["2023-03-12 01:59:59", "2023-03-12 02:30:00", "2023-03-12 03:00:01"],
            ["2023-10-29 01:59:59Z", "2023-10-29 04:30:00+02", "2023-10-29T03:00:01Z"],
        ]
        for date_list in dates:
            rows = [header, *(f"{date},10,5" for date in date_list)]
            recording = recordings.read_recording(write(tmp_path, "\n".join(rows)))
            assert recording.arrival_s.tolist() == [0.0, 1801.0, 3602.0]
            assert not recording.doubts
        for mixed, line in (
            ("2024-05-10 00:00:00+00:00,1,5\n2024-05-10 00:00:01,1,6", "has no zone"),
            ("2024-05-10 00:00:00,1,5\n2024-05-10 00:00:01Z,1,6", "has a zone"),
        ):
            path = write(tmp_path, f"{header}\n{mixed}\n")
            with pytest.raises(ValueError, match=f"line 3: .*{line}, unlike line 2"):
                recordings.read_recording(path)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_recordings_are_tables_of_any_kind(tmp_path: Path) -> None:
    plain = PLAIN.replace(" ", "").replace("\n\n", "\n")
    expected = recordings.read_recording(write(tmp_path, plain))
    lines = [
        {"arrival_s": 1.5, "prompt_tokens": 3.0, "output_tokens": 4},
        {"arrival_s": 1.5, "prompt_tokens": 5, "output_tokens": 6.0},
    ]
    text = "\n".join(map(json.dumps, lines))
    for table_text in (
        plain.replace(",", ";"),
        "sep=;\r\n" + plain.replace(",", ";"),
        "# by a script\n" + plain,
        "\ufeff" + plain.replace("1.5,3,4", "1.5,3.0,4e0"),
        plain.replace("tokens\n", "tokens,note,x,x\n")
        .replace("4\n", "4,a\u2028b,1,2\n")
        .replace("6\n", "6,a\u0085b,1,3\n"),
        text,
        "\ufeff" + text.replace("\n", "\r\n"),
    ):
        recording = recordings.read_recording(write(tmp_path, table_text))
        for name in ("arrival_s", "prompt", "output"):
            np.testing.assert_array_equal(
                getattr(recording, name), getattr(expected, name)
            )
    path = write(
        tmp_path, MOONCAKE.replace('"hash_ids"', '"x": "a\u2028b", "hash_ids"')
    )
    plain_path = tmp_path / "packed"
    plain_path.write_bytes(gzip.compress(path.read_bytes()))
    for table_path in (path, plain_path):
        assert recordings.read_recording(table_path).prompt.tolist() == [600, 1100, 512]
    repeated = plain.replace("output_tokens", "prompt_tokens")
    with pytest.raises(ValueError, match="two columns are named 'prompt_tokens'"):
        recordings.read_recording(write(tmp_path, repeated))


@pytest.mark.parametrize(
    ("times", "unit", "doubt"),
    [
        ([0, 900, 2100, 2500], "s", "are they milliseconds?"),
        ([1_700_000_000_000, 1_700_000_000_900], "s", ""),
        ([0.0, 0.9, 2.1, 2.5], "s", ""),
        ([0, 40, 118, 124], "s", ""),
        ([0.0, 130.5, 310.25, 400.0], "s", ""),
        ([0, 900, 2100, 2500], "ms", ""),
        ([0.0, 0.9, 2.1, 2.5], "ms", "are they seconds?"),
        ([1_700_000_000, 1_700_000_005], "ms", ""),
        ([0, 0, 0], "ms", ""),
        ([0, 1, 2, 2], "ms", "are they seconds?"),
    ],
)
def test_times_of_another_unit_have_a_warning(
    tmp_path: Path, times: list[float], unit: str, doubt: str
) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n"
    text += "".join(f"{x},1,1\n" for x in times)
    if unit == "ms":
        row = {"input_length": 1, "output_length": 1, "hash_ids": [0]}
        text = "".join(json.dumps({"timestamp": x} | row) + "\n" for x in times)
    doubts = recordings.read_recording(write(tmp_path, text)).doubts
    assert len(doubts) == bool(doubt)
    assert doubt in "".join(doubts)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv: cannot be read"):
        recordings.read_recording(tmp_path / "gone.csv")


def test_sharegpt_gives_the_first_question_and_its_answer(tmp_path: Path) -> None:
    def entry(*texts: str) -> dict:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    entries = [
        entry("ab", "abc", "d"),
        entry("single"),
        entry("", "x"),
        entry("é", "y"),
    ]
    path = write(tmp_path, json.dumps(entries))
    encode = ByteTokenizer(257).encode
    assert sharegpt.read_sharegpt(path, encode).prompt.tolist() == [2, 2]
    assert sharegpt.read_sharegpt(path, encode).output.tolist() == [3, 1]
    for bad, line in (
        ([entry("a", "b"), {"id": 3}], "entry 2: has no conversations"),
        ([{"conversations": [{"value": 3}, {"value": 4}]}], "entry 1: has no"),
        ({}, "holds dict, not a list"),
        ([entry("single")], "holds no conversation of two turns"),
    ):
        with pytest.raises(ValueError, match=line):
            sharegpt.read_sharegpt(write(tmp_path, json.dumps(bad)), encode)
    with pytest.raises(ValueError, match="Expecting value"):
        sharegpt.read_sharegpt(write(tmp_path, "no"), encode)


@pytest.mark.parametrize(
    ("name", "requests", "hours", "prompt", "output"),
    [
        ("azure_conv", 19_366, 3_502, 1154.7, 211.1),
        ("azure_code", 8_819, 3_436, 2047.8, 27.9),
    ],
)
def test_azures_traces_have_their_known_means(
    name: str, requests: int, hours: float, prompt: float, output: float
) -> None:
    recording = recordings.read_recording(traces.find(f"traces/{name}.csv"))
    assert recording.prompt.size == requests
    assert recording.arrival_s[-1] == pytest.approx(hours, abs=1)
    assert recording.prompt.mean() == pytest.approx(prompt, abs=0.05)
    assert recording.output.mean() == pytest.approx(output, abs=0.05)


def test_mooncakes_trace_can_be_found_in_a_cache_to_64_percent() -> None:
    """Hit rate of an unbounded cache: 64.0 % of 121,877 chunks."""
    recording = recordings.read_recording(
        traces.find("traces/mooncake_synthetic.jsonl")
    )
    assert recording.chunk_ids is not None
    num_chunks = sum(ids.size for ids in recording.chunk_ids)
    assert num_chunks == 121_877
    known_share = recordings.num_known_chunks(recording).sum() / num_chunks
    assert known_share == pytest.approx(0.640, abs=0.0005)


def test_attributes_may_have_the_ends_of_their_range() -> None:
    for priority in (-1000, 1000):
        attributes = RequestAttributes(priority=priority)
        row = np.array([1])
        workload = arrivals.make_workload(row * 0.0, row, row, attributes=attributes)
        assert workload.attributes is not None
