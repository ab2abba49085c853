"""The serving system as one value: its static bounds and its state.

Everything a step needs stands here as arrays of fixed size: the pages and their pool,
the tables, the sequences with their tokens and parameters, the slots, the queue. A
state can be snapshotted, branched, replayed, and mapped over with `vmap`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import ledger, validation
from jaxkv.ledger import Ledger, Slots
from jaxkv.memory import kv_pages, page_pool, page_table, swap_buffer
from jaxkv.memory.prefix_cache import PrefixCache, make_prefix_cache
from jaxkv.sampling import Params, beam_search, greedy_params
from jaxkv.scheduling.attributes import RequestAttributes

TILE = 64
"""Rows that every reduction sees under `numerics="reproducible"`."""

REASONS = (None, "stop", "length", "cancelled", "nan")
"""Why a sequence ended, by the code that stands in `Sequences.reason`."""
NOT_ENDED, STOPPED, FULL, CANCELLED, NOT_A_NUMBER = range(5)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The static bounds of an engine. Each one fixes a shape, none a policy."""

    num_pages: int = 512
    """Pages in the pool."""
    page_size: int = 16
    """Token places in a page. With 1, XLA copies the whole pool in every step on a CPU
    (see experiments/LOG.md); from 2 on it stays in place."""
    max_slots: int = 8
    """Sequences that run at once."""
    max_length: int = 512
    """Longest sequence, prompt and answer, in tokens."""
    max_sequences: int = 64
    """Sequences known at once: waiting, running, and finished but not drained."""
    queue_capacity: int = 64
    """Requests that can wait."""
    token_budget: int = 64
    """Rows that a step feeds when it feeds more than one a slot."""
    max_logit_rows: int = 0
    """Rows of a step that can have logits; 0 means one for each slot, which leaves none
    for the log-probabilities of prompts."""
    max_stop_tokens: int = 4
    """Token ids, the model's own end token among them, that can end a sequence."""
    max_logprobs: int = 0
    """Alternatives reported with each token."""
    max_beams: int = 0
    """Widest beam search; 0 leaves it out of the program."""
    max_swap_pages: int = 0
    """Pages of the staging buffer, through which preempted requests are swapped out; 0
    leaves it out of the program, and their tokens are fed again."""
    max_drafts: int = 0
    """Tokens that a drafter can guess for a slot in a step; 0 leaves speculation out of
    the program."""
    num_draft_buckets: int = 1
    """Programs that verify drafts: of `max_drafts` for each slot, of half as many, a
    quarter, and so on. Few drafts then cost less; each takes its time to compile."""
    queue_head: int = 0
    """Waiting requests that the policy sees, at most 511; 0 means `max_slots`."""
    submit_width: int = 8
    """Requests that one call of `submit` hands over."""
    steps_per_call: int = 16
    """Steps between two looks of the host."""
    prefix_cache: bool = False
    """Whether full pages are kept for requests that begin with the same tokens."""
    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """What K and V are kept in: the model's type, or 8 bits and a scale for each token
    and head, which holds about twice as many tokens as 16 bits."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """Whether results are batch-invariant, the same bits whatever runs beside, or the
    program is the fastest."""
    seed: int = 0
    """Draws of requests that bring no seed of their own."""
    debug: bool = False
    """Whether each step also counts violated invariants; `Engine` raises an
    `InvariantError` at the first."""

    def __post_init__(self) -> None:
        """Refuses bounds of another type, and those without room for one sequence.

        NumPy's numbers become Python's: a configuration is written to files and hashed.

        Raises:
          ValueError: a field is not usable; the message shows it.
        """
        off = (
            "max_logit_rows",
            "max_logprobs",
            "max_beams",
            "max_swap_pages",
            "max_drafts",
        )
        bounds = {
            "max_length": 2,
            "queue_head": (0, 512),
            "seed": (0, 2**64),
            **dict.fromkeys(off, 0),
        }
        validation.check_fields(self, **bounds)
        if self.token_budget < self.max_slots:
            raise ValueError(
                f"token_budget={self.token_budget} must be at least "
                f"max_slots={self.max_slots}, "
                "one row for each decoding slot"
            )
        if self.max_logit_rows and self.max_logit_rows < self.max_slots:
            raise ValueError(
                f"max_logit_rows={self.max_logit_rows} must be 0 or at least "
                f"max_slots={self.max_slots}"
            )
        if self.queue_capacity + self.max_slots >= validation.INT32:
            raise ValueError(
                f"queue_capacity={self.queue_capacity} and "
                f"max_slots={self.max_slots} must stay below 2**31"
            )
        if self.max_beams > self.max_slots:
            raise ValueError(
                f"max_beams={self.max_beams} must be in [0, max_slots={self.max_slots}]"
            )
        if self.max_drafts >= self.max_length:
            raise ValueError(
                f"max_drafts={self.max_drafts} must be in [0, "
                f"max_length={self.max_length}): a draft takes "
                "a token place"
            )

    @property
    def num_head(self) -> int:
        """Waiting requests that the policy sees."""
        return self.queue_head or self.max_slots

    @property
    def max_pages_per_slot(self) -> int:
        """Pages that the longest sequence needs."""
        return -(-self.max_length // self.page_size)

    @property
    def num_logit_rows(self) -> int:
        """Rows of a step that can have logits, drafts apart.

        The first `max_slots` draw tokens.
        """
        return self.max_logit_rows or self.max_slots

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Drafts of a slot for which there is a program, fewest first; 0 apart."""
        halves = (self.max_drafts >> i for i in range(self.num_draft_buckets))
        return tuple(sorted({half for half in halves if half > 0}))

    @property
    def emit_width(self) -> int:
        """Tokens that a sequence can gain in a step: all drafts, and one more."""
        return 1 + self.max_drafts


class Sequences(NamedTuple):
    """Text and settings of sequences; a row outlives its slot and any preemption.

    The progress of sequences is in the ledger.
    """

    tokens: Int32[Array, "sequences max_length"]
    """Prompt, then answer."""
    reason: Int32[Array, " sequences"]
    """Why the sequence ended: an index into `REASONS`."""
    request_id: Int32[Array, " sequences"]
    """The caller's name for the request that owns the sequence."""
    group: Int32[Array, " sequences"]
    """Row of the request's first sequence: the request's index in the ledger."""
    members: Int32[Array, "sequences slots"]
    """In the row of a first sequence: rows of all sequences of its request, by sample;
    `NO_SEQUENCE` beyond."""
    prompt_length: Int32[Array, " sequences"]
    """Tokens of the prompt."""
    limit: Int32[Array, " sequences"]
    """Tokens at which it ends, prompt included."""
    stop_tokens: Int32[Array, "sequences max_stop_tokens"]
    """Tokens that end it; -1 where unused."""
    params: Params
    """Sampling parameters."""
    salt: UInt32[Array, " sequences"]
    """Cached pages are found only by sequences of the same salt."""
    use_prefix_cache: Bool[Array, " sequences"]
    """Whether it starts on cached pages, and leaves its own in the cache."""
    keep_logprobs: Bool[Array, " sequences"]
    """Whether the log-probabilities of its tokens are kept."""
    keep_prompt_logprobs: Bool[Array, " sequences"]
    """Whether those of its prompt are kept, too."""
    logprobs: Float[Array, "sequences max_length"]
    """Log-probability of each token given those before it, where kept; else 0."""
    top_ids: Int32[Array, "sequences max_length max_logprobs"]
    """Most likely tokens at each place, where kept; at prompt places only where
    `keep_prompt_logprobs`, too."""
    top_logprobs: Float[Array, "sequences max_length max_logprobs"]
    """Their log-probabilities."""
    score: Float[Array, " sequences"]
    """Score of an answer of a finished beam search; else 0."""
    arrival: Int32[Array, "sequences 2"]
    """When the request arrives, (seconds, microseconds)."""
    attributes: RequestAttributes
    """Attributes of the request, for the policy."""
    num_cached: Int32[Array, " sequences"]
    """Prompt tokens whose K and V were found rather than computed."""
    num_swapped: Int32[Array, " sequences"]
    """Preemptions that kept the pages of the sequence."""


class Search(NamedTuple):
    """What beam search knows beside the sequences.

    Searches stand in the row of their request's first sequence, histories in the row
    of each beam.
    """

    width: Int32[Array, " sequences"]
    """Beams of the request, 0 if it does not search."""
    length_penalty: Float[Array, " sequences"]
    """As in `beam_search.BeamParams`."""
    early_stopping: Int32[Array, " sequences"]
    """As in `beam_search.BeamParams`."""
    groups: beam_search.Beams
    """The searches."""
    parents: Int32[Array, "sequences max_length"]
    """The beam that was continued by each token of the history; 0 in the prompt."""
    path: Int32[Array, "sequences max_length"]
    """Tokens of each beam from the first one on, as of its last preemption."""


class EngineState(NamedTuple):
    """The whole engine."""

    pages: kv_pages.Pages
    pool: page_pool.Pool
    table: page_table.Table
    ledger: Ledger
    """Queue, slots, progress and clock; the host sets the clock."""
    sequences: Sequences
    prefixes: PrefixCache | None
    """The prefix cache, if the engine has one."""
    search: Search | None
    """Beam search, if the engine has it."""
    staging: swap_buffer.Staging | None
    """Pages that were swapped out, if the engine does that."""
    memory: Any = None
    """What a drafter remembers, if the engine has one; a pytree of arrays."""

    @property
    def slots(self) -> Slots:
        """The running batch."""
        return self.ledger.slots

    def with_slots(self, slots: Slots) -> "EngineState":
        """Returns the state with another running batch."""
        return self._replace(ledger=self.ledger._replace(slots=slots))

    def __repr__(self) -> str:
        """One line with the sizes, of arrays and of their shapes alike."""
        leaves = [x for x in jax.tree.leaves(tuple(self)) if hasattr(x, "dtype")]
        num_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
        table, ref = self.table.page_ids, self.pool.ref
        sizes = [getattr(x, "shape", "?") for x in (table, ref)]
        return (
            f"EngineState(table={sizes[0]}, pool={sizes[1]}, {len(leaves)} arrays, "
            f"{num_bytes:,} bytes)"
        )


def init(
    config: EngineConfig, pages: kv_pages.Pages, memory: Any = None
) -> EngineState:
    """Makes an idle engine.

    Args:
      config: the bounds.
      pages: K and V arrays of the model that will be served, `num_pages` pages of
        `page_size` places each.
      memory: what the drafter's `init` returns, if there is one.

    Returns:
      The state.

    Raises:
      ValueError: the pages have another size or type than the configuration.
    """
    for leaf in jax.tree.leaves(pages):
        if leaf.shape[1] != config.num_pages:
            raise ValueError(f"{leaf.shape[1]=} must be {config.num_pages=}")
    if pages.layout.kv_dtype != config.kv_dtype:
        raise ValueError(f"{pages.layout.kv_dtype=} must be {config.kv_dtype=}")
    if pages.page_size != config.page_size:
        raise ValueError(f"{pages.page_size=} must be {config.page_size=}")
    slots, search = config.max_slots, None
    if config.max_beams:
        num, length = config.max_sequences, config.max_length
        beams = beam_search.make_beams(config.max_beams)
        search = Search(
            width=jnp.zeros((num,), jnp.int32),
            length_penalty=jnp.ones((num,), jnp.float32),
            early_stopping=jnp.zeros((num,), jnp.int32),
            groups=jax.tree.map(lambda x: jnp.repeat(x[None], num, axis=0), beams),
            parents=jnp.zeros((num, length), jnp.int32),
            path=jnp.zeros((num, length), jnp.int32),
        )
    return EngineState(
        pages=pages,
        pool=page_pool.make_pool(config.num_pages),
        table=page_table.make_table(slots, config.max_pages_per_slot),
        ledger=ledger.make_ledger(
            num_slots=slots,
            # Preempted requests find a place however many new ones wait.
            num_places=config.queue_capacity + slots,
            num_sequences=config.max_sequences,
            has_groups=True,
            holds=True,
        ),
        sequences=no_sequences(config.max_sequences, config),
        prefixes=make_prefix_cache(config.num_pages, config.page_size)
        if config.prefix_cache
        else None,
        search=search,
        staging=swap_buffer.make_staging(
            pages,
            num_places=config.max_swap_pages,
            num_sequences=config.max_sequences,
            pages_per_slot=config.max_pages_per_slot,
        )
        if config.max_swap_pages
        else None,
        memory=memory,
    )


def no_sequences(num: int, config: EngineConfig) -> Sequences:
    """Makes so many empty rows of sequences; static."""

    # A fresh buffer each: the state is donated, and no buffer can be donated twice.
    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((num, *shape), dtype)

    return Sequences(
        tokens=zeros(config.max_length),
        reason=zeros(),
        request_id=zeros(),
        group=zeros(),
        members=zeros(config.max_slots) - 1,
        prompt_length=zeros(),
        limit=zeros(),
        stop_tokens=zeros(config.max_stop_tokens) - 1,
        params=greedy_params(num),
        salt=zeros(dtype=jnp.uint32),
        use_prefix_cache=zeros(dtype=bool),
        keep_logprobs=zeros(dtype=bool),
        keep_prompt_logprobs=zeros(dtype=bool),
        logprobs=zeros(config.max_length, dtype=jnp.float32),
        top_ids=zeros(config.max_length, config.max_logprobs),
        top_logprobs=zeros(config.max_length, config.max_logprobs, dtype=jnp.float32),
        score=zeros(dtype=jnp.float32),
        arrival=zeros(2),
        attributes=RequestAttributes(*(zeros() for _ in RequestAttributes._fields)),
        num_cached=zeros(),
        num_swapped=zeros(),
    )
