"""Training runs one after another: a log chooses the next cell of a sweep.

The candidates are the cells of a sweep's config, and the state is the sweep's folder
alone: a stopped sequence continues, and trains the same runs as one that was not.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.sweeps import grid, planning
from scaling.sweeps.folder import RecordRow, SweepFolder
from scaling.sweeps.grid import SweepConfig
from scaling.sweeps.sweep import SweepOutcome, run_sweep


class SweepCandidate(NamedTuple):
    """A model and a number of tokens that may be trained next.

    Attributes:
      config: sweep of this model and these tokens alone.
      num_params: all parameters.
      num_tokens: training tokens.
      flops: compute of its runs at all rates of the grid and with all seeds.
    """

    config: SweepConfig
    num_params: int
    num_tokens: int
    flops: float


type ChooseCandidate = Callable[[Sequence[SweepCandidate], float], int | None]
"""Candidates within the budget, the remaining budget -> index of the next."""


@runtime_checkable
class TrainSweep(Protocol):
    """Trains the missing runs of a sweep in its folder, as `run_sweep` does."""

    def __call__(
        self, config: SweepConfig, out: Path, *, progress: Progress
    ) -> SweepOutcome:
        """Returns the outcome; `is_stopped` if `progress` stopped the sweep."""
        ...


def list_candidates(config: SweepConfig) -> list[SweepCandidate]:
    """Lists the models and tokens of a sweep's cells, the cheapest first."""
    candidates = {}
    for model, num_steps, setting in grid.list_cells(config):
        if setting is None:
            continue
        num_tokens = num_steps * setting.batch_size * config.seq_len
        is_repeated = model in config.models[: config.num_repeated]
        alone = dataclasses.replace(
            config,
            models=(model,),
            budgets=(),
            num_tokens=(num_tokens,),
            num_repeated=int(is_repeated),
        )
        cost = grid.count_cost(model, config.seq_len)
        num_runs = len(config.settings) * (
            len(config.learning_rates) + is_repeated * (len(config.seeds) - 1)
        )
        candidates[model, num_tokens] = SweepCandidate(
            alone,
            cost.params.total,
            num_tokens,
            cost.flops_per_token * num_tokens * num_runs,
        )
    return sorted(candidates.values(), key=lambda candidate: candidate.flops)


@validation.checks_numbers(budget="(0, inf)")
def train_in_sequence(
    config: SweepConfig,
    out: Path,
    choose: ChooseCandidate,
    *,
    budget: float,
    train: TrainSweep = run_sweep,
    progress: Progress = QUIET,
) -> Iterator[SweepCandidate]:
    """Trains the candidates that `choose` selects, until the budget is spent.

    A candidate that an earlier call has begun is completed first. Runs at rates beyond
    the grid (`max_extensions`) count once they are trained, so that the last candidate
    may exceed the budget by them.

    Args:
      config: sweep whose cells are the candidates.
      out: folder of the runs.
      choose: chooses the next candidate; None ends the sequence.
      budget: compute of all runs in the folder, in FLOPs, above 0.
      train: trains the runs of one candidate.
      progress: stops the sequence after the run in progress, or within it.

    Yields:
      Each candidate after its runs.

    Raises:
      ValueError: the budget is not above 0, or `train` rejects the config or folder.
    """
    candidates = list_candidates(config)
    while not progress.stopped:
        records, digest = _read_folder(out)
        remaining = budget - sum(row["flops"] for row in records.values())
        begun = []
        untrained = []
        for candidate in candidates:
            num_done, num_missing = _count_runs(candidate.config, records, digest)
            if num_done and num_missing:
                begun.append(candidate)
            elif not num_done and candidate.flops <= remaining:
                untrained.append(candidate)
        if begun:
            candidate = begun[0]
        else:
            place = choose(untrained, remaining) if untrained else None
            if place is None:
                return
            candidate = untrained[place]
        if train(candidate.config, out, progress=progress).is_stopped:
            return
        yield candidate


def _read_folder(out: Path) -> tuple[dict[str, RecordRow], str]:
    """Returns the records and the corpus digest of a folder that may not exist."""
    if not out.exists():
        return {}, ""
    folder = SweepFolder(out)
    try:
        return folder.known, folder.header().get("corpus_digest", "")
    finally:
        folder.close()


def _count_runs(
    config: SweepConfig, records: planning.Known, digest: str
) -> tuple[int, int]:
    """Returns the number of its completed runs, and of groups with a missing one."""
    base = planning.next_groups(config, {}, digest)
    done = [
        grid.run_id(config, grid.train_config(config, cell, lane), digest) in records
        for group in base
        for cell in group.cells
        for lane in group.lanes
    ]
    return sum(done), len(planning.next_groups(config, records, digest))
