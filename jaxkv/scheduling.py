"""Who runs, who waits, who gives way: policies that decide on integers alone.

`schedule(counts, policy) -> Plan` sees counts of tokens and pages, never a page id, so
the same function drives the real engine and a simulator that has no pages at all. The
places in line are the slots in order of admission; empty ones may stand between.

A policy is a NamedTuple: its type is its kind (static), its fields are its parameters
(arrays), so `vmap` sweeps them.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxkv import tables

NO_LIMIT = 2**30
"""A chunk size, or any other bound, that never binds."""

type Size = int | Int[Array, ""]


class Counts(NamedTuple):
    """What a policy may know."""

    running: Bool[Array, " line"]
    """Places in line whose slot runs a sequence."""
    held: Bool[Array, " line"]
    """Places whose sequence has finished, but whose slot and pages are kept."""
    group: Int32[Array, " line"]
    """First place of the same request; its sequences stand side by side in line, and
    run or give way together."""
    num_tokens: Int32[Array, " line"]
    """Tokens that each sequence has to feed in all: those known of it, or of those with
    which its whole group begins; 0 where another sequence feeds these for it."""
    length: Int32[Array, " line"]
    """Tokens whose K and V are written."""
    num_pages: Int32[Array, " line"]
    """Pages held, alone or with others."""
    owned_pages: Int32[Array, " line"]
    """Pages of a group, each counted at the first of its places: what it would give
    back."""
    copies: Int32[Array, " line"]
    """Pages that a sequence has to copy before its next token is written, 0 or 1."""
    scored_prompt: Bool[Array, " line"]
    """Sequences whose next rows want the log-probabilities of prompt tokens."""
    waiting: Bool[Array, " head"]
    """Requests at the head of the queue, in order, that have arrived."""
    waiting_tokens: Int32[Array, " head"]
    """Tokens each of them has to feed before its next token is drawn; of several
    sequences, those with which all begin."""
    waiting_cached: Int32[Array, " head"]
    """How many of these it would find in the prefix cache, and not feed."""
    waiting_slots: Int32[Array, " head"]
    """Sequences of each."""
    waiting_pages: Int32[Array, " head"]
    """Free pages that all tokens known of each would take."""
    waiting_scored_prompt: Bool[Array, " head"]
    """As `scored_prompt`."""
    free_pages: Int32[Array, ""]
    """Pages that nobody uses, those of the prefix cache included."""
    page_size: Size
    """Token places in a page."""
    max_length: Size
    """Longest sequence a slot can hold."""
    token_budget: Size
    """Rows that one step can feed."""
    spare_logit_rows: Size
    """Rows that may have logits beyond one for each slot."""


class Plan(NamedTuple):
    """What one step does. Whatever is not running or not admitted has zeros."""

    preempt: Bool[Array, " line"]
    """Sequences that give back slot and pages and wait at the head of the queue."""
    places: Int32[Array, " line"]
    """Token places each slot must have; 0 leaves it as it is."""
    num_rows: Int32[Array, " line"]
    """Tokens fed."""
    admit: Bool[Array, " head"]
    """Waiting requests that get a slot, behind all others in line."""
    head_places: Int32[Array, " head"]
    """Token places of those."""
    head_rows: Int32[Array, " head"]
    """Tokens fed of those."""


@runtime_checkable
class Policy(Protocol):
    """The rule of a scheduler."""

    # A property, since a NamedTuple cannot declare a ClassVar; a plain class attribute
    # is one way to have it.
    @property
    def holds_finished(self) -> bool:
        """Whether a finished sequence keeps slot and pages until its batch ends."""
        ...

    def plan(self, counts: Counts) -> Plan:
        """Decides one step.

        The pages of all places asked for, together with those kept, must fit into the
        pool; if they do not, the engine feeds nothing in this step and says so.
        """
        ...


def schedule(counts: Counts, policy: Policy) -> Plan:
    """Decides who runs and what each one feeds in the next step."""
    return policy.plan(counts)


class FCFS(NamedTuple):
    """First come, first served: continuous batching with chunked prefill.

    Sequences that decode feed one token each, then prompts share what is left of the
    token budget in order. A request is admitted with all of its sequences, where there
    are pages for all of its prompt. When pages run out, the latest in line gives way
    until the others can grow, and nobody is admitted in that step. The first in line
    never gives way, so there is always progress.

    Source: Yu et al. 2022 (Orca); Kwon et al. 2023, arXiv:2309.06180, section 4.5;
    Agrawal et al. 2024, arXiv:2403.02310, algorithm 3 (the budget).
    """

    chunk_size: Int32[Array, ""]
    """Rows that one prompt may feed in a step, at least 1."""
    watermark: Int32[Array, ""]
    """Pages kept free at admission while anything runs, at least 0."""

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Grows the running, preempts the latest, admits the next."""
        c = counts
        need = tables.pages_for(c.num_tokens, page_size=c.page_size)
        wanted = c.owned_pages + jnp.maximum(need - c.num_pages, 0) + c.copies
        wanted = jnp.where(c.running, wanted, 0)
        owned = jnp.where(c.running, c.owned_pages, 0)
        total = c.free_pages + jnp.sum(owned, dtype=jnp.int32)
        runs = c.running & (jnp.cumsum(wanted, dtype=jnp.int32) <= total)
        runs &= ~jnp.zeros_like(runs).at[c.group].max(c.running & ~runs)[c.group]
        preempt = c.running & ~runs
        # What a waiting request may take: the first of an idle engine takes anything.
        free = total - jnp.sum(jnp.where(runs, wanted, 0), dtype=jnp.int32)
        idle_first = ~jnp.any(runs) & (_ranks(c.waiting) == 0)
        limit = jnp.where(idle_first, free, free - self.watermark)
        num_free_slots = runs.shape[0] - jnp.sum(runs | c.held, dtype=jnp.int32)
        admit = c.waiting & ~jnp.any(preempt)
        admit &= jnp.cumsum(c.waiting_pages, dtype=jnp.int32) <= limit
        admit &= jnp.cumsum(c.waiting_slots, dtype=jnp.int32) <= num_free_slots
        num_rows, head_rows = share_budget(c, runs, _leading(admit), self.chunk_size)
        # Whoever gets no row waits, and so does everybody behind.
        admit = _leading(admit & (head_rows > 0))
        return Plan(
            preempt=preempt,
            places=jnp.where(runs, c.num_tokens, 0),
            num_rows=num_rows,
            admit=admit,
            head_places=jnp.where(admit, c.waiting_tokens, 0),
            head_rows=jnp.where(admit, head_rows, 0),
        )


def fcfs(*, chunk_size: int | None = None, watermark: int = 0) -> FCFS:
    """Makes an `FCFS` policy.

    Args:
      chunk_size: rows that one prompt may feed in a step; None leaves it to the budget.
      watermark: pages kept free at admission while anything runs.

    Raises:
      ValueError: a parameter is out of its range.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{chunk_size=} must be at least 1, or None")
    if watermark < 0:
        raise ValueError(f"{watermark=} must be at least 0")
    chunk = NO_LIMIT if chunk_size is None else chunk_size
    return FCFS(jnp.asarray(chunk, jnp.int32), jnp.asarray(watermark, jnp.int32))


def share_budget(
    counts: Counts,
    runs: Bool[Array, " line"],
    admit: Bool[Array, " head"],
    chunk_size: Size,
) -> tuple[Int32[Array, " line"], Int32[Array, " head"]]:
    """Shares the token budget: one row for each decoding sequence, then the prompts.

    Args:
      counts: the counts.
      runs: places in line that run in this step.
      admit: waiting requests that could join them.
      chunk_size: rows that one prompt may feed.

    Returns:
      Rows of the places in line, and of the waiting requests.
    """
    c, num_line = counts, runs.shape[0]
    need = jnp.where(runs, c.num_tokens - c.length, 0)
    decodes = need == 1
    prompts = jnp.concatenate(
        [
            jnp.where(decodes, 0, need),
            jnp.where(admit, c.waiting_tokens - c.waiting_cached, 0),
        ]
    )
    prompts = jnp.minimum(prompts, jnp.asarray(chunk_size, jnp.int32))
    scored = jnp.concatenate([c.scored_prompt, c.waiting_scored_prompt])
    in_spare = _fill(jnp.where(scored, prompts, 0), c.spare_logit_rows)
    prompts = jnp.where(scored, in_spare, prompts)
    left = c.token_budget - jnp.sum(decodes, dtype=jnp.int32)
    rows = _fill(prompts, left)
    return rows[:num_line] + decodes.astype(jnp.int32), rows[num_line:]


def _fill(want: Int32[Array, " n"], amount: Size) -> Int32[Array, " n"]:
    """Serves wishes in order until the amount is used up."""
    before = jnp.cumsum(want, dtype=jnp.int32) - want
    return jnp.clip(amount - before, 0, want)


def _ranks(mask: Bool[Array, " n"]) -> Int32[Array, " n"]:
    """How many marked entries stand before each one."""
    ones = mask.astype(jnp.int32)
    return jnp.cumsum(ones, dtype=jnp.int32) - ones


def _leading(mask: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """The marked entries before the first one that is not."""
    return jnp.cumsum(~mask, dtype=jnp.int32) == 0
