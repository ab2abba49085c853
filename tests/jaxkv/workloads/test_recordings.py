"""Recordings: formats, units, sessions, chunk sizes; blocks and caches have twins."""

import bz2
import gzip
import inspect
import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, SimulationMember, simulate, stack
from jaxkv.workloads import (
    Recording,
    cached_tokens,
    num_known_chunks,
    read_recording,
    trace_columns,
)
from jaxkv.workloads.chunk_ids import ChunkIds


def write(folder: Path, text: str, name: str = "requests") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def write_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows))


# Calls without type annotations, which the test runner would check first.
unchecked: Any = inspect.unwrap(read_recording)


def read_blockwise(path: Path, num_bytes: int) -> Any:
    return trace_columns.read_trace_columns(
        path, skip_empty=False, block_bytes=num_bytes
    )


def mooncake(*rows: tuple[int, int, list[int]]) -> list[dict[str, Any]]:
    return [
        {"timestamp": t, "input_length": n, "output_length": 3, "hash_ids": ids}
        for t, n, ids in rows
    ]


PLAIN = "arrival_s,prompt_tokens,output_tokens\n"
BURST_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
19440110.0,a,43,GPT-4,906,446,1352,Conversation log
19440120.0,,2,ChatGPT,36,29,65,API log
19440140.0,a,,GPT-4,1400,0,1400,Conversation log
19440150.0,a,30,GPT-4,1400,10,1410,Conversation log
19440200.0,a,5,GPT-4,1500,10,1510,Conversation log
19440200.0,b,5,GPT-4,0,0,0,Conversation log
"""


@pytest.mark.parametrize("squeezes", [False, True])
def test_burstgpts_sessions_wait_for_answers(tmp_path: Path, squeezes: bool) -> None:
    text = BURST_3
    if squeezes:
        head, _, rows = text.partition("\n")
        text = head.replace(" ", "").lower() + "\n" + rows
    recording = read_recording(write(tmp_path, text), skip_empty=True)
    assert recording.num_empty == 2  # one of them has no prompt either
    assert recording.arrival_s.tolist() == [0, 10, 40, 90]
    assert recording.session is not None
    assert recording.session.tolist() == [0, 1, 0, 0]
    assert recording.after is not None
    assert recording.delay_s is not None
    # The third was sent before the answer of the first, at 43 s.
    assert recording.after.tolist() == [[-1], [-1], [-1], [2]]
    assert recording.delay_s.tolist() == [0, 0, 0, 20]


def test_azures_dates_have_zones_and_seven_decimals(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    zones = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-16 00:00:00+00:00,7,1\n"
    recording = read_recording(write(tmp_path, header + zones))
    assert clock.from_seconds(recording.arrival_s).tolist() == [
        [0, 0],
        [518399, 990070],
    ]
    naive = "2023-11-16 18:17:03.9799600,10,5\n2023-11-18 18:17:03.9799611,7,1\n"
    recording = read_recording(write(tmp_path, header + naive))
    assert clock.from_seconds(recording.arrival_s).tolist() == [[0, 0], [172800, 1]]
    with pytest.raises(ValueError, match="TIMESTAMP has dates: time_unit='s' must be"):
        read_recording(write(tmp_path, header + naive), time_unit="s")


BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33},
    {"chat_id": 7, "parent_chat_id": 3, "timestamp": 61.2, "input_length": 15},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 64.114, "input_length": 65},
    {"chat_id": 2, "parent_chat_id": 160, "timestamp": 64.2, "input_length": 80},
    {"chat_id": 8, "parent_chat_id": 3, "timestamp": 70.0, "input_length": 16},
]
IDS = [[1, 2, 3], [9], [1, 2, 4, 5, 6], [1, 2, 4, 5, 7], [8]]


def bailian(**changes: Any) -> list[dict[str, Any]]:
    more = {"output_length": 10, "type": "text", "turn": 1} | changes
    return [
        {**row, **more, "hash_ids": ids} for row, ids in zip(BAILIAN, IDS, strict=True)
    ]


def test_bailians_parents_are_turns(tmp_path: Path) -> None:
    recording = read_recording(write_lines(tmp_path, bailian()))
    assert recording.chunk_tokens == 16
    assert recording.arrival_s == pytest.approx([0, 0.086, 3, 3.086, 8.886])
    assert recording.after is not None
    assert recording.session is not None
    assert recording.after.tolist() == [[-1], [-1], [0], [2], [-1]]
    # Requests whose parent is not in the file share its session.
    assert recording.session.tolist() == [0, 1, 0, 0, 1]
    assert recording.delay_s == pytest.approx([0, 0, 3, 0.086, 0])
    faster = read_recording(write_lines(tmp_path, bailian()), answer_s_per_token=0.1)
    assert faster.delay_s == pytest.approx([0, 0, 2, 0, 0])
    assert cached_tokens(recording).tolist() == [0, 0, 32, 64, 0]
    bad = bailian()
    bad[4]["chat_id"] = 160
    with pytest.raises(ValueError, match="line 5: chat_id=160 is that of line 3"):
        read_recording(write_lines(tmp_path, bad))
    bad[4] |= {"chat_id": 3}
    with pytest.raises(ValueError, match="line 2: comes before its parent"):
        read_recording(write_lines(tmp_path, bad))


def test_turns_of_aiperf_add_to_their_history(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"session_id": "a", "input_length": 1000, "hash_ids": [0, 1], "timestamp": 0},
        {"session_id": "b", "input_length": 600, "hash_ids": [0, 2], "timestamp": 900},
        {"session_id": "a", "input_length": 500, "hash_ids": [7], "delay": 2450.3},
        {"session_id": "a", "input_length": 24, "hash_ids": [8], "delay": 100},
    ]
    rows = [row | {"output_length": 100} for row in rows]
    recording = read_recording(write_lines(tmp_path, rows))
    assert recording.arrival_s == pytest.approx([0, 0.9, 2.4503, 2.5503])
    assert recording.prompt.tolist() == [1000, 600, 1600, 1724]
    assert recording.after is not None
    assert recording.after.tolist() == [[-1], [-1], [0], [2]]
    assert recording.delay_s == pytest.approx([0, 0, 2.4503, 0.1])
    assert recording.chunk_tokens == 512
    # Full chunks of the earlier turns: one of 1,000 tokens and three of 1,600.
    assert cached_tokens(recording).tolist() == [0, 512, 512, 1536]
    lone = [{"session_id": None, "input_length": 5, "output_length": 1}]
    with pytest.raises(ValueError, match="line 1: has no timestamp"):
        read_recording(write_lines(tmp_path, lone))


def test_plain_files_may_have_sessions(tmp_path: Path) -> None:
    text = PLAIN.replace("\n", ",session,delay_s\n")
    text += "0,5,5,x,\n1,5,5,,\n4,9,5,x,1.5\n9,9,5,x,\n"
    recording = read_recording(write(tmp_path, text))
    assert recording.session is not None
    assert recording.session.tolist() == [0, 1, 0, 0]
    assert recording.delay_s == pytest.approx([0, 0, 1.5, 5])


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (("1700000000.000001", "1700259200.000003"), [[0, 0], [259200, 2]]),
        (("1700000000000", "1700259200001"), [[0, 0], [259200, 1000]]),
        (("1700000000000001", "1700259200000003"), [[0, 0], [259200, 2]]),
        (("2023-11-14T22:13:20", "2023-11-17T22:13:20.5Z"), None),
        (("2023-11-14T22:13:20", "2023-11-17T22:13:20.5"), [[0, 0], [259200, 500000]]),
    ],
)
@pytest.mark.parametrize("column", ["arrival", "timestamp", "arrival_s"])
def test_unix_times_and_dates_name_their_unit(
    tmp_path: Path, column: str, times: tuple[str, str], seconds: Any
) -> None:
    rows = "".join(f"{time},5,6\n" for time in times)
    path = write(tmp_path, PLAIN.replace("arrival_s", column) + rows)
    is_date = "T" in times[0]
    if seconds is None or (is_date and column == "arrival_s"):
        line = "is not a time" if column == "arrival_s" else "line 3: .* has a zone"
        with pytest.raises(ValueError, match=line):
            read_recording(path)
        return
    recording = read_recording(path)
    assert clock.from_seconds(recording.arrival_s).tolist() == seconds
    assert not recording.doubts


def test_open_units_are_asked_for(tmp_path: Path) -> None:
    rows = "0,5,6\n1500,5,6\n4000,5,6\n"
    path = write(tmp_path, PLAIN.replace("arrival_s", "timestamp") + rows)
    with pytest.raises(ValueError, match=r"timestamp has no unit: .* time_unit='s', "):
        read_recording(path)
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        recording = read_recording(path, time_unit=unit)
        assert recording.arrival_s.tolist() == [0, 1500 / factor, 4000 / factor]
        named = write(tmp_path, PLAIN.replace("arrival_s", f"arrival_{unit}") + rows)
        assert read_recording(named).arrival_s.tolist() == recording.arrival_s.tolist()
    named = PLAIN.replace("arrival_s", "arrival_us") + "1500000000,5,6\n"
    assert read_recording(write(tmp_path, named)).arrival_s.tolist() == [1500]
    path = write(tmp_path, PLAIN + "1700000000000000000,5,6\n")
    with pytest.raises(ValueError, match=r"arrival_s=1.7e\+18 must be in s, ms or us"):
        read_recording(path)
    with pytest.raises(ValueError, match="time_unit='h' must be one of s, ms, us"):
        unchecked(path, time_unit="h")
    assert read_recording(write(tmp_path, PLAIN + rows), time_unit="ms").doubts == ()


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    text = PLAIN + "".join(f"{t},{i},5\n" for i, t in enumerate([3, 5, 4, 5, 4], 1))
    recording = read_recording(write(tmp_path, text))
    assert recording.arrival_s.tolist() == [3, 4, 4, 5, 5]
    assert recording.prompt.tolist() == [1, 3, 5, 2, 4]  # ties in the order of the file
    assert recording.num_unsorted == 2
    assert "2 of 5 rows have a time before an earlier row, first line 4" in str(
        recording.doubts
    )
    rows = mooncake((2000, 600, [4, 5]), (1000, 513, [6, 7]), (3000, 512, [6]))
    recording = read_recording(write_lines(tmp_path, rows))
    assert recording.chunk_ids is not None
    assert [x.tolist() for x in recording.chunk_ids] == [[6, 7], [4, 5], [6]]
    assert num_known_chunks(recording).tolist() == [0, 0, 1]
    turns = bailian()
    recording = read_recording(write_lines(tmp_path, turns[::-1]))
    assert recording.after is not None
    assert recording.after.tolist() == [[-1], [-1], [0], [2], [-1]]


def test_chunk_sizes_follow_from_the_rows(tmp_path: Path) -> None:
    def read(*rows: tuple[int, int, list[int]], size: int | None = None) -> Recording:
        return read_recording(write_lines(tmp_path, mooncake(*rows)), chunk_tokens=size)

    exact = (0, 64, [1]), (0, 65, [1, 2])
    assert read(*exact).chunk_tokens == 64  # the only size
    full = (0, 64, [1]), (0, 63, [])
    assert read(*full).chunk_tokens == 64  # of full chunks only
    loose = (0, 60, [1]), (0, 70, [1, 2])
    with pytest.raises(ValueError, match=r"have 60 to 69 tokens each: .*_tokens=64"):
        read(*loose)
    assert read(*loose, size=64).chunk_tokens == 64
    with pytest.raises(ValueError, match="line 1: 1 hash_ids for 60 tokens, 16 to"):
        read(*loose, size=16)
    assert read((0, 500, [1]), (0, 800, [1, 2])).chunk_tokens == 512  # documented
    with pytest.raises(ValueError, match="line 1: 2 hash_ids for 500 tokens, 512 to"):
        read((0, 500, [1, 2]), (0, 800, [1]))
    with pytest.raises(ValueError, match="chunk_tokens=0 must be in"):
        read(*loose, size=0)
    path = write(tmp_path, PLAIN + "0,1,1\n")
    with pytest.raises(ValueError, match="chunk_tokens=16 must be left out"):
        read_recording(path, chunk_tokens=16)
    for ids, line in ((2**63, r"must be in \[-2\^63"), (1.5, "list of whole numbers")):
        rows = mooncake((0, 512, [1]), (0, 512, []))
        rows[1]["hash_ids"] = [ids]
        with pytest.raises(ValueError, match=f"line 2: hash_ids .*{line}"):
            read_recording(write_lines(tmp_path, rows))
    del rows[1]["hash_ids"]
    with pytest.raises(ValueError, match="line 2: hash_ids is not a list"):
        read_recording(write_lines(tmp_path, rows))


def draw_chunks(rng: np.random.Generator) -> list[list[int]]:
    """Draws paths from the root of a tree, as ids of chunks with all before them."""
    children: dict[tuple[int, int], int] = {}
    prompts = []
    for _ in range(60):
        path = [0]
        for step in rng.integers(0, 3, rng.integers(0, 9)).tolist():
            path.append(children.setdefault((path[-1], step), len(children) + 1))
        prompts.append(path[1:])
    return prompts


def slow_cache(prompts: list[list[int]], capacity: float) -> list[int]:
    """Counts cached chunks; a list has the chunks by their last use."""
    recent: list[int] = []
    counts = []
    for ids in prompts:
        is_cached = [x in recent for x in ids]
        counts.append(([*is_cached, False]).index(False))
        for chunk in reversed(ids):
            if chunk in recent:
                recent.remove(chunk)
            recent.append(chunk)
        while len(recent) > capacity:
            del recent[0]
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_caches_hold_what_a_list_of_recent_chunks_holds(seed: int) -> None:
    prompts = draw_chunks(np.random.default_rng(seed))
    starts = np.cumsum([0, *map(len, prompts)])
    ids = ChunkIds(np.array([x for prompt in prompts for x in prompt]), starts)
    assert [x.tolist() for x in ids] == prompts
    assert [x.tolist() for x in ids[5:20:3]] == prompts[5:20:3]
    assert ids.num_known().tolist() == slow_cache(prompts, math.inf)
    for capacity in (0, 1, 4, 17, 10**6):
        assert ids.num_cached(capacity).tolist() == slow_cache(prompts, capacity)
    assert sum(slow_cache(prompts, 17)) < sum(slow_cache(prompts, math.inf))


def test_cached_tokens_are_the_context_of_a_workload(tmp_path: Path) -> None:
    rows = mooncake((0, 1024, [1, 2]), (1, 1024, [1, 2]), (2, 600, [3, 4]), (3, 9, [1]))
    recording = read_recording(write_lines(tmp_path, rows), chunk_tokens=512)
    assert cached_tokens(recording).tolist() == [0, 1023, 0, 8]  # one token is new
    assert cached_tokens(recording, 1024).tolist() == [0, 1023, 0, 0]
    assert cached_tokens(recording, 511).tolist() == [0, 0, 0, 0]
    load = recording.workload(cache_tokens=math.inf)
    assert load.prompt.tolist() == [1024, 1, 600, 1]
    assert load.context is not None
    assert load.context.tolist() == [0, 1023, 0, 8]
    assert recording.workload().context is None
    with pytest.raises(ValueError, match="cache_tokens=-1 must be at least 0"):
        recording.workload(cache_tokens=-1)
    plain = read_recording(write(tmp_path, PLAIN + "0,1,1\n"))
    with pytest.raises(ValueError, match="has no chunk ids"):
        plain.workload(cache_tokens=5)


def test_ids_of_chunks_with_several_lengths_are_doubted(tmp_path: Path) -> None:
    """Of an id, no more tokens are cached than an earlier prompt had."""
    rows = mooncake((0, 600, [1, 2]), (1, 1024, [1, 2]), (2, 1500, [1, 2, 3]))
    recording = read_recording(write_lines(tmp_path, rows), chunk_tokens=512)
    assert cached_tokens(recording).tolist() == [0, 600, 1024]
    assert cached_tokens(recording, 4096).tolist() == [0, 600, 1024]
    (doubt,) = recording.doubts
    assert doubt.startswith("line 2: a chunk ends after another number of tokens")
    assert "in line 1, with the same id" in doubt
    # Two short chunks, and chunks after other chunks.
    short = mooncake((0, 600, [1, 2]), (1, 700, [1, 2]), (2, 512, [1]))
    recording = read_recording(write_lines(tmp_path, short), chunk_tokens=512)
    assert cached_tokens(recording).tolist() == [0, 600, 511]
    assert "line 2: a chunk ends after" in recording.doubts[0]
    for rows, line in (
        (mooncake((0, 1024, [1, 2]), (1, 1024, [3, 2])), "line 2: a chunk follows"),
        (mooncake((0, 1024, [1, 2]), (1, 512, [2])), "line 2: a chunk follows"),
        (mooncake((0, 512, [1]), (1, 1024, [2, 2])), "line 2: a chunk follows"),
    ):
        recording = read_recording(write_lines(tmp_path, rows), chunk_tokens=512)
        assert recording.doubts[0].startswith(line)
    plain = mooncake((0, 600, [1, 2]), (1, 600, [1, 2]), (2, 1100, [1, 3, 4]))
    recording = read_recording(write_lines(tmp_path, plain), chunk_tokens=512)
    assert cached_tokens(recording).tolist() == [0, 599, 512]
    assert recording.doubts == ()


@pytest.mark.parametrize("seed", range(3))
def test_cached_tokens_are_those_of_the_longest_earlier_prompt(seed: int) -> None:
    """Ids of random prompts with last chunks of any length, against a dictionary."""
    rng = np.random.default_rng(seed)
    size = 4
    prompts = draw_chunks(rng)
    lengths = [max(1, size * len(x) - int(rng.integers(0, size))) for x in prompts]
    flat = np.array([x for prompt in prompts for x in prompt], np.int64)
    ids = ChunkIds(flat, np.cumsum([0, *map(len, prompts)]))
    limits = ids.shared_tokens(np.array(lengths), size)
    ends: dict[int, int] = {}
    num_known = ids.num_known()
    for i, (chunks, length) in enumerate(zip(prompts, lengths, strict=True)):
        cached = 0
        for k, chunk in enumerate(chunks):
            end = min(length, size * (k + 1))
            if cached < size * k or chunk not in ends:
                break
            cached = min(end, ends[chunk])
        assert min(size * num_known[i], limits[i]) == cached
        for k, chunk in enumerate(chunks):
            end = min(length, size * (k + 1))
            ends[chunk] = max(ends.get(chunk, 0), end)


UNIX = 1_787_600_000.0


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ((0, 0.5, 1, 1.5, UNIX), "line 6: "),
        ((0, UNIX, 0.5, 1, 1.5), "line 3: "),
        ((UNIX, UNIX + 1, UNIX + 2, 0), "line 5: "),
        ((UNIX, UNIX + 1, UNIX + 2, 1e3 * UNIX), "line 5: "),
        ((0, 1, 2, UNIX, UNIX + 1), "line 5: "),
    ],
)
def test_rows_on_another_clock_are_doubted(
    tmp_path: Path, times: tuple[float, ...], line: str
) -> None:
    for name in ("arrival_s", "timestamp"):
        text = PLAIN.replace("arrival_s", name)
        text += "".join(f"{time:.1f},5,5\n" for time in times)
        unit = None if name == "arrival_s" else "s"
        recording = read_recording(write(tmp_path, text), time_unit=unit)
        assert recording.doubts[0].startswith(line)
        assert "has it another clock or unit?" in recording.doubts[0]


def test_azures_times_may_be_seconds(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "".join(f"{i / 2},{100 + i},20\n" for i in range(8))
    recording = read_recording(write(tmp_path, header + rows))
    assert recording.arrival_s.tolist() == [i / 2 for i in range(8)]
    assert recording.doubts == ()
    recording = read_recording(write(tmp_path, header + rows + f"{UNIX:.1f},120,30\n"))
    assert recording.doubts[0].startswith(
        "line 10: TIMESTAMP=1787600000 is 20,689.8 days"
    )
    dates = "2024-05-10 00:00:01Z,5,5\n2024-05-10 00:00:02Z,5,5\n"
    later = write(tmp_path, header + dates + "2026-05-10 00:00:03Z,5,5\n")
    assert read_recording(later).doubts[0].startswith("line 4: ")


def test_totals_and_turns_that_contradict_their_rows(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,GPT-4,10,20,30,API log\n7,GPT-4,10,20,31,API log\n9,GPT-4,1,2,9,x\n"
    recording = read_recording(write(tmp_path, header + rows))
    assert recording.doubts == (
        "Total tokens is not Request tokens + Response tokens in 2 rows, first line 3; "
        "it is not used",
    )
    rows = rows.replace("31", "30").replace(",9,x", ",3,x")
    assert read_recording(write(tmp_path, header + rows)).doubts == ()
    turns = mooncake((5000, 512, [1]), (4000, 512, [2]))
    for turn in turns:
        turn["session_id"] = "a"
    with pytest.raises(ValueError, match="line 2: is sent before the turn before it"):
        read_recording(write_lines(tmp_path, turns), chunk_tokens=512)


def random_rows(kind: str) -> str:
    rng = np.random.default_rng(1)
    num = 200
    lengths = rng.integers(1, 2000, (num, 2)).tolist()
    if kind == "plain":
        rows = [f"{i / 7:.6f},{p},{o}\n" for i, (p, o) in enumerate(lengths)]
        return "# measured\n" + PLAIN + "\r\n".join("".join(rows).split("\n"))
    if kind == "azure":
        header = "TIMESTAMP;ContextTokens;GeneratedTokens\n"
        moment = "2024-05-10 00:{:02}:00.000001Z"
        rows = [
            f"{moment.format(i // 4)};{p}.0;{o}\n" for i, (p, o) in enumerate(lengths)
        ]
        return header + "".join(rows)
    rows = [
        {"timestamp": i, "input_length": p, "output_length": o, "note": "a\u2028b"}
        | {"hash_ids": rng.integers(0, 9, -(-p // 512)).tolist()}
        for i, (p, o) in enumerate(lengths)
    ]
    return "\n\n".join(map(json.dumps, rows))


@pytest.mark.parametrize("kind", ["plain", "azure", "mooncake"])
def test_blocks_give_the_rows_of_the_whole_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, random_rows(kind))
    full_recording = read_blockwise(path, 2**22)
    assert full_recording.prompt.size == 200
    for pack in (bytes, gzip.compress, bz2.compress, lzma.compress):
        packed = tmp_path / "packed"
        packed.write_bytes(pack(path.read_bytes()))
        recording = read_blockwise(packed, 2560)
        for name, expected in full_recording._asdict().items():
            value = getattr(recording, name)
            if isinstance(expected, ChunkIds):
                assert value.flat.tolist() == expected.flat.tolist()
                assert value.starts.tolist() == expected.starts.tolist()
            elif isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(value, expected)
            else:
                assert value == expected


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("1e3,x,1\n", "line 203: prompt_tokens='x' is not whole"),
        ("1e3,1\n", "line 203: 2 cells, the header has 3"),
        ("1e3,1,0\n5,0,1\n", "line 203: the output has 0 tokens"),
        ("1e3,0,1\nx,5,0\n", "line 203: the prompt has 0 tokens"),
        ('1e3,1,"2\n', "unexpected end of data"),
    ],
)
def test_rows_of_later_blocks_have_their_lines(
    tmp_path: Path, end: str, line: str
) -> None:
    path = write(tmp_path, random_rows("plain") + end)
    for num_bytes in (2560, 2**22):
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            read_blockwise(path, num_bytes)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
    text = random_rows("mooncake") + "\n{"
    for num_bytes in (2560, 2**22):
        with pytest.raises(ValueError, match="line 400: not JSON"):
            read_blockwise(write(tmp_path, text), num_bytes)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(gzip.compress(text.encode())[:-200])
    with pytest.raises(ValueError, match=r"damaged: cannot be read: Compressed file"):
        read_blockwise(damaged, 2560)


def test_gaps_of_days_keep_their_microseconds(tmp_path: Path) -> None:
    text = PLAIN + "0.000001,5,2\n259200.000002,5,2\n2000000.000003,5,2\n"
    load = read_recording(write(tmp_path, text)).workload()
    assert load.arrival.tolist() == [[0, 1], [259200, 2], [2000000, 3]]
    member = SimulationMember(load, Capacity.of(num_pages=9), fcfs(), a_millisecond)
    served = simulate(stack([member]), max_slots=2)
    expected = [[0.001001, 259200.001002, 2000000.001003]]
    np.testing.assert_allclose(served.first_s, expected, rtol=0, atol=1e-7)


def a_millisecond(work: Any) -> Any:
    return jnp.float32(1e-3)
