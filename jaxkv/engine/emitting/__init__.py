"""Samples the tokens of a step, verifies drafts, and records experts and pages."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.engine.emitting.constraints import (
        advance_grammars,
        constrain_logits,
        follow_drafts,
    )
    from jaxkv.engine.emitting.expert_routes import record_routes
    from jaxkv.engine.emitting.logit_rows import LogitsFn, TokenHistory
    from jaxkv.engine.emitting.recording import StepPages, pad_drafts, record_pages
    from jaxkv.engine.emitting.sampling_step import SamplerOutput, emit

__all__, __getattr__, __dir__ = lazy_exports(__name__)
