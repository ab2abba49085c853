"""Lazy exports of a package: its objects are imported on first use.

A package lists its public objects once, as imports for type checkers:

    if TYPE_CHECKING:
        from jaxkv.memory.page_pool import NO_PAGE, Pool

    __all__, __getattr__, __dir__ = lazy_exports(__name__)

So importing the package costs little, and a type checker, a reader and Python see the
same list. Sub-packages that are listed as `from scaling import fits as fits` are
attributes and not in `__all__`. `scientific-python.org/specs/spec-0001` describes the
method.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def read_exports(path: Path) -> dict[str, str]:
    """Returns the names imported under `if TYPE_CHECKING:`, with their modules.

    Args:
      path: the `__init__.py` of a package.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = (
        statement
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    )
    return {
        alias.name: statement.module
        for statement in guarded
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }


def lazy_exports(
    package: str,
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
      package: name of the package, whose module is being imported.
    """
    module = sys.modules[package]
    assert module.__file__ is not None
    homes = read_exports(Path(module.__file__))

    def get_export(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    names = sorted(name for name, home in homes.items() if home != package)
    return names, get_export, lambda: sorted(homes)
