"""Rotary writes and flash attention, held against NumPy's formulas in float64."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.kernels import MAX_ERROR
from pallas_kernels import row_packing
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.page_ops import rotary_write

NUM_LAYERS, LAYER = 3, 1
GRADIENT_ROOM = 2.0
"""By how much more a gradient may be off than an output: it is three products deep."""


def check(size: str, name: str) -> list[dict[str, Any]]:
    """Errors of the implementations, the reference among them, as `checks.check`."""
    return CHECKS[name](size)


class _Writes(NamedTuple):
    """Rows that go to places in the second of three layers, two of them to none."""

    qkv: jax.Array
    angles: np.ndarray
    pages: list[jax.Array]
    page: np.ndarray
    offset: np.ndarray
    packing: row_packing.Packing

    @property
    def turns(self) -> rotary_write.Turns:
        """The angles' cosines and sines, query by query."""
        rows, kv_heads, columns, _ = self.qkv.shape
        each = rotary_write.query_rows(rows, kv_heads * (columns - 2))
        shape = rows, kv_heads, columns - 2, -1
        turned = (jnp.asarray(f(self.angles)) for f in (np.cos, np.sin))
        return rotary_write.Turns(*(x[each].reshape(shape) for x in turned))

    @property
    def num_pages(self) -> int:
        """Of a layer."""
        return self.pages[0].shape[0] // NUM_LAYERS


def _draw_writes(size: str) -> _Writes:
    kv_heads, group, head_dim, page_size, num_rows, num_pages, dtype = (
        (8, 4, 128, 16, 200, 64, "bfloat16")
        if size == "gpu"
        else (2, 3, 8, 4, 12, 5, "float32")
    )
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    shape = NUM_LAYERS * num_pages, kv_heads, page_size, head_dim
    place = rng.permutation(num_pages * page_size)[:num_rows]
    page, offset = place // page_size, place % page_size
    page[1], page[-1] = -1, num_pages
    packing = row_packing.pack_rows(
        jnp.arange(num_rows, dtype=jnp.int32) // 4,
        jnp.asarray(page >= 0),
        num_slots=num_rows // 4,
        tokens=2,
        max_rows=4,
    )
    return _Writes(
        qkv=normal(num_rows, kv_heads, group + 2, head_dim),
        angles=rng.uniform(0, 7, (num_rows, head_dim // 2)).astype(np.float32),
        pages=[normal(*shape) for _ in "kv"],
        page=page,
        offset=offset,
        packing=packing,
    )


def _rotary_write(size: str) -> list[dict[str, Any]]:
    """Queries turned and packed; keys and values in their places, the rest kept."""
    case = _draw_writes(size)
    x, group = np.asarray(case.qkv, np.float64), case.qkv.shape[2] - 2
    low, high = np.split(x, 2, axis=-1)
    turned = (low + 1j * high) * np.exp(1j * case.angles.astype("float64"))[
        :, None, None
    ]
    turned = np.concatenate([turned.real, turned.imag], -1)
    queries = turned[:, :, :group]
    packed = np.where((case.page >= 0)[:, None, None, None], queries, 0)
    kept = np.flatnonzero((case.page >= 0) & (case.page < case.num_pages))
    page, offset = LAYER * case.num_pages + case.page[kept], case.offset[kept]
    right = [queries, packed, turned[kept, :, group], x[kept, :, -1]]
    touched = np.zeros((case.pages[0].shape[0], case.pages[0].shape[2]), bool)
    touched[page, offset] = True

    def error(implementation: Any) -> float:
        q, in_blocks, *pages = _write(case, implementation)
        assert in_blocks is not None  # a packing was given
        for before, after in zip(case.pages, pages, strict=True):
            same = np.asarray(before) == np.asarray(after)
            if not same.swapaxes(1, 2)[~touched].all():
                return float("inf")
        back = row_packing.unpack(in_blocks, case.packing, group=group, fill=0.0)
        written = (np.asarray(each)[page, :, offset] for each in pages)
        return _worst([q, back.reshape(queries.shape), *written], right)

    return judged(("reference", "mosaic_gpu"), error, MAX_ERROR[str(case.qkv.dtype)])


def _write(case: _Writes, implementation: Any) -> rotary_write.Rotated:
    where = (jnp.asarray(x, jnp.int32) for x in (case.page, case.offset))
    call = jax.jit(
        functools.partial(
            rotary_write.rotate_and_write,
            num_layers=NUM_LAYERS,
            implementation=implementation,
        )
    )
    how: Any = {"packing": case.packing, "layer": jnp.int32(LAYER)}
    return call(case.qkv, case.turns, *case.pages, *where, **how)


def _flash(size: str, *, window: int | None, gradient: bool) -> list[dict[str, Any]]:
    """Output and log-sum-exp of causal attention, or the gradient of its output."""
    batch, seq, heads, kv_heads, head_dim, dtype = (
        (2, 500, 8, 2, 128, "bfloat16")
        if size == "gpu"
        else (1, 150, 4, 2, 8, "float32")
    )
    rng = np.random.default_rng(1)
    q, k, v, cotangent = (
        jnp.asarray(rng.normal(size=(batch, seq, num, head_dim)), dtype)
        for num in (heads, kv_heads, kv_heads, heads)
    )
    wide = [np.asarray(x, np.float64) for x in (q, k, v, cotangent)]
    (out, lse), gradients = _formula(*wide, window)

    def error(implementation: Any) -> float:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, Any]:
            how: Any = {"window": window, "implementation": implementation}
            return flash_attention(q, k, v, **how)

        if not gradient:
            return _worst(jax.jit(attend)(q, k, v), [out, lse])

        @jax.jit
        def pull(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            back = jax.vjp(lambda *x: attend(*x)[0], q, k, v)[1]
            return back(cotangent)

        return _worst(pull(q, k, v, cotangent), gradients)

    most = MAX_ERROR[dtype] * (GRADIENT_ROOM if gradient else 1)
    return judged(("reference", "cudnn"), error, most)


def _formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cotangent: np.ndarray,
    window: int | None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Attention written out: output, log-sum-exp, and the output's gradients.

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.2.
    """
    group = q.shape[2] // k.shape[2]
    scale, place = q.shape[3] ** -0.5, np.arange(q.shape[1])
    back = place[:, None] - place[None]
    seen = (back >= 0) & (True if window is None else back < window)
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.where(seen, scale * np.einsum("bqhd,bkhd->bhqk", q, keys), -np.inf)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    weights = np.exp(scores - lse)
    out = np.einsum("bhqk,bkhd->bqhd", weights, values)
    of_weights = np.einsum("bqhd,bkhd->bhqk", cotangent, values)
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = scale * weights * (of_weights - mean)
    by_group = lambda x: x.reshape(*k.shape[:3], group, -1).sum(3)  # noqa: E731
    gradients = [
        np.einsum("bhqk,bkhd->bqhd", of_scores, keys),
        by_group(np.einsum("bhqk,bqhd->bkhd", of_scores, q)),
        by_group(np.einsum("bhqk,bqhd->bkhd", weights, cotangent)),
    ]
    return [out, lse[..., 0].swapaxes(1, 2)], gradients


def _worst(found: Iterable[Any], wanted: Iterable[np.ndarray]) -> float:
    """The largest relative error of several arrays; NaN where one is there."""
    errors = [
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        for x, y in zip(found, wanted, strict=True)
    ]
    return float(np.max(errors))


def judged(
    names: Iterable[str], error: Callable[[Any], float], most: float
) -> list[dict[str, Any]]:
    """A row for each implementation, with its error, or why it does not serve here."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"implementation": name}
        try:
            found = error(name)
            row |= {"error": found, "right": bool(found <= most)}
        except Exception as failed:  # a refusal, or a compiler's: the others go on
            said = str(failed).strip().split("\n")[0][:200]
            row["note"] = f"{type(failed).__name__}: {said}"
        rows.append(row)
    return rows


CHECKS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "rotary-write": _rotary_write,
    "flash": lambda size: _flash(size, window=None, gradient=False),
    "flash-window": lambda size: _flash(size, window=100, gradient=False),
    "flash-gradient": lambda size: _flash(size, window=None, gradient=True),
}
"""What is checked, by name."""
