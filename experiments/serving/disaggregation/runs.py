"""What each placement of the two phases sustains, and which one sustains most."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.settings import KNOWN, Application, Instance
from jaxkv.progress import QUIET, Progress
from jaxkv.simulation import disaggregated
from jaxkv.simulation.disaggregated import Answers, Job, Role, Split
from jaxkv.workloads import metrics

SHARE = 0.9
"""Of the requests that must keep the objectives."""


QUICK_S = 0.03


class Loads(Table):
    """What became of some loads, a row for each."""

    name: Texts = column("of the application")
    role: Texts = column("both, prefill, decode: one machine; split: some for either")
    prefill_ways: Ints = column("GPUs of a machine that reads, or does both; 0: none")
    decode_ways: Ints = column("GPUs of one that decodes alone")
    num_prefill: Ints = column("machines that read, or do both")
    num_decode: Ints = column("machines that decode alone")
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


def row(
    name: str,
    answers: Answers,
    objectives: metrics.Objectives,
    placement: tuple[str, int, int, int, int, float],
    rate: float,
) -> tuple[Any, ...]:
    """Judges answers.

    Args:
      name: of the application.
      answers: what became of the requests.
      objectives: what was promised.
      placement: role, ways of either phase, machines of either, and the link.
      rate: requests a second.
    """
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
    kept_first, kept_gap = (
        first_s <= objectives.first_s,
        gap_s <= objectives.per_token_s,
    )
    sent_s = a.transfer_s[np.isfinite(a.transfer_s)]
    sent = (0.0, 1.0)
    if sent_s.size:
        sent = (float(np.quantile(sent_s, 0.95)), float(np.mean(sent_s <= QUICK_S)))
    _, ways, other, num, num_other, _ = placement
    rates = (rate, rate / (ways * num + other * num_other))
    shares = (float(kept), np.mean(kept_first), np.mean(kept_gap))
    return (name, *placement, *rates, *tails, *shares, *sent, a.preempted)


def alone(
    asked: Sequence[tuple[str, Role, Instance, float]],
    *,
    seconds: float,
    seed: int,
    progress: Progress = QUIET,
) -> Loads:
    """Serves loads by single machines.

    Args:
      asked: an application's name, what the machine does, its GPUs, requests a second.
      seconds: simulated.
      seed: of lengths and arrivals.
      progress: hears of it.
    """
    jobs = []
    for name, role, instance, rate in asked:
        requests = disaggregated.ask(KNOWN[name].law, rate, seconds, seed)
        if role == "decode":  # who draws one token alone never comes here
            requests = disaggregated.take(requests, requests.tokens.output > 1)
        jobs.append(Job(instance.machine, role, requests))
    rows = []
    served = disaggregated.serve(
        jobs, seconds, max_slots=settings.MAX_SLOTS, progress=progress
    )
    for (name, role, (_, ways), rate), answers in zip(asked, served, strict=True):
        counted = disaggregated.counted(answers, seconds)
        placement = (role, ways, 0, 1, 0, 0.0)
        if role == "decode":
            placement = (role, 0, ways, 0, 1, 0.0)
        rows.append(row(name, counted, KNOWN[name].objectives, placement, rate))
    return Loads.of(rows)


def split(
    asked: Sequence[tuple[str, Split, float]],
    *,
    seconds: float,
    seed: int,
    progress: Progress = QUIET,
) -> Loads:
    """Serves loads by machines for either phase; arguments as those of `alone`."""
    pairs = [
        (p, disaggregated.ask(KNOWN[name].law, rate, seconds, seed))
        for name, p, rate in asked
    ]
    rows = []
    served = disaggregated.split(
        pairs, seconds, max_slots=settings.MAX_SLOTS, progress=progress
    )
    for (name, p, rate), answers in zip(asked, served, strict=True):
        ways = p.prefill.num_gpus, p.decode.num_gpus
        placement = ("split", *ways, p.num_prefill, p.num_decode, p.link)
        rows.append(row(name, answers, KNOWN[name].objectives, placement, rate))
    return Loads.of(rows)


def bounds(application: Application, instance: Instance) -> dict[Role, float]:
    """Rates that a machine hardly sustains, by role: where to look for what it does."""
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


def goodput(loads: Loads, field: str = "attained", *, per_card: bool = True) -> float:
    """The rate at which 90 % of the requests still keep what they must."""
    rates = loads.rate_per_card if per_card else loads.rate
    order = np.argsort(rates)
    return metrics.goodput(rates[order], getattr(loads, field)[order], share=SHARE)


def each(loads: Loads, *, per_card: bool = True) -> float:
    """The rate at which 90 % keep either objective, each by itself: figure 1."""
    return min(
        goodput(loads, field, per_card=per_card)
        for field in ("attained_first", "attained_gap")
    )


def phases(name: str, found: Loads) -> dict[str, dict[int, float]]:
    """What each GPU sustains of one phase alone, by phase and tensor-parallel degree.

    Args:
      name: of the application.
      found: single machines under loads.
    """
    fields = {"prefill": "attained_first", "decode": "attained_gap"}
    return {
        role: {
            num: goodput(here.where(**{f"{role}_ways": num}), field)
            for here in [found.where(name=name, role=role)]
            for num in here.distinct(f"{role}_ways")
        }
        for role, field in fields.items()
    }


def best(name: str, found: Loads) -> tuple[Split, float]:
    """The placement that should sustain most a GPU, and what it should in all.

    Each phase takes the machine that alone sustains most a GPU, then as many of either
    that neither waits for the other more than it must.

    Args:
      name: of the application.
      found: single machines under loads.

    Source: Zhong et al. 2024, arXiv:2401.09670, algorithm 1.
    """
    chosen, rates = [], []
    for of_each in phases(name, found).values():
        ways = max(of_each, key=lambda num: of_each[num])
        chosen.append(Instance(KNOWN[name].model, ways).machine)
        rates.append(of_each[ways] * ways)
    most = range(1, settings.MAX_INSTANCES + 1)
    placements = [Split(*chosen, n, m, settings.LINK) for n in most for m in most]

    def sustains(p: Split) -> float:
        return min(p.num_prefill * rates[0], p.num_decode * rates[1])

    placed = max(placements, key=lambda p: (sustains(p) / p.num_gpus, -p.num_gpus))
    return placed, sustains(placed)
