"""Validation of the arrays of paged attention."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import quantizing
from pallas_kernels.paged_attention.page_blocks import PagedKV, RowView


def check_arrays(q: Array, kv: PagedKV) -> int:
    """Checks that queries and pages match.

    Returns:
      Width of the values.

    Raises:
      ValueError: shapes or types do not match.
    """
    k_pages, v_pages, k_scales, v_scales, value_width, k_rest, _, num_layers = kv
    if num_layers < 1 or k_pages.shape[0] % num_layers:
        raise ValueError(f"{num_layers=} must divide {k_pages.shape[0]=}")
    _, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise ValueError(f"{q.dtype=} must be a floating type of 16 bits or more")
    narrow = quantizing.quantization_kind(k_pages.dtype) is not None
    key_width = k_pages.shape[3]
    if k_rest is not None:
        if not narrow or v_pages is not None or k_rest.shape[:3] != k_pages.shape[:3]:
            raise ValueError(
                f"{k_rest.shape=} must be {k_pages.shape=} up to the last axis, with "
                "8-bit pages and without v_pages"
            )
        key_width += k_rest.shape[3]
    if key_width != head_dim:
        raise ValueError(f"{k_pages.shape[3]=} must be {q.shape[2]=}")
    if v_pages is not None:
        if v_pages.shape[:3] != k_pages.shape[:3] or v_pages.dtype != k_pages.dtype:
            raise ValueError(
                f"{v_pages.shape=}, {v_pages.dtype=} must be {k_pages.shape=} up to "
                f"the last axis, and {k_pages.dtype=}"
            )
        if value_width is not None:
            raise ValueError(f"{value_width=} must be None when v_pages is given")
        value_width = v_pages.shape[3]
    elif value_width is None or not 1 <= value_width <= k_pages.shape[3]:
        raise ValueError(
            f"{value_width=} must be in [1, {k_pages.shape[3]}] when v_pages is None"
        )
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    if not narrow and not jnp.issubdtype(k_pages.dtype, jnp.floating):
        raise ValueError(f"{k_pages.dtype=} must be a floating type, int8 or uint8")
    for name, pages, scales in (("k", k_pages, k_scales), ("v", v_pages, v_scales)):
        if (narrow and pages is not None) != (scales is not None):
            raise ValueError(
                f"{name}_scales must be given for 8-bit pages, and only for them: "
                f"{name}_pages is {pages if pages is None else pages.dtype}"
            )
        if scales is not None and scales.shape not in (
            k_pages.shape[:2],
            k_pages.shape[:3],
        ):
            raise ValueError(
                f"{name}_scales.shape={scales.shape} must be {k_pages.shape[:2]} or "
                f"{k_pages.shape[:3]}"
            )
    return value_width


def check_view(q: Array, view: RowView) -> None:
    """Checks the rows of a call.

    Raises:
      ValueError: the number of rows is no multiple of the slots without `slots`,
        context and ancestors are not given together, or the window is below 1.
    """
    num_slots = view.page_ids.shape[0]
    if view.slots is None and (not num_slots or q.shape[0] % num_slots):
        raise ValueError(
            f"{q.shape[0]=} must be a multiple of page_ids.shape[0]={num_slots} when "
            "slots is None"
        )
    if (view.context is None) != (view.ancestors is None):
        raise ValueError("context and ancestors must be given together")
    if view.window is not None and view.window < 1:
        raise ValueError(f"window={view.window} must be at least 1, or None")


def check_heads(q: Array, **values: Array | None) -> None:
    """Checks that values have one number for each query head, or are None.

    Raises:
      ValueError: a shape is wrong; the message has the value's name.
    """
    for name, array in values.items():
        if array is not None and array.shape != (q.shape[1],):
            raise ValueError(
                f"{name}.shape={array.shape} must be {(q.shape[1],)}, one for each "
                "query head"
            )
