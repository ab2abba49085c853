"""Parallelism: a model and its pages divided over a mesh of devices."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.parallel.collectives import find_collectives
    from jaxkv.parallel.experts import dropped_fraction, exchange, gather_rows
    from jaxkv.parallel.layout import (
        REPLICATED,
        check_mesh,
        check_pages,
        degree_of,
        experts_of,
        map_over_mesh,
        num_page_parts_of,
        pages_specs,
        place_state,
        put_array,
        shardings,
        specs_on,
        state_specs,
    )
    from jaxkv.parallel.mesh import make_mesh, set_cpu_devices
    from jaxkv.parallel.processes import (
        broadcast_from_first,
        check_all_used,
        gather_numbers,
        is_first,
        join_processes,
        num_processes,
    )
    from jaxkv.parallel.sequence import (
        RING,
        ULYSSES,
        ring_attention,
        token_positions,
        ulysses_attention,
        zigzag_order,
    )
    from jaxkv.parallel.tensor import (
        fit_config,
        fit_params,
        fit_specs,
        make_placer,
        param_specs,
        place_heads,
        place_params,
        stack_sharded_layers,
        unfit_params,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
