"""Next groups of a sweep, given its records, so that a stopped sweep continues."""

import functools
import math
from collections.abc import Mapping, Sequence

from scaling.sweeps import grid
from scaling.sweeps.folder import RecordRow
from scaling.sweeps.grid import Cell, Lane, RunGroup, SweepConfig
from scaling.training import Architecture

type Known = Mapping[str, RecordRow]
"""Existing records by run_id."""


def next_groups(
    config: SweepConfig, records: Known, corpus_digest: str
) -> list[RunGroup]:
    """Returns the next groups to run, given the records; empty if all is done.

    First every cell at every rate; then, for cells whose best rate is at the grid's
    edge, rates beyond it; then further seeds. A failed or diverged run counts as done.

    Args:
      config: the sweep.
      records: records so far, in any order.
      corpus_digest: digest of the corpus.

    Returns:
      Groups with a missing run. The groups and their lanes depend on earlier stages
      only, so a partial group is repeated unchanged.
    """
    by_model: dict[Architecture, list[int]] = {}
    for model, num_steps in grid.list_cells(config):
        by_model.setdefault(model, []).append(num_steps)

    record = functools.partial(_record, config, records, corpus_digest)

    def missing(groups: list[RunGroup]) -> list[RunGroup]:
        return [
            group
            for group in groups
            if any(
                record(Cell(group.model, steps), lane) is None
                for steps in group.horizons
                for lane in group.lanes
            )
        ]

    first = config.seeds[0]
    base = []
    for model, horizons in by_model.items():
        rates = [grid.scaled_rate(config, x, model) for x in config.learning_rates]
        lanes = tuple(Lane(rate, first) for rate in rates)
        base.append(RunGroup(model, lanes, tuple(horizons)))
    if missing_groups := missing(base):
        return missing_groups

    def loss_at(cell: Cell, rate: float) -> float:
        run_record = record(cell, Lane(rate, first))
        if run_record is None or run_record["status"] != "done":
            return math.inf
        loss = run_record["loss"]
        return math.inf if loss is None else loss

    best: dict[Cell, float] = {}
    wanted: dict[tuple[Architecture, float], list[int]] = {}
    for group in base:
        for steps in group.horizons:
            cell = Cell(group.model, steps)
            rates = [lane.learning_rate for lane in group.lanes]
            beyond = _beyond(config, cell, rates, loss_at, record)
            if beyond is not None:
                wanted.setdefault((group.model, beyond), []).append(steps)
            losses = {rate: loss_at(cell, rate) for rate in rates}
            best[cell] = min(losses, key=lambda rate: losses[rate])
    if wanted:
        return _at_rates(wanted, (first,))
    repeated: dict[tuple[Architecture, float], list[int]] = {}
    for model in config.models[: config.num_repeated]:
        for steps in by_model.get(model, []):
            if math.isfinite(loss_at(Cell(model, steps), best[Cell(model, steps)])):
                repeated.setdefault((model, best[Cell(model, steps)]), []).append(steps)
    others = config.seeds[1:]
    return missing(_at_rates(repeated, others)) if others else []


def _at_rates(
    steps: Mapping[tuple[Architecture, float], list[int]], seeds: Sequence[int]
) -> list[RunGroup]:
    """Returns groups of one rate each, given step counts by model and rate."""
    return [
        RunGroup(model, tuple(Lane(rate, seed) for seed in seeds), tuple(horizons))
        for (model, rate), horizons in steps.items()
    ]


def unfinished(
    config: SweepConfig, groups: list[RunGroup], records: Known, corpus_digest: str
) -> list[RunGroup]:
    """Splits groups into lanes, and drops completed ones.

    For sequential runs only: in a vmapped program, removing a lane may change the
    rounding of sums.
    """
    parts = [group._replace(lanes=(x,)) for group in groups for x in group.lanes]

    record = functools.partial(_record, config, records, corpus_digest)
    return [
        part
        for part in parts
        if not all(record(Cell(part.model, n), part.lanes[0]) for n in part.horizons)
    ]


def _record(
    config: SweepConfig, records: Known, corpus_digest: str, cell: Cell, lane: Lane
) -> RecordRow | None:
    """Returns the record of a run, if it exists."""
    run = grid.train_config(config, cell, lane)
    return records.get(grid.run_id(config, run, corpus_digest))


def _beyond(config, cell, rates, loss_at, record) -> float | None:
    """Extends a cell's rates in place; returns the next rate to try, if any.

    If no rate gave a loss, smaller ones are tried.
    """
    if len(config.learning_rates) < 2:
        return None
    ratio = config.learning_rates[1] / config.learning_rates[0]
    first = config.seeds[0]
    for _ in range(config.max_extensions):
        losses = [loss_at(cell, rate) for rate in rates]
        at = losses.index(min(losses))
        if at == 0:
            new = float(f"{rates[0] / ratio:.6g}")
            rates.insert(0, new)
        elif at == len(rates) - 1:
            new = float(f"{rates[-1] * ratio:.6g}")
            rates.append(new)
        else:
            return None
        if record(cell, Lane(new, first)) is None:
            rates.remove(new)
            return new
    return None
