"""Warnings about a log: unused columns that matter, and implausible units.

No number is changed. A column that divides the runs into groups, marks some of them or
counts unique tokens gives a warning if it is unused, with the option that uses it; so
do implausible numbers of parameters, tokens, FLOPs or nats.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from scaling.logs import rules
from scaling.logs.columns import (
    COLUMN_FLAGS,
    FIELDS,
    LETTERS,
    SIZE_COLUMNS,
    LogColumns,
    parse,
)
from scaling.logs.log import NOT_COMPLETED, Log, normalize_name

_GROUPS = re.compile(
    r"experiment|(^|_)data(_?set)?(_|$)|dataset|corpus|famil|arch|variant|setting|sweep|optimi[sz]er"
    r"|schedule|source|study|group|tokenizer"
)
"""Names of columns that divide runs into groups with different laws."""
_OUTLIER_MARK = re.compile(
    r"outlier|exclud|discard|drop(?!out)|ignore|skip|invalid|diverged|failed|unstable"
    r"|crash"
)
"""Names of columns that mark runs to exclude."""
_COMPLETE = re.compile(r"(is_?|has_?)?(finished|completed?|converged|succe(ss|eded))")
"""Names of columns that mark runs to include."""
_PER_STEP_COLUMNS = (
    "learning_rate",
    "lr",
    "max_lr",
    "peak_lr",
    "base_lr",
    "batch_size",
    "batch",
)
_TRUE = {"1", "true", "yes", "y", "t", "1.0", "x"}
_FALSE = {"0", "false", "no", "n", "f", "0.0"}
_BITS = re.compile(
    r"(^|_|\b)(bits?|bpb|bpc|bpt|bpw)(_|\b|$)|bits_per|per_byte|per_char"
)
_PERPLEXITY = re.compile(r"perplexity|(^|_)ppl(_|$)")
_UNIT_SUFFIX = re.compile(
    r"(?P<M>(_|\(|\[|\b)m(\)|\]|$)|million)|(?P<B>(_|\(|\[|\b)b(\)|\]|$)|billion)"
)
"""Parts of names that mean millions or billions."""
_UNITS = {"M": 1e6, "B": 1e9}

_MOST_LOSS = 16.0
"""Largest plausible loss in nats per token: the log of a vocabulary of nine million."""
_SIZE_LIMITS = {
    "num_params": ("parameters", 1e3, 1e6),
    "num_tokens": ("tokens", 1e5, 1e9),
    "flops": ("FLOPs", 1e8, 1e18),
}
"""Unit of the count, least plausible value of the largest run, and a usual unit."""
_MAX_FLOPS_RATIO = 30.0
"""Largest plausible ratio of C to 6 N D, or of 6 N D to C."""


def find_doubts(log: Log, columns: LogColumns, used: Collection[str] = ()) -> list[str]:
    """Returns warnings about unused columns and implausible units of a log.

    Args:
      log: the runs.
      columns: names and units with which they were read.
      used: rules and names that mention columns.

    Returns:
      Sentences, each with the column and the option that would change it.
    """
    taken = {*log.roles.values(), *log.columns}
    free = [
        name
        for name in log.names
        if name not in taken and not any(name in text for text in used)
    ]
    messages = [line for name, line in log.doubtful.items() if name in taken]
    for kind in (_groups, _marks, _states):
        line_by_name = {name: line for name in free for line in kind(log, name)}
        if line_by_name:  # one line for each kind of warning
            first, *others = line_by_name
            same = f"; the same holds for {', '.join(others)}" if others else ""
            messages.append(line_by_name[first] + same)
    messages += [*_repeated(log, free), *_rates(log, free)]
    if not log.has_one_row_per_run and log.curves is None:
        messages.append(
            f"runs have several rows, and each is fitted: --last-of "
            f"{_shell(log.roles['run'])} reads the last of each"
        )
    return messages if log.source.is_dir() else [*messages, *_units(log, columns)]


def _cells(log: Log, name: str) -> list[str]:
    """Returns a column as text; empty for a missing cell."""
    cells = (row.cells.get(name) for row in log.raw)
    return ["" if cell is None else str(cell) for cell in cells]


def _groups(log: Log, name: str) -> Iterator[str]:
    values = [*dict.fromkeys(_cells(log, name))]
    if not _GROUPS.search(name.lower()) or not 1 < len(values) <= len(log.raw) / 2:
        return
    sample = ", ".join(values[:3]) + (", ..." if len(values) > 3 else "")
    yield (
        f"{name} is not used, and groups the runs ({sample}): --by {_shell(name)} fits "
        f"each group, --where {_rule(name, values[0])} one of them"
    )


def _marks(log: Log, name: str) -> Iterator[str]:
    marks = _TRUE
    if not _OUTLIER_MARK.search(name.lower()):
        if not _COMPLETE.fullmatch(name.strip().lower()):
            return
        marks = _FALSE
    marked = [cell for cell in _cells(log, name) if cell.lower() in marks]
    if marked and len({*_cells(log, name)}) > 1:
        verb = (
            "1 run, which is" if len(marked) == 1 else f"{len(marked)} runs, which are"
        )
        yield (
            f"{name} is not used, and marks {verb} fitted like the rest: --ignore "
            f"{_rule(name, marked[0])} leaves such out"
        )


def _states(log: Log, name: str) -> Iterator[str]:
    """Warns of runs that did not complete, by a column of any name."""
    cells = _cells(log, name)
    words = [
        *dict.fromkeys(x for x in cells if NOT_COMPLETED.fullmatch(normalize_name(x)))
    ]
    if not words:
        return
    num = sum(cell in words for cell in cells)
    runs = "1 run is" if num == 1 else f"{num} runs are"
    rule = " or ".join(f'{rules.quote_column(name)} == "{x}"' for x in words[:3])
    yield (
        f"{name} is not used, and {runs} {' or '.join(words[:3])} there: --ignore "
        f"'{rule}' leaves such out"
    )


def _repeated(log: Log, free: Sequence[str]) -> Iterator[str]:
    """Warns of an unused column of unique tokens, above all if tokens are repeated."""
    for name in free:
        words = name.lower()
        if name != "U" and not (
            "unique" in words and ("tok" in words or len(words) < 9)
        ):
            continue
        unique = [parse(row.cells.get(name), 1.0) or 0.0 for row in log.raw]
        option = f"--law data-constrained --columns num_unique_tokens={_shell(name)}"
        if "num_tokens" not in log.columns or not min(unique) > 0:
            continue
        epochs = float((log.columns["num_tokens"] / unique).max())
        if epochs > 1.01:
            yield (
                f"{name} is not used, and runs repeat their tokens up to {epochs:.3g} "
                f"times: {option} counts repetitions less"
            )
        elif not log.source.is_dir():
            yield f"{name} is not used, and no run repeats tokens: {option} reads it"


def _rates(log: Log, free: Sequence[str]) -> Iterator[str]:
    """Warns of several runs of one size, of which only the best should be used."""
    names = [log.roles.get(x) for x in ("num_params", "num_tokens")]
    if not all(names):
        return
    sizes = [*zip(log.columns["num_params"], log.columns["num_tokens"], strict=True)]
    for name in (x for x in _PER_STEP_COLUMNS if x in free):
        if len({*zip(sizes, _cells(log, name), strict=True)}) > len({*sizes}):
            yield (
                f"{name} is not used, and differs in runs of one N and D: --best-of "
                f"{','.join(_shell(x) for x in names if x)} reads the best of each"
            )
            return


def _units(log: Log, columns: LogColumns) -> Iterator[str]:
    loss = log.columns.get("loss")
    name = log.roles.get("loss", "")
    if loss is not None and columns.loss_unit == 1:
        if _PERPLEXITY.search(name.lower()) or loss.max() > _MOST_LOSS:
            yield (
                f"{name} is up to {loss.max():.4g}: nats per token? Of a perplexity "
                "take the logarithm"
            )
        elif _BITS.search(name.lower()):
            yield (
                f"{name} looks like bits, and is read as nats per token: --loss-unit "
                f"{math.log(2):.6f} if it is bits per token; of bits per byte or "
                "character, times how many of them a token has"
            )
    sizes = [
        line
        for meaning in SIZE_COLUMNS
        if meaning in log.roles
        for line in _size(log, meaning, getattr(columns, f"{FIELDS[meaning]}_unit"))
    ]
    if sizes:
        yield "; ".join(sizes)
    if {*SIZE_COLUMNS} <= log.roles.keys():
        n, d, c = (log.columns[x] for x in SIZE_COLUMNS)
        ratio = float(np.exp(np.log(c / (6 * n * d)).mean()))
        if not 1 / _MAX_FLOPS_RATIO <= ratio <= _MAX_FLOPS_RATIO:
            yield (
                f"C is {ratio:.3g} times 6 N D: is one of them in another unit "
                "(--n-unit, --d-unit, --c-unit)?"
            )


def _size(log: Log, meaning: str, unit: float) -> Iterator[str]:
    """Warns of numbers that are too small, or not whole, for their meaning."""
    name = log.roles[meaning]
    values = log.columns[meaning]
    what, threshold, usual = _SIZE_LIMITS[meaning]
    match = _UNIT_SUFFIX.search(name.lower())
    is_named = bool(match) and unit == 1
    is_broken = unit == 1 and meaning != "flops" and bool((values % 1 > 0).any())
    is_small = values.max() < 1e6 and (is_named or is_broken)
    if not is_small and values.max() >= threshold:
        return
    by = _UNITS[match.lastgroup] if match and match.lastgroup else usual
    yield (
        f"{LETTERS[meaning]} ({name}) is {values.min():.4g} to {values.max():.4g}: "
        f"{what}? {COLUMN_FLAGS[meaning]}-unit {by:g} if a 1 there means so many"
    )


def _rule(name: str, cell: str) -> str:
    """Returns a rule that selects rows with a cell, quoted for a shell."""
    value = f'"{cell}"' if parse(cell, None) is None else cell
    return f"'{rules.quote_column(name)} == {value}'"


def _shell(name: str) -> str:
    return name if re.fullmatch(r"[\w.,=/-]+", name) else f"'{name}'"
