"""Claims as data: a wrong file is told what is wrong, and those that ship are right."""

import re
from pathlib import Path

import pytest

from experiments.cli import results_page
from experiments.framework import claims
from experiments.framework.claims import Book, ours

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
because = "so said"
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


def book(folder: Path, text: str) -> Book:
    (folder / "claims.toml").write_text(text)
    return claims.beside(str(folder / "module.py"))


def test_a_claim_is_filled_and_judged(tmp_path: Path) -> None:
    found = [
        ours("rate", 2.05, data="a", size=1),
        ours("rate", 9.0, data="a", size=2),  # of which nothing is published
        ours("rate", 9.0, differs=True, data="a", size=1, device="cpu"),
        ours("half", 0.5, published=0.6, tolerance=0.2),
        ours("share", -4.1),
    ]
    judge = book(tmp_path, TEXT).judges(lambda result: found)
    one, other, half, share = judge(None)
    assert (one.claim, one.source) == ("a: 1.0 serve best", "They 2020, of a, figure 1")
    assert (one.verdict, one.note) == ("holds", "They 2020, of a?")
    assert (other.verdict, other.note) == (
        "differs",
        "Another machine, cpu. They 2020, of a?",
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
        ('because = "so said"\n', "", "rate: has a tolerance, and no because"),
        ('kind = "checks"', 'kind = "cannot compare"', "differs does not say why"),
        ('"5 %"', '"5"', "share: self.tolerance='5' must be a number, or a share"),
        ('unit = "1"', "unit = 1", "unit: 1 is not of type str"),
        ('unit = "1"\n', "", "missing 1 required keyword-only argument: 'unit'"),
        (
            'unit = "1"',
            'units = "1"',
            "unknown field 'units'; did you mean unit?",
        ),
        ('by = ["data", "size"]\n', "", "rate: has numbers by words with `by`"),
        ("[half]", "[half", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    wrong = book(tmp_path, TEXT.replace(before, after))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _ = wrong.ids
    assert str(tmp_path / "claims.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ours("third", 1), "has no claim third"),
        (ours("rate", 1, published=2.0, data="a", size=1), "published is given twice"),
        (ours("half", 1, differs=True, published=1), "half: lacks differs"),
        (ours("half", 1), "must be finite"),
    ],
)
def test_what_does_not_fit_its_claim_is_said(
    found: claims.Ours, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        book(tmp_path, TEXT).judges(lambda result: [found])(None)


FILES = sorted(results_page.PAGE.parent.rglob("claims.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_claim_that_ships_is_whole_and_asked_for(path: Path) -> None:
    modules = path.parent.glob("*.py")
    code = "\n".join(module.read_text("utf-8") for module in modules)
    assert Book(path).ids
    for id in Book(path).ids:
        assert f'"{id}"' in code, id
