"""What parallel samples share at the lengths of the paper: pages counted, none read.

The engine's own scheduler serves a load with a clock for a model: OPT-13B on one A100
of 40 GB, whose pool has 983 pages of 16 tokens. Sequences of a request share the full
pages of its prompt, and a partial one until they write.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.harness import cost_models, length_distributions
from experiments.serving.sharing import groups
from experiments.serving.sharing.published import DATA, PAPER, POINT, SAMPLES, share
from jaxkv.progress import Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, Members, driver
from jaxkv.workloads import arrivals, metrics

PAGE_SIZE = 16
NUM_PLACES = 15_728
"""12 GiB at 800 KiB a token. Source: Kwon et al. 2023, arXiv:2309.06180, table 1."""
MAX_LENGTH = 2048
MAX_ROWS = 2560
"""Tokens fed in a step at most: a longest prompt, and all that decode."""
MAX_SLOTS, HEAD = 128, 16

LAWS = {"short": length_distributions.ALPACA, "long": length_distributions.SHAREGPT}
TIMES = {"short": 4, "long": 1}
"""Short requests are soon served: so many times as many for the same numbers."""
SEQUENCES_PER_S = {"short": 20.0, "long": 1.2}
"""Load, two thirds of where the axes of figures 14 and 12 end. As long as nobody waits,
what is saved does not depend on it."""
ANSWERS = (2, 4, 6)
POINTS = 1.5
"""How far a saving may lie from the paper's."""
_READING = (
    "Lengths leave out the step that reads a prompt, after which all of its pages, the "
    "partial one, too, are everybody's."
)
_LAWS = "Lengths are drawn after the printed means; the data are not at hand."
_TOO_MUCH = (
    "Where two answers save 16.2 %, six save 27.0 %, since the saving is (n - 1) / n "
    "of the share of full prompt pages: the printed range ends above."
)


class Counted(NamedTuple):
    """Requests of several samples, an entry for each setting: [settings].

    Attributes:
      lengths: "short" or "long".
      num_sequences: samples of a request.
      rate: requests per second.
      num_requests: how many there were.
      batch: sequences that ran, on average over time.
      saved_share: pages saved / pages without sharing, on average over time.
      expected_share: what lengths alone say.
      num_preempted: sequences that gave way.
    """

    lengths: np.ndarray
    num_sequences: np.ndarray
    rate: np.ndarray
    num_requests: np.ndarray
    batch: np.ndarray
    saved_share: np.ndarray
    expected_share: np.ndarray
    num_preempted: np.ndarray


def capacity(num_places: int) -> Capacity:
    """Bounds of the machine with a pool of so many token places."""
    bounds = (num_places // PAGE_SIZE, PAGE_SIZE, MAX_LENGTH, MAX_ROWS, 0)
    return Capacity(*(jnp.asarray(x, jnp.int32) for x in bounds))


def count(num: int, seed: int, progress: Progress) -> Counted:
    """Serves each kind of requests with each number of samples.

    Args:
      num: long requests; of short ones there are `TIMES` as many.
      seed: of lengths and arrivals.
      progress: sees bars, and may stop; what is complete then stands.
    """
    rows: list[dict[str, Any]] = []
    for name, law in LAWS.items():
        rng = np.random.default_rng(seed)
        tokens = length_distributions.draw(law, TIMES[name] * num, MAX_LENGTH, rng)
        members = [_member(name, tokens, samples, seed) for samples in ANSWERS]
        served = driver.simulate(
            driver.stack(members),
            max_slots=MAX_SLOTS,
            max_samples=max(ANSWERS),
            head=HEAD,
            progress=progress,
        )
        if progress.stopped:
            break
        means = served.means
        saved = metrics.saving(means.saved_pages, means.used_pages)
        for i, samples in enumerate(ANSWERS):
            expected = length_distributions.saving(tokens, samples, PAGE_SIZE)
            rows.append(
                {
                    "lengths": name,
                    "num_sequences": samples,
                    "rate": SEQUENCES_PER_S[name] / samples,
                    "num_requests": TIMES[name] * num,
                    "batch": means.batch[i],
                    "saved_share": saved[i],
                    "expected_share": expected,
                    "num_preempted": served.totals.preempted[i],
                }
            )
    return Counted(**groups.columns(Counted, rows))


def _member(
    name: str, tokens: length_distributions.Lengths, samples: int, seed: int
) -> Members:
    # The same requests in an order of chance, whatever their number of samples.
    rng = np.random.default_rng(seed)
    order, rate = rng.permutation(len(tokens.prompt)), SEQUENCES_PER_S[name] / samples
    load = arrivals.make(
        arrivals.poisson(rng, rate=rate, num=len(order)),
        tokens.prompt[order],
        tokens.answer[order],
        samples=samples,
    )
    return Members(
        workload=load,
        capacity=capacity(NUM_PLACES),
        policy=fcfs.fcfs(),
        cost=cost_models.figure_12().cost,
    )


def empty() -> Counted:
    """Nothing counted."""
    return Counted(**groups.columns(Counted, []))


def claims(counted: Counted) -> list[Claim]:
    """Holds figure 15a against the counts, and the counts against closed forms."""
    found = []
    for name in dict.fromkeys(counted.lengths.tolist()):
        here = counted.lengths == name
        apart = abs(counted.saved_share - counted.expected_share)[here]
        found.append(
            judge(
                f"{name} prompts, simulated: n answers save (n - 1) / n of the share "
                "of full prompt pages; largest difference",
                source=f"{PAPER}, section 4.4; worked out from lengths and page size",
                published=0.0,
                ours=100 * apart.max(),
                unit="points",
                tolerance=POINT,
                note=_READING,
            )
        )
    for i, name in enumerate(counted.lengths.tolist()):
        num = int(counted.num_sequences[i])
        published = share(name, num, False)
        if published is None:
            continue
        is_end = name == "long" and num == max(ANSWERS)
        found.append(
            judge(
                f"pages saved by {num} answers, {name} prompts, simulated",
                source=f"{PAPER}, figure 15a, {DATA[name]}",
                published=100 * published,
                ours=100 * float(counted.saved_share[i]),
                unit="%",
                tolerance=POINTS,
                note=f"{_LAWS} {_TOO_MUCH}" if is_end else _LAWS,
            )
        )
    return found


def table(counted: Counted) -> list[dict[str, Any]]:
    """Lists every setting, a row each."""
    rows = []
    for i, name in enumerate(counted.lengths.tolist()):
        num = int(counted.num_sequences[i])
        rows.append(
            {
                "lengths": name,
                "answers": num,
                "requests_per_s": float(counted.rate[i]),
                "requests": int(counted.num_requests[i]),
                "batch": float(counted.batch[i]),
                "saved_share": float(counted.saved_share[i]),
                "expected_share": float(counted.expected_share[i]),
                "published_share": SAMPLES.get((name, num)),
                "preempted": int(counted.num_preempted[i]),
            }
        )
    return rows


def summary(counted: Counted) -> list[Part]:
    """Puts ours beside the paper's."""
    if not counted.lengths.size:
        return []
    rows = [
        (
            row["lengths"],
            str(row["answers"]),
            f"{row['requests_per_s']:.2f}",
            f"{row['batch']:.1f}",
            units.share(row["saved_share"]),
            units.share(row["expected_share"]),
            units.share(row["published_share"]),
        )
        for row in table(counted)
    ]
    heads = ("prompts", "n", "requests/s", "batch", "saved", "lengths say", "paper's")
    note = "OPT-13B on an A100 of 40 GB, simulated; lengths after the printed means."
    return [Sheet("pages saved by several answers, simulated", heads, rows, note)]
