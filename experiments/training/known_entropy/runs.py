"""Trains models on a language: one trunk for each width, a cool-down for each length.

A trunk keeps its learning rate; where a run of some length is wanted, its last fifth
branches off and falls to zero (Hägele et al. 2024, arXiv:2405.18392). So a width costs
little more than its longest run, and compiles once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.framework import Progress
from jaxkv.models import config
from scaling.corpora import corpora
from scaling.corpora.languages.language import LanguageConfig, code_lengths
from scaling.training import OptimizerConfig, Schedule, architectures, objectives
from scaling.training.train import init, steps

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
    return config.ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=num_layers,
        num_q_heads=2,
        num_kv_heads=2,
        head_dim=width // 2,
        mlp_size=3 * width,
        max_positions=seq_len,
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
      progress: told of the tokens; may stop between runs.

    Returns:
      The runs that were finished.
    """
    corpus = corpora.open(language)
    stream, rows = jnp.asarray(corpus.stream), []
    nats = _own_losses(language, corpus.held_out, recipe)
    ends = sorted({_num_steps(length, recipe) for length in lengths})
    each = sum(ends) * COOLDOWN + ends[-1] * (1 - COOLDOWN)
    update = progress.bar("training", len(shapes) * each, "steps")
    done = 0.0
    for shape in shapes:
        call = jax.jit(
            functools.partial(
                steps,
                model=shape,
                optimizer=_OPTIMIZER,
                batch_size=recipe.batch_size,
                seq_len=recipe.seq_len,
            )
        )
        seed = jnp.int32(recipe.seed)
        trunk, at = init(shape, _OPTIMIZER, seed), 0
        for end in ends:
            if progress.stopped:
                return _columns(rows)
            stable = end - max(1, round(end * COOLDOWN))
            if stable > at:
                schedule = _schedule(shape, recipe, ends[0], 0, end)
                trunk, _ = call(trunk, stream, schedule, seed, jnp.int32(stable - at))
                at = stable
            schedule = _schedule(shape, recipe, ends[0], end - at, end)
            branch, _ = call(trunk, stream, schedule, seed, jnp.int32(end - at))
            tokens = end * recipe.batch_size * recipe.seq_len
            rows.append(_scored(shape, branch.params, tokens, corpus, nats, recipe))
            done = len(rows) // len(ends) * each + _spent(ends, len(rows) % len(ends))
            update(done)
            progress.show(
                f"width {shape.hidden_size}, {tokens:,} tokens: {rows[-1][3]:.4f} nats"
            )
    return _columns(rows)


def _num_steps(length: int, recipe: Recipe) -> int:
    return max(2, round(length / (recipe.batch_size * recipe.seq_len)))


def _spent(ends: Sequence[int], num: int) -> float:
    return sum(ends[:num]) * COOLDOWN + (ends[num - 1] * (1 - COOLDOWN) if num else 0)


def _schedule(
    shape: config.ModelConfig, recipe: Recipe, first: int, cooldown: int, end: int
) -> Schedule:
    """The schedule of a trunk, or of a branch that ends at a step.

    The warm-up is an eighth of the first, shortest run, so that all share the trunk.
    """
    rate = recipe.learning_rate * 16 / shape.hidden_size
    return Schedule.constant(rate)._replace(
        warmup=jnp.int32(max(1, first // 8)),
        cooldown=jnp.int32(cooldown),
        end=jnp.int32(end),
    )


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


def _scored(shape, params, tokens, corpus, nats, recipe) -> tuple[float, ...]:
    score = objectives.score_stream(
        params,
        corpus.held_out,
        model=shape,
        seq_len=recipe.seq_len,
        num_windows=recipe.num_windows,
        carry=recipe.carry,
        batch_size=256,
    )
    excess = score.windows - nats
    return (
        *(shape.hidden_size, architectures.parameters(shape).total, tokens),
        *(score.loss, score.loss_se),
        *(float(excess.mean()), float(excess.std(ddof=1) / len(excess) ** 0.5)),
    )


def _columns(rows: list[tuple[float, ...]]) -> Runs:
    table = np.array(rows, float).reshape(len(rows), len(Runs._fields))
    whole = [column.astype(np.int64) for column in table.T[:3]]
    return Runs(*whole, *table.T[3:])
