"""What `rivals` compares: the sides, what was said of each, and how long they train."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxkv import validation
from jaxkv.models import ModelConfig
from scaling.corpora import corpora
from scaling.training import OptimizerConfig, RecurrentConfig, architectures


class Side(NamedTuple):
    """One way to build and train a model, at any size.

    Attributes:
      name: for tables and figures.
      base: the model but for its size.
      optimizer: how it is trained.
      rates: the learning rates tried first, rising, evenly in their logarithm.
    """

    name: str
    base: architectures.Architecture
    optimizer: OptimizerConfig
    rates: tuple[float, ...]


# No weight decay on any side: what it is worth differs with the rate's unit.
_ADAM = OptimizerConfig(kind="adamw", weight_decay=0.0)
_SGD = OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.0)
# Where the transformer's best of short runs is near 0.01, a recurrent net's is 0.05.
_RATES, _RECURRENT_RATES = (2e-3, 6e-3, 1.8e-2), (6e-3, 1.8e-2, 5.4e-2)
_SGD_RATES = (0.1, 0.3, 0.9)

REFERENCE = "transformer"
RECURRENT: tuple[Literal["lstm", "gru"], ...] = ("lstm", "gru")
_CHANGES: Mapping[str, dict[str, Any]] = {
    REFERENCE: {},
    "sgd": {},
    "1 layer": {"num_layers": 1},
    "4 layers": {"num_layers": 4},
    "6 layers": {"num_layers": 6},
    "learned positions": {"positions": "learned"},
    "relu": {"gated": False, "activation": "relu", "mlp_size": 12},
    "gelu": {"gated": False, "activation": "gelu", "mlp_size": 12},
}


class Published(NamedTuple):
    """What a source says of a side's compute to equal loss, over the reference's.

    Attributes:
      source: where.
      claim: that it is at least 1, or that both follow one trend.
    """

    source: str
    claim: Literal["more", "one_trend"] = "more"


_KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"
_SHAZEER = "Shazeer 2020, arXiv:2002.05202, table 1"
PAIRS = {
    "lstm": Published(f"{_KAPLAN}, figure 7"),
    "gru": Published(f"{_KAPLAN}, figure 7, of LSTMs"),
    "sgd": Published("the lectures: compare optimizers by two fitted curves"),
    "1 layer": Published(f"{_KAPLAN}, figure 6"),
    # "The performance of models with different depths converge to a single trend."
    "4 layers": Published(f"{_KAPLAN}, figure 6", "one_trend"),
    "6 layers": Published(f"{_KAPLAN}, figure 6", "one_trend"),
    "learned positions": Published("Su et al. 2021, arXiv:2104.09864, section 4"),
    "relu": Published(_SHAZEER),
    "gelu": Published(_SHAZEER),
}
"""What the reference is compared with, each with what was said of it."""


def side(name: str, *, vocab_size: int, seq_len: int, head_dim: int) -> Side:
    """Makes a side.

    Args:
      name: `transformer` or a key of `PAIRS`. The transformer has two layers, SwiGLU,
        RMS norms and rotary positions, the others differ from it as their names say.
        LSTM and GRU have two layers, each with a layer norm before it and its input
        added to what comes out.
      vocab_size: of the corpus.
      seq_len: longest sequence.
      head_dim: of a transformer's heads.

    Raises:
      ValueError: there is no such side.
    """
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_positions": seq_len}
    if name in RECURRENT:
        base = RecurrentConfig(**sizes, hidden_size=1, num_layers=2, kind=name)
        return Side(name, base, _ADAM, _RECURRENT_RATES)
    if name not in _CHANGES:
        raise ValueError(f"sides={name!r} must be in {[*PAIRS]}")
    # Of these two only the ratio counts: the size is found later.
    sizes |= {"hidden_size": 3, "mlp_size": 8, "num_layers": 2, "head_dim": head_dim}
    sizes |= {"num_q_heads": 1, "num_kv_heads": 1} | _CHANGES[name]
    model = ModelConfig(**sizes)
    if name == "sgd":
        return Side(name, model, _SGD, _SGD_RATES)
    return Side(name, model, _ADAM, _RATES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which sides, at which sizes, for how long."""

    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    """What is learned."""
    sides: tuple[str, ...] = (
        "lstm",
        "sgd",
        "1 layer",
        "4 layers",
        "6 layers",
        "learned positions",
    )
    """Who is compared with the transformer of two layers."""
    sizes: tuple[int, ...] = (4_320, 9_552, 26_160)
    """Parameters outside embeddings; to be compared exactly, what an LSTM can have."""
    head_dim: int = 8
    """Of every transformer's heads."""
    batch_size: int = 8
    """Windows per step."""
    seq_len: int = 256
    """Predictions per window."""
    horizons: tuple[int, ...] = (160, 240, 360, 540)
    """Steps of the finished runs."""
    trial_steps: int = 100
    """Steps of a run that tries a learning rate."""
    warmup_steps: int = 20
    """Of every run."""
    num_windows: int = 256
    """Held-out windows that are scored."""
    num_resamples: int = 400
    """Of the fits."""
    seeds: tuple[int, ...] = (0, 1)
    """Of parameters and the order of the text: every side has all runs with each of
    them. The rate is chosen with the first."""
    num_threads: int = 2
    """Pairs of side and size that are trained at a time: a core that waits for another
    in a small model's step has work then. The numbers do not depend on it."""

    def __post_init__(self) -> None:
        """Refuses what cannot be compared."""
        for name in ("sides", "sizes", "seeds"):
            values = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise ValueError(f"{name}={values} must be different, at least one")
        for name in self.sides:
            side(name, vocab_size=2, seq_len=1, head_dim=2)
        validation.ascending(self, "horizons", low=5)
        most = min(self.trial_steps, self.horizons[0])
        validation.within(self, "warmup_steps", low=0, high=most)
        validation.at_least(self, "seeds", low=0)
        validation.at_least(self, "num_threads")
        validation.at_least(self, "seq_len", low=4)
        validation.at_least(self, "num_windows", "num_resamples", low=2)


CONFIGS = {
    "smoke": Config(
        corpus=corpora.CorpusConfig(held_out=0.02),
        sides=("lstm",),
        sizes=(1_136,),
        head_dim=4,
        batch_size=4,
        seq_len=32,
        horizons=(5, 10, 20),
        trial_steps=5,
        warmup_steps=2,
        num_windows=8,
        num_resamples=20,
    ),
    "cpu": Config(),
    "gpu": Config(
        sides=("lstm", "1 layer", "4 layers", "6 layers"),
        sizes=(66_432, 263_936, 1_052_160),
        head_dim=32,
        batch_size=64,
        seq_len=512,
        horizons=(100, 200, 400, 800),
        trial_steps=200,
        num_threads=1,
    ),
}
