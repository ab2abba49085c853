"""Speculative decoding: who guesses tokens, and who says which of them stand.

Drafters guess (`NGram`, `Jacobi`, `Lookahead`, `DraftModel`, and `Adaptive` no more
than pays), verifiers judge (`Coupled`, `Rejection`, `Typical`); the engine feeds, rolls
back and counts. What the two are asked stands in `engine.drafting`.
"""

from jaxkv.engine.drafting import Drafter, Drafts, Ruling, Speculation, Verifier
from jaxkv.speculation.adaptive import Adaptive
from jaxkv.speculation.draft_model import Beside, Both, DraftModel, self_speculative
from jaxkv.speculation.draws import draw
from jaxkv.speculation.eagle import EagleConfig
from jaxkv.speculation.eagle_drafting import Eagle, Followed
from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.lookahead import Lookahead
from jaxkv.speculation.medusa import Medusa, MedusaConfig, WithHeads
from jaxkv.speculation.methods import SpeculationConfig
from jaxkv.speculation.ngram import NGram
from jaxkv.speculation.verifiers import Coupled, Rejection, Synthetic, Typical

__all__ = [
    "Adaptive",
    "Beside",
    "Both",
    "Coupled",
    "DraftModel",
    "Drafter",
    "Drafts",
    "Eagle",
    "EagleConfig",
    "Followed",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "MedusaConfig",
    "NGram",
    "Rejection",
    "Ruling",
    "Speculation",
    "SpeculationConfig",
    "Synthetic",
    "Typical",
    "Verifier",
    "WithHeads",
    "adaptive",
    "draft_model",
    "draw",
    "draws",
    "eagle",
    "eagle_drafting",
    "head_folders",
    "jacobi",
    "layer_search",
    "lookahead",
    "medusa",
    "methods",
    "ngram",
    "self_speculative",
    "static_tree",
    "verifiers",
]
