"""The engine as a value: state in, state out, one step at a time."""

from jaxkv.engine.requests import Requests as Requests
from jaxkv.engine.requests import cancel as cancel
from jaxkv.engine.requests import drain as drain
from jaxkv.engine.requests import submit as submit
from jaxkv.engine.sampling_step import Answer as Answer
from jaxkv.engine.state import NOBODY as NOBODY
from jaxkv.engine.state import EngineConfig as EngineConfig
from jaxkv.engine.state import EngineState as EngineState
from jaxkv.engine.state import init as init
from jaxkv.engine.step import StepInfo as StepInfo
from jaxkv.engine.step import run_steps as run_steps

__all__ = [
    "NOBODY",
    "Answer",
    "EngineConfig",
    "EngineState",
    "Requests",
    "StepInfo",
    "cancel",
    "drain",
    "init",
    "requests",
    "run_steps",
    "snapshots",
    "state",
    "step",
    "submit",
]
