"""Claims files: error messages of invalid ones, and validity of the shipped ones."""

import re
from pathlib import Path

import pytest

from experiments.cli import results_page
from experiments.framework import MeasuredValue, claims_file
from experiments.framework.claims import ClaimsFile, judge, measured
from jaxkv.report import Claim, claim_numbers, count_verdicts, group_heads

TEXT = """
paper = "They 2020, of {data}"

[rate]
claim = "{data}: {size:.1f} serve best"
source = "{paper}, figure 1"
kind = "reproduces"
published = { a = { 1 = 2.0 } }
by = ["data", "size"]
unit = "times"
tolerance = 0.1
because = "as printed"
differs = "Another machine, {device}."
note = "{paper}?"

[half]
claim = "half"
source = "us"
kind = "checks"
unit = "1"
because = "as it follows"

[share]
claim = "a share"
source = "us"
kind = "checks"
published = -4
unit = "1"
tolerance = "5 %"
because = "small"
"""


def book(folder: Path, text: str) -> ClaimsFile:
    (folder / "claims.toml").write_text(text)
    return claims_file(str(folder / "module.py"))


def test_a_claim_is_formatted_and_judged(tmp_path: Path) -> None:
    measurements = [
        measured("rate", 2.05, data="a", size=1),
        measured("rate", 9.0, data="a", size=2),  # no published number
        measured("rate", 9.0, differs=True, data="a", size=1, device="cpu"),
        measured("half", 0.5, published=0.6, tolerance=0.2),
        measured("share", -4.1),
    ]
    judge = book(tmp_path, TEXT).judge(lambda result: measurements)
    one, other, half, share = judge(None)
    assert (one.claim, one.source) == ("a: 1.0 serve best", "They 2020, of a, figure 1")
    assert (one.verdict, one.note) == (
        "holds",
        "They 2020, of a? Tolerance: as printed.",
    )
    assert (other.verdict, other.note) == (
        "differs",
        "Another machine, cpu. They 2020, of a? Tolerance: as printed.",
    )
    assert (half.published, half.tolerance, half.verdict) == (0.6, 0.2, "holds")
    assert (share.tolerance, share.verdict) == (0.2, "holds")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            'kind = "checks"',
            'kind = "holds"',
            "kind: 'holds' is not one of: reproduces",
        ),
        ('because = "as printed"\n', "", "rate: tolerance needs `because`"),
        ('kind = "checks"', 'kind = "cannot compare"', "needs `differs`"),
        ('"5 %"', '"5"', "share: tolerance='5' must be a number, or a share"),
        ('unit = "1"', "unit = 1", "unit: 1 is not of type str"),
        ('unit = "1"\n', "", "missing 1 required keyword-only argument: 'unit'"),
        (
            'unit = "1"',
            'units = "1"',
            "unknown field 'units'; did you mean unit?",
        ),
        (
            'by = ["data", "size"]\n',
            "",
            "rate: `published` must be a table if `by` is set",
        ),
        ("[half]", "[half", "cannot be read"),
    ],
)
def test_errors_of_a_claims_file_are_reported(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    wrong = book(tmp_path, TEXT.replace(before, after))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _ = wrong.ids
    assert str(tmp_path / "claims.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("measurement", "message"),
    [
        (measured("third", 1), "has no claim third"),
        (
            measured("rate", 1, published=2.0, data="a", size=1),
            "published must be in the file or in the run",
        ),
        (measured("half", 1, differs=True, published=1), "half: needs `differs`"),
        (measured("half", 1), "must be finite"),
    ],
)
def test_measurements_that_contradict_the_file_are_rejected(
    measurement: MeasuredValue, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        book(tmp_path, TEXT).judge(lambda result: [measurement])(None)


FILES = sorted(results_page.RESULTS_PAGE.parent.rglob("claims.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_shipped_claim_is_valid_and_used(path: Path) -> None:
    modules = path.parent.glob("*.py")
    code = "\n".join(module.read_text("utf-8") for module in modules)
    assert ClaimsFile(path).ids
    for id in ClaimsFile(path).ids:
        assert f'"{id}"' in code, id


KINDS = """
[range]
claim = "a range"
source = "they"
kind = "reproduces"
published = { a = [1.7, 2.7] }
by = ["data"]
unit = "1"
relation = "within"

[other]
claim = "other conditions"
source = "they"
kind = "cannot compare"
differs = "Another machine."
published = 2.0
unit = "1"
direction = "above 1"

[stated]
claim = "stated"
source = "they"
kind = "cannot compare"
differs = "Another machine."
published = 1.0
unit = "1"
relation = "at_most"
tolerance = 0.1
because = "our bar"
direction = "as stated"

[fitted]
claim = "{data}"
source = "they"
kind = "reproduces"
published = { a = 1.0, b = 2.0 }
by = ["data"]
unit = "1"
fitted = "Lengths follow from it."
fitted_rows = { data = "a" }

[small]
claim = "small"
source = "they"
kind = "reproduces"
published = 1
unit = "1"
at_any_size = true

[check]
claim = "a check"
source = "an oracle"
kind = "checks"
differs = "Too few."
published = 0
unit = "1"
"""


def judged(folder: Path, *measurements: MeasuredValue) -> list[Claim]:
    return book(folder, KINDS).judge(lambda result: measurements)(None)


def test_a_published_range_is_one_claim_with_one_verdict(tmp_path: Path) -> None:
    values = (1.5, 1.7, 2.7, 2.8)
    claims = judged(tmp_path, *(measured("range", x, data="a") for x in values))
    assert [x.verdict for x in claims] == ["fails", "holds", "holds", "fails"]
    assert {(x.published, x.published_high) for x in claims} == {(1.7, 2.7)}
    assert "published 1.7 to 2.7 (they)" in claim_numbers(claims[0])
    with pytest.raises(ValueError, match="must be set if and only if"):
        judge("c", source="s", published=1.0, ours=1.0, unit="1", relation="within")


def test_a_direction_is_judged_if_the_number_cannot_be_compared(tmp_path: Path) -> None:
    claims = judged(
        tmp_path,
        measured("other", 1.5),
        measured("other", 0.5),
        measured("other", 1.5, direction="not decided"),
        measured("stated", 1.05),
        measured("stated", 1.2),
    )
    assert {(x.verdict, x.kind) for x in claims} == {("differs", "cannot compare")}
    ways = ["holds", "fails", "not decided", "holds", "fails"]
    assert [x.direction for x in claims] == ways
    assert claim_numbers(claims[1]).endswith("; its direction (above 1): fails")
    assert claim_numbers(claims[2]).endswith("; its direction: not decided")


def test_kinds_depend_on_rows_and_checks_remain_checks(tmp_path: Path) -> None:
    a, b, check, other = judged(
        tmp_path,
        measured("fitted", 1.0, data="a"),
        measured("fitted", 3.0, data="b"),
        measured("check", 0.0),
        measured("check", 1.0, differs=True),
    )
    assert (a.kind, a.verdict) == ("calibrated", "holds")
    assert a.note == "Lengths follow from it."
    assert (b.kind, b.verdict) == ("reproduces", "fails")
    assert (check.kind, check.verdict) == ("checks", "holds")
    assert (other.kind, other.verdict) == ("checks", "differs")
    # The number of a check is not published.
    assert claim_numbers(check) == "ours 0, expected 0 (an oracle)"
    counts = count_verdicts([a, b, check, other])
    assert counts["reproductions"] == {"holds": 0, "fails": 1, "differs": 0}
    assert counts["calibrated"] == {"holds": 1, "fails": 0, "differs": 0}
    assert counts["checks"] == {"holds": 1, "fails": 0, "differs": 1}


def test_a_smoke_run_judges_only_checks(tmp_path: Path) -> None:
    rows = judged(
        tmp_path,
        measured("fitted", 1.0, data="a"),
        measured("fitted", 1.0, data="b"),
        measured("other", 1.5),
        measured("check", 1.0),
        measured("small", 1.0),
    )
    claims = [x.at_smoke_size() for x in rows]
    verdicts = [*3 * ["not judged"], "fails", "holds"]
    assert [x.verdict for x in claims] == verdicts
    assert not any(x.direction for x in claims)
    heads = [*group_heads(claims)]
    assert heads[0].endswith("0 cannot be compared, 2 not judged: smoke")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('kind = "checks"\n', "", "check: kind is missing; one of: reproduces, rec"),
        (
            'fitted = "Lengths follow from it."\n',
            "",
            "`fitted` must be set if and only if",
        ),
        ('"above 1"', '"up"', "other: direction='up' must be 'as stated' or a bound"),
        (
            'kind = "checks"',
            'kind = "checks"\ndirection = "above 1"',
            "needs kind='cannot compare'",
        ),
    ],
)
def test_an_invalid_claim_is_rejected_by_name(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    wrong = book(tmp_path, KINDS.replace(before, after))
    with pytest.raises(ValueError, match=re.escape(message)):
        _ = wrong.ids
