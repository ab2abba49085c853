"""Which public runs are fitted and which are scored, and simulated tables."""

import csv
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scaling import forecasts
from scaling.logs import LADDER_TASKS, RunSize, parse_rule

LADDER = "olmo_ladder_final.csv"
DENSE = "steplaw_dense.csv"
MIXTURES = "steplaw_moe.csv"
_RULE_NAMES = ("N", "D")


class Split(NamedTuple):
    """Which runs of a table are fitted, and which are scored.

    Attributes:
      name: scored and fitted runs in words.
      table: file name of the table.
      held_out: rule for the runs that are not fitted.
      scored_rule: rule for the runs that are scored; by default `held_out`.
      remark: choices that were made with the scored runs in sight, a sentence.
    """

    name: str
    table: str
    held_out: str
    scored_rule: str = ""
    remark: str = "The form was chosen on runs up to 1B."

    def divide(self, sizes: Iterable[RunSize]) -> tuple[np.ndarray, np.ndarray]:
        """Returns masks of fitted and scored runs."""
        rules = (self.held_out, self.scored_rule or self.held_out)
        tests = [parse_rule(rule, _RULE_NAMES) for rule in rules]
        marks = [
            [test(dict(zip(_RULE_NAMES, size, strict=True))) for test in tests]
            for size in sizes
        ]
        is_held_out, is_scored = np.array(marks, bool).T
        return ~is_held_out, is_scored


ALL_SIZES = "7B and 13B from 190M to 3B"
"""Split whose scored runs are not in the table."""
TWO_SIZES = "3B from 190M and 370M"
"""Split whose fit has no rehearsal."""
_CHOSEN = "The form was chosen on this split."
_SEEN = (
    "The valley was chosen on the 429M cells, after this split had been seen once with "
    "a quadratic valley."
)
_MOST_TOKENS = "D == 1e11 or D == 8e10 or D == 5e10"
SPLITS = (
    Split("1B from 190M to 760M", LADDER, "N > 9e8", "N > 9e8 and N < 2e9", _CHOSEN),
    Split("3B from 190M to 1B", LADDER, "N > 2e9"),
    Split(TWO_SIZES, LADDER, "N > 4.5e8", "N > 2e9"),
    Split(ALL_SIZES, LADDER, "N > 5e9"),
    Split("dense 429M from 268M", DENSE, "N > 3e8", "N > 3e8 and N < 5e8", _CHOSEN),
    Split("dense 537M from 429M", DENSE, "N > 5e8", remark=_SEEN),
    Split("dense, most tokens from fewer", DENSE, _MOST_TOKENS, remark=_SEEN),
    Split("mixtures, 8B tokens from 4B", MIXTURES, "D > 4e9", remark=_SEEN),
)


def digest_rows(fitted: Sequence[str], scored: Sequence[str]) -> str:
    """Returns the SHA-256 of the names of fitted and scored runs."""
    lines = [f"fitted\t{x}" for x in fitted] + [f"scored\t{x}" for x in scored]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def simulate_tables(folder: Path) -> None:
    """Writes tables in the form of the public ones."""
    rng = np.random.default_rng(0)
    ladder = []
    sizes = {"190M": 1.9e8, "370M": 3.7e8, "760M": 7.6e8, "1B": 1e9, "3B": 3e9}
    for (size, n), multiple in itertools.product(sizes.items(), (0.5, 1, 2, 5, 10)):
        row: dict[str, object] = {"run": f"{size}-{multiple}xC"}
        for i, task in enumerate(LADDER_TASKS.values()):
            noise = np.exp(rng.normal(0, 0.01, 2))
            loss = 0.5 + 0.05 * i + 40 * n**-0.25 + 90 * (20 * n * multiple) ** -0.25
            rise = (1 - task.chance) / (1 + np.exp(6 * (loss - 0.9)))
            row |= dict.fromkeys(task.loss, loss * noise[0])
            row |= dict.fromkeys(task.accuracy, (task.chance + rise) * noise[1])
        ladder.append(row)
    dense = itertools.product((2.1e8, 2.7e8, 4.3e8, 5.4e8), (1e10, 2e10, 4e10, 5e10))
    mixtures = itertools.product((1.9e8, 5.9e8, 1.2e9), (2e9, 4e9, 8e9))
    tables = {LADDER: ladder, DENSE: [], MIXTURES: []}
    for name, cells in ((DENSE, dense), (MIXTURES, mixtures)):
        for size in itertools.starmap(RunSize, cells):
            floor = 1.7 + 400 / size.num_params**0.34 + 400 / size.num_tokens**0.28
            best = forecasts.STEP_LAW_RATE.value(size)
            middle = forecasts.STEP_LAW_BATCH.value(size) / 2048
            for u, v in itertools.product(np.linspace(-1.5, 1.5, 7), repeat=2):
                excess = (0.09 * u) ** 2 + (0.07 * v) ** 2 + rng.normal(0, 3e-4)
                rate, batch = best * np.exp(u + 0.1), middle * np.exp(v)
                row = {"N": size.num_params, "D": size.num_tokens, "lr": rate}
                row |= {"bs": batch, "loss": floor * np.exp(excess)}
                tables[name].append(row)
    for name, rows in tables.items():
        with (folder / name).open("w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]])
            table.writeheader()
            table.writerows(rows)
