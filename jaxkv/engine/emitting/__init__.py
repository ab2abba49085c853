"""Samples the tokens of a step from its logits, and verifies drafts."""

from jaxkv.engine.emitting.logit_rows import Answer, LogitsFn
from jaxkv.engine.emitting.sampling_step import SamplerOutput, emit

__all__ = ["Answer", "LogitsFn", "SamplerOutput", "emit"]
