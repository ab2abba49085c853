"""Results: what each value means, its unit and how it is told, declared once.

From the declarations follow the arrays of a run folder, the JSON of its metrics and the
tables of its report. A `Table` has rows: its columns are arrays, their first axis the
rows. A `Record` has one of each: numbers, texts, arrays, tables, other records.

    class Serving(Table):
        \"\"\"What became of every load.\"\"\"

        data: Texts = column("whose lengths")
        rate: Floats = column("arrivals", heading="requests/s", form="{:.2f}")
        finish_s: Floats = column("from arrival to answer")

        @property
        @shown(heading="over the first")
        def ratio(self) -> np.ndarray:
            return self.finish_s / self.finish_s[0]

Units stand in names: one that ends in `_s`, `_per_s`, `_bytes`, `_share` or
`_utilisation` is written with its unit, and its heading goes without.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.framework import config_json, report, units

type Form = str | Callable[[Any], str]

Floats = Float[np.ndarray, " rows"]
Ints = Int[np.ndarray, " rows"]
Bools = Bool[np.ndarray, " rows"]
Texts = Annotated[np.ndarray, "text"]


class Column(NamedTuple):
    """How a value is told.

    Attributes:
      heading: over it in a table; its name in words by default.
      form: how a cell is written: a format such as "{:.2f}", or a function of the value
        or None; by default as its name's unit asks.
      key: its name in JSON; its own by default.
      of: what is told of a row's array, such as `np.median`; a list of all by default.
      note: below the table, of a column that is one.
      is_reported: whether it stands in JSON and tables that do not name their columns.
      prefix: of a table's or record's arrays in a run folder; its own name and a dot by
        default, nothing where older folders have them so.
    """

    heading: str = ""
    form: Form | None = None
    key: str = ""
    of: Callable[[np.ndarray], Any] | None = None
    note: str = ""
    is_reported: bool = True
    prefix: str | None = None


def column(meaning: str, **told: Any) -> Any:
    """Declares a value of a record or a column of a table.

    Args:
      meaning: what it is, for who reads the code.
      told: how it is told, as `Column` has it.
    """
    del meaning
    return dataclasses.field(metadata={"column": Column(**told)})


def computed_column[F: Callable[..., Any]](**told: Any) -> Callable[[F], F]:
    """Has a property told like a column, behind those; stands below `@property`."""

    def declare(function: F) -> F:
        vars(function)["column"] = Column(**told)
        return function

    return declare


@typing.dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(column,)
)
class ResultRecord:
    """Values by name, each declared by `column`; a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        """Makes the subclass a dataclass."""
        dataclasses.dataclass(frozen=True, eq=False)(cls)

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """All that is declared, by name: fields in order, then properties `shown`.

        What a class inherits stands before its own.
        """
        fields: Mapping[str, Any] = vars(cls).get("__dataclass_fields__", {})
        found = {x: fields[x].metadata.get("column", Column()) for x in fields}
        for kind in reversed(cls.__mro__):
            for name, value in vars(kind).items():
                if isinstance(value, property) and hasattr(value.fget, "column"):
                    found[name] = vars(value.fget)["column"]
        return found


class ResultTable(ResultRecord):
    """A record whose columns have a value, or an array, for each row.

    Raises:
      ValueError: columns differ in length, or are not of their kind.
    """

    def __post_init__(self) -> None:
        """Makes arrays of the columns, each of the kind that is declared."""
        hints = field_types(type(self))
        for name, value in field_values(self).items():
            object.__setattr__(self, name, _of_kind(name, value, hints[name]))
        lengths = {name: len(value) for name, value in field_values(self).items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"columns of {type(self).__name__} differ: {lengths}")

    def to_dataframe(self) -> Any:
        """Returns a data frame with the columns.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        from jaxkv.workloads import dataframes

        return dataframes.make(field_values(self))

    def __len__(self) -> int:
        """Rows."""
        return len(next(iter(field_values(self).values())))

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Self:
        """Makes a table of rows: values in the columns' order, or by their names."""
        names = [*field_types(cls)]
        kept = [
            [x[name] for name in names] if isinstance(x, Mapping) else x for x in rows
        ]
        if any(len(row) != len(names) for row in kept):
            raise ValueError(f"a row of {cls.__name__} must have {', '.join(names)}")
        columns = zip(*kept, strict=True) if kept else [[] for _ in names]
        return cls(*columns)

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """Puts the rows of tables behind each other."""
        kept = [[*field_values(each).values()] for each in tables if len(each)]
        columns = zip(*kept, strict=True)
        return cls(*map(np.concatenate, columns)) if kept else cls.of([])

    def where(self, **wanted: object) -> Self:
        """The rows whose columns, or properties, have these values."""
        here = np.ones(len(self), bool)
        for name, value in wanted.items():
            here &= np.asarray(getattr(self, name) == value)
        return self.at(here)

    def at(self, rows: Any) -> Self:
        """The rows of a mask, or of indices in their order."""
        return type(self)(*(values[rows] for values in field_values(self).values()))

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once, in their order."""
        return [*dict.fromkeys(getattr(self, name).tolist())]

    def rows(self, *names: str) -> list[dict[str, Any]]:
        """The rows for JSON, by key: of all columns, or those named."""
        told = _told(self, names)
        keys = [said.key or name for name, said, _ in told]
        columns = (values for *_, values in told)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def sheet(self, title: str, *names: str, note: str = "") -> report.Sheet:
        """The rows for a person: of all columns, or those named."""
        told = _told(self, names)
        heads = [_heading(name, said) for name, said, _ in told]
        columns = ([format_cell(name, said, x) for x in xs] for name, said, xs in told)
        return report.Sheet(title, heads, [*zip(*columns, strict=True)], note)


def field_values(value: Any) -> dict[str, Any]:
    """The values of a record, or of a NamedTuple, by name."""
    if isinstance(value, ResultRecord):
        return {name: getattr(value, name) for name in field_types(type(value))}
    return value._asdict()


def field_types(kind: Any) -> dict[str, Any]:
    """The types of what a class of records or NamedTuples holds, by name."""
    return typing.get_type_hints(kind, include_extras=True)


def is_compound(kind: Any) -> bool:
    """Whether a type is one of records or NamedTuples."""
    is_record = isinstance(kind, type) and issubclass(kind, ResultRecord)
    return is_record or hasattr(kind, "_fields")


def to_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Columns, arrays of equal lengths by name, as rows for JSON."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def array_prefix(kind: Any, name: str) -> str:
    """What stands before the names of arrays of a record's part, in a run folder."""
    declared = kind.columns() if issubclass(kind, ResultRecord) else {}
    said = declared.get(name, Column()).prefix
    return f"{name}." if said is None else said


def metrics(result: Any) -> dict[str, Any]:
    """What JSON tells of a record: values by key, tables as rows, no arrays.

    Of a result that is a list of rows, these.
    """
    if not isinstance(result, ResultRecord):
        return {"rows": result} if isinstance(result, list) else {}
    found = {}
    for name, said in result.columns().items():
        if not said.is_reported:
            continue
        value = getattr(result, name)
        if isinstance(value, ResultTable):
            found[said.key or name] = value.rows()
        elif isinstance(value, ResultRecord):
            found[said.key or name] = metrics(value)
        elif np.ndim(value) == 0:
            found[said.key or name] = np.asarray(value).item()
    return found


def sheets(result: Any) -> list[report.ReportPart]:
    """What a report tells of a record: its values, then each table that has rows."""
    declared = result.columns() if isinstance(result, ResultRecord) else {}
    plain, found = [], []
    for name, said in declared.items():
        if not said.is_reported:
            continue
        value = getattr(result, name)
        if isinstance(value, ResultTable):
            sheet = value.sheet(said.heading or name, note=said.note)
            found += [sheet] if len(value) else []
        elif isinstance(value, ResultRecord):
            found += sheets(value)
        elif np.ndim(value) == 0:
            plain.append((_heading(name, said), format_cell(name, said, value)))
    first = [report.Sheet("", ("metric", "value"), plain)] if plain else []
    return [*first, *found]


def format_cell(name: str, said: Column, value: Any) -> str:
    """A value as a cell has it; "-" where there is none."""
    value = config_json.to_plain(value)
    if isinstance(said.form, str):
        return "-" if value is None else said.form.format(value)
    return said.form(value) if said.form else units.format_named(name, value)[1]


def _heading(name: str, said: Column) -> str:
    return said.heading or units.format_named(name, 0.0)[0]


def _told(
    table: ResultTable, names: Sequence[str]
) -> list[tuple[str, Column, list[Any]]]:
    """Name, declaration and values of the columns named, or of all that are told."""
    declared = table.columns()
    found = []
    for name in names or [name for name, said in declared.items() if said.is_reported]:
        said, values = declared.get(name, Column()), getattr(table, name)
        told = values if said.of is None else np.array([said.of(x) for x in values])
        found.append((name, said, told.tolist()))
    return found


_KINDS = {"float": "f", "int": "iu", "bool": "b", "text": "U"}


def _of_kind(name: str, value: Any, hint: Any) -> np.ndarray:
    """A column as an array of its kind; whole floats become integers."""
    array = np.asarray([*value] if isinstance(value, tuple) else value)
    declared = getattr(hint, "__metadata__", None) or getattr(hint, "dtypes", ())
    first = declared[0] if isinstance(declared, tuple) and declared else ""
    wanted = next((x for x in _KINDS if str(first).startswith(x)), "")
    if not wanted or array.dtype.kind in _KINDS[wanted]:
        return array
    cast = array.astype({"text": str}.get(wanted, wanted))
    if array.size and not (cast == array).all():
        raise ValueError(f"column {name} must hold {wanted}s, not {array.dtype}")
    return cast
