"""What DistServe published on splitting the phases, held against ours."""

import math
from typing import Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.queues import MACHINES, SERVICE_S, Queues
from experiments.serving.disaggregation.runs import Loads, goodput

PAPER = "Zhong et al. 2024, arXiv:2401.09670"
EXAMPLE = "example, 13B"
TOLERANCE = 0.15
"""Of the example's rates: they are read off drawn curves."""


def claims(result: Any) -> list[Claim]:
    """Judges everything; parts that were not simulated are left out."""
    return [
        *_example(result),
        *_applications(result),
        *_transfers(result.split),
        *_queues(result.queues),
    ]


def each(loads: Loads, *, per_card: bool = True) -> float:
    """The rate at which 90 % keep either objective, each by itself: figure 1."""
    return min(
        goodput(loads, field, per_card=per_card)
        for field in ("attained_first", "attained_gap")
    )


def _example(result: Any) -> list[Claim]:
    alone, split = result.alone.where(name=EXAMPLE), result.split.where(name=EXAMPLE)
    both = alone.where(role="both")
    known = {
        "both phases on one card": (1.6, each(both)),
        "prompts alone": (5.6, goodput(alone.where(role="prefill"), "attained_first")),
        "decoding alone": (10.0, goodput(alone.where(role="decode"), "attained_gap")),
        "two cards that read and one that decodes, for each card": (3.3, each(split)),
    }
    found = [
        judge(
            f"OPT-13B, prompts of 512 and answers of 64 tokens: {what}",
            source=f"{PAPER}, figure 1 and section 2",
            published=published,
            ours=ours,
            unit="requests/s",
            tolerance=TOLERANCE * published,
            note="P90 of 0.4 s to the first token, of 0.04 s between tokens.",
        )
        for what, (published, ours) in known.items()
    ]
    together = known["both phases on one card"][1]
    return [
        *found,
        judge(
            "so each card bears more when the phases are split",
            source=f"{PAPER}, section 2: 2.1 times",
            published=2.1,
            ours=each(split) / together if together > 0 else math.nan,
            unit="times",
            tolerance=TOLERANCE * 2.1,
        ),
    ]


def _applications(result: Any) -> list[Claim]:
    found = []
    for name, x in settings.APPLICATIONS.items():
        both = result.alone.where(name=name, role="both")
        split = result.split.where(name=name)
        if not (both.rate.size and split.rate.size):
            continue
        together, apart = goodput(both), goodput(split)
        low, high = x.ratio
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        found.append(
            judge(
                f"{name}: each card bears more when the phases are split",
                source=f"{PAPER}, {x.where}: {span} times vLLM",
                published=low,
                ours=apart / together if together > 0 else math.nan,
                unit="times",
                relation="equal" if low == high else "at_least",
                differs="Lengths follow a Gamma law with the printed means, all steps "
                "the published fits, which leave pipeline stages out.",
                note=f"{apart:.3g} against {together:.3g} requests/s for each card, "
                f"{_placement(split)}.",
            )
        )
    return found


def _placement(split: Loads) -> str:
    n, m, w, v = (
        int(column[0])
        for column in (
            *(split.num_prefill, split.num_decode),
            *(split.prefill_ways, split.decode_ways),
        )
    )
    return f"{n} x {w} cards that read and {m} x {v} that decode"


def _transfers(split: Loads) -> list[Claim]:
    tokens, rate = 512, 10
    size = tokens * settings.kv_bytes("opt-66b")
    found = [
        judge(
            "keys and values of 512 tokens of OPT-66B",
            source=f"{PAPER}, section 3.3",
            published=1.13,
            ours=size / 2**30,
            unit="GiB",
            tolerance=0.01,
            note="Printed as GB.",
        ),
        judge(
            "so 10 requests/s need",
            source=f"{PAPER}, section 3.3",
            published=11.3,
            ours=rate * size / 2**30,
            unit="GiB/s",
            tolerance=0.1,
            note="Printed as GB/s.",
        ),
    ]
    here = split.where(name="chat, 66B")
    if here.rate.size:
        found.append(
            judge(
                "transfers take less than 30 ms: share of them",
                source=f"{PAPER}, section 6.3",
                published=0.95,
                ours=float(here.quick_share.min()),
                unit="1",
                relation="at_least",
                differs="Theirs is OPT-175B, ours OPT-66B; a pair of cards sends its "
                f"part over NVLink, {settings.LINK / 1e9:.0f} GB/s.",
                note=f"95 % take at most {1000 * here.transfer_s.max():.2g} ms.",
            )
        )
    return found


def _queues(queues: Queues) -> list[Claim]:
    error = np.abs(queues.simulated_s - queues.formula_s) / queues.waiting_s
    if not error.size:
        return []
    known = queues.error_s / queues.waiting_s
    return [
        judge(
            f"mean waiting time of a queue of prompts, {machine}: off the formula by",
            source=f"{PAPER}, section 3.1, equations 1 to 3",
            published=0.0,
            ours=100 * float(error[i].max()),
            unit="%",
            tolerance=1.0,
            note=f"At {queues.rate.min():g} to {queues.rate.max():g} requests/s of "
            f"{SERVICE_S} s each; standard error up to "
            f"{100 * known[i].max():.2f} %.",
        )
        for i, machine in enumerate(MACHINES)
    ]


def goodputs(result: Any) -> list[dict[str, Any]]:
    """What each application's machines bear, a row for each."""
    rows = []
    for name in dict.fromkeys(result.alone.name.tolist()):
        both = result.alone.where(name=name, role="both")
        split = result.split.where(name=name)
        of = each if name == EXAMPLE else goodput
        rows.append(
            {
                "name": name,
                "together_per_card_per_s": of(both),
                "split_per_card_per_s": of(split) if split.rate.size else math.nan,
                "placement": _placement(split) if split.rate.size else "-",
            }
        )
    return rows


def metrics(result: Any) -> dict[str, Any]:
    """Lists every load, and the queues."""
    q = result.queues
    return {
        "goodput": goodputs(result),
        "queues": [
            {
                "machine": machine,
                "rate_per_s": float(rate),
                "formula_s": float(q.formula_s[i, j]),
                "simulated_s": float(q.simulated_s[i, j]),
                "waiting_s": float(q.waiting_s[i, j]),
                "error_s": float(q.error_s[i, j]),
            }
            for i, machine in enumerate(MACHINES)
            for j, rate in enumerate(q.rate)
        ],
        "alone": _rows(result.alone),
        "split": _rows(result.split),
        "links": _rows(result.links),
    }


def _rows(loads: Loads) -> list[dict[str, Any]]:
    return [
        {name: np.asarray(column)[i].item() for name, column in loads._asdict().items()}
        for i in range(len(loads.rate))
    ]


def summary(result: Any) -> list[Part]:
    """Puts placements, and queues and formulas, beside each other."""
    bears = [
        (
            row["name"],
            f"{row['together_per_card_per_s']:.3g}",
            f"{row['split_per_card_per_s']:.3g}",
            row["placement"],
        )
        for row in goodputs(result)
    ]
    phases = []
    for name in dict.fromkeys(result.alone.name.tolist()):
        here = result.alone.where(name=name)
        for role, field, ways in (
            ("prefill", "attained_first", "prefill_ways"),
            ("decode", "attained_gap", "decode_ways"),
        ):
            mine = here.where(role=role)
            for num in dict.fromkeys(getattr(mine, ways).tolist()):
                bearable = goodput(mine.where(**{ways: num}), field)
                phases.append((name, role, units.cell(num), f"{bearable:.3g}"))
    q = result.queues
    waits = [
        (
            machine,
            f"{rate:g}",
            units.seconds(float(q.formula_s[i, j])),
            units.seconds(float(q.simulated_s[i, j])),
            units.share(float((q.simulated_s - q.formula_s)[i, j] / q.waiting_s[i, j])),
        )
        for i, machine in enumerate(MACHINES)
        for j, rate in enumerate(q.rate)
    ]
    sent = [
        (
            f"{link / 1e9:g}",
            f"{each(result.links.where(link=link)):.3g}",
            units.seconds(float(result.links.where(link=link).transfer_s.min())),
        )
        for link in dict.fromkeys(result.links.link.tolist())
    ]
    return [
        Sheet(
            "requests a second, for each card, of which 90 % keep both objectives",
            ("application", "together", "split", "placement"),
            bears,
            "Of the example, 90 % keep either objective, as figure 1 has it.",
        ),
        Sheet(
            "one phase alone",
            ("application", "phase", "cards", "requests/s for each card"),
            phases,
        ),
        Sheet(
            "the example over slower links",
            (
                "GB/s",
                "requests/s for each card",
                "95 % of transfers, at the lowest rate",
            ),
            sent,
            "What a machine sends goes one after the other.",
        ),
        Sheet(
            "queues of prompts",
            ("machine", "requests/s", "formula", "simulated", "waiting off by"),
            waits,
        ),
    ]
