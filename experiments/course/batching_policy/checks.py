"""Checks of a batching policy: single plans, and loads in the simulator."""

from types import ModuleType
from typing import Any

PAGE_SIZE = 16
_PROGRAMS: dict[str, Any] = {}


def drive_plan(
    solution: ModuleType,
    running: list[list[int]],
    waiting: list[int],
    free_pages: int,
    token_budget: int,
) -> dict[str, list[int]]:
    """Returns the plan for a state of at most four sequences and four requests."""
    import jax
    import numpy as np

    from jaxkv import Counts

    rows = np.asarray(running + [[0, 0, 0]] * (4 - len(running)), np.int32)
    target_length, length, num_pages = rows.T
    none = np.zeros(4, bool)
    zeros = np.zeros(4, np.int32)
    is_waiting = np.arange(4) < len(waiting)
    waiting_tokens = np.asarray(waiting + [0] * (4 - len(waiting)), np.int32)
    fields: dict[str, Any] = dict(
        running=np.arange(4) < len(running),
        held=none,
        group=None,
        target_length=target_length,
        length=length,
        num_pages=num_pages,
        owned_pages=num_pages,
        owned_tokens=length,
        swap_pages=num_pages,
        copies=zeros,
        preempted=none,
        scored_prompt=none,
        waiting=is_waiting,
        waiting_tokens=waiting_tokens,
        waiting_cached=zeros,
        waiting_slots=is_waiting.astype(np.int32),
        waiting_pages=-(-waiting_tokens // np.int32(PAGE_SIZE)),
        waiting_preempted=none,
        waiting_swapped=none,
        waiting_scored_prompt=none,
        free_pages=np.int32(free_pages),
        free_swap_pages=np.int32(0),
        page_size=np.int32(PAGE_SIZE),
        max_length=np.int32(1024),
        token_budget=np.int32(token_budget),
        spare_logit_rows=np.int32(0),
    )
    if "plan" not in _PROGRAMS:
        _PROGRAMS["plan"] = jax.jit(solution.ContinuousBatching().plan)
    plan = _PROGRAMS["plan"](Counts(**fields))
    names = ("preempt", "places", "num_rows", "admit", "head_places", "head_rows")
    return {
        name: np.asarray(getattr(plan, name)).astype(int).tolist() for name in names
    }


def drive_serve(solution: ModuleType, load: dict, machine: dict) -> dict[str, list]:
    """Serves a load in the simulator, and returns times in s."""
    return simulate_load(solution.ContinuousBatching(), load, machine)


def simulate_load(policy: Any, load: dict, machine: dict) -> dict[str, list]:
    """Simulates a policy: 20 ms a step, 0.1 ms a token, 1 us a token of context."""
    import jax
    import numpy as np

    from jaxkv.simulation import Capacity, read_outcomes, simulate_workload
    from jaxkv.workloads import make_workload

    def step_seconds(work):
        work = jax.tree.map(jax.numpy.float32, work)
        tokens = work.num_decodes + work.num_prompt_rows
        context = work.decode_context + work.prompt_context
        return 0.02 + 1e-4 * tokens + 1e-6 * context

    workload = make_workload(
        *(np.asarray(load[name]) for name in ("arrival_s", "prompt", "output"))
    )
    capacity = Capacity.of(**machine)
    run = jax.jit(
        lambda x: simulate_workload(x, capacity, policy, step_seconds, max_slots=8)
    )
    outcomes = read_outcomes(run(workload), workload, warns=False)
    return {
        "latency_s": np.nan_to_num(outcomes.finish_s - outcomes.arrival_s, nan=-1.0),
        "first_s": np.nan_to_num(outcomes.first_s - outcomes.arrival_s, nan=-1.0),
    }


def check_plans(process: Any, states: list[list[Any]]) -> str:
    """Checks the plans of states against the rules of the statement."""
    for state in states:
        plan = process.call("plan", *state)
        if violation := _violation(plan, *state):
            running, waiting, free_pages, token_budget = state
            return (
                f"With running sequences (target_length, length, num_pages) {running}, "
                f"waiting_tokens {waiting}, {free_pages} free pages of {PAGE_SIZE} "
                f"tokens, a budget of {token_budget} tokens and 4 slots, {violation}"
            )
    return ""


def _violation(
    plan: dict[str, list[int]],
    running: list[list[int]],
    waiting: list[int],
    free_pages: int,
    token_budget: int,
) -> str:
    num_tokens = sum(plan["num_rows"]) + sum(plan["head_rows"])
    if num_tokens > token_budget:
        return f"the plan feeds {num_tokens} tokens, more than the budget"
    growth = [max(_pages(target) - held, 0) for target, _, held in running]
    total = free_pages + sum(held for *_, held in running)
    wanted = [held + new for (*_, held), new in zip(running, growth, strict=True)]
    num_fit = 0
    while num_fit < len(running) and sum(wanted[: num_fit + 1]) <= total:
        num_fit += 1
    preempted = [i for i in range(len(running)) if plan["preempt"][i]]
    if preempted != [*range(num_fit, len(running))]:
        return (
            f"slots {preempted} are preempted, but the sequences need {wanted} of "
            f"{total} pages: preempt the fewest, those admitted last, "
            f"{[*range(num_fit, len(running))]}"
        )
    for i, (target, length, _) in enumerate(running[:num_fit]):
        if target - length == 1 and plan["num_rows"][i] != 1:
            return (
                f"slot {i} decodes and is fed {plan['num_rows'][i]} tokens: a prompt "
                "must not stall sequences that decode"
            )
        if plan["num_rows"][i] and plan["places"][i] < target:
            return f"slot {i} reserves {plan['places'][i]} places for {target} tokens"
    free = total - sum(wanted[:num_fit])
    left = token_budget - sum(plan["num_rows"])
    can_admit = not preempted
    for i, tokens in enumerate(waiting):
        admits = bool(plan["admit"][i])
        why = f"{_pages(tokens)} pages are needed, {free} are free, {left} tokens left"
        slots = num_fit + i < len(plan["num_rows"])
        fits = can_admit and left > 0 and slots and _pages(tokens) <= free
        if admits and not fits:
            return (
                f"waiting request {i} is admitted, but it or an earlier one does not "
                f"fit ({why}): admission is in order, and stops at the first that waits"
            )
        if fits and not admits:
            return (
                f"waiting request {i} is not admitted, though it fits ({why}): "
                "continuous batching admits at every step, not between batches"
            )
        can_admit = admits
        if admits:
            free -= _pages(tokens)
            left -= plan["head_rows"][i]
    need = sum(target - length for target, length, _ in running[:num_fit])
    need += sum(tokens for tokens, x in zip(waiting, plan["admit"]) if x)  # noqa: B905
    if num_tokens < min(need, token_budget):
        return f"{num_tokens} tokens are fed, though {need} could be"
    return ""


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def check_load(
    process: Any, load: dict, machine: dict, limits_s: dict[str, float]
) -> str:
    """Serves a load, and compares mean latencies with limits."""
    times = process.call("serve", load, machine)
    unserved = [i for i, x in enumerate(times["latency_s"]) if x < 0]
    if unserved:
        return (
            f"requests {unserved} are never served: the policy stalls or starves them"
        )
    for name, limit_s in limits_s.items():
        mean_s = sum(times[name]) / len(times[name])
        if mean_s > limit_s:
            return (
                f"the mean {name} of {len(times[name])} requests is {mean_s:.2f} s; "
                f"first come, first served with continuous batching has "
                f"{limit_s / 1.1:.2f} s, and 10 % more is allowed"
            )
    return ""
