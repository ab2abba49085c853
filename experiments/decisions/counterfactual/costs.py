"""Time and memory of branches, of separate runs, and of mapped simulations."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import lab
from experiments.decisions.counterfactual.branches import BranchSetting, Decision
from jaxkv import simulation
from jaxkv.simulation import Capacity, SimulationMember, Work
from jaxkv.workloads import make_workload

NUM_CALLS = 16
"""Steps of each timed branch."""
SEPARATE = "separate runs, call by call"
MAPPED = "branches, one after another"
BATCHED = "branches, {} at the same time"
SIMULATED = "simulations, mapped"


class CostTable(lab.ResultTable):
    """Costs of many branches, compared with one run."""

    name: lab.Texts = lab.column("way to run them", heading="runs")
    num: lab.Ints = lab.column("branches")
    duration_s: lab.Floats = lab.column("time of all, median of the rounds")
    ratio: lab.Floats = lab.column(
        "time over that of as many separate runs; for simulations, over that of one"
    )
    temporary_bytes: lab.Floats = lab.column("memory of the program besides results")
    output_bytes: lab.Floats = lab.column("memory of the results, pages included")
    state_bytes: lab.Floats = lab.column("memory of one state")


def measure_costs(setting: BranchSetting, progress: lab.Progress) -> CostTable:
    """Times branches with their pages, in turns with separate runs and simulations."""
    num = setting.config.num_timed
    if progress.stopped:
        return CostTable.of([])
    state, now, _ = setting.snapshot(0)
    params = setting.model.params
    choices = setting.decisions
    policies = [choices[i % len(choices)].policy for i in range(num)]
    rules = [setting.first.rule] * num
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    calls: dict[str, Callable[[], object]] = {
        SEPARATE: lambda: setting.go_on(state, now, NUM_CALLS)[0]
    }
    memory = {SEPARATE: (float("nan"), float(num * state_bytes))}
    sizes = {MAPPED: 1} | {
        BATCHED.format(size): size
        for size in setting.config.batch_sizes
        if 1 < size <= num
    }
    for name, size in sizes.items():
        progress.show(f"compiling {name}")
        program = setting.branches(
            setting.run, num_calls=NUM_CALLS, batch_size=size, keep_pages=True
        )
        jitted = jax.jit(program).lower(
            params, state, now, policies=policies, evictions=rules
        )
        compiled = jitted.compile()
        calls[name] = functools.partial(
            compiled, params, state, now, policies=policies, evictions=rules
        )
        usage: Any = compiled.memory_analysis()
        memory[name] = usage.temp_size_in_bytes, usage.output_size_in_bytes
    one, many = (_simulation(setting, n) for n in (1, num))
    calls |= {"one simulation": one, SIMULATED: many}
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in progress.track(range(setting.config.num_rounds), "timing", "rounds"):
        for name, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begun)
    if not seconds[SEPARATE]:
        return CostTable.of([])
    median = {name: statistics.median(x) for name, x in seconds.items()}
    rows = []
    for name, (temporary, output) in memory.items():
        total = median[name] * (num if name == SEPARATE else 1)
        ratio = total / (num * median[SEPARATE])
        rows.append((name, num, total, ratio, temporary, output, state_bytes))
    ratio = median[SIMULATED] / median["one simulation"]
    unknown = [float("nan")] * 3
    rows.append((SIMULATED, num, median[SIMULATED], ratio, *unknown))
    return CostTable.of(rows)


def _simulation(setting: BranchSetting, num: int) -> Callable[[], object]:
    """Returns a call that simulates the load of the experiment under `num` policies."""
    c = setting.config
    rng = np.random.default_rng(0)
    size = c.num_simulated
    low, high = np.log(c.output_tokens)
    workload = make_workload(
        np.cumsum(rng.exponential(1 / c.rate, size)),
        rng.integers(c.first_tokens, c.longest_prompt + 1, size),
        np.exp(rng.uniform(low, high, size)).round().astype(int),
    )
    capacity = Capacity.of(
        num_pages=c.num_pages, max_length=c.max_length, token_budget=c.token_budget
    )
    choices: list[Decision] = setting.decisions
    members = simulation.stack(
        [
            SimulationMember(
                workload, capacity, choices[i % len(choices)].policy, _step_seconds
            )
            for i in range(num)
        ]
    )
    return lambda: simulation.simulate(members, max_slots=c.max_slots, head=16).finish_s


def _step_seconds(work: Work) -> jax.Array:
    rows = work.num_decodes + work.num_prompt_rows
    return 0.02 + 0.0005 * rows.astype("float32")
