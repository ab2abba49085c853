"""From a budget and a law to a design: sizes, tokens, prices."""

from scaling.plan.budgets import HalfLives as HalfLives
from scaling.plan.designs import Design as Design
from scaling.plan.designs import Family as Family
from scaling.plan.pricing import Offer as Offer

__all__ = [
    "Design",
    "Family",
    "HalfLives",
    "Offer",
    "budgets",
    "designs",
    "pricing",
]
