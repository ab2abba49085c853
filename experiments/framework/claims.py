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
    relation = "equal"                  # or "at_least", "at_most"
    tolerance = 0.1                     # "5 %" is that of the published number
    because = "the figure's lines are as thick"
    note = "At {rate:g} requests/s."

and `ours("latency", 1.6, data="ShareGPT", ...)` is what was found, with the words.
"""

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.framework import config_json
from jaxkv import files

Verdict = Literal["holds", "fails", "differs"]
Relation = Literal["equal", "at_least", "at_most"]
Kind = Literal["reproduces", "calibrated", "cannot compare", "checks"]
"""Same conditions as a publication's; its number was used to fit something here; other
conditions; an oracle, an identity, or our own bar."""


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
      kind: what the statement is to us; "cannot compare" where the verdict is
        `differs`.
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
    differs: str = "",
    note: str = "",
) -> Claim:
    """Holds a published number against ours; the verdict follows from the numbers.

    What is not finite of ours never holds. Arguments are those of `Claim`, and
    `differs`: why the conditions cannot be compared, empty if they can.

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
        verdict, kind = "differs", "cannot compare"
        note = f"{differs} {note}".strip()
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
    )


class Ours(NamedTuple):
    """What was found on a claim of a file; made by `ours`."""

    id: str
    value: float
    published: float | None
    tolerance: float | None
    differs: bool | None
    note: str | None
    words: dict[str, Any]


def ours(
    id: str,
    value: float,
    *,
    published: float | None = None,
    tolerance: float | None = None,
    differs: bool | None = None,
    note: str | None = None,
    **words: Any,
) -> Ours:
    """Says what was found on a claim.

    Args:
      id: the claim's table in the file.
      value: our number, in its unit.
      published: its number, where that follows from the run and the file has none.
      tolerance: how far ours may lie on the wrong side, where that does; the file's
        `because` says how it follows.
      differs: whether the file's `differs` applies; by default if the kind is "cannot
        compare".
      note: instead of the file's, as it is, to the last space.
      words: what the file's texts have in braces, and what `by` picks a number by.
    """
    return Ours(id, value, published, tolerance, differs, note, words)


type Numbers = float | dict[str, Numbers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    """A claim as its file has it; texts may have words in braces."""

    claim: str
    """The statement, in a sentence."""
    source: str
    """Where it was made."""
    kind: Kind
    published: Numbers | None = None
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

    def __post_init__(self) -> None:
        """Refuses a claim that is not whole."""
        if isinstance(self.tolerance, str) and not _SHARE.fullmatch(self.tolerance):
            raise ValueError(f"{self.tolerance=} must be a number, or a share as '5 %'")
        if self.tolerance and not self.because:
            raise ValueError("has a tolerance, and no because")
        if self.kind == "cannot compare" and not self.differs:
            raise ValueError("cannot compare, and differs does not say why")
        if isinstance(self.published, dict) != bool(self.by):
            raise ValueError("has numbers by words with `by`, and else one")

    def number(self, words: Mapping[str, Any], found: float | None) -> float | None:
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

    def slack(self, published: float, found: float | None) -> float:
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


_SHARE = re.compile(r"[0-9.]+ %")


class Book:
    """The claims of a file, read and checked when the first is asked for.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _read(self) -> tuple[dict[str, str], dict[str, Said]]:
        """Words, and claims by id."""
        try:
            found = tomllib.loads(files.read_text(self.path))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{self.path}: cannot be read: {error}") from None
        words = {name: x for name, x in found.items() if isinstance(x, str)}
        claims = {
            id: config_json.restore(Said, x, f"{self.path}: {id}")
            for id, x in found.items()
            if id not in words
        }
        return words, claims

    @property
    def ids(self) -> tuple[str, ...]:
        """The claims there are."""
        return tuple(self._read[1])

    def word(self, name: str) -> str:
        """A text of the file, for claims that have it only sometimes."""
        return self._read[0][name]

    def published(self, id: str) -> Any:
        """The number of a claim, or its numbers by what `by` names, as the file has it.

        Raises:
          ValueError: there is no such claim.
        """
        return self._find(id).published

    def judges[R](
        self, found: Callable[[R], Iterable[Ours]]
    ) -> Callable[[R], list[Claim]]:
        """Makes a judge of a function that says what was found in a result.

        What has no number in a file that picks one by words is left out.
        """

        @functools.wraps(found)
        def judged(result: R) -> list[Claim]:
            claims = (self._judge(each) for each in found(result))
            return [claim for claim in claims if claim is not None]

        return judged

    def _find(self, id: str) -> Said:
        if id not in self._read[1]:
            raise ValueError(f"{self.path}: has no claim {id}")
        return self._read[1][id]

    def _judge(self, found: Ours) -> Claim | None:
        said, words = self._find(found.id), _Words(found.words)
        words.common = self._read[0]
        is_other = said.kind == "cannot compare"
        is_other = is_other if found.differs is None else found.differs
        try:
            published = said.number(words, found.published)
            if published is None and said.by:
                return None
            note = said.note.format_map(words).strip()
            note = note if found.note is None else found.note
            if is_other and not said.differs:
                raise ValueError("lacks differs")
            return judge(
                said.claim.format_map(words),
                source=said.source.format_map(words),
                published=math.nan if published is None else published,
                ours=found.value,
                unit=said.unit,
                tolerance=said.slack(published or 0.0, found.tolerance),
                relation=said.relation,
                kind="reproduces" if said.kind == "cannot compare" else said.kind,
                differs=said.differs.format_map(words) if is_other else "",
                note=note,
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self.path}: {found.id}: {error}") from None


class _Words(dict[str, Any]):
    """Words of a claim, and behind them those of its file, which may have some, too."""

    common: Mapping[str, str]

    def __missing__(self, name: str) -> str:
        return self.common[name].format_map(self)


def beside(file: str) -> Book:
    """The claims in a file beside a module, `claims.beside(__file__)`."""
    return Book(Path(file).with_name("claims.toml"))
