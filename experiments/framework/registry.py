"""The experiments there are, found without importing them.

They stand in `registry.toml`, a line each; a module is as `study` says.
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
"""The config whose runs are too small for claims about published sizes."""


class RegistryEntry(NamedTuple):
    """What is known of an experiment before it is imported.

    Attributes:
      name: as the command line has it.
      question: in a line.
      configs: the names of its configs, the default first.
      module: where its studies are.
    """

    name: str
    question: str
    configs: tuple[str, ...]
    module: str


@functools.cache
def entries() -> tuple[RegistryEntry, ...]:
    """The experiments there are, sorted by name."""
    rooms = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    found = []
    for room, experiments in rooms.items():
        for name, said in experiments.items():
            module = f"experiments.{room}.{name.removeprefix(f'{room}_')}.experiment"
            found.append(
                RegistryEntry(name, said["question"], (*said["configs"],), module)
            )
    return (*sorted(found),)


def find_entry(name: str) -> RegistryEntry:
    """The entry of an experiment; hyphens in its name may stand for underscores.

    Raises:
      ValueError: there is no such experiment; the line gives the nearest names.
    """
    known = {entry.name: entry for entry in entries()}
    entry = known.get(name.replace("-", "_"))
    if entry is None:
        raise ValueError(config_json.unknown("experiment", name, known))
    return entry


def load_experiment(name: str) -> "Experiment":
    """Imports an experiment; its name is as `find` takes it."""
    from experiments.framework import study

    entry = find_entry(name)
    studies = study.studies_of(importlib.import_module(entry.module))
    return study.Experiment(entry.name, entry.question, studies)
