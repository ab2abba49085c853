"""Registry of all experiments, readable without importing them.

The entries are in `registry.toml`, one line each. The module of an experiment is its
only study, or lists its studies: `STUDIES = (measured, simulated)`. A study is a module
with the names that `Study` lists: `CONFIGS`, `run(config, progress)` with an annotated
return type, `plot(axes, result)`, and optionally `claims`, `metrics`, `summary`,
`files`, `prepare`, `PANELS`, `PANEL_SIZE_INCHES` and `SWITCH`.
"""

import functools
import importlib
import tomllib
import typing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxkv.validation import format_unknown_name

if TYPE_CHECKING:
    from types import ModuleType, SimpleNamespace

    from jaxkv.report import Experiment, Study


class RegistryEntry(NamedTuple):
    """Data of an experiment that is known before it is imported.

    Attributes:
      name: name on the command line.
      question: research question, one line.
      configs: names of its configs, the default first.
      module: module with its studies.
    """

    name: str
    question: str
    configs: tuple[str, ...]
    module: str


@functools.cache
def entries() -> tuple[RegistryEntry, ...]:
    """Returns all experiments, sorted by name."""
    rooms = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    catalog = []
    for room, experiments in rooms.items():
        for name, fields in experiments.items():
            module = f"experiments.{room}.{name.removeprefix(f'{room}_')}.experiment"
            catalog.append(
                RegistryEntry(name, fields["question"], (*fields["configs"],), module)
            )
    return (*sorted(catalog),)


def find_entry(name: str) -> RegistryEntry:
    """Returns the entry of an experiment; hyphens in the name match underscores.

    Raises:
      ValueError: no experiment has this name; the message lists similar names.
    """
    entry_by_name = {entry.name: entry for entry in entries()}
    entry = entry_by_name.get(name.replace("-", "_"))
    if entry is None:
        raise ValueError(format_unknown_name("experiment", name, entry_by_name))
    return entry


def load_experiment(name: str) -> "Experiment":
    """Imports an experiment by name, as `find_entry` accepts it."""
    from jaxkv.report import Experiment

    entry = find_entry(name)
    studies = studies_of(importlib.import_module(entry.module))
    return Experiment(entry.name, entry.question, studies)


def studies_of(module: "ModuleType | SimpleNamespace") -> "tuple[Study, ...]":
    """Returns the studies that a module lists, or the module as the only study."""
    from jaxkv.report import Study

    listed = getattr(module, "STUDIES", [module])
    return tuple(x if isinstance(x, Study) else _of_functions(x) for x in listed)


def _of_functions(module: "ModuleType | SimpleNamespace") -> "Study":
    from jaxkv.report import Study

    functions = ("plot", "claims", "metrics", "summary", "files", "prepare")
    values = ("CONFIGS", "PANELS", "PANEL_SIZE_INCHES", "SWITCH")
    # An imported module may share its name with a function, such as `files`.
    attributes = {x: f for x in functions if callable(f := getattr(module, x, None))}
    attributes |= {x.lower(): getattr(module, x) for x in values if hasattr(module, x)}
    result = typing.get_type_hints(module.run)["return"]
    return Study(result=result, run=module.run, **attributes)
