"""Registry of all experiments, readable without importing them.

The entries are in `registry.toml`, one line each. The module of an experiment holds its
`jaxkv.report.Study` as `STUDY`, or several as a tuple, `STUDIES`.
"""

import functools
import importlib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxkv.validation import format_unknown_name

if TYPE_CHECKING:
    from jaxkv.report import Experiment


class RegistryEntry(NamedTuple):
    """Data of an experiment that is known before it is imported.

    Attributes:
      name: name on the command line.
      question: research question, one line.
      configs: names of its configs, the default first.
      module: module with its studies.
      timed: names of the configs whose results are times of the machine.
    """

    name: str
    question: str
    configs: tuple[str, ...]
    module: str
    timed: tuple[str, ...] = ()


@functools.cache
def entries() -> tuple[RegistryEntry, ...]:
    """Returns all experiments, sorted by name."""
    rooms = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    catalog = []
    for room, experiments in rooms.items():
        for name, fields in experiments.items():
            module = f"experiments.{room}.{name.removeprefix(f'{room}_')}.experiment"
            configs, timed = (tuple(fields.get(x, ())) for x in ("configs", "timed"))
            catalog.append(
                RegistryEntry(name, fields["question"], configs, module, timed)
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
    names = vars(importlib.import_module(entry.module))
    studies = names["STUDIES"] if "STUDIES" in names else (names["STUDY"],)
    return Experiment(entry.name, entry.question, studies)
