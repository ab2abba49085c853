"""The shipped records, their age in commits, and why one is unverified."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from experiments import framework
from experiments.cli.doubts import BestTimes, find_doubt, is_timed
from experiments.cli.results_page import RECORDS
from jaxkv import files

CODE = ("--", ":/", ":(top,exclude)experiments/records")
"""Paths for git: all files but the records, which a record does not make stale."""


class Record(NamedTuple):
    """A shipped record and its state.

    Attributes:
      name: name of its folder.
      env: its `env.json`.
      is_timed: True if its numbers are times of this machine.
      age: number of commits since the record's; None if the history lacks its commit.
    """

    name: str
    env: dict[str, Any]
    is_timed: bool
    age: int | None

    def doubt(self, best: BestTimes) -> str:
        """Returns why the record is unverified, or ""; `best` as in `find_doubt`."""
        if self.age is None and not self.env["commit"].endswith("+"):
            return "unknown commit"
        return find_doubt(self.env, self.is_timed, best)


def list_records() -> list[Record]:
    """Returns the shipped records, in order of their names.

    Raises:
      ValueError: the records are not there, or not in a git checkout.
    """
    paths = sorted(RECORDS.glob("*/env.json"))
    if not paths:
        raise ValueError(
            "records are in the repository, not in the installed package; "
            "run the command in a checkout"
        )
    records = []
    for path in paths:
        env = files.read_json(path)
        name = env.get("config", "")
        if not name and is_timed(env["experiment"], ""):
            # Made by an earlier version, or from a file.
            name = config_name(path.parent, env["experiment"])
        age = git("rev-list", "--count", f"{env['commit'].rstrip('+')}..HEAD")
        has_times = is_timed(env["experiment"], name)
        records.append(
            Record(path.parent.name, env, has_times, None if age is None else int(age))
        )
    return records


def config_name(folder: Path, experiment: str) -> str:
    """Returns the name of the shipped config that a record has, or ""."""
    study = framework.load_experiment(experiment)
    path = folder / "config.json"
    config = study.config_loads(files.read_text(path), str(path))
    return study.study_of(config).name_of(config)


def git(*args: str) -> str | None:
    """Returns the output of a git command in the repository; None if it fails."""
    command = ["git", "-C", str(RECORDS), *args]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None
