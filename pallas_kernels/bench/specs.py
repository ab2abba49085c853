"""Named shapes of attention and of page copies, shared by tests and benchmarks.

Heads are those of models that people serve; batches, contexts, trees and prefixes are
those that others publish their kernels' times for.
"""

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

import numpy as np

MAX_BYTES = 60_000_000_000
"""Larger ones are not in the grid: an H200 has 150 GB, peers need a second layout."""


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
        words += [str(self.heads), f"p{self.page_size}"]
        words += [x for x in (self.lengths,) if x != "equal"]
        return "-".join([*words, *[x for x in (self.dtype,) if x != "bfloat16"]])

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page."""
        return (
            self.heads.kv_heads * self.page_size * self.heads.head_dim * self.itemsize
        )

    def contexts(self) -> np.ndarray:
        """Tokens before the rows of each sequence: `[batch]`, reproducibly random."""
        rng, free = np.random.default_rng(0), self.context - self.shared
        if self.lengths == "equal":
            draws = np.ones(self.batch)
        elif self.lengths == "uniform":
            draws = rng.uniform(0, 1, self.batch)
        elif self.lengths == "lognormal":
            draws = rng.lognormal(-1.5, 1.0, self.batch)
        else:
            draws = np.full(self.batch, 1 / 16)
        draws = np.minimum(draws, 1)
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
        return (kv + qo) * self.heads.head_dim * self.itemsize

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


def _decode(batch: int, context: int, **others: Any) -> Spec:
    return Spec(kind="decode", batch=batch, context=context, **others)


def _tiny(kind: Any, batch: int, **others: Any) -> Spec:
    small: Any = {"heads": TINY, "page_size": 8, "dtype": "float32"}
    return Spec(kind=kind, batch=batch, **small, **others)


K = 1024
TREE_ROWS = (8, 26, 64)

SETS = {
    # What the tests run.
    "tiny": (
        _tiny("decode", 3, context=40, lengths="uniform"),
        _tiny("tree", 2, context=21, rows=5),
        _tiny("chunk", 2, context=17, rows=9),
        _tiny("copy", 4),
    ),
    # What a processor does in a minute.
    "small": (
        _decode(1, K, heads=SMOLLM2_135M, dtype="float32"),
        _decode(8, K, dtype="float32"),
        _decode(8, K, dtype="float32", page_size=64, lengths="uniform"),
        Spec(kind="tree", batch=2, context=K, rows=26, dtype="float32"),
        Spec(kind="prefix", batch=8, context=K, shared=K - 128, dtype="float32"),
        Spec(kind="chunk", batch=1, context=K, rows=128, dtype="float32"),
        Spec(kind="prefill", batch=1, rows=512, dtype="float32"),
        Spec(kind="copy", batch=512, dtype="float32"),
    ),
    "quick": (
        *(_decode(batch, length) for batch, length in ((1, K), (32, 4 * K))),
        _decode(64, 8 * K),
        Spec(kind="tree", batch=8, context=8 * K, rows=26),
        Spec(kind="prefix", batch=64, context=8 * K + 256, shared=8 * K),
        Spec(kind="chunk", batch=1, context=8 * K, rows=512),
        Spec(kind="prefill", batch=1, rows=2 * K),
        Spec(kind="copy", batch=64 * 32),
    ),
    "real": (
        *(_decode(batch, K) for batch in (1, 8, 256)),
        *(_decode(batch, 8 * K) for batch in (1, 8, 64)),
        *(_decode(32, 4 * K, page_size=page_size) for page_size in (16, 64, 256)),
        _decode(1, 32 * K),
        *(
            _decode(32, 4 * K, heads=heads)
            for heads in (LLAMA_2_7B, LLAMA_3_70B, MULTI_QUERY)
        ),
        *(_decode(32, 4 * K, heads=heads) for heads in (SMOLLM2_135M, GEMMA_2_2B)),
        _decode(64, 8 * K, lengths="uniform"),
        _decode(64, 8 * K, lengths="one_long"),
        *(Spec(kind="tree", batch=8, context=8 * K, rows=rows) for rows in TREE_ROWS),
        Spec(kind="prefix", batch=64, context=8 * K + 256, shared=8 * K),
        Spec(kind="prefix", batch=256, context=32 * K + 256, shared=32 * K),
        Spec(kind="chunk", batch=1, context=8 * K, rows=512),
        Spec(kind="chunk", batch=1, context=32 * K, rows=512),
        *(Spec(kind="prefill", batch=1, rows=rows) for rows in (512, 2 * K, 8 * K)),
        Spec(kind="copy", batch=64 * 32),
    ),
    "grid": tuple(
        spec
        for spec in (
            *(
                _decode(batch, length, heads=heads, page_size=page_size)
                for heads, page_size, batch, length in itertools.product(
                    (LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MULTI_QUERY),
                    (16, 64, 256),
                    (1, 8, 32, 64, 256),
                    (K, 8 * K, 32 * K, 128 * K),
                )
            ),
            *(
                Spec(kind="tree", batch=batch, context=8 * K, rows=rows)
                for batch, rows in itertools.product((1, 8, 32), TREE_ROWS)
            ),
            *(
                Spec(kind="prefix", batch=batch, context=shared + 256, shared=shared)
                for batch, shared in itertools.product(
                    (16, 64, 256), (K, 8 * K, 32 * K)
                )
            ),
            *(
                Spec(kind="chunk", batch=1, context=context, rows=512, page_size=size)
                for context, size in itertools.product((8 * K, 32 * K), (16, 64, 256))
            ),
            *(
                Spec(kind="prefill", batch=1, rows=rows, page_size=size)
                for rows, size in itertools.product(
                    (512, 2 * K, 8 * K, 16 * K), (16, 64, 256)
                )
            ),
        )
        if spec.bytes <= MAX_BYTES
    ),
}
"""Shapes by the name of the occasion."""
