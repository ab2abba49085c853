"""Claims: published and measured numbers with verdicts, grouped and as text."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from jaxkv.report import units

Verdict = Literal["holds", "fails", "differs", "not judged"]
Relation = Literal["equal", "at_least", "at_most", "within"]
ClaimKind = Literal[
    "reproduces", "recomputes", "calibrated", "cannot compare", "checks"
]
"""Kinds of claims. `reproduces`: the outcome of a run or simulation under the
conditions of the publication. `recomputes`: what a formula or the rule of an algorithm
gives, so that no measurement decides it. `calibrated`: the published number was used in
a fit. `cannot compare`: measured under different conditions. `checks`: an oracle, an
identity, or a bar of this project."""
CLAIM_KINDS: tuple[ClaimKind, ...] = get_args(ClaimKind)
Direction = Literal["", "holds", "fails", "not decided"]


class Claim(NamedTuple):
    """A statement of a source compared with a measured number.

    Attributes:
      claim: statement, one sentence.
      source: publication with section, figure or table.
      published: published number, in `unit`.
      ours: measured number, in `unit`.
      unit: unit of both numbers; "1" for a ratio.
      tolerance: largest deviation in the wrong direction that still holds, in `unit`.
      verdict: `holds`, `fails` (same conditions, outside the tolerance), `differs` (the
        conditions differ, so that the numbers cannot be compared; `note` gives the
        reason) or `not judged` (a smoke run is too small for the statement).
      relation: relation that the measured number must have to the published one: equal
        to it, at least it, at most it, or within the range that starts with it.
      note: conditions and remarks.
      kind: kind of the statement, one of `CLAIM_KINDS`.
      published_high: end of a published range, in `unit`; None for a single number.
      direction: verdict on the direction that a source states, for numbers that cannot
        be compared; empty if the source states no direction.
      direction_bound: bound on the measured number that the direction means, such as
        "above 1"; empty if it is the claim's own relation, or an interval decides it.
      cause: measured reason of a failure, or the experiment that would decide it; empty
        if the claim does not fail, or the cause is not known.
      needs_size: True if a smoke run is too small to judge the statement. Not written
        to files.
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
    kind: ClaimKind
    published_high: float | None = None
    direction: Direction = ""
    direction_bound: str = ""
    cause: str = ""
    needs_size: bool = False

    def as_json(self) -> dict[str, object]:
        """Returns the fields by name, without optional fields at their default."""
        unset = self._field_defaults
        fields = self._replace(needs_size=False)._asdict()
        return {x: y for x, y in fields.items() if x not in unset or y != unset[x]}

    def at_smoke_size(self) -> "Claim":
        """Returns the claim for a smoke run: not judged if it needs a larger run."""
        if not self.needs_size:
            return self
        note = f"A smoke run is too small for it. {self.note}".strip()
        return self._replace(
            verdict=NOT_JUDGED, direction="", direction_bound="", note=note
        )


NOT_JUDGED: Verdict = "not judged"


def name_verdict(verdict: Verdict) -> str:
    """Returns a verdict as it is shown, in the singular."""
    return _PLURAL_VERBS["differs"] if verdict == "differs" else verdict


_BOUND_PHRASES = {"at_least": "to be at least ", "at_most": "to be at most "}


def claim_numbers(claim: Claim) -> str:
    """Returns the measured and the published number as one phrase.

    The number of a check is called expected instead of published. A bound may be the
    published number, or a direction that the source states.
    """
    unit = "" if claim.unit == "1" else f" {claim.unit}"
    word = "expected " if claim.kind == "checks" else "published "
    word = _BOUND_PHRASES.get(claim.relation, word)
    numbers = units.format_number(claim.published)
    if claim.published_high is not None:
        numbers += f" to {units.format_number(claim.published_high)}"
    slack = (
        f", to within {units.format_number(claim.tolerance)}"
        f"{' points' if claim.unit == '%' else unit}"
        if claim.tolerance
        else ""
    )
    bound = f" ({claim.direction_bound})" if claim.direction_bound else ""
    direction = f"; its direction{bound}: {claim.direction}" if claim.direction else ""
    return (
        f"ours {units.format_number(claim.ours)}{unit}, "
        f"{word}{numbers}{unit}{slack} "
        f"({claim.source}){direction}"
    )


ClaimGroup = Literal["reproductions", "recomputed", "calibrated", "checks"]
"""Groups of claims. `reproductions`: published outcomes, under the same or other
conditions. `recomputed`: published results of formulas and rules. `calibrated`: numbers
that a fit used. `checks`: oracles, identities and bars of this project."""
_GROUP_TITLES: Mapping[ClaimGroup, str] = {
    "reproductions": "claims",
    "recomputed": "recomputed",
    "calibrated": "calibrated",
    "checks": "own checks",
}
_PLURAL_VERBS = {
    "holds": "hold",
    "fails": "fail",
    "differs": "cannot be compared",
    NOT_JUDGED: f"{NOT_JUDGED}: smoke",
}


def group_claims(claims: Iterable[Claim]) -> dict[ClaimGroup, list[Claim]]:
    """Returns the claims by group, in the given order."""
    groups: dict[ClaimGroup, list[Claim]] = {name: [] for name in _GROUP_TITLES}
    named: dict[str, ClaimGroup] = {
        "recomputes": "recomputed",
        "calibrated": "calibrated",
        "checks": "checks",
    }
    for claim in claims:
        groups[named.get(claim.kind, "reproductions")].append(claim)
    return groups


def count_verdicts(claims: Iterable[Claim]) -> dict[str, dict[str, int]]:
    """Counts verdicts by group, and directions of numbers that cannot be compared.

    Returns:
      Number of claims per verdict, by group and for `directions`.
    """
    listed = list(claims)
    counts = {
        name: _counts(x.verdict for x in y) for name, y in group_claims(listed).items()
    }
    directions = _counts(x.direction for x in listed if x.direction)
    del directions["differs"]
    return {**counts, "directions": directions}


def _counts(words: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(("holds", "fails", "differs"), 0)
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def group_heads(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """Returns the claims of each non-empty group by a heading that counts verdicts."""
    heads = {}
    for name, listed in group_claims(claims).items():
        counts = _counts(claim.verdict for claim in listed)
        # Checks and calibrated numbers rarely differ: zero counts are left out.
        shown = {x: n for x, n in counts.items() if n or x in ("holds", "fails")}
        shown = counts if name == "reproductions" else shown
        counted = (f"{n} {_PLURAL_VERBS[x]}" for x, n in shown.items())
        if listed:
            heads[f"{_GROUP_TITLES[name]}: {', '.join(counted)}"] = listed
    return heads
