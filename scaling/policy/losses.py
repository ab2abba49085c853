"""Losses of policy optimisation from groups of answers, and estimates of divergence.

Sources: Shao et al. 2024, arXiv:2402.03300 (GRPO); Yu et al. 2025, arXiv:2503.14476
(DAPO: losses by token, two clipping bounds); Zheng et al. 2025, arXiv:2507.18071 (GSPO:
ratios by sequence); Schulman 2020, http://joschu.net/blog/kl-approx.html (estimates).
"""

from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import validation
from jaxkv.validation import ConfigRecord, NonNegativeFloat, Range

type TokenValues = Float[Array, "answers tokens"]
type TokenMask = Bool[Array, "answers tokens"]


class PolicyObjective(ConfigRecord):
    """Objective of a policy update."""

    clip_low: Annotated[float, Range(0, 1)] = 0.2
    """Bound below 1 of the ratio of probabilities."""
    clip_high: NonNegativeFloat = 0.2
    """Bound above 1 of the ratio."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the k3 divergence from the reference policy."""
    level: Literal["token", "sequence"] = "token"
    """"token": every token of the batch has the same weight, as in DAPO. "sequence":
    every answer has the same weight, the mean over its tokens, as in GRPO."""
    ratio: Literal["token", "sequence"] = "token"
    """"token": a ratio for each token. "sequence": one for each answer, the geometric
    mean over its tokens, as in GSPO."""
    divides_by_deviation: bool = True
    """True to divide advantages by the standard deviation of their group."""


class PolicyLoss(NamedTuple):
    """Value and diagnostics of a loss, scalars."""

    loss: Float[Array, ""]
    clipped: Float[Array, ""]
    """Fraction of the tokens whose ratio was clipped."""
    kl_reference: Float[Array, ""]
    """k3 estimate of the divergence from the reference policy."""


def group_advantages(
    rewards: Float[Array, "prompts samples"], *, divides_by_deviation: bool = True
) -> Float[Array, "prompts samples"]:
    """Returns the advantage of each answer over the mean of its prompt's group.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. A group of equal rewards
    has advantages of 0.
    """
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    if not divides_by_deviation:
        return centred
    deviation = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
    return centred / (deviation + 1e-6)


def policy_loss(
    logprobs: TokenValues,
    sampled: TokenValues,
    reference: TokenValues,
    advantages: Float[Array, " answers"],
    mask: TokenMask,
    objective: PolicyObjective,
) -> PolicyLoss:
    """Returns the clipped loss of a batch of answers.

    Args:
      logprobs: log-probabilities of the answers' tokens under the current policy, of
        which the loss is differentiated.
      sampled: those under the policy that sampled the answers.
      reference: those under the reference policy.
      advantages: advantage of each answer.
      mask: True for tokens of the answers.
      objective: the objective.

    Source: Shao et al. 2024, arXiv:2402.03300, equation 3, and the papers above.
    """
    difference = jnp.where(mask, logprobs - sampled, 0)
    if objective.ratio == "sequence":
        mean = _mean_of_answers(difference, mask)[:, None]
        # The gradient reaches all tokens of the answer by their mean.
        difference = jnp.broadcast_to(mean, difference.shape)
    ratio = jnp.exp(difference)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    gain = advantages[:, None]
    clipped = jnp.clip(ratio, low, high)
    value = jnp.minimum(ratio * gain, clipped * gain)
    divergence = k3(logprobs, reference, mask)
    value = value - objective.kl_weight * divergence
    if objective.level == "token":
        total = mean_of_tokens(value, mask)
    else:
        total = jnp.mean(_mean_of_answers(value, mask))
    is_clipped = (ratio * gain > clipped * gain) & mask
    return PolicyLoss(
        -total,
        mean_of_tokens(is_clipped.astype(logprobs.dtype), mask),
        lax.stop_gradient(mean_of_tokens(divergence, mask)),
    )


def k1(sampler: TokenValues, trainer: TokenValues, mask: TokenMask) -> TokenValues:
    """Returns the k1 estimate of KL(sampler, trainer) for each token of the sampler."""
    return jnp.where(mask, sampler - trainer, 0)


def k3(sampler: TokenValues, trainer: TokenValues, mask: TokenMask) -> TokenValues:
    """Returns the k3 estimate of KL(sampler, trainer), at least 0 for each token."""
    log_ratio = jnp.where(mask, trainer - sampler, 0)
    return jnp.expm1(log_ratio) - log_ratio


def mean_of_tokens(values: TokenValues, mask: TokenMask) -> Float[Array, ""]:
    """Returns the mean over the marked tokens of all answers; 0 without any."""
    num = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(values.dtype)
    return jnp.sum(jnp.where(mask, values, 0)) / num


def _mean_of_answers(values: TokenValues, mask: TokenMask) -> Float[Array, " answers"]:
    num = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1).astype(values.dtype)
    return jnp.sum(jnp.where(mask, values, 0), axis=1) / num


@validation.checks_numbers()
def pass_at_k(
    num_right: Int[np.ndarray, " *prompts"], num_samples: int, k: int
) -> Float[np.ndarray, " *prompts"]:
    """Estimates for each prompt the probability that one of k answers is right.

    Args:
      num_right: right answers among `num_samples` of each prompt, of any shape.
      num_samples: answers of each prompt.
      k: number of answers, in [1, num_samples].

    Returns:
      The unbiased estimates, 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: `k` is above `num_samples`.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    if k > num_samples:
        raise ValueError(f"{k=} must be at most {num_samples=}")
    num_wrong = num_samples - np.asarray(num_right)
    factor = np.ones(num_wrong.shape)
    for i in range(k):
        factor *= np.maximum(num_wrong - i, 0) / (num_samples - i)
    return 1 - factor
