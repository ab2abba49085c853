"""What each placement of the two phases bears, and which one bears most."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.serving.disaggregation import instances, settings
from experiments.serving.disaggregation.instances import Answers, Job, Requests, Split
from experiments.serving.disaggregation.settings import Application, Instance
from jaxkv.progress import QUIET, Progress
from jaxkv.workloads import lengths, metrics

SHARE = 0.9
"""Of the requests that must keep the objectives."""


class Loads(NamedTuple):
    """What became of some loads, a row for each."""

    name: np.ndarray
    """Of the application."""
    role: np.ndarray
    """both, prefill, decode: one machine; split: some for either phase."""
    prefill_ways: np.ndarray
    """Cards of a machine that reads, or does both; 0 for none."""
    decode_ways: np.ndarray
    num_prefill: np.ndarray
    """Machines that read, or do both."""
    num_decode: np.ndarray
    link: np.ndarray
    """Bytes a second from card to card; 0 where nothing is sent."""
    rate: np.ndarray
    """Requests a second."""
    rate_per_card: np.ndarray
    ttft_s: np.ndarray
    """What 90 % keep; infinite if as many have none."""
    tpot_s: np.ndarray
    """The same of the time per output token."""
    attained: np.ndarray
    """Share of requests that keep both objectives."""
    attained_first: np.ndarray
    """That keep the one for the first token."""
    attained_gap: np.ndarray
    """That keep the one for the others."""
    transfer_s: np.ndarray
    """What 95 % of the transfers keep."""
    quick_share: np.ndarray
    """Share of the transfers that take 30 ms at most."""
    preempted: np.ndarray

    def where(self, **wanted: object) -> "Loads":
        """The rows of which all that is so."""
        here = np.ones(len(self.rate), bool)
        for name, value in wanted.items():
            here &= np.asarray(getattr(self, name) == value)
        return jax.tree.map(lambda column: column[here], self)


QUICK_S = 0.03


def row(
    name: str,
    answers: Answers,
    objectives: metrics.Objectives,
    placement: tuple[str, int, int, int, int, float],
    rate: float,
) -> tuple[object, ...]:
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
    sent_s = a.transfer_s[np.isfinite(a.transfer_s)]
    sent = (0.0, 1.0)
    if sent_s.size:
        sent = (float(np.quantile(sent_s, 0.95)), float(np.mean(sent_s <= QUICK_S)))
    _, ways, other, num, num_other, _ = placement
    cards = ways * num + other * num_other
    return (
        *(name, *placement, rate, rate / cards, *tails),
        *(float(kept), float(np.mean(first_s <= objectives.first_s))),
        *(float(np.mean(gap_s <= objectives.per_token_s)), *sent, a.preempted),
    )


def table(rows: Sequence[tuple[object, ...]]) -> Loads:
    """Makes columns of rows."""
    if not rows:
        kinds = [str, str, *[int] * 4, *[float] * 10, int]
        return Loads(*(np.empty(0, "U1" if x is str else x) for x in kinds))
    return Loads(*(np.asarray(column) for column in zip(*rows, strict=True)))


def join(parts: Sequence[Loads]) -> Loads:
    """Puts tables under each other."""
    return Loads(*map(np.concatenate, zip(table([]), *parts, strict=True)))


class Asked(NamedTuple):
    """A machine under a load.

    Attributes:
      name: of the application.
      objectives: what is promised.
      law: of lengths.
      role: what the machine does.
      instance: its cards.
      rate: requests a second.
    """

    name: str
    objectives: metrics.Objectives
    law: lengths.Pair
    role: instances.Role
    instance: Instance
    rate: float


def alone(
    asked: Sequence[Asked], *, seconds: float, seed: int, progress: Progress = QUIET
) -> Loads:
    """Serves loads by single machines."""
    jobs = []
    for x in asked:
        requests = instances.ask(x.law, x.rate, seconds, seed)
        if x.role == "decode":  # who draws one token alone never comes here
            requests = instances.take(requests, requests.tokens.output > 1)
        jobs.append(Job(x.instance, x.role, requests))
    served = instances.serve(jobs, seconds, progress)
    rows = []
    for x, job, outcome in zip(asked, jobs, served, strict=True):
        if x.role == "prefill":
            outcome = outcome._replace(finish_s=outcome.first_s)
        answers = instances.count(job.requests, outcome, seconds)
        reads, decodes = x.role != "decode", x.role == "decode"
        ways = x.instance.ways
        placement = (x.role, ways * reads, ways * decodes, int(reads), int(decodes))
        rows.append(row(x.name, answers, x.objectives, (*placement, 0.0), x.rate))
    return table(rows)


def split(
    asked: Sequence[tuple[str, metrics.Objectives, lengths.Pair, Split, float]],
    *,
    seconds: float,
    seed: int,
    progress: Progress = QUIET,
) -> Loads:
    """Serves loads by machines for either phase."""
    loads = [instances.ask(law, rate, seconds, seed) for *_, law, _, rate in asked]
    pairs: list[tuple[Split, Requests]] = [
        (p, x) for (*_, p, _), x in zip(asked, loads, strict=True)
    ]
    served = instances.split(pairs, seconds, progress)
    rows = []
    for (name, objectives, _, p, rate), answers in zip(asked, served, strict=True):
        ways = p.prefill.ways, p.decode.ways
        placement = ("split", *ways, p.num_prefill, p.num_decode, p.link)
        rows.append(row(name, answers, objectives, placement, rate))
    return table(rows)


def bounds(application: Application, instance: Instance) -> dict[instances.Role, float]:
    """Rates that a machine hardly bears, by role: where to look for what it does."""
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


def best(name: str, application: Application, found: Loads) -> tuple[Split, float]:
    """The placement that should bear most a card, and what it should bear in all.

    Each phase takes the machine that alone bears most a card, then as many of either
    that neither waits for the other more than it must.

    Source: Zhong et al. 2024, arXiv:2401.09670, algorithm 1.
    """

    def of(role: str, field: str, ways: str) -> tuple[Instance, float]:
        each = {
            num: goodput(found.where(name=name, role=role, **{ways: num}), field)
            for num in application.ways
        }
        most = max(each, key=lambda num: each[num])
        return Instance(application.model, most), each[most] * most

    prefill, reads = of("prefill", "attained_first", "prefill_ways")
    decode, decodes = of("decode", "attained_gap", "decode_ways")
    most = range(1, settings.MAX_INSTANCES + 1)
    placements = [Split(prefill, decode, n, m) for n in most for m in most]

    def bears(p: Split) -> float:
        return min(p.num_prefill * reads, p.num_decode * decodes)

    chosen = max(placements, key=lambda p: (bears(p) / p.num_cards, -p.num_cards))
    return chosen, bears(chosen)
