"""Drawn plans, valid or not, passed to one compiled policy as arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.scheduling import Plan

NUM_PHASES = 4
LOW = -3
HIGH = 40


class DrawnPlan(NamedTuple):
    """A plan of `inner` with fields replaced by drawn values in most steps.

    The drawn values change with the tokens of the slots and the free pages; the first
    phase is the plan of `inner`.
    """

    values: jax.Array
    """Values of each phase, field and slot, in [LOW, HIGH)."""
    replaces: jax.Array
    """True for fields that are replaced, by phase."""
    inner: jaxkv.Policy

    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        """Plans one step."""
        c = counts
        plan = self.inner.plan(counts)
        tokens = jnp.where(c.running, c.length + c.target_length, 0)
        phase = (jnp.sum(tokens) + c.free_pages) % (NUM_PHASES + 1)
        phase = jnp.where(phase == NUM_PHASES, 0, phase).astype(jnp.int32)
        fields = {}
        drafts = jnp.zeros_like(c.length)
        for index, name in enumerate(Plan._fields):
            old = drafts if name == "drafts" else getattr(plan, name)
            # By order of admission: engine and simulator differ in empty slots.
            head = name in ("admit", "head_places", "head_rows")
            at = jnp.arange(old.shape[0]) if head else jnp.cumsum(c.running) - 1
            field_values = self.values[phase, index][at % self.values.shape[2]]
            if old.dtype == bool:
                field_values = field_values % 3 == 0
            fields[name] = jnp.where(self.replaces[phase, index], field_values, old)
        return plan._replace(**fields)


def draw_plan(seed: int, num_slots: int, inner: jaxkv.Policy) -> DrawnPlan:
    """Draws the values of a policy; in its first phase the plan is that of `inner`."""
    rng = np.random.default_rng(seed)
    shape = NUM_PHASES, len(Plan._fields), num_slots
    values = rng.integers(LOW, HIGH, shape).astype(np.int32)
    # Extreme values as well.
    extreme = rng.choice([-(2**31), 2**31 - 1, 1000], shape)
    values = np.where(rng.random(shape) < 0.05, extreme, values).astype(np.int32)
    replaces = rng.random(shape[:2]) < rng.uniform(0.1, 0.9)
    replaces[0] = False
    return DrawnPlan(jnp.asarray(values), jnp.asarray(replaces), inner)
