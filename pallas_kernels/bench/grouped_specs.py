"""Named shapes of grouped products, and arrays of them to measure.

Widths and experts are those of mixtures that people serve; tokens are those of a step
of decoding, and of a prompt.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.problems import wide
from pallas_kernels.bench.specs import ITEMSIZES, every

NUM_CHECKED = 64
"""Rows and columns whose products are looked at."""


class Experts(NamedTuple):
    """Experts of a layer; a token goes to `top` of them."""

    groups: int
    top: int
    width: int
    hidden: int

    def __str__(self) -> str:
        """Writes the counts, as 2of8."""
        return f"{self.top}of{self.groups}"


# Jiang et al. 2024, arXiv:2401.04088, table 1.
MIXTRAL_8X7B = Experts(8, 2, 4096, 14336)
# DeepSeek-AI 2024, arXiv:2405.04434, appendix B, without the two that all tokens share.
DEEPSEEK_V2_LITE = Experts(64, 6, 2048, 1408)
# DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, without the one that all share.
DEEPSEEK_V3 = Experts(256, 8, 7168, 2048)
# Of a processor's size, and of the tests'.
SMALL = Experts(8, 2, 512, 1792)
SMALL_MANY = Experts(64, 8, 512, 256)
TINY = Experts(4, 2, 24, 40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """One shape; every token draws its experts at random."""

    tokens: int
    experts: Experts
    direction: Literal["up", "down"] = "up"
    """From the width of the model to that of an expert, or back."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    kind = "grouped"

    def __post_init__(self) -> None:
        """Refuses shapes without sense."""
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be above 0")
        if not 1 <= self.experts.top <= self.experts.groups:
            raise ValueError(f"{self.experts.top=} must be in [1, experts.groups]")

    @property
    def name(self) -> str:
        """Says all of it in a word, as grouped-t64-2of8-4096x14336."""
        dtype = "" if self.dtype == "bfloat16" else f"-{self.dtype}"
        size = f"{self.width}x{self.columns}"
        return f"{self.kind}-t{self.tokens}-{self.experts}-{size}{dtype}"

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return getattr(self.experts, "width" if self.direction == "up" else "hidden")

    @property
    def columns(self) -> int:
        """Numbers of a row's product."""
        return getattr(self.experts, "hidden" if self.direction == "up" else "width")

    @property
    def num_rows(self) -> int:
        """Rows: a token is one at each of its experts."""
        return self.tokens * self.experts.top

    def group_sizes(self, turn: int = 0) -> np.ndarray:
        """Rows of each group in a turn: `[groups]`, reproducibly random."""
        rng, (groups, top, *_) = np.random.default_rng(turn), self.experts
        draws = rng.random((self.tokens, groups))
        chosen = np.argpartition(draws, top - 1, axis=1)[:, :top]
        return np.bincount(chosen.ravel(), minlength=groups)

    @property
    def bytes(self) -> int:
        """Fewest bytes to be moved: rows, weights of groups with rows, and products.

        Mixtral, one token up: 2 * 4096 * 14336 weights, 2 rows of 4096 and 14336
        numbers, all of 2 bytes: 234.96 MB.
        """
        used = int(np.count_nonzero(self.group_sizes()))
        weights = used * self.width * self.columns
        rows = self.num_rows * (self.width + self.columns)
        return (weights + rows) * ITEMSIZES[self.dtype]

    @property
    def flops(self) -> int:
        """Operations, of rows with the weights of their own group alone."""
        return 2 * self.num_rows * self.width * self.columns


def _both(**values: Any) -> list[GroupedSpec]:
    return every(GroupedSpec, **values, direction=["up", "down"])


SETS: dict[str, tuple[GroupedSpec, ...]] = {
    "tiny": (GroupedSpec(tokens=9, experts=TINY, dtype="float32"),),
    "small": (
        *every(
            GroupedSpec,
            tokens=[1, 8, 512],
            experts=[SMALL, SMALL_MANY],
            dtype="float32",
        ),
    ),
    "quick": (
        GroupedSpec(tokens=32, experts=MIXTRAL_8X7B),
        GroupedSpec(tokens=8192, experts=MIXTRAL_8X7B),
        GroupedSpec(tokens=64, experts=DEEPSEEK_V2_LITE),
    ),
    "real": (
        *_both(tokens=[1, 32, 256, 8192], experts=MIXTRAL_8X7B),
        *_both(tokens=[1, 64, 4096], experts=DEEPSEEK_V2_LITE),
        *_both(tokens=[16, 128, 8192], experts=DEEPSEEK_V3),
    ),
    "grid": (
        *_both(
            tokens=[1, 8, 64, 256, 1024, 4096, 16384],
            experts=[MIXTRAL_8X7B, DEEPSEEK_V2_LITE, DEEPSEEK_V3],
        ),
    ),
}
"""Shapes by the name of the occasion, as `specs.SETS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProblem:
    """Arguments of a grouped product; `group_sizes` leads with one more axis."""

    spec: GroupedSpec
    x: jax.Array
    """`[rows, width]`."""
    w: jax.Array
    """`[groups, width, columns]`."""
    group_sizes: jax.Array
    """`[turns, groups]`: tokens draw their experts anew in every turn."""

    @functools.cached_property
    def samples(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Some rows and columns, and their products in the first turn, in float64."""
        rng, spec = np.random.default_rng(1), self.spec
        ends = np.cumsum(np.asarray(self.group_sizes[0]))
        # At the edges of groups, and anywhere.
        edges = np.concatenate([ends - 1, ends, rng.integers(0, spec.num_rows, 99)])
        rows = np.unique(rng.permutation(edges)[:NUM_CHECKED])
        rows = rows[(rows >= 0) & (rows < spec.num_rows)]
        columns = rng.integers(0, spec.columns, NUM_CHECKED)
        group = np.searchsorted(ends, rows, side="right")
        weights = (wide(self.w[i][:, columns]) for i in group)
        wanted = [wide(self.x[row]) @ w for row, w in zip(rows, weights, strict=True)]
        return rows, columns, np.stack(wanted)

    def error(self, out: jax.Array) -> float:
        """Compares a result with the product in float64, at some rows and columns.

        Args:
          out: the products of its first turn, `[rows, columns]`.

        Returns:
          The norm of the difference by that of the right result; NaN if any is NaN.
        """
        rows, columns, wanted = self.samples
        off = wide(out[rows][:, columns]) - wanted
        return float(np.linalg.norm(off) / np.linalg.norm(wanted))


def make(spec: GroupedSpec, *, num_turns: int = 1, seed: int = 0) -> GroupedProblem:
    """Draws the arrays of a spec: rows are normal, products too.

    Args:
      spec: the shape.
      num_turns: draws of experts.
      seed: of rows and weights.
    """
    keys, dtype = jax.random.split(jax.random.key(seed)), jnp.dtype(spec.dtype)
    shape = (spec.experts.groups, spec.width, spec.columns)
    scale = jnp.asarray(spec.width**-0.5, dtype)
    weights = jax.jit(lambda key: jax.random.normal(key, shape, dtype) * scale)
    sizes = np.stack([spec.group_sizes(turn) for turn in range(num_turns)])
    return GroupedProblem(
        spec=spec,
        x=jax.random.normal(keys[0], (spec.num_rows, spec.width), dtype),
        w=weights(keys[1]),
        group_sizes=jnp.asarray(sizes, jnp.int32),
    )
