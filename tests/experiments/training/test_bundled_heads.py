"""Training of the bundled heads on a small scale, and the shipped heads."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import jaxkv
from experiments.training.bundled_heads import experiment
from jaxkv import files
from jaxkv.models import load_model, read_config
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig, load_heads
from tests.support import smoke
from tests.support.impatience import Stopping

KINDS = ("medusa", "eagle")
TARGET = files.BUNDLED / "stdlib-bytes"
PROMPTS = ["import os\n\ndef ", "class A:\n    def __init__(self"]


def answers(**how: Any) -> tuple[list[list[int]], float]:
    """Returns the bundled model's answers, and tokens per decoding step."""
    engine = jaxkv.Engine.load(
        TARGET, max_length=128, num_pages=16, max_slots=2, keep_trace=True, **how
    )
    done = engine.generate(PROMPTS, Sampling.greedy(max_tokens=96, ignore_eos=True))
    emitted = sum(int(info.num_emitted.sum()) for info in engine.trace)
    steps = sum(int((info.num_emitted > 0).sum()) for info in engine.trace)
    return [x.answers[0].tokens for x in done], emitted / steps


@pytest.mark.slow
def test_smoke_trains_scores_and_exports() -> None:
    smoke_run = smoke.run("bundled_heads")
    config = smoke_run.config
    result = smoke_run.result
    assert result.heads.kind.tolist() == list(KINDS)
    assert result.heads.num_tokens.tolist() == [20 * 2 * 32] * 2
    target = load_model(TARGET).config
    for kind in KINDS:
        folder = Path(f"{config.export}-{kind}")
        loaded = load_heads(folder, target)
        assert loaded.config == config.shape(kind, target)
        shares = result.acceptance.where(kind=kind).right_share
        assert sum(loaded.acceptance, ()) == pytest.approx(shares, abs=1e-4)
        assert shares[0] > 0.05
        card = (folder / "README.md").read_text()
        best = result.acceptance.where(kind=kind, rank=0).right_share
        assert all(f"| {share:.3f} |" in card for share in best)
        assert max(map(len, card.splitlines())) <= 88


def test_a_stopped_run_exports_nothing(tmp_path: Path) -> None:
    config = dataclasses.replace(
        experiment.CONFIGS["smoke"], export=str(tmp_path / "heads")
    )
    result = experiment.run(config, Stopping(0))
    assert result.heads.status.tolist() == ["stopped"]
    assert len(result.acceptance) == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_heads_fit_their_limits(kind: Any) -> None:
    config = experiment.CONFIGS["shipped"]
    folder = files.find_heads_folder("stdlib-bytes", kind)
    assert folder == Path(f"{files.BUNDLED / Path(config.export).name}-{kind}")
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 1e6
    target = read_config(TARGET)
    loaded = load_heads(folder, target)
    assert loaded.config == config.shape(kind, target)
    assert loaded.acceptance[0][0] > 0.5
    assert folder.name not in files.bundled_models()


def test_missing_heads_are_refused() -> None:
    for model, kind in (("stdlib-bytes", "hydra"), ("other", "eagle")):
        with pytest.raises(ValueError, match=f"{model}: no {kind} heads ship with it"):
            files.find_heads_folder(model, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_shipped_heads_draft_the_models_tokens(kind: Any) -> None:
    """The same tokens in half the steps or fewer, with a margin for only 2 answers."""
    bar = {"medusa": 1.7, "eagle": 2.4}[kind]
    heads = files.find_heads_folder("stdlib-bytes", kind)
    plain, one = answers()
    assert one == 1
    for how in ({"max_drafts": 4}, {"max_drafts": 8}):
        drafted_answers, tokens = answers(
            speculate=SpeculationConfig(kind, heads_folder=heads), **how
        )
        assert drafted_answers == plain
        assert tokens > bar
    chained: dict[str, Any] = {"numerics": "reproducible", "max_drafts": 4}
    exact, _ = answers(numerics="reproducible")
    drafted_answers, tokens = answers(
        speculate=SpeculationConfig(kind, heads_folder=heads), **chained
    )
    assert drafted_answers == exact
    assert tokens > bar


def test_stored_acceptance_equals_the_measured_one() -> None:
    for kind in KINDS:
        folder = files.find_heads_folder("stdlib-bytes", kind)
        raw = json.loads((folder / "config.json").read_text())
        card = (folder / "README.md").read_text()
        for depth, shares in enumerate(raw["acceptance"], 1):
            assert sum(shares) <= 1
            (printed,) = re.findall(rf"^\| {depth} \| ([\d.]+) \|", card, re.MULTILINE)
            assert float(printed) == pytest.approx(shares[0], abs=6e-4)
