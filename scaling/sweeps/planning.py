"""Next groups of a sweep, given its records, so that a stopped sweep continues."""

import functools
import math
from collections.abc import Mapping, Sequence

from scaling.sweeps import grid
from scaling.sweeps.folder import RecordRow
from scaling.sweeps.grid import Cell, Lane, RunGroup, RunSetting, SweepConfig
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
    horizons_of: dict[tuple[Architecture, RunSetting], list[int]] = {}
    for model, num_steps, setting in grid.list_cells(config):
        if setting is not None:
            horizons_of.setdefault((model, setting), []).append(num_steps)

    record = functools.partial(_record, config, records, corpus_digest)

    def missing(groups: list[RunGroup]) -> list[RunGroup]:
        return [
            group
            for group in groups
            if any(
                record(cell, lane) is None
                for cell in group.cells
                for lane in group.lanes
            )
        ]

    first = config.seeds[0]
    base = []
    for (model, setting), horizons in horizons_of.items():
        rates = [grid.scaled_rate(config, x, model) for x in config.learning_rates]
        lanes = tuple(Lane(rate, first) for rate in rates)
        base.append(RunGroup(model, lanes, tuple(horizons), setting))
    if missing_groups := missing(base):
        return missing_groups

    def loss_at(cell: Cell, rate: float) -> float:
        run_record = record(cell, Lane(rate, first))
        if run_record is None or run_record["status"] != "done":
            return math.inf
        loss = run_record["loss"]
        return math.inf if loss is None else loss

    best: dict[Cell, float] = {}
    wanted: list[tuple[Cell, float]] = []
    for group in base:
        for cell in group.cells:
            rates = [lane.learning_rate for lane in group.lanes]
            beyond = _beyond(config, cell, rates, loss_at, record)
            if beyond is not None:
                wanted.append((cell, beyond))
            losses = {rate: loss_at(cell, rate) for rate in rates}
            best[cell] = min(losses, key=lambda rate: losses[rate])
    if wanted:
        return _at_rates(wanted, (first,))
    repeated = [
        (cell, rate)
        for cell, rate in best.items()
        if cell.model in config.models[: config.num_repeated]
        and math.isfinite(loss_at(cell, rate))
    ]
    others = config.seeds[1:]
    return missing(_at_rates(repeated, others)) if others else []


def _at_rates(
    chosen: Sequence[tuple[Cell, float]], seeds: Sequence[int]
) -> list[RunGroup]:
    """Returns groups of one rate each, given cells with their rates."""
    horizons_of: dict[tuple[Architecture, RunSetting, float], list[int]] = {}
    for (model, steps, setting), rate in chosen:
        if setting is not None:
            horizons_of.setdefault((model, setting, rate), []).append(steps)
    return [
        RunGroup(
            model, tuple(Lane(rate, seed) for seed in seeds), tuple(horizons), setting
        )
        for (model, setting, rate), horizons in horizons_of.items()
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
        if not all(record(cell, part.lanes[0]) for cell in part.cells)
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
