"""Faulty policies that stall, thrash, mask or wait, as one type for one program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import scheduling
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.models import PagedForward, make_model_pages
from tests.support import engines

PLAIN, REFUSES, THRASHES, SHORTEST, FILLS, PAUSES = range(6)


class Moody(NamedTuple):
    """First come, first served, with the fault of `mood`."""

    mood: jax.Array
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        c = counts
        mood = self.mood
        row = jnp.arange(c.waiting.shape[0], dtype=jnp.int32)
        key = jnp.where(c.waiting, c.waiting_tokens, 2**30)
        shortest = c.waiting & (row == jnp.argmin(key))
        enough = jnp.any(c.running) | (jnp.sum(c.waiting, dtype=jnp.int32) >= 2)
        masks = jnp.stack(
            [
                c.waiting,
                jnp.zeros_like(c.waiting),
                c.waiting,
                shortest,
                c.waiting & enough,
                c.waiting,
            ]
        )
        plan = scheduling.fcfs().plan(c._replace(waiting=masks[mood]))
        # A sequence is preempted in the middle of its prefill.
        out = c.running & (mood == THRASHES)
        pauses = out | (c.running & (mood == PAUSES))
        thrashes = mood == THRASHES
        return plan._replace(
            preempt=plan.preempt | out,
            places=jnp.where(out, 0, plan.places),
            num_rows=jnp.where(pauses, 0, plan.num_rows),
            head_rows=jnp.where(
                thrashes, jnp.minimum(plan.head_rows, 2), plan.head_rows
            ),
        )


def make_engine(mood: int = PLAIN, *, tokenizer: Any = None) -> jaxkv.Engine:
    """An engine of the small model, with one of these policies."""
    pages = make_model_pages(engines.MODEL, engines.SERVED)
    parts = EngineParts(
        engines.params(),
        PagedForward(engines.MODEL),
        pages,
        engines.SERVED,
        tokenizer=tokenizer,
        eos_ids=(),
    )
    return jaxkv.Engine(parts, EngineRules(policy=Moody(jnp.int32(mood))))


def with_mood(engine: jaxkv.Engine, mood: int) -> jaxkv.Engine:
    engine.policy = Moody(jnp.int32(mood))
    return engine
