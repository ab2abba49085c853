"""Speculation in a simulation: how many drafts are fed, and which are accepted.

There are no tokens, so the verdict on each draft is drawn: the k-th of a step stands
with a given probability if those before it do. Where all are alike, alpha, a step of
gamma drafts emits (1 - alpha^(gamma + 1)) / (1 - alpha) tokens in the mean: 3.36 of 4
drafts at 0.8.

A verdict is a function of the seed, the request, the sample and the position alone: the
one that the engine gives for a verifier of the same probability.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.1, equation 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import validation
from jaxkv.ledger import Slots, num_to_feed
from jaxkv.sampling import random_keys
from jaxkv.scheduling import interface
from jaxkv.workloads import Workload


class Acceptance(NamedTuple):
    """How sequences that decode speculate; a pytree whose leaves may be mapped."""

    num_drafts: Int32[Array, ""]
    """Drafts that each would like to feed in a step."""
    chances: Float[Array, " max_drafts"]
    """Probability with which each of a step's drafts is accepted, given that all before
    it were."""
    key: UInt32[Array, " 2"]
    """What the verdicts are drawn from."""

    @classmethod
    def of(
        cls,
        chance: int | float | Sequence[int | float] | np.ndarray | Array,
        *,
        num_drafts: int | Array,
        max_drafts: int | None = None,
        seed: int = 0,
    ) -> "Acceptance":
        """Makes an acceptance law of numbers, or of arrays that are mapped.

        Args:
          chance: probability with which a draft is accepted, in [0, 1]: one for all, or
            one for each place, `max_drafts` of them.
          num_drafts: drafts wished for in a step, in [0, max_drafts].
          max_drafts: the most that there may be, at least 1, static; None means
            `num_drafts`, or as many as there are chances.
          seed: of the verdicts, in [0, 2**64): what `EngineConfig.seed` is to a
            request without a seed, whose id is its place in the workload.

        Raises:
          ValueError: a number is out of its range; arrays of JAX are not looked at.
        """
        wished = 0
        if not isinstance(num_drafts, Array):
            wished = validation.integer("num_drafts", num_drafts)
        elif max_drafts is None and not np.ndim(chance):
            raise ValueError("max_drafts=None must be a number if num_drafts is mapped")
        if max_drafts is None:
            max_drafts = max(np.size(chance), wished)
        max_drafts = validation.integer("max_drafts", max_drafts, low=1)
        if wished > max_drafts:
            raise ValueError(f"{num_drafts=} must be in [0, {max_drafts=}]")
        if not isinstance(chance, Array):
            for each in np.ravel(np.asarray(chance, object)):
                validation.number("chance", each, low=0, high=1, hint="in [0, 1]")
        chances = jnp.asarray(chance, jnp.float32)
        if chances.shape not in ((), (max_drafts,)):
            raise ValueError(
                f"chance has shape {chances.shape}, must be one number or {max_drafts=}"
            )
        seed = validation.integer("seed", seed, below=2**64)
        return cls(
            num_drafts=jnp.asarray(num_drafts, jnp.int32),
            chances=jnp.broadcast_to(chances, (max_drafts,)),
            key=jnp.asarray(random_keys.request_key(seed, 0, 0)),
        )


def wanted_draft_lengths(
    slots: Slots,
    length: Int32[Array, " slots"],
    workload: Workload,
    acceptance: Acceptance,
    max_samples: int,
) -> Int32[Array, " slots"]:
    """How many drafts each place would feed behind its last known token."""
    wanted = jnp.broadcast_to(acceptance.num_drafts, slots.num_tokens.shape)
    if slots.fork is not None:
        wanted = jnp.where(slots.fork.reads, 0, wanted)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    return interface.limit_draft_lengths(
        wanted,
        num_tokens=num_to_feed(slots),
        length=length,
        known=slots.num_tokens,
        limit=workload.prompt[request] + workload.output[request],
    )


def draw_num_accepted(
    acceptance: Acceptance,
    slots: Slots,
    num_drafts: Int32[Array, " slots"],
    max_samples: int,
) -> Int32[Array, " slots"]:
    """Draws how many drafts of each place are accepted: all before one that is not."""
    sequence = jnp.maximum(slots.sequence, 0)
    place = jnp.arange(acceptance.chances.shape[0], dtype=jnp.int32)[None, :]
    position = slots.num_tokens[:, None] + place
    key = random_keys.request_keys(acceptance.key, sequence // max_samples)
    key = jnp.broadcast_to(key[:, None], (*position.shape, 2))
    sample = jnp.broadcast_to((sequence % max_samples)[:, None], position.shape)
    key = random_keys.draw_key(key, sample, position, random_keys.ACCEPT)
    first = jnp.zeros((1, 1), jnp.int32)  # of the children of a place: it has one
    drawn = random_keys.uniform(key.reshape(-1, 2), first).reshape(position.shape)
    accepts = (drawn < acceptance.chances[None, :]) & (place < num_drafts[:, None])
    run = jnp.cumprod(accepts.astype(jnp.int32), axis=1)
    return jnp.sum(run, axis=1, dtype=jnp.int32)


def accept_drafts(
    slots: Slots,
    length: Int32[Array, " slots"],
    emits: Bool[Array, " slots"],
    num_drafts: Int32[Array, " slots"],
    limit: Int32[Array, " slots"],
    acceptance: Acceptance,
    max_samples: int,
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Counts accepted drafts as written, and says how many tokens each place draws.

    Those that have logits draw; `limit` are the tokens of prompt and answer.
    """
    accepted = draw_num_accepted(acceptance, slots, num_drafts, max_samples)
    # Of an answer that ends only what it has, and its last token is never fed.
    drawn = jnp.where(emits, jnp.minimum(accepted + 1, limit - slots.num_tokens), 0)
    return length + jnp.maximum(drawn - 1, 0), drawn
