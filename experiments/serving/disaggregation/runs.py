"""Simulates placements of prefill and decode, and finds the best."""

from collections.abc import Iterable, Sequence

import numpy as np

from experiments import lab
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.settings import EXAMPLE, KNOWN, Config, Instance
from jaxkv import workloads
from jaxkv.simulation import (
    Job,
    PhasePlacement,
    ReplicaRole,
    RequestTiming,
    drop_late_arrivals,
    sample_requests,
    select_requests,
    simulate_jobs,
    simulate_placements,
)
from jaxkv.workloads import Objectives, time_per_output_token_s, time_to_first_token_s

ATTAINED_SHARE = 0.9
"""Share of requests that must meet the latency objectives."""
QUICK_S = 0.03
"""Upper bound on a transfer in the paper."""

type Placement = tuple[str, int, int, int, int, float]
"""Role, tensor-parallel degrees, replicas and link, as in `PlacementLoads`."""


class PlacementLoads(lab.ResultTable):
    """Latencies and objectives met under simulated loads."""

    name: lab.Texts = lab.column("application")
    role: lab.Texts = lab.column(
        "both, prefill or decode: one replica; split: several of each"
    )
    prefill_ways: lab.Ints = lab.column(
        "GPUs of a prefill or combined replica; 0 if none"
    )
    decode_ways: lab.Ints = lab.column("GPUs of a decode replica; 0 if none")
    num_prefill: lab.Ints = lab.column("prefill or combined replicas")
    num_decode: lab.Ints = lab.column("decode replicas")
    link: lab.Floats = lab.column("link bandwidth in bytes/s; 0 without transfers")
    rate: lab.Floats = lab.column("requests/s")
    rate_per_card: lab.Floats = lab.column("requests/s per GPU")
    ttft_s: lab.Floats = lab.column("P90 time to first token; infinite if unanswered")
    tpot_s: lab.Floats = lab.column("P90 time per output token; infinite if unanswered")
    attained: lab.Floats = lab.column("share of requests that meet both objectives")
    attained_first: lab.Floats = lab.column("share that meets the objective of ttft_s")
    attained_gap: lab.Floats = lab.column("share that meets the objective of tpot_s")
    transfer_s: lab.Floats = lab.column("P95 transfer time")
    quick_share: lab.Floats = lab.column("share of transfers of at most 30 ms")
    preempted: lab.Ints = lab.column("preemptions")


class Goodputs(lab.ResultTable):
    """Goodput per GPU of applications, combined and split."""

    name: lab.Texts = lab.column("application", heading="application")
    together_per_card_per_s: lab.Floats = lab.column("combined", heading="together")
    split_per_card_per_s: lab.Floats = lab.column(
        "NaN without a placement", heading="split"
    )
    placement: lab.Texts = lab.column("placement of the split phases")


class PhaseGoodputs(lab.ResultTable):
    """Goodput per GPU of single-phase replicas."""

    name: lab.Texts = lab.column("application", heading="application")
    role: lab.Texts = lab.column("prefill or decode", heading="phase")
    ways: lab.Ints = lab.column("GPUs of a replica", heading="GPUs")
    rate_per_s: lab.Floats = lab.column("per GPU", heading="requests/s for each GPU")


def judge_load(
    name: str,
    answers: RequestTiming,
    objectives: Objectives,
    placement: Placement,
    rate: float,
) -> tuple[object, ...]:
    """Returns a row of `PlacementLoads` for the answers at a rate in requests/s."""
    a = answers
    came = np.isfinite(a.arrival_s)
    first_s = time_to_first_token_s(a.arrival_s, a.first_s)[came]
    gap_s = time_per_output_token_s(a.first_s, a.finish_s, a.output)[came]
    tails = [
        # Requests without an answer count as the slowest.
        float(
            np.quantile(np.nan_to_num(x, nan=np.inf), ATTAINED_SHARE, method="higher")
        )
        for x in (first_s, gap_s)
    ]
    attainment = workloads.attainment(
        a.arrival_s, a.first_s, a.finish_s, a.output, objectives
    )
    parts = zip((first_s, gap_s), objectives, strict=True)
    shares = (float(attainment), *(np.mean(x <= limit_s) for x, limit_s in parts))
    sent_s = a.transfer_s[np.isfinite(a.transfer_s)]
    sent = (0.0, 1.0)
    if sent_s.size:
        sent = (float(np.quantile(sent_s, 0.95)), float(np.mean(sent_s <= QUICK_S)))
    _, ways, other, num, num_other, _ = placement
    rates = (rate, rate / (ways * num + other * num_other))
    return (name, *placement, *rates, *tails, *shares, *sent, a.preempted)


def serve_single_replicas(
    cases: Sequence[tuple[str, ReplicaRole, Instance, float]],
    config: Config,
    progress: lab.Progress,
) -> PlacementLoads:
    """Simulates loads on single replicas.

    Args:
      cases: application, role and GPUs of the replica, and requests/s.
      config: duration and seed.
      progress: receives progress.
    """
    jobs = []
    seconds = config.seconds
    for name, role, instance, rate in cases:
        requests = sample_requests(KNOWN[name].law, rate, seconds, config.seed)
        if role == "decode":  # a request for one token ends with its prefill
            requests = select_requests(requests, requests.tokens.output > 1)
        jobs.append(Job(instance.replica, role, requests))
    served = simulate_jobs(
        jobs, seconds, max_slots=settings.MAX_SLOTS, progress=progress
    )
    counted = [drop_late_arrivals(answers, seconds) for answers in served]
    placed: list[Placement] = [
        ("decode", 0, num, 0, 1, 0.0) if role == "decode" else (role, num, 0, 1, 0, 0.0)
        for _, role, (_, num), _ in cases
    ]
    return _loads([(name, rate) for name, *_, rate in cases], placed, counted)


def serve_split_replicas(
    cases: Sequence[tuple[str, PhasePlacement, float]],
    config: Config,
    progress: lab.Progress,
) -> PlacementLoads:
    """Serves loads by split replicas; see `serve_single_replicas` for the arguments."""
    served = simulate_placements(
        [
            (
                p,
                sample_requests(KNOWN[name].law, rate, config.seconds, config.seed),
            )
            for name, p, rate in cases
        ],
        config.seconds,
        max_slots=settings.MAX_SLOTS,
        progress=progress,
    )
    placed: list[Placement] = []
    for _, p, _ in cases:
        ways = p.prefill.num_gpus, p.decode.num_gpus
        placed.append(("split", *ways, p.num_prefill, p.num_decode, p.link))
    return _loads([(name, rate) for name, _, rate in cases], placed, served)


def _loads(
    cases: list[tuple[str, float]],
    placed: list[Placement],
    served: Iterable[RequestTiming],
) -> PlacementLoads:
    rows = zip(cases, placed, served, strict=True)
    return PlacementLoads.of(
        judge_load(name, answers, KNOWN[name].objectives, placement, rate)
        for (name, rate), placement, answers in rows
    )


def search_limits(
    application: settings.Application, instance: Instance
) -> dict[ReplicaRole, float]:
    """Returns upper ends of the rate search of a replica, by role."""
    prompt = application.law.prompt.mean
    output = application.law.output.mean
    prefill, decode = (
        np.asarray(x) for x in (instance.cost.prefill, instance.cost.decode_large)
    )
    reads = 1 / float(prefill @ (1.0, prompt, prompt**2))
    context = prompt + output / 2
    room = instance.num_pages * settings.PAGE_SIZE / (prompt + output)
    step = float(decode @ (1.0, 0.0, 0.0))
    sequence_s = float(decode @ (0.0, context, 1.0))
    batch = (application.objectives.per_token_s - step) / sequence_s
    batch = max(1.0, min(batch, room, settings.MAX_SLOTS))
    decodes = batch / (output * (step + sequence_s * batch))
    return {
        "prefill": 1.2 * reads,
        "decode": 1.4 * decodes,
        "both": 1.2 / (1 / reads + 1 / decodes),
    }


def goodput_per_gpu(loads: PlacementLoads, field: str = "attained") -> float:
    """Returns the rate per GPU at which 90 % of the requests meet the objectives."""
    order = np.argsort(loads.rate_per_card)
    attainments = getattr(loads, field)[order]
    return workloads.goodput(
        loads.rate_per_card[order], attainments, share=ATTAINED_SHARE
    )


def goodput_per_objective(loads: PlacementLoads) -> float:
    """Returns the rate at which 90 % meet each objective separately, as in figure 1."""
    return min(
        goodput_per_gpu(loads, name) for name in ("attained_first", "attained_gap")
    )


def application_goodputs(single: PlacementLoads, split: PlacementLoads) -> Goodputs:
    """Returns the goodput of each application, the paper's example first."""
    rows = []
    for name in single.distinct("name"):
        split_loads = split.where(name=name)
        of = goodput_per_objective if name == EXAMPLE else goodput_per_gpu
        rate = np.nan
        placement = "-"
        if len(split_loads):
            rate = of(split_loads)
            placement = (
                "{num_prefill} x {prefill_ways} GPUs for prefill and "
                "{num_decode} x {decode_ways} for decode"
            ).format_map(split_loads.rows()[0])
        rows.append((name, of(single.where(name=name, role="both")), rate, placement))
    return Goodputs.of(rows)


def phase_goodputs(loads: PlacementLoads) -> PhaseGoodputs:
    """Returns the goodput per GPU of each phase."""
    fields = {"prefill": "attained_first", "decode": "attained_gap"}
    return PhaseGoodputs.of(
        (
            name,
            role,
            num,
            goodput_per_gpu(selected.where(**{f"{role}_ways": num}), field),
        )
        for name in loads.distinct("name")
        for role, field in fields.items()
        for selected in [loads.where(name=name, role=role)]
        for num in selected.distinct(f"{role}_ways")
    )


def best_placement(name: str, goodputs: PhaseGoodputs) -> tuple[PhasePlacement, float]:
    """Returns the placement with the highest predicted goodput per GPU, and its rate.

    Each phase takes the replica of the highest goodput per GPU, then the numbers of
    replicas that balance the phases.

    Args:
      name: application.
      goodputs: goodput of single replicas.

    Source: Zhong et al. 2024, arXiv:2401.09670, algorithm 1.
    """
    chosen = []
    rates = []
    for role in ("prefill", "decode"):
        selected = goodputs.where(name=name, role=role)
        best_index = int(np.argmax(selected.rate_per_s))
        ways = int(selected.ways[best_index])
        chosen.append(Instance(KNOWN[name].model, ways).replica)
        rates.append(float(selected.rate_per_s[best_index]) * ways)
    nums = range(1, settings.MAX_INSTANCES + 1)
    placements = [
        PhasePlacement(*chosen, n, m, settings.LINK) for n in nums for m in nums
    ]

    def sustains(p: PhasePlacement) -> float:
        return min(p.num_prefill * rates[0], p.num_decode * rates[1])

    placed = max(placements, key=lambda p: (sustains(p) / p.num_gpus, -p.num_gpus))
    return placed, sustains(placed)
