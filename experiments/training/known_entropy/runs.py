"""Trains models on a language: one trunk for each width, a cool-down for each length.

A trunk keeps its learning rate; where a run of some length is wanted, its last fifth
branches off and falls to zero (Hägele et al. 2024, arXiv:2405.18392). So a width costs
little more than its longest run, and compiles once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.framework import Floats, Ints, Table, column
from jaxkv import validation
from jaxkv.models import transformer
from jaxkv.progress import Progress
from scaling.corpora.languages.language import LanguageConfig, code_lengths
from scaling.sweeps import Finished, Workers, executors
from scaling.training import (
    OptimizerConfig,
    TrainConfig,
    architectures,
    objectives,
    steps_taken,
)

COOLDOWN = 0.2
"""Share of a run in which its rate falls."""
_OPTIMIZER = OptimizerConfig(kind="muon", weight_decay=0.0)


_LANGUAGE = LanguageConfig(kind="kgram", num_tokens=2**21)
_SOURCE = LanguageConfig(kind="zipf", num_tokens=2**19)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which models learn which language for how long."""

    language: LanguageConfig = _LANGUAGE
    """Of known entropy, with as many tokens as the longest run reads."""
    source: LanguageConfig = _SOURCE
    """Of independent tokens, which the smallest model learns as well."""
    widths: tuple[int, ...] = (8, 12, 16, 24, 32, 48)
    """Of the models; even."""
    num_layers: int = 2
    """Of each."""
    lengths: tuple[int, ...] = tuple(2**n for n in range(16, 22))
    """Tokens trained on."""
    fitted_from: int = 2**18
    """Fewest tokens of a run that the law is fitted to: shorter ones are still
    learning single tokens' frequencies, which is another law."""
    learning_rate: float = 0.02
    """Of width 16; times 16 over the width."""
    batch_size: int = 16
    """Windows per step."""
    seq_len: int = 32
    """Predictions per window."""
    num_windows: int = 4096
    """Held-out windows that score a run."""
    num_resamples: int = 1000
    """Resamples for the fits' intervals."""
    counted: tuple[int, ...] = tuple(2**n for n in range(9, 18))
    """Tokens that are counted."""
    repeats: int = 2000
    """Texts of each length that are counted."""
    seed: int = 0
    """Of parameters and order."""

    def __post_init__(self) -> None:
        """Refuses models that cannot be, and languages that say nothing."""
        if not self.widths or any(w < 4 or w % 4 for w in self.widths):
            raise ValueError(f"widths={self.widths!r} must be multiples of 4")
        if self.language.num_tokens < max(self.lengths, default=0):
            raise ValueError(
                f"language.num_tokens={self.language.num_tokens!r} must be at least "
                f"the longest of lengths={self.lengths!r}"
            )
        if self.source.kind != "zipf":
            raise ValueError(f"source.kind={self.source.kind!r} must be zipf")
        validation.at_least(self, "repeats", low=2)
        if len(self.counted) < 3:
            raise ValueError(f"counted={self.counted!r} must be at least three")

    @property
    def carry(self) -> int:
        """Predictions at a window's start that do not count.

        So all others see as much as the language does.
        """
        sees = {"kgram": len(self.language.mixture), "markov": self.language.order}
        return max(0, sees.get(self.language.kind, 1) - 1)


class LanguageRuns(Table):
    """One row for each run."""

    width: Ints = column("of the model")
    num_params: Ints = column("embedding included")
    num_tokens: Ints = column("trained on")
    loss: Floats = column("held out, nats per token; not a number if it diverged")
    loss_se: Floats = column("its standard error")
    excess: Floats = column(
        "of the loss over what who knows the language needs for the same tokens"
    )
    excess_se: Floats = column("smaller, as the text's chance is in both")


class LanguageScore(NamedTuple):
    """What a run is worth: columns of `LanguageRuns`."""

    loss: float
    loss_se: float
    excess: float
    excess_se: float


def train_language(
    language: LanguageConfig,
    widths: Sequence[int],
    lengths: Sequence[int],
    config: Config,
    progress: Progress,
) -> LanguageRuns:
    """Trains every width for every number of tokens, smallest first.

    Args:
      language: what to learn; it has as many tokens as the longest run.
      widths: of small transformers with two heads, their MLPs three times as wide.
      lengths: numbers of tokens.
      config: of all runs.
      progress: told of the steps; may stop them.

    Returns:
      The runs that were finished.
    """
    corpus = executors.open_corpus(language)
    # Mean code length of each scored window by the language itself.
    nats, num = code_lengths(language, corpus.held_out), len(corpus.held_out)
    place = objectives.stream_windows(
        np.arange(num, dtype=np.uint32),
        seq_len=config.seq_len,
        num_windows=config.num_windows,
    )[:, 1 + config.carry :]
    nats = nats[place - (num - len(nats))].mean(1)
    per_step = config.batch_size * config.seq_len
    ends = sorted({max(2, round(length / per_step)) for length in lengths})

    def chain(width: int) -> list[TrainConfig]:
        model = architectures.transformer(
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
            model, tokens = end.run.model, end.run.num_tokens
            num_params = architectures.parameters(model).total
            numbers = end.score or [np.nan] * 4
            rows.append((model.hidden_size, num_params, tokens, *numbers))

    for _ in workers.map(work, chains):
        pass
    return LanguageRuns.of(rows)


def describe_run(end: Finished) -> str:
    """What a person sees when a run is over."""
    run = end.run
    return f"width {run.model.hidden_size}, {run.num_tokens:,} tokens: {end.loss:.4f}"


def score_language(
    held_out: np.ndarray,
    nats: np.ndarray,
    config: Config,
    run: TrainConfig,
    params: transformer.Params,
) -> LanguageScore:
    """Scores a run beside what who knows the language needs for the same windows."""
    found = objectives.score_stream(
        params,
        held_out,
        model=run.model,
        seq_len=config.seq_len,
        num_windows=config.num_windows,
        carry=config.carry,
        batch_size=256,
    )
    excess = found.windows - nats
    excess_se = float(excess.std(ddof=1) / len(excess) ** 0.5)
    return LanguageScore(found.loss, found.loss_se, float(excess.mean()), excess_se)
