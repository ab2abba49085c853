"""Digests of files and of Python values, equal in all processes with equal content.

Functions are digested by their code, defaults, closures and the globals that they read,
so that two functions of one name differ if they compute something else. Line numbers,
comments and paths do not count. Libraries count by name and version.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

REMEMBERED_BYTES = 1 << 26
"""Files with fewer bytes together are hashed at every load, in under 0.1 s."""
_LIBRARY_FOLDERS = tuple(
    os.path.join(sysconfig.get_paths()[name], "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN_PACKAGES = ("jaxkv", "pallas_kernels")
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, range, slice)
_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)
_BOILERPLATE = frozenset(
    f"__{name}__"
    for name in ("init", "new", "repr", "eq", "hash", "setattr", "delattr", "lt", "le")
) | {"__gt__", "__ge__", "_abc_impl"}
"""Members of a class that set up its state, which is digested itself."""


def digest_files(paths: Sequence[Path]) -> str:
    """Returns a SHA-256 digest of the contents of files of one folder.

    Digests of large files are stored in `.NAME.sha256.json` next to the folder NAME,
    and reused while size, modification time and change time of a file are unchanged. A
    failure to write that file is ignored. The names of the files do not count.
    """
    if not paths:
        return _hash("")
    folder = paths[0].absolute().parent
    memory = folder.parent / f".{folder.name}.sha256.json"
    try:
        old = json.loads(memory.read_text())
    except (OSError, ValueError):
        old = {}
    old = old if isinstance(old, dict) else {}
    entries = {}
    num_bytes = 0
    for path in paths:
        status = path.stat()
        num_bytes += status.st_size
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = old.get(path.name)
        if not isinstance(entry, list) or entry[:-1] != stamp:
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
        entries[path.name] = entry
    if num_bytes >= REMEMBERED_BYTES and entries != old:
        draft = memory.with_name(f"{memory.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(entries))
            draft.replace(memory)
        except OSError:
            draft.unlink(missing_ok=True)
    return _hash("\n".join(sorted(str(entry[-1]) for entry in entries.values())))


def digest_value(name: str, value: object) -> str:
    """Returns a SHA-256 digest of a value.

    Args:
      name: name of the value, for the error.
      value: plain data, arrays, containers, dataclasses, functions and callable
        objects. A callable with a string attribute `identity` has that identity.

    Raises:
      ValueError: a part of the value has no content that can be compared.
    """
    return _hash(_Describer(name).describe(value))


class _Describer:
    """Describes a value as text; equal texts mean equal content."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._active: list[int] = []
        """Ids of the values around the current one, which may refer to them."""

    def describe(self, value: object) -> str:
        """Returns the text of a value."""
        kind = type(value)
        if value is None or value is Ellipsis or kind in _PLAIN_TYPES:
            return f"{kind.__name__} {value!r}"
        if id(value) in self._active:
            return f"outer {self._active.index(id(value))}"
        self._active.append(id(value))
        try:
            is_users = _library(kind.__module__) is None
            name = self.describe(kind) if is_users else kind.__qualname__
            return f"{name}({self._content(value)})"
        finally:
            self._active.pop()

    def _content(self, value: object) -> str:
        label = getattr(value, "identity", None)
        if callable(value) and isinstance(label, str):
            return repr(label)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return self._items(array.ravel().tolist())
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            return f"{array.dtype} {array.shape} {digest}"
        if isinstance(value, enum.Enum):
            return f"{value.name} {self.describe(value.value)}"
        if isinstance(value, np.dtype | str | bytes | int | float):
            return repr(value)
        if isinstance(value, tuple | list):
            return self._items(value)
        if isinstance(value, set | frozenset):
            return ", ".join(sorted(map(self.describe, value)))
        if isinstance(value, Mapping):
            return self._named(value)
        if isinstance(value, functools.partial):
            return self._items([value.func, value.args, value.keywords])
        if isinstance(value, types.MethodType):
            return self._items([value.__func__, value.__self__])
        if isinstance(value, types.CodeType):
            counts = [value.co_argcount, value.co_kwonlyargcount, value.co_flags]
            names = [value.co_names, value.co_varnames, value.co_freevars]
            parts = [value.co_code, value.co_consts, value.co_exceptiontable]
            return self._items([*parts, *names, *counts, value.co_posonlyargcount])
        if isinstance(value, _DESCRIPTORS):
            names = ("fget", "fset", "func", "__func__")
            return self._items(getattr(value, name, None) for name in names)
        return self._object(value)

    def _object(self, value: object) -> str:
        """Describes a module, class, function or an instance of a class."""
        module = getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", getattr(value, "__name__", None))
        if isinstance(value, types.ModuleType):
            return _library(value.__name__) or value.__name__
        library = _library(module) if isinstance(module, str) else None
        if name is not None and library is not None:
            return f"{library} {name}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            return self.describe(wrapped)  # such as the result of jax.jit
        if isinstance(value, type):
            members = {
                key: member
                for key, member in vars(value).items()
                if key not in _BOILERPLATE
                and (not key.startswith("__") or isinstance(member, types.FunctionType))
            }
            return f"{self._items(value.__bases__)} {self._named(members)}"
        if hasattr(type(value), "__get__") or isinstance(value, np.ufunc):
            return str(name)  # a slot of a class
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value)]
            return self._named({field: getattr(value, field) for field in fields})
        kind = type(value)
        if _library(kind.__module__) is None and hasattr(value, "__dict__"):
            return self._named(vars(value))
        raise ValueError(
            f"{self._name} cannot be compared between workers: it refers to a "
            f"{kind.__module__}.{kind.__qualname__}, which is neither data nor code; "
            f"name its content: {self._name}.identity = 'a name of this version'"
        )

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        variables = function.__globals__
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [function.__defaults__, function.__kwdefaults__]
        if _library(str(variables.get("__name__", ""))) is not None:
            # A wrapper of a user's function, which is in its closure.
            return f"{code.co_qualname} {self._items([*cells, *defaults])}"
        names = _loaded_names(code)
        loads = {name: variables[name] for name in names & variables.keys()}
        for name in sorted(_loaded_names(code, ("IMPORT_NAME",))):
            try:
                loads[f"import {name}"] = importlib.import_module(name)
            except (ImportError, ValueError):
                raise ValueError(
                    f"{self._name} cannot be compared between workers: it imports "
                    f"{name!r}, which is not available; import it before the function"
                ) from None
        for value in [*loads.values(), *cells]:
            loads |= _module_attributes(value, code)
        return self._items([code, cells, *defaults, loads])

    def _items(self, values: Iterable[object]) -> str:
        return ", ".join(map(self.describe, values))

    def _named(self, values: Mapping) -> str:
        pairs = (f"{self.describe(k)}: {self.describe(x)}" for k, x in values.items())
        return ", ".join(sorted(pairs))


def _loaded_names(
    code: types.CodeType, loads: Collection[str] = ("LOAD_GLOBAL", "LOAD_NAME")
) -> set[str]:
    """Returns the names that instructions of code and its inner functions load."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname in loads}
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return names.union(*(_loaded_names(x, loads) for x in inner))


def _module_attributes(module: object, code: types.CodeType) -> dict[str, object]:
    """Returns the attributes of a user's module that code may read.

    The keys contain the name of the module. Attributes of sub-packages are included.
    """
    if not isinstance(module, types.ModuleType) or _library(module.__name__):
        return {}
    attributes: dict[str, object] = {}
    for name in sorted(_attribute_names(code) & vars(module).keys()):
        value = vars(module)[name]
        attributes[f"{module.__name__}.{name}"] = value
        attributes |= _module_attributes(value, code)
    return attributes


def _attribute_names(code: types.CodeType) -> set[str]:
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return {*code.co_names}.union(*map(_attribute_names, inner))


def _library(module: str) -> str | None:
    """Returns name and version of an installed module; None for a user's own code."""
    package = module.partition(".")[0]
    top = sys.modules.get(package)
    # A package without __init__.py has only a path.
    paths = [getattr(top, "__file__", None), *getattr(top, "__path__", ())]
    path = next((os.path.abspath(x) for x in paths if x is not None), "")
    is_installed = (
        path.startswith(_LIBRARY_FOLDERS) or package in sys.builtin_module_names
    )
    if package == "__main__" or not (is_installed or package in _OWN_PACKAGES):
        return None
    return f"{module} {getattr(top, '__version__', '')}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
