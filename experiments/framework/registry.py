"""Registry of all experiments, readable without importing them.

The entries are in `registry.toml`, one line each; `study` describes the modules.
"""

import functools
import importlib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from experiments.framework import config_json

if TYPE_CHECKING:
    from experiments.framework.study import Experiment


SMOKE = "smoke"
"""Name of the config whose runs are too small for claims about published sizes."""


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
    found = []
    for room, experiments in rooms.items():
        for name, fields in experiments.items():
            module = f"experiments.{room}.{name.removeprefix(f'{room}_')}.experiment"
            found.append(
                RegistryEntry(name, fields["question"], (*fields["configs"],), module)
            )
    return (*sorted(found),)


def find_entry(name: str) -> RegistryEntry:
    """Returns the entry of an experiment; hyphens in the name match underscores.

    Raises:
      ValueError: no experiment has this name; the message lists similar names.
    """
    known = {entry.name: entry for entry in entries()}
    entry = known.get(name.replace("-", "_"))
    if entry is None:
        raise ValueError(config_json.format_unknown_name("experiment", name, known))
    return entry


def load_experiment(name: str) -> "Experiment":
    """Imports an experiment by name, as `find_entry` accepts it."""
    from experiments.framework import study

    entry = find_entry(name)
    studies = study.studies_of(importlib.import_module(entry.module))
    return study.Experiment(entry.name, entry.question, studies)
