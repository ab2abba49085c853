"""Named shapes of attention and of page copies, shared by tests and benchmarks.

Heads are those of models that people serve; batches, contexts, trees and prefixes are
those that others publish their kernels' times for.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

MAX_BYTES = 60_000_000_000
"""Larger ones are not in the grid: an H200 has 150 GB, peers need a second layout."""
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by type."""


class Heads(NamedTuple):
    """Heads of a model's attention."""

    q_heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """Writes the counts, and the size where it is not the usual 128."""
        size = "" if self.head_dim == 128 else f"d{self.head_dim}"
        return f"{self.q_heads}x{self.kv_heads}{size}"


LLAMA_2_7B = Heads(32, 32, 128)
LLAMA_3_8B = Heads(32, 8, 128)
LLAMA_3_70B = Heads(64, 8, 128)
MULTI_QUERY = Heads(16, 1, 128)
SMOLLM2_135M = Heads(9, 3, 64)
GEMMA_2_2B = Heads(8, 4, 256)
TINY = Heads(4, 2, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One shape."""

    kind: Literal["decode", "tree", "prefix", "chunk", "prefill", "copy"]
    """One row a sequence; a tree of rows; one row behind a shared prefix; a causal
    chunk behind a context; one without; copies of whole pages."""
    batch: int
    """Sequences; for copies, pages that are copied."""
    context: int = 0
    """Tokens before the rows, the longest sequence's; of them `shared` are shared."""
    rows: int = 1
    """Query rows of each sequence; they see themselves, too."""
    shared: int = 0
    """Leading tokens that all sequences have in common, whole pages."""
    heads: Heads = LLAMA_3_8B
    page_size: int = 16
    """Token places in a page."""
    lengths: Literal["equal", "uniform", "lognormal", "one_long"] = "equal"
    """How contexts spread over the sequences."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        """Refuses shapes without sense."""
        for name in ("batch", "rows", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"self.{name}={getattr(self, name)} must be above 0")
        if self.shared % self.page_size or not 0 <= self.shared <= self.context:
            raise ValueError(
                f"{self.shared=} must be whole pages within {self.context=}"
            )

    @property
    def name(self) -> str:
        """Says all of it in a word, as decode-b8-8k-32x8-p16."""
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
        """Tokens before the rows of each sequence: `[batch]`, reproducibly random."""
        rng, free = np.random.default_rng(0), self.context - self.shared
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
        """Fewest bytes to be moved: keys, values and queries read, results written.

        decode-b1-1k-32x8-p16: 1025 tokens of 2 * 8 * 128 numbers of 2 bytes and 2 * 32
        * 128 more numbers, 4.21 MB.
        """
        if self.kind == "copy":
            return 2 * self.batch * self.page_bytes
        tokens = int(np.sum(self.contexts() + self.rows - self.shared)) + self.shared
        kv = 2 * tokens * self.heads.kv_heads
        qo = 2 * self.batch * self.rows * self.heads.q_heads
        return (kv + qo) * self.heads.head_dim * ITEMSIZES[self.dtype]

    @property
    def flops(self) -> int:
        """Operations of both matrix products, over the keys that are seen.

        A row of a tree is taken to see the context and half of the rows.
        """
        if self.kind == "copy":
            return 0
        seen = self.rows * int(np.sum(self.contexts()))
        seen += self.batch * self.rows * (self.rows + 1) // 2
        return 4 * seen * self.heads.q_heads * self.heads.head_dim


def _thousands(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and not number % 1024 else f"{number}"


def every[S](make: Callable[..., S], **values: Any) -> list[S]:
    """Makes a shape for every combination of those values that are lists."""
    lists = [x if isinstance(x, list) else [x] for x in values.values()]
    rows = itertools.product(*lists)
    return [make(**dict(zip(values, row, strict=True))) for row in rows]


def _all(kind: str, **values: Any) -> list[Spec]:
    values.setdefault("batch", 1)
    return every(Spec, kind=kind, **values)


K = 1024
TREE_ROWS = [8, 26, 64]
PAGE_SIZES = [16, 64, 256]
_TINY: dict[str, Any] = {"heads": TINY, "page_size": 8, "dtype": "float32"}
_SMALL: dict[str, Any] = {"dtype": "float32"}

SETS = {
    # What the tests run.
    "tiny": (
        *_all("decode", batch=3, context=40, lengths="uniform", **_TINY),
        *_all("tree", batch=2, context=21, rows=5, **_TINY),
        Spec(kind="chunk", batch=2, context=17, rows=9, **_TINY),
        *_all("copy", batch=4, **_TINY),
    ),
    # What a processor does in a minute.
    "small": (
        *_all("decode", batch=1, context=K, heads=SMOLLM2_135M, **_SMALL),
        *_all("decode", batch=8, context=K, **_SMALL),
        *_all("decode", batch=8, context=K, page_size=64, lengths="uniform", **_SMALL),
        *_all("tree", batch=2, context=K, rows=26, **_SMALL),
        *_all("prefix", batch=8, context=K, shared=K - 128, **_SMALL),
        *_all("chunk", context=K, rows=128, **_SMALL),
        *_all("prefill", rows=512, **_SMALL),
        *_all("copy", batch=512, **_SMALL),
    ),
    "quick": (
        *_all("decode", batch=1, context=K),
        *_all("decode", batch=32, context=4 * K),
        *_all("decode", batch=64, context=8 * K),
        *_all("tree", batch=8, context=8 * K, rows=26),
        *_all("prefix", batch=64, context=8 * K + 256, shared=8 * K),
        *_all("chunk", context=8 * K, rows=512),
        *_all("prefill", rows=2 * K),
        *_all("copy", batch=64 * 32),
    ),
    "real": (
        *_all("decode", batch=[1, 8, 256], context=K),
        *_all("decode", batch=[1, 8, 64], context=8 * K),
        *_all("decode", batch=32, context=4 * K, page_size=PAGE_SIZES),
        *_all("decode", batch=1, context=32 * K),
        *_all(
            "decode",
            batch=32,
            context=4 * K,
            heads=[LLAMA_2_7B, LLAMA_3_70B, MULTI_QUERY, SMOLLM2_135M, GEMMA_2_2B],
        ),
        *_all("decode", batch=64, context=8 * K, lengths=["uniform", "one_long"]),
        *_all("tree", batch=8, context=8 * K, rows=TREE_ROWS),
        *_all("prefix", batch=64, context=8 * K + 256, shared=8 * K),
        *_all("prefix", batch=256, context=32 * K + 256, shared=32 * K),
        *_all("chunk", context=[8 * K, 32 * K], rows=512),
        *_all("prefill", rows=[512, 2 * K, 8 * K]),
        *_all("copy", batch=64 * 32),
    ),
    "grid": tuple(
        spec
        for spec in (
            *_all(
                "decode",
                heads=[LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MULTI_QUERY],
                page_size=PAGE_SIZES,
                batch=[1, 8, 32, 64, 256],
                context=[K, 8 * K, 32 * K, 128 * K],
            ),
            *_all("tree", batch=[1, 8, 32], context=8 * K, rows=TREE_ROWS),
            *(
                Spec(kind="prefix", batch=batch, context=shared + 256, shared=shared)
                for batch, shared in itertools.product(
                    (16, 64, 256), (K, 8 * K, 32 * K)
                )
            ),
            *_all("chunk", context=[8 * K, 32 * K], rows=512, page_size=PAGE_SIZES),
            *_all("prefill", rows=[512, 2 * K, 8 * K, 16 * K], page_size=PAGE_SIZES),
        )
        if spec.bytes <= MAX_BYTES
    ),
}
"""Shapes by the name of the occasion."""
