"""Shapes of attention, page copies and grouped products, with names and costs.

Head and expert shapes are those of published models.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from pallas_kernels.devices import WGMMA_ROWS

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by type."""


class HeadShape(NamedTuple):
    """Shape of a model's attention heads."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_width: int | None = None
    """Width of the values of latent rows, which are the first numbers of the keys."""

    def __str__(self) -> str:
        """Returns the head counts, and the head size if it is not 128."""
        size = "" if self.head_dim == 128 else f"d{self.head_dim}"
        return f"{self.q_heads}x{self.kv_heads}{size}"

    @property
    def row_reads(self) -> int:
        """Reads of the latent row of a token: one for every 64 query heads."""
        return -(-self.q_heads // (self.kv_heads * WGMMA_ROWS))


LLAMA_2_7B = HeadShape(32, 32, 128)
LLAMA_3_8B = HeadShape(32, 8, 128)
LLAMA_3_70B = HeadShape(64, 8, 128)
MULTI_QUERY = HeadShape(16, 1, 128)
SMOLLM2_135M = HeadShape(9, 3, 64)
GEMMA_2_2B = HeadShape(8, 4, 256)
# DeepSeek-AI 2024, arXiv:2405.04434, section 2.1, and appendix B; V3 is equal.
DEEPSEEK_V2_LITE_LATENT = HeadShape(16, 1, 576, 512)
DEEPSEEK_V3_LATENT = HeadShape(128, 1, 576, 512)
TINY = HeadShape(4, 2, 16)
TINY_LATENT = HeadShape(4, 1, 12, 8)


class ExpertShape(NamedTuple):
    """Shape of a mixture-of-experts layer; a token is routed to `top` experts."""

    groups: int
    top: int
    width: int
    hidden: int

    def __str__(self) -> str:
        """Returns the counts, such as 2of8."""
        return f"{self.top}of{self.groups}"


# Jiang et al. 2024, arXiv:2401.04088, table 1.
MIXTRAL_8X7B = ExpertShape(8, 2, 4096, 14336)
# DeepSeek-AI 2024, arXiv:2405.04434, appendix B, without the two shared experts.
DEEPSEEK_V2_LITE = ExpertShape(64, 6, 2048, 1408)
# DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, without the shared expert.
DEEPSEEK_V3 = ExpertShape(256, 8, 7168, 2048)
# For a CPU, and for the tests.
SMALL_EXPERTS = ExpertShape(8, 2, 512, 1792)
SMALL_MANY_EXPERTS = ExpertShape(64, 8, 512, 256)
TINY_EXPERTS = ExpertShape(4, 2, 24, 40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One benchmark shape of attention or of a page copy."""

    kind: Literal["decode", "tree", "prefix", "chunk", "prefill", "copy"]
    """decode: one row a sequence; tree: a tree of rows; prefix: one row after a shared
    prefix; chunk: a causal chunk after a context; prefill: a chunk without a context;
    copy: copies of whole pages."""
    batch: int
    """Number of sequences; for copies, number of pages to copy."""
    context: int = 0
    """Tokens before the rows in the longest sequence, the shared ones included."""
    rows: int = 1
    """Query rows of each sequence; their own keys follow the context."""
    shared: int = 0
    """Length in tokens of the prefix of all sequences, a multiple of `page_size`."""
    heads: HeadShape = LLAMA_3_8B
    page_size: int = 16
    """Tokens of a page."""
    lengths: Literal["equal", "uniform", "lognormal", "one_long"] = "equal"
    """Distribution of context lengths over the sequences."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        """Validates the sizes."""
        for name in ("batch", "rows", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.shared % self.page_size or not 0 <= self.shared <= self.context:
            raise ValueError(
                f"shared={self.shared!r} must be whole pages within "
                f"context={self.context}"
            )

    @property
    def name(self) -> str:
        """Name with all fields, such as decode-b8-8k-32x8-p16."""
        words = [self.kind, f"b{self.batch}"]
        if self.kind in ("tree", "chunk", "prefill"):
            words.append(f"t{_thousands(self.rows)}")
        if self.shared:
            words.append(f"s{_thousands(self.shared)}")
        if self.context:
            words.append(_thousands(self.context))
        words += [str(self.heads), f"p{self.page_size}", self.lengths, self.dtype]
        return "-".join(word for word in words if word not in ("equal", "bfloat16"))

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page."""
        places = self.heads.kv_heads * self.page_size
        return places * self.heads.head_dim * ITEMSIZES[self.dtype]

    def contexts(self) -> np.ndarray:
        """Returns the tokens before the rows of each sequence: `[batch]`."""
        rng = np.random.default_rng(0)
        free = self.context - self.shared
        draw = {
            "equal": np.ones,
            "uniform": rng.random,
            "lognormal": lambda num: rng.lognormal(-1.5, 1.0, num),
            "one_long": lambda num: np.full(num, 1 / 16),
        }[self.lengths]
        draws = np.minimum(draw(self.batch), 1)
        draws[self.batch // 2] = 1
        return self.shared + np.round(draws * free).astype(np.int64)

    @property
    def bytes(self) -> int:
        """Least bytes moved: keys, values and queries read, results written.

        decode-b1-1k-32x8-p16: 1025 tokens of 2 * 8 * 128 numbers of 2 bytes and 2 * 32
        * 128 more numbers, 4.21 MB. Latent rows are keys and values at once, but are
        read `HeadShape.row_reads` times: decode-b1-1k-128x1d576-p64 reads 1025 * 576
        numbers twice, and has 128 * (576 + 512) more, 2.64 MB.
        """
        if self.kind == "copy":
            return 2 * self.batch * self.page_bytes
        tokens = int(np.sum(self.contexts() + self.rows - self.shared)) + self.shared
        heads = self.heads
        reads = 2
        if heads.value_width is not None:
            reads = heads.row_reads
        kv = reads * tokens * heads.kv_heads * heads.head_dim
        qo = self.batch * self.rows * heads.q_heads * self.product_width
        return (kv + qo) * ITEMSIZES[self.dtype]

    @property
    def product_width(self) -> int:
        """Numbers of a key and of a value, in both products of a query head."""
        return self.heads.head_dim + (self.heads.value_width or self.heads.head_dim)

    @property
    def flops(self) -> int:
        """Operations of both matrix products, over the keys that are attended to.

        A row of a tree is counted with the context and half of the tree's rows.
        """
        if self.kind == "copy":
            return 0
        num_pairs = self.rows * int(np.sum(self.contexts()))
        num_pairs += self.batch * self.rows * (self.rows + 1) // 2
        return 2 * num_pairs * self.heads.q_heads * self.product_width


def _thousands(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and not number % 1024 else f"{number}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """One benchmark shape of a grouped product; tokens draw experts at random."""

    tokens: int
    experts: ExpertShape
    direction: Literal["up", "down"] = "up"
    """up: from the model's width to the expert's; down: back."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    kind = "grouped"

    def __post_init__(self) -> None:
        """Validates the sizes."""
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be above 0")
        if not 1 <= self.experts.top <= self.experts.groups:
            raise ValueError(
                f"experts.top={self.experts.top} must be in [1, experts.groups]"
            )

    @property
    def name(self) -> str:
        """Name with all fields, such as grouped-t64-2of8-4096x14336."""
        dtype = "" if self.dtype == "bfloat16" else f"-{self.dtype}"
        size = f"{self.width}x{self.columns}"
        return f"{self.kind}-t{self.tokens}-{self.experts}-{size}{dtype}"

    @property
    def width(self) -> int:
        """Features of an input row."""
        return getattr(self.experts, "width" if self.direction == "up" else "hidden")

    @property
    def columns(self) -> int:
        """Features of an output row."""
        return getattr(self.experts, "hidden" if self.direction == "up" else "width")

    @property
    def num_rows(self) -> int:
        """Number of rows: one for each expert of each token."""
        return self.tokens * self.experts.top

    def group_sizes(self, turn: int = 0) -> np.ndarray:
        """Returns the rows of each group in a turn: `[groups]`, deterministic."""
        rng, (groups, top, *_) = np.random.default_rng(turn), self.experts
        draws = rng.random((self.tokens, groups))
        chosen = np.argpartition(draws, top - 1, axis=1)[:, :top]
        return np.bincount(chosen.ravel(), minlength=groups)

    @property
    def bytes(self) -> int:
        """Least bytes moved: rows, weights of groups that have rows, and products.

        Mixtral, one token up: 2 * 4096 * 14336 weights, 2 rows of 4096 and 14336
        numbers, all of 2 bytes: 234.96 MB.
        """
        used = int(np.count_nonzero(self.group_sizes()))
        weights = used * self.width * self.columns
        rows = self.num_rows * (self.width + self.columns)
        return (weights + rows) * ITEMSIZES[self.dtype]

    @property
    def flops(self) -> int:
        """Operations of the product of each row with the weights of its own group."""
        return 2 * self.num_rows * self.width * self.columns
