"""Speculative decoding: who guesses tokens, and who says which of them stand."""

from jaxkv.speculation.ngram import NGram

__all__ = ["NGram"]
