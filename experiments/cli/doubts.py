"""Why a record is unverified, as far as its `env.json` says."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from experiments import framework

SLOW_YARDSTICK = 1.1
"""Largest time of the fixed product, over its best on the processor, for times that
count."""
type BestTimes = Mapping[tuple[str, int], float]
"""Shortest time of the fixed product in s by processor and cores."""


def best_yardsticks(envs: Iterable[Mapping[str, Any]]) -> BestTimes:
    """Returns the shortest times of the fixed product in all records."""
    best: dict[tuple[str, int], float] = {}
    for env in envs:
        machine = env["cpu"], env["num_cpus"]
        times = env.get("yardstick_s", [])
        best[machine] = min([best.get(machine, math.inf), *times])
    return best


def is_timed(experiment: str, config: str) -> bool:
    """Returns whether the numbers of a config are times; "" is an unknown config."""
    timed = framework.find_entry(experiment).timed
    return config in timed if config else bool(timed)


def find_doubt(env: Mapping[str, Any], has_times: bool, best: BestTimes) -> str:
    """Returns why a record is unverified, or "".

    Args:
      env: its `env.json`.
      has_times: True if its numbers are times of its machine.
      best: `best_yardsticks` of all records.
    """
    if env["commit"].endswith("+"):
        return "dirty tree"
    if not has_times:
        return ""
    times = env.get("yardstick_s")
    if not times:
        return "no yardstick"
    excess = max(times) / best[env["cpu"], env["num_cpus"]]
    return f"yardstick {excess:.2f} of its best" if excess > SLOW_YARDSTICK else ""
