"""Sides of `rivals`, published claims on each, and training lengths."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from experiments import lab
from jaxkv.models import ModelConfig
from scaling.corpora import STANDARD_LIBRARY, CorpusConfig
from scaling.training import Architecture, OptimizerConfig, RecurrentConfig


class Side(NamedTuple):
    """An architecture and its training, at any size.

    Attributes:
      name: name in tables and figures.
      base: architecture without its size.
      optimizer: optimizer.
      rates: first learning rates to try, ascending, evenly spaced in logarithm.
    """

    name: str
    base: Architecture
    optimizer: OptimizerConfig
    rates: tuple[float, ...]


# No weight decay on any side: its effect depends on the unit of the learning rate.
_ADAM = OptimizerConfig(kind="adamw", weight_decay=0.0)
_SGD = OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.0)
# Best rate of short runs: about 0.01 for the transformer, 0.05 for recurrent nets.
_LEARNING_RATES = (2e-3, 6e-3, 1.8e-2)
_RECURRENT_RATES = (6e-3, 1.8e-2, 5.4e-2)
_SGD_RATES = (0.1, 0.3, 0.9)

REFERENCE = "transformer"
RECURRENT: tuple[Literal["lstm", "gru"], ...] = ("lstm", "gru")
_RIVAL_SETTINGS: Mapping[str, dict[str, Any]] = {
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
    """A published claim on a side's compute at equal loss, over the reference's.

    Attributes:
      source: source of the claim.
      claim: "more" if the ratio is at least 1, "one_trend" if it is 1.
    """

    source: str
    claim: Literal["more", "one_trend"] = "more"


_KAPLAN_SOURCE = "Kaplan et al. 2020, arXiv:2001.08361"
_SHAZEER = "Shazeer 2020, arXiv:2002.05202, table 1"
PUBLISHED_PAIRS = {
    "lstm": Published(f"{_KAPLAN_SOURCE}, figure 7"),
    "gru": Published(f"{_KAPLAN_SOURCE}, figure 7, of LSTMs"),
    "sgd": Published("the lectures: compare optimizers by two fitted curves"),
    "1 layer": Published(f"{_KAPLAN_SOURCE}, figure 6"),
    # "The performance of models with different depths converge to a single trend."
    "4 layers": Published(f"{_KAPLAN_SOURCE}, figure 6", "one_trend"),
    "6 layers": Published(f"{_KAPLAN_SOURCE}, figure 6", "one_trend"),
    "learned positions": Published("Su et al. 2021, arXiv:2104.09864, section 4"),
    "relu": Published(_SHAZEER),
    "gelu": Published(_SHAZEER),
}
"""Sides that are compared with the reference, with the published claim on each."""


def side(name: str, *, vocab_size: int, seq_len: int, head_dim: int) -> Side:
    """Returns the side of a name, with its head dimension and vocabulary.

    Args:
      name: `transformer` or a key of `PUBLISHED_PAIRS`. The transformer has 2 layers,
        SwiGLU, RMS norms and rotary positions; other sides differ from it as their
        names state. LSTM and GRU have 2 layers, each with a layer norm before it and a
        residual connection.
      vocab_size: vocabulary size of the corpus.
      seq_len: longest sequence.
      head_dim: head dimension of a transformer.

    Raises:
      ValueError: `name` is not a side.
    """
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_positions": seq_len}
    if name in RECURRENT:
        base = RecurrentConfig(**sizes, hidden_size=1, num_layers=2, kind=name)
        return Side(name, base, _ADAM, _RECURRENT_RATES)
    if name not in _RIVAL_SETTINGS:
        raise ValueError(f"sides={name!r} must be in {[*PUBLISHED_PAIRS]}")
    # Only the ratio of hidden and MLP size counts here; the size is set later.
    sizes |= {"hidden_size": 3, "mlp_size": 8, "num_layers": 2, "head_dim": head_dim}
    sizes |= {"num_q_heads": 1, "num_kv_heads": 1} | _RIVAL_SETTINGS[name]
    model = ModelConfig(**sizes)
    if name == "sgd":
        return Side(name, model, _SGD, _SGD_RATES)
    return Side(name, model, _ADAM, _LEARNING_RATES)


class Config(lab.ConfigRecord):
    """Sides, sizes and training lengths."""

    corpus: CorpusConfig = STANDARD_LIBRARY
    """Training text."""
    sides: tuple[str, ...] = (
        "lstm",
        "sgd",
        "1 layer",
        "4 layers",
        "6 layers",
        "learned positions",
    )
    """Sides to compare with the transformer of 2 layers."""
    sizes: tuple[int, ...] = (4_320, 9_552, 26_160)
    """Parameters outside embeddings, chosen to be exact for an LSTM."""
    head_dim: int = 8
    """Head dimension of every transformer."""
    batch_size: int = 8
    """Windows per step."""
    seq_len: Annotated[int, lab.Range(4)] = 256
    """Predictions per window."""
    horizons: Annotated[tuple[int, ...], lab.Ascending(5)] = (160, 240, 360, 540)
    """Steps of the finished runs."""
    trial_steps: int = 100
    """Steps of a learning rate trial."""
    warmup_steps: int = 20
    """Warm-up steps of every run."""
    num_windows: Annotated[int, lab.Range(2)] = 256
    """Held-out windows that are scored."""
    num_resamples: Annotated[int, lab.Range(2)] = 400
    """Resamples of the fits."""
    seeds: Annotated[tuple[int, ...], lab.Range(0)] = (0, 1)
    """Seeds of parameters and data order, the same for every side. The learning rate is
    tuned with the first."""
    num_threads: lab.PositiveInt = 2
    """Pairs of side and size trained concurrently, since the steps of small models
    leave cores idle. Results do not depend on it."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for name in ("sides", "sizes", "seeds"):
            values = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise ValueError(f"{name}={values} must be different, at least one")
        for name in self.sides:
            side(name, vocab_size=2, seq_len=1, head_dim=2)
        max_warmup = min(self.trial_steps, self.horizons[0])
        lab.Range(0, max_warmup).check("warmup_steps", self.warmup_steps)


CONFIGS = {
    "smoke": Config(
        corpus=CorpusConfig(held_out=0.02),
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
