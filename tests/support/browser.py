"""Chromium without a window, for pages that have scripts."""

import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def browse(address: str, profile: Path, *flags: str) -> str:
    """Returns the document that a browser shows, without errors of its scripts.

    The test is skipped if there is no Chromium.
    """
    if _CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    flags += "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"
    flags += "--virtual-time-budget=120000", "--enable-logging=stderr"
    words = [_CHROMIUM, *flags, f"--user-data-dir={profile}", address]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert not [x for x in shown.stderr.splitlines() if "CONSOLE" in x]
    return shown.stdout
