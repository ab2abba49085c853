"""Chat: conversations that are read again, and the figure's claims."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.framework import registry, run_folder
from experiments.serving.chatbot.experiment import (
    CONFIGS,
    HISTORY,
    SYSTEMS,
    Config,
    claims,
    load,
    run,
)


def test_prompts_are_the_last_words_of_what_was_said() -> None:
    requests = load(Config(hours=1.0, rounds_before=3.0))
    prompt, output = requests.tokens
    assert prompt.max() == HISTORY
    assert output.max() <= HISTORY
    # A quarter of all rounds are the first; their prompts are those of ShareGPT.
    alone = load(Config(hours=1.0, rounds_before=0.0)).tokens
    assert alone.prompt.mean() == pytest.approx(161.31, rel=0.05)
    assert 0.4 < np.mean(prompt == HISTORY) < 0.75
    assert np.mean(prompt <= np.median(alone.prompt)) == pytest.approx(1 / 8, abs=0.02)


def made_up(borne: dict[Any, float]) -> list[dict[str, Any]]:
    """Rows of systems whose latency passes 0.5 s a token at given rates."""
    common = {"full_share": 0.6, "prompt_tokens": 800.0, "output_tokens": 300.0}
    common |= {"batch": 5.0, "tokens_share": 0.5, "recomputed_share": 0.0}
    return [
        common | {"system": name, "rate_per_s": rate * x, "normalised_s": 0.5 * x**2}
        for name, rate in borne.items()
        for x in (0.5, 1.0, 2.0)
    ]


def test_claims_compare_loads_at_one_latency() -> None:
    borne = dict(zip(SYSTEMS, (0.3, 0.3, 0.31, 0.6), strict=True))
    full, alike, *twice = claims(made_up(borne))
    assert (full.verdict, full.ours) == ("differs", 0.6)
    assert (alike.verdict, alike.ours) == ("differs", pytest.approx(0.31 / 0.3))
    assert [x.ours for x in twice] == pytest.approx([2.0, 2.0, 0.6 / 0.31])
    assert {x.verdict for x in twice} == {"holds"}
    assert not claims(made_up({"paged": 0.6}))


@pytest.mark.slow
def test_smoke_serves_every_system(tmp_path: Path) -> None:
    experiment = registry.load("chatbot")
    result = run(CONFIGS["smoke"])
    assert {row["system"] for row in result} == {*SYSTEMS}
    assert all(row["normalised_s"] > 0 for row in result)
    run_folder.begin(tmp_path, experiment, CONFIGS["smoke"])
    run_folder.finish(tmp_path, experiment, result, duration_s=1.0)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hours=0.0), "hours=0.0 must be above 0"),
        (dict(num_rates=1), "must be at least 2"),
        (dict(rounds_before=-1.0), "must be at least 0"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config(), **fields)
