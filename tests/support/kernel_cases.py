"""Attention over pages in float64, and cases with NaN in all unused places."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support import attention_cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of paged attention in NumPy; floating arrays in float64."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray  # the first numbers of the keys, if narrower
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

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by name for the kernel; None for missing ones."""

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
    padding: int = 0,
    trees: bool = False,
    value_width: int | None = None,
    decode: bool = False,
    dtype: str = "bfloat16",
    seed: int = 0,
    **features: Any,
) -> Case:
    """Makes a case from (places before, rows) of each slot, slot by slot.

    With a `value_width` the values are the first numbers of the keys.

    Places that no row reads have NaN, and unused page ids are invalid. With
    `decode`, a slot without rows gets one of position -1.
    """
    rng = np.random.default_rng(seed)
    base = attention_cases.make_case(
        rng,
        slots,
        page_size=page_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        padding=padding,
        decode=decode,
        window=features.get("window"),
    )
    if value_width is not None:
        base = base._replace(v_pages=base.k_pages[..., :value_width])
    q = base.q
    positions = base.positions
    owners = base.slots
    if owners is not None:  # rows without a slot last
        order = np.argsort(np.where(owners < 0, len(slots), owners), kind="stable")
        q = q[order]
        positions = positions[order]
        owners = owners[order]
    kin = None
    if trees:
        assert owners is not None
        kin, positions = _trees(rng, slots, positions)

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)

    return Case(
        q=rounded(q),
        k_pages=rounded(base.k_pages),
        v_pages=rounded(base.v_pages),
        page_ids=base.page_ids,
        positions=positions,
        slots=owners,
        context=np.asarray([before for before, _ in slots]) if trees else None,
        ancestors=kin,
        scale=features.pop("scale", head_dim**-0.5),
        dtype=dtype,
        **features,
    )


def _trees(
    rng: np.random.Generator, slots: list[tuple[int, int]], positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ancestors of every row in a random tree of its slot, and positions by depth."""
    kin = np.zeros((len(positions), max(rows for _, rows in slots)), bool)
    positions = positions.copy()
    row = 0
    for before, rows in slots:
        for node in range(rows):
            kin[row, node] = True
            if node and (parent := rng.integers(-1, node)) >= 0:
                kin[row] |= kin[row - node + parent]
            positions[row] = before + kin[row].sum() - 1
            row += 1
    return kin, positions


def exact(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, row after row."""
    arrays, features = _parts(case)
    return attention_cases.oracle(arrays, **features)


def _parts(case: Case) -> tuple[attention_cases.Case, dict[str, Any]]:
    """Returns the case in the form of `attention_cases`, and its features."""
    names = ("context", "ancestors", "scale", "window", "softcap", "alibi", "sinks")
    arrays = (getattr(case, name) for name in attention_cases.Case._fields)
    return attention_cases.Case(*arrays), {name: getattr(case, name) for name in names}


def assert_within_rule(case: Case, out: Any, lse: Any) -> None:
    """Asserts at most twice the error of the plain implementation, plus 1e-5."""
    out, lse = (np.asarray(x, np.float64) for x in (out, lse))
    exact_out, exact_lse = exact(case)
    arrays, features = _parts(case)
    plain_out, _ = attention_cases.plain(arrays, case.dtype, **features)
    dead = np.isneginf(exact_lse)
    assert (out[dead] == 0).all()
    assert (lse[dead] == -np.inf).all()
    assert np.isfinite(out).all()
    error = abs(out - exact_out)
    allowed = abs(plain_out - exact_out)
    assert error.max() <= 2 * allowed.max() + 1e-5
    assert error.mean() <= 1.5 * allowed.mean() + 1e-5
    np.testing.assert_allclose(lse[~dead], exact_lse[~dead], rtol=1e-6, atol=1e-5)
