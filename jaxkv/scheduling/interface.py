"""Interface of a scheduling policy: `Counts` in, `Plan` out.

A policy decides admission, preemption and the rows of the next step from counts of
tokens and pages. It sees no page ids, so the same policy drives the engine and the
simulator. Arrays over "order" have an element for each slot in order of admission; some
slots may be empty.

A policy is a NamedTuple of arrays. Its type is static; its fields are parameters that
`vmap` can sweep.
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import Size, missing_pages, pages_for
from jaxkv.scheduling.attributes import RequestAttributes

NO_LIMIT = 2**30
"""A bound, for example a chunk size, that never applies."""


BLOCKED = 1 << 22
"""Pages of a waiting request that cannot be admitted yet: more than any pool has, so
that the request blocks those after it without a reduction, which would be a kernel
launch. Sums over the head of a queue stay below 2**31."""


LAST_KEY = 2**31 - 1
"""Sort key of requests that come last."""


class Counts(NamedTuple):
    """Input of a policy: counts of tokens, pages and slots."""

    running: Bool[Array, " order"]
    """Slots that run a sequence."""
    held: Bool[Array, " order"]
    """Slots whose sequence has finished, but whose pages are still held."""
    group: Int32[Array, " order"] | None
    """Index of the first slot of the same request. Sequences of a request have adjacent
    slots, and run or are preempted together. None if each request has one sequence."""
    target_length: Int32[Array, " order"]
    """Tokens that each sequence must have fed in all: its known tokens, or the common
    tokens of its group; 0 while another sequence feeds the common tokens."""
    length: Int32[Array, " order"]
    """Tokens whose K and V are written."""
    num_pages: Int32[Array, " order"]
    """Pages held, shared ones included."""
    owned_pages: Int32[Array, " order"]
    """Pages that preemption of the group would free, each counted at its first slot.
    Pages that only this sequence uses are free afterwards even if they are cached."""
    owned_tokens: Int32[Array, " order"]
    """Tokens on those pages that are not cached, which the group would have to
    recompute."""
    swap_pages: Int32[Array, " order"]
    """Pages that would move if the group were swapped out, each counted at its first
    slot. More than `owned_pages` if some pages are shared outside the group."""
    copies: Int32[Array, " order"]
    """Pages to copy before the next token is written (copy-on-write), 0 or 1."""
    preempted: Bool[Array, " order"]
    """Sequences that were preempted before."""
    scored_prompt: Bool[Array, " order"]
    """Sequences in prefill whose prompt needs log-probabilities."""
    waiting: Bool[Array, " head"]
    """Requests at the head of the queue, in order, that can be admitted. Requests that
    have not arrived, or whose swapped pages are in host memory, are not marked and have
    `BLOCKED` pages, so that no request after them is admitted. A policy that wraps
    another may unmark more rows, which the inner policy skips."""
    waiting_tokens: Int32[Array, " head"]
    """Tokens to feed before the request can sample; of several sequences, their common
    tokens."""
    waiting_cached: Int32[Array, " head"]
    """Tokens among these that are in the prefix cache and need not be fed."""
    waiting_slots: Int32[Array, " head"]
    """Number of sequences."""
    waiting_pages: Int32[Array, " head"]
    """Free pages needed for all known tokens."""
    waiting_preempted: Bool[Array, " head"]
    """Requests that were preempted before."""
    waiting_swapped: Bool[Array, " head"]
    """Requests that are swapped out. In the step of their admission they get their
    pages back and feed no tokens."""
    waiting_scored_prompt: Bool[Array, " head"]
    """Requests whose prompt needs log-probabilities."""
    free_pages: Int32[Array, ""]
    """Free pages, idle pages of the prefix cache included."""
    free_swap_pages: Int32[Array, ""]
    """Free pages of the swap space."""
    page_size: Size
    """Tokens per page."""
    max_length: Size
    """Largest length of a sequence, in tokens."""
    token_budget: Size
    """Largest number of tokens fed in a step."""
    spare_logit_rows: Size
    """Logit rows of a step in addition to one per slot."""
    drafts: Int32[Array, " order"] | None = None
    """Requested draft length of each sequence that decodes; None without a drafter."""
    attributes: RequestAttributes | None = None
    """Request attributes of the running sequences, with times relative to the clock.
    None means the defaults."""
    waiting_attributes: RequestAttributes | None = None
    """Attributes of the requests at the head of the queue."""
    shared_pages: Int32[Array, ""] | None = None
    """Used pages that are in no `owned_pages`: cached pages of several sequences. None
    without a prefix cache."""
    lockstep: Bool[Array, " order"] | None = None
    """Beams: those of a request decode in the same step. None without beam search."""


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
"""Fields of `Counts` with an element for each request at the head of the queue."""


def attributes_of(attributes: RequestAttributes | None) -> RequestAttributes:
    """Returns the attributes, or the defaults for None."""
    return RequestAttributes() if attributes is None else attributes


class Plan(NamedTuple):
    """Output of a policy; zeros for slots and requests that do not run."""

    preempt: Bool[Array, " order"]
    """Sequences to preempt; they return to the head of the queue."""
    swap: Bool[Array, " order"]
    """Preempted sequences, by whole groups, to swap out; their pages must fit into the
    swap space. The rest are recomputed."""
    places: Int32[Array, " order"]
    """Token places to reserve in all; 0 leaves the reservation unchanged."""
    num_rows: Int32[Array, " order"]
    """Tokens to feed."""
    admit: Bool[Array, " head"]
    """Waiting requests to admit, to slots after all occupied ones."""
    head_places: Int32[Array, " head"]
    """Token places to reserve for admitted requests."""
    head_rows: Int32[Array, " head"]
    """Tokens to feed of admitted requests."""
    drafts: Int32[Array, " order"] | None = None
    """Granted draft lengths, in addition to `num_rows` and `places`. With None,
    `schedule` grants drafts from the remaining token budget and pages."""


_MASKS = ("preempt", "swap", "admit")
_HEAD_FIELDS = ("admit", "head_places", "head_rows")


@runtime_checkable
class Policy(Protocol):
    """A scheduling policy."""

    # A property, since a NamedTuple cannot declare a ClassVar. A policy may define it
    # as a plain class attribute.
    @property
    def holds_finished(self) -> bool:
        """True if a finished sequence keeps slot and pages until its batch ends."""
        ...

    def plan(self, counts: Counts) -> Plan:
        """Plans one step.

        The reserved pages of the plan must fit into the pool. If they do not, the step
        feeds no tokens, and `StepInfo.enough` is False.
        """
        ...


def check_policy(policy: object, name: str = "policy") -> None:
    """Checks the type of a policy.

    Raises:
      ValueError: it is no `Policy`, or no pytree of arrays, so that no program can take
        it; the message begins with `name`.
    """
    validation.instance(name, policy, Policy)
    shown = f"{name}={validation.format_value(policy)}"
    leaves, structure = jax.tree.flatten(policy)
    numbers = jax.Array | np.ndarray | np.generic | bool | int | float
    if structure == jax.tree.structure(0) or not all(
        isinstance(leaf, numbers) for leaf in leaves
    ):
        raise ValueError(
            f"{shown} must be a NamedTuple of arrays, or another pytree of arrays"
        )
    validation.boolean(f"{name}.holds_finished", holds_finished(policy))


def overtaking_bound_s(policy: object) -> float | None:
    """Returns the documented bound of overtaking of a policy in s.

    A policy with an attribute `overtaking_s` admits a request before all requests that
    arrive later than this time after it. Infinity means that a request may starve; None
    means that the policy documents no bound.
    """
    bound_s = getattr(policy, "overtaking_s", None)
    return None if bound_s is None else float(bound_s)


def holds_finished(policy: object) -> bool:
    """Returns `Policy.holds_finished` of a policy and of the policies in its fields.

    A policy that wraps another one keeps the property.
    """
    inner = policy if isinstance(policy, tuple) else ()
    return getattr(policy, "holds_finished", False) or any(map(holds_finished, inner))


@runtime_checkable
class QueueKey(Protocol):
    """An order of the waiting requests, a pytree of arrays."""

    def __call__(self, counts: Counts) -> Array:
        """Returns the sort key of each waiting request, smallest first."""
        ...


class OrderedQueue(NamedTuple):
    """Admits waiting requests in the order of a key; `inner` decides all else."""

    key: QueueKey
    inner: Policy

    @property
    def holds_finished(self) -> bool:
        """That of `inner`."""
        return holds_finished(self.inner)

    @property
    def overtaking_s(self) -> float | None:
        """That of the key, if `inner` admits in the order of the queue."""
        is_ordered = overtaking_bound_s(self.inner) == 0.0
        return overtaking_bound_s(self.key) if is_ordered else None

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = skip_unmarked(counts)
        return plan_by(self.inner, c, jnp.broadcast_to(self.key(c), c.waiting.shape))


def schedule(counts: Counts, policy: Policy) -> Plan:
    """Plans the next step by a policy, and makes the plan valid.

    A policy is code of its own, and an invalid plan would change tokens or lose
    sequences. Values out of range are replaced by the nearest valid ones:

    * Only running sequences are preempted or swapped out, and only waiting requests are
      admitted. `ledger.preempt_groups` then preempts whole requests.
    * Rows are at least 0, and at most the tokens left to feed. Prompts with
      log-probabilities share the spare logit rows in order. Beams of a request decode
      in the same step. `ledger.SlotPlan.within` then applies the token budget.
    * Places cover the rows, up to `Counts.max_length`.
    * Drafts are at most those of `Counts.drafts`. With `Plan.drafts` None they come
      from the remaining budget and pages.

    Raises:
      ValueError: the policy returns no `Plan`, or a field of it has a wrong shape or
        type; the message names the field.
    """
    validation.instance("policy", policy, Policy)
    name = f"{type(policy).__name__}.plan"
    plan = policy.plan(counts)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{name} returns {validation.format_value(plan)}, which must be a Plan"
        )
    c = counts
    plan = _check_fields(name, counts, plan)
    preempt = plan.preempt & c.running
    stays = c.running & ~preempt
    admit = plan.admit & c.waiting
    num_rows, head_rows = _limit_rows(c, plan, stays, admit)
    min_places = jnp.where(num_rows > 0, c.length + num_rows, 0)
    head_min_places = jnp.where(head_rows > 0, c.waiting_cached + head_rows, 0)
    places = jnp.clip(plan.places, min_places, c.max_length)
    head_places = jnp.clip(plan.head_places, head_min_places, c.max_length)
    wanted = plan.drafts
    plan = Plan(
        preempt=preempt,
        swap=plan.swap & preempt,
        # A sequence that waits to be forked must have no pages.
        places=jnp.where(stays & (c.target_length > 0), places, 0),
        num_rows=num_rows,
        admit=admit,
        head_places=jnp.where(admit, head_places, 0),
        head_rows=head_rows,
    )
    if c.drafts is None:
        return plan
    drafts = _grant_drafts(c, plan, c.drafts)
    if wanted is not None:
        decodes = (num_rows == 1) & (c.target_length - c.length == 1)
        drafts = jnp.clip(wanted, 0, jnp.where(decodes, c.drafts, 0))
    places = jnp.minimum(plan.places, c.max_length - drafts)
    return plan._replace(places=places, drafts=drafts)


def _limit_rows(
    counts: Counts,
    plan: Plan,
    stays: Bool[Array, " order"],
    admit: Bool[Array, " head"],
) -> tuple[Int32[Array, " order"], Int32[Array, " head"]]:
    """Returns valid `num_rows` and `head_rows`, see `schedule`."""
    c = counts
    num_slots = stays.shape[0]
    remaining = jnp.where(stays, jnp.maximum(c.target_length - c.length, 0), 0)
    head_remaining = c.waiting_tokens - c.waiting_cached
    head_remaining = jnp.where(admit & ~c.waiting_swapped, head_remaining, 0)
    num_rows = jnp.clip(plan.num_rows, 0, remaining)
    head_rows = jnp.clip(plan.head_rows, 0, head_remaining)
    decodes = remaining == 1
    if c.lockstep is not None:
        joint = c.lockstep & decodes
        fed = any_of_group(c, joint & (num_rows > 0))
        num_rows = jnp.where(joint & fed, 1, num_rows)
    scored = jnp.concatenate([c.scored_prompt & ~decodes, c.waiting_scored_prompt])
    rows = jnp.concatenate([num_rows, head_rows])
    in_spare = _grant_in_order(jnp.where(scored, rows, 0), c.spare_logit_rows)
    rows = jnp.where(scored, in_spare, rows)
    return rows[:num_slots], rows[num_slots:]


def _check_fields(name: str, counts: Counts, plan: Plan) -> Plan:
    """Checks shapes and types; returns the plan with int32 arrays and masks."""
    fields: dict[str, Array] = {}
    for field, value in plan._asdict().items():
        if field == "drafts" and value is None:
            continue
        shape = (counts.waiting if field in _HEAD_FIELDS else counts.running).shape
        dtype = jnp.dtype(bool if field in _MASKS else jnp.int32)
        kind = jnp.bool_ if field in _MASKS else jnp.integer
        try:
            array = jnp.asarray(value)
            text = f"{array.dtype}{list(array.shape)}"
        except (TypeError, ValueError):
            array = None
            text = validation.format_value(value)
        if (
            array is None
            or array.shape != shape
            or not jnp.issubdtype(array.dtype, kind)
        ):
            raise ValueError(
                f"{name} returns {field}={text}, which must be {dtype}{list(shape)}"
            )
        fields[field] = array.astype(dtype)
    return plan._replace(**fields)


def _grant_drafts(
    counts: Counts, plan: Plan, wanted: Int32[Array, " order"]
) -> Int32[Array, " order"]:
    """Grants drafts, in order of slots, from the remaining token budget and free pages.

    A draft therefore never delays a prompt and never causes a preemption. Only
    sequences that decode get drafts.
    """
    c = counts
    total = functools.partial(jnp.sum, dtype=jnp.int32)
    decodes = (plan.num_rows == 1) & (c.target_length - c.length == 1)
    rows = _grant_in_order(
        jnp.where(decodes, wanted, 0),
        c.token_budget - total(plan.num_rows) - total(plan.head_rows),
    )
    have = jnp.maximum(c.num_pages * c.page_size, plan.places)
    need = missing_pages(have, plan.places + rows, page_size=c.page_size)
    taken = jnp.where(
        plan.places > 0, pages_to_grow(c._replace(target_length=plan.places)), 0
    )
    taken = total(taken) + total(jnp.where(plan.admit, c.waiting_pages, 0))
    short = jnp.cumsum(need, dtype=jnp.int32) > c.free_pages - taken
    return jnp.where(short | jnp.any(plan.preempt), 0, rows)


def plan_in_order(policy: Policy, counts: Counts, order: Int32[Array, " head"]) -> Plan:
    """Plans by a policy with the waiting requests in another order.

    A policy with priorities sorts the queue by them and calls `fcfs`: the first marked
    request that does not fit then blocks those of lower priority. The queue of the
    engine keeps its order.

    Args:
      policy: the inner policy.
      counts: the counts, with the queue in its order.
      order: permutation of the waiting requests, in order of admission, for example
        `jnp.argsort(key, stable=True)`.

    Returns:
      The plan, indexed as `counts`.
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
    """Plans by a policy with the waiting requests in ascending order of a key.

    Preempted requests come first, since part of their work is done, and requests that
    cannot be admitted yet come last. Equal keys keep the order of the queue.
    """
    c = counts
    key = jnp.where(c.waiting, jnp.broadcast_to(key, c.waiting.shape), LAST_KEY)
    key = jnp.where(c.waiting_preempted, -LAST_KEY, key)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    return plan_in_order(policy, c, order)


def skip_unmarked(counts: Counts) -> Counts:
    """Sets pages, slots and preemptions of unmarked waiting requests to 0.

    Sums over the queue are then sums over the requests that `Counts.waiting` marks.
    Requests with `BLOCKED` pages keep them. Every policy of the library calls this
    function first.
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

    Requests that `Counts.waiting` does not mark block no request.
    """
    return counts.waiting & arrays.before_first(counts.waiting & ~fits)


def limit_draft_lengths(
    wanted: Int32[Array, " n"],
    *,
    target_length: Int32[Array, " n"],
    length: Int32[Array, " n"],
    num_tokens: Int32[Array, " n"],
    limit: Int32[Array, " n"],
) -> Int32[Array, " n"]:
    """Limits requested draft lengths to those allowed in `Counts.drafts`.

    Only sequences that decode can have drafts, that is, those whose next row is exactly
    their last known token. Drafts beyond the limit of the answer are cut off.

    Args:
      wanted: requested draft length of each sequence.
      target_length: as in `Counts`.
      length: as in `Counts`.
      num_tokens: number of known tokens of each sequence.
      limit: largest length of each sequence, in tokens.
    """
    decodes = (target_length - length == 1) & (length == num_tokens - 1)
    # The last token of an answer is sampled, not drafted.
    max_drafts = jnp.maximum(limit - num_tokens - 1, 0)
    return jnp.where(decodes, jnp.clip(wanted, 0, max_drafts), 0)


def pages_to_grow(counts: Counts) -> Int32[Array, " order"]:
    """Returns the new pages that each running sequence needs for all of its tokens.

    Pages for copy-on-write are included.
    """
    c = counts
    need = pages_for(c.target_length, page_size=c.page_size)
    missing = jnp.maximum(need - c.num_pages, 0) + c.copies
    return jnp.where(c.running, missing, 0)


def share_budget(
    counts: Counts,
    runs: Bool[Array, " order"],
    admit: Bool[Array, " head"],
    chunk_size: Size,
) -> tuple[Int32[Array, " order"], Int32[Array, " head"]]:
    """Distributes the token budget: one row per decoding sequence, then the prompts.

    Args:
      counts: the counts.
      runs: slots that run in this step.
      admit: waiting requests that could be admitted.
      chunk_size: largest number of rows of one prompt.

    Returns:
      Rows of the slots, and rows of the waiting requests.
    """
    c = counts
    num_line = runs.shape[0]
    need = jnp.where(runs, c.target_length - c.length, 0)
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
    in_spare = _grant_in_order(jnp.where(scored, prompts, 0), c.spare_logit_rows)
    prompts = jnp.where(scored, in_spare, prompts)
    left = c.token_budget - jnp.sum(decodes, dtype=jnp.int32)
    rows = _grant_in_order(prompts, left)
    return rows[:num_line] + decodes.astype(jnp.int32), rows[num_line:]


def keep_first(counts: Counts, runs: Bool[Array, " order"]) -> Bool[Array, " order"]:
    """Adds the first running request to those that run.

    All pages of the pool suffice for it, also where `Counts.owned_pages` leave out
    pages that requests share.
    """
    c = counts
    if c.shared_pages is None:
        return runs
    place = jnp.arange(runs.shape[0], dtype=jnp.int32)
    group = place if c.group is None else c.group
    first = jnp.min(jnp.where(c.running, group, place.size))
    return runs | (c.running & (group == first))


def _grant_in_order(want: Int32[Array, " n"], amount: Size) -> Int32[Array, " n"]:
    """Grants requested amounts in order until the total is used up."""
    if isinstance(amount, int) and amount == 0:
        return jnp.zeros_like(want)
    before = jnp.cumsum(want, dtype=jnp.int32) - want
    return jnp.clip(amount - before, 0, want)


def any_of_group(counts: Counts, mask: Bool[Array, " order"]) -> Bool[Array, " order"]:
    """Marks all slots of each group with a marked slot."""
    return arrays.reduce_groups(mask, counts.group, "max")
