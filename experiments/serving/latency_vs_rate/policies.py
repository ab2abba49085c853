"""A recorded hour under policies that order requests by their attributes.

The recording has only arrivals and lengths. Attributes are drawn: a fifth of the
requests is urgent, half are interactive and have a deadline, one session sends half of
all requests, and predicted lengths are off by a lognormal factor. Every policy serves
the same requests. Only the oracle sees the true length of an answer. Each row has the
metric that its policy improves and the metrics that it worsens.
"""

import warnings
from pathlib import Path
from typing import Annotated

import numpy as np

from experiments import lab
from experiments.harness import find_cost_model
from experiments.serving.latency_vs_rate import azure
from jaxkv import scheduling, simulation
from jaxkv.scheduling import NO_DEADLINE, Policy, RequestAttributes
from jaxkv.simulation import SimulationMember
from jaxkv.workloads import (
    Workload,
    make_workload,
    read_recording,
    time_to_first_token_s,
)

MAX_SLOTS = 128
HEAD_SIZE = 511
POLICIES: dict[str, Policy] = {
    "first come first served": scheduling.fcfs(),
    "shortest remaining, predicted": scheduling.shortest_remaining(),
    "shortest remaining, oracle": scheduling.shortest_remaining(),
    "ageing priority": scheduling.ageing_priority(level_ms=60_000),
    "earliest deadline": scheduling.earliest_deadline(),
    "fair share": scheduling.fair_share(),
}


class Config(lab.ConfigRecord):
    """The recording, the machine, and how attributes are drawn."""

    recording: Path | None = None
    """A file of recorded requests; None takes azure_conv of the folder JAXKV_DATA."""
    rate_factor: Annotated[float, lab.Range(0, ends="()")] = 0.7
    """Times as fast as recorded; at 0.7 queues form and drain on one device."""
    first_requests: Annotated[int | None, lab.Range(1)] = None
    """Requests that are served; None means all."""
    model: str = "llama-2-13b"
    """Served model."""
    device: str = "a100-80gb"
    """Device that serves it."""
    num_devices: lab.PositiveInt = 1
    """Number of devices."""
    prediction_sigma: lab.NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of predicted over true answer lengths."""
    seed: lab.NonNegativeInt = 0
    """Of the attributes."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        azure.check_fits(self.model, self.device, self.num_devices)


CONFIGS = {"policies": Config()}


class PolicyTable(lab.ResultTable):
    """Metrics of each policy. Waits are times to first token."""

    policy: lab.Texts = lab.column("name in `POLICIES`")
    answered: lab.Ints = lab.column("requests answered")
    wait_mean_s: lab.Floats = lab.column("mean over all requests")
    wait_p99_s: lab.Floats = lab.column("99th percentile over all requests")
    urgent_p99_s: lab.Floats = lab.column("99th percentile over urgent requests")
    late_share: lab.Floats = lab.column(
        "deadlines missed, of the requests that have one"
    )
    light_mean_s: lab.Floats = lab.column("mean over sessions but the heavy one")
    heavy_mean_s: lab.Floats = lab.column("mean over the session that asks half of all")


class Result(lab.ResultRecord):
    """Results of the policies."""

    policies: PolicyTable = lab.column("by policy", heading="a recorded hour by policy")


def draw_workload(config: Config) -> Workload:
    """Reads the recording and draws attributes.

    Raises:
      ValueError: there is no recording, or it cannot be read.
    """
    path = (
        azure.find_recording("azure_conv")
        if config.recording is None
        else config.recording
    )
    recording = read_recording(path)
    num = config.first_requests
    for doubt in recording.doubts:
        warnings.warn(doubt, stacklevel=2)
    recording = recording.at_rate(recording.rate * config.rate_factor)
    prompt = recording.prompt[:num]
    output = recording.output[:num]
    rng = np.random.default_rng(config.seed)
    # Lognormal of median 1.
    error = np.exp(config.prediction_sigma * rng.standard_normal(prompt.size))
    predicted = prompt + np.maximum(1, np.round(output * error))
    # 5 s for the first token, and 0.2 s for each token of the answer.
    within_ms = 5000 + 200 * output
    interactive = rng.random(prompt.size) < 0.5
    heavy = rng.random(prompt.size) < 0.5
    return make_workload(
        recording.arrival_s[:num],
        prompt,
        output,
        attributes=RequestAttributes(
            priority=-(rng.random(prompt.size) < 0.2).astype(np.int64),
            deadline_ms=np.where(interactive, within_ms, NO_DEADLINE),
            session=np.where(heavy, 0, rng.integers(1, 100, prompt.size)),
            predicted_length=predicted.astype(np.int64),
        ),
    )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Replays the recording under each policy."""
    load = draw_workload(config)
    drawn_attributes = load.attributes
    assert drawn_attributes is not None
    cost_name = f"roofline:{config.model}:{config.device}:{config.num_devices}"
    cost = find_cost_model(cost_name).cost
    capacity = azure.gpu_capacity(config.model, config.device, config.num_devices)
    has_deadline = np.asarray(drawn_attributes.deadline_ms) < NO_DEADLINE
    is_light = np.asarray(drawn_attributes.session) > 0
    is_urgent = np.asarray(drawn_attributes.priority) < 0
    rows = []
    for name, policy in progress.track(POLICIES.items(), "policies", "policies"):
        policy_load = load
        if name.endswith("oracle"):
            truth = load.prompt + load.output
            policy_load = load._replace(
                attributes=drawn_attributes._replace(predicted_length=truth)
            )
        served = simulation.simulate(
            simulation.stack([SimulationMember(policy_load, capacity, policy, cost)]),
            max_slots=MAX_SLOTS,
            head=HEAD_SIZE,
            progress=progress,
        )
        if progress.stopped:  # before every request was answered
            break
        arrival_s, first_s, finish_s = (
            x[0] for x in (served.arrival_s, served.first_s, served.finish_s)
        )
        wait_s = time_to_first_token_s(arrival_s, first_s)
        took_ms = 1e3 * (finish_s - arrival_s)
        is_late = (took_ms > np.asarray(drawn_attributes.deadline_ms))[has_deadline]
        answered = ~np.isnan(finish_s)
        rows.append(
            {
                "policy": name,
                "answered": int(answered.sum()),
                "wait_mean_s": float(np.nanmean(wait_s)),
                "wait_p99_s": float(np.nanpercentile(wait_s, 99)),
                "urgent_p99_s": float(np.nanpercentile(wait_s[is_urgent], 99)),
                "late_share": float(is_late.mean()),
                "light_mean_s": float(np.nanmean(wait_s[is_light])),
                "heavy_mean_s": float(np.nanmean(wait_s[~is_light])),
            }
        )
    return Result(PolicyTable.of(rows))


GOALS = {
    "wait_mean_s": "mean wait",
    "urgent_p99_s": "urgent, 99 %",
    "late_share": "deadlines missed",
    "light_mean_s": "light sessions, mean",
}
"""Columns of `PolicyTable` that a policy is designed for."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws each metric over that of the first policy, and the P99 wait."""
    (left, right), rows = axes, result.policies
    place = np.arange(len(rows))
    width = 0.8 / len(GOALS)
    colors = lab.colors()
    for i, (name, label) in enumerate(GOALS.items()):
        values = getattr(rows, name)
        at = place + (i - (len(GOALS) - 1) / 2) * width
        left.barh(at, values / values[0], width, label=label, color=colors[i])
    lab.draw_reference_line(left, 1, along="y")
    left.set_yticks(place, rows.policy)
    left.invert_yaxis()
    left.legend()
    title = "Waits by policy"
    if len(rows):
        best = int(np.argmin(rows.wait_mean_s))
        title = f"Mean wait {rows.wait_mean_s[0]:.1f} s, first come first served; "
        title += f"{rows.wait_mean_s[best]:.1f} s, {rows.policy[best]}"
    lab.set_labels(left, title, "over first come first served [ratio]", "")
    bars = right.barh(place, rows.wait_p99_s, color=colors[lab.BLUE])
    right.bar_label(bars, [f"{x:.0f}" for x in rows.wait_p99_s], padding=3)
    right.set_yticks(place, [""] * len(rows))
    right.invert_yaxis()
    title = "Tails"
    if len(rows):
        worst = int(np.argmax(rows.wait_p99_s))
        title = f"The longest tail: {rows.policy[worst]}"
    right.margins(x=0.15)
    lab.set_labels(right, title, "wait, 99th percentile [s]", "")


STUDY = lab.Study(CONFIGS, Result, run, plot, panels=lab.Panels(1, 2, 3.6))
