"""Reads columns of Parquet, Arrow, Feather and NumPy files as Python values."""

import contextlib
import io
import zipfile
from collections.abc import Generator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

_BYTES_PER_CELL = 8
_NUMPY_KINDS = "biufUSM"


class Columns(NamedTuple):
    """Columns of equal length.

    Attributes:
      values: Python values by name; a name may be repeated.
      notes: parts of the file that are not columns, in sentences.
    """

    values: list[tuple[str, list[object]]]
    notes: tuple[str, ...] = ()


def detect_format(data: bytes) -> str:
    """Returns the columnar format of data by its first bytes; empty if it has none."""
    for start, kind in _MAGIC_BYTES.items():
        if data.startswith(start):
            return kind
    return ""


def read_columns(data: bytes, max_bytes: int) -> Columns:
    """Reads a file in a format that `detect_format` knows.

    Raises:
      ValueError: the file is damaged or too large, or needs pyarrow.
    """
    kind = detect_format(data)
    if kind in _ARROW:
        return _read_arrow(data, kind, max_bytes)
    with _decoding(kind, zipfile.BadZipFile, EOFError):
        if kind != _ZIP:
            return _of_arrays({"": np.load(io.BytesIO(data), allow_pickle=False)})
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if not members or not all(x.filename.endswith(".npy") for x in members):
                raise ValueError("only arrays of NumPy (.npz) are read from one")
            check_size(sum(x.file_size for x in members), max_bytes)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _of_arrays({name: arrays[name] for name in arrays.files})


def unpack_zstd(data: bytes, max_bytes: int) -> bytes:
    """Decompresses zstd data, up to one byte more than the limit."""
    arrow = _pyarrow("zstd")
    with _decoding("zstd"):
        source = arrow.BufferReader(data)
        parts = []
        num_bytes = 0
        with arrow.CompressedInputStream(source, "zstd") as file:
            while num_bytes <= max_bytes and (part := file.read(2**20)):
                parts.append(part)
                num_bytes += len(part)
        return b"".join(parts)[: max_bytes + 1]


_ZIP = "a zip archive"
_MAGIC_BYTES = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"FEA1": "Feather",
    b"\x93NUMPY": "an array of NumPy",
    b"PK\x03\x04": _ZIP,
}
_ARROW = ("Parquet", "Arrow", "an Arrow stream", "Feather")


def _pyarrow(kind: str) -> ModuleType:
    """Imports pyarrow and its modules, an optional dependency.

    Raises:
      ValueError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.feather
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"it is {kind}, which pyarrow reads: pip install 'jaxkv[tables]'"
        ) from None
    return pyarrow


@contextlib.contextmanager
def _decoding(kind: str, *errors: type[Exception]) -> Generator[None]:
    """Turns the errors of a damaged file into one line."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, *errors) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"it is {kind}, and cannot be decoded: {line}") from None


def _read_arrow(data: bytes, kind: str, max_bytes: int) -> Columns:
    arrow = _pyarrow(kind)
    source = arrow.BufferReader(data)
    with _decoding(kind):
        if kind == "Parquet":
            file = arrow.parquet.ParquetFile(source)
            size = file.metadata.num_rows * max(file.metadata.num_columns, 1)
            check_size(size * _BYTES_PER_CELL, max_bytes)
            table = file.read()
        elif kind == "Feather":
            table = arrow.feather.read_table(source)
        else:
            is_stream = "stream" in kind
            open_source = arrow.ipc.open_stream if is_stream else arrow.ipc.open_file
            table = open_source(source).read_all()
        check_size(table.nbytes, max_bytes)
        while any(arrow.types.is_struct(x) for x in table.schema.types):
            table = table.flatten()
        pairs = zip(table.column_names, table.columns, strict=True)
        return Columns([(name, _plain(arrow, column)) for name, column in pairs])


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises a ValueError for more bytes than the limit."""
    if num_bytes > max_bytes:
        raise ValueError(f"more than {max_bytes >> 20} MiB; leave columns or rows out")


def _plain(arrow: ModuleType, column: Any) -> list[object]:
    """Converts a column to JSON values, with times in ISO 8601."""
    types = arrow.types
    kind = column.type
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if types.is_timestamp(kind):  # Python's times have no nanoseconds
        column = column.cast(arrow.timestamp("us", kind.tz), safe=False)
    values = column.to_pylist()
    if types.is_temporal(kind):
        return [None if x is None else str(x) for x in values]
    if types.is_decimal(kind):
        return [None if x is None else float(x) for x in values]
    return values


def _of_arrays(arrays: dict[str, np.ndarray]) -> Columns:
    """Returns vectors, and the fields of structured vectors, as columns."""
    columns: list[tuple[str, np.ndarray]] = []
    left = []
    for name, array in arrays.items():
        fields = array.dtype.names or ()
        parts = [(str(x), array[x]) for x in fields] or [(name, array)]
        for label, part in parts:
            if part.ndim == 1 and part.dtype.kind in _NUMPY_KINDS and label:
                columns.append((label, part))
            else:
                left.append(label or "the array")
    if not columns:
        raise ValueError("none of its arrays is a named column")
    lengths = {len(column) for _, column in columns}
    if len(lengths) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in columns)
        raise ValueError(f"its arrays have different lengths: {sizes}")
    notes = (f"no columns, and left out: {', '.join(left)}",) if left else ()
    values = []
    for name, column in columns:
        if column.dtype.kind == "S":
            column = np.char.decode(column, "utf-8")
        if column.dtype.kind == "M":
            column = np.datetime_as_string(column.astype("datetime64[us]"))
        values.append((name, column.tolist()))
    return Columns(values, notes)
