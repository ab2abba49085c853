"""An LLM serving system as a value: pools, tables, schedules and keys in one pytree.

Terms:

    page       a fixed number of consecutive token positions in the K and V arrays,
               named by a page id (a block in vLLM)
    pool       reference count of every page, and the free pages
    table      page ids of each slot, in token order (a block table in vLLM)
    slot       one entry of the running batch; holds one sequence
    sequence   one stream of tokens; a request owns one or more
    row        one token that is an input of one step
    length     number of tokens whose K and V are written
    policy     decides from counts which requests run; its decision is a plan
    workload   requests with their arrival times; a trace records a run

The core is `step(state, ...) -> (state, info)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.engine import (
        Answer,
        EngineConfig,
        EngineState,
        Requests,
        StepInfo,
        cancel,
        drain,
        init,
        run_steps,
        submit,
    )
    from jaxkv.engine.drafting import Speculation
    from jaxkv.engine.snapshots import load_state, save_state
    from jaxkv.engine.step import step
    from jaxkv.memory import InvariantError
    from jaxkv.models import Forward, ForwardResult, attend
    from jaxkv.sampling import Sampling
    from jaxkv.scheduling import (
        Counts,
        Plan,
        Policy,
        RequestAttributes,
        StallError,
        plan_in_order,
        schedule,
        static,
    )
    from jaxkv.scheduling.fcfs import fcfs
    from jaxkv.serving import Completion, Engine, Event, make_requests
    from jaxkv.speculation.methods import SpeculationConfig

# Names load on first use, so that importing the package costs little more than
# importing JAX.
_HOMES = {
    "Answer": "engine.emitting",
    "Completion": "serving.outputs",
    "Counts": "scheduling.interface",
    "Engine": "serving.engine",
    "EngineConfig": "engine.state",
    "EngineState": "engine.state",
    "Event": "serving.outputs",
    "Forward": "models.interface",
    "ForwardResult": "models.interface",
    "InvariantError": "memory.invariants",
    "Plan": "scheduling.interface",
    "Policy": "scheduling.interface",
    "RequestAttributes": "scheduling.attributes",
    "Requests": "engine.requests",
    "Sampling": "sampling.params",
    "Speculation": "engine.drafting",
    "SpeculationConfig": "speculation.methods",
    "StallError": "scheduling.stalls",
    "StepInfo": "engine.step",
    "attend": "models.interface",
    "cancel": "engine.requests",
    "drain": "engine.requests",
    "fcfs": "scheduling.fcfs",
    "init": "engine.state",
    "load_state": "engine.snapshots",
    "make_requests": "serving.request_batch",
    "plan_in_order": "scheduling.interface",
    "run_steps": "engine.step",
    "save_state": "engine.snapshots",
    "schedule": "scheduling.interface",
    "static": "scheduling.static_batching",
    "step": "engine.step",
    "submit": "engine.requests",
}

__all__ = [
    "Answer",
    "Completion",
    "Counts",
    "Engine",
    "EngineConfig",
    "EngineState",
    "Event",
    "Forward",
    "ForwardResult",
    "InvariantError",
    "Plan",
    "Policy",
    "RequestAttributes",
    "Requests",
    "Sampling",
    "Speculation",
    "SpeculationConfig",
    "StallError",
    "StepInfo",
    "attend",
    "cancel",
    "drain",
    "fcfs",
    "init",
    "load_state",
    "make_requests",
    "plan_in_order",
    "run_steps",
    "save_state",
    "schedule",
    "static",
    "step",
    "submit",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
