"""Layers of a transformer, as flax modules."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.models.layers.experts import Mixture
    from jaxkv.models.layers.layer import Layer, LayerAttention
    from jaxkv.models.layers.linear import (
        FEW_ROWS,
        MIN_CAST_ROWS,
        ROW_TILE,
        Activations,
        ExpertLinear,
        Function,
        Linear,
        Numerics,
        Orientation,
        RoutedExperts,
        multiply,
    )
    from jaxkv.models.layers.norms import Norm
    from jaxkv.models.layers.paged_states import run_recurrent_rows
    from jaxkv.models.layers.quantized import (
        BLOCK_SIZES,
        QuantizedWeight,
        WeightFormat,
        inputs_axis,
        move_inputs,
        quantize_weight,
    )
    from jaxkv.models.layers.recurrence import (
        CHUNK,
        RecurrentProjection,
        RecurrentRows,
        RecurrentState,
        run_batch,
        run_chunk,
        run_tokens,
        zero_state,
    )
    from jaxkv.models.layers.row_parts import divide_rows

__all__, __getattr__, __dir__ = lazy_exports(__name__)
