"""An LLM serving engine as pure JAX functions, and a simulator of the same scheduler.

Page pool, page tables, queue, schedule and random keys are one pytree of fixed-size
arrays, and `step(params, state, ...) -> (state, info)` is a pure function of it:

    engine = jaxkv.Engine.load(jaxkv.bundled_model(), max_slots=4, num_pages=128)
    prompts = ["def read_lines(path):"]
    [completion] = engine.generate(prompts, jaxkv.Sampling(max_tokens=48))
    print(completion.text)

Public names by purpose:

    serve a model      Engine, Sampling, Completion, Event, bundled_model
    engine functions   EngineConfig, init, make_requests, submit, step, run_steps,
                       drain, cancel, save_state, load_state; EngineState, Requests,
                       StepInfo
    scheduling         fcfs, static, Policy, Counts, Plan, plan_in_order, schedule,
                       RequestAttributes, StallError
    models             Forward, ForwardResult, attend
    speculation        SpeculationConfig, Speculation
    sampling           Answer, the first argument of a `logits_fn`
    debugging          InvariantError

Sub-packages have the rest: `jaxkv.simulation` simulates the schedule with a cost model,
`jaxkv.decoding` decodes without a scheduler, `jaxkv.workloads` makes loads and metrics.

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
    from jaxkv.engine.steps import step
    from jaxkv.files import bundled_model
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
    from jaxkv.scheduling.first_come import fcfs
    from jaxkv.serving import Completion, Engine, Event, make_requests
    from jaxkv.speculation.methods import SpeculationConfig

__version__ = "0.1.0"

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
    "StepInfo": "engine.steps",
    "attend": "models.interface",
    "bundled_model": "files",
    "cancel": "engine.requests",
    "drain": "engine.requests",
    "fcfs": "scheduling.first_come",
    "init": "engine.state",
    "load_state": "engine.snapshots",
    "make_requests": "serving.request_batch",
    "plan_in_order": "scheduling.interface",
    "run_steps": "engine.steps",
    "save_state": "engine.snapshots",
    "schedule": "scheduling.interface",
    "static": "scheduling.static_batching",
    "step": "engine.steps",
    "submit": "engine.requests",
}

# Packages are attributes as well: `jaxkv.simulation` works after `import jaxkv`.
_PACKAGES = (
    *("decoding", "disaggregation", "engine", "files", "ledger", "memory", "models"),
    *("parallel", "sampling", "scheduling", "server", "serving", "simulation"),
    *("speculation", "text", "workloads"),
)

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
    "bundled_model",
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
    return sorted({*__all__, *_PACKAGES, "__version__"})


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
