"""Speculative decoding: drafters propose tokens, verifiers accept or reject them.

Drafters: `NGram`, `Jacobi`, `Lookahead`, `DraftModel`, `Medusa`, `Eagle`, which drafts
with modules for multi-token prediction, too, and `Adaptive`, which adjusts the draft
length of another drafter. Verifiers: `SharedNoiseVerifier`, `Rejection`, `Typical`.
Their protocols are defined in `engine.drafting`.
"""

from jaxkv.engine.drafting import AcceptResult, Drafter, Drafts, Speculation, Verifier
from jaxkv.speculation.adaptive import Adaptive
from jaxkv.speculation.draft_model import (
    DraftModel,
    TargetAndDraftParams,
    TargetWithDraft,
    build_self_speculative,
)
from jaxkv.speculation.draws import draw_drafts
from jaxkv.speculation.eagle import EagleConfig, MTPConfig
from jaxkv.speculation.eagle_drafting import Eagle, TargetWithEagle
from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.lookahead import Lookahead
from jaxkv.speculation.medusa import Medusa, MedusaConfig, TargetWithHeads
from jaxkv.speculation.methods import SpeculationConfig
from jaxkv.speculation.ngram import NGram
from jaxkv.speculation.verifiers import (
    Rejection,
    SharedNoiseVerifier,
    Synthetic,
    Typical,
)

__all__ = [
    "AcceptResult",
    "Adaptive",
    "DraftModel",
    "Drafter",
    "Drafts",
    "Eagle",
    "EagleConfig",
    "Jacobi",
    "Lookahead",
    "MTPConfig",
    "Medusa",
    "MedusaConfig",
    "NGram",
    "Rejection",
    "SharedNoiseVerifier",
    "Speculation",
    "SpeculationConfig",
    "Synthetic",
    "TargetAndDraftParams",
    "TargetWithDraft",
    "TargetWithEagle",
    "TargetWithHeads",
    "Typical",
    "Verifier",
    "adaptive",
    "build_self_speculative",
    "draw_drafts",
    "eagle",
    "head_folders",
    "layer_search",
    "medusa",
    "methods",
    "ngram",
    "static_tree",
]
