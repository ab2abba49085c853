"""Serves agent jobs under several orders of the queue.

Token metrics average over requests, job metrics over jobs. In a chain of turns both
rank orders equally: the latency of a job is the sum of the latencies of its requests,
plus tool time. A job that waits for several sub-agents has the latency of the last one,
so an order can give earlier first tokens and later jobs.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments import lab
from experiments.servers.agents.load import AgentLoad, AgentTraffic, draw_agents
from jaxkv import scheduling, simulation
from jaxkv.simulation import Capacity, SimulationMember
from jaxkv.workloads import (
    Workload,
    find_jobs,
    normalised_latency_s,
    time_to_first_token_s,
)
from scaling import shapes
from scaling.calibration import (
    PRIOR,
    draw_coefficients,
    make_server_cost,
    num_kv_blocks,
)
from scaling.costs import find_device

MAX_LENGTH = 131072


class Config(lab.ConfigRecord):
    """The traffic and the server."""

    traffic: AgentTraffic = dataclasses.field(default_factory=AgentTraffic)
    """Distribution of jobs."""
    num_seeds: lab.PositiveInt = 8
    """Draws of the traffic."""
    model: str = "meta-llama/Llama-3.1-8B"
    """Served model."""
    device: str = "h100"
    """Device that serves it."""
    max_num_seqs: lab.PositiveInt = 16
    """Largest number of running sequences, as in vLLM."""
    token_budget: lab.PositiveInt = 2048
    """Largest number of tokens fed in a step."""


SMALL = AgentTraffic(
    num_jobs=12, jobs_per_s=20.0, answer_tokens=12.0, first_tokens=60.0, tool_s=0.05
)
CONFIGS = {
    "smoke": Config(traffic=SMALL, num_seeds=2, max_num_seqs=2, token_budget=256),
    "cpu": Config(),
}

HEAD_SIZE = 256
"""Waiting requests that the policy sees."""
FIRST_COME = "first come, first served"
SHORTEST = "shortest request"
OLDEST = "oldest job"
ATTAINED = "least attained job"
REMAINING = "shortest remaining job"


def orders(load: AgentLoad) -> dict[str, Workload]:
    """Returns the workload with the priorities of each order of the queue.

    Within a priority, requests are served in order of arrival. The shortest request and
    the shortest remaining job are oracles: they know the lengths of answers, or all
    requests of the job. The oldest and the least attained job use only the past.
    """
    w = load.workload
    return {
        FIRST_COME: load.prioritised(np.zeros(load.job.size)),
        SHORTEST: load.prioritised(np.asarray(w.prompt + w.output, float)),
        OLDEST: load.prioritised(load.job.astype(float)),
        ATTAINED: load.prioritised(load.attained),
        REMAINING: load.prioritised(load.remaining),
    }


class OrderTable(lab.ResultTable):
    """Metrics of each order of the queue and seed."""

    order: lab.Texts = lab.column("order of the queue")
    seed: lab.Ints = lab.column("seed of the traffic")
    first_token_mean_s: lab.Floats = lab.column(
        "mean time to first token over requests"
    )
    first_token_p99_s: lab.Floats = lab.column("its 99th percentile")
    token_mean_s: lab.Floats = lab.column("mean over requests of latency per token")
    request_mean_s: lab.Floats = lab.column("mean latency of a request")
    job_mean_s: lab.Floats = lab.column(
        "mean over jobs of first arrival to last answer"
    )
    job_median_s: lab.Floats = lab.column("its median")
    job_p99_s: lab.Floats = lab.column("its 99th percentile")
    jobs_per_hour: lab.Floats = lab.column("jobs over the time until all are answered")


class Result(lab.ResultRecord):
    """Metrics of all orders."""

    orders: OrderTable = lab.column("by order and seed", heading="agent jobs by order")
    requests_per_job: float = lab.column("mean requests of a job")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves all seeds under all orders in one mapped program."""
    loads = [draw_agents(config.traffic, seed) for seed in range(config.num_seeds)]
    model = shapes.describe_checkpoint(config.model)
    device = find_device(config.device)
    cost = make_server_cost(model, device, draw_coefficients(np.zeros(len(PRIOR))))
    capacity = Capacity.of(
        # The record counts the data sheet's memory, less a fixed reserve.
        num_pages=num_kv_blocks(
            model,
            device._replace(memory_bytes=device.sheet_bytes),
            reserved_bytes=2e9,
        ),
        max_length=MAX_LENGTH,
        token_budget=config.token_budget,
    )
    inner = scheduling.vllm_scheduler(max_num_seqs=config.max_num_seqs)
    # No request waits for 1,000 s, so a priority always precedes the arrival.
    policy = scheduling.ageing_priority(level_ms=1_000_000, inner=inner)
    orders_by_seed = [orders(load) for load in loads]
    members = [
        SimulationMember(workload, capacity, policy, cost)
        for workloads in orders_by_seed
        for workload in workloads.values()
    ]
    served = simulation.simulate(
        simulation.stack(members),
        max_slots=config.max_num_seqs,
        head=HEAD_SIZE,
        progress=progress,
    )
    rows = []
    num_orders = len(orders_by_seed[0])
    for seed, load in enumerate(loads):
        seed_slice = slice(seed * num_orders, (seed + 1) * num_orders)
        num = load.job.size
        arrival_s, first_s, finish_s = (
            x[seed_slice, :num]
            for x in (served.arrival_s, served.first_s, served.finish_s)
        )
        if np.isnan(finish_s).any():  # stopped before every request was answered
            continue
        output = np.asarray(load.workload.output)
        wait_s = time_to_first_token_s(arrival_s, first_s)
        jobs = find_jobs(arrival_s, finish_s, load.job)
        metrics = {
            "first_token_mean_s": wait_s.mean(axis=1),
            "first_token_p99_s": np.percentile(wait_s, 99, axis=1),
            "token_mean_s": normalised_latency_s(arrival_s, finish_s, output),
            "request_mean_s": (finish_s - arrival_s).mean(axis=1),
            "job_mean_s": jobs.latency_s.mean(axis=1),
            "job_median_s": np.median(jobs.latency_s, axis=1),
            "job_p99_s": np.percentile(jobs.latency_s, 99, axis=1),
            "jobs_per_hour": jobs.jobs_per_hour(),
        }
        for k, name in enumerate(orders_by_seed[seed]):
            numbers = {metric: x[k] for metric, x in metrics.items()}
            rows.append({"order": name, "seed": seed} | numbers)
    num_requests = sum(load.job.size for load in loads)
    requests_per_job = num_requests / (config.num_seeds * config.traffic.num_jobs)
    return Result(OrderTable.of(rows), requests_per_job)


def relative(table: OrderTable, name: str, order: str) -> np.ndarray:
    """Returns a metric of an order over that of first come, first served, by seed."""
    ours, base = (table.where(order=x) for x in (order, FIRST_COME))
    return getattr(ours, name) / getattr(base, name)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws mean job latency against two token metrics, a point for each seed."""
    table = result.orders
    names = [x for x in table.distinct("order") if x != FIRST_COME]
    for ax, metric, label in zip(
        axes,
        ("first_token_mean_s", "token_mean_s"),
        ("mean time to first token", "mean latency per token"),
        strict=True,
    ):
        for name in names:
            x, y = (relative(table, kind, name) for kind in (metric, "job_mean_s"))
            lab.draw_curve(ax, x, y, name, name, linestyle="")
        lab.draw_reference_line(ax, 1)
        lab.draw_reference_line(ax, 1, along="y")
        title = "Job latency by token metric"
        if len(table):
            token, job = (
                100 * (np.mean(relative(table, kind, OLDEST)) - 1)
                for kind in (metric, "job_mean_s")
            )
            title = f"Oldest job: tokens {token:+.0f} %, jobs {job:+.0f} %"
        y = "job latency / first come [ratio]"
        lab.set_labels(ax, title, f"{label} / first come [ratio]", y)
        ax.margins(x=0.1, y=0.1)
    axes[0].legend(loc="lower right")


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares orders by the worst seed."""
    table = result.orders
    if not len(table):
        return
    for id, metric in (
        ("oldest_first_token", "first_token_mean_s"),
        ("oldest_token", "token_mean_s"),
    ):
        yield lab.measured(id, float(relative(table, metric, OLDEST).max()))
    job = {x: relative(table, "job_mean_s", x) for x in table.distinct("order")}
    yield lab.measured("oldest_job", float(job[OLDEST].min()))
    best_other = np.min([job[x] for x in job if x != REMAINING], axis=0)
    yield lab.measured("remaining_job", float((job[REMAINING] / best_other).max()))
    hourly = relative(table, "jobs_per_hour", REMAINING)
    yield lab.measured("remaining_hour", float(hourly.max()))


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, panels=lab.Panels(1, 2, 3.6))
