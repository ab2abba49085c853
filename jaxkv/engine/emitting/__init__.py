"""Tokens from logits: one for each slot, or as many drafts as are verified, and one."""

from jaxkv.engine.emitting.logit_rows import Answer, LogitsFn
from jaxkv.engine.emitting.sampling_step import Emitted, emit

__all__ = ["Answer", "Emitted", "LogitsFn", "emit"]
