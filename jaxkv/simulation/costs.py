"""Cost models that wrap another cost model, and a helper to make `Work` values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv import validation
from jaxkv.simulation.work import Cost, Work


def make_work(**counts: int | float | np.generic) -> Work:
    """Makes a `Work` value; missing counts are 0.

    Counts of drafts are None if no count of drafts is passed.

    Raises:
      TypeError: `Work` has no such field.
    """
    floats = {"prompt_squares": jnp.float32}
    of_drafts = set(Work._field_defaults)
    names = [x for x in Work._fields if x not in of_drafts or of_drafts & set(counts)]
    return Work(
        **{
            name: jnp.asarray(count, floats.get(name, jnp.int32))
            for name, count in (dict.fromkeys(names, 0) | counts).items()
        }
    )


class SerializedPhases(NamedTuple):
    """Prices a step with prefill and decoding as two steps in sequence."""

    cost: Cost
    """Cost of a step of one phase."""
    is_serialized: Bool[Array, ""]
    """True if the phases are serialized; else the cost is that of the mixed step."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s."""
        together = self.cost(work)
        both = (work.num_decodes > 0) & (work.num_prompt_rows > 0)
        none = jnp.zeros_like(work.num_decodes)
        num_drawing = work.num_drawing - work.num_decodes
        drafts = {name: getattr(work, name) for name in Work._field_defaults}
        reads = work._replace(
            num_decodes=none,
            decode_context=none,
            num_drawn=num_drawing,
            **jax.tree.map(jnp.zeros_like, drafts),
        )
        decodes = work._replace(
            num_prompts=none,
            num_prompt_rows=none,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
            num_drawn=work.num_drawn - num_drawing,
            num_copied=none,
            num_swapped=none,
        )
        split = self.cost(reads) + self.cost(decodes)
        return jnp.where(self.is_serialized & both, split, together)


class DrafterCost(NamedTuple):
    """Adds the time of a drafter to the cost of a step.

    The drafter's prefill of prompts is not included.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.3; `step_s` is their cost
    coefficient c times the time of a step of the model.
    """

    cost: Cost
    """Cost of the step that verifies the drafts."""
    step_s: Float[Array, ""]
    """Time of a step of the drafter, in s. A step with drafts has as many drafter steps
    as its longest draft."""
    row_s: Float[Array, ""]
    """Time per draft token, in s."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s."""
        if work.num_drafts is None or work.draft_steps is None:
            return self.cost(work)
        steps, rows = (
            x.astype(jnp.float32) for x in (work.draft_steps, work.num_drafts)
        )
        return self.cost(work) + self.step_s * steps + self.row_s * rows


def with_drafter(
    cost: Cost, *, step_s: int | float | Array, row_s: int | float | Array = 0.0
) -> DrafterCost:
    """Makes a `DrafterCost` of numbers, in s, or of arrays that are mapped.

    Raises:
      ValueError: a number is below 0 or not finite. JAX arrays are not checked.
    """
    for name, value in (("step_s", step_s), ("row_s", row_s)):
        if not isinstance(value, Array):
            highest = float(np.finfo(np.float32).max)
            hint = "at least 0, and finite"
            validation.number(name, value, low=0, high=highest, hint=hint)
    seconds = (jnp.asarray(x, jnp.float32) for x in (step_s, row_s))
    return DrafterCost(cost, *seconds)


class KVTransferred(NamedTuple):
    """Cost of a decode worker that receives the K and V of prompts by transfer.

    Prompt rows are priced as decodes, since their K and V need no prefill. The cost of
    recomputation after a preemption is missing, so a simulation must not preempt.
    """

    cost: Cost
    """Cost of a step."""
    receives: Bool[Array, ""]
    """True for a decode worker; else prefill is priced as usual."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s."""
        none = jnp.zeros_like(work.num_prompt_rows)
        received = work._replace(
            num_decodes=work.num_drawing,
            num_prompts=none,
            num_prompt_rows=none,
            decode_context=work.decode_context + work.prompt_context,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
        )
        return jnp.where(self.receives, self.cost(received), self.cost(work))
