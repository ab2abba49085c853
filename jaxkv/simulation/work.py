"""What a step asks of the device, and what prices it."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from jaxkv.ledger import Slots


class Work(NamedTuple):
    """What a step asks of the device."""

    num_decodes: Int32[Array, ""]
    """Sequences that feed the one token that they drew last, and maybe drafts."""
    num_prompt_rows: Int32[Array, ""]
    """Other tokens fed: of prompts, and of what was lost and is computed again."""
    decode_context: Int32[Array, ""]
    """Tokens that the former attend to, drafts apart, summed."""
    prompt_context: Int32[Array, ""]
    """Tokens that the latter attend to, each sequence counted once."""
    prompt_squares: Float[Array, ""]
    """Sum of after^2 - before^2 over their sequences, in tokens: twice the pairs of
    query and key, and the square of its length for a prompt fed in one step."""
    num_drawn: Int32[Array, ""]
    """Tokens that come out in the end: one of each sequence that draws, and the drafts
    that were accepted."""
    num_copied: Int32[Array, ""]
    """Pages copied because others read them, too."""
    num_swapped: Int32[Array, ""]
    """Pages that leave the pool or come back."""
    num_drafts: Int32[Array, ""] | None = None
    """Drafts fed, to be verified; None, like the three that follow, if nobody guesses
    any."""
    draft_steps: Int32[Array, ""] | None = None
    """The most drafts of one sequence: steps of a drafter that guesses one token after
    the other, of all sequences at once."""
    draft_context: Int32[Array, ""] | None = None
    """Tokens that each draft attends to, summed over all of them."""
    num_accepted: Int32[Array, ""] | None = None
    """Drafts that were accepted."""

    @property
    def num_decode_rows(self) -> Num[Array, "..."]:
        """Tokens fed in decoding, drafts among them."""
        return _sum(self.num_decodes, self.num_drafts)

    @property
    def decode_pairs(self) -> Num[Array, "..."]:
        """Pairs of query and key of those."""
        return _sum(self.decode_context, self.draft_context)

    @property
    def num_drawing(self) -> Num[Array, "..."]:
        """Sequences that draw a token, whatever becomes of their drafts."""
        drafts = self.num_accepted
        return self.num_drawn if drafts is None else self.num_drawn - drafts

    @property
    def num_logits(self) -> Num[Array, "..."]:
        """Rows whose logits are asked for: one of each of these, and every draft."""
        return _sum(self.num_drawing, self.num_drafts)


@runtime_checkable
class Cost(Protocol):
    """How long a step takes, in seconds; a pytree whose leaves may be mapped."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step that does something."""
        ...


def of_rows(
    slots: Slots,
    length: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"],
    num_drafts: Int32[Array, " slots"] | None,
    prompt: Int32[Array, " slots"],
) -> Work:
    """Adds up what the rows ask for; what comes out, and pages, are left at zero.

    `num_rows` are fed behind what is written, and `num_drafts` behind these.
    """
    known = slots.num_tokens
    decodes = (num_rows == 1) & (length == known - 1) & (known > prompt)
    reads = (num_rows > 0) & ~decodes
    before, after = length, length + num_rows

    def total(mask: Array, values: Array) -> Array:
        return jnp.sum(jnp.where(mask, values, 0), dtype=values.dtype)

    squares = after.astype(jnp.float32) ** 2 - before.astype(jnp.float32) ** 2
    work = Work(
        num_decodes=jnp.sum(decodes, dtype=jnp.int32),
        num_prompt_rows=total(reads, num_rows),
        decode_context=total(decodes, after),
        prompt_context=total(reads, after),
        prompt_squares=total(reads, squares),
        num_drawn=jnp.zeros((), jnp.int32),
        num_copied=jnp.zeros((), jnp.int32),
        num_swapped=jnp.zeros((), jnp.int32),
    )
    if num_drafts is None:
        return work
    # The k-th draft attends to those before it, and to itself.
    context = num_drafts * after + num_drafts * (num_drafts + 1) // 2
    return work._replace(
        num_drafts=jnp.sum(num_drafts, dtype=jnp.int32),
        draft_steps=jnp.max(num_drafts),
        draft_context=jnp.sum(context, dtype=jnp.int32),
        num_accepted=jnp.zeros((), jnp.int32),
    )


def _sum(count: Array, drafts: Array | None) -> Array:
    return count if drafts is None else count + drafts
