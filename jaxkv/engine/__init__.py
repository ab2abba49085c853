"""The serving engine as a pure function: `step(params, state) -> (state, info)`."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.engine.branches import CallTime, advance_clock, branch, widen
    from jaxkv.engine.counts import observe_engine
    from jaxkv.engine.drafting import (
        REPRODUCIBLE_TREES,
        AcceptResult,
        Drafter,
        DrafterMemory,
        Drafts,
        Speculation,
        Verifier,
        VerifyOutput,
    )
    from jaxkv.engine.emitting.logit_rows import LogitsFn, TokenHistory
    from jaxkv.engine.emitting.recording import StepPages
    from jaxkv.engine.paging.swapping import clear_swapped
    from jaxkv.engine.parts import EngineParts, EngineRules
    from jaxkv.engine.plan_application import apply_plan, forget_kv
    from jaxkv.engine.requests import DrainedSequences, Requests, cancel, drain, submit
    from jaxkv.engine.snapshots import load_state, save_state
    from jaxkv.engine.state import (
        ALL_KINDS,
        CANCELLED,
        FINISH_REASONS,
        EngineConfig,
        EngineFields,
        EngineState,
        RequestKinds,
        Sequences,
        init,
    )
    from jaxkv.engine.steps import StepInfo, plan_step, run_steps, step

__all__, __getattr__, __dir__ = lazy_exports(__name__)
