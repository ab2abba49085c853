"""Training of one small model, resumable bit for bit."""

from scaling.training.architectures import Architecture
from scaling.training.recipes import (
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
    TrainConfig,
    steps_taken,
)
from scaling.training.recurrent import RecurrentConfig

__all__ = [
    "Architecture",
    "LearningRateSchedule",
    "OptimizerConfig",
    "RecurrentConfig",
    "StepConfig",
    "TrainConfig",
    "architectures",
    "consistency",
    "drafting_heads",
    "meshes",
    "objectives",
    "parallel",
    "recipes",
    "step",
    "steps_taken",
    "train",
]
