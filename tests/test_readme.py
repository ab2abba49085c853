"""The README's Python blocks are one program, and it runs."""

import re
from pathlib import Path

import pytest

from tests import engines

pytestmark = pytest.mark.usefixtures("fast_compile")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", ["a small one", pytest.param("its own", marks=pytest.mark.slow)]
)
def test_every_block_runs(model, blocks, tmp_path, monkeypatch, capsys):
    if model == "a small one":
        folder = tmp_path / "experiments" / "models" / "stdlib-bytes"
        engines.save_tiny_model(folder, max_positions=1024)
    monkeypatch.chdir(tmp_path if model == "a small one" else ROOT)
    space: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), space)
    printed = capsys.readouterr().out
    assert "def read_lines(path):" in printed
    # Three requests of eight tokens, one at a time.
    emitted = space["trace"].num_emitted
    assert emitted.sum() == 24
    assert emitted.sum(axis=1).max() == 1


def test_the_first_example_is_twelve_lines(blocks):
    assert len(blocks[0].splitlines()) <= 12
