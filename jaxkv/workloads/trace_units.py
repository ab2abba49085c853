"""Units of a trace that its format leaves open: of its times, and of its chunks."""

import math

import numpy as np
from jaxtyping import Float, Int64

from jaxkv.workloads.lengths import MAX_TOKEN_COUNT
from jaxkv.workloads.trace_columns import TraceColumns
from jaxkv.workloads.trace_formats import DATE, SECONDS_PER_UNIT

_UNIX = {"s": (1e9, 1e10), "ms": (1e12, 1e13), "us": (1e15, 1e16)}
"""Range of Unix times of the years 2001 to 2286 by unit."""
_NANOSECONDS = 1e18


def find_unit(columns: TraceColumns, time_unit: str | None) -> tuple[str, list[str]]:
    """Returns the unit of the times, and warnings about it.

    Raises:
      ValueError: the unit is open, or it is asked for and the times are dates.
    """
    kind = columns.format
    name = columns.format.time
    if kind.unit == DATE:
        if time_unit is not None:
            raise ValueError(
                f"{name} has dates: time_unit={time_unit!r} must be left out"
            )
        return "us", _clock_warnings(columns, "us")
    if time_unit is not None:
        return time_unit, _clock_warnings(columns, time_unit)
    times = columns.time[~np.isnan(columns.time)]
    if not times.size:
        return kind.unit, []
    start = float(times.min())
    for unit, (low, high) in _UNIX.items():
        # A column may name its unit: 10^9 us are a quarter of an hour.
        is_named = name == f"arrival_{kind.unit}"
        is_possible = is_named and start < _UNIX["s"][1] * SECONDS_PER_UNIT[kind.unit]
        if low <= start < high and (not is_possible or unit == kind.unit):
            return unit, _clock_warnings(columns, unit)
    if start >= _NANOSECONDS:
        raise ValueError(f"{name}={start:.6g} must be in s, ms or us, not in ns")
    if not kind.unit:
        raise ValueError(
            f"{name} has no unit: name the column arrival_s, arrival_ms or arrival_us, "
            "or give time_unit='s', 'ms' or 'us'"
        )
    if clock_warnings := _clock_warnings(columns, kind.unit):
        return kind.unit, clock_warnings
    return kind.unit, _unit_warnings(name, kind.unit, times)


_LONG_BREAK_S = 86_400.0
_BREAK_SHARE = 100.0
"""Length in s of a gap, and its ratio to all other gaps together, above which the rows
before and after it may have two clocks."""


def _clock_warnings(columns: TraceColumns, unit: str) -> list[str]:
    """Returns a warning if a few rows are far from all others in time."""
    times = columns.time / SECONDS_PER_UNIT[unit]
    order = np.argsort(times)
    order = order[~np.isnan(times[order])]
    gaps = np.diff(times[order])
    if gaps.size < 2:
        return []
    at = int(np.argmax(gaps))
    longest_s = float(gaps[at])
    if longest_s <= max(_LONG_BREAK_S, _BREAK_SHARE * (gaps.sum() - longest_s)):
        return []
    before = order[: at + 1]
    after = order[at + 1 :]
    few = min(after, before, key=len)
    row = int(few.min())
    return [
        f"line {columns.line[row]}: {columns.format.time}={columns.time[row]:.10g} is "
        f"{longest_s / 86_400:,.1f} days from the other rows ({few.size:,} of "
        f"{order.size:,} rows); has it another clock or unit?"
    ]


_LONG_GAP_S = 60.0
"""Mean time between requests above which integer seconds may be milliseconds."""
_HIGH_RATE = 1e3
_HIGH_RATE_OF_FRACTIONS = 50.0
"""Requests per second above which milliseconds may be seconds; for integers and for
fractions."""


def _unit_warnings(
    name: str, unit: str, times: Float[np.ndarray, " requests"]
) -> list[str]:
    """Returns warnings about times that look like another unit."""
    num = times.size
    start = float(times.min())
    span = (float(times.max()) - start) / SECONDS_PER_UNIT[unit]
    words = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
    text = f"{name} is read as {words[unit]}: {num:,} requests in {span:,.4g} s"
    is_whole = not np.any((times - start) % 1)
    if unit == "s" and is_whole and num > 2 and span > _LONG_GAP_S * (num - 1):
        return [f"{text}; are they milliseconds?"]
    max_rate = _HIGH_RATE if is_whole else _HIGH_RATE_OF_FRACTIONS
    if unit == "ms" and num > 2 and 0 < span * max_rate < num - 1:
        return [f"{text}; are they seconds?"]
    return []


def to_arrival_s(columns: TraceColumns, unit: str) -> Float[np.ndarray, " requests"]:
    """Converts sorted times to s; differences are taken first, which is exact."""
    times = columns.time
    kind = columns.format
    is_plain = kind.time.startswith("arrival") and kind.unit != DATE
    is_unix = _UNIX[unit][0] <= times[0] < _UNIX[unit][1]
    start = 0.0 if is_plain and not is_unix else times[0]
    return (times - start) / SECONDS_PER_UNIT[unit]


def find_chunk_tokens(columns: TraceColumns, chunk_tokens: int | None) -> int | None:
    """Returns the tokens of a chunk.

    Prompts have either ids of all chunks, of which the last may be shorter, or of full
    chunks only.

    Raises:
      ValueError: no size fits all rows, or several do and the documented one does not.
    """
    if columns.chunk_ids is None:
        if chunk_tokens is not None:
            raise ValueError(
                f"chunk_tokens={chunk_tokens} must be left out without hash_ids"
            )
        return None
    num = columns.prompt
    ids = columns.chunk_ids.counts
    size = chunk_tokens or columns.format.chunk_tokens
    all_chunks, full_chunks = _fitting_sizes(num, ids)
    fits = [x for x in (all_chunks, full_chunks) if x[0] <= x[1]]
    if chunk_tokens is None and fits and fits[0][0] == fits[0][1]:
        return fits[0][0]
    if any(low <= size <= high for low, high in fits):
        return size
    for low, high in fits if chunk_tokens is None else []:
        power = 2 ** int(math.log2(high))
        if low <= power:
            raise ValueError(
                f"hash_ids may have {low} to {high} tokens each: give their size, such "
                f"as chunk_tokens={power}"
            )
    row = int(np.argmax(ids != -(-num // size)))
    raise ValueError(
        f"line {columns.line[row]}: {ids[row]} hash_ids for {num[row]} tokens, {size} "
        "to each"
    )


def _fitting_sizes(
    num: Int64[np.ndarray, " requests"], ids: Int64[np.ndarray, " requests"]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the bounds of the sizes that fit all rows: of all and of full chunks."""
    has_ids = ids > 0
    if not has_ids.any():
        return (1, 0), (1, 0)
    num_ids = ids[has_ids]
    has_full_chunk = ids > 1
    low = int((-(-num[has_ids] // num_ids)).max())
    high = int(
        ((num[has_full_chunk] - 1) // (ids[has_full_chunk] - 1)).min(
            initial=MAX_TOKEN_COUNT
        )
    )
    full_low = int((num // (ids + 1)).max()) + 1
    full_high = int((num[has_ids] // num_ids).min())
    return (low, high) if has_ids.all() else (1, 0), (full_low, full_high)
