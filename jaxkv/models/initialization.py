"""Random parameters of a whole model in one program, with the bits of one array each.

Compiling dominates: drawn array by array, every shape is a program of its own that the
user waits for. Here arrays of equal shape are drawn by one loop over their keys.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Key

type Shape = tuple[int, ...]

_LEAST = 2**13
"""Numbers drawn at least, in a fraction of the time that another loop compiles."""


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
      dtype: of the arrays.
      index: 0, 1, 2 and so on, one for each array. Where the compiler does not know the
        numbers, it makes one kernel for all arrays of a shape.

    Returns:
      The arrays, bit for bit what `jax.random.normal` gives for each by itself.
    """
    found: dict[int, Array] = {}
    sizes = [_num_drawn(math.prod(shape), keys) for shape in shapes]
    for size in dict.fromkeys(sizes):
        places = [place for place, other in enumerate(sizes) if other == size]
        drawn = lax.map(
            lambda key, size=size: jax.random.normal(key, (size,), dtype),
            keys[np.array(places)],
        )
        # Else XLA folds a factor that follows into the polynomial of the normal law.
        drawn = lax.optimization_barrier(drawn)
        for row, place in enumerate(places):
            shape = shapes[place]
            start, many = (index[row], jnp.int32(0)), (1, math.prod(shape))
            found[place] = lax.dynamic_slice(drawn, start, many).reshape(shape)
    return [found[place] for place in range(len(shapes))]


def _num_drawn(size: int, keys: Key[Array, " arrays"]) -> int:
    """Numbers to draw for an array: a power of two, many arrays alike, if that is free.

    JAX's partitionable Threefry makes every number of its place alone.
    """
    by_place = jax.config.jax_threefry_partitionable and "fry" in str(keys.dtype)
    return max(_LEAST, 1 << (size - 1).bit_length()) if by_place else size


class _Stream:
    """In place of `nnx.Rngs`: its one stream is that of the parameters."""

    @property
    def params(self) -> Any:
        """The stream of the parameters."""
        return self


class ShapeRecorder(_Stream):
    """Learns what a model draws: notes shapes, draws zeros."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []

    def normal(self, shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
        """Zeros of that shape."""
        self.shapes.append(shape)
        return jnp.zeros(shape, dtype)


class PredrawnNormals(_Stream):
    """Has the bits of `nnx.Rngs`, all normal arrays drawn beforehand."""

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
        """The next array, which must be asked for as it was drawn."""
        array = next(self._arrays)
        if (array.shape, array.dtype) != (shape, jnp.dtype(dtype)):
            raise ValueError(f"{shape=}, {dtype=} must be as recorded: {array.aval}")
        return array
