"""The loop of policy optimisation as a value: sample, reward, update, in one program.

`policy_step(state, config) -> (state, info)` is a pure function, so a run is a
`lax.scan` of it, several seeds are a `lax.map`, and a saved state continues with the
same bits. The sampler is the serving engine, the trainer is `jaxkv.score`, and with
reproducible numerics both agree in every bit.
"""

import functools
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkv import score, validation
from jaxkv.models import ModelConfig, Params, logits
from jaxkv.validation import (
    ConfigRecord,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
)
from scaling.policy import losses
from scaling.policy.losses import PolicyObjective, TokenValues
from scaling.policy.rollouts import LENGTH, Rollout, roll_out
from scaling.policy.tasks import (
    ANSWER_TOKENS,
    END,
    NUM_CHARACTERS,
    PROMPT_TOKENS,
    Answers,
    Prompts,
    Task,
    find_task,
)
from scaling.training import OptimizerConfig, TrainState, make_optimizer

SMALL_POLICY = ModelConfig(
    vocab_size=NUM_CHARACTERS,
    hidden_size=64,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=192,
    max_positions=32,
    tie_embeddings=True,
)
"""A model of 0.1M parameters that learns the tasks in minutes."""

OPTIMIZER = OptimizerConfig(kind="adamw", weight_decay=0.0)


class PolicyConfig(ConfigRecord):
    """Settings of policy optimisation; all are static."""

    task: Literal["copying", "brackets", "sums", "language"] = "copying"
    """Name of the task, see `tasks.TASKS`."""
    model: ModelConfig = SMALL_POLICY
    """The policy."""
    num_prompts: PositiveInt = 16
    """Prompts of a rollout."""
    group_size: Annotated[int, Range(2)] = 8
    """Answers to each prompt."""
    updates_per_rollout: PositiveInt = 1
    """Updates on each rollout. The first is on-policy; later ones are off-policy, with
    importance weights."""
    learning_rate: PositiveFloat = 7e-4
    """Learning rate of AdamW."""
    temperature: PositiveFloat = 1.0
    """Temperature of the draws. The loss has the log-probabilities of temperature 1, so
    any other one makes the sampler another policy."""
    objective: PolicyObjective = PolicyObjective()
    """The loss."""
    numerics: Literal["fast", "reproducible"] = "reproducible"
    """Numerics of the sampler and of the trainer's log-probabilities."""
    mismatch: NonNegativeFloat = 0.0
    """Standard deviation of a relative error that every parameter of the sampler has:
    what a sampler in other numerics does to training."""
    logprob_noise: NonNegativeFloat = 0.0
    """Standard deviation of an error of the log-probabilities that the sampler reports;
    its draws do not have it."""
    ratio_to: Literal["sampler", "trainer"] = "sampler"
    """Policy in the denominator of the ratio: the sampler, by its log-probabilities, or
    the trainer before the first update, as if both agreed."""


class PolicyState(NamedTuple):
    """State of a run between updates.

    Attributes:
      policy: parameters, moments of the optimizer, and updates so far.
      reference: parameters of the reference policy.
      seed: seed of the run's draws.
    """

    policy: TrainState
    reference: Params
    seed: Int32[Array, ""]


class PolicyInfo(NamedTuple):
    """Measurements of one rollout and its updates.

    Attributes:
      reward: mean reward.
      num_right: right answers to each prompt.
      length: mean length of the answers in tokens.
      entropy: mean entropy estimate, minus the log-probability of the drawn tokens.
      k1: estimate of the divergence between sampler and trainer before the update.
      k3: estimate that is at least 0.
      largest: largest difference of a log-probability between sampler and trainer.
      num_different: tokens whose log-probability differs in any bit.
      num_tokens: tokens of the answers.
      kl_reference: divergence from the reference policy, at the last update.
      clipped: fraction of the tokens that were clipped, at the last update.
      grad_norm: norm of the gradient, at the last update.
    """

    reward: Float[Array, ""]
    num_right: Int32[Array, " prompts"]
    length: Float[Array, ""]
    entropy: Float[Array, ""]
    k1: Float[Array, ""]
    k3: Float[Array, ""]
    largest: Float[Array, ""]
    num_different: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    kl_reference: Float[Array, ""]
    clipped: Float[Array, ""]
    grad_norm: Float[Array, ""]


@validation.checks_numbers(seed=0)
def start_policy(params: Params, seed: int | Int32[Array, ""]) -> PolicyState:
    """Returns the state before the first update; the reference is `params`."""
    moments = make_optimizer(OPTIMIZER).init(params)
    policy = TrainState(params, moments, jnp.int32(0))
    return PolicyState(policy, params, jnp.asarray(seed, jnp.int32))


@validation.checks_numbers()
def run_policy(
    state: PolicyState,
    config: PolicyConfig,
    num_updates: int,
    *,
    task: Task | None = None,
) -> tuple[PolicyState, PolicyInfo]:
    """Runs `num_updates` rollouts, each with its updates, as one scan.

    Args:
      state: state before the first rollout.
      config: settings, static.
      num_updates: number of rollouts, static.
      task: task in place of the config's, static.

    Returns:
      The last state, and the measurements, stacked.
    """

    def body(state: PolicyState, _: None) -> tuple[PolicyState, PolicyInfo]:
        return policy_step(state, config, task=task)

    return lax.scan(body, state, None, length=num_updates)


def policy_step(
    state: PolicyState, config: PolicyConfig, *, task: Task | None = None
) -> tuple[PolicyState, PolicyInfo]:
    """Samples answers to new prompts, rewards them, and updates the policy.

    Args:
      state: state before the rollout.
      config: settings, static.
      task: task in place of the config's, static.

    Returns:
      The new state, and the measurements.
    """
    task = task or find_task(config.task)
    params = state.policy.params
    key = jax.random.fold_in(jax.random.key(state.seed), state.policy.step)
    draw_key, sample_key, noise_key = jax.random.split(key, 3)
    prompts = task.draw(draw_key, config.num_prompts)
    rollout = roll_out(
        _sampler(params, noise_key, config.mismatch),
        prompts,
        jax.random.key_data(sample_key),
        model=config.model,
        group_size=config.group_size,
        temperature=config.temperature,
        numerics=config.numerics,
    )
    if config.logprob_noise:
        noise = jax.random.normal(noise_key, rollout.logprobs.shape, jnp.float32)
        noise = jnp.where(rollout.mask, config.logprob_noise * noise, 0)
        rollout = rollout._replace(logprobs=rollout.logprobs + noise)
    rewards = reward_rollout(task, rollout).reshape(config.num_prompts, -1)
    advantages = losses.group_advantages(
        rewards, divides_by_deviation=config.objective.divides_by_deviation
    )
    trainer = trainer_logprobs(params, rollout, config)
    reference = trainer_logprobs(state.reference, rollout, config)
    old = rollout.logprobs if config.ratio_to == "sampler" else trainer
    update = functools.partial(
        _update,
        rollout._replace(logprobs=old),
        reference,
        advantages.reshape(-1),
        config=config,
    )
    policy = state.policy
    for _ in range(config.updates_per_rollout):
        policy, loss, grad_norm = update(policy)
    mask = rollout.mask
    sampled = rollout.logprobs
    differs = (sampled != trainer) & mask
    mean = functools.partial(losses.mean_of_tokens, mask=mask)
    info = PolicyInfo(
        reward=jnp.mean(rewards),
        num_right=jnp.sum(rewards == 1, axis=1, dtype=jnp.int32),
        length=jnp.mean((rollout.length - rollout.prompt_length).astype(jnp.float32)),
        entropy=-mean(sampled),
        k1=mean(losses.k1(sampled, trainer, mask)),
        k3=mean(losses.k3(sampled, trainer, mask)),
        largest=jnp.max(jnp.where(mask, jnp.abs(sampled - trainer), 0)),
        num_different=jnp.sum(differs, dtype=jnp.int32),
        num_tokens=jnp.sum(mask, dtype=jnp.int32),
        kl_reference=loss.kl_reference,
        clipped=loss.clipped,
        grad_norm=grad_norm,
    )
    return state._replace(policy=policy), info


def _update(
    rollout: Rollout,
    reference: TokenValues,
    advantages: Float[Array, " answers"],
    policy: TrainState,
    *,
    config: PolicyConfig,
) -> tuple[TrainState, losses.PolicyLoss, Float[Array, ""]]:
    """Updates the policy once on a rollout."""

    def loss_of(params: Params) -> tuple[Array, losses.PolicyLoss]:
        loss = losses.policy_loss(
            trainer_logprobs(params, rollout, config),
            rollout.logprobs,
            reference,
            advantages,
            rollout.mask,
            config.objective,
        )
        return loss.loss, loss

    grads, loss = jax.grad(loss_of, has_aux=True)(policy.params)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    return apply_gradient(policy, grads, config.learning_rate), loss, norm


def apply_gradient(
    policy: TrainState, grads: Params, learning_rate: float | Array
) -> TrainState:
    """Returns the state after one update by a gradient."""
    update = make_optimizer(OPTIMIZER).update
    updates, moments = update(grads, policy.moments, policy.params)
    params = jax.tree.map(lambda p, u: p + learning_rate * u, policy.params, updates)
    return TrainState(params, moments, policy.step + 1)


def trainer_logprobs(
    params: Params, rollout: Rollout, config: PolicyConfig
) -> TokenValues:
    """Returns the trainer's log-probability of each token of the answers; else 0."""
    if config.numerics == "reproducible":
        values = score(params, rollout.tokens, rollout.length, config=config.model)
    else:
        values = ordinary_logprobs(params, rollout.tokens, config.model)
    return jnp.where(rollout.mask, values, 0)


def ordinary_logprobs(
    params: Params, tokens: Int32[Array, "answers tokens"], model: ModelConfig
) -> TokenValues:
    """Returns the log-probability of each token by one pass over whole sequences."""
    outputs = logits(params, tokens[:, :-1], config=model)
    values = jax.nn.log_softmax(outputs, axis=-1)
    picked = jnp.take_along_axis(values, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(picked, ((0, 0), (1, 0)))


def reward_rollout(task: Task, rollout: Rollout) -> Float[Array, " answers"]:
    """Returns the reward of each answer of a rollout."""
    begin = rollout.prompt_length
    place = begin[:, None] + jnp.arange(ANSWER_TOKENS, dtype=jnp.int32)[None, :]
    tokens = jnp.take_along_axis(rollout.tokens, jnp.minimum(place, LENGTH - 1), axis=1)
    inside = place < rollout.length[:, None]
    answers = Answers(jnp.where(inside, tokens, END), rollout.length - begin)
    prompts = Prompts(rollout.tokens[:, :PROMPT_TOKENS], begin)
    return task.reward(prompts, answers)


def _sampler(params: Params, key: Array, mismatch: float) -> Params:
    """Returns the sampler's parameters, with a relative error of `mismatch`."""
    if not mismatch:
        return params
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf * (1 + mismatch * jax.random.normal(k, leaf.shape, leaf.dtype))
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)
