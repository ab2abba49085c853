"""Results with declared columns: meaning, unit and format, declared once.

The declarations define the arrays of a run folder, the JSON of its metrics and the
tables of its report. A `ResultTable` has rows: its columns are arrays whose first axis
is the row. A `ResultRecord` has single values: numbers, texts, arrays, tables, nested
records.

    class Serving(ResultTable):
        \"\"\"Result for every request rate.\"\"\"

        data: Texts = column("data set of the lengths")
        rate: Floats = column("arrivals", heading="requests/s", form="{:.2f}")
        finish_s: Floats = column("time from arrival to answer")

        @property
        @computed_column(heading="over the first")
        def ratio(self) -> np.ndarray:
            return self.finish_s / self.finish_s[0]

Units are suffixes of names: a value whose name ends in `_s`, `_per_s`, `_bytes`,
`_share` or `_utilisation` is printed with its unit, and its heading omits the suffix.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv.report import parts, plain_json, units

type Form = str | Callable[[Any], str]
type Row = dict[str, Any]
"""A row of a result: numbers and texts by name."""

Floats = Float[np.ndarray, " rows"]
Ints = Int[np.ndarray, " rows"]
Bools = Bool[np.ndarray, " rows"]
Texts = Annotated[np.ndarray, "text"]


class Column(NamedTuple):
    """Format of a value in tables and JSON.

    Attributes:
      heading: column heading; by default the name in words.
      form: format of a cell: a format string such as "{:.2f}", or a function of the
        value or None; by default the format of the unit in the name.
      key: key in JSON; by default the name.
      of: reduction of the array of a row, such as `np.median`; by default the whole
        array.
      note: sentence below the table, for a column that is a table. Heading and note of
        a table are formats of the record: "one sequence on {0.device}".
      columns: columns of a table that the report shows; by default all reported ones.
      is_reported: True if the value is part of JSON and of tables that do not name
        their columns.
      is_shown: False if a reported value is left out of the report's text.
      prefix: prefix of the arrays of a nested table or record in a run folder; by
        default its name and a dot.
    """

    heading: str = ""
    form: Form | None = None
    key: str = ""
    of: Callable[[np.ndarray], object] | None = None
    note: str = ""
    columns: Sequence[str] = ()
    is_reported: bool = True
    is_shown: bool = True
    prefix: str | None = None


def column(meaning: str, **reported: Any) -> Any:
    """Declares a value of a record or a column of a table.

    Args:
      meaning: meaning of the value, for readers of the code.
      reported: fields of `Column`.
    """
    del meaning
    return dataclasses.field(metadata={"column": Column(**reported)})


def computed_column[F: Callable[..., object]](**reported: Any) -> Callable[[F], F]:
    """Declares a property as a column after the fields; goes below `@property`."""

    def declare(function: F) -> F:
        vars(function)["column"] = Column(**reported)
        return function

    return declare


@typing.dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(column,)
)
class ResultRecord:
    """Named values, each declared by `column`; a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        """Makes the subclass a dataclass."""
        dataclasses.dataclass(frozen=True, eq=False)(cls)

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """Returns all declarations by name: fields in order, then computed columns.

        Inherited declarations come first.
        """
        fields: Mapping[str, dataclasses.Field] = vars(cls).get(
            "__dataclass_fields__", {}
        )
        column_by_name = {x: fields[x].metadata.get("column", Column()) for x in fields}
        for kind in reversed(cls.__mro__):
            for name, value in vars(kind).items():
                if isinstance(value, property) and hasattr(value.fget, "column"):
                    column_by_name[name] = vars(value.fget)["column"]
        return column_by_name


class ResultTable(ResultRecord):
    """A record whose columns have a value, or an array, for each row.

    Raises:
      ValueError: columns differ in length, or have the wrong type.
    """

    def __post_init__(self) -> None:
        """Converts the columns to arrays of the declared types."""
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
        from jaxkv.workloads import make_dataframe

        return make_dataframe(field_values(self))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(next(iter(field_values(self).values())))

    @classmethod
    def of(cls, rows: Iterable[Sequence[object] | Mapping[str, object]]) -> Self:
        """Makes a table from rows: values in the order of the columns, or by name."""
        names = [*field_types(cls)]
        row_values = [
            [x[name] for name in names] if isinstance(x, Mapping) else x for x in rows
        ]
        if any(len(row) != len(names) for row in row_values):
            raise ValueError(f"a row of {cls.__name__} must have {', '.join(names)}")
        columns = zip(*row_values, strict=True) if row_values else [[] for _ in names]
        return cls(*columns)

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """Concatenates the rows of tables."""
        table_columns = [
            [*field_values(table).values()] for table in tables if len(table)
        ]
        columns = zip(*table_columns, strict=True)
        return cls(*map(np.concatenate, columns)) if table_columns else cls.of([])

    def where(self, **wanted: object) -> Self:
        """Returns the rows whose columns, or properties, have the given values."""
        mask = np.ones(len(self), bool)
        for name, value in wanted.items():
            mask &= np.asarray(getattr(self, name) == value)
        return self.at(mask)

    def at(self, rows: np.ndarray | Sequence[int] | slice) -> Self:
        """Returns the rows of a mask, or of indices in their order."""
        return type(self)(*(values[rows] for values in field_values(self).values()))

    def distinct(self, name: str) -> list[Any]:
        """Returns the distinct values of a column, in order of first occurrence."""
        return [*dict.fromkeys(getattr(self, name).tolist())]

    def rows(self, *names: str) -> list[dict[str, Any]]:
        """Returns the rows for JSON, by key: all columns, or the named ones."""
        reported = _reported_columns(self, names)
        keys = [declaration.key or name for name, declaration, _ in reported]
        columns = (values for *_, values in reported)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def sheet(self, title: str, *names: str, note: str = "") -> parts.Sheet:
        """Returns the rows for a report: all columns, or the named ones."""
        reported = _reported_columns(self, names)
        heads = [_heading(name, declaration) for name, declaration, _ in reported]
        columns = (
            [format_cell(name, declaration, x) for x in xs]
            for name, declaration, xs in reported
        )
        return parts.Sheet(title, heads, [*zip(*columns, strict=True)], note)


def field_values(value: Any) -> dict[str, Any]:
    """Returns the values of a record, or of a NamedTuple, by name."""
    if isinstance(value, ResultRecord):
        return {name: getattr(value, name) for name in field_types(type(value))}
    return value._asdict()


def field_types(kind: type) -> dict[str, Any]:
    """Returns the field types of a class of records or NamedTuples, by name."""
    return typing.get_type_hints(kind, include_extras=True)


def is_compound(kind: object) -> bool:
    """Returns True if a type is a record or a NamedTuple."""
    is_record = isinstance(kind, type) and issubclass(kind, ResultRecord)
    return is_record or hasattr(kind, "_fields")


def to_rows(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Converts columns, arrays of equal length by name, to rows for JSON."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def array_prefix(kind: type, name: str) -> str:
    """Returns the prefix of array names of a record's field in a run folder."""
    declared = kind.columns() if issubclass(kind, ResultRecord) else {}
    declaration = declared.get(name, Column()).prefix
    return f"{name}." if declaration is None else declaration


def metrics(result: object) -> dict[str, Any]:
    """Returns the JSON of a record: values by key and tables as rows, no arrays.

    A result that is a list of rows is returned under the key `rows`.
    """
    if not isinstance(result, ResultRecord):
        return {"rows": result} if isinstance(result, list) else {}
    numbers = {}
    for name, declaration in result.columns().items():
        if not declaration.is_reported:
            continue
        value = getattr(result, name)
        if isinstance(value, ResultTable):
            numbers[declaration.key or name] = value.rows()
        elif isinstance(value, ResultRecord):
            numbers[declaration.key or name] = metrics(value)
        elif np.ndim(value) == 0:
            numbers[declaration.key or name] = np.asarray(value).item()
    return numbers


def sheets(result: object) -> list[parts.ReportPart]:
    """Returns the report of a record: its values, then each table that has rows."""
    declared = result.columns() if isinstance(result, ResultRecord) else {}
    plain = []
    tables = []
    for name, declaration in declared.items():
        if not (declaration.is_reported and declaration.is_shown):
            continue
        value = getattr(result, name)
        if isinstance(value, ResultTable):
            title = (declaration.heading or name).format(result)
            note = declaration.note.format(result)
            sheet = value.sheet(title, *declaration.columns, note=note)
            tables += [sheet] if len(value) else []
        elif isinstance(value, ResultRecord):
            tables += sheets(value)
        elif np.ndim(value) == 0:
            plain.append(
                (_heading(name, declaration), format_cell(name, declaration, value))
            )
    first = [parts.Sheet("", ("metric", "value"), plain)] if plain else []
    return [*first, *tables]


def format_cell(name: str, declaration: Column, value: object) -> str:
    """Returns the text of a table cell; "-" for None."""
    value = plain_json.to_plain(value)
    if isinstance(declaration.form, str):
        return "-" if value is None else declaration.form.format(value)
    return (
        declaration.form(value)
        if declaration.form
        else units.format_named(name, value)[1]
    )


def _heading(name: str, declaration: Column) -> str:
    return declaration.heading or units.format_named(name, 0.0)[0]


def _reported_columns(
    table: ResultTable, names: Sequence[str]
) -> list[tuple[str, Column, list[object]]]:
    """Returns name, declaration and values of the named, or of all reported columns."""
    declared = table.columns()
    columns = []
    for name in names or [
        name for name, declaration in declared.items() if declaration.is_reported
    ]:
        declaration = declared.get(name, Column())
        values = getattr(table, name)
        reported = (
            values
            if declaration.of is None
            else np.array([declaration.of(x) for x in values])
        )
        columns.append((name, declaration, reported.tolist()))
    return columns


_DTYPE_KINDS = {"float": "f", "int": "iu", "bool": "b", "text": "U"}


def _of_kind(name: str, value: object, hint: object) -> np.ndarray:
    """Converts a column to an array of its type; whole floats become integers."""
    array = np.asarray([*value] if isinstance(value, tuple) else value)
    declared = getattr(hint, "__metadata__", None) or getattr(hint, "dtypes", ())
    first = declared[0] if isinstance(declared, tuple) and declared else ""
    wanted = next((x for x in _DTYPE_KINDS if str(first).startswith(x)), "")
    if not wanted or array.dtype.kind in _DTYPE_KINDS[wanted]:
        return array
    cast = array.astype({"text": str}.get(wanted, wanted))
    if array.size and not (cast == array).all():
        raise ValueError(f"column {name} must hold {wanted}s, not {array.dtype}")
    return cast
