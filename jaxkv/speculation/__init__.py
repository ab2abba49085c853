"""Speculative decoding: drafts drawn from a law, and rules of their acceptance."""

from jaxkv.speculation.draws import draw
from jaxkv.speculation.verifiers import Coupled, Rejection, Typical

__all__ = ["Coupled", "Rejection", "Typical", "draw", "draws", "verifiers"]
