"""A load stage in its steady state: latencies from a fixed point, without a simulation.

Little's law gives the sequences that decode, and they give the time of a step. The
result is a smooth function of the coefficients, which a fit can differentiate; a
simulation of the stage differs by a few percent, see `posterior`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.simulation import make_work
from scaling.calibration.measurements import MeasuredStage
from scaling.calibration.server_cost import ServerCost

_NUM_ITERATIONS = 60


class SteadyLoad(NamedTuple):
    """The load of a stage as scalars, which `vmap` can map."""

    rate_per_s: Float[Array, ""]
    prompt_tokens: Float[Array, ""]
    new_tokens: Float[Array, ""]
    """Mean tokens of a prompt that are not in the prefix cache."""
    answer_tokens: Float[Array, ""]
    max_num_seqs: Float[Array, ""]

    @classmethod
    def of(cls, stage: MeasuredStage) -> "SteadyLoad":
        """Makes the load of a stage whose prompts are all cached, if any are."""
        # The length modulo a block is about uniform over the distinct prompts.
        new = (stage.block_size + 1) / 2
        new = min(new, stage.prompt_tokens)
        if not stage.prefix_caching:
            new = stage.prompt_tokens
        numbers = stage.rate_per_s, stage.prompt_tokens, new, stage.answer_tokens
        return cls(*(jnp.float32(x) for x in (*numbers, stage.max_num_seqs)))


class SteadyState(NamedTuple):
    """Mean latencies of a stage in its steady state in s."""

    end_to_end_s: Float[Array, ""]
    first_token_s: Float[Array, ""]
    step_s: Float[Array, ""]
    """Time of a step."""


def find_steady_state(load: SteadyLoad, cost: ServerCost) -> SteadyState:
    """Returns the steady state of a stage that is not overloaded.

    A request waits for half a step on average, and the step of its prompt gives its
    first token.

    Args:
      load: the load.
      cost: cost of a step, with single coefficients.
    """
    prompt = load.prompt_tokens
    new = load.new_tokens
    answer = load.answer_tokens
    context = prompt + answer / 2
    zero = make_work()

    def step(
        num_decodes: Float[Array, ""], num_prompts: Float[Array, ""]
    ) -> Float[Array, ""]:
        squares = prompt**2 - (prompt - new) ** 2
        work = zero._replace(
            num_decodes=num_decodes,
            num_prompts=num_prompts,
            num_prompt_rows=num_prompts * new,
            decode_context=num_decodes * context,
            prompt_context=num_prompts * prompt,
            prompt_squares=num_prompts * squares,
            num_drawn=num_decodes + num_prompts,
        )
        return cost(work)

    def num_decoding(step_s: Float[Array, ""]) -> Float[Array, ""]:
        concurrency = load.rate_per_s * (answer - 1) * step_s
        return jnp.minimum(concurrency, load.max_num_seqs)

    def improve(step_s: Float[Array, ""], _: None) -> tuple[Float[Array, ""], None]:
        return step(num_decoding(step_s), load.rate_per_s * step_s), None

    # From below: the iteration grows to the smallest fixed point.
    start_s = step(jnp.float32(1.0), jnp.float32(0.0))
    step_s, _ = lax.scan(improve, start_s, None, length=_NUM_ITERATIONS)
    f = cost.coefficients
    prompt_s = step(num_decoding(step_s), jnp.float32(1.0))
    common_s = step_s / 2 + prompt_s + f.ingest_s + f.delivery_lag * step_s
    return SteadyState(
        end_to_end_s=common_s + (answer - 1) * step_s + f.stream_s,
        first_token_s=common_s + f.first_token_s,
        step_s=step_s,
    )
