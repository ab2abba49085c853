"""What the attention kernels ask of a program: its sizes, registers and memory."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention import decode_plan
from pallas_kernels.paged_attention.stream_k import Tiling


def check_shapes(q: Array, k_pages: Array, tiling: Tiling) -> None:
    """Refuses what the kernels do not take.

    Raises:
      ValueError: types or sizes of `decode_plan.decode_unsupported_reason`, or a tile
        of keys that is neither so many pages nor part of one.
    """
    if (reason := decode_plan.decode_unsupported_reason(q, k_pages)) is not None:
        raise ValueError(reason)
    page_size = k_pages.shape[2]
    if max(tiling.tile, page_size) % min(tiling.tile, page_size):
        raise ValueError(f"{tiling.tile=} and {page_size=} must divide one another")


def specialize_warpgroups(
    num_multiply: int,
    registers: tuple[int, int],
    multiply: Callable[[], None],
    copy: Callable[[], None],
) -> None:
    """Has some warpgroups multiply, and the last one copy.

    Args:
      num_multiply: how many.
      registers: of a thread that multiplies, and of one that copies: all warpgroups
        together have 512.
      multiply: what the former do.
      copy: what the latter does.
    """
    warpgroup, (many, few) = lax.axis_index("warpgroup"), registers

    @pl.when(warpgroup < num_multiply)
    def _():
        plgpu.set_max_registers(many, action="increase")
        multiply()

    @pl.when(warpgroup == num_multiply)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        copy()


def tensor_core_layout() -> Any:
    """The layout in which the tensor cores read numbers of 16 bits."""
    return [plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)]  # ty: ignore[abstract-class-instantiation]


def make_barriers(count: int, arrivals: int) -> Any:
    """Barriers that open once so many have arrived."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
