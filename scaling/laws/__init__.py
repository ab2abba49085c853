"""Scaling laws: published ones, and the functional forms of fits."""

from scaling.laws.base import Law as Law
from scaling.laws.base import TwoPowers as TwoPowers
from scaling.laws.published import CHINCHILLA as CHINCHILLA
from scaling.laws.published import Optimum as Optimum

__all__ = [
    "CHINCHILLA",
    "Law",
    "Optimum",
    "TwoPowers",
    "evaluation",
    "published",
    "synthetic",
]
