"""Rollouts: an engine's answers to prompts, as a pure function of the parameters.

Every prompt gets a group of answers that share its prefill. The engine is made, filled,
run and drained within one program, so a rollout can be part of a `lax.scan` over
updates, or be mapped over seeds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import engine, scheduling, validation
from jaxkv.engine import EngineConfig, RequestKinds
from jaxkv.models import ModelConfig, PagedForward, Params, make_model_pages
from jaxkv.sampling import Sampling, request_keys
from jaxkv.serving import make_requests
from scaling.policy.tasks import ANSWER_TOKENS, END, PROMPT_TOKENS, Prompts

PAGE_SIZE = 8
LENGTH = PROMPT_TOKENS + ANSWER_TOKENS
"""Largest length of a prompt with its answer, in tokens."""


class Rollout(NamedTuple):
    """Answers to prompts; the answers of prompt p are rows `p * n` to `p * n + n - 1`.

    Attributes:
      tokens: prompts with their answers, `END` after them.
      prompt_length: length of each prompt in tokens.
      length: length of prompt and answer in tokens.
      logprobs: log-probability of each token of an answer under the raw logits, as the
        engine reports it; 0 elsewhere.
    """

    tokens: Int32[Array, "answers length"]
    prompt_length: Int32[Array, " answers"]
    length: Int32[Array, " answers"]
    logprobs: Float[Array, "answers length"]

    @property
    def mask(self) -> Bool[Array, "answers length"]:
        """True for the tokens of the answers."""
        place = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
        begins = place >= self.prompt_length[:, None]
        return begins & (place < self.length[:, None])


def rollout_bounds(
    num_prompts: int, group_size: int, numerics: str = "reproducible"
) -> EngineConfig:
    """Returns the bounds of an engine that runs all answers at once."""
    num = num_prompts * group_size
    pages = -(-LENGTH // PAGE_SIZE) + 1
    return EngineConfig(
        num_pages=num * pages,
        page_size=PAGE_SIZE,
        max_slots=num,
        max_length=LENGTH,
        max_sequences=num,
        queue_capacity=num_prompts,
        token_budget=num,
        max_stop_tokens=1,
        submit_width=num,
        numerics="fast" if numerics == "fast" else "reproducible",
    )


@functools.cache
def _template(
    num_prompts: int, group_size: int, bounds: EngineConfig, temperature: float
) -> engine.Requests:
    """Returns requests with blank prompts, as NumPy arrays."""
    ask = Sampling(
        temperature=temperature,
        n=group_size,
        max_tokens=ANSWER_TOKENS,
        stop_tokens=(END,),
        logprobs=0,
    )
    return make_requests(
        [[0] * PROMPT_TOKENS] * num_prompts, [ask] * num_prompts, config=bounds
    )


@validation.checks_numbers()
def roll_out(
    params: Params,
    prompts: Prompts,
    key: UInt32[Array, " 2"],
    *,
    model: ModelConfig,
    group_size: int,
    temperature: float = 1.0,
    numerics: str = "reproducible",
) -> Rollout:
    """Samples a group of answers to each prompt.

    Args:
      params: parameters of the model.
      prompts: the prompts.
      key: key of the draws; prompt p has that of request p of an engine with this key.
      model: the model, static.
      group_size: answers to each prompt, static.
      temperature: temperature of the draws, static.
      numerics: numerics of the engine, static.

    Returns:
      The answers.
    """
    num_prompts = prompts.tokens.shape[0]
    num = num_prompts * group_size
    bounds = rollout_bounds(num_prompts, group_size, numerics)
    blank = _template(num_prompts, group_size, bounds, temperature)
    owner = np.repeat(np.arange(num_prompts, dtype=np.int32), group_size)
    tokens = jnp.full((num, LENGTH), END, jnp.int32)
    tokens = tokens.at[:, :PROMPT_TOKENS].set(prompts.tokens[owner])
    length = prompts.length[owner]
    keys = request_keys(key, jnp.arange(num_prompts, dtype=jnp.int32))
    requests = blank._replace(
        tokens=tokens,
        prompt_length=length,
        limit=jnp.minimum(length + ANSWER_TOKENS, LENGTH),
        params=blank.params._replace(key=keys[owner]),
    )
    dtype = jax.tree.leaves(params)[0].dtype
    pages = make_model_pages(model, bounds, dtype=dtype)
    state = engine.init(bounds, pages)
    state, _ = engine.submit(state, requests, config=bounds)
    # All prompts are read within the budget, and every answer gains a token a step.
    num_steps = -(-num_prompts * PROMPT_TOKENS // bounds.token_budget) + ANSWER_TOKENS
    state, _ = engine.run_steps(
        params,
        state,
        jnp.zeros((2,), jnp.int32),
        config=bounds,
        forward=PagedForward(model, bounds.numerics),
        policy=scheduling.fcfs(),
        num_steps=num_steps + 1,
        kinds=RequestKinds(sampled=True, grouped=True),
    )
    _, drained = engine.drain(state)
    sequences = drained.sequences
    place = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
    total = drained.progress.num_tokens
    inside = place < total[:, None]
    begins = place >= sequences.prompt_length[:, None]
    return Rollout(
        tokens=jnp.where(inside, sequences.tokens, END),
        prompt_length=sequences.prompt_length,
        length=total,
        logprobs=jnp.where(inside & begins, sequences.logprobs, 0),
    )
