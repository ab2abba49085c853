"""Named sets of shapes, shared by tests and benchmarks.

Batches, contexts, trees and prefixes are those of published kernel benchmarks; token
counts of grouped products are those of a decoding step and of a prompt.
"""

import itertools
from collections.abc import Callable
from typing import Any

from pallas_kernels.bench import specs
from pallas_kernels.bench.specs import GroupedSpec, Spec

MAX_CASE_BYTES = 60_000_000_000
"""Largest shape of the grid: an H200 has 150 GB, and peers need a second layout."""


def expand_specs[S](make: Callable[..., S], **values: object) -> list[S]:
    """Makes a spec for every combination of the values that are lists."""
    lists = [x if isinstance(x, list) else [x] for x in values.values()]
    rows = itertools.product(*lists)
    return [make(**dict(zip(values, row, strict=True))) for row in rows]


def _both(**values: object) -> list[GroupedSpec]:
    return expand_specs(GroupedSpec, **values, direction=["up", "down"])


def _all(kind: str, **values: object) -> list[Spec]:
    values.setdefault("batch", 1)
    return expand_specs(Spec, kind=kind, **values)


def _latent(**values: object) -> list[Spec]:
    values.setdefault(
        "heads", [specs.DEEPSEEK_V2_LITE_LATENT, specs.DEEPSEEK_V3_LATENT]
    )
    return _all("decode", page_size=64, **values)


K = 1024
TREE_ROWS = [8, 26, 64]
PAGE_SIZE_CHOICES = [16, 64, 256]
_TINY_CASE: dict[str, Any] = {"heads": specs.TINY, "page_size": 8, "dtype": "float32"}
_FLOAT32: dict[str, Any] = {"dtype": "float32"}

SETS: dict[str, tuple[Spec | GroupedSpec, ...]] = {
    # The shapes of the tests.
    "tiny": (
        *_all("decode", batch=3, context=40, lengths="uniform", **_TINY_CASE),
        *_all("tree", batch=2, context=21, rows=5, **_TINY_CASE),
        Spec(kind="chunk", batch=2, context=17, rows=9, **_TINY_CASE),
        *_all("copy", batch=4, **_TINY_CASE),
        GroupedSpec(tokens=9, experts=specs.TINY_EXPERTS, dtype="float32"),
    ),
    # The shapes that a CPU computes in a minute.
    "small": (
        *_all("decode", batch=1, context=K, heads=specs.SMOLLM2_135M, **_FLOAT32),
        *_all("decode", batch=8, context=K, **_FLOAT32),
        *_all(
            "decode", batch=8, context=K, page_size=64, lengths="uniform", **_FLOAT32
        ),
        *_all("tree", batch=2, context=K, rows=26, **_FLOAT32),
        *_all("prefix", batch=8, context=K, shared=K - 128, **_FLOAT32),
        *_all("chunk", context=K, rows=128, **_FLOAT32),
        *_all("prefill", rows=512, **_FLOAT32),
        *_all("copy", batch=512, **_FLOAT32),
        *expand_specs(
            GroupedSpec,
            tokens=[1, 8, 512],
            experts=[specs.SMALL_EXPERTS, specs.SMALL_MANY_EXPERTS],
            **_FLOAT32,
        ),
    ),
    "quick": (
        *_all("decode", batch=1, context=K),
        *_all("decode", batch=32, context=4 * K),
        *_all("decode", batch=64, context=8 * K),
        *_latent(batch=32, context=4 * K, heads=specs.DEEPSEEK_V3_LATENT),
        *_all("tree", batch=8, context=8 * K, rows=26),
        *_all("prefix", batch=64, context=8 * K + 256, shared=8 * K),
        *_all("chunk", context=8 * K, rows=512),
        *_all("prefill", rows=2 * K),
        *_all("copy", batch=64 * 32),
        *expand_specs(GroupedSpec, tokens=[32, 8192], experts=specs.MIXTRAL_8X7B),
        GroupedSpec(tokens=64, experts=specs.DEEPSEEK_V2_LITE),
    ),
    "real": (
        *_all("decode", batch=[1, 8, 256], context=K),
        *_all("decode", batch=[1, 8, 64], context=8 * K),
        *_all("decode", batch=32, context=4 * K, page_size=PAGE_SIZE_CHOICES),
        *_all("decode", batch=1, context=32 * K),
        *_all(
            "decode",
            batch=32,
            context=4 * K,
            heads=[
                specs.LLAMA_2_7B,
                specs.LLAMA_3_70B,
                specs.MULTI_QUERY,
                specs.SMOLLM2_135M,
                specs.GEMMA_2_2B,
            ],
        ),
        *_all("decode", batch=64, context=8 * K, lengths=["uniform", "one_long"]),
        *_latent(batch=[1, 32], context=[4 * K, 32 * K]),
        *_all("tree", batch=8, context=8 * K, rows=TREE_ROWS),
        *_all("prefix", batch=64, context=8 * K + 256, shared=8 * K),
        *_all("prefix", batch=256, context=32 * K + 256, shared=32 * K),
        *_all("chunk", context=[8 * K, 32 * K], rows=512),
        *_all("prefill", rows=[512, 2 * K, 8 * K]),
        *_all("copy", batch=64 * 32),
        *_both(tokens=[1, 32, 256, 8192], experts=specs.MIXTRAL_8X7B),
        *_both(tokens=[1, 64, 4096], experts=specs.DEEPSEEK_V2_LITE),
        *_both(tokens=[16, 128, 8192], experts=specs.DEEPSEEK_V3),
    ),
    "grid": tuple(
        spec
        for spec in (
            *_all(
                "decode",
                heads=[
                    specs.LLAMA_2_7B,
                    specs.LLAMA_3_8B,
                    specs.LLAMA_3_70B,
                    specs.MULTI_QUERY,
                ],
                page_size=PAGE_SIZE_CHOICES,
                batch=[1, 8, 32, 64, 256],
                context=[K, 8 * K, 32 * K, 128 * K],
            ),
            *_latent(batch=[1, 8, 32, 64, 256], context=[K, 8 * K, 32 * K, 128 * K]),
            *_all("tree", batch=[1, 8, 32], context=8 * K, rows=TREE_ROWS),
            *(
                Spec(kind="prefix", batch=batch, context=shared + 256, shared=shared)
                for batch, shared in itertools.product(
                    (16, 64, 256), (K, 8 * K, 32 * K)
                )
            ),
            *_all(
                "chunk", context=[8 * K, 32 * K], rows=512, page_size=PAGE_SIZE_CHOICES
            ),
            *_all(
                "prefill", rows=[512, 2 * K, 8 * K, 16 * K], page_size=PAGE_SIZE_CHOICES
            ),
            *_both(
                tokens=[1, 8, 64, 256, 1024, 4096, 16384],
                experts=[specs.MIXTRAL_8X7B, specs.DEEPSEEK_V2_LITE, specs.DEEPSEEK_V3],
            ),
        )
        if spec.bytes <= MAX_CASE_BYTES
    ),
}
"""Attention, then copies, then grouped products."""
