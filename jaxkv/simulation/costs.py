"""Steps made up, and prices of steps that are made of others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv import validation
from jaxkv.simulation.work import Cost, Work


def work(**counts: int | float | np.generic) -> Work:
    """Makes a step's work of counts by the names of `Work`; others are zero.

    Those of drafts are left out if none of them is named.

    Raises:
      TypeError: there is no such count.
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


class Apart(NamedTuple):
    """Prices a step that reads and decodes as two, if it shall, one after the other."""

    cost: Cost
    apart: Bool[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        together = self.cost(work)
        both = (work.num_decodes > 0) & (work.num_prompt_rows > 0)
        none = jnp.zeros_like(work.num_decodes)
        drawn = work.num_drawing - work.num_decodes
        drafts = {name: getattr(work, name) for name in Work._field_defaults}
        reads = work._replace(
            num_decodes=none,
            decode_context=none,
            num_drawn=drawn,
            **jax.tree.map(jnp.zeros_like, drafts),
        )
        decodes = work._replace(
            num_prompt_rows=none,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
            num_drawn=work.num_drawn - drawn,
            num_copied=none,
            num_swapped=none,
        )
        split = self.cost(reads) + self.cost(decodes)
        return jnp.where(self.apart & both, split, together)


class Drafted(NamedTuple):
    """Prices steps before each of which a drafter guesses.

    It reads no prompts: what that takes is not in here.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.3; `step_s` is c times
    what the model takes for a step.
    """

    cost: Cost
    """Of the steps themselves, in which drafts are verified."""
    step_s: Float[Array, ""]
    """Of each step of the drafter, as many as the most drafts of one sequence."""
    row_s: Float[Array, ""]
    """Of each draft."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        if work.num_drafts is None or work.draft_steps is None:
            return self.cost(work)
        steps, rows = (
            x.astype(jnp.float32) for x in (work.draft_steps, work.num_drafts)
        )
        return self.cost(work) + self.step_s * steps + self.row_s * rows


def with_drafter(
    cost: Cost, *, step_s: int | float | Array, row_s: int | float | Array = 0.0
) -> Drafted:
    """Makes a `Drafted` cost of numbers, in seconds, or of arrays that are mapped.

    Raises:
      ValueError: a number is below 0 or not finite; arrays are not looked at.
    """
    for name, value in (("step_s", step_s), ("row_s", row_s)):
        if not isinstance(value, Array):
            most = float(np.finfo(np.float32).max)
            hint = "at least 0, and finite"
            validation.number(name, value, low=0, high=most, hint=hint)
    seconds = (jnp.asarray(x, jnp.float32) for x in (step_s, row_s))
    return Drafted(cost, *seconds)


class Received(NamedTuple):
    """Prices steps of an engine to which prompts come with their keys and values.

    Nothing is read: a sequence that comes decodes at once, as all others do. Who is
    preempted here would be computed again for nothing, so nobody must be.
    """

    cost: Cost
    receives: Bool[Array, ""]
    """Whether it is such an engine; another one pays for what it reads."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        none = jnp.zeros_like(work.num_prompt_rows)
        received = work._replace(
            num_decodes=work.num_drawing,
            num_prompt_rows=none,
            decode_context=work.decode_context + work.prompt_context,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
        )
        return jnp.where(self.receives, self.cost(received), self.cost(work))
