"""Pretraining of a small policy on demonstrations with errors."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.models import ModelConfig, Params, init_params
from scaling.policy import losses
from scaling.policy.loop import (
    OPTIMIZER,
    SMALL_POLICY,
    apply_gradient,
    ordinary_logprobs,
)
from scaling.policy.rollouts import LENGTH, Rollout
from scaling.policy.tasks import ANSWER_TOKENS, END, PROMPT_TOKENS, TASKS
from scaling.training import TrainState, make_optimizer


@validation.checks_numbers(seed=0, error_rate="[0, 1]")
def pretrain(
    seed: int,
    num_steps: int,
    *,
    model: ModelConfig = SMALL_POLICY,
    batch_size: int = 128,
    error_rate: float = 0.3,
    learning_rate: float = 3e-3,
) -> tuple[Params, Float[Array, ""]]:
    """Pretrains a policy on demonstrations of all tasks.

    A policy that imitates answers with errors makes errors as often, which leaves room
    for improvement by rewards.

    Args:
      seed: seed of parameters and demonstrations.
      num_steps: steps, of `batch_size` demonstrations each.
      model: the policy.
      batch_size: demonstrations of a step, at least one for each task.
      error_rate: probability that a token of an answer is replaced by a random one.
      learning_rate: learning rate of AdamW, which falls linearly to 0.

    Returns:
      The parameters, and the mean loss of the last step in nats per token.
    """
    validation.integer("batch_size", batch_size, low=len(TASKS))
    key = jax.random.key(seed)
    params = init_params(model, jax.random.fold_in(key, 0))
    state = TrainState(params, make_optimizer(OPTIMIZER).init(params), jnp.int32(0))

    def loss_of(params: Params, batch: Rollout) -> Array:
        values = ordinary_logprobs(params, batch.tokens, model)
        return -losses.mean_of_tokens(values, batch.mask)

    def step(index: Array, carry: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
        state, _ = carry
        share = index.astype(jnp.float32) / num_steps
        draw = jax.random.fold_in(key, 1 + index)
        batch = demonstrations(draw, batch_size, error_rate)
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        return apply_gradient(state, grads, learning_rate * (1 - share)), loss

    state, loss = lax.fori_loop(0, num_steps, step, (state, jnp.float32(0)))
    return state.params, loss


def demonstrations(key: Array, num: int, error_rate: float) -> Rollout:
    """Draws prompts of all tasks with answers, log-probabilities are 0.

    A token of an answer is replaced by a random one with probability `error_rate`.
    """
    parts = []
    for index, task in enumerate(TASKS.values()):
        prompts = task.draw(jax.random.fold_in(key, index), num // len(TASKS))
        answers = task.solve(prompts)
        place = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
        after = place - prompts.length[:, None]
        padded_prompts = jnp.pad(prompts.tokens, ((0, 0), (0, LENGTH - PROMPT_TOKENS)))
        answer = jnp.take_along_axis(
            answers.tokens, jnp.clip(after, 0, ANSWER_TOKENS - 1), axis=1
        )
        tokens = jnp.where(after >= 0, answer, padded_prompts)
        length = prompts.length + answers.length
        blank = jnp.zeros(tokens.shape, jnp.float32)
        parts.append(Rollout(tokens, prompts.length, length, blank))
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    flip_key, token_key = jax.random.split(jax.random.fold_in(key, len(TASKS)))
    is_wrong = jax.random.uniform(flip_key, batch.tokens.shape) < error_rate
    noise = jax.random.randint(token_key, batch.tokens.shape, 0, END + 1, jnp.int32)
    tokens = jnp.where(is_wrong & batch.mask, noise, batch.tokens)
    return batch._replace(tokens=tokens)
