"""Setup of the attention kernels: checks, registers, layouts, barriers."""

from collections.abc import Callable, Sequence

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention import decode_plan
from pallas_kernels.paged_attention.stream_k import Tiling


def check_shapes(
    q: Array,
    k_pages: Array,
    tiling: Tiling,
    value_width: int | None = None,
    *,
    has_v_pages: bool = True,
) -> None:
    """Checks the types and sizes of a call.

    Raises:
      ValueError: `decode_plan.decode_unsupported_reason` has a reason, or neither of
        the tile of keys and the page size divides the other.
    """
    reason = decode_plan.decode_unsupported_reason(
        q, k_pages, value_width, has_v_pages=has_v_pages
    )
    if reason is not None:
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
    """Runs consumer warpgroups, and one producer warpgroup as the last.

    Args:
      num_multiply: number of consumer warpgroups.
      registers: registers of a thread of a consumer and of the producer: all warpgroups
        together have 512.
      multiply: body of a consumer.
      copy: body of the producer.
    """
    warpgroup, (high, few) = lax.axis_index("warpgroup"), registers

    @pl.when(warpgroup < num_multiply)
    def _():
        plgpu.set_max_registers(high, action="increase")
        multiply()

    @pl.when(warpgroup == num_multiply)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        copy()


def tensor_core_layout() -> Sequence[plgpu.TilingTransform | plgpu.SwizzleTransform]:
    """Returns the swizzled layout in which the tensor cores read 16-bit numbers."""
    return [plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)]  # ty: ignore[abstract-class-instantiation]


def make_barriers(count: int, arrivals: int) -> plgpu.Barrier:
    """Returns barriers that complete after `arrivals` arrivals."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
