"""Plans: from a budget and a law to model size, tokens and price."""

from scaling.plan.budgets import DataLimit as DataLimit
from scaling.plan.budgets import HalfLives as HalfLives
from scaling.plan.case import LossModel as LossModel
from scaling.plan.case import PlanCase as PlanCase
from scaling.plan.case import TrainingCost as TrainingCost
from scaling.plan.case import make_loss_model as make_loss_model
from scaling.plan.designs import Design as Design
from scaling.plan.designs import DesignFamily as DesignFamily
from scaling.plan.pricing import Offer as Offer

__all__ = [
    "DataLimit",
    "Design",
    "DesignFamily",
    "HalfLives",
    "LossModel",
    "Offer",
    "PlanCase",
    "TrainingCost",
    "budgets",
    "designs",
    "make_loss_model",
    "pricing",
    "spread",
]
