"""Claims: what a source published, what we measured, and whether it holds."""

import math
from typing import Literal, NamedTuple

Verdict = Literal["holds", "fails", "differs"]
Relation = Literal["equal", "at_least", "at_most"]


class Claim(NamedTuple):
    """One statement of a source held against our own number.

    Attributes:
      claim: the statement, in a sentence.
      source: where it was made, with section, figure or table.
      published: the number it gives, in `unit`.
      ours: the number we found, in `unit`.
      unit: the unit of both, "1" for a plain ratio.
      tolerance: how far ours may lie on the wrong side, in `unit`.
      verdict: `holds`, `fails` (same conditions, outside the tolerance) or `differs`
        (the conditions cannot be compared; `note` says why).
      relation: whether ours should be equal to the published number, at least, or at
        most that.
      note: anything a reader must know.
    """

    claim: str
    source: str
    published: float
    ours: float
    unit: str
    tolerance: float
    verdict: Verdict
    relation: Relation
    note: str


def judge(
    claim: str,
    *,
    source: str,
    published: float,
    ours: float,
    unit: str,
    tolerance: float = 0.0,
    relation: Relation = "equal",
    differs: str = "",
    note: str = "",
) -> Claim:
    """Holds a published number against ours; the verdict follows from the numbers.

    Args:
      claim: the statement, in a sentence.
      source: where it was made.
      published: its number, finite, in `unit`.
      ours: our number, in `unit`; one that is not finite never holds.
      unit: the unit of both.
      tolerance: how far ours may lie on the wrong side, in `unit`, not negative.
      relation: "equal", or a bound that ours should keep: "at_least", "at_most".
      differs: why the conditions cannot be compared; empty if they can.
      note: anything else a reader must know.

    Returns:
      The claim with its verdict.

    Raises:
      ValueError: `published` is not finite, or `tolerance` is negative.
    """
    if not math.isfinite(published):
        raise ValueError(f"{published=} must be finite")
    if not tolerance >= 0:
        raise ValueError(f"{tolerance=} must be at least 0")
    excess = {
        "equal": abs(ours - published),
        "at_least": published - ours,
        "at_most": ours - published,
    }[relation]
    verdict: Verdict = "holds" if excess <= tolerance else "fails"
    if not math.isfinite(ours):
        verdict = "fails"
    if differs:
        verdict, note = "differs", f"{differs} {note}".strip()
    return Claim(
        claim=claim,
        source=source,
        published=float(published),
        ours=float(ours),
        unit=unit,
        tolerance=float(tolerance),
        verdict=verdict,
        relation=relation,
        note=note,
    )
