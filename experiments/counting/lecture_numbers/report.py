"""What the lectures say of serving, held against bounds; their questions, answered."""

import math
from typing import TYPE_CHECKING

from experiments.framework import Claim, judge, units

if TYPE_CHECKING:
    from experiments.counting.lecture_numbers.experiment import Result

USED = {
    "gpt3-175b": 10,
    "gpt3-13b": 1,
    "gpt3-2.7b": 1,
    "gpt3-760m": 1,
    "gpt3-125m": 1,
}
"""Cards, of the lecture's table."""
SECONDS = {
    "gpt3-175b": 20.0,
    "gpt3-13b": 7.6,
    "gpt3-2.7b": 2.7,
    "gpt3-760m": 1.1,
    "gpt3-125m": 0.3,
}
"""Time of 256 tokens, of the same table."""
SAID_TOKENS = 256

_TABLE = "lecture on serving LLMs: table of latencies"
_SERVING = "lecture on serving LLMs"
_PAPER = "Kwon et al. 2023, arXiv:2309.06180"


def lecture_s(result: "Result", index: int) -> float:
    """The table's time, scaled to the tokens that were generated here."""
    name = str(result.latencies.model[index])
    return SECONDS[name] * result.latencies.tokens / SAID_TOKENS


def claims(result: "Result") -> list[Claim]:
    """Judges every figure; the bounds are ours, the efficiencies follow."""
    return [
        _cards(result),
        *_times(result),
        _one_card(result),
        *_requests(result),
        *_keys_and_values(result),
        *_growth(result),
    ]


def _cards(result: "Result") -> Claim:
    latencies = result.latencies
    weights, need = float(latencies.weight_bytes[0]), int(latencies.num_devices[0])
    return judge(
        "GPT-3 175B in half precision needs at least ten A100s of 40 GB",
        source=_SERVING,
        published=10,
        ours=need,
        unit="cards",
        differs=f"The weights are {units.size(weights)}; {need} whole cards hold them "
        "and little else. What the lecture keeps free is not said: ten follow if less "
        f"than {weights / 9e9:.1f} GB of each card can be filled with weights.",
    )


def _times(result: "Result") -> list[Claim]:
    found = []
    for i, name in enumerate(result.latencies.model):
        bound, said = float(result.latencies.bound_s[i]), lecture_s(result, i)
        used = int(result.latencies.used[i])
        note = f"Implies {100 * bound / said:.0f} % of the bandwidth"
        if used > 1:
            turns = float(result.latencies.turns_s[i])
            note += (
                f" of {used} cards at once. Cards that work in turn would need "
                f"{turns:.0f} s at best, so {math.ceil(turns / said)} at least read at "
                "a time"
            )
        found.append(
            judge(
                f"{name.removeprefix('gpt3-')}: {result.latencies.tokens} tokens take "
                f"no less than reading the weights as often",
                source=_TABLE,
                published=said,
                ours=bound,
                unit="s",
                relation="at_most",
                note=f"{note}.",
            )
        )
    return found


def _one_card(result: "Result") -> Claim:
    latencies = result.latencies
    return judge(
        "the models of 13B and less fit one A100 each",
        source=_TABLE,
        published=1,
        ours=int(latencies.num_devices[1:].max()),
        unit="cards",
        note=f"The largest has {units.size(float(latencies.weight_bytes[1]))}.",
    )


def _requests(result: "Result") -> list[Claim]:
    requests = result.requests
    what = "LLaMA-13B on an A100 serves less than one request a second"
    lengths = "Requests of ShareGPT's mean lengths; the lecture's are not given."
    return [
        judge(
            f"{what}, one at a time",
            source=_SERVING,
            published=1,
            ours=requests.alone,
            unit="requests/s",
            relation="at_most",
            note=lengths,
        ),
        judge(
            f"{what}, several at a time",
            source=_SERVING,
            published=1,
            ours=requests.together,
            unit="requests/s",
            relation="at_most",
            differs=f"Our bound has the {requests.batch} requests whose keys and "
            "values fit at their mean length running all the time, without a gap; the "
            "lecture's batch is not given. One request a second is "
            f"{_share(1, requests.together)} of the bound.",
            note=lengths,
        ),
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "no share"


def _keys_and_values(result: "Result") -> list[Claim]:
    kept = result.kept
    return [
        judge(
            "LLaMA-2-70B runs on four A100s",
            source=_SERVING,
            published=4,
            ours=kept.devices_70b,
            unit="cards",
            note=f"Beside the weights, K and V of {kept.tokens_70b:,.0f} tokens fit on "
            "four of 40 GB; its 8 KV heads divide by four.",
        ),
        judge(
            "a token's keys and values take at least half a megabyte: LLaMA-7B",
            source=_SERVING,
            published=0.5,
            ours=kept.small / 1e6,
            unit="MB",
            relation="at_least",
        ),
        judge(
            "and at most one megabyte: LLaMA-13B",
            source=f"{_SERVING}; {_PAPER}, section 3, gives 800 KB for OPT-13B",
            published=1.0,
            ours=kept.large / 1e6,
            unit="MB",
            relation="at_most",
        ),
        judge(
            "those of a request take up to 1.6 GB: OPT-13B, 2,048 tokens",
            source=f"{_PAPER}, section 3",
            published=1.6,
            ours=kept.request / 2**30,
            unit="GiB",
            tolerance=0.05,
            note=f"{kept.request / 1e9:.3f} GB of 1e9 bytes.",
        ),
    ]


def _growth(result: "Result") -> list[Claim]:
    growth = result.growth
    pairs = (
        ("without a cache attention's work grows as t^3", growth.scores_without, 3),
        ("with one as t^2", growth.scores_with, 2),
    )
    last = f"exponent between the last two lengths, {growth.length[-2]:,} and "
    return [
        judge(
            claim,
            source=_SERVING,
            published=exponent,
            ours=math.log2(values[-1] / values[-2]),
            unit="1",
            tolerance=0.01,
            note=f"The {last}{growth.length[-1]:,} tokens.",
        )
        for claim, values, exponent in pairs
    ]


def answers(result: "Result") -> list[tuple[str, str]]:
    """Answers what the lectures ask aloud."""
    growth = result.growth
    one, batched, long = (
        (result.intensity[0, 0], result.intensity[0, 0]),
        (result.intensity[0, 6], result.intensity[1, 6]),
        (result.intensity[2, 6], result.intensity[2, -1]),
    )
    saved = growth.all_without[-1] / growth.all_with[-1]
    return [
        (
            "Do we cache Q?",
            "No. The query of a position is met once, by the keys before it, in the "
            "step in which its token is fed; a later token brings a query of its own. "
            "Keys and values are met again by every later query: they are kept, "
            f"{result.kept.small:,.0f} bytes a token of LLaMA-7B. Queries would be "
            "half as much again, never read.",
        ),
        (
            "What happens at b = s = 1?",
            "Every matrix meets a single column: two operations for each weight, two "
            f"bytes read for it, {one[0]:.2f} operations a byte. {result.device} needs "
            f"{result.ridge:.0f} to keep its units busy, so they are "
            f"{100 * one[0] / result.ridge:.1f} % of the time: memory alone decides.",
        ),
        (
            "What does a batch do to intensity?",
            "Weights are read once for all: operations a byte grow with the batch, "
            f"{batched[0]:.0f} at 64 sequences of LLaMA-7B that have just begun. Keys "
            "and values are each sequence's own and grow with it: with 128 tokens kept "
            f"of each {batched[1]:.0f} are left, with 2,048 {long[0]:.1f}, and at "
            f"a batch of 512 no more than {long[1]:.1f}.",
        ),
        (
            "What does the cache save?",
            f"At {growth.length[-1]:,} tokens {saved:,.0f} times the operations: "
            "without it every token is fed again for each new one, t^2 / 2 tokens "
            "instead of t, and attention t^3 / 3 pairs instead of t^2 / 2.",
        ),
    ]
