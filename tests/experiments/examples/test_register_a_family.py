"""A family registered from outside of the package is counted and served."""

import pytest

from experiments.examples import register_a_family
from jaxkv.models import FAMILIES


@pytest.mark.thorough
def test_a_registered_family_is_counted_and_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILIES, "late", register_a_family.LATE)  # undone at the end
    del FAMILIES["late"]
    assert len(register_a_family.main()) == 8
    assert capsys.readouterr().out.startswith("19616 parameters\nserved: [")
