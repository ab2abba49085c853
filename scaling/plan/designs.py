"""Which transformer has so many parameters? A search over shapes that people build.

Decoder-only models of Llama's kind: RMS norms, rotary positions, a gated FFN, heads of
128 numbers (less in small ones), 8 KV heads from 32 query heads on. What is left to
choose is width, depth and FFN width, on a grid of sizes that devices divide well and
near the shapes of published models. Counts and operations of every shape of the grid
are exact: for one width both are linear in depth and in depth x FFN width, so three
models that `costs` counts tell all of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from scaling.costs import Attention, parameters
from scaling.costs.flops import training_step_flops
from scaling.shapes import HeadAttention, ModelShape

type Count = Literal["total", "non-embedding", "matmul", "active"]
"""Which parameters N counts, as in `parameters.ParameterCounts`."""

_KV_HEADS = 8
_MOST = 2**31
_OFF = 0.05
"""How far outside of the grid a number of parameters may be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DesignFamily:
    """What all designs of a search share."""

    vocab_size: int = 32_000
    sequence: int = 4096
    """Tokens of a training sequence; attention's operations grow with it."""
    tie_embeddings: bool = False
    count: Count = "total"
    """What N means."""
    attention: Attention = "full"
    """How operations count pairs of query and key."""

    def __post_init__(self):
        """Refuses sizes that cannot be."""
        validation.within(self, "vocab_size", "sequence", low=1, high=_MOST)


class Design(NamedTuple):
    """A model of the grid.

    Attributes:
      model: its shape.
      num_params: as the family counts them.
      flops_per_token: of training, forward and backward, exact.
    """

    model: ModelShape
    num_params: int
    flops_per_token: float


class DesignGrid(NamedTuple):
    """All designs of a family.

    Attributes:
      width: hidden sizes.
      depth: layers.
      mlp: FFN widths.
      num_params: as the family counts them.
      flops_per_token: of training.
    """

    width: Int[np.ndarray, " n"]
    depth: Int[np.ndarray, " n"]
    mlp: Int[np.ndarray, " n"]
    num_params: Int[np.ndarray, " n"]
    flops_per_token: Float[np.ndarray, " n"]


class WidthRange(NamedTuple):
    """Shapes of models whose width is in `[low, high)`.

    Attributes:
      low: least width.
      high: beyond the greatest.
      step: of widths, a multiple of the heads' size.
      head_dim: numbers of a head.
      layers: of depths.
      mlp: of FFN widths.
      aspects: least and greatest width over depth.
      max_vocab_size: with a larger vocabulary nobody builds them.
    """

    low: int
    high: int
    step: int
    head_dim: int
    layers: int
    mlp: int
    aspects: tuple[float, float]
    max_vocab_size: int = _MOST


RANGES = (
    WidthRange(
        2, 16, 2, 2, 1, 2, (4, 64), 1024
    ),  # of bytes, what a sweep of seconds trains
    WidthRange(16, 256, 16, 16, 1, 16, (8, 64)),
    WidthRange(256, 512, 32, 32, 1, 32, (16, 85)),
    WidthRange(512, 2048, 128, 64, 1, 64, (32, 85)),
    WidthRange(2048, 4096, 512, 128, 2, 128, (80, 136)),
    WidthRange(4096, 5120, 1024, 128, 2, 128, (80, 144)),
    WidthRange(5120, 8192, 1024, 128, 2, 128, (96, 144)),
    WidthRange(8192, 32768, 1024, 128, 2, 256, (96, 144)),
    WidthRange(32768, 65537, 2048, 128, 2, 256, (120, 180)),
)
"""Width over depth: 64 for GPT-3's 125M, 85 for its 1.3B, 128 for Llama-7B and 13B, 102
for Llama-65B and Chinchilla, 130 for Llama-3.1-405B, 156 for PaLM-540B."""

MLP_RATIOS = (8 / 3, 7 / 2)
"""FFN over hidden width: three matrices as large as two of 4 h (Shazeer 2020,
arXiv:2002.05202), and Llama-3's."""


def nearest_design(family: DesignFamily, num_params: float) -> Design:
    """Finds the design whose exact count is nearest; of equals the narrowest.

    Args:
      family: what to search.
      num_params: as the family counts them.

    Raises:
      ValueError: the number is more than a twentieth outside what the family can have.
    """
    grid = make_grid(family)
    least, most = int(grid.num_params.min()), int(grid.num_params.max())
    if not (1 - _OFF) * least <= num_params <= (1 + _OFF) * most:
        side = "small" if num_params < least else "large"
        end, most = ("smallest", least) if side == "small" else ("largest", most)
        raise ValueError(
            f"too {side} for any design: {num_params:,.4g} parameters "
            f"({family.count}), and the {end} design has {most:,} with a vocabulary "
            f"of {family.vocab_size:,}"
        )
    return design_at(family, int(np.argmin(np.abs(grid.num_params - num_params))))


def max_vocab_size(family: DesignFamily, num_params: float) -> int | None:
    """Finds the largest vocabulary with which a design has so few parameters.

    Args:
      family: what to search, its own vocabulary aside.
      num_params: as the family counts them.

    Returns:
      The vocabulary, below 1 where none is small enough; None where it does not count.
    """
    found = []
    for each in RANGES:
        mlp = int(_multiples(each.mlp, *(each.low * x for x in MLP_RATIOS))[0])
        one, two = (
            count_params(x, describe_design(x, each.low, 1, mlp))
            for x in (dataclasses.replace(family, vocab_size=n) for n in (1, 2))
        )
        if one == two:
            return None
        most = 1 + int((num_params / (1 - _OFF) - one) // (two - one))
        found.append(min(most, each.max_vocab_size))
    return max(found)


def best_design(
    family: DesignFamily,
    loss: Callable[[Any, Any], Any],
    flops: float,
    *,
    inference_tokens: float = 0.0,
) -> tuple[Design, float, float]:
    """Finds the design of least loss where every operation is counted.

    The optimum under 6 N D forgets attention, and counts a table that is looked up as
    if it were multiplied with; for small models both are large.

    Args:
      family: what to search.
      loss: by parameters and tokens, in arrays.
      flops: the budget of training, and of serving with a third of its operations.
      inference_tokens: to serve, at least 0.

    Returns:
      The design, the tokens that the budget trains it on, and the loss.

    Raises:
      ValueError: the budget trains none on a whole sequence.
    """
    grid = make_grid(family)
    tokens = flops / grid.flops_per_token - inference_tokens / 3
    enough = np.flatnonzero(tokens >= family.sequence)
    if not enough.size:
        raise ValueError(
            f"too small for any design: {flops:.4g} FLOPs train none on a sequence of "
            f"{family.sequence:,} tokens"
        )
    losses = loss(grid.num_params[enough].astype(float), tokens[enough])
    place = int(enough[np.argmin(losses)])
    return design_at(family, place), float(tokens[place]), float(losses.min())


def design_at(family: DesignFamily, place: int) -> Design:
    """Describes one design of a grid."""
    grid = make_grid(family)
    width, depth, mlp = (int(x[place]) for x in grid[:3])
    model = describe_design(family, width, depth, mlp)
    flops = float(grid.flops_per_token[place])
    return Design(model, int(grid.num_params[place]), flops)


def describe_design(
    family: DesignFamily, width: int, depth: int, mlp: int
) -> ModelShape:
    """Gives the shape of one design in full."""
    head_dim = next(x for x in RANGES if x.low <= width < x.high).head_dim
    heads = width // head_dim
    grouped = heads >= 4 * _KV_HEADS and heads % _KV_HEADS == 0
    return ModelShape(
        name=f"{depth} x {width}",
        vocab_size=family.vocab_size,
        hidden_size=width,
        num_layers=depth,
        attention=HeadAttention(
            num_q_heads=heads,
            num_kv_heads=_KV_HEADS if grouped else heads,
            head_dim=head_dim,
        ),
        mlp_size=mlp,
        tie_embeddings=family.tie_embeddings,
        max_positions=family.sequence,
    )


@functools.lru_cache(maxsize=4)
def make_grid(family: DesignFamily) -> DesignGrid:
    """Lists all designs of a family with their exact counts, read-only."""
    blocks = []
    for each in RANGES:
        if family.vocab_size > each.max_vocab_size:
            continue
        for width in range(each.low, each.high, each.step):
            depths = _multiples(each.layers, *(width / x for x in each.aspects[::-1]))
            mlps = _multiples(each.mlp, *(width * x for x in MLP_RATIOS))
            depth, mlp = (x.ravel() for x in np.meshgrid(depths, mlps, indexing="ij"))
            shapes = ((1, 1), (2, 1), (1, 2))
            corners = [describe_design(family, width, *shape) for shape in shapes]
            params = [count_params(family, model) for model in corners]
            how: Any = {"sequence": family.sequence, "attention": family.attention}
            flops = [
                float(training_step_flops(model, **how).model) for model in corners
            ]
            found = []
            for one, deeper, wider in (params, flops):
                layer, column = deeper - one, wider - one
                found.append(one - layer + depth * (layer + column * (mlp - 1)))
            counts, steps = found
            block = np.full(depth.size, width), depth, mlp, counts
            blocks.append((*block, steps / family.sequence))
    grid = DesignGrid(*map(np.concatenate, zip(*blocks, strict=True)))
    for column in grid:
        column.setflags(write=False)
    return grid


def _multiples(step: int, low: float, high: float) -> Int[np.ndarray, " n"]:
    """Multiples of a step in a range, or the one nearest to it."""
    first = max(1, math.ceil(low / step))
    return np.arange(first, max(first, int(high / step)) + 1, dtype=np.int64) * step


def count_params(family: DesignFamily, model: ModelShape) -> int:
    """Counts a model's parameters as the family does."""
    return getattr(parameters.count_parameters(model), family.count.replace("-", "_"))
