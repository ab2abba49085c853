"""Steps made up, and prices of steps that are made of others."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv.simulation.step import Cost, Work


def work(**counts: int | float | np.generic) -> Work:
    """Makes a step's work of counts by the names of `Work`; others are zero.

    Raises:
      TypeError: there is no such count.
    """
    floats = {"prompt_squares": jnp.float32}
    return Work(
        **{
            name: jnp.asarray(count, floats.get(name, jnp.int32))
            for name, count in (dict.fromkeys(Work._fields, 0) | counts).items()
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
        reads = work._replace(
            num_decodes=none,
            decode_context=none,
            num_drawn=work.num_drawn - work.num_decodes,
        )
        decodes = work._replace(
            num_prompt_rows=none,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
            num_drawn=work.num_decodes,
            num_copied=none,
            num_swapped=none,
        )
        split = self.cost(reads) + self.cost(decodes)
        return jnp.where(self.apart & both, split, together)


class Received(NamedTuple):
    """Prices steps of a machine to which prompts come with their keys and values.

    Nothing is read: a sequence that comes decodes at once, as all others do. Who is
    preempted here would be computed again for nothing, so nobody must be.
    """

    cost: Cost
    receives: Bool[Array, ""]
    """Whether it is such a machine; another one pays for what it reads."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        none = jnp.zeros_like(work.num_prompt_rows)
        received = work._replace(
            num_decodes=work.num_drawn,
            num_prompt_rows=none,
            decode_context=work.decode_context + work.prompt_context,
            prompt_context=none,
            prompt_squares=jnp.zeros_like(work.prompt_squares),
        )
        return jnp.where(self.receives, self.cost(received), self.cost(work))
