"""Public readers take the path of a file or folder as text and as `os.PathLike`."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxkv
import scaling
from tests.support.number_arguments import parameter_types, public_functions

pytestmark = pytest.mark.usefixtures("no_type_checks")

PREFIXES = ("read_", "load_", "iterate_", "verify_", "restore_", "has_")


class Reader(NamedTuple):
    call: Callable[..., Any]
    parameter: str
    """Name of the parameter that is a path."""


def find_readers() -> dict[str, Reader]:
    """Returns the public functions that read a path, by name."""
    readers = {}
    for name, call in (*public_functions(jaxkv), *public_functions(scaling)):
        for parameter, kinds in parameter_types(call).items():
            is_path = {Path, os.PathLike[str]} & {*kinds}
            if is_path and name.rpartition(".")[2].startswith(PREFIXES):
                readers[name] = Reader(call, parameter)
    return readers


READERS = find_readers()


class ForeignPath(os.PathLike):
    """A path that is neither text nor a `Path`."""

    def __init__(self, path: Path):
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def outcome_of(reader: Reader, path: Any) -> str:
    """Returns the result or error of a call; other required arguments are None."""
    arguments = {
        parameter.name: None
        for parameter in inspect.signature(reader.call).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
    }
    try:
        result = reader.call(**{**arguments, reader.parameter: path})
        return repr([*result] if inspect.isgenerator(result) else result)
    except Exception as error:
        return repr(error)


def test_readers_are_found() -> None:
    assert {"jaxkv.workloads.read_recording", "scaling.logs.read_log"} <= {*READERS}
    assert len(READERS) >= 20


@pytest.mark.parametrize("name", READERS)
def test_paths_may_be_text(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    assert str in parameter_types(reader.call)[reader.parameter]
    missing = tmp_path / "missing"
    expected = outcome_of(reader, missing)
    assert outcome_of(reader, str(missing)) == expected
    assert outcome_of(reader, ForeignPath(missing)) == expected
    for value in (5, b"missing", None):
        line = outcome_of(reader, value)
        assert line.startswith("ValueError"), line
        assert repr(value) in line
