"""Speculative decoding: drafters propose tokens, verifiers accept or reject them.

Drafters: `NGram`, `Jacobi`, `Lookahead`, `DraftModel`, `Medusa`, `Eagle`, which drafts
with modules for multi-token prediction, too, and `Adaptive`, which adjusts the draft
length of another drafter. Verifiers: `SharedNoiseVerifier`, `Rejection`, `Typical`.
Their protocols are defined in `engine.drafting`.
"""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.speculation.adaptive import Adaptive, AdaptiveState, StepCosts, set_costs
    from jaxkv.speculation.draft_model import (
        DraftModel,
        TargetAndDraftParams,
        TargetWithDraft,
        build_self_speculative,
    )
    from jaxkv.speculation.draws import draw_drafts
    from jaxkv.speculation.eagle import EagleConfig, MTPConfig, unroll_drafts
    from jaxkv.speculation.eagle_drafting import Eagle, TargetWithEagle
    from jaxkv.speculation.head_folders import (
        HEAD_KINDS,
        HeadsConfig,
        LoadedHeads,
        load_heads,
        save_heads,
    )
    from jaxkv.speculation.jacobi import Jacobi
    from jaxkv.speculation.layer_search import search_layers
    from jaxkv.speculation.lookahead import Lookahead
    from jaxkv.speculation.medusa import (
        Medusa,
        MedusaConfig,
        TargetWithHeads,
        head_logits,
    )
    from jaxkv.speculation.methods import (
        MAX_ADAPTIVE_DRAFTS,
        MAX_DRAFTS,
        NUM_DRAFT_BUCKETS,
        Method,
        ModelWeights,
        SpeculationConfig,
        build_speculative,
        parse_speculation,
    )
    from jaxkv.speculation.ngram import NGram
    from jaxkv.speculation.verifiers import (
        Rejection,
        SharedNoiseVerifier,
        Synthetic,
        Typical,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
