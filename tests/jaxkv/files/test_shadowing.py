"""A user's own file that hides a package of the project."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("scaling.py", "from scaling.costs import count_parameters"),
        ("scaling/__init__.py", "import scaling.costs"),
        ("experiments/__init__.py", "from experiments.framework import measured"),
    ],
)
def test_a_script_next_to_such_a_file_gets_one_line(
    tmp_path: Path, file: str, line: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("MINE = 7\n")
    name = line.split()[1].partition(".")[0]
    script = tmp_path / "script.py"
    script.write_text(f"import jaxkv\nimport {name}\nassert {name}.MINE == 7\n{line}\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {path} hides the package `{name}` of jaxkv")
