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
                       branch, drain, cancel, save_state, load_state; EngineState,
                       Requests, StepInfo
    scheduling         fcfs, static, Policy, Counts, Plan, plan_in_order, schedule,
                       RequestAttributes, StallError
    models             Forward, ForwardResult, attend
    scoring            score: log-probabilities of given tokens, as an engine reports
    speculation        SpeculationConfig, Speculation
    sampling           TokenHistory, the first argument of a `logits_fn`
    debugging          InvariantError

Sub-packages have the rest: `jaxkv.simulation` simulates the schedule with a cost model,
`jaxkv.decoding` decodes without a scheduler, `jaxkv.workloads` makes loads and metrics,
`jaxkv.verification` tests a policy by random loads.

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

from typing import TYPE_CHECKING

from jaxkv.files.shadowing import watch_packages
from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv import cli as cli
    from jaxkv import decoding as decoding
    from jaxkv import disaggregation as disaggregation
    from jaxkv import engine as engine
    from jaxkv import files as files
    from jaxkv import ledger as ledger
    from jaxkv import memory as memory
    from jaxkv import models as models
    from jaxkv import parallel as parallel
    from jaxkv import plotting as plotting
    from jaxkv import report as report
    from jaxkv import sampling as sampling
    from jaxkv import scheduling as scheduling
    from jaxkv import scoring as scoring
    from jaxkv import server as server
    from jaxkv import serving as serving
    from jaxkv import simulation as simulation
    from jaxkv import speculation as speculation
    from jaxkv import text as text
    from jaxkv import verification as verification
    from jaxkv import workloads as workloads
    from jaxkv.engine.branches import branch
    from jaxkv.engine.drafting import Speculation
    from jaxkv.engine.emitting import TokenHistory
    from jaxkv.engine.requests import Requests, cancel, drain, submit
    from jaxkv.engine.snapshots import load_state, save_state
    from jaxkv.engine.state import EngineConfig, EngineState, init
    from jaxkv.engine.steps import StepInfo, run_steps, step
    from jaxkv.files.bundled import bundled_model
    from jaxkv.memory.invariants import InvariantError
    from jaxkv.models.interface import Forward, ForwardResult, attend
    from jaxkv.sampling.params import Sampling
    from jaxkv.scheduling.attributes import RequestAttributes
    from jaxkv.scheduling.first_come import fcfs
    from jaxkv.scheduling.interface import Counts, Plan, Policy, plan_in_order, schedule
    from jaxkv.scheduling.stalls import StallError
    from jaxkv.scheduling.static_batching import static
    from jaxkv.scoring import score
    from jaxkv.serving.engine import Engine
    from jaxkv.serving.outputs import Completion, Event
    from jaxkv.serving.request_batch import make_requests
    from jaxkv.speculation.methods import SpeculationConfig

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy_exports(__name__)

watch_packages()
