"""Claims: published numbers, the measured numbers, and the verdicts.

The published numbers of an experiment are in the file `claims.toml` of its folder; the
experiment returns the measured numbers. Each table of the file is a claim, and its name
is the claim's id:

    paper = "Kwon et al. 2023, arXiv:2309.06180"    # a text, for {paper} in any text

    [latency]
    claim = "{data}: pages of {low} to {high} serve best; slowest of them / best"
    source = "{paper}, figure 18b"
    kind = "cannot compare"
    differs = "Only memory is modelled: page tables add no time to a step."
    published = 1.0                     # with by = ["data"], { ShareGPT = 1.0 }
    unit = "times"
    relation = "equal"                  # or "at_least", "at_most", "within"
    tolerance = 0.1                     # "5 %" is a share of the published number
    because = "the figure's lines are as thick"
    note = "At {rate:g} requests/s."
    direction = "above 1"               # or "as stated": the direction of the source
    cause = "{causes} 1.6 times the step times give 134."   # shown if it fails
    at_any_size = true                  # a smoke run judges the claim as well

`measured("latency", 1.6, data="ShareGPT", ...)` is a measured number with the words
that fill the braces. A published range is one claim: `published = [1.7, 2.7]` with
`relation = "within"`.
"""

import dataclasses
import functools
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv import files
from jaxkv.report import (
    CLAIM_KINDS,
    Claim,
    ClaimKind,
    Direction,
    Relation,
    Verdict,
    from_plain,
)
from jaxkv.validation import ConfigRecord


def judge(
    claim: str,
    *,
    source: str,
    published: float,
    ours: float,
    unit: str,
    tolerance: float = 0.0,
    relation: Relation = "equal",
    kind: ClaimKind = "reproduces",
    note: str = "",
    published_high: float | None = None,
    needs_size: bool = False,
) -> Claim:
    """Compares a published number with a measured one and returns the claim.

    A measured number that is not finite fails. Arguments are those of `Claim`.

    Raises:
      ValueError: `published` is not finite, `tolerance` is negative, or the end of a
        range is missing or below its start.
    """
    if not math.isfinite(published):
        raise ValueError(f"{published=} must be finite")
    if not tolerance >= 0:
        raise ValueError(f"{tolerance=} must be at least 0")
    if (published_high is not None) != (relation == "within"):
        raise ValueError(
            f"{published_high=} must be set if and only if {relation=} is 'within'"
        )
    high = published if published_high is None else published_high
    if not published <= high < math.inf:
        raise ValueError(f"{published_high=} must be at least {published=}")
    excess = {
        "equal": abs(ours - published),
        "at_least": published - ours,
        "at_most": ours - published,
        "within": max(published - ours, ours - high),
    }[relation]
    verdict: Verdict = "holds" if excess <= tolerance else "fails"
    if not math.isfinite(ours):
        verdict = "fails"
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
        kind=kind,
        published_high=None if published_high is None else float(published_high),
        needs_size=needs_size,
    )


class MeasuredValue(NamedTuple):
    """A measured number for a claim of a `claims.toml`; `measured` makes it."""

    id: str
    value: float
    published: float | tuple[float, float] | None
    tolerance: float | None
    differs: bool | None
    direction: Direction | None
    note: str | None
    words: dict[str, object]


def measured(
    id: str,
    value: float,
    *,
    published: float | tuple[float, float] | None = None,
    tolerance: float | None = None,
    differs: bool | None = None,
    direction: Direction | None = None,
    note: str | None = None,
    **words: object,
) -> MeasuredValue:
    """Returns the measured number of a claim.

    Args:
      id: name of the claim's table in the file.
      value: measured number, in the claim's unit.
      published: published number or range, if it follows from the run and the file has
        none.
      tolerance: tolerance, if it follows from the run; `because` in the file gives the
        rule.
      differs: True if the file's `differs` applies; by default if the kind is "cannot
        compare".
      direction: verdict on the direction of the source, if an interval decides it; by
        default it follows from `value` and the file.
      note: replacement for the file's note, used verbatim.
      words: values for the braces in the file's texts and for the keys in `by`.
    """
    return MeasuredValue(
        id, value, published, tolerance, differs, direction, note, words
    )


type PublishedNumbers = float | tuple[float, float] | dict[str, PublishedNumbers]


class ClaimSpec(ConfigRecord):
    """A claim as written in its file; texts may contain words in braces."""

    claim: str
    """Statement, one sentence."""
    source: str
    """Publication with section, figure or table."""
    kind: ClaimKind
    published: PublishedNumbers | None = None
    """Published number, or numbers by word; None if it follows from the run."""
    by: tuple[str, ...] = ()
    """Words that select one of the published numbers."""
    unit: str
    relation: Relation = "equal"
    """Relation of the measured number to the published one: equality or a bound."""
    tolerance: float | str | None = None
    """Largest deviation in the wrong direction; "5 %" is a share of the published
    number."""
    because: str = ""
    """Reason for the size of the tolerance."""
    differs: str = ""
    """Reason why the conditions cannot be compared."""
    note: str = ""
    """Conditions and remarks."""
    direction: str = ""
    """Direction that the source states, if the conditions differ: "as stated", or a
    bound on the measured number such as "above 1", "below 1", "at least 1" or "at most
    1"."""
    cause: str = ""
    """Measured reason of a failure; written only to claims that fail."""
    fitted: str = ""
    """Quantity that was fitted to the number of a calibrated claim."""
    fitted_rows: dict[str, str] = dataclasses.field(default_factory=dict)
    """Words of the rows that were used in the fit; empty if all rows were used."""
    at_any_size: bool = False
    """True if a smoke run can judge the statement."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if isinstance(self.tolerance, str) and not _PERCENTAGE.fullmatch(
            self.tolerance
        ):
            raise ValueError(
                f"tolerance={self.tolerance!r} must be a number, or a share as '5 %'"
            )
        if self.tolerance and not self.because:
            raise ValueError("tolerance needs `because`")
        if self.kind == "cannot compare" and not self.differs:
            raise ValueError("kind='cannot compare' needs `differs`")
        if isinstance(self.published, dict) != bool(self.by):
            raise ValueError(
                "`published` must be a table if `by` is set, else a number"
            )
        if self.direction and self.kind != "cannot compare":
            raise ValueError(
                f"direction={self.direction!r} needs kind='cannot compare', not "
                f"kind={self.kind!r}"
            )
        if self.direction not in ("", AS_STATED) and not _BOUND_PATTERN.fullmatch(
            self.direction
        ):
            raise ValueError(
                f"direction={self.direction!r} must be {AS_STATED!r} or a bound such "
                "as 'above 1'"
            )
        if (self.kind == "calibrated" or bool(self.fitted_rows)) != bool(self.fitted):
            raise ValueError("`fitted` must be set if and only if a row is calibrated")

    def kind_of(self, words: Mapping[str, object]) -> ClaimKind:
        """Returns the kind of a row: calibrated if the fit used its number."""
        rows = self.fitted_rows.items()
        is_fitted = bool(rows) and all(str(words[x]) == value for x, value in rows)
        return "calibrated" if is_fitted else self.kind

    def published_number(
        self,
        words: Mapping[str, object],
        run_number: float | tuple[float, float] | None,
    ) -> float | tuple[float, float] | None:
        """Returns the published number; None if the words select no number.

        Args:
          words: values of the words.
          run_number: number that follows from the run, if the file has none.

        Raises:
          ValueError: both the file and the run have a number.
        """
        if self.published is not None and run_number is not None:
            raise ValueError("published must be in the file or in the run, not in both")
        number = run_number if self.published is None else self.published
        for name in self.by:
            number = number.get(str(words[name])) if isinstance(number, dict) else None
        return None if isinstance(number, dict) else number

    def absolute_tolerance(
        self, published: float, run_tolerance: float | None
    ) -> float:
        """Returns the tolerance in the claim's unit.

        Args:
          published: published number.
          run_tolerance: tolerance that follows from the run, if the file has none.

        Raises:
          ValueError: both the file and the run have a tolerance, or the file has no
            `because`.
        """
        if self.tolerance is not None and run_tolerance is not None:
            raise ValueError("tolerance must be in the file or in the run, not in both")
        if run_tolerance and not self.because:
            raise ValueError("tolerance needs `because`")
        if isinstance(self.tolerance, str):
            return float(self.tolerance.removesuffix("%")) / 100 * abs(published)
        return (run_tolerance if self.tolerance is None else self.tolerance) or 0.0


AS_STATED = "as stated"
"""Direction that equals the claim's own relation and tolerance."""
_PERCENTAGE = re.compile(r"[0-9.]+ %")
_BOUND_PATTERN = re.compile(r"(above|below|at least|at most) (-?[0-9.]+)")
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
}


def _direction(spec: ClaimSpec, claim: Claim) -> Direction:
    """Returns the verdict on the direction that a file states for a claim."""
    if not spec.direction or not math.isfinite(claim.ours):
        return ""
    if spec.direction == AS_STATED:
        return "holds" if claim.verdict == "holds" else "fails"
    bound = _BOUND_PATTERN.fullmatch(spec.direction)
    assert bound is not None
    holds = _COMPARISONS[bound[1]](claim.ours, float(bound[2]))
    return "holds" if holds else "fails"


class ClaimsFile:
    """Claims of one file, which is read and validated on first use.

    Args:
      path: path of the file.
    """

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _read(self) -> tuple[dict[str, str], dict[str, ClaimSpec]]:
        """Texts by name, and claims by id."""
        try:
            document = tomllib.loads(files.read_text(self.path))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{self.path}: cannot be read: {error}") from None
        words = {name: x for name, x in document.items() if isinstance(x, str)}
        for id, x in document.items():
            if isinstance(x, dict) and "kind" not in x:
                kinds = ", ".join(CLAIM_KINDS)
                raise ValueError(f"{self.path}: {id}: kind is missing; one of: {kinds}")
        claims = {
            id: from_plain(ClaimSpec, x, f"{self.path}: {id}")
            for id, x in document.items()
            if id not in words
        }
        return words, claims

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all claims."""
        return tuple(self._read[1])

    def text(self, name: str) -> str:
        """Returns a named text of the file."""
        return self._read[0][name]

    def published(self, id: str) -> Any:
        """Returns the published number of a claim, or its numbers by the words of `by`.

        Raises:
          ValueError: the file has no claim with this id.
        """
        return self._find(id).published

    def judge[R](
        self, measure: Callable[[R], Iterable[MeasuredValue]]
    ) -> Callable[[R], list[Claim]]:
        """Decorates a function of a result that yields measured numbers.

        The decorated function returns the judged claims. A measurement whose words
        select no published number is left out.
        """

        @functools.wraps(measure)
        def judged(result: R) -> list[Claim]:
            claims = (self._judge(measurement) for measurement in measure(result))
            return [claim for claim in claims if claim is not None]

        return judged

    def _find(self, id: str) -> ClaimSpec:
        if id not in self._read[1]:
            raise ValueError(f"{self.path}: has no claim {id}")
        return self._read[1][id]

    def _judge(self, measurement: MeasuredValue) -> Claim | None:
        spec = self._find(measurement.id)
        words = _Words(measurement.words)
        words.common = self._read[0]
        is_other = spec.kind == "cannot compare"
        is_other = is_other if measurement.differs is None else measurement.differs
        try:
            published = spec.published_number(words, measurement.published)
            if published is None and spec.by:
                return None
            note = spec.note.format_map(words).strip()
            note = note if measurement.note is None else measurement.note
            kind = spec.kind_of(words)
            if kind == "calibrated":
                note = f"{spec.fitted.format_map(words)} {note}".strip()
            if is_other and not spec.differs:
                raise ValueError("needs `differs`")
            low, high = published if isinstance(published, tuple) else (published, None)
            tolerance = spec.absolute_tolerance(low or 0.0, measurement.tolerance)
            if tolerance:
                note = f"{note} Tolerance: {spec.because}.".strip()
            claim = judge(
                spec.claim.format_map(words),
                source=spec.source.format_map(words),
                published=math.nan if low is None else low,
                published_high=high,
                ours=measurement.value,
                unit=spec.unit,
                tolerance=tolerance,
                relation=spec.relation,
                kind="reproduces" if kind == "cannot compare" else kind,
                note=note,
                needs_size=not (kind == "checks" or spec.at_any_size),
            )
            if not is_other and claim.verdict == "fails":
                claim = claim._replace(cause=spec.cause.format_map(words))
            if not is_other:
                return claim
            direction = measurement.direction
            is_bound = direction is None and spec.direction != AS_STATED
            return claim._replace(
                verdict="differs",
                # Checks and fitted numbers keep their kind if conditions differ.
                kind=kind if kind in ("checks", "calibrated") else "cannot compare",
                direction=_direction(spec, claim) if direction is None else direction,
                direction_bound=spec.direction if is_bound else "",
                note=f"{spec.differs.format_map(words)} {note}".strip(),
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self.path}: {measurement.id}: {error}") from None


class _Words(dict[str, object]):
    """Words of a claim, with the texts of its file as defaults."""

    common: Mapping[str, str]

    def __missing__(self, name: str) -> str:
        return self.common[name].format_map(self)


def claims_file(file: str) -> ClaimsFile:
    """Returns the `claims.toml` in the folder of a module: `claims_file(__file__)`."""
    return ClaimsFile(Path(file).with_name("claims.toml"))
