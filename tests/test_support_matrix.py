"""The support matrix equals the one that its script makes from the code."""

import importlib.util
import sys

import pytest

from tests.support.folders import ROOT


@pytest.mark.slow
def test_the_support_matrix_is_generated() -> None:
    path = ROOT / "docs" / "make_support.py"
    spec = importlib.util.spec_from_file_location("make_support", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "make_support", script)
        spec.loader.exec_module(script)
        page = script.make_page()
    committed = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == committed, "run `python docs/make_support.py`"
