"""Speculative decoding in a simulation: draft lengths and acceptance rates.

A simulation has no tokens, so acceptance is random: the k-th draft of a step is
accepted with a given probability if all drafts before it were. With one acceptance rate
alpha, a step with draft length gamma emits (1 - alpha^(gamma + 1)) / (1 - alpha) tokens
on average: 3.36 for gamma = 4 and alpha = 0.8.

The result is a function of seed, request, sample and position only. It equals that of
the engine with a verifier of the same acceptance probability.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.1, equation 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import sampling, validation
from jaxkv.ledger import Slots, num_to_feed
from jaxkv.sampling import ACCEPT, draw_key, request_key, request_keys
from jaxkv.scheduling import limit_draft_lengths
from jaxkv.workloads import Workload


class Acceptance(NamedTuple):
    """Draft length and acceptance rates; a pytree whose leaves may be mapped."""

    num_drafts: Int32[Array, ""]
    """Requested draft length of each sequence that decodes."""
    chances: Float[Array, " max_drafts"]
    """Acceptance rate of each draft of a step, given that all drafts before it were
    accepted."""
    key: UInt32[Array, " 2"]
    """Random key."""

    @classmethod
    def of(
        cls,
        chance: int | float | Sequence[int | float] | np.ndarray | Array,
        *,
        num_drafts: int | Array,
        max_drafts: int | None = None,
        seed: int = 0,
    ) -> "Acceptance":
        """Makes an `Acceptance` of numbers, or of arrays that are mapped.

        Args:
          chance: acceptance rate in [0, 1]: one number, or `max_drafts` of them, one
            for each draft of a step.
          num_drafts: requested draft length, in [0, max_drafts].
          max_drafts: largest draft length, at least 1, static. None means `num_drafts`
            or the number of chances, whichever is larger.
          seed: random seed, in [0, 2**64). The results equal those of an engine with
            this `EngineConfig.seed` whose request ids are indices into the workload.

        Raises:
          ValueError: a number is out of range. JAX arrays are not checked.
        """
        requested = 0
        if not isinstance(num_drafts, Array):
            requested = validation.integer("num_drafts", num_drafts)
        elif max_drafts is None and not np.ndim(chance):
            raise ValueError("max_drafts=None must be a number if num_drafts is mapped")
        if max_drafts is None:
            max_drafts = max(np.size(chance), requested)
        max_drafts = validation.integer("max_drafts", max_drafts, low=1)
        if requested > max_drafts:
            raise ValueError(f"{num_drafts=} must be in [0, {max_drafts=}]")
        if not isinstance(chance, Array):
            for entry in np.ravel(np.asarray(chance, object)):
                validation.number("chance", entry, low=0, high=1, hint="in [0, 1]")
        chances = jnp.asarray(chance, jnp.float32)
        if chances.shape not in ((), (max_drafts,)):
            raise ValueError(
                f"chance has shape {chances.shape}, must be one number or {max_drafts=}"
            )
        seed = validation.integer("seed", seed, below=2**64)
        return cls(
            num_drafts=jnp.asarray(num_drafts, jnp.int32),
            chances=jnp.broadcast_to(chances, (max_drafts,)),
            key=jnp.asarray(request_key(seed, 0, 0)),
        )


def wanted_draft_lengths(
    slots: Slots,
    length: Int32[Array, " slots"],
    workload: Workload,
    acceptance: Acceptance,
    max_samples: int,
) -> Int32[Array, " slots"]:
    """Returns the draft length of each slot, see `interface.limit_draft_lengths`."""
    wanted = jnp.broadcast_to(acceptance.num_drafts, slots.num_tokens.shape)
    if slots.fork is not None:
        wanted = jnp.where(slots.fork.reads, 0, wanted)
    request = jnp.maximum(slots.sequence, 0) // max_samples
    return limit_draft_lengths(
        wanted,
        target_length=num_to_feed(slots),
        length=length,
        num_tokens=slots.num_tokens,
        limit=workload.prompt[request] + workload.output[request],
    )


def draw_num_accepted(
    acceptance: Acceptance,
    slots: Slots,
    num_drafts: Int32[Array, " slots"],
    max_samples: int,
) -> Int32[Array, " slots"]:
    """Samples the number of accepted drafts of each slot."""
    sequence = jnp.maximum(slots.sequence, 0)
    place = jnp.arange(acceptance.chances.shape[0], dtype=jnp.int32)[None, :]
    position = slots.num_tokens[:, None] + place
    key = request_keys(acceptance.key, sequence // max_samples)
    key = jnp.broadcast_to(key[:, None], (*position.shape, 2))
    sample = jnp.broadcast_to((sequence % max_samples)[:, None], position.shape)
    key = draw_key(key, sample, position, ACCEPT)
    first = jnp.zeros((1, 1), jnp.int32)  # index of the only child of each place
    uniforms = sampling.uniform(key.reshape(-1, 2), first).reshape(position.shape)
    accepts = (uniforms < acceptance.chances[None, :]) & (place < num_drafts[:, None])
    run = jnp.cumprod(accepts.astype(jnp.int32), axis=1)
    return jnp.sum(run, axis=1, dtype=jnp.int32)


def emit_tokens(
    slots: Slots,
    length: Int32[Array, " slots"],
    emits: Bool[Array, " slots"],
    num_drafts: Int32[Array, " slots"],
    limit: Int32[Array, " slots"],
    acceptance: Acceptance,
    max_samples: int,
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Counts accepted drafts as written, and returns the emitted tokens of each slot.

    `emits` marks slots that emit tokens; `limit` is the length of prompt plus answer.

    Returns:
      The new lengths, and the number of emitted tokens of each slot.
    """
    accepted = draw_num_accepted(acceptance, slots, num_drafts, max_samples)
    # The last emitted token is not fed yet; an answer may end before its last draft.
    num_emitted = jnp.where(
        emits, jnp.minimum(accepted + 1, limit - slots.num_tokens), 0
    )
    return length + jnp.maximum(num_emitted - 1, 0), num_emitted
