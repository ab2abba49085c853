"""What the door to attention refuses: arrays that do not fit each other."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import quantizing


def check_arrays(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    k_scales: Array | None,
    v_scales: Array | None,
) -> None:
    """Refuses arrays that do not fit each other, as `api.paged_attention` takes them.

    Raises:
      ValueError: shapes or types do not fit.
    """
    q_heads, kv_heads, head_dim = q.shape[1], k_pages.shape[1], q.shape[2]
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise ValueError(f"{q.dtype=} must be a floating type of 16 bits or more")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"{v_pages.shape=}, {v_pages.dtype=} must be {k_pages.shape=}, "
            f"{k_pages.dtype=}"
        )
    if k_pages.shape[3] != head_dim:
        raise ValueError(f"{k_pages.shape[3]=} must be {q.shape[2]=}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    narrow = quantizing.kind_of(k_pages.dtype) is not None
    if not narrow and not jnp.issubdtype(k_pages.dtype, jnp.floating):
        raise ValueError(f"{k_pages.dtype=} must be a floating type, int8 or uint8")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if narrow != (scales is not None):
            raise ValueError(
                f"{name} must be given for 8-bit pages, and for those alone: "
                f"{k_pages.dtype=}"
            )
        if scales is not None and scales.shape not in (
            k_pages.shape[:2],
            k_pages.shape[:3],
        ):
            raise ValueError(
                f"{name}.shape={scales.shape} must be {k_pages.shape[:2]} or "
                f"{k_pages.shape[:3]}"
            )


def check_heads(q: Array, **values: Array | None) -> None:
    """Refuses what is not one number for each query head, or None.

    Raises:
      ValueError: a shape is another; the line has its name.
    """
    for name, given in values.items():
        if given is not None and given.shape != (q.shape[1],):
            raise ValueError(
                f"{name}.shape={given.shape} must be {(q.shape[1],)}, one for each "
                "query head"
            )
