"""The engine as a value: state in, state out, one step at a time."""

from jaxkv.engine.emitting import Answer
from jaxkv.engine.requests import Requests, cancel, drain, submit
from jaxkv.engine.state import NOBODY, EngineConfig, EngineState, init
from jaxkv.engine.step import StepInfo, run_steps

__all__ = [
    "NOBODY",
    "Answer",
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
]
