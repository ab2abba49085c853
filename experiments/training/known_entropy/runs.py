"""Trains models on a language: a trunk per width, with a cooldown for each length.

The trunk has a constant learning rate. A run of a given length branches off for its
last fifth, in which the rate decays to 0 (Hägele et al. 2024, arXiv:2405.18392). So a
width costs little more than its longest run, and compiles once.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from experiments import lab
from jaxkv.models import Params
from scaling import training
from scaling.corpora import LanguageConfig, code_lengths
from scaling.sweeps import FinishedRun, Workers, open_on_device
from scaling.training import (
    OptimizerConfig,
    TrainConfig,
    count_model_parameters,
    score_stream,
    steps_taken,
    stream_windows,
)

COOLDOWN = 0.2
"""Share of a run in which its learning rate decays."""
_OPTIMIZER = OptimizerConfig(kind="muon", weight_decay=0.0)


_LANGUAGE = LanguageConfig(kind="kgram", num_tokens=2**21)
_SOURCE = LanguageConfig(kind="zipf", num_tokens=2**19)


class Config(lab.ConfigRecord):
    """Models, language and run lengths."""

    language: LanguageConfig = _LANGUAGE
    """Language of known entropy, with as many tokens as the longest run."""
    source: LanguageConfig = _SOURCE
    """Source of independent tokens, for the smallest model."""
    widths: tuple[int, ...] = (8, 12, 16, 24, 32, 48)
    """Hidden sizes, even."""
    num_layers: int = 2
    """Layers of each model."""
    lengths: tuple[int, ...] = tuple(2**n for n in range(16, 22))
    """Trained tokens."""
    fitted_from: int = 2**18
    """Fewest tokens of a fitted run; shorter runs still learn the frequencies of single
    tokens, which follows another law."""
    learning_rate: float = 0.02
    """Peak learning rate of width 16; scaled by 16 / width."""
    batch_size: int = 16
    """Windows per step."""
    seq_len: int = 32
    """Predictions per window."""
    num_windows: int = 4096
    """Held-out windows that score a run."""
    num_resamples: int = 1000
    """Resamples for the fits' intervals."""
    counted: Annotated[tuple[int, ...], lab.Entries(3)] = (
        *(2**n for n in range(9, 18)),
    )
    """Text lengths in tokens for counting."""
    repeats: Annotated[int, lab.Range(2)] = 2000
    """Counted texts of each length."""
    seed: int = 0
    """Seed of parameters and data order."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not self.widths or any(w < 4 or w % 4 for w in self.widths):
            raise ValueError(f"widths={self.widths!r} must be multiples of 4")
        if self.language.num_tokens < max(self.lengths, default=0):
            raise ValueError(
                f"language.num_tokens={self.language.num_tokens!r} must be at least "
                f"the longest of lengths={self.lengths!r}"
            )
        if self.source.kind != "zipf":
            raise ValueError(f"source.kind={self.source.kind!r} must be zipf")

    @property
    def carry(self) -> int:
        """Predictions at the start of a window that are not scored.

        All scored predictions have the full context of the language.
        """
        sees = {"kgram": len(self.language.mixture), "markov": self.language.order}
        return max(0, sees.get(self.language.kind, 1) - 1)


class LanguageRuns(lab.ResultTable):
    """Losses of runs on a language."""

    width: lab.Ints = lab.column("hidden size")
    num_params: lab.Ints = lab.column("parameters, embedding included")
    num_tokens: lab.Ints = lab.column("trained tokens")
    loss: lab.Floats = lab.column("held-out nats per token; NaN if the run diverged")
    loss_se: lab.Floats = lab.column("standard error of the loss")
    excess: lab.Floats = lab.column(
        "loss less the code length of the language, same tokens"
    )
    excess_se: lab.Floats = lab.column(
        "smaller than loss_se, since both share the text"
    )


class LanguageScore(NamedTuple):
    """Score of a run; fields are columns of `LanguageRuns`."""

    loss: float
    loss_se: float
    excess: float
    excess_se: float


def train_language(
    language: LanguageConfig,
    widths: Sequence[int],
    lengths: Sequence[int],
    config: Config,
    progress: lab.Progress,
) -> LanguageRuns:
    """Trains every width for every number of tokens, shortest first.

    Args:
      language: language with at least as many tokens as the longest run.
      widths: hidden sizes; models have 2 heads and an MLP of 3 times the width.
      lengths: numbers of tokens.
      config: settings of all runs.
      progress: receives progress; may stop.

    Returns:
      The finished runs.
    """
    corpus = open_on_device(language)
    # Mean code length of each scored window under the language.
    nats = code_lengths(language, corpus.held_out)
    num = len(corpus.held_out)
    place = stream_windows(
        np.arange(num, dtype=np.uint32),
        seq_len=config.seq_len,
        num_windows=config.num_windows,
    )[:, 1 + config.carry :]
    nats = nats[place - (num - len(nats))].mean(1)
    per_step = config.batch_size * config.seq_len
    ends = sorted({max(2, round(length / per_step)) for length in lengths})

    def chain(width: int) -> list[TrainConfig]:
        model = training.transformer(
            width,
            num_heads=2,
            num_layers=config.num_layers,
            mlp_size=3 * width,
            vocab_size=language.vocab_size,
            seq_len=config.seq_len,
        )
        return [
            TrainConfig(
                model=model,
                corpus=language,
                optimizer=_OPTIMIZER,
                batch_size=config.batch_size,
                seq_len=config.seq_len,
                num_steps=num_steps,
                learning_rate=config.learning_rate * 16 / width,
                # An eighth of the shortest run, so that all share the trunk.
                warmup_steps=max(1, ends[0] // 8),
                cooldown_steps=max(1, round(num_steps * COOLDOWN)),
                seed=config.seed,
            )
            for num_steps in ends
        ]

    chains = [chain(width) for width in widths]
    cooldowns = [run.cooldown_steps for run in chains[0]]
    workers = Workers(
        corpus,
        functools.partial(score_language, corpus.held_out, nats, config),
        progress,
        num_steps=len(chains) * steps_taken(ends, cooldowns),
    )
    rows: list[tuple[float, ...]] = []

    def work(runs: Sequence[TrainConfig]) -> None:
        for end in workers.train(runs, describe_run):
            model = end.run.model
            tokens = end.run.num_tokens
            num_params = count_model_parameters(model).total
            numbers = end.score or [np.nan] * 4
            rows.append((model.hidden_size, num_params, tokens, *numbers))

    for _ in workers.map(work, chains):
        pass
    return LanguageRuns.of(rows)


def describe_run(end: FinishedRun) -> str:
    """Returns the progress text of a finished run."""
    run = end.run
    return f"width {run.model.hidden_size}, {run.num_tokens:,} tokens: {end.loss:.4f}"


def score_language(
    held_out: np.ndarray,
    nats: np.ndarray,
    config: Config,
    run: TrainConfig,
    params: Params,
) -> LanguageScore:
    """Scores a run against the code length of the language on the same windows."""
    score = score_stream(
        params,
        held_out,
        model=run.model,
        seq_len=config.seq_len,
        num_windows=config.num_windows,
        carry=config.carry,
        batch_size=256,
    )
    excess = score.windows - nats
    excess_se = float(excess.std(ddof=1) / len(excess) ** 0.5)
    return LanguageScore(score.loss, score.loss_se, float(excess.mean()), excess_se)
