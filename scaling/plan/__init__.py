"""From a budget and a law to a design: sizes, tokens, prices."""

from scaling.plan.budgets import HalfLives as HalfLives
from scaling.plan.budgets import Repeating as Repeating
from scaling.plan.case import Belief as Belief
from scaling.plan.case import Bill as Bill
from scaling.plan.case import Case as Case
from scaling.plan.case import believe as believe
from scaling.plan.designs import Design as Design
from scaling.plan.designs import Family as Family
from scaling.plan.pricing import Offer as Offer

__all__ = [
    "Belief",
    "Bill",
    "Case",
    "Design",
    "Family",
    "HalfLives",
    "Offer",
    "Repeating",
    "believe",
    "budgets",
    "designs",
    "pricing",
    "spread",
]
