"""Claims: what a source published, what we measured, and whether it holds.

What was published stands beside an experiment in a file, `claims.toml`; the experiment
says what it found. A table of that file is a claim, its name the claim's id:

    paper = "Kwon et al. 2023, arXiv:2309.06180"    # a word, for {paper} in any text

    [latency]
    claim = "{data}: pages of {low} to {high} serve best; slowest of them / best"
    source = "{paper}, figure 18b"
    kind = "cannot compare"
    differs = "Ours is memory alone: tables cost a step nothing."
    published = 1.0                     # with by = ["data"], { ShareGPT = 1.0 }
    unit = "times"
    relation = "equal"                  # or "at_least", "at_most", "within"
    tolerance = 0.1                     # "5 %" is that of the published number
    because = "the figure's lines are as thick"
    note = "At {rate:g} requests/s."
    direction = "above 1"               # or "as stated"; what the source states of it
    from_memory = true                  # the number was not read in the source
    at_any_size = true                  # a smoke run judges it as well

and `ours("latency", 1.6, data="ShareGPT", ...)` is what was found, with the words. A
published range is one claim: `published = [1.7, 2.7]` with `relation = "within"`.
"""

import dataclasses
import functools
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from experiments.framework import config_json
from jaxkv import files

Verdict = Literal["holds", "fails", "differs", "not judged"]
Relation = Literal["equal", "at_least", "at_most", "within"]
Kind = Literal["reproduces", "calibrated", "cannot compare", "checks"]
"""Same conditions as a publication's; its number was used to fit something here; other
conditions; an oracle, an identity, or our own bar."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Direction = Literal["", "holds", "fails", "not decided"]


class Claim(NamedTuple):
    """One statement of a source held against our own number.

    Attributes:
      claim: the statement, in a sentence.
      source: where it was made, with section, figure or table.
      published: the number it gives, in `unit`.
      ours: the number we found, in `unit`.
      unit: the unit of both, "1" for a plain ratio.
      tolerance: how far ours may lie on the wrong side, in `unit`.
      verdict: `holds`, `fails` (same conditions, outside the tolerance), `differs`
        (the conditions cannot be compared; `note` says why) or `not judged` (a smoke
        run is too small for the statement).
      relation: whether ours should be equal to the published number, at least, or at
        most that, or within the range that begins there.
      note: anything a reader must know.
      kind: the kind of the statement, one of `KINDS`.
      published_high: the end of a published range, in `unit`; None for one number.
      direction: the verdict on the direction that a source states, where its number
        cannot be compared; empty where it states none.
      needs_size: True if a smoke run is too small to judge the statement; not written
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
    kind: Kind
    published_high: float | None = None
    direction: Direction = ""
    needs_size: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name, without optional ones that are not set."""
        unset = self._field_defaults
        fields = self._replace(needs_size=False)._asdict()
        return {x: y for x, y in fields.items() if x not in unset or y != unset[x]}

    def at_smoke_size(self) -> "Claim":
        """Returns the claim as a smoke run reports it: judged if it needs no size."""
        if not self.needs_size:
            return self
        note = f"A smoke run is too small for it. {self.note}".strip()
        return self._replace(verdict=NOT_JUDGED, direction="", note=note)


NOT_JUDGED: Verdict = "not judged"


def judge(
    claim: str,
    *,
    source: str,
    published: float,
    ours: float,
    unit: str,
    tolerance: float = 0.0,
    relation: Relation = "equal",
    kind: Kind = "reproduces",
    note: str = "",
    published_high: float | None = None,
    needs_size: bool = False,
) -> Claim:
    """Holds a published number against ours; the verdict follows from the numbers.

    What is not finite of ours never holds. Arguments are those of `Claim`.

    Raises:
      ValueError: `published` is not finite, `tolerance` is negative, or the end of a
        range is missing, or below its beginning.
    """
    if not math.isfinite(published):
        raise ValueError(f"{published=} must be finite")
    if not tolerance >= 0:
        raise ValueError(f"{tolerance=} must be at least 0")
    if (published_high is not None) != (relation == "within"):
        raise ValueError(f"{relation=} and {published_high=}: a range has both")
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


class Measurement(NamedTuple):
    """What was found on a claim of a file; made by `ours`."""

    id: str
    value: float
    published: float | tuple[float, float] | None
    tolerance: float | None
    differs: bool | None
    direction: Direction | None
    note: str | None
    words: dict[str, Any]


def measured(
    id: str,
    value: float,
    *,
    published: float | tuple[float, float] | None = None,
    tolerance: float | None = None,
    differs: bool | None = None,
    direction: Direction | None = None,
    note: str | None = None,
    **words: Any,
) -> Measurement:
    """Says what was found on a claim.

    Args:
      id: the claim's table in the file.
      value: our number, in its unit.
      published: its number or range, where that follows from the run and the file has
        none.
      tolerance: how far ours may lie on the wrong side, where that does; the file's
        `because` says how it follows.
      differs: whether the file's `differs` applies; by default if the kind is "cannot
        compare".
      direction: the verdict on the source's direction, where an interval decides it;
        by default it follows from `value` and the file.
      note: instead of the file's, as it is, to the last space.
      words: what the file's texts have in braces, and what `by` picks a number by.
    """
    return Measurement(id, value, published, tolerance, differs, direction, note, words)


type PublishedNumbers = float | tuple[float, float] | dict[str, PublishedNumbers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """A claim as its file has it; texts may have words in braces."""

    claim: str
    """The statement, in a sentence."""
    source: str
    """Where it was made."""
    kind: Kind
    published: PublishedNumbers | None = None
    """Its number, or numbers by words; none where it follows from the run."""
    by: tuple[str, ...] = ()
    """The words that pick one."""
    unit: str
    relation: Relation = "equal"
    """Whether ours should be equal to the number, or a bound that it should keep."""
    tolerance: float | str | None = None
    """How far ours may lie on the wrong side; "5 %" is a share of the number."""
    because: str = ""
    """Why so far."""
    differs: str = ""
    """Why the conditions cannot be compared."""
    note: str = ""
    """Anything else a reader must know."""
    direction: str = ""
    """The direction that the source states, where the conditions differ: "as stated",
    or a bound of ours, as "above 1", "below 1", "at least 1" or "at most 1"."""
    fitted: str = ""
    """The quantity that was fitted to the number, of a calibrated claim."""
    fitted_rows: dict[str, str] = dataclasses.field(default_factory=dict)
    """The words of the rows that were used in the fit; empty if all of them were."""
    from_memory: bool = False
    """True if the number was set down from memory, not read in the source."""
    at_any_size: bool = False
    """True if a smoke run can judge the statement."""

    def __post_init__(self) -> None:
        """Refuses a claim that is not whole."""
        if isinstance(self.tolerance, str) and not _SHARE.fullmatch(self.tolerance):
            raise ValueError(
                f"tolerance={self.tolerance!r} must be a number, or a share as '5 %'"
            )
        if self.tolerance and not self.because:
            raise ValueError("has a tolerance, and no because")
        if self.kind == "cannot compare" and not self.differs:
            raise ValueError("cannot compare, and differs does not say why")
        if isinstance(self.published, dict) != bool(self.by):
            raise ValueError("has numbers by words with `by`, and else one")
        if self.direction and self.kind != "cannot compare":
            raise ValueError(
                f"has a direction, and kind={self.kind!r} is judged itself"
            )
        if self.direction not in ("", AS_STATED) and not _BOUND.fullmatch(
            self.direction
        ):
            raise ValueError(
                f"direction={self.direction!r} must be {AS_STATED!r}, or as 'above 1'"
            )
        if (self.kind == "calibrated" or bool(self.fitted_rows)) != bool(self.fitted):
            raise ValueError(
                "must have `fitted` if any row is calibrated, and else none"
            )

    def kind_of(self, words: Mapping[str, Any]) -> Kind:
        """Returns the kind of a row: calibrated if the fit used its number."""
        rows = self.fitted_rows.items()
        is_fitted = bool(rows) and all(str(words[x]) == value for x, value in rows)
        return "calibrated" if is_fitted else self.kind

    def published_number(
        self, words: Mapping[str, Any], found: float | tuple[float, float] | None
    ) -> float | tuple[float, float] | None:
        """The published number, found where the file has none; None if words have none.

        Raises:
          ValueError: both have one.
        """
        if self.published is not None and found is not None:
            raise ValueError("published is given twice")
        number = found if self.published is None else self.published
        for name in self.by:
            number = number.get(str(words[name])) if isinstance(number, dict) else None
        return None if isinstance(number, dict) else number

    def absolute_tolerance(self, published: float, found: float | None) -> float:
        """The tolerance, found where the file has none, in the claim's unit.

        Raises:
          ValueError: both have one, or nothing says why.
        """
        if self.tolerance is not None and found is not None:
            raise ValueError("tolerance is given twice")
        if found and not self.because:
            raise ValueError("lacks the tolerance's because")
        if isinstance(self.tolerance, str):
            return float(self.tolerance.removesuffix("%")) / 100 * abs(published)
        return (found if self.tolerance is None else self.tolerance) or 0.0


AS_STATED = "as stated"
"""A direction that is the claim's own relation, with its tolerance."""
_SHARE = re.compile(r"[0-9.]+ %")
_BOUND = re.compile(r"(above|below|at least|at most) (-?[0-9.]+)")
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
}


def _direction(said: ClaimSpec, claim: Claim) -> Direction:
    """Returns the verdict on the direction that a file states for a claim."""
    if not said.direction or not math.isfinite(claim.ours):
        return ""
    if said.direction == AS_STATED:
        return "holds" if claim.verdict == "holds" else "fails"
    bound = _BOUND.fullmatch(said.direction)
    assert bound is not None
    holds = _COMPARED[bound[1]](claim.ours, float(bound[2]))
    return "holds" if holds else "fails"


class ClaimsFile:
    """The claims of a file, read and checked when the first is asked for.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _read(self) -> tuple[dict[str, str], dict[str, ClaimSpec]]:
        """Words, and claims by id."""
        try:
            found = tomllib.loads(files.read_text(self.path))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{self.path}: cannot be read: {error}") from None
        words = {name: x for name, x in found.items() if isinstance(x, str)}
        for id, x in found.items():
            if isinstance(x, dict) and "kind" not in x:
                known = ", ".join(KINDS)
                raise ValueError(f"{self.path}: {id}: kind is missing; one of: {known}")
        claims = {
            id: config_json.from_plain(ClaimSpec, x, f"{self.path}: {id}")
            for id, x in found.items()
            if id not in words
        }
        return words, claims

    @property
    def ids(self) -> tuple[str, ...]:
        """The claims there are."""
        return tuple(self._read[1])

    def text(self, name: str) -> str:
        """A text of the file, for claims that have it only sometimes."""
        return self._read[0][name]

    def published(self, id: str) -> Any:
        """The number of a claim, or its numbers by what `by` names, as the file has it.

        Raises:
          ValueError: there is no such claim.
        """
        return self._find(id).published

    def judge[R](
        self, found: Callable[[R], Iterable[Measurement]]
    ) -> Callable[[R], list[Claim]]:
        """Makes a judge of a function that says what was found in a result.

        What has no number in a file that picks one by words is left out.
        """

        @functools.wraps(found)
        def judged(result: R) -> list[Claim]:
            claims = (self._judge(each) for each in found(result))
            return [claim for claim in claims if claim is not None]

        return judged

    def _find(self, id: str) -> ClaimSpec:
        if id not in self._read[1]:
            raise ValueError(f"{self.path}: has no claim {id}")
        return self._read[1][id]

    def _judge(self, found: Measurement) -> Claim | None:
        said, words = self._find(found.id), _Words(found.words)
        words.common = self._read[0]
        is_other = said.kind == "cannot compare"
        is_other = is_other if found.differs is None else found.differs
        try:
            published = said.published_number(words, found.published)
            if published is None and said.by:
                return None
            note = said.note.format_map(words).strip()
            note = note if found.note is None else found.note
            kind = said.kind_of(words)
            if kind == "calibrated":
                note = f"{said.fitted.format_map(words)} {note}".strip()
            if is_other and not said.differs:
                raise ValueError("lacks differs")
            low, high = published if isinstance(published, tuple) else (published, None)
            source = said.source.format_map(words)
            claim = judge(
                said.claim.format_map(words),
                source=f"{source}; {FROM_MEMORY}" if said.from_memory else source,
                published=math.nan if low is None else low,
                published_high=high,
                ours=found.value,
                unit=said.unit,
                tolerance=said.absolute_tolerance(low or 0.0, found.tolerance),
                relation=said.relation,
                kind="reproduces" if kind == "cannot compare" else kind,
                note=note,
                needs_size=not (kind == "checks" or said.at_any_size),
            )
            if not is_other:
                return claim
            direction = found.direction
            return claim._replace(
                verdict="differs",
                # A check stays one where a run is too small for it, or differs from it.
                kind="cannot compare" if kind == "reproduces" else kind,
                direction=_direction(said, claim) if direction is None else direction,
                note=f"{said.differs.format_map(words)} {note}".strip(),
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self.path}: {found.id}: {error}") from None


FROM_MEMORY = "set down from memory"
"""Follows the source of a number that was not read in it."""


class _Words(dict[str, Any]):
    """Words of a claim, and behind them those of its file, which may have some, too."""

    common: Mapping[str, str]

    def __missing__(self, name: str) -> str:
        return self.common[name].format_map(self)


def claims_file(file: str) -> ClaimsFile:
    """The claims in a file beside a module, `claims.beside(__file__)`."""
    return ClaimsFile(Path(file).with_name("claims.toml"))
