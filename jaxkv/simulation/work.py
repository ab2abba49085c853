"""The work of a step, and the interface of a cost model."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from jaxkv.ledger import Slots


class Work(NamedTuple):
    """Work of one step, the input of a cost model."""

    num_decodes: Int32[Array, ""]
    """Sequences that decode: they feed the last token sampled, and drafts after it."""
    num_prompts: Int32[Array, ""]
    """Sequences in prefill that feed tokens."""
    num_prompt_rows: Int32[Array, ""]
    """Tokens fed in prefill, recomputation included."""
    decode_context: Int32[Array, ""]
    """Context lengths of the sequences that decode, drafts excluded, summed."""
    prompt_context: Int32[Array, ""]
    """Context lengths of the sequences in prefill after the step, summed."""
    prompt_squares: Float[Array, ""]
    """Sum of after^2 - before^2 over the sequences in prefill, where before and after
    are their context lengths: twice the number of query-key pairs under causal
    attention. It is length^2 for a prompt fed in one step."""
    num_drawn: Int32[Array, ""]
    """Tokens emitted: one of each sequence that samples, and the accepted drafts."""
    num_copied: Int32[Array, ""]
    """Pages copied before a write because they are shared (copy-on-write)."""
    num_swapped: Int32[Array, ""]
    """Pages swapped out or in."""
    num_drafts: Int32[Array, ""] | None = None
    """Drafts fed. All counts of drafts are None without speculation."""
    draft_steps: Int32[Array, ""] | None = None
    """Longest draft of a sequence: the steps of an autoregressive drafter that drafts
    for all sequences at once."""
    draft_context: Int32[Array, ""] | None = None
    """Context lengths of the drafts, summed."""
    num_accepted: Int32[Array, ""] | None = None
    """Drafts accepted."""

    @property
    def num_decode_rows(self) -> Num[Array, "..."]:
        """Tokens fed in decoding, drafts included."""
        return _sum(self.num_decodes, self.num_drafts)

    @property
    def decode_pairs(self) -> Num[Array, "..."]:
        """Query-key pairs of the tokens fed in decoding."""
        return _sum(self.decode_context, self.draft_context)

    @property
    def num_drawing(self) -> Num[Array, "..."]:
        """Sequences that sample a token."""
        drafts = self.num_accepted
        return self.num_drawn if drafts is None else self.num_drawn - drafts

    @property
    def num_logits(self) -> Num[Array, "..."]:
        """Rows with logits: one per sequence that samples, and one per draft."""
        return _sum(self.num_drawing, self.num_drafts)


@runtime_checkable
class Cost(Protocol):
    """A cost model: the time of a step. A pytree whose leaves may be mapped."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s; ignored if the step does no work."""
        ...


def work_of_rows(
    slots: Slots,
    length: Int32[Array, " slots"],
    num_rows: Int32[Array, " slots"],
    num_drafts: Int32[Array, " slots"] | None,
    prompt: Int32[Array, " slots"],
    context: Int32[Array, " slots"] | None = None,
) -> Work:
    """Returns the work of rows and drafts; emitted tokens and pages are set to 0.

    Each slot feeds `num_rows` tokens after its written ones, then `num_drafts` drafts.
    `context` tokens of a prefix cache come before them, see `Workload.context`.
    """
    num_tokens = slots.num_tokens
    decodes = (num_rows == 1) & (length == num_tokens - 1) & (num_tokens > prompt)
    reads = (num_rows > 0) & ~decodes
    before = length if context is None else length + context
    after = before + num_rows

    def total(mask: Array, values: Array) -> Array:
        return jnp.sum(jnp.where(mask, values, 0), dtype=values.dtype)

    squares = after.astype(jnp.float32) ** 2 - before.astype(jnp.float32) ** 2
    work = Work(
        num_decodes=jnp.sum(decodes, dtype=jnp.int32),
        num_prompts=jnp.sum(reads, dtype=jnp.int32),
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
