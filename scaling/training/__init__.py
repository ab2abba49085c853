"""Training one small model, resumable to the bit."""

from scaling.training.architectures import Architecture as Architecture
from scaling.training.recipes import OptimizerConfig as OptimizerConfig
from scaling.training.recipes import Schedule as Schedule
from scaling.training.recipes import StepConfig as StepConfig
from scaling.training.recipes import TrainConfig as TrainConfig
from scaling.training.recipes import steps_taken as steps_taken
from scaling.training.recurrent import RecurrentConfig as RecurrentConfig

__all__ = [
    "Architecture",
    "OptimizerConfig",
    "RecurrentConfig",
    "Schedule",
    "StepConfig",
    "TrainConfig",
    "architectures",
    "objectives",
    "recipes",
    "step",
    "steps_taken",
    "train",
]
