"""Designs of transformers with a given number of parameters, on a grid of shapes.

Decoder-only models of the Llama type: RMS norms, rotary positions, a gated FFN, heads
of 128 features (fewer in small models), and by default 8 KV heads from 32 query heads
on. Width, depth
and FFN width vary over a grid of sizes that devices divide well, near the shapes of
published models. Counts and operations of every shape of the grid are exact: for one
width both are linear in depth and in depth x FFN width, so three models counted by
`costs` give those of all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from jaxkv.validation import ConfigRecord, Range
from scaling.costs import Attention, count_parameters, training_step_flops
from scaling.laws import AMOUNTS, AMOUNTS_FROM_0
from scaling.shapes import HeadAttention, ModelShape

type Count = Literal["total", "non-embedding", "matmul", "active"]
"""Parameters that N counts, see `parameters.ParameterCounts`."""

_KV_HEADS = 8
_MAX_VOCABULARY = 2**31
_SIZE_TOLERANCE = 0.05
"""Largest relative distance of a number of parameters from the grid."""


_LADDER_SPAN = 200.0
_LADDER_TOLERANCE = 0.02
"""Relative distance of designs that count as one size in a ladder."""


class DesignFamily(ConfigRecord):
    """Common properties of all designs of a search."""

    vocab_size: Annotated[int, Range(1, _MAX_VOCABULARY)] = 32_000
    sequence: Annotated[int, Range(1, _MAX_VOCABULARY)] = 4096
    """Tokens of a training sequence; determines attention's operations."""
    tie_embeddings: bool = False
    count: Count = "total"
    """Convention for N."""
    attention: Attention = "full"
    """Convention for pairs of query and key."""
    kv_heads: Annotated[int | None, Range(1, 1024)] = None
    """KV heads, or the largest number below that divides the query heads; None has 8
    from 32 query heads on, and one for each query head below."""


class Design(NamedTuple):
    """A model of the grid.

    Attributes:
      model: shape of the model.
      num_params: parameters by the family's convention.
      flops_per_token: exact training operations, forward and backward.
    """

    model: ModelShape
    num_params: int
    flops_per_token: float


class DesignGrid(NamedTuple):
    """All designs of a family.

    Attributes:
      width: hidden sizes.
      depth: numbers of layers.
      mlp: FFN widths.
      num_params: parameters by the family's convention.
      flops_per_token: training operations.
    """

    width: Int[np.ndarray, " n"]
    depth: Int[np.ndarray, " n"]
    mlp: Int[np.ndarray, " n"]
    num_params: Int[np.ndarray, " n"]
    flops_per_token: Float[np.ndarray, " n"]


class WidthRange(NamedTuple):
    """Grid of shapes of models whose width is in `[low, high)`.

    Attributes:
      low: smallest width.
      high: end of the range of widths.
      step: step of widths, a multiple of the head size.
      head_dim: features of a head.
      layers: step of depths.
      mlp: step of FFN widths.
      aspects: smallest and largest ratio of width to depth.
      max_vocab_size: largest vocabulary of the range.
    """

    low: int
    high: int
    step: int
    head_dim: int
    layers: int
    mlp: int
    aspects: tuple[float, float]
    max_vocab_size: int = _MAX_VOCABULARY


RANGES = (
    # Of bytes, as trained by a sweep of seconds.
    WidthRange(2, 16, 2, 2, 1, 2, (4, 64), 1024),
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
"""Ratios of FFN to hidden width: three matrices as large as two of 4 h (Shazeer 2020,
arXiv:2002.05202), and the ratio of Llama 3."""


@validation.checks_numbers(num_params=AMOUNTS)
def nearest_design(family: DesignFamily, num_params: float) -> Design:
    """Finds the design whose exact count is nearest; of equals the narrowest.

    Args:
      family: family to search.
      num_params: parameters by the family's convention.

    Raises:
      ValueError: the number is more than 5 % outside the range of the family.
    """
    grid = make_grid(family)
    min_params = int(grid.num_params.min())
    bound = int(grid.num_params.max())
    if (
        not (1 - _SIZE_TOLERANCE) * min_params
        <= num_params
        <= (1 + _SIZE_TOLERANCE) * bound
    ):
        side = "small" if num_params < min_params else "large"
        end, bound = ("smallest", min_params) if side == "small" else ("largest", bound)
        raise ValueError(
            f"too {side} for any design: {num_params:,.4g} parameters "
            f"({family.count}), and the {end} design has {bound:,} with a vocabulary "
            f"of {family.vocab_size:,}"
        )
    return design_at(family, int(np.argmin(np.abs(grid.num_params - num_params))))


@validation.checks_numbers(largest=AMOUNTS)
def design_ladder(
    family: DesignFamily, largest: float, *, num_sizes: int = 64
) -> list[Design]:
    """Returns designs of ascending sizes, from a 200th of the largest on.

    Of the designs within 2 % of a size it has the one with the fewest layers, which
    serves fastest.

    Args:
      family: family of the designs.
      largest: parameters of the largest design, about.
      num_sizes: number of sizes; those with the same design count once.

    Raises:
      ValueError: no design is as large or smaller.
    """
    grid = make_grid(family)
    low = int(grid.num_params.min())
    high = int(grid.num_params.max())
    if not low < largest <= high:
        raise ValueError(
            f"{largest=:.4g} must be in ({low:,}, {high:,}], the sizes of all designs"
        )
    designs = {}
    for size in np.geomspace(max(largest / _LADDER_SPAN, low), largest, num_sizes):
        near = np.flatnonzero(np.abs(grid.num_params / size - 1) < _LADDER_TOLERANCE)
        if near.size:
            place = int(near[np.argmin(grid.depth[near])])
        else:
            place = int(np.argmin(np.abs(grid.num_params - size)))
        design = design_at(family, place)
        designs[design.num_params] = design
    return [designs[x] for x in sorted(designs)]


@validation.checks_numbers(num_params=AMOUNTS)
def max_vocab_size(family: DesignFamily, num_params: float) -> int | None:
    """Finds the largest vocabulary for which some design has at most `num_params`.

    Args:
      family: family to search; its own vocabulary is ignored.
      num_params: parameters by the family's convention.

    Returns:
      The vocabulary, below 1 if none is small enough; None if it is not counted.
    """
    vocab_sizes = []
    for bounds in RANGES:
        mlp = int(_multiples(bounds.mlp, *(bounds.low * x for x in MLP_RATIOS))[0])
        one, two = (
            count_params(x, describe_design(x, bounds.low, 1, mlp))
            for x in (dataclasses.replace(family, vocab_size=n) for n in (1, 2))
        )
        if one == two:
            return None
        max_vocab = 1 + int((num_params / (1 - _SIZE_TOLERANCE) - one) // (two - one))
        vocab_sizes.append(min(max_vocab, bounds.max_vocab_size))
    return max(vocab_sizes)


@validation.checks_numbers(flops=AMOUNTS, inference_tokens=AMOUNTS_FROM_0)
def best_design(
    family: DesignFamily,
    loss: Callable[[np.ndarray, np.ndarray], np.ndarray],
    flops: float,
    *,
    inference_tokens: float = 0.0,
) -> tuple[Design, float, float]:
    """Finds the design of lowest loss, with exact operations.

    The optimum under 6 N D ignores attention, and counts embeddings as products; both
    matter for small models.

    Args:
      family: family to search.
      loss: function of arrays of parameters and tokens.
      flops: budget of training, and of serving with a third of its operations.
      inference_tokens: tokens to serve, at least 0.

    Returns:
      The design, its training tokens, and its loss.

    Raises:
      ValueError: the budget is smaller than one sequence for every design.
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
    """Returns one design of a grid."""
    grid = make_grid(family)
    width, depth, mlp = (int(x[place]) for x in grid[:3])
    model = describe_design(family, width, depth, mlp)
    flops = float(grid.flops_per_token[place])
    return Design(model, int(grid.num_params[place]), flops)


def describe_design(
    family: DesignFamily, width: int, depth: int, mlp: int
) -> ModelShape:
    """Returns the full shape of one design."""
    head_dim = next(x for x in RANGES if x.low <= width < x.high).head_dim
    heads = width // head_dim
    if family.kv_heads is not None:
        numbers = range(min(family.kv_heads, heads), 0, -1)
        kv_heads = next(x for x in numbers if heads % x == 0)
    else:
        grouped = heads >= 4 * _KV_HEADS and heads % _KV_HEADS == 0
        kv_heads = _KV_HEADS if grouped else heads
    return ModelShape(
        name=f"{depth} x {width}",
        vocab_size=family.vocab_size,
        hidden_size=width,
        num_layers=depth,
        attention=HeadAttention(
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        ),
        mlp_size=mlp,
        tie_embeddings=family.tie_embeddings,
        max_positions=family.sequence,
    )


@functools.lru_cache(maxsize=4)
def make_grid(family: DesignFamily) -> DesignGrid:
    """Returns the grid of a family with exact counts, read-only."""
    blocks = []
    for bounds in RANGES:
        if family.vocab_size > bounds.max_vocab_size:
            continue
        for width in range(bounds.low, bounds.high, bounds.step):
            depths = _multiples(
                bounds.layers, *(width / x for x in bounds.aspects[::-1])
            )
            mlps = _multiples(bounds.mlp, *(width * x for x in MLP_RATIOS))
            depth, mlp = (x.ravel() for x in np.meshgrid(depths, mlps, indexing="ij"))
            shapes = ((1, 1), (2, 1), (1, 2))
            corners = [describe_design(family, width, *shape) for shape in shapes]
            params = [count_params(family, model) for model in corners]
            step_flops = functools.partial(
                training_step_flops,
                sequence=family.sequence,
                attention=family.attention,
            )
            flops = [float(step_flops(model).model) for model in corners]
            totals = []
            for one, deeper, wider in (params, flops):
                layer = deeper - one
                column = wider - one
                totals.append(one - layer + depth * (layer + column * (mlp - 1)))
            counts, steps = totals
            block = np.full(depth.size, width), depth, mlp, counts
            blocks.append((*block, steps / family.sequence))
    grid = DesignGrid(*map(np.concatenate, zip(*blocks, strict=True)))
    for column in grid:
        column.setflags(write=False)
    return grid


def _multiples(step: int, low: float, high: float) -> Int[np.ndarray, " n"]:
    """Returns the multiples of a step in a range, or the nearest one."""
    first = max(1, math.ceil(low / step))
    return np.arange(first, max(first, int(high / step)) + 1, dtype=np.int64) * step


def count_params(family: DesignFamily, model: ModelShape) -> int:
    """Counts a model's parameters by the family's convention."""
    return getattr(count_parameters(model), family.count.replace("-", "_"))
