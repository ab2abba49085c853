"""Request traces that others published: kept beside the repository, if anywhere."""

import os
from pathlib import Path

import pytest

from tests.support.folders import ROOT


def folders() -> list[Path]:
    """Where data may lie: in the folder JAXKV_DATA, or else beside the checkout."""
    if named := os.environ.get("JAXKV_DATA"):
        return [Path(named)]
    return [ROOT.parent / "shared" / "data"]


def find(name: str) -> Path:
    """Finds a file by its path in the data folder, or skips the test that asks."""
    for folder in folders():
        if (folder / name).is_file():
            return folder / name
    where = " or ".join(str(folder) for folder in folders())
    pytest.skip(f"{name} is not in {where}; JAXKV_DATA may name another folder")
