"""Speculative decoding: who guesses tokens, and who says which of them stand.

Drafters guess (`NGram`, `Jacobi`, `Lookahead`, `DraftModel`, and `Adaptive` no more
than pays), verifiers judge (`Coupled`, `Rejection`, `Typical`); the engine feeds, rolls
back and counts. What the two are asked stands in `engine.drafting`.
"""

from jaxkv.engine.drafting import Drafter, Drafts, Ruling, Speculation, Verifier
from jaxkv.speculation.adaptive import Adaptive
from jaxkv.speculation.draft_model import Beside, Both, DraftModel, self_speculative
from jaxkv.speculation.draws import draw
from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.lookahead import Lookahead
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
    "Jacobi",
    "Lookahead",
    "NGram",
    "Rejection",
    "Ruling",
    "Speculation",
    "Synthetic",
    "Typical",
    "Verifier",
    "adaptive",
    "draft_model",
    "draw",
    "draws",
    "jacobi",
    "lookahead",
    "methods",
    "ngram",
    "self_speculative",
    "verifiers",
]
