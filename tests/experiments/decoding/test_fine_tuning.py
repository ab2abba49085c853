"""Fine-tuning for Jacobi decoding: claims by hand, and a small run."""

from pathlib import Path

import numpy as np
import pytest

from experiments.decoding.jacobi import fine_tuning
from experiments.decoding.jacobi.fine_tuning import (
    AFTER,
    BEFORE,
    Config,
    ModelTable,
    Result,
)
from experiments.decoding.speculation.on_text import DecodingRuns
from experiments.framework import load_experiment
from jaxkv.models import load_model
from scaling.corpora import CorpusConfig
from scaling.training import Consistency
from tests.support import smoke

STUDY = next(x for x in load_experiment("jacobi").studies if x.run is fine_tuning.run)
TINY = Config(
    corpus=CorpusConfig(held_out=0.02),
    objective=Consistency(prompt_tokens=8, block_tokens=6, text_tokens=16),
    num_texts=8,
    guesses=4,
    num_steps=10,
    batch_size=2,
    num_held_out=4,
    scored_windows=2,
    num_prompts=1,
    prompt_tokens=16,
    output_tokens=40,
    num_drafts=(3,),
    rounds=2,
)


def measured(num_other: int) -> Result:
    models = ModelTable.of([(BEFORE, 1.25, 64, 32, 16.0), (AFTER, 1.5, 64, 32, 8.0)])
    times = np.array([2e-3, 2e-3]), np.array([1e-3, 1e-3])
    runs = DecodingRuns.of(
        [
            (name, 4, 1, 0.0, 100, num, 400, 50, *times, num, num_other)
            for name, num in ((BEFORE, 150), (AFTER, 300))
        ]
    )
    steps = np.array([5, 10])
    losses = np.array([1.5, 0.5])
    return Result(models, runs, steps, losses, 5000, 200.0, "cpu")


def test_claims_on_both_models() -> None:
    tuning_result = measured(0)
    assert tuning_result.models.tokens_per_step.tolist() == [2.0, 4.0]
    lossless, tuned = fine_tuning.claims(tuning_result)
    assert (lossless.verdict, lossless.ours) == ("holds", 0)
    assert (tuned.verdict, tuned.ours) == ("differs", 1.5)
    assert "before 0.75" in tuned.claim
    assert fine_tuning.claims(measured(1))[0].verdict == "fails"
    assert len(fine_tuning.STUDY.report_parts(tuning_result)) == 2
    rows = fine_tuning.metrics(tuning_result)
    assert [row["model"] for row in rows["runs"]] == [BEFORE, AFTER]
    assert smoke.draw(STUDY, tuning_result)


def test_an_empty_run_has_no_claims() -> None:
    nothing = Result(
        ModelTable.of([]),
        DecodingRuns.of([]),
        np.zeros(0, int),
        np.zeros(0),
        0,
        0.0,
        "cpu",
    )
    assert fine_tuning.STUDY.report_parts(nothing) == []
    assert fine_tuning.claims(nothing) == []
    assert smoke.draw(STUDY, nothing)


def test_invalid_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="num_texts=0 must be at least 1"):
        Config(num_texts=0)
    with pytest.raises(ValueError, match=r"learning_rate=0\.0 must be above 0"):
        Config(learning_rate=0.0)
    with pytest.raises(ValueError, match="output_tokens=100 must be more than 128"):
        Config(output_tokens=100)


@pytest.mark.slow
def test_a_small_run_trains_exports_and_evaluates(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    result = STUDY.run(STUDY.config_type(**vars(TINY) | {"export": str(folder)}))
    assert result.models.model.tolist() == result.runs.way.tolist() == [BEFORE, AFTER]
    assert result.models.num_blocks.tolist() == [4, 4]
    assert 8 <= result.num_records <= 8 * 4
    assert (result.runs.num_tokens == 40).all()
    assert (result.runs.num_other == 0).all()
    assert result.trained[-1] == 10
    assert np.isfinite(result.loss).all()
    assert (result.models.steps <= 6).all()
    tuned_model = load_model(folder)
    assert tuned_model.tokenizer is not None
