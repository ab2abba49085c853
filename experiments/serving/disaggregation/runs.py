"""What each placement of the two phases sustains, and which one sustains most."""

from collections.abc import Iterable, Sequence

import numpy as np

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.settings import EXAMPLE, KNOWN, Config, Instance
from jaxkv.progress import Progress
from jaxkv.simulation import disaggregated
from jaxkv.simulation.disaggregated import (
    Job,
    PhasePlacement,
    ReplicaRole,
    RequestTiming,
)
from jaxkv.workloads import metrics

SHARE = 0.9
"""Of the requests that must keep the objectives."""
QUICK_S = 0.03
"""Of a transfer, in the paper."""

type Placement = tuple[str, int, int, int, int, float]
"""Role, degrees of either phase, replicas of either, and the link: as in `Loads`."""


class Loads(Table):
    """What became of some loads, a row for each."""

    name: Texts = column("of the application")
    role: Texts = column("both, prefill, decode: one replica; split: some for either")
    prefill_ways: Ints = column("GPUs of a replica that reads, or does both; 0: none")
    decode_ways: Ints = column("GPUs of one that decodes alone")
    num_prefill: Ints = column("replicas that read, or do both")
    num_decode: Ints = column("replicas that decode alone")
    link: Floats = column("bytes a second from GPU to GPU; 0 where nothing is sent")
    rate: Floats = column("requests a second")
    rate_per_card: Floats = column("the same, for each GPU")
    ttft_s: Floats = column("what 90 % keep; infinite if as many have none")
    tpot_s: Floats = column("the same of the time per output token")
    attained: Floats = column("share of requests that keep both objectives")
    attained_first: Floats = column("that keep the one for the first token")
    attained_gap: Floats = column("that keep the one for the others")
    transfer_s: Floats = column("what 95 % of the transfers keep")
    quick_share: Floats = column("of the transfers, that take 30 ms at most")
    preempted: Ints = column("times")


class Goodputs(Table):
    """Requests a second that the GPUs of applications sustain, a row for each."""

    name: Texts = column("of the application", heading="application")
    together_per_card_per_s: Floats = column("both phases", heading="together")
    split_per_card_per_s: Floats = column("NaN if none was placed", heading="split")
    placement: Texts = column("of the split phases")


class Phases(Table):
    """Requests a second that a GPU sustains of one phase, a row per kind of replica."""

    name: Texts = column("of the application", heading="application")
    role: Texts = column("prefill or decode", heading="phase")
    ways: Ints = column("GPUs of a replica", heading="GPUs")
    rate_per_s: Floats = column("of each GPU", heading="requests/s for each GPU")


def row(
    name: str,
    answers: RequestTiming,
    objectives: metrics.Objectives,
    placement: Placement,
    rate: float,
) -> tuple[object, ...]:
    """Judges answers by the objectives, under so many requests a second."""
    a = answers
    came = np.isfinite(a.arrival_s)
    first_s = metrics.time_to_first_token_s(a.arrival_s, a.first_s)[came]
    gap_s = metrics.time_per_output_token_s(a.first_s, a.finish_s, a.output)[came]
    tails = [
        # Who was not answered is worse than all who were.
        float(np.quantile(np.nan_to_num(x, nan=np.inf), SHARE, method="higher"))
        for x in (first_s, gap_s)
    ]
    kept = metrics.attainment(a.arrival_s, a.first_s, a.finish_s, a.output, objectives)
    parts = zip((first_s, gap_s), objectives, strict=True)
    shares = (float(kept), *(np.mean(x <= most) for x, most in parts))
    sent_s = a.transfer_s[np.isfinite(a.transfer_s)]
    sent = (0.0, 1.0)
    if sent_s.size:
        sent = (float(np.quantile(sent_s, 0.95)), float(np.mean(sent_s <= QUICK_S)))
    _, ways, other, num, num_other, _ = placement
    rates = (rate, rate / (ways * num + other * num_other))
    return (name, *placement, *rates, *tails, *shares, *sent, a.preempted)


def alone(
    asked: Sequence[tuple[str, ReplicaRole, Instance, float]],
    config: Config,
    progress: Progress,
) -> Loads:
    """Serves loads by single replicas.

    Args:
      asked: an application's name, what the replica does, its GPUs, requests a second.
      config: how long, and the seed.
      progress: hears of it.
    """
    jobs, seconds = [], config.seconds
    for name, role, instance, rate in asked:
        requests = disaggregated.sample_requests(
            KNOWN[name].law, rate, seconds, config.seed
        )
        if role == "decode":  # who draws one token alone never comes here
            requests = disaggregated.select_requests(
                requests, requests.tokens.output > 1
            )
        jobs.append(Job(instance.replica, role, requests))
    served = disaggregated.simulate_jobs(
        jobs, seconds, max_slots=settings.MAX_SLOTS, progress=progress
    )
    counted = [disaggregated.drop_late_arrivals(answers, seconds) for answers in served]
    placed: list[Placement] = [
        ("decode", 0, num, 0, 1, 0.0) if role == "decode" else (role, num, 0, 1, 0, 0.0)
        for _, role, (_, num), _ in asked
    ]
    return _loads([(name, rate) for name, *_, rate in asked], placed, counted)


def split(
    asked: Sequence[tuple[str, PhasePlacement, float]],
    config: Config,
    progress: Progress,
) -> Loads:
    """Serves loads by replicas for either phase; arguments as those of `alone`."""
    served = disaggregated.simulate_placements(
        [
            (
                p,
                disaggregated.sample_requests(
                    KNOWN[name].law, rate, config.seconds, config.seed
                ),
            )
            for name, p, rate in asked
        ],
        config.seconds,
        max_slots=settings.MAX_SLOTS,
        progress=progress,
    )
    placed: list[Placement] = []
    for _, p, _ in asked:
        ways = p.prefill.num_gpus, p.decode.num_gpus
        placed.append(("split", *ways, p.num_prefill, p.num_decode, p.link))
    return _loads([(name, rate) for name, _, rate in asked], placed, served)


def _loads(
    asked: list[tuple[str, float]],
    placed: list[Placement],
    served: Iterable[RequestTiming],
) -> Loads:
    rows = zip(asked, placed, served, strict=True)
    return Loads.of(
        row(name, answers, KNOWN[name].objectives, placement, rate)
        for (name, rate), placement, answers in rows
    )


def bounds(
    application: settings.Application, instance: Instance
) -> dict[ReplicaRole, float]:
    """Rates that a replica hardly sustains, by role: where to look for what it does."""
    prompt, output = application.law.prompt.mean, application.law.output.mean
    prefill, decode = (
        np.asarray(x) for x in (instance.cost.prefill, instance.cost.decode_large)
    )
    reads = 1 / float(prefill @ (1.0, prompt, prompt**2))
    context = prompt + output / 2
    room = instance.num_pages * settings.PAGE_SIZE / (prompt + output)
    step = float(decode @ (1.0, 0.0, 0.0))
    each = float(decode @ (0.0, context, 1.0))
    batch = (application.objectives.per_token_s - step) / each
    batch = max(1.0, min(batch, room, settings.MAX_SLOTS))
    decodes = batch / (output * (step + each * batch))
    return {
        "prefill": 1.2 * reads,
        "decode": 1.4 * decodes,
        "both": 1.2 / (1 / reads + 1 / decodes),
    }


def goodput(loads: Loads, field: str = "attained") -> float:
    """The rate of each GPU at which 90 % of the requests keep what they must."""
    order = np.argsort(loads.rate_per_card)
    kept = getattr(loads, field)[order]
    return metrics.goodput(loads.rate_per_card[order], kept, share=SHARE)


def each(loads: Loads) -> float:
    """The rate at which 90 % keep either objective, each by itself: figure 1."""
    return min(goodput(loads, name) for name in ("attained_first", "attained_gap"))


def goodputs(alone: Loads, split: Loads) -> Goodputs:
    """What each application's GPUs sustain: the example's first."""
    rows = []
    for name in alone.distinct("name"):
        apart = split.where(name=name)
        of = each if name == EXAMPLE else goodput
        found, placement = np.nan, "-"
        if len(apart):
            found = of(apart)
            placement = (
                "{num_prefill} x {prefill_ways} GPUs that read and "
                "{num_decode} x {decode_ways} that decode"
            ).format_map(apart.rows()[0])
        rows.append((name, of(alone.where(name=name, role="both")), found, placement))
    return Goodputs.of(rows)


def phases(found: Loads) -> Phases:
    """What each GPU sustains of one phase alone."""
    fields = {"prefill": "attained_first", "decode": "attained_gap"}
    return Phases.of(
        (name, role, num, goodput(here.where(**{f"{role}_ways": num}), field))
        for name in found.distinct("name")
        for role, field in fields.items()
        for here in [found.where(name=name, role=role)]
        for num in here.distinct(f"{role}_ways")
    )


def best(name: str, found: Phases) -> tuple[PhasePlacement, float]:
    """The placement that should sustain most a GPU, and what it should in all.

    Each phase takes the replica that alone sustains most a GPU, then as many of either
    that neither waits for the other more than it must.

    Args:
      name: of the application.
      found: what single replicas sustain.

    Source: Zhong et al. 2024, arXiv:2401.09670, algorithm 1.
    """
    chosen, rates = [], []
    for role in ("prefill", "decode"):
        here = found.where(name=name, role=role)
        most = int(np.argmax(here.rate_per_s))
        ways = int(here.ways[most])
        chosen.append(Instance(KNOWN[name].model, ways).replica)
        rates.append(float(here.rate_per_s[most]) * ways)
    nums = range(1, settings.MAX_INSTANCES + 1)
    placements = [
        PhasePlacement(*chosen, n, m, settings.LINK) for n in nums for m in nums
    ]

    def sustains(p: PhasePlacement) -> float:
        return min(p.num_prefill * rates[0], p.num_decode * rates[1])

    placed = max(placements, key=lambda p: (sustains(p) / p.num_gpus, -p.num_gpus))
    return placed, sustains(placed)
