"""Grouped matrix products: checks shapes and chooses an implementation.

A mixture of experts sends every token to a few experts. Tokens that are sorted by
expert form runs of rows, and one call multiplies each run by its expert's weights.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.grouped_matmul import blocks, reference

type GroupedImplementation = Literal["reference", "mosaic_gpu"]
"""Names of implementations; `None` means the best one for platform and shape."""

GROUP_TILE = 64
"""Width and columns must be multiples of it for the Mosaic GPU kernel; also the rows of
a block under reproducible numerics."""


class _ProductConfig(NamedTuple):
    """Static settings of a product."""

    implementation: GroupedImplementation
    dtype: np.dtype
    block_rows: int | None


def grouped_matmul(
    x: Float[Array, "rows width"],
    w: Float[Array, "groups width columns"],
    group_sizes: Int[Array, " groups"],
    *,
    preferred_element_type: DTypeLike | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: GroupedImplementation | None = None,
) -> Float[Array, "rows columns"]:
    """Multiplies each row by the weights of its group.

    Differentiable once, in reverse mode, in `x` and `w`. The gradient of `x` is a
    grouped product of the same implementation; that of `w` is the reference's. Both
    take the gradient of the result in the type of `x`.

    Args:
      x: rows sorted by group, group 0 first.
      w: weights of each group, in the type of `x`.
      group_sizes: rows of each group, 0 or more, with a sum of at most `rows`. Further
        rows belong to no group and may hold any value, NaN included.
      preferred_element_type: floating type of the result; None means that of `x`. Sums
        have at least 32 bits.
      numerics: "reproducible" makes the bits of a row independent of the batch.
      implementation: None, or the name of a required one. "reference" takes any
        sizes and floating types; "mosaic_gpu" needs a Hopper GPU, fast numerics, `x`
        and `w` in bfloat16 or both in float16, width and columns that are multiples of
        64, at least one group, and a result of 16 or 32 bits.

    Returns:
      The products; 0 in rows of no group.

    Raises:
      ValueError: shapes or types do not match, or the requested implementation is
        unknown or does not support the call.

    Source: Gale et al. 2022, arXiv:2211.15841, section 4: experts as one product.
    """
    if x.ndim != 2 or w.ndim != 3 or w.shape[1] != x.shape[1]:
        raise ValueError(
            f"{x.shape=} must be [rows, width] and {w.shape=} [groups, width, columns]"
        )
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(
            f"{group_sizes.shape=} must be {w.shape[:1]}, one for each group"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{group_sizes.dtype=} must be an integer type")
    if x.dtype != w.dtype:
        raise ValueError(f"{x.dtype=} must be {w.dtype=}")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ValueError(f"{x.dtype=} must be a floating type of 16 bits or more")
    wanted = x.dtype if preferred_element_type is None else preferred_element_type
    dtype = jnp.dtype(wanted)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{preferred_element_type=} must be a floating type, or None")
    if numerics not in ("fast", "reproducible"):
        raise ValueError(f"{numerics=} must be 'fast' or 'reproducible'")
    chosen = choose_grouped_matmul(
        x,
        w,
        preferred_element_type=dtype,
        numerics=numerics,
        implementation=implementation,
    )
    block_rows = GROUP_TILE if numerics == "reproducible" else None
    # If one operand varies over a mesh axis, so do the gradients of both.
    x, w = (devices.varying_like(operand, x, w, group_sizes) for operand in (x, w))
    return _product(x, w, group_sizes, _ProductConfig(chosen, dtype, block_rows))


def choose_grouped_matmul(
    x: Float[Array, "rows width"] | jax.ShapeDtypeStruct,
    w: Float[Array, "groups width columns"] | jax.ShapeDtypeStruct,
    *,
    preferred_element_type: DTypeLike | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: GroupedImplementation | None = None,
) -> GroupedImplementation:
    """Returns the implementation that computes a call of `grouped_matmul`.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """
    wanted = x.dtype if preferred_element_type is None else preferred_element_type
    return devices.choose_implementation(
        implementation, lambda: _why_not_mosaic(x, w, wanted, numerics)
    )


def _why_not_mosaic(
    x: Array | jax.ShapeDtypeStruct,
    w: Array | jax.ShapeDtypeStruct,
    preferred_element_type: DTypeLike,
    numerics: str,
) -> str | None:
    """Returns why the Mosaic GPU kernel does not support a call, or None if it does."""
    dtype = jnp.dtype(preferred_element_type)
    if numerics != "fast":
        return f"{numerics=} needs blocks that do not depend on the other rows"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{x.dtype=} must be bfloat16 or float16"
    if dtype.itemsize not in (2, 4):
        return f"preferred_element_type={dtype} must have 16 or 32 bits"
    if w.shape[0] == 0:
        return f"{w.shape[0]=} must be at least 1"
    for name, size in (("width", w.shape[1]), ("columns", w.shape[2])):
        if size == 0 or size % GROUP_TILE:
            return f"{name}={size} must be a positive multiple of {GROUP_TILE}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, w: Array, group_sizes: Array, config: _ProductConfig) -> Array:
    return _multiply(x, w, group_sizes, config)


def _multiply(
    x: Array,
    w: Array,
    group_sizes: Array,
    config: _ProductConfig,
    transposed: bool = False,
) -> Array:
    if config.implementation == "reference":
        return reference.multiply_reference(
            x,
            w,
            group_sizes,
            transposed=transposed,
            dtype=config.dtype,
            block_rows=config.block_rows,
        )
    # Pallas is imported only where it runs.
    from pallas_kernels.grouped_matmul import mosaic_gpu

    num_cores = devices.current_target().num_cores
    tiling = blocks.choose_tiling(
        num_rows=x.shape[0],
        num_groups=w.shape[0],
        num_columns=w.shape[1 if transposed else 2],
        num_cores=num_cores,
    )
    return mosaic_gpu.multiply_mosaic_gpu(
        x,
        w,
        group_sizes,
        transposed=transposed,
        dtype=config.dtype,
        tiling=tiling,
        num_programs=num_cores,
    )


def _backward(
    config: _ProductConfig, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, np.ndarray]:
    x, w, group_sizes = residuals
    gradient = gradient.astype(x.dtype)
    back = config._replace(dtype=x.dtype)
    of_x = _multiply(gradient, w, group_sizes, back, transposed=True)
    of_w = reference.sum_outer_products(x, gradient, group_sizes, dtype=w.dtype)
    return of_x, of_w, np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(
    lambda x, w, sizes, config: (_multiply(x, w, sizes, config), (x, w, sizes)),
    _backward,
)
