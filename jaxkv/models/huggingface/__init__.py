"""Hugging Face folders: configurations, tensors and weights."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.models.huggingface.configs import from_hf, text_part, to_hf
    from jaxkv.models.huggingface.families import FAMILIES
    from jaxkv.models.huggingface.tensors import (
        Leaf,
        canonical_names,
        join_tensors,
        list_leaves,
    )
    from jaxkv.models.huggingface.weights import (
        Place,
        checked_dtype,
        checked_params,
        load_params,
        read_tensors,
        read_tree,
        save_params,
        write_tree,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
