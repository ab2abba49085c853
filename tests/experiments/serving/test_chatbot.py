"""Chat: prompts with history, and the figure's claims."""

from typing import Any

import numpy as np
import pytest

from experiments.serving.chatbot import experiment
from experiments.serving.chatbot.experiment import Config
from jaxkv.workloads import SHAREGPT
from tests.support import smoke


def test_prompts_end_with_the_last_tokens_of_the_conversation() -> None:
    requests = experiment.draw_conversations(Config(hours=1.0, rounds_before=3.0))
    prompt, output = requests.tokens
    assert prompt.max() == experiment.HISTORY
    assert output.max() <= experiment.HISTORY
    # A quarter of all rounds are the first; their prompts are those of ShareGPT.
    alone = experiment.draw_conversations(Config(hours=1.0, rounds_before=0.0)).tokens
    assert alone.prompt.mean() == pytest.approx(161.31, rel=0.05)
    share = share_of_full_prompts(np.random.default_rng(5), 3 / 4, 6000)
    assert np.mean(prompt == experiment.HISTORY) == pytest.approx(share, abs=0.03)
    assert np.mean(prompt <= np.median(alone.prompt)) == pytest.approx(1 / 8, abs=0.02)


def share_of_full_prompts(rng: np.random.Generator, goes_on: float, num: int) -> float:
    """Returns the share of full prompts in conversations drawn round by round."""
    turn_lengths = SHAREGPT.draw(rng, 8 * num)
    rounds = zip(
        turn_lengths.prompt.tolist(), turn_lengths.output.tolist(), strict=True
    )
    full = 0
    for _ in range(num):
        history = 0
        while rng.random() < goes_on:
            history += sum(next(rounds))
        full += history + next(rounds)[0] >= experiment.HISTORY
    return full / num


def made_up(borne: dict[Any, float]) -> list[dict[str, Any]]:
    """Returns rows of systems whose latency crosses 0.5 s/token at given rates."""
    common = {"full_share": 0.6, "prompt_tokens": 800.0, "output_tokens": 300.0}
    common |= {"batch": 5.0, "tokens_share": 0.5, "recomputed_share": 0.0}
    return [
        common | {"system": name, "rate_per_s": rate * x, "normalised_s": 0.5 * x**2}
        for name, rate in borne.items()
        for x in (0.5, 1.0, 2.0)
    ]


def test_claims_compare_loads_at_one_latency() -> None:
    borne = dict(zip(experiment.SYSTEMS, (0.3, 0.3, 0.31, 0.6), strict=True))
    full, alike, *ratios = experiment.claims(made_up(borne))
    twice, drawn = ratios[::2], ratios[1::2]
    assert (full.verdict, full.ours) == ("differs", 0.6)
    assert (alike.verdict, alike.ours) == ("differs", pytest.approx(0.31 / 0.3))
    assert [x.ours for x in twice] == pytest.approx([2.0, 2.0, 0.6 / 0.31])
    assert {x.verdict for x in twice} == {"holds"}
    # Figure 17 crosses 0.5 s a token at 0.853 and 0.552, 0.566, 0.572 requests/s.
    assert [x.published for x in drawn] == pytest.approx([1.54, 1.51, 1.49], abs=5e-3)
    assert {x.verdict for x in drawn} == {"fails"}
    assert not experiment.claims(made_up({"paged": 0.6}))


@pytest.mark.slow
def test_smoke_serves_every_system() -> None:
    rows = smoke.run("chatbot").result
    assert {row["system"] for row in rows} == {*experiment.SYSTEMS}
    assert all(row["normalised_s"] > 0 for row in rows)
