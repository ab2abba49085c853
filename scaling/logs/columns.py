"""Meanings of a log's columns, found by name or flag; numbers in SI units."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float

from jaxkv.files import RawTable
from jaxkv.validation import ConfigRecord, Range
from scaling.logs import rules
from scaling.logs.rules import parse_number as parse

FLOPS_PER_PARAM_AND_TOKEN = 6.0
"""`C = 6 N D`: 2 forward and 4 backward. Kaplan et al. 2020, arXiv:2001.08361, 2.1."""

Count = Literal["total", "non-embedding", "matmul", "active"]

_COLUMN_OF_COUNT = {
    "total": "num_params",
    "non-embedding": "num_params_non_embedding",
    "matmul": "num_params_matmul",
    "active": "num_params_active",
}

SIZE_COLUMNS = ("num_params", "num_tokens", "flops")
"""Columns of sizes: two of them determine the third."""
LETTERS = {"num_params": "N", "num_tokens": "D", "flops": "C", "loss": "L"}
"""The letter of each column in the papers."""

_KNOWN_AS = {
    "num_params": ("num_params", "N", "n", "params", "n_params", "parameters"),
    "num_tokens": ("num_tokens", "D", "d", "tokens", "n_tokens", "training_tokens"),
    "flops": ("flops", "C", "c", "compute", "FLOPs", "FLOP", "training_flops"),
    "loss": ("loss", "L", "final_loss", "val_loss", "eval_loss"),
    "run": ("run_id", "run"),
}
"""Column names that need no flag, by priority; a flag overrides them."""

_SPELLINGS = {
    "num_params": re.compile(
        r"(n|num|numberof|total|model|modelnum|modeltotal)?param(eter)?s(total)?"
        r"|(model)?param(eter)?count|modelsize"
    ),
    "num_tokens": re.compile(
        r"(n|num|numberof|total)?(train|training|trained|seen|consumed)?tokens"
        r"(seen|trained|processed|consumed|total)?|(train|training)?tokencount"
    ),
    "flops": re.compile(
        r"(n|num|numberof|total)?(train|training)?(compute)?flops?(total|budget)?"
        r"|(total|train|training)?compute(budget)?"
    ),
    "loss": re.compile(
        r"(final)?(val|valid|validation|eval|evaluation|test)?(loss|crossentropy)"
        r"|loss(final|val|valid|validation|eval|test)"
    ),
    "run": re.compile(r"run(id)?"),
}
"""Patterns of further names, without a flag or a column in `_KNOWN_AS`; matched with
the lower-case letters and digits of a name."""
_GROUP_OF_NAME = re.compile(r"^(config|summary|hparams|args|metrics)[./]")
_UNIT_OF_NAME = re.compile(
    r"\s*[(\[][^)\]]*[)\]]\s*$|[\s_]+(k|m|b|bn|thousands?|millions?|billions?)$"
)

STEP_COLUMNS = (
    "step",
    "steps",
    "num_steps",
    "iteration",
    "iterations",
    "iter",
    "global_step",
)
"""Columns that order the rows of a run if neither tokens nor FLOPs do."""

FIELDS = {
    "num_params": "n",
    "num_tokens": "d",
    "flops": "c",
    "loss": "loss",
    "run": "run",
}
COLUMN_FLAGS = {meaning: f"--{field}" for meaning, field in FIELDS.items()}
"""Fields of `LogColumns` and flags of the command line, by meaning."""


class LogColumns(ConfigRecord):
    """Columns of a log by meaning, with units; "" searches by name."""

    n: str = ""
    """Column of the parameters; like `d`, `c` and `loss` searched by name if empty."""
    d: str = ""
    """Column of the training tokens."""
    c: str = ""
    """Column of the training FLOPs."""
    loss: str = ""
    """Column of the loss, nats per token times `loss_unit`."""
    run: str = ""
    """Column that identifies the run of a row, if runs have several rows."""
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns of further inputs of laws, by the input; `COLUMN*UNIT` scales one."""
    n_unit: Annotated[float, Range(0, ends="()")] = 1.0
    """Parameters of a 1 in the file; `d_unit` and `c_unit` are the same for D and C."""
    d_unit: Annotated[float, Range(0, ends="()")] = 1.0
    c_unit: Annotated[float, Range(0, ends="()")] = 1.0
    loss_unit: Annotated[float, Range(0, ends="()")] = 1.0
    """Nats per token of a 1 in the file, ln 2 for bits."""
    count: Count = "total"
    """Parameters that `n` counts; selects the column in a sweep of this package."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.count not in get_args(Count):
            raise ValueError(f"count={self.count!r} must be one of {get_args(Count)}")


class ColumnRoles(NamedTuple):
    """Columns of a file by meaning.

    Attributes:
      names: column of each meaning: those of `Log.columns`, and `run`.
      notes: guesses, in sentences.
      rivals: candidate columns of a meaning, if there are several.
    """

    names: dict[str, str]
    notes: list[str]
    rivals: Mapping[str, list[str]] = {}


def read_log_columns(
    table: RawTable, columns: LogColumns, roles: ColumnRoles, needs: Iterable[str]
) -> tuple[dict[str, Float[np.ndarray, " runs"]], list[str], list[str]]:
    """Reads the required columns, and derives missing ones.

    Args:
      table: table of at least one row.
      columns: names and units of the columns.
      roles: result of `find_columns`.
      needs: columns that a law reads; empty means all of N, D, C and the loss.

    Returns:
      `num_params`, `num_tokens`, `flops`, `loss` and further inputs, positive and
      finite; a label for each row, equal for rows of one run; assumptions and
      derivations, in sentences.

    Raises:
      ValueError: a column is missing, or a cell is not a number above 0.
    """
    names = roles.names
    notes = [*roles.notes]
    needs = [*needs]
    sources: dict[str, tuple[str, float | None]] = {}
    for meaning in SIZE_COLUMNS:
        unit = getattr(columns, f"{FIELDS[meaning]}_unit")
        if meaning in names:
            sources[meaning] = names[meaning], unit
        elif unit != 1:
            flag = COLUMN_FLAGS[meaning]
            raise ValueError(f"{table.path}: {flag}-unit {unit:g}, but no {flag}")
    if "loss" in names:
        sources["loss"] = names["loss"], None
    _refuse_missing(table, roles, needs)
    available = {*sources} | (
        {*SIZE_COLUMNS} if len({*SIZE_COLUMNS} & {*sources}) > 1 else set()
    )
    for need in needs:
        if need in available:
            continue
        name, unit = _scaled(columns.others.get(need, need), table)
        if name not in table.names:
            raise ValueError(
                f"{table.path}: the law reads {need}; name its column with "
                f"--columns {need}=COLUMN; there is {', '.join(table.names)}"
            )
        sources[need] = name, unit
        names[need] = name
        if unit == 1 and columns.d_unit != 1 and need.endswith("_tokens"):
            notes.append(
                f"{need} is {name} without a unit; {name}*{columns.d_unit:g} would "
                "have the unit of D"
            )
    arrays = _numbers(table, sources)
    if len({*SIZE_COLUMNS} & {*arrays}) > 1:
        notes[len(roles.notes) : 0] = _derive(arrays)
    if "loss" in arrays and (unit := columns.loss_unit) != 1:
        arrays["loss"] *= unit
        notes.append(f"the loss is {names['loss']} times {unit:.6g}")
    order = (*LETTERS, *(x for x in arrays if x not in LETTERS))
    values = {name: arrays[name] for name in order if name in arrays}
    labels = [str(row.number) for row in table.rows]
    if "run" in names:
        labels = [str(row.cells.get(names["run"])) for row in table.rows]
    return values, labels, notes


def declared_units(
    table: RawTable, columns: LogColumns, names: Mapping[str, str]
) -> dict[str, float]:
    """Returns the units other than 1 that flags declare, by column."""
    units = {
        names[x]: getattr(columns, f"{FIELDS[x]}_unit") for x in LETTERS if x in names
    }
    units |= dict(_scaled(name, table) for name in columns.others.values())
    return {name: unit for name, unit in units.items() if unit != 1}


def loss_column(table: RawTable, roles: ColumnRoles) -> str:
    """Returns the name of the loss column.

    Raises:
      ValueError: no column is named or recognized as the loss.
    """
    if "loss" not in roles.names:
        raise ValueError(
            f"{table.path}: which column is the loss? --loss COLUMN, one of "
            f"{', '.join(table.names)}"
        )
    return roles.names["loss"]


def _refuse_missing(table: RawTable, roles: ColumnRoles, needs: list[str]) -> None:
    """Checks that required columns exist; two of N, D and C give the third."""
    names = roles.names
    wanted = [x for x in LETTERS if x in needs] if needs else [*LETTERS]
    sizes = [x for x in SIZE_COLUMNS if x in names]
    missing = [x for x in wanted if x not in names]
    if "loss" in missing:
        loss_column(table, roles)
    if not missing or len(sizes) > 1:
        return
    message = ", ".join(f"{LETTERS[x]} ({names[x]})" for x in sizes) or "none"
    what = "two of N, D and C are needed"
    for meaning, rivals in roles.rivals.items():
        if meaning in missing:
            what = f"{LETTERS[meaning]} may be {' or '.join(rivals)}; {what}"
    if len([x for x in wanted if x in SIZE_COLUMNS]) == 1:
        what = (
            f"the law reads {LETTERS[missing[0]]} ({COLUMN_FLAGS[missing[0]]} COLUMN)"
        )
    raise ValueError(
        f"{table.path}: {what}, and there is {message}; name columns with --n, "
        f"--d, --c; it has {', '.join(table.names)}"
    )


def _scaled(name: str, table: RawTable) -> tuple[str, float]:
    """Splits `COLUMN*UNIT`, unless a column has that name."""
    column, times, unit = name.rpartition("*")
    if name in table.names or not times:
        return name, 1.0
    try:
        factor = float(unit)
    except ValueError:
        return name, 1.0
    if not 0 < factor < math.inf:
        raise ValueError(f"--columns {name}: the unit must be above 0")
    return column, factor


def find_columns(table: RawTable, columns: LogColumns) -> ColumnRoles:
    """Finds the file's column of each meaning, and notes guesses.

    Args:
      table: the table; its rows do not matter.
      columns: names of the columns.

    Raises:
      ValueError: a named column does not exist, or two columns have its name.
    """
    message = {meaning: getattr(columns, field) for meaning, field in FIELDS.items()}
    for meaning in LETTERS:
        if name := columns.others.get(meaning):
            flag = COLUMN_FLAGS[meaning]
            if message[meaning]:
                line = (
                    f"{flag} {message[meaning]} and --columns {meaning}={name}; which?"
                )
                raise ValueError(f"{table.path}: {line}")
            message[meaning] = name
    ours = _COLUMN_OF_COUNT[columns.count]
    aliases = dict(_KNOWN_AS)
    if _COLUMN_OF_COUNT["non-embedding"] in table.names:  # a sweep has all counts
        aliases["num_params"] = (ours,)
    every = (*table.names, *sorted(table.repeated))
    names = {}
    guessed = []
    rivals = {}
    for meaning, name in message.items():
        if name:
            if name not in every:
                raise ValueError(
                    f"{table.path}: {COLUMN_FLAGS[meaning]} {name}: no such column; "
                    f"there is {', '.join(table.names)}"
                )
            names[meaning] = name
            continue
        candidates = [name for name in aliases[meaning] if name in every]
        if not candidates and aliases[meaning] == _KNOWN_AS[meaning]:
            candidates = _spelt(meaning, every)
        if meaning == "loss" and not candidates:
            candidates = [name for name in every if "loss" in name.lower()]
            candidates = candidates if len(candidates) == 1 else []
        if candidates and candidates[0] not in aliases[meaning] and len(candidates) > 1:
            rivals[meaning] = candidates
        elif candidates:
            names[meaning] = candidates[0]
            letter = LETTERS.get(meaning)
            if letter and candidates[0] not in (meaning, ours, letter):
                guessed.append(f"{letter} is {candidates[0]}")
    for name in names.values():
        if name in table.repeated:
            raise ValueError(f"{table.path}: two columns are named {name!r}")
    notes = [f"by their names, {', '.join(guessed)}"] if guessed else []
    if names.get("num_params") not in (None, *_COLUMN_OF_COUNT.values()):
        notes.append(f"N is taken to count {columns.count} parameters (--count)")
    return ColumnRoles(names, notes, rivals)


def _spelt(meaning: str, names: Iterable[str]) -> list[str]:
    """Finds columns whose names have a meaning in another spelling.

    Names without a unit take precedence; of several losses the first in the order of
    `_KNOWN_AS` is chosen.
    """
    matches: dict[bool, list[str]] = {False: [], True: []}
    for name in names:
        plain = _GROUP_OF_NAME.sub("", name.strip().lower())
        bare = _UNIT_OF_NAME.sub("", plain)
        for is_cut, text in enumerate(dict.fromkeys((plain, bare))):
            if _SPELLINGS[meaning].fullmatch(re.sub(r"[^a-z0-9]", "", text)):
                matches[bool(is_cut)].append(name)
                break
    several = matches[False] or matches[True]
    if meaning == "loss" and len(several) > 1:
        spelt = {re.sub(r"[^a-z0-9]", "", x.lower()): x for x in several}
        order = [re.sub("_", "", x).lower() for x in _KNOWN_AS["loss"]]
        several = [spelt[x] for x in order if x in spelt][:1] or several
    return several


def find_column(table: RawTable, roles: ColumnRoles, name: str, flag: str) -> str:
    """Finds a column by its name in the file, or by N, D, C or L.

    Args:
      table: the table.
      roles: meanings of its columns.
      name: a name of the file, a letter, or a meaning such as "num_params".
      flag: flag with the name, for the error message.

    Raises:
      ValueError: there is no such column.
    """
    if name in table.names:
        return name
    for meaning, letter in LETTERS.items():
        if name in (meaning, letter) and meaning in roles.names:
            return roles.names[meaning]
    raise ValueError(
        f"{table.path}: {flag} {name}: no such column; there is "
        f"{', '.join(table.names)}"
    )


def read_numbers(
    table: RawTable, name: str, unit: float | None
) -> Float[np.ndarray, " runs"]:
    """Reads a column of positive numbers.

    Args:
      table: the table.
      name: name of the column.
      unit: value of a 1 in the file. With unit 1, a cell may have a suffix K, M, B, G
        or T, as in 1.5B; None for a column without units.

    Raises:
      ValueError: a cell is missing, no number, or not above 0 and finite.
    """
    return _numbers(table, {name: (name, unit)})[name]


def _numbers(
    table: RawTable, sources: Mapping[str, tuple[str, float | None]]
) -> dict[str, Float[np.ndarray, " runs"]]:
    """Reads columns of positive numbers, given their names and units.

    Raises:
      ValueError: cells are missing, no numbers, or not above 0 and finite; the message
        counts them by column, and has a rule that ignores all such rows.
    """
    arrays: dict[str, np.ndarray] = {}
    faults: dict[tuple[str, str], int] = {}
    bad_rows: dict[int, str] = {}
    for key, (name, unit) in sources.items():
        cells = [row.cells.get(name) for row in table.rows]
        values = [parse(cell, unit) for cell in cells]
        arrays[key] = np.array([math.nan if x is None else x for x in values])
        is_good = (arrays[key] > 0) & (arrays[key] < math.inf)
        for place in map(int, np.flatnonzero(~is_good)):
            cell = cells[place]
            value = values[place]
            if cell is None or cell == "":
                kind = what = "missing"
            elif value is None:
                kind = "no number"
                what = f"{cell!r}, not a number"
            else:
                kind = "not above 0"
                what = f"{cell}, must be above 0 and finite"
            faults[name, kind] = faults.get((name, kind), 0) + 1
            bad_rows.setdefault(place, f"{name} is {what}")
    if not bad_rows:
        return arrays
    rows = [table.rows[place] for place in sorted(bad_rows)]
    if len(rows) == 1:
        [what] = bad_rows.values()
        raise ValueError(
            f"{table.path}: {rows[0].place}: {what}; --ignore "
            f"'row == {rows[0].number}' leaves it out"
        )
    message = ", ".join(
        f"{name} is {kind} in {n}" for (name, kind), n in faults.items()
    )
    names = [*dict.fromkeys(name for name, _ in faults)]
    way_out = "is it another column?"
    if len(rows) < len(table.rows):
        rule = " or ".join(f"{rules.quote_column(name)} is invalid" for name in names)
        test = rules.parse_rule(rule, names)
        if not all(test(row.cells) for row in rows):  # such as 3M where no unit may be
            rule = " or ".join(f"row == {row.number}" for row in rows)
        way_out = f"--ignore '{rule}' leaves them out"
    raise ValueError(
        f"{table.path}: {len(rows)} of {len(table.rows)} rows cannot be read: "
        f"{message}, first in {rows[0].place}; {way_out}"
    )


def _derive(arrays: dict[str, Float[np.ndarray, " runs"]]) -> list[str]:
    """Derives the third of N, D and C, or notes the ratio of C to 6ND."""
    six = FLOPS_PER_PARAM_AND_TOKEN
    if "flops" not in arrays:
        arrays["flops"] = six * arrays["num_params"] * arrays["num_tokens"]
        return ["C = 6 N D"]
    if "num_tokens" not in arrays:
        arrays["num_tokens"] = arrays["flops"] / (six * arrays["num_params"])
        return ["D = C / 6N"]
    if "num_params" not in arrays:
        arrays["num_params"] = arrays["flops"] / (six * arrays["num_tokens"])
        return ["N = C / 6D"]
    ratio = arrays["flops"] / (six * arrays["num_params"] * arrays["num_tokens"])
    low = float(ratio.min())
    high = float(ratio.max())
    if high - 1 > 1e-3 or 1 - low > 1e-3:
        return [f"C is {low:.3g} to {high:.3g} times 6 N D"]
    return []
