"""The README's Python blocks are one program, and it runs."""

import re

import numpy as np
import pytest

from experiments.framework import registry
from tests.support import engines
from tests.support.folders import ROOT

pytestmark = pytest.mark.usefixtures("fast_compile")


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
    # The policy simulated: by what it admits, by the load.
    assert space["latency"].shape == (3, 3)
    assert (np.diff(space["latency"], axis=0) < 1e-3).all()
    assert (np.diff(space["latency"], axis=1) > 0).all()


def test_the_first_example_is_twelve_lines(blocks):
    assert len(blocks[0].splitlines()) <= 12


def test_what_is_to_be_run_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    known = {x.name: x.configs for x in registry.entries()}
    configs = "|".join({config for each in known.values() for config in each})
    named = re.findall(rf"(?:jaxkv run |\| |, |^)`?([a-z_0-9]+) ({configs})\b`?", text)
    assert {name for name, _ in named} >= {"kv_cache", "prefix_caching", "sharing"}
    for name, config in named:
        assert config in known[name], f"{name} {config}"
    for name in re.findall(r"jaxkv run ([a-z_0-9]+)", text):
        assert name in known
    for path in re.findall(r"experiments/[A-Za-z_0-9/.-]*[A-Za-z_0-9]", text):
        assert (ROOT / path).exists(), path
