"""Speculative decoding: who guesses tokens, and who says which of them stand."""

from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.ngram import NGram

__all__ = ["Jacobi", "NGram"]
