"""Trains models on a language: one trunk for each width, a cool-down for each length.

A trunk keeps its learning rate; where a run of some length is wanted, its last fifth
branches off and falls to zero (Hägele et al. 2024, arXiv:2405.18392). So a width costs
little more than its longest run, and compiles once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.models import config, transformer
from jaxkv.progress import Progress
from scaling.corpora.languages.language import LanguageConfig, code_lengths
from scaling.sweeps import branching, executors, workers
from scaling.training import (
    OptimizerConfig,
    TrainConfig,
    architectures,
    objectives,
    steps_taken,
)

COOLDOWN = 0.2
_OPTIMIZER = OptimizerConfig(kind="muon", weight_decay=0.0)


class Recipe(NamedTuple):
    """What all runs share.

    Attributes:
      learning_rate: of a model of width 16; others have it times 16 over their width.
      batch_size: windows per step.
      seq_len: predictions per window.
      num_windows: that are scored.
      carry: predictions at their start that do not count, so that all others see as
        much as the language does.
      seed: of the parameters and the order.
    """

    learning_rate: float
    batch_size: int
    seq_len: int
    num_windows: int
    carry: int
    seed: int


class Runs(NamedTuple):
    """One entry for each run.

    Attributes:
      width: of the model.
      num_params: its parameters, embedding included.
      num_tokens: trained on.
      loss: on the held-out text, in nats per token; NaN if it diverged.
      loss_se: its standard error.
      excess: of the loss over what who knows the language needs for the same tokens.
      excess_se: its standard error, smaller as the text's chance is in both.
    """

    width: np.ndarray
    num_params: np.ndarray
    num_tokens: np.ndarray
    loss: np.ndarray
    loss_se: np.ndarray
    excess: np.ndarray
    excess_se: np.ndarray


def model(width: int, num_layers: int, vocab_size: int, seq_len: int):
    """A small transformer with two heads, and an MLP of three times its width."""
    return architectures.transformer(
        width,
        num_heads=2,
        num_layers=num_layers,
        mlp_size=3 * width,
        vocab_size=vocab_size,
        seq_len=seq_len,
    )


def train(
    language: LanguageConfig,
    shapes: Sequence[config.ModelConfig],
    lengths: Sequence[int],
    recipe: Recipe,
    progress: Progress,
) -> Runs:
    """Trains every shape for every number of tokens, smallest first.

    Args:
      language: what to learn; it has as many tokens as the longest run.
      shapes: of the models.
      lengths: numbers of tokens.
      recipe: of all runs.
      progress: told of the steps; may stop them.

    Returns:
      The runs that were finished.
    """
    corpus = executors.open_corpus(language)
    nats = _own_losses(language, corpus.held_out, recipe)
    per_step = recipe.batch_size * recipe.seq_len
    ends = sorted({max(2, round(length / per_step)) for length in lengths})
    chains = [[_config(language, x, recipe, ends[0], n) for n in ends] for x in shapes]
    all_workers = workers.Workers(
        corpus,
        functools.partial(_score, corpus.held_out, nats, recipe),
        progress,
        num_steps=sum(
            steps_taken(ends, [run.cooldown_steps for run in runs]) for runs in chains
        ),
    )
    rows: list[tuple[float, ...]] = []

    def work(runs: Sequence[TrainConfig]) -> None:
        for finished in all_workers.train(runs, _shown):
            shape, tokens = finished.run.model, finished.run.num_steps * per_step
            sizes = (shape.hidden_size, architectures.parameters(shape).total, tokens)
            rows.append((*sizes, *(finished.score or _Score(*[np.nan] * 4))))

    for _ in all_workers.map(work, chains):
        pass
    return _columns(rows)


class _Score(NamedTuple):
    """Columns of `Runs`."""

    loss: float
    loss_se: float
    excess: float
    excess_se: float


def _config(
    language: LanguageConfig,
    shape: config.ModelConfig,
    recipe: Recipe,
    first: int,
    num_steps: int,
) -> TrainConfig:
    """A run; the warm-up is an eighth of the shortest one, so all share the trunk."""
    return TrainConfig(
        model=shape,
        corpus=language,
        optimizer=_OPTIMIZER,
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len,
        num_steps=num_steps,
        learning_rate=recipe.learning_rate * 16 / shape.hidden_size,
        warmup_steps=max(1, first // 8),
        cooldown_steps=max(1, round(num_steps * COOLDOWN)),
        seed=recipe.seed,
    )


def _shown(finished: branching.Finished) -> str:
    run, scored = finished.run, finished.score
    tokens = run.num_steps * run.batch_size * run.seq_len
    loss = scored.loss if scored else np.nan
    return f"width {run.model.hidden_size}, {tokens:,} tokens: {loss:.4f} nats"


def _own_losses(
    language: LanguageConfig, held_out: np.ndarray, recipe: Recipe
) -> np.ndarray:
    """Mean code length of each scored window by the language itself."""
    place = objectives.stream_windows(
        np.arange(len(held_out), dtype=np.uint32),
        seq_len=recipe.seq_len,
        num_windows=recipe.num_windows,
    )[:, 1 + recipe.carry :]
    nats = code_lengths(language, held_out)
    return nats[place - (len(held_out) - len(nats))].mean(1)


def _score(
    held_out: np.ndarray,
    nats: np.ndarray,
    recipe: Recipe,
    run: TrainConfig,
    params: transformer.Params,
) -> _Score:
    found = objectives.score_stream(
        params,
        held_out,
        model=run.model,
        seq_len=recipe.seq_len,
        num_windows=recipe.num_windows,
        carry=recipe.carry,
        batch_size=256,
    )
    excess = found.windows - nats
    excess_se = float(excess.std(ddof=1) / len(excess) ** 0.5)
    return _Score(found.loss, found.loss_se, float(excess.mean()), excess_se)


def _columns(rows: list[tuple[float, ...]]) -> Runs:
    table = np.array(rows, float).reshape(len(rows), len(Runs._fields))
    whole = [column.astype(np.int64) for column in table.T[:3]]
    return Runs(*whole, *table.T[3:])
