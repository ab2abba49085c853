"""Compiled programs in files, which are found without tracing them again.

JAX's cache of compiled programs finds a program by its lowered text, so every process
traces and lowers the steps of its engine, half of the seconds of a start. Here the key
is what a program is traced from: the source files, the versions, the processor, JAX's
settings, the static arguments, and the shapes of the arrays.

A program is stored only if its key is sure to be complete. That excludes functions and
types from outside of the project, such as a policy of the user's, a function that was
replaced at run time, source files that changed since the start of the process, meshes,
and accelerators; JAX's cache serves all of these. The files are in the folder of JAX's
cache and are trusted in the same way: whoever can write there can run code here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import os
import pickle
import platform
import sys
import time
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxtyping import Array, PyTree

from jaxkv.files import write_atomically
from jaxkv.serving.compiling import compilation_cache

MAX_PROGRAMS = 64
"""Number of files above which the least recently used ones are deleted."""

TRACED_PACKAGES = "jaxkv", "pallas_kernels"
"""Packages whose functions and types a key describes by name."""
UNTRACED = {
    *("cli", "disaggregation", "plotting", "report", "server", "serving"),
    *("simulation", "verification", "workloads"),
}
"""Parts of `jaxkv` that no program of an engine is traced from; a change of their
source files compiles nothing again."""

type CompiledProgram = Callable[..., PyTree[Array]]
"""A function of the arguments that are not static."""

is_enabled: bool = True
"""False leaves all programs to JAX's own cache."""

_PROGRAM_SUFFIX = ".program"
_START_S = time.time() - 10.0
"""A time before this process read its first source file, in s since the epoch."""
_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "jaxtyping"}
_KNOWN = _LIBRARIES | {*TRACED_PACKAGES} | sys.stdlib_module_names
_BUILT_IN = tuple, list, dict, type(None)
_UNRELATED_SETTINGS = "cache", "log", "traceback", "dump", "distributed"
"""Parts of the names of JAX's settings that change no program."""

_loaded = weakref.WeakValueDictionary[str, jax.stages.Compiled]()
"""Programs in use, by key. Those that no engine uses any more are released: each takes
several hundred memory mappings, of which Linux allows a process 65,530."""


class _IncompleteKey(Exception):
    """A value cannot be described."""


def compile_program(
    function: jax.stages.Wrapped,
    static: Mapping[str, object],
    *args: object,
    **kwargs: object,
) -> CompiledProgram:
    """Compiles a jitted function, or loads it from the folder of compiled programs.

    Args:
      function: the jitted function.
      static: its static arguments.
      *args: its positional arguments.
      **kwargs: its other arguments.

    Returns:
      The function of arguments with the same shapes, without the static ones.
    """
    key = _key(function, static, (args, kwargs))
    if key is None:
        function.lower(*args, **kwargs, **static).compile()
        return functools.partial(function, **static)
    program = _loaded.get(key)
    if program is None:
        path = Path(str(jax.config.jax_compilation_cache_dir), key + _PROGRAM_SUFFIX)
        program = _load(path)
        if program is None:
            lowered = function.lower(*args, **kwargs, **static)
            # What JAX's cache has loaded cannot be serialised again.
            with compilation_cache.without_program_cache():
                program = lowered.compile()
            _store(path, program)
        _loaded[key] = program
    return program


def _load(path: Path) -> jax.stages.Compiled | None:
    """Reads a program; None if the file is missing or unusable."""
    try:
        program = pickle.loads(zlib.decompress(path.read_bytes()))
        os.utime(path)
        device = jax.devices()[:1]
        return serialize_executable.deserialize_and_load(
            *program, execution_devices=device
        )
    except Exception:  # whatever a damaged file raises: it is replaced
        return None


def _store(path: Path, program: jax.stages.Compiled) -> None:
    """Writes a program, and deletes the least recently used ones."""
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        content = zlib.compress(
            pickle.dumps(serialize_executable.serialize(program)), 1
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        stored = sorted(path.parent.glob("*" + _PROGRAM_SUFFIX), key=os.path.getmtime)
        for old in stored[:-MAX_PROGRAMS]:
            old.unlink(missing_ok=True)


def _key(
    function: jax.stages.Wrapped,
    static: Mapping[str, object],
    arguments: object,
) -> str | None:
    """Returns the key of a program; None if it must not be stored."""
    folder = jax.config.jax_compilation_cache_dir
    is_cached = jax.config.values["jax_enable_compilation_cache"]
    if not is_enabled or not folder or "://" in folder or not is_cached:
        return None
    device = jax.devices()[0]
    if device.platform != "cpu":
        return None
    leaves, tree = jax.tree.flatten(arguments)
    try:
        parts = [
            _source_digest(),
            _describe(inspect.unwrap(function)),
            _describe(dict(static)),
            list(_describe_tree(tree)),
            [_describe_array(leaf, device) for leaf in leaves],
            *_module_contents(),
        ]
    except _IncompleteKey:
        return None
    settings = [
        (name, str(getattr(jax.config, name, None)))
        for name in sorted(jax.config.values)
        if not any(part in name for part in _UNRELATED_SETTINGS)
    ]
    parts += [_versions(), settings, os.environ.get("XLA_FLAGS")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Describes the interpreter, the compiler and the processor."""
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((x for x in lines if x.startswith("flags")), "")
    return (
        sys.version,
        *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")),
        platform.machine(),
        processor,
        str(os.cpu_count()),
    )


def _source_digest() -> str:
    """Returns the digest of the source files.

    Raises:
      _IncompleteKey: a file changed after modules were imported, or cannot be read.
    """
    try:
        paths = _source_files()
        if max(os.path.getmtime(path) for path in paths) > _START_S:
            raise _IncompleteKey
        return _digest_files(paths)
    except (OSError, ValueError):
        raise _IncompleteKey from None


@functools.cache
def _source_files() -> tuple[str, ...]:
    """Returns the paths of the files that programs are traced from."""
    paths = []
    for package in TRACED_PACKAGES:
        root = os.path.dirname(str(sys.modules[package].__file__))
        for folder, folders, names in os.walk(root):
            if folder == root:
                folders[:] = [name for name in folders if name not in UNTRACED]
            paths += [f"{folder}/{name}" for name in names if name.endswith(".py")]
    return tuple(sorted(paths))


@functools.cache
def _digest_files(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + Path(path).read_bytes())
    return digest.hexdigest()


def _module_contents() -> Iterator[tuple[str, ...]]:
    """Yields the functions, types and constants of the loaded modules, by name.

    A program is traced from these, which differ from the source files where one was
    replaced at run time.

    Raises:
      _IncompleteKey: a function or type is from outside of the project and libraries.
    """
    for name, module in sorted(sys.modules.items()):
        package, *rest = name.split(".")
        if package not in TRACED_PACKAGES or module is None or {*rest[:1]} & UNTRACED:
            continue
        for attribute, value in sorted(vars(module).items()):
            # A package has an export only once it was asked for.
            is_export = hasattr(module, "__path__") and _is_export(attribute, value)
            if attribute.startswith("__") or is_export:
                continue
            place = f"{name}.{attribute}"
            yield place, *_identify(value)
            if isinstance(value, type) and value.__module__ == name:
                for member, content in sorted(vars(value).items()):
                    if member != "__slotnames__":  # present once it was copied
                        yield f"{place}.{member}", *_identify(content)


def _is_export(attribute: str, value: object) -> bool:
    """True for a function or type that has its own name, and that its module has."""
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    return getattr(home, attribute, None) is value and isinstance(
        value, types.FunctionType | type
    )


def _identify(value: object) -> tuple[str, ...]:
    """Returns the name and place of a function or type, or the value of a constant."""
    parts: tuple[str, ...] = ()
    if isinstance(value, property):
        inner: object = value.fget
        home = "builtins"
    elif isinstance(value, types.FunctionType):
        # Not `__module__`, which `functools.wraps` copies.
        inner = getattr(value, "__wrapped__", None)
        home = value.__globals__["__name__"]
        code = value.__code__
        parts = value.__qualname__, str(code.co_firstlineno), code.co_filename
    elif isinstance(value, type):
        inner = None
        home = value.__module__
        parts = (value.__qualname__,)
    else:
        # Methods of a class, and what `jit` returns.
        inner = getattr(value, "__func__", getattr(value, "__wrapped__", None))
        home = type(value).__module__
        parts = (repr(value),) if _is_plain(value) else ()
    root = home.partition(".")[0]
    is_known = root in _KNOWN or root.startswith("namedtuple_")
    if home == "unittest.mock" or not is_known:
        raise _IncompleteKey
    return home, *parts, *(() if inner is None else _identify(inner))


def _is_plain(value: object) -> bool:
    """True for a constant whose text has no addresses of objects."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _describe_array(leaf: object, device: jax.Device) -> tuple[object, ...]:
    if isinstance(leaf, jax.Array):
        if leaf.sharding.device_set != {device}:
            raise _IncompleteKey
        return leaf.shape, leaf.dtype.name, leaf.weak_type
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype.name, False
    raise _IncompleteKey


def _describe_tree(tree: jax.tree_util.PyTreeDef) -> Iterator[object]:
    """Yields types and static data of the nodes of a tree."""
    node = tree.node_data()
    yield None if node is None else (_describe(node[0]), _describe(node[1]))
    for child in tree.children():
        yield from _describe_tree(child)


def _describe(value: object) -> object:
    """Describes a static value, equally in every process.

    Raises:
      _IncompleteKey: it has, or is, something from outside of the project.
    """
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str | np.dtype):
        if kind.__module__ in ("builtins", "numpy", "numpy.dtypes"):
            return kind.__name__, str(value)
    if isinstance(value, type | types.FunctionType):
        home, name = value.__module__, value.__qualname__
        named = getattr(sys.modules.get(home), name, None)
        # Not a function within a function, since its code hides what it captured.
        is_named = named is not None and inspect.unwrap(named) is inspect.unwrap(value)
        is_known = home.partition(".")[0] in _LIBRARIES | {*TRACED_PACKAGES}
        if value in _BUILT_IN or (is_named and is_known):
            return home, name
        raise _IncompleteKey
    if isinstance(value, functools.partial):
        return "partial", _describe((value.func, value.args, value.keywords))
    if isinstance(value, dict):
        return "dict", [(_describe(k), _describe(v)) for k, v in value.items()]
    if isinstance(value, tuple | list):
        return _describe(kind), [_describe(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _describe(kind), [_describe(getattr(value, name)) for name in names]
    raise _IncompleteKey
