"""The sides of `rivals`: what is trained, and which pairs are compared."""

from typing import Any, Literal, NamedTuple

from jaxkv.models import ModelConfig
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
_RATES = (2e-3, 6e-3, 1.8e-2)
# Where the transformer's best of short runs is near 0.01, a recurrent net's is 0.05.
_RECURRENT_RATES = (6e-3, 1.8e-2, 5.4e-2)
_SGD_RATES = (0.1, 0.3, 0.9)

REFERENCE = "transformer"


class Published(NamedTuple):
    """What a source says of a side's compute to equal loss, over the reference's.

    Attributes:
      source: where.
      relation: at least 1, or 1.
      statement: the same in words.
    """

    source: str
    relation: Literal["at_least", "equal"]
    statement: str


_KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"
_SHAZEER = "Shazeer 2020, arXiv:2002.05202, table 1"


def _more(source: str) -> Published:
    return Published(source, "at_least", "needs at least the transformer's compute")


# "The performance of models with different depths converge to a single trend."
_ONE_TREND = Published(
    f"{_KAPLAN}, figure 6", "equal", "needs the compute of two layers: one trend"
)

PAIRS = {
    "lstm": _more(f"{_KAPLAN}, figure 7"),
    "gru": _more(f"{_KAPLAN}, figure 7, of LSTMs"),
    "sgd": _more("the lectures: compare optimizers by two fitted curves"),
    "1 layer": _more(f"{_KAPLAN}, figure 6"),
    "4 layers": _ONE_TREND,
    "6 layers": _ONE_TREND,
    "learned positions": _more("Su et al. 2021, arXiv:2104.09864, section 4"),
    "relu": _more(_SHAZEER),
    "gelu": _more(_SHAZEER),
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
    if name in ("lstm", "gru"):
        recurrent = RecurrentConfig(
            vocab_size=vocab_size,
            hidden_size=1,
            num_layers=2,
            max_positions=seq_len,
            kind="lstm" if name == "lstm" else "gru",
        )
        return Side(name, recurrent, _ADAM, _RECURRENT_RATES)
    changes: dict[str, dict[str, Any]] = {
        REFERENCE: {},
        "sgd": {},
        "1 layer": {"num_layers": 1},
        "4 layers": {"num_layers": 4},
        "6 layers": {"num_layers": 6},
        "learned positions": {"positions": "learned"},
        "relu": {"gated": False, "activation": "relu", "mlp_size": 12},
        "gelu": {"gated": False, "activation": "gelu", "mlp_size": 12},
    }
    if name not in changes:
        raise ValueError(f"sides={name!r} must be in {[*PAIRS]}")
    plain: dict[str, Any] = dict(
        vocab_size=vocab_size,
        # Of these two only the ratio counts: the size is found later.
        hidden_size=3,
        mlp_size=8,
        num_layers=2,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        max_positions=seq_len,
    )
    base = ModelConfig(**plain | changes[name])
    if name == "sgd":
        return Side(name, base, _SGD, _SGD_RATES)
    return Side(name, base, _ADAM, _RATES)
