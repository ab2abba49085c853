"""Do models approach a language's entropy as the law says, and never pass it?

Small transformers learn a language whose entropy is exact: a mixture of what follows
the last one, two and three tokens. No loss may lie below the floor, which would mean a
leak; readers of fewer tokens have floors of their own, which the losses pass one by
one. The Chinchilla law is fitted to the losses with its own floor free, and must find
the true one or say that it cannot. Beside it the lectures' first law, without any
network: who counts an independent source pays (V - 1) / 2D nats.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, judge
from experiments.plotting import style
from experiments.training.known_entropy.counts import Counts, count
from experiments.training.known_entropy.fits import Fit, fit
from experiments.training.known_entropy.runs import Recipe, Runs, model, train
from jaxkv.progress import QUIET, Progress
from scaling.corpora.languages import LanguageConfig
from scaling.corpora.languages import language as languages_language

PANELS = (1, 2)
_ENTROPY = "Shannon 1948, theorem 9: no code is shorter than the entropy"
_COUNTING = "Rissanen 1984: half of ln D nats for each parameter; per token its slope"


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
            raise ValueError(f"{self.widths=} must be multiples of 4")
        if self.language.num_tokens < max(self.lengths, default=0):
            raise ValueError(
                f"{self.language.num_tokens=} must be at least the longest of "
                f"{self.lengths=}"
            )
        if self.source.kind != "zipf":
            raise ValueError(f"{self.source.kind=} must be zipf")
        if len(self.counted) < 3 or self.repeats < 2:
            raise ValueError(
                f"{self.counted=} must be at least 3, {self.repeats=} at least 2"
            )

    @property
    def recipe(self) -> Recipe:
        """What all runs share."""
        sees = {"kgram": len(self.language.mixture), "markov": self.language.order}
        return Recipe(
            *(self.learning_rate, self.batch_size, self.seq_len, self.num_windows),
            carry=max(0, sees.get(self.language.kind, 1) - 1),
            seed=self.seed,
        )


CONFIGS = {
    "cpu": Config(),
    "smoke": Config(
        language=LanguageConfig(kind="kgram", num_tokens=2**15, num_held_out=2**14),
        source=LanguageConfig(kind="zipf", num_tokens=2**15, num_held_out=2**14),
        widths=(8, 16),
        num_layers=1,
        lengths=(2**12, 2**13, 2**14, 2**15),
        fitted_from=0,
        num_windows=256,
        num_resamples=50,
        repeats=200,
    ),
    "gpu": Config(
        language=LanguageConfig(
            kind="kgram",
            vocab_size=64,
            mixture=(0.35, 0.35, 0.30),
            num_tokens=2**26,
            num_held_out=2**20,
        ),
        widths=(16, 32, 64, 128, 256, 512),
        lengths=tuple(2**n for n in range(20, 27)),
        fitted_from=2**22,
        learning_rate=0.01,
        batch_size=128,
        seq_len=64,
        num_windows=2**13,
    ),
}


class Result(NamedTuple):
    """Losses, floors, fits.

    Attributes:
      runs: on the language.
      optima: least loss of readers of the last 0, 1, 2, ... tokens; the last is the
        floor.
      floor_se: standard error of that.
      fit: of the runs long enough.
      fit_all: of all runs.
      source_loss: of the smallest model on the independent source.
      source_excess: over its entropy on the same tokens.
      counts: of that source.
    """

    runs: Runs
    optima: np.ndarray
    floor_se: float
    fit: Fit
    fit_all: Fit
    source_loss: float
    source_excess: float
    counts: Counts


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains, counts and fits."""
    known = languages_language.optima(config.language)
    counts = count(config.source, config.counted, config.repeats)
    sizes = (config.num_layers, config.language.vocab_size, config.seq_len)
    shapes = [model(width, *sizes) for width in config.widths]
    small = dataclasses.replace(shapes[0], vocab_size=config.source.vocab_size)
    recipe, longest = config.recipe, (config.source.num_tokens,)
    alone = train(config.source, [small], longest, recipe, progress)
    runs = train(config.language, shapes, config.lengths, recipe, progress)
    late = runs.num_tokens >= config.fitted_from
    return Result(
        runs=runs,
        optima=np.array([*known.by_order[:-1], known.floor]),
        floor_se=known.floor_se,
        fit=fit(runs, late, config.num_resamples),
        fit_all=fit(runs, np.ones_like(late), config.num_resamples),
        source_loss=float(alone.loss[0]) if len(alone.loss) else np.nan,
        source_excess=float(alone.excess[0]) if len(alone.loss) else np.nan,
        counts=counts,
    )


def plot(axes: Any, result: Result) -> None:
    """Draws losses with the ladder, and what counting costs."""
    left, right = np.ravel(axes)
    runs, colors = result.runs, style.colors()
    names = ["nothing", "1 token", "2 tokens", "3 tokens"]
    start = min(runs.num_tokens, default=4) / 4  # room for what the lines are
    for seen, optimum in enumerate(result.optima):
        last = seen == len(result.optima) - 1
        left.axhline(optimum, color="0.2" if last else "0.7", lw=1.0 if last else 0.7)
        label = "the floor" if last else f"who sees {names[seen]}"
        left.text(start, optimum, label, va="bottom", fontsize=6, color="0.4")
    for index, width in enumerate(np.unique(runs.width)):
        mine = runs.width == width
        color = colors[index % len(colors)]
        left.plot(runs.num_tokens[mine], runs.loss[mine], "o-", ms=2.5, color=color)
        left.annotate(
            f"N {runs.num_params[mine][0]:,}",
            (runs.num_tokens[mine][-1], runs.loss[mine][-1]),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=5,
            va="center",
            color=color,
        )
    left.set_xscale("log")
    left.set_xlim(start / 1.2, 3 * max(runs.num_tokens, default=4))
    left.set_xlabel("tokens trained on")
    left.set_ylabel("loss [nats per token]")
    counts = result.counts
    free = _free(counts)
    right.loglog(counts.num_tokens, free / counts.num_tokens, color="0.7")
    right.loglog(counts.num_tokens, counts.excess, "o", ms=3, color=colors[5])
    right.text(0.3, 0.85, f"slope {counts.slope:.3f}", transform=right.transAxes)
    right.set_xlabel("tokens counted")
    right.set_ylabel("loss over the entropy [nats]")


def claims(result: Result) -> list[Claim]:
    """Holds every loss against the floor, and the fits against the truth."""
    runs, counts, floor = result.runs, result.counts, float(result.optima[-1])
    if not np.isfinite(runs.loss).any():
        return []
    far = (runs.loss - floor) / np.hypot(runs.loss_se, result.floor_se)
    paired = runs.excess / runs.excess_se
    found = [
        judge(
            "no loss lies below the floor, in standard errors of the loss",
            source=_ENTROPY,
            published=-3,
            ours=float(np.nanmin(far)),
            unit="1",
            relation="at_least",
        ),
        judge(
            "nor below what the language itself needs for the same tokens",
            source=_ENTROPY,
            published=-3,
            ours=float(np.nanmin(paired)),
            unit="1",
            relation="at_least",
        ),
        judge(
            "the smallest model learns independent tokens to within 1 % of their "
            "entropy",
            source=_ENTROPY,
            published=1.0,
            ours=1 + result.source_excess / counts.entropy,
            unit="1",
            tolerance=0.01,
        ),
        judge(
            "counting independent tokens, the excess falls with slope -1",
            source=_COUNTING,
            published=-1,
            ours=counts.slope,
            unit="1",
            tolerance=0.02,
        ),
        judge(
            "and is (V - 1) / 2D: its product with D for the longest text",
            source=_COUNTING,
            published=_free(counts),
            ours=float(counts.excess[-1] * counts.num_tokens[-1]),
            unit="nats",
            tolerance=4 * float(counts.excess_se[-1] * counts.num_tokens[-1]),
        ),
    ]
    for name, law in {"long runs": result.fit, "all runs": result.fit_all}.items():
        honest = law.covers(floor) or not law.identified
        found.append(
            judge(
                f"the floor fitted to {name} covers the true one in its 90 % "
                "interval, or is said to be unidentified",
                source="every fit should report its own doubt",
                published=1,
                ours=float(honest),
                unit="1",
                note=f"E {law.floor:.3f}, from {law.floor_low:.3f} to "
                f"{law.floor_high:.3f}; truth {floor:.3f}; "
                f"{'identified' if law.identified else 'not identified'}. "
                f"{law.warnings}",
            )
        )
    return found


def metrics(result: Result) -> dict[str, Any]:
    """Gives the floor, the fits and the best run."""
    learnt = np.isfinite(result.runs.loss).any()
    best = int(np.nanargmin(result.runs.loss)) if learnt else None
    return {
        "floor": float(result.optima[-1]),
        "optima": {f"who sees {seen}": loss for seen, loss in enumerate(result.optima)},
        "best_loss": None if best is None else result.runs.loss[best],
        "best_num_params": None if best is None else result.runs.num_params[best],
        "fit": result.fit._asdict(),
        "fit_all": result.fit_all._asdict(),
        "source_excess": result.source_excess,
        "counting_slope": result.counts.slope,
    }


def _free(counts: Counts) -> float:
    """Half a nat for each free parameter."""
    return counts.num_free / 2
