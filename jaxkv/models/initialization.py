"""Random initial parameters of a model in one program, with unchanged bits.

Compilation dominates the time: drawing array by array compiles a program for every
shape. Here arrays of equal size are drawn by one loop over their keys.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Key

type Shape = tuple[int, ...]

_MIN_DRAWS = 2**13
"""Smallest number of values drawn; drawing them is far faster than compiling a further
loop."""


def draw_normals(
    keys: Key[Array, " arrays"],
    shapes: Sequence[Shape],
    dtype: DTypeLike,
    index: Sequence[Int32[Array, ""]],
) -> list[Array]:
    """Draws standard normal arrays, one for each key and shape.

    Args:
      keys: the keys.
      shapes: the shapes, static.
      dtype: dtype of the arrays.
      index: 0, 1, 2 and so on, one for each array, as traced values: the compiler then
        makes one kernel for all arrays of a shape.

    Returns:
      The arrays, bit for bit equal to `jax.random.normal` of each key and shape.
    """
    arrays_by_place: dict[int, Array] = {}
    sizes = [_num_drawn(math.prod(shape), keys) for shape in shapes]
    for size in dict.fromkeys(sizes):
        places = [place for place, other in enumerate(sizes) if other == size]
        normals = lax.map(
            lambda key, size=size: jax.random.normal(key, (size,), dtype),
            keys[np.array(places)],
        )
        # Otherwise XLA folds a later factor into the polynomial of the inverse normal
        # CDF.
        normals = lax.optimization_barrier(normals)
        for row, place in enumerate(places):
            shape = shapes[place]
            start = (index[row], jnp.int32(0))
            slice_sizes = (1, math.prod(shape))
            arrays_by_place[place] = lax.dynamic_slice(
                normals, start, slice_sizes
            ).reshape(shape)
    return [arrays_by_place[place] for place in range(len(shapes))]


def _num_drawn(size: int, keys: Key[Array, " arrays"]) -> int:
    """Returns the count of values to draw: a power of two if the generator permits.

    A power of two is shared by many arrays. It is allowed with JAX's partitionable
    Threefry, whose values depend only on their index.
    """
    by_place = jax.config.jax_threefry_partitionable and "fry" in str(keys.dtype)
    return max(_MIN_DRAWS, 1 << (size - 1).bit_length()) if by_place else size


class _Stream:
    """A replacement of `nnx.Rngs` whose only stream is that of the parameters."""

    @property
    def params(self) -> "_Stream":
        """The stream of the parameters."""
        return self


class ShapeRecorder(_Stream):
    """Records the shapes that a model draws, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []

    def normal(self, shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
        """Records the shape and returns zeros."""
        self.shapes.append(shape)
        return jnp.zeros(shape, dtype)


class PredrawnNormals(_Stream):
    """Returns the bits of `nnx.Rngs`, with all normal arrays drawn beforehand."""

    def __init__(
        self,
        key: Key[Array, ""],
        shapes: Sequence[Shape],
        dtype: DTypeLike,
        index: Sequence[Int32[Array, ""]],
    ) -> None:
        """Draws arrays of these shapes, in construction order; see `draw_normals`."""
        count = jnp.arange(len(shapes), dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, count)
        self._arrays = iter(draw_normals(keys, shapes, dtype, index))

    def normal(self, shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
        """Returns the next array; shape and dtype must be those that were recorded."""
        array = next(self._arrays)
        if (array.shape, array.dtype) != (shape, jnp.dtype(dtype)):
            raise ValueError(f"{shape=}, {dtype=} must be as recorded: {array.aval}")
        return array
