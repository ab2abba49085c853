"""What lectures and a published measurement say of batching, held against ours."""

import numpy as np

from experiments.framework import Claim, judge
from experiments.serving.batching import lectures
from experiments.serving.batching.drawing import PUBLISHED
from experiments.serving.batching.sweeps import Result, Speeds

_ANYSCALE = (
    "Daniel et al. 2023 (Anyscale), How continuous batching enables 23x throughput in "
    "LLM inference: OPT-13B, A100-40GB"
)
_PROGRAMS = (
    "Theirs compares programs, each with its own kernels (FasterTransformer, "
    "text-generation-inference, vLLM); here only scheduling and reservation differ."
)


_LIMITS, _COST = (32.0, 128.0, 512.0, 1536.0), "opt-13b-a100-40gb"


def claims(result: Result) -> list[Claim]:
    """Judges them all; what was not swept has none."""
    limits = result.limits
    is_theirs = (*limits.value.tolist(),) == _LIMITS and result.where == _COST
    other = "" if is_theirs else "Other loads, or another machine, than the published."
    return [*_pictures(result), *_limits(limits, other), *_batches(result)]


def _pictures(r: Result) -> list[Claim]:
    cells = lectures.NUM_SLOTS * lectures.PLACES
    pairs = (
        ("static", r.static_sequences, lectures.STATIC),
        ("continuous", r.continuous_sequences, lectures.CONTINUOUS),
    )
    found = [
        judge(
            f"S1 to S7 under {name} batching fill T1 to T8 as drawn",
            source=lectures.FIGURE,
            published=cells,
            ours=lectures.num_equal(lectures.grid(times), drawn),
            unit="cells",
            note=lectures.FROM_MEMORY,
        )
        for name, times, drawn in pairs
    ]
    ours = lectures.batches(r.continuous_requests)[: len(lectures.BATCHES)]
    return [
        *found,
        judge(
            "R1 to R5, three at a time: the batch of each of three iterations",
            source=lectures.STEPS,
            published=len(lectures.BATCHES),
            ours=sum(x == y for x, y in zip(ours, lectures.BATCHES, strict=False)),
            unit="iterations",
            note=f"Ours: {', then '.join(ours)}.",
        ),
        judge(
            "scheduled request by request, nobody joins a batch that runs",
            source="Yu et al. 2022 (Orca), section 3, challenge 1",
            published=0,
            ours=lectures.num_joined(r.static_requests),
            unit="requests",
        ),
    ]


def _limits(found: Speeds, other: str) -> list[Claim]:
    """Those of the published sweep, over all its limits."""
    if not found.value.size:
        return []
    static, continuous, paged = found.means()
    gain, more = continuous / static, paged / continuous
    spread, pages = (
        ", ".join(
            f"{g:.2f} up to {v:,.0f}" for g, v in zip(x, found.value, strict=True)
        )
        for x in (gain, more)
    )
    longest = f"outputs up to {found.value[-1]:,.0f} tokens"
    return [
        judge(
            "continuous batching is never slower than static batching",
            source=_ANYSCALE,
            published=1.0,
            ours=float(gain.min()),
            unit="times",
            relation="at_least",
            differs=other,
            note=f"Ours: {spread}.",
        ),
        judge(
            "the gain grows with the variance of outputs: least growth between limits",
            source=_ANYSCALE,
            published=0.0,
            ours=float(np.diff(gain).min()),
            unit="times",
            relation="at_least",
            differs=other,
        ),
        judge(
            "where outputs vary least, static and continuous do about the same",
            source=f"{_ANYSCALE}, outputs up to 32 tokens",
            published=1.0,
            ours=float(gain[0]),
            unit="times",
            tolerance=0.15,
            differs=other,
            note="Their words and the mean of 128 tokens are quoted from memory; the "
            "tolerance is our reading of 'approximately'.",
        ),
        judge(
            "pages are never slower than reserving the longest output",
            source=_ANYSCALE,
            published=1.0,
            ours=float(more.min()),
            unit="times",
            relation="at_least",
            differs=other,
        ),
        judge(
            f"continuous over static batching, {longest}",
            source=f"{_ANYSCALE}: 8x of text-generation-inference over 4x of "
            "FasterTransformer",
            published=PUBLISHED["continuous"],
            ours=float(gain[-1]),
            unit="times",
            tolerance=0.5,
            differs=_PROGRAMS,
        ),
        judge(
            f"pages taken as sequences grow over static batching, {longest}",
            source=f"{_ANYSCALE}: 23x of vLLM over 4x of FasterTransformer",
            published=PUBLISHED["paged"],
            ours=float(paged[-1] / static[-1]),
            unit="times",
            tolerance=1.0,
            differs=_PROGRAMS,
        ),
        judge(
            "pages more than double continuous batching at every limit",
            source=f"{_ANYSCALE}; its reason, they suppose, is space taken as needed",
            published=2.0,
            ours=float(more.min()),
            unit="times",
            relation="at_least",
            differs=_PROGRAMS,
            note=f"Memory alone gives {pages}: little where the limit is short, since "
            "little is reserved in vain.",
        ),
    ]


def _batches(r: Result) -> list[Claim]:
    source = "lecture on serving LLMs: one request for latency, many for throughput"
    c, d = r.clients, r.deviations
    most = int(c.clients[-1])
    equal = d.steps[0, 0] / d.steps[1, 0]
    found = [
        judge(
            "a batch of one has the lowest latency",
            source=source,
            published=1,
            ours=float(c.clients[np.argmin(c.s_per_token)]),
            unit="requests",
            note=f"{most} side by side take {c.s_per_token[-1] / c.s_per_token[0]:.2f} "
            "times as long for a token.",
        ),
        judge(
            "the largest batch has the highest throughput",
            source=source,
            published=most,
            ours=float(c.clients[np.nanargmax(c.tokens_per_s)])
            if np.isfinite(c.tokens_per_s).any()
            else np.nan,
            unit="requests",
            note=f"{c.tokens_per_s[-1] / c.tokens_per_s[0]:.1f} times that of one.",
        ),
    ]
    if d.value[0] == 0:
        found.append(
            judge(
                "where all outputs are equal, static batching takes no more steps",
                source="Yu et al. 2022 (Orca), section 3: batches lose by requests "
                "that end early",
                published=1.0,
                ours=float(equal.mean()),
                unit="times",
                tolerance=0.01,
                differs=""
                if r.limits.value.size
                else "Prompts share the rows of a step here, so requests begin apart.",
            )
        )
    return found
