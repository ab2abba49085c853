"""Parameters, FLOPs, memory, traffic and seconds, counted from shapes."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.costs.activations import (
        StoredTensor,
        layer_bytes,
        stored_tensors,
    )
    from scaling.costs.devices import BYTES_PER_NUMBER, Device, Precision, find_device
    from scaling.costs.exchanges import Traffic
    from scaling.costs.flops import (
        Attention,
        Checkpointing,
        FlopTerm,
        check_sizes,
        decode_terms,
        forward_terms,
        total_flops,
        training_step_flops,
        twice_pairs,
    )
    from scaling.costs.memory import (
        MIXED,
        SINGLE,
        BytesPerParam,
        max_device_params,
        training_memory,
    )
    from scaling.costs.parallelism import Layout, check_layout, parse_layout
    from scaling.costs.parameters import (
        ParameterCounts,
        Place,
        Weight,
        count_parameters,
        count_weights,
        list_weights,
        place_counts,
    )
    from scaling.costs.residuals import list_residuals, total_residual_bytes
    from scaling.costs.serving import (
        ServingWork,
        decode_work,
        find_compute_bound_size,
        kv_bytes_per_token,
        max_batch,
        pool_kv_bytes,
        prefill_work,
        roofline,
        sequence_kv_bytes,
        sequence_state_bytes,
    )
    from scaling.costs.step_models import (
        DISTSERVE,
        FIGURE_12,
        MEMORY_SHARE,
        PAGE_SIZE,
        CostModel,
        LinearCost,
        RooflineCost,
        counts_as_floats,
        distserve_cost,
        figure_12_cost,
        linear_cost,
        make_roofline_cost,
        max_kv_pages,
    )
    from scaling.costs.steps import StepCost, step_cost
    from scaling.costs.traffic import decode_traffic, prefill_traffic, training_traffic

__all__, __getattr__, __dir__ = lazy_exports(__name__)
