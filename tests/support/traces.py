"""Published request traces, which are not part of the repository."""

import os
from pathlib import Path

import pytest

from tests.support.folders import ROOT


def folders() -> list[Path]:
    """Returns the folders with data: JAXKV_DATA, or a folder next to the checkout."""
    if named := os.environ.get("JAXKV_DATA"):
        return [Path(named)]
    return [ROOT.parent / "shared" / "data"]


def find(name: str) -> Path:
    """Finds a file by its path in the data folder, or skips the test."""
    for folder in folders():
        if (folder / name).is_file():
            return folder / name
    where = " or ".join(str(folder) for folder in folders())
    pytest.skip(f"{name} is not in {where}; JAXKV_DATA may name another folder")
