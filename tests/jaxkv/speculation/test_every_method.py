"""Every lossless method gives the tokens of plain decoding: a trained model, 200
prompts.

Numerics are fast, as in serving, and trees are included: a token may differ where
rounding decides between two with nearly equal scores.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import files, models
from jaxkv.models import LoadedModel, init_params, load_model, read_config
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig, methods
from scaling.corpora import STANDARD_LIBRARY, open_corpus
from scaling.training import stream_windows

pytestmark = pytest.mark.usefixtures("full_optimization")

FOLDER = files.BUNDLED / "stdlib-bytes"
NUM = 200
PROMPT = 24
ANSWER = 40
NEARLY_EQUAL = 1e-3
"""Difference of two logits that counts as a tie, some hundred times the rounding
error."""
HOW: dict[str, dict[str, Any]] = {
    "draft-model": {"draft_folder": FOLDER},
    "medusa": {"heads_folder": files.BUNDLED / "stdlib-bytes-medusa"},
    "eagle": {"heads_folder": files.BUNDLED / "stdlib-bytes-eagle"},
}


def with_module() -> LoadedModel:
    """The model with a random module for multi-token prediction."""
    model = load_model(FOLDER)
    config = dataclasses.replace(model.config, num_ahead_layers=1)
    module_params = init_params(config, jax.random.key(0))["ahead"]
    return model._replace(
        config=config, params={**model.params, "ahead": module_params}
    )


@functools.cache
def prompts() -> list[list[int]]:
    """Pieces of held-out code of different lengths."""
    stream = open_corpus(STANDARD_LIBRARY).held_out
    pieces = stream_windows(stream, seq_len=PROMPT - 1, num_windows=NUM)
    return [piece[i % (PROMPT - 1) :].tolist() for i, piece in enumerate(pieces)]


def answers(max_slots: int = 16, num: int = NUM, **how: Any) -> list[list[int]]:
    engine = jaxkv.Engine.load(
        FOLDER,
        num_pages=8 * max_slots,
        max_slots=max_slots,
        max_length=PROMPT + ANSWER,
        max_sequences=2 * max_slots,
        prefix_cache=True,
        steps_per_call=2,
        **how,
    )
    ask = Sampling.greedy(max_tokens=ANSWER, ignore_eos=True)
    return [x.answers[0].tokens for x in engine.generate(prompts()[:num], ask)]


@functools.cache
def plain() -> list[list[int]]:
    return answers()


@jax.jit
def logits_of(params: Any, tokens: Any) -> Any:
    config = read_config(FOLDER)
    return models.logits(params, tokens, config=config)


def gap(context: list[int], tokens: list[int]) -> float:
    """Returns how far the two tokens differ, and how far the best is above both."""
    padded = np.zeros((1, PROMPT + ANSWER), np.int32)
    padded[0, : len(context)] = context
    params = load_model(FOLDER).params
    scores = np.asarray(logits_of(params, jnp.asarray(padded)))[0, len(context) - 1]
    return float(scores.max() - scores[tokens].min())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "adaptive"),
    [*((method, False) for method in methods.METHOD_NAMES), ("ngram", True)],
)
def test_tokens_are_those_of_plain_decoding(method: str, adaptive: bool) -> None:
    speculate: Any = {"method": method, "adaptive": adaptive} | HOW.get(method, {})
    how: dict[str, Any] = {"speculate": SpeculationConfig(**speculate)}
    if method == "mtp":
        how["loaded"] = with_module()
    how |= {"max_drafts": 8, "num_draft_buckets": 2 if adaptive else 1}
    batches = [answers(**how)]
    if method == "ngram" and not adaptive:
        batches.append(answers(max_slots=1, num=40, **how))
    num_other = 0
    for batch in batches:
        for prompt, got, want in zip(prompts(), batch, plain(), strict=False):
            assert len(got) == len(want) == ANSWER
            same = [a == b for a, b in zip(got, want, strict=True)]
            if all(same):
                continue
            place = same.index(False)
            assert gap(prompt + want[:place], [got[place], want[place]]) < NEARLY_EQUAL
            num_other += 1
    assert num_other <= 2
