"""Continues one state of a loaded engine under 64 policies, with real tokens.

A branch has an order of the queue, a rule for victims, a prefill chunk, an eviction
rule of the prefix cache, and a drafter or none. All branches of a seed begin with the
same arrays and get the same later requests, so their differences are those of the
decisions. The regret of a branch is the difference of its metric to that of the branch
with the lowest mean.
"""

from collections.abc import Iterator

from experiments import lab
from experiments.decisions.counterfactual import branches, costs, drawing
from experiments.decisions.counterfactual.branches import BranchTable
from experiments.decisions.counterfactual.costs import CostTable

CONFIGS = {
    "smoke": branches.Config(
        num_sessions=3,
        num_seeds=2,
        num_before=8,
        num_calls=48,
        levels_ms=(1, 3000),
        chunks=(32,),
        victims=("latest",),
        evictions=("LRU",),
        drafters=("none",),
        max_slots=3,
        num_pages=24,
        num_timed=4,
        batch_sizes=(4,),
        num_simulated=16,
        num_rounds=1,
    ),
    "real": branches.Config(),
}


class Result(lab.ResultRecord):
    """Metrics of all branches, and the cost of branches."""

    branches: BranchTable = lab.column("by branch and seed", heading="branches")
    costs: CostTable = lab.column("of branches and of separate runs", heading="costs")
    num_arrays: int = lab.column("arrays of a state and of its step infos")
    num_different: int = lab.column(
        "arrays in which the branch with the unchanged policy differs from the engine"
    )
    num_answers: int = lab.column("answers complete in two branches of the same seed")
    num_other_answers: int = lab.column(
        "such answers with other tokens than in the branch with the unchanged policy"
    )


def run(config: branches.Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Continues the states of all seeds, then measures time and memory."""
    setting = branches.BranchSetting(config)
    rows, comparison = branches.continue_all(setting, progress)
    table = BranchTable.of(rows)
    return Result(table, costs.measure_costs(setting, progress), *comparison)


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Checks that a branch is a continuation, and compares costs."""
    yield lab.measured("unchanged", float(result.num_different))
    table = result.costs
    for id, name in (("time", costs.MAPPED), ("simulator", costs.SIMULATED)):
        if len(row := table.where(name=name)):
            yield lab.measured(id, float(row.ratio[0]))
    if len(row := table.where(name=costs.MAPPED)):
        yield lab.measured("memory", float(row.temporary_bytes[0] / row.state_bytes[0]))


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    lambda axes, result: drawing.plot(axes, result.branches),
    claims,
    summary=lambda result: drawing.summary(result, result.branches),
    panels=lab.Panels(2, 1, 3.4),
)
