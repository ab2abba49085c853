"""Attention over pages worked out in float64, and cases where all else is poisoned."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support import attention_cases

WILD = 2**31 - 7
"""A page id past the end of any pool; kernels must not follow it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of paged attention, in numpy; float arrays in float64."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray | None
    context: np.ndarray | None = None
    ancestors: np.ndarray | None = None
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: np.ndarray | None = None
    sinks: np.ndarray | None = None
    dtype: str = "bfloat16"

    def slot_of(self, row: int) -> int:
        return row if self.slots is None else int(self.slots[row])

    def seen(self, row: int) -> np.ndarray:
        """Places that a row sees."""
        position = int(self.positions[row])
        if position < 0:
            return np.zeros(0, int)
        if self.context is None:
            places = np.arange(position + 1)
        else:
            places = np.arange(start := int(self.context[self.slot_of(row)]))
            if self.ancestors is not None:
                kin = start + np.flatnonzero(self.ancestors[row])
                places = np.concatenate([places, kin])
        if self.window is not None:
            places = places[places > position - self.window]
        return places

    def arrays(self) -> dict[str, Any]:
        """The arrays by name, as the kernel gets them; None where there is none."""

        def one(name: str, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return None
            if value.dtype == np.float64:
                wide = name in ("alibi", "sinks")
                return jnp.asarray(value, jnp.float32 if wide else self.dtype)
            return jnp.asarray(value, bool if value.dtype == bool else jnp.int32)

        return {name: one(name, value) for name, value in vars(self).items()}


def make_case(
    slots: list[tuple[int, int]],
    *,
    page_size: int,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    trees: bool = False,
    decode: bool = False,
    dtype: str = "bfloat16",
    seed: int = 0,
    padding: int = 0,
    **features: Any,
) -> Case:
    """Makes a case from (places before, rows) of each slot.

    Pages are scattered over a pool with strangers; every place that no row sees holds
    NaN, and every id that no row needs is wild. With `decode` a slot of no row gets one
    of position -1.
    """
    rng = np.random.default_rng(seed)
    rounded = lambda *shape: np.asarray(  # noqa: E731
        jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32), np.float64
    )
    longest = max(before + rows for before, rows in slots)
    width = -(-longest // page_size) + 2
    num_pages = len(slots) * width + 3
    positions, owners, kin = [], [], []
    columns = max(rows for _, rows in slots)
    for slot, (before, rows) in enumerate(slots):
        depth: list[int] = []
        flags = np.zeros((rows, columns), bool)
        for row in range(rows):
            parent = int(rng.integers(-1, row)) if row else -1
            flags[row, row] = True
            if parent >= 0:
                flags[row] |= flags[parent]
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        kin.append(flags)
        positions += [before + (depth[i] if trees else i) for i in range(rows)]
        owners += [slot] * rows
        if decode and rows == 0:
            positions.append(-1)
            owners.append(slot)
            kin.append(np.zeros((1, columns), bool))
    positions += [-1] * padding
    owners += [-1] * padding
    kin.append(np.zeros((padding, columns), bool))
    shape = (num_pages, kv_heads, page_size, head_dim)
    case = Case(
        q=rounded(len(positions), kv_heads * group, head_dim),
        k_pages=np.full(shape, np.nan),
        v_pages=np.full(shape, np.nan),
        page_ids=rng.permutation(num_pages)[: len(slots) * width].reshape(-1, width),
        positions=np.asarray(positions),
        slots=None if decode else np.asarray(owners),
        context=np.asarray([before for before, _ in slots]) if trees else None,
        ancestors=np.concatenate(kin) if trees else None,
        scale=features.pop("scale", head_dim**-0.5),
        dtype=dtype,
        **features,
    )
    if case.alibi is not None:
        assert len(case.alibi) == kv_heads * group
    needed = np.zeros((len(slots), width), bool)
    for row in range(len(positions)):
        for place in case.seen(row):
            slot, column = case.slot_of(row), place // page_size
            page, offset = case.page_ids[slot, column], place % page_size
            needed[slot, column] = True
            if np.isnan(case.k_pages[page, 0, offset, 0]):
                case.k_pages[page, :, offset] = rounded(kv_heads, head_dim)
                case.v_pages[page, :, offset] = rounded(kv_heads, head_dim)
    wild = np.where(rng.random(needed.shape) < 0.5, WILD, -1)
    case.page_ids[~needed] = wild[~needed]
    return case


def exact(
    case: Case, narrow: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, row after row."""
    names = ("context", "ancestors", "scale", "window", "softcap", "alibi", "sinks")
    fields = {name: getattr(case, name) for name in names}
    arrays = (getattr(case, name) for name in attention_cases.Case._fields)
    return attention_cases.oracle(
        attention_cases.Case(*arrays), **fields, narrow=narrow
    )


def plain(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The same with float32 scores and weights of the type of q, as one writes it."""

    def narrow(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, case.dtype).astype(jnp.float32), np.float64)

    return exact(case, narrow)


def assert_within_rule(case: Case, out: Any, lse: Any) -> None:
    """At most twice the error of the plain implementation, plus 1e-5."""
    out, lse = (np.asarray(x, np.float64) for x in (out, lse))
    (exact_out, exact_lse), (plain_out, _) = exact(case), plain(case)
    dead = np.isneginf(exact_lse)
    assert (out[dead] == 0).all()
    assert (lse[dead] == -np.inf).all()
    assert np.isfinite(out).all()
    error, allowed = abs(out - exact_out), abs(plain_out - exact_out)
    assert error.max() <= 2 * allowed.max() + 1e-5
    assert error.mean() <= 1.5 * allowed.mean() + 1e-5
    np.testing.assert_allclose(lse[~dead], exact_lse[~dead], rtol=1e-6, atol=1e-5)
