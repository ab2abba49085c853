"""Who runs, who waits, who is preempted: policies that decide on integers alone.

`schedule(counts, policy) -> Plan` sees counts of tokens and pages, never a page id, so
the same function drives the real engine and a simulator that has no pages at all. Its
arrays have a place for every slot, in order of admission; empty ones may stand between.

A policy is a NamedTuple: its type is its kind (static), its fields are its parameters
(arrays), so `vmap` sweeps them.
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.memory import Size, demand
from jaxkv.scheduling.attributes import RequestAttributes

NO_LIMIT = 2**30
"""A chunk size, or any other bound, that never binds."""


BLOCKED = 1 << 22
"""Pages of a waiting request that cannot be admitted yet: more than any pool has, so it
blocks those after it without a reduction, which would be a launch. Sums over a queue's
head stay below 2**31."""


LAST = 2**31 - 1
"""Key of requests that come last in an order."""


class Counts(NamedTuple):
    """What a policy may know."""

    running: Bool[Array, " order"]
    """Places whose slot runs a sequence."""
    held: Bool[Array, " order"]
    """Places whose sequence has finished, but whose slot and pages are kept."""
    group: Int32[Array, " order"] | None
    """First place of the same request; its sequences stand side by side, and
    run or are preempted together. None if each has one."""
    num_tokens: Int32[Array, " order"]
    """Tokens that each sequence has to feed in all: those known of it, or of those with
    which its whole group begins; 0 where another sequence feeds these for it."""
    length: Int32[Array, " order"]
    """Tokens whose K and V are written."""
    num_pages: Int32[Array, " order"]
    """Pages held, alone or with others."""
    owned_pages: Int32[Array, " order"]
    """Pages of a group, each counted at the first of its places: what its
    preemption would free."""
    owned_tokens: Int32[Array, " order"]
    """Tokens written to those pages: what a group would have to compute again."""
    swap_pages: Int32[Array, " order"]
    """Pages that would move if the group were swapped out, each counted at the first of
    its places; more than `owned_pages` where others hold some of them, too."""
    copies: Int32[Array, " order"]
    """Pages that a sequence has to copy before its next token is written, 0 or 1."""
    preempted: Bool[Array, " order"]
    """Sequences that were preempted before."""
    scored_prompt: Bool[Array, " order"]
    """Sequences whose next rows want the log-probabilities of prompt tokens."""
    waiting: Bool[Array, " head"]
    """Requests at the head of the queue, in order, that can be admitted. The engine
    leaves out those that have not arrived, or whose swapped pages are still in host
    memory, and gives them `BLOCKED` pages, so that none after them is admitted. A
    policy that wraps another one may unmark more: unmarked rows are skipped, whatever
    their other fields are but for `BLOCKED`."""
    waiting_tokens: Int32[Array, " head"]
    """Tokens each of them has to feed before its next token is drawn; of several
    sequences, those with which all begin."""
    waiting_cached: Int32[Array, " head"]
    """How many of these it would find in the prefix cache, and not feed."""
    waiting_slots: Int32[Array, " head"]
    """Sequences of each."""
    waiting_pages: Int32[Array, " head"]
    """Free pages that all tokens known of each would take."""
    waiting_preempted: Bool[Array, " head"]
    """Requests that were preempted before."""
    waiting_swapped: Bool[Array, " head"]
    """Those of them that are swapped out. Once admitted they have their pages back, and
    feed nothing in the same step."""
    waiting_scored_prompt: Bool[Array, " head"]
    """As `scored_prompt`."""
    free_pages: Int32[Array, ""]
    """Pages that nobody uses, those of the prefix cache included."""
    free_swap_pages: Int32[Array, ""]
    """Pages that can be swapped out."""
    page_size: Size
    """Token places in a page."""
    max_length: Size
    """Longest sequence a slot can hold."""
    token_budget: Size
    """Rows that one step can feed."""
    spare_logit_rows: Size
    """Rows that may have logits beyond one for each slot."""
    drafts: Int32[Array, " order"] | None = None
    """Tokens that a drafter would guess for each sequence that decodes; None if there
    is no drafter."""
    attributes: RequestAttributes | None = None
    """Attributes of the running sequences' requests, by place; times are relative to
    the clock. None means the defaults."""
    waiting_attributes: RequestAttributes | None = None
    """Those of the requests at the head of the queue."""


WAITING_FIELDS = (
    "waiting",
    "waiting_tokens",
    "waiting_cached",
    "waiting_slots",
    "waiting_pages",
    "waiting_preempted",
    "waiting_swapped",
    "waiting_scored_prompt",
    "waiting_attributes",
)
"""Fields of `Counts` with a row for each request at the head of the queue."""


def attributes_of(attributes: RequestAttributes | None) -> RequestAttributes:
    """Returns attributes of `Counts`, the defaults in place of None."""
    return RequestAttributes() if attributes is None else attributes


class Plan(NamedTuple):
    """What one step does. Whatever is not running or not admitted has zeros."""

    preempt: Bool[Array, " order"]
    """Sequences that leave slot and pages and wait at the head of the queue."""
    swap: Bool[Array, " order"]
    """Those of them, by whole groups, whose pages are kept outside the pool; there must
    be room for them. The others have their tokens fed again."""
    places: Int32[Array, " order"]
    """Token places each slot must have; 0 leaves it as it is."""
    num_rows: Int32[Array, " order"]
    """Tokens fed."""
    admit: Bool[Array, " head"]
    """Waiting requests that get a slot, behind all others."""
    head_places: Int32[Array, " head"]
    """Token places of those."""
    head_rows: Int32[Array, " head"]
    """Tokens fed of those."""
    drafts: Int32[Array, " order"] | None = None
    """Drafts fed behind the known tokens, beyond `num_rows` and `places`; None lets
    `schedule` grant what the plan leaves of budget and pages."""


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
    plan = policy.plan(counts)
    if counts.drafts is not None and plan.drafts is None:
        return plan._replace(drafts=_grant_drafts(counts, plan, counts.drafts))
    return plan


def plan_in_order(policy: Policy, counts: Counts, order: Int32[Array, " head"]) -> Plan:
    """Plans as `policy` does with the waiting requests in another order.

    A policy with priorities sorts the queue by them and passes the result to `fcfs`:
    the first marked request that does not fit then blocks those of lower priority. The
    queue itself keeps its order.

    Args:
      policy: the rule that decides.
      counts: the counts, with the queue in order of arrival.
      order: all rows of the queue once, in the order in which they may be admitted, as
        `jnp.argsort(key, stable=True)` returns it.

    Returns:
      The plan, its rows those of `counts`.
    """
    waiting = {
        name: jax.tree.map(lambda x: x[order], getattr(counts, name))
        for name in WAITING_FIELDS
    }
    plan = policy.plan(counts._replace(**waiting))
    row = jnp.arange(order.size, dtype=jnp.int32)
    back = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    return plan._replace(
        admit=plan.admit[back],
        head_places=plan.head_places[back],
        head_rows=plan.head_rows[back],
    )


def plan_by(policy: Policy, counts: Counts, key: Int32[Array, " head"]) -> Plan:
    """Plans as `policy` does, with the waiting requests in ascending order of a key.

    Preempted requests come first, as they hold work already done, and those that cannot
    be admitted yet last. Of equal keys the earlier arrival comes first.
    """
    c = counts
    key = jnp.where(c.waiting, jnp.broadcast_to(key, c.waiting.shape), LAST)
    key = jnp.where(c.waiting_preempted, -LAST, key)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    return plan_in_order(policy, c, order)


def skip_unmarked(counts: Counts) -> Counts:
    """Makes requests that `Counts.waiting` does not mark count no pages and no slots.

    Nor do they count as preempted. Every policy here begins with it, so that sums over
    the queue are of marked requests.
    """
    c = counts
    return c._replace(
        waiting_pages=jnp.where(
            c.waiting | (c.waiting_pages == BLOCKED), c.waiting_pages, 0
        ),
        waiting_slots=jnp.where(c.waiting, c.waiting_slots, 0),
        waiting_preempted=c.waiting & c.waiting_preempted,
    )


def admissible(counts: Counts, fits: Bool[Array, " head"]) -> Bool[Array, " head"]:
    """Marks the waiting requests before the first one that does not fit.

    Rows that `Counts.waiting` does not mark block no request.
    """
    return counts.waiting & arrays.before_first(counts.waiting & ~fits)


def limit_draft_lengths(
    wanted: Int32[Array, " n"],
    *,
    num_tokens: Int32[Array, " n"],
    length: Int32[Array, " n"],
    known: Int32[Array, " n"],
    limit: Int32[Array, " n"],
) -> Int32[Array, " n"]:
    """Limits what a drafter would guess to what `Counts.drafts` may have.

    None where it is not the last known token, and that alone, that is fed next, and
    where the answer would end before them.

    Args:
      wanted: drafts of each sequence; 0 of one that others wait for.
      num_tokens: as in `Counts`.
      length: as in `Counts`.
      known: tokens known of each sequence.
      limit: tokens at which it ends.
    """
    decodes = (num_tokens - length == 1) & (length == known - 1)
    # The last token of an answer is drawn, not drafted.
    most = jnp.maximum(limit - known - 1, 0)
    return jnp.where(decodes, jnp.clip(wanted, 0, most), 0)


def _grant_drafts(
    counts: Counts, plan: Plan, wanted: Int32[Array, " order"]
) -> Int32[Array, " order"]:
    """Grants drafts, in order, from what a plan leaves of token budget and free pages.

    So a draft never delays a prompt and never costs anybody his pages. Sequences that
    are not fed their last known token alone get none.
    """
    c, total = counts, functools.partial(jnp.sum, dtype=jnp.int32)
    decodes = (plan.num_rows == 1) & (c.num_tokens - c.length == 1)
    rows = _fill(
        jnp.where(decodes, wanted, 0),
        c.token_budget - total(plan.num_rows) - total(plan.head_rows),
    )
    have = jnp.maximum(c.num_pages * c.page_size, plan.places)
    need = demand.missing_pages(have, plan.places + rows, page_size=c.page_size)
    taken = jnp.where(
        plan.places > 0, missing_pages_of_running(c._replace(num_tokens=plan.places)), 0
    )
    taken = total(taken) + total(jnp.where(plan.admit, c.waiting_pages, 0))
    short = jnp.cumsum(need, dtype=jnp.int32) > c.free_pages - taken
    return jnp.where(short | jnp.any(plan.preempt), 0, rows)


def missing_pages_of_running(counts: Counts) -> Int32[Array, " order"]:
    """Pages that each running sequence takes to feed all its tokens, copies too."""
    c = counts
    need = demand.pages_for(c.num_tokens, page_size=c.page_size)
    missing = jnp.maximum(need - c.num_pages, 0) + c.copies
    return jnp.where(c.running, missing, 0)


def share_budget(
    counts: Counts,
    runs: Bool[Array, " order"],
    admit: Bool[Array, " head"],
    chunk_size: Size,
) -> tuple[Int32[Array, " order"], Int32[Array, " head"]]:
    """Shares the token budget: one row for each decoding sequence, then the prompts.

    `runs` marks places that run in this step, `admit` requests that could join
    them, a part of `Counts.waiting`; one prompt feeds `chunk_size` rows at most.

    Returns:
      Rows of the places, and of the waiting requests.
    """
    c, num_line = counts, runs.shape[0]
    need = jnp.where(runs, c.num_tokens - c.length, 0)
    decodes = need == 1
    prompts = jnp.concatenate(
        [
            jnp.where(decodes, 0, need),
            jnp.where(
                admit & ~c.waiting_swapped, c.waiting_tokens - c.waiting_cached, 0
            ),
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
    if isinstance(amount, int) and amount == 0:
        return jnp.zeros_like(want)
    before = jnp.cumsum(want, dtype=jnp.int32) - want
    return jnp.clip(amount - before, 0, want)


def any_of_group(counts: Counts, mask: Bool[Array, " order"]) -> Bool[Array, " order"]:
    """Marks all places of a group of which any is marked."""
    return arrays.reduce_groups(mask, counts.group, "max")
