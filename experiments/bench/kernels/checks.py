"""Correctness of all kernels against float64: each shape, each feature of attention.

Paged attention, copies and grouped products are compared with their `Problem`, as
`bench kernels` does before timing; rotary writes and flash attention with the formulas
in this file.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from experiments.harness import MAX_ERROR, implementations_of
from pallas_kernels import bench, row_packing
from pallas_kernels.bench import (
    FEATURES,
    SETS,
    TINY,
    GroupedSpec,
    Spec,
    in_float64,
    make_attention,
    make_problem,
)
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.page_ops import RotaryCosSin, query_rows, write_rotated_kv

MAX_8_BIT_ERROR = 2e-2
"""Largest error of 16-bit results from 8-bit pages; both sides read the same
numbers."""
GRADIENT_ROOM = 2.0
"""Factor on the error limit for gradients, which are three products deep."""
ROWS = {"decode": 1, "chunk": 40, "tree": 8}
"""Kinds of rows that every feature is checked on, with rows per sequence."""
NUM_LAYERS = 3
LAYER = 1
"""Layers of the pages of rotary writes, and the layer that is written."""


def shapes_to_check(size: str) -> dict[str, Spec | GroupedSpec]:
    """Returns the shapes to check by name: those of the set quick, or tiny ones."""
    return {x.name: x for x in SETS["quick" if size == "gpu" else "tiny"]}


def check_names(size: str) -> list[str]:
    """Returns the names of all checks."""
    features = (f"{x}-{kind}" for x in FEATURES for kind in ROWS)
    return [*shapes_to_check(size), *features, *FORMULAS]


class KernelCheck(TypedDict, total=False):
    """Result of an implementation: `error` and `right`, or `note` after a failure."""

    implementation: str
    error: float
    right: bool
    note: str


def check_kernel(size: str, name: str) -> dict[str, list[KernelCheck]]:
    """Returns the errors of all implementations, and whether each is within its limit.

    Returns:
      The checks under the key `implementations`.
    """
    feature, _, kind = name.partition("-")
    if name in FORMULAS:
        implementations, error, max_error = FORMULAS[name](size)
    else:
        if feature in FEATURES:
            sizes: dict[str, Any] = {"heads": TINY, "page_size": 8}
            sizes = {} if size == "gpu" else sizes | {"dtype": "float32"}
            sizes |= {"kind": kind, "rows": ROWS[kind], "lengths": "uniform"}
            spec = Spec(batch=3, context=300, **sizes)
            problem: Any = make_attention(spec, feature=feature)
        else:
            problem = make_problem(shapes_to_check(size)[name], num_turns=1)
        spec = problem.spec
        implementations = {
            x.name: x.prepare for x in implementations_of(spec) if not x.is_peer
        }
        error = lambda name: float(implementations[name](problem).error())  # noqa: E731
        max_error = (
            MAX_8_BIT_ERROR if feature in ("int8", "fp8") else MAX_ERROR[spec.dtype]
        )
    rows = []
    for name in implementations:
        row: KernelCheck = {"implementation": name}
        try:
            deviation = error(name)
            row |= {"error": deviation, "right": bool(deviation <= max_error)}
        except Exception as failed:  # of any kind: the next implementations run
            message = str(failed).strip().split("\n")[0][:200]
            row["note"] = f"{type(failed).__name__}: {message}"
        rows.append(row)
    return {"implementations": rows}


type Check = tuple[Iterable[str], Callable[[Any], float], float]
"""Names of implementations, the error of one, and the largest allowed error."""


def _rotary_write(size: str) -> Check:
    """Checks rotated and packed queries, written keys and values, and other pages."""
    kv_heads, group, head_dim, page_size, num_rows, num_pages, dtype = (
        (8, 4, 128, 16, 200, 64, "bfloat16")
        if size == "gpu"
        else (2, 3, 8, 4, 12, 5, "float32")
    )
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    place = rng.permutation(num_pages * page_size)[:num_rows]
    page = place // page_size
    offset = place % page_size
    # rows that are not written
    page[1] = -1
    page[-1] = num_pages
    packing = row_packing.pack_rows(
        jnp.arange(num_rows, dtype=jnp.int32) // 4,
        jnp.asarray(page >= 0),
        num_slots=num_rows // 4,
        tokens=2,
        max_rows=4,
    )
    qkv = normal(num_rows, kv_heads, group + 2, head_dim)
    angles = rng.uniform(0, 7, (num_rows, head_dim // 2)).astype(np.float32)
    shape = NUM_LAYERS * num_pages, kv_heads, page_size, head_dim
    pages = [normal(*shape) for _ in "kv"]
    row_ids = query_rows(num_rows, kv_heads * group)
    by_query = num_rows, kv_heads, group, -1
    cos, sin = (
        jnp.asarray(f(angles))[row_ids].reshape(by_query) for f in (np.cos, np.sin)
    )

    # Pairs as complex numbers, rotated by a factor of modulus 1.
    x = np.asarray(qkv, np.float64)
    low, high = np.split(x, 2, axis=-1)
    turned = (low + 1j * high) * np.exp(1j * angles.astype(float))[:, None, None]
    turned = np.concatenate([turned.real, turned.imag], -1)
    queries = turned[:, :, :group]
    packed = np.where((page >= 0)[:, None, None, None], queries, 0)
    valid_rows = np.flatnonzero((page >= 0) & (page < num_pages))
    kv_index = LAYER * num_pages + page[valid_rows], slice(None), offset[valid_rows]
    right = [queries, packed, turned[valid_rows, :, group], x[valid_rows, :, -1]]
    untouched = np.ones(shape[:3], bool)
    untouched[kv_index] = False

    def error(implementation: Any) -> float:
        call = functools.partial(
            write_rotated_kv,
            num_layers=NUM_LAYERS,
            implementation=implementation,
        )
        where = (jnp.asarray(x, jnp.int32) for x in (page, offset))
        options: Any = {"packing": packing, "layer": jnp.int32(LAYER)}
        turns = RotaryCosSin(cos, sin)
        q, in_blocks, *new_pages = jax.jit(call)(qkv, turns, *pages, *where, **options)
        assert in_blocks is not None  # a packing was given
        for before, after in zip(map(np.asarray, pages), new_pages, strict=True):
            if not (before == np.asarray(after))[untouched].all():
                return float("inf")
        back = row_packing.unpack_rows(in_blocks, packing, group=group, fill=0.0)
        written = (np.asarray(array)[kv_index] for array in new_pages)
        return _worst([q, back.reshape(queries.shape), *written], right)

    return ("reference", "mosaic_gpu"), error, MAX_ERROR[dtype]


def _flash(size: str, *, window: int | None = None, gradient: bool = False) -> Check:
    """Checks output and log-sum-exp of causal attention, or the output's gradient."""
    batch, seq, heads, kv_heads, head_dim, dtype = (
        (2, 500, 8, 2, 128, "bfloat16")
        if size == "gpu"
        else (1, 150, 4, 2, 8, "float32")
    )
    rng = np.random.default_rng(1)
    arrays = [
        jnp.asarray(rng.normal(size=(batch, seq, num, head_dim)), dtype)
        for num in (heads, kv_heads, kv_heads, heads)
    ]

    def call(
        attend: Callable[..., Sequence[Array]], **options: object
    ) -> Callable[..., Sequence[Array]]:
        attend = functools.partial(attend, window=window, **options)

        def pull(q: Array, k: Array, v: Array, cotangent: Array) -> Sequence[Array]:
            out = attend(q, k, v)
            if not gradient:
                return out
            return jax.vjp(lambda *x: attend(*x)[0], q, k, v)[1](cotangent)

        return jax.jit(pull)

    right = in_float64(call(bench.attention), *arrays)

    def error(implementation: Any) -> float:
        outputs = call(flash_attention, implementation=implementation)(*arrays)
        return _worst(outputs, right)

    max_error = MAX_ERROR[dtype] * (GRADIENT_ROOM if gradient else 1)
    return ("reference", "cudnn"), error, max_error


def _worst(arrays: Iterable[ArrayLike], wanted: Iterable[ArrayLike]) -> float:
    """Returns the largest relative error of several arrays; NaN if an array has one."""
    errors = []
    for x, y in zip(arrays, map(np.asarray, wanted), strict=True):
        errors.append(np.linalg.norm(np.asarray(x, float) - y) / np.linalg.norm(y))
    return float(np.max(errors))


FORMULAS: dict[str, Callable[[str], Check]] = {
    "rotary-write": _rotary_write,
    "flash": _flash,
    "flash-window": functools.partial(_flash, window=100),
    "flash-gradient": functools.partial(_flash, gradient=True),
}
"""Checks against the formulas of this file, by name."""
