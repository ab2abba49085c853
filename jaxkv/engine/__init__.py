"""The serving engine as a pure function: `step(params, state) -> (state, info)`."""

from jaxkv.engine.emitting import Answer
from jaxkv.engine.requests import (
    DrainedSequences,
    Requests,
    cancel,
    drain,
    submit,
)
from jaxkv.engine.state import EngineConfig, EngineState, init
from jaxkv.engine.step import StepInfo, run_steps

__all__ = [
    "Answer",
    "DrainedSequences",
    "EngineConfig",
    "EngineState",
    "Requests",
    "StepInfo",
    "cancel",
    "drafting",
    "drain",
    "init",
    "requests",
    "run_steps",
    "snapshots",
    "state",
    "step",
    "submit",
    "swapping",
]
