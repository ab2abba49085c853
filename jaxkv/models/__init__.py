"""Decoder-only models: configuration, layers, forward passes, checkpoints."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.models.adapters import load_adapters
    from jaxkv.models.checkpoints import (
        LoadedModel,
        load_model,
        load_tokenizer,
        load_tree,
        read_config,
        save_model,
        save_tree,
    )
    from jaxkv.models.config import (
        AttentionKind,
        Experts,
        LatentConfig,
        ModelConfig,
        RecurrenceConfig,
    )
    from jaxkv.models.huggingface.configs import (
        from_hf,
        read_fields,
        refuse_other_values,
        text_part,
        without_aliases,
    )
    from jaxkv.models.huggingface.families import FAMILIES, register_family
    from jaxkv.models.huggingface.family import Family, Key
    from jaxkv.models.huggingface.values import parse_size
    from jaxkv.models.huggingface.weights import weight_files
    from jaxkv.models.huggingface.windows import read_windows
    from jaxkv.models.interface import EndTokens, Forward, ForwardResult, Params, attend
    from jaxkv.models.layers.layer import LayerAttention
    from jaxkv.models.layers.linear import (
        FEW_ROWS,
        ROW_TILE,
        Activations,
        Function,
        Linear,
        Orientation,
        RoutedExperts,
        multiply,
    )
    from jaxkv.models.layers.quantized import QuantizedWeight, WeightFormat
    from jaxkv.models.layers.recurrence import (
        RecurrentProjection,
        RecurrentState,
        run_batch,
        zero_state,
    )
    from jaxkv.models.layers.row_parts import divide_rows
    from jaxkv.models.moe import (
        NO_EXPERT,
        Routing,
        balance_loss,
        check_routes,
        expert_load,
        imbalance,
        load_as_gradient,
        mix,
        route,
    )
    from jaxkv.models.nonlinear import NORMS, norm
    from jaxkv.models.paged import PagedForward, make_model_pages
    from jaxkv.models.param_forms import (
        adapted_products,
        add_transposed_weights,
        drop_adapters,
        drop_transposed_weights,
        has_transposed_weights,
        index_leaves,
        is_selection_bias,
        is_stacked,
        join_adapters,
        quantize_params,
        stack_layers,
        unstack_layers,
        weight_format,
    )
    from jaxkv.models.partition import (
        EXPERT,
        TENSOR,
        embed_own_tokens,
        embed_tokens,
        own_experts,
        own_words,
    )
    from jaxkv.models.rotary import (
        Angles,
        LatentProjection,
        Projected,
        QueryProjection,
        expand_latent,
        rotate,
        rotate_pair,
        rotate_queries,
        split_and_rotate,
        split_heads,
    )
    from jaxkv.models.transformer import (
        BY_COLUMNS,
        SHARED_PARAMS,
        Transformer,
        empty_kv,
        init_params,
        logits,
        merge,
        merge_ahead,
        outputs,
        param_axes,
        param_shapes,
        run_sequences,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
