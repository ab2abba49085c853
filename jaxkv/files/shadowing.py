"""Names a user's file that hides a package of this project from `import`.

A script finds `scaling.py` or `experiments/` in its own folder before the packages of
the same name. Its imports of such a package then end in one line that names the file.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

SHADOWED_PACKAGES = ("scaling", "experiments")
"""Packages next to `jaxkv` with names that a user may have chosen, too."""
HOME = Path(__file__).parents[2]
"""Folder that contains the packages."""


class HiddenPackage:
    """Import hook for a package that a file of the user hides.

    The file itself is imported as usual; an import of a sub-module that it lacks, such
    as `scaling.costs`, raises an ImportError.
    """

    def __init__(self, name: str, spec: ModuleSpec):
        self.name = name
        places = spec.submodule_search_locations
        self.place = spec.origin or (next(iter(places)) if places else "a folder")

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Finds the user's file, and refuses the sub-modules that it lacks."""
        if name == self.name:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.submodule_search_locations is None:
                spec.submodule_search_locations = []  # else Python refuses `name.x`
            return spec
        if not name.startswith(f"{self.name}."):
            return None
        spec = PathFinder.find_spec(name, path)
        home = HOME.joinpath(*name.split("."))
        if spec is None and (home.is_dir() or home.with_suffix(".py").is_file()):
            raise ImportError(
                f"{self.place} hides the package `{self.name}` of jaxkv: rename it, or "
                "run the script from another folder",
                name=name,
            )
        return spec


def watch_packages() -> None:
    """Installs a `HiddenPackage` for each package that another file hides."""
    for name in SHADOWED_PACKAGES:
        spec = None if name in sys.modules else PathFinder.find_spec(name)
        if spec is None or not (HOME / name / "__init__.py").exists():
            continue
        if spec.origin != str(HOME / name / "__init__.py"):
            sys.meta_path.insert(0, HiddenPackage(name, spec))


class InstalledPackages:
    """Import hook that finds `SHADOWED_PACKAGES` next to `jaxkv` before other folders.

    The command line installs it: with `PYTHONPATH=.` or `python -m`, a `scaling.py` in
    the working folder would otherwise replace a package that a command needs.
    """

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Finds a package of the project; None for any other module."""
        return (
            PathFinder.find_spec(name, [str(HOME)])
            if name in SHADOWED_PACKAGES
            else None
        )
