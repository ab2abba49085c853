"""Configuration and state of an engine.

The state is one pytree of arrays of fixed shape: pages, page pool, page tables,
sequences with their tokens and sampling parameters, slots and queue. It can be saved as
a snapshot, branched, replayed, and mapped with `vmap`.
"""

import dataclasses
from typing import Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

from jaxkv import ledger, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.ledger import Ledger, Slots
from jaxkv.memory import (
    CONTINUES,
    EVICTION_RULES,
    NUM_SINKS,
    READS_QUERIES,
    EvictionRule,
    Pages,
    Pool,
    PrefixCache,
    Staging,
    StatePool,
    Table,
    WindowPool,
    make_pool,
    make_prefix_cache,
    make_staging,
    make_state_pool,
    make_table,
    make_window_pool,
    max_window_pages,
)
from jaxkv.models import NO_EXPERT
from jaxkv.sampling import Beams, Params, greedy_params, make_beams
from jaxkv.scheduling import NO_LIMIT, RequestAttributes

FINISH_REASONS = (None, "stop", "length", "cancelled", "nan")
"""Finish reasons, indexed by `Sequences.reason`."""
NOT_ENDED, STOPPED, LENGTH_REACHED, CANCELLED, NOT_A_NUMBER = range(5)


class EngineFields(TypedDict, total=False):
    """Fields of `EngineConfig` as keywords, for type checkers."""

    num_pages: int
    page_size: int
    max_slots: int
    max_length: int
    max_sequences: int
    queue_capacity: int
    token_budget: int
    max_logit_rows: int
    max_stop_tokens: int
    max_logprobs: int
    max_beams: int
    max_swap_pages: int
    max_drafts: int
    num_draft_buckets: int
    queue_head: int
    submit_width: int
    steps_per_call: int
    prefix_cache: bool
    kv_dtype: Literal["model", "int8", "fp8"]
    numerics: Literal["fast", "reproducible"]
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    record_routes: bool
    record_pages: bool
    max_grammars: int
    max_grammar_cells: int
    state_interval: int
    num_checkpoints: int
    release_window_pages: bool
    num_adapters: int
    evict: EvictionRule | None
    evict_budget: int
    evict_window: int
    seed: int
    debug: bool


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Static configuration of an engine: sizes that fix the shapes of its arrays."""

    num_pages: int = 512
    """KV pages in the pool (vLLM: KV cache blocks)."""
    page_size: int = 16
    """Tokens per page (vLLM: block size)."""
    max_slots: int = 8
    """Largest number of running sequences."""
    max_length: int = 512
    """Largest length of a sequence, prompt plus answer, in tokens."""
    max_sequences: int = 64
    """Largest number of sequences in the state: waiting, running, and finished but not
    drained."""
    queue_capacity: int = 64
    """Largest number of waiting requests."""
    token_budget: int = 64
    """Largest number of tokens fed in a step with prefill. A step in which every slot
    feeds at most one token runs a program of `max_slots` rows."""
    max_logit_rows: int = 0
    """Largest number of rows with logits in a step, draft rows excluded. 0 means
    `max_slots`, which leaves no rows for the log-probabilities of prompts."""
    max_stop_tokens: int = 4
    """Largest number of stop token ids of a sequence, the model's end-of-text token
    included."""
    max_logprobs: int = 0
    """Alternative tokens reported with each token."""
    max_beams: int = 0
    """Largest beam width; 0 compiles the step without beam search."""
    max_swap_pages: int = 0
    """Pages in the staging buffer for swapping. 0 compiles the step without swapping;
    preempted requests are then recomputed."""
    max_drafts: int = 0
    """Largest draft length of a slot in a step, in tokens; 0 compiles the step without
    speculative decoding."""
    num_draft_buckets: int = 1
    """Compiled draft lengths: `max_drafts`, half of it, a quarter, and so on. More
    lengths make steps with few drafts faster and compilation longer."""
    queue_head: int = 0
    """Waiting requests visible to the policy, at most 511; 0 means `max_slots`, which
    is enough for `fcfs`, but not for a policy that sorts the queue."""
    submit_width: int = 8
    """Rows of requests in one call of `submit`."""
    steps_per_call: int = 16
    """Steps per call of the compiled program; the host reads results between calls."""
    prefix_cache: bool = False
    """True if full pages are kept for later requests with the same prefix."""
    state_interval: int = 64
    """Tokens between checkpoints of recurrent states in the prefix cache, a multiple of
    `page_size`; without effect for models without recurrent layers."""
    num_checkpoints: int = 0
    """Recurrent states that can be checkpoints; 0 means four for each slot."""
    release_window_pages: bool = False
    """True if layers with a sliding window have pages of their own, which return to
    their pool behind the window; `num_pages` are then those of the remaining layers."""
    evict: EvictionRule | None = None
    """Rule by which each KV head evicts tokens from the cache, see
    `memory.kv_eviction`; None evicts no token. "quest" evicts none either: it selects
    the pages that tokens of answers read."""
    evict_budget: int = 0
    """Tokens that each head keeps with `evict`, or with "quest" reads: then a multiple
    of `page_size`."""
    evict_window: int = 32
    """Last tokens whose attention "snapkv" and "h2o" read; without effect for other
    rules."""
    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """Type of cached K and V: the model's type, or 8 bits with a scale for each token
    and head, which holds about twice as many tokens as 16 bits."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """With "reproducible", results are batch-invariant: bit-identical for any other
    requests in the batch. "fast" runs the fastest program."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities of answers: of the model's own logits, or, with
    "processed_logprobs", of the distribution that each token is drawn from, after
    penalties, temperature and cut-offs. Those of prompts are always raw."""
    record_routes: bool = False
    """True if answers report the experts of each token, for a mixture of experts. False
    compiles the step without them."""
    max_grammars: int = 0
    """Largest number of different grammars of running requests; 0 compiles the step
    without grammars."""
    max_grammar_cells: int = 2**20
    """Largest table of a grammar, in cells of 4 bytes: states times token classes."""
    num_adapters: int = 0
    """LoRA adapters that a request may choose from, at most 255, stacked in the
    parameters; 0 compiles the step without adapters. `Engine.load` sets it."""
    record_pages: bool = False
    """True if each `StepInfo` has the page tables, reference counts and queue of its
    step, for a `RunTrace`. False compiles the step without them."""
    seed: int = 0
    """Random seed of requests without their own seed."""
    debug: bool = False
    """True if each step also counts violated invariants; `Engine` raises an
    `InvariantError` at the first."""

    def __post_init__(self) -> None:
        """Validates the fields, and converts NumPy numbers to Python numbers.

        Raises:
          ValueError: a field has a wrong type or is out of range.
        """
        off = (
            "max_logit_rows",
            "max_logprobs",
            "max_beams",
            "max_swap_pages",
            "max_drafts",
            "max_grammars",
            "num_checkpoints",
            "evict_budget",
        )
        bounds = {
            "num_adapters": (0, 256),
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

        if self.max_grammars * self.max_grammar_cells >= validation.INT32:
            raise ValueError(
                f"max_grammars={self.max_grammars} times "
                f"max_grammar_cells={self.max_grammar_cells} must be below 2**31"
            )
        if self.record_routes and self.max_beams:
            raise ValueError(
                f"max_beams={self.max_beams} must be 0 with record_routes=True"
            )
        if self.logprobs_mode == "processed_logprobs":
            for name in ("max_logprobs", "max_beams", "max_drafts"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} must be 0 with "
                        "logprobs_mode='processed_logprobs'"
                    )

        self._check_eviction()

    def _check_eviction(self) -> None:
        """Checks the fields of `evict`, and that no other field contradicts it."""
        if self.evict is None:
            if self.evict_budget:
                raise ValueError(
                    f"evict_budget={self.evict_budget} must be 0 without evict"
                )
            return
        low = {
            "streaming-llm": NUM_SINKS + 1,
            "h2o": 2,
            "snapkv": self.evict_window + 1,
            "keydiff": 1,
            "quest": self.page_size,
        }[self.evict]
        if not low <= self.evict_budget <= self.max_length:
            raise ValueError(
                f"evict_budget={self.evict_budget} must be in [{low}, "
                f"max_length={self.max_length}] with evict={self.evict!r}"
            )
        if self.evict == "h2o" and self.evict_window < self.page_size:
            raise ValueError(
                f"evict_window={self.evict_window} must be at least "
                f"page_size={self.page_size} with evict='h2o'"
            )
        if self.evict == "quest" and self.evict_budget % self.page_size:
            raise ValueError(
                f"evict_budget={self.evict_budget} must be a multiple of "
                f"page_size={self.page_size} with evict='quest'"
            )
        if self.evict == "quest" and self.kv_dtype != "model":
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} must be 'model' with evict='quest'"
            )
        for name in (
            "prefix_cache",
            *(["max_swap_pages"] if self.evict in EVICTION_RULES else []),
            "max_beams",
            "max_drafts",
            "record_routes",
            "release_window_pages",
        ):
            value = getattr(self, name)
            if value:
                raise ValueError(
                    f"{name}={value} must be {type(value)()} with evict={self.evict!r}"
                )

    @property
    def evict_limit(self) -> int:
        """Length of the cache at which a rule evicts in an answer."""
        if self.evict in CONTINUES:
            return self.evict_budget + self.page_size
        return NO_LIMIT

    @property
    def num_head(self) -> int:
        """Waiting requests visible to the policy."""
        return self.queue_head or self.max_slots

    @property
    def max_pages_per_slot(self) -> int:
        """Pages of a sequence of `max_length` tokens."""
        return -(-self.max_length // self.page_size)

    @property
    def num_states(self) -> int:
        """States of recurrent layers.

        A step reads one for each slot and writes one for each slot and each draft; with
        swapping, as many sequences as there are slots keep theirs. Checkpoints are
        further ones.
        """
        num = self.max_slots * (2 + self.max_drafts + (self.max_swap_pages > 0))
        if not self.prefix_cache:
            return num
        num_checkpoints = self.num_checkpoints or 4 * self.max_slots
        return num + self.max_checkpoints_per_step + num_checkpoints

    @property
    def max_checkpoints_per_step(self) -> int:
        """Largest number of checkpoints in a step, those of drafts excluded."""
        return self.max_slots + self.token_budget // self.state_interval

    def num_window_pages(self, window: int) -> int:
        """Returns the pages of layers with a window: as many as never limit a step.

        Swapped sequences, as many as there are slots, keep theirs. With the prefix
        cache, as many pages again keep the windows at the ends of prefixes.
        """
        num = max_window_pages(
            self.max_slots,
            window=window,
            page_size=self.page_size,
            token_budget=self.token_budget,
            max_length=self.max_length,
        )
        if not self.prefix_cache and not self.max_swap_pages:
            return min(num, self.num_pages)
        return num * (1 + (self.max_swap_pages > 0) + self.prefix_cache)

    @property
    def num_logit_rows(self) -> int:
        """Rows of a step that can have logits, draft rows excluded.

        The first `max_slots` rows sample tokens; the rest are for prompts.
        """
        return self.max_logit_rows or self.max_slots

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Compiled draft lengths above 0, in ascending order."""
        halves = (self.max_drafts >> i for i in range(self.num_draft_buckets))
        return tuple(sorted({half for half in halves if half > 0}))

    @property
    def emit_width(self) -> int:
        """Largest number of tokens that a sequence gains in a step."""
        return 1 + self.max_drafts


class RequestKinds(NamedTuple):
    """Kinds of requests that a program of steps can serve; static.

    A program without a kind is smaller and compiles faster, and takes the same steps,
    bit for bit, if no request of that kind waits or runs. It does not detect one.
    """

    sampled: bool = True
    """Requests with a temperature, penalties or log-probabilities; without speculation,
    since verification always reads them."""
    grouped: bool = True
    """Requests of several sequences: parallel samples and beams."""


ALL_KINDS = RequestKinds()
"""Every request can be served."""


class Sequences(NamedTuple):
    """Tokens and settings of sequences.

    A sequence keeps its row from submission until it is drained, also while it is
    preempted. Its progress is in the ledger.
    """

    tokens: Int32[Array, "sequences max_length"]
    """Prompt, then answer."""
    reason: Int32[Array, " sequences"]
    """Finish reason: an index into `FINISH_REASONS`."""
    request_id: Int32[Array, " sequences"]
    """Caller's id of the request."""
    group: Int32[Array, " sequences"]
    """Row of the request's first sequence: the request's index in the ledger."""
    members: Int32[Array, "sequences slots"]
    """In the row of a first sequence: rows of all sequences of its request, by sample,
    then `NO_SEQUENCE`."""
    prompt_length: Int32[Array, " sequences"]
    """Prompt length in tokens."""
    limit: Int32[Array, " sequences"]
    """Largest length in tokens, prompt included."""
    stop_tokens: Int32[Array, "sequences max_stop_tokens"]
    """Stop token ids; -1 where unused."""
    params: Params
    """Sampling parameters."""
    salt: UInt32[Array, " sequences"]
    """Prefix cache salt: sequences share cached pages only if their salts are equal."""
    use_prefix_cache: Bool[Array, " sequences"]
    """True if the sequence uses the prefix cache: it reads cached pages and adds its
    own."""
    keep_logprobs: Bool[Array, " sequences"]
    """True if the log-probabilities of its answer are kept."""
    keep_prompt_logprobs: Bool[Array, " sequences"]
    """True if the log-probabilities of its prompt are kept as well."""
    logprobs: Float[Array, "sequences max_length"]
    """Log-probability of each token given the tokens before it, where kept; else 0."""
    top_ids: Int32[Array, "sequences max_length max_logprobs"]
    """Most likely tokens at each position, where log-probabilities are kept."""
    top_logprobs: Float[Array, "sequences max_length max_logprobs"]
    """Log-probabilities of `top_ids`."""
    score: Float[Array, " sequences"]
    """Score of an answer of a finished beam search; else 0."""
    arrival: Int32[Array, "sequences 2"]
    """Arrival time of the request: seconds and microseconds."""
    attributes: RequestAttributes
    """Attributes of the request, for the policy."""
    num_cached: Int32[Array, " sequences"]
    """Prompt tokens found in the prefix cache."""
    num_swapped: Int32[Array, " sequences"]
    """Preemptions by swapping so far."""
    grammar_state: Int32[Array, " sequences"] | None = None
    """State of the answer's grammar after its last token, as in `GrammarTables`; -1
    without a grammar. None if the engine has no grammars."""
    adapter: Int32[Array, " sequences"] | None = None
    """Adapter of the request, from 1 on, or 0; None in an engine without adapters."""


class Search(NamedTuple):
    """State of beam searches.

    A search has the row of its request's first sequence, a history the row of its beam.
    """

    width: Int32[Array, " sequences"]
    """Beam width of the request, 0 without beam search."""
    length_penalty: Float[Array, " sequences"]
    """As in `beam_search.BeamParams`."""
    early_stopping: Int32[Array, " sequences"]
    """As in `beam_search.BeamParams`."""
    groups: Beams
    """The searches."""
    parents: Int32[Array, "sequences max_length"]
    """Parent beam of each token of the history; 0 in the prompt."""
    path: Int32[Array, "sequences max_length"]
    """All tokens of each beam at its last preemption."""


class EngineState(NamedTuple):
    """State of an engine."""

    pages: Pages
    """The KV cache."""
    pool: Pool
    """Reference counts and free list of the pages."""
    table: Table
    """Page table: pages and length of each slot."""
    ledger: Ledger
    """Queue, slots, progress and clock; the host sets the clock."""
    sequences: Sequences
    """Tokens and settings of sequences."""
    prefixes: PrefixCache | None
    """Prefix cache; None if it is disabled."""
    search: Search | None
    """Beam searches; None if they are disabled."""
    staging: Staging | None
    """Swapped-out pages; None if swapping is disabled."""
    states: StatePool | None = None
    """Uses of the states of recurrent layers; None without such layers."""
    memory: PyTree[Array] = None
    """State of the drafter, a pytree of arrays."""
    routes: Int32[Array, "sequences max_length mixtures top_k"] | None = None
    """Experts of each token of sequences that have left their slots, `NO_EXPERT` where
    no token was fed; None if they are not recorded."""
    windows: WindowPool | None = None
    """Uses of the pages of layers with a window; None unless these return behind it."""

    @property
    def window_ids(self) -> Int32[Array, "slots pages_per_slot"] | None:
        """Page table of layers with a window; None unless their pages return."""
        return None if self.windows is None else self.windows.page_ids

    @property
    def slots(self) -> Slots:
        """Slots of the running batch."""
        return self.ledger.slots

    def with_slots(self, slots: Slots) -> "EngineState":
        """Returns the state with new slots."""
        return self._replace(ledger=self.ledger._replace(slots=slots))

    def __repr__(self) -> str:
        """One line with the sizes; leaves may be arrays or `ShapeDtypeStruct`s."""
        leaves = [x for x in jax.tree.leaves(tuple(self)) if hasattr(x, "dtype")]
        num_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
        table = self.table.page_ids
        ref = self.pool.ref
        sizes = [getattr(x, "shape", "?") for x in (table, ref)]
        return (
            f"EngineState(table={sizes[0]}, pool={sizes[1]}, {len(leaves)} arrays, "
            f"{num_bytes:,} bytes)"
        )


def init(
    config: EngineConfig, pages: Pages, memory: PyTree[ArrayOrShape] = None
) -> EngineState:
    """Makes the state of an idle engine.

    Args:
      config: the configuration.
      pages: the model's KV cache, `num_pages` pages of `page_size` tokens.
      memory: result of the drafter's `init`, if there is one.

    Returns:
      The state.

    Raises:
      ValueError: the pages differ from the configuration in size or type, or only one
        of them records routes; or `state_interval` is no multiple of `page_size`, and
        there are recurrent layers; or only one of them releases pages behind windows.
    """
    for leaf in jax.tree.leaves(pages.by_page):
        if leaf.shape[1] != config.num_pages:
            raise ValueError(f"{leaf.shape[1]=} must be {config.num_pages=}")
    if pages.layout.kv_dtype != config.kv_dtype:
        raise ValueError(f"{pages.layout.kv_dtype=} must be {config.kv_dtype=}")
    if pages.page_size != config.page_size:
        raise ValueError(f"{pages.page_size=} must be {config.page_size=}")
    if (pages.routes is not None) != config.record_routes:
        raise ValueError(
            f"{config.record_routes=} needs pages made with record_routes="
            f"{config.record_routes}"
        )
    if (pages.windowed is not None) != config.release_window_pages:
        raise ValueError(
            f"{config.release_window_pages=} needs pages made with "
            f"release_window_pages={config.release_window_pages}"
        )
    if (config.evict in READS_QUERIES) != (pages.queries is not None) or (
        config.evict == "quest"
    ) != (pages.key_bounds is not None):
        raise ValueError(
            f"{config.evict=} needs pages that `make_model_pages` made for it"
        )
    states = None
    if pages.states is not None:
        if config.state_interval % config.page_size:
            raise ValueError(
                f"state_interval={config.state_interval} must be a multiple of "
                f"page_size={config.page_size}"
            )
        states = make_state_pool(
            jax.tree.leaves(pages.states)[0].shape[1],
            num_slots=config.max_slots,
            num_sequences=config.max_sequences,
            num_pages=config.num_pages,
        )
    routes = None
    if (stored := pages.routes) is not None:
        _, _, mixtures, _, top_k = stored.shape
        size = config.max_sequences, config.max_length, mixtures, top_k
        routes = jnp.full(size, NO_EXPERT, jnp.int32)
    slots = config.max_slots
    search = None
    if config.max_beams:
        num = config.max_sequences
        length = config.max_length
        beams = make_beams(config.max_beams)
        search = Search(
            width=jnp.zeros((num,), jnp.int32),
            length_penalty=jnp.ones((num,), jnp.float32),
            early_stopping=jnp.zeros((num,), jnp.int32),
            groups=jax.tree.map(lambda x: jnp.repeat(x[None], num, axis=0), beams),
            parents=jnp.zeros((num, length), jnp.int32),
            path=jnp.zeros((num, length), jnp.int32),
        )
    table = make_table(slots, config.max_pages_per_slot)
    if config.evict in EVICTION_RULES:
        table = table._replace(evicted=jnp.zeros_like(table.length))
    return EngineState(
        pages=pages,
        pool=make_pool(config.num_pages),
        table=table,
        ledger=ledger.make_ledger(
            num_slots=slots,
            # `slots` more places, so that preempted requests always fit.
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
        staging=make_staging(
            pages,
            num_places=config.max_swap_pages,
            num_sequences=config.max_sequences,
            pages_per_slot=config.max_pages_per_slot,
        )
        if config.max_swap_pages
        else None,
        states=states,
        memory=memory,
        routes=routes,
        windows=None
        if pages.windowed is None
        else make_window_pool(
            pages.windowed.num_pages,
            num_sequences=config.max_sequences,
            num_pages=config.num_pages,
            table=table,
        ),
    )


def no_sequences(num: int, config: EngineConfig) -> Sequences:
    """Makes `num` empty rows of sequences; `num` is static."""

    # One buffer per field: the state is donated, and no buffer can be donated twice.
    def zeros(*shape: int, dtype: DTypeLike = jnp.int32) -> Array:
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
        grammar_state=zeros() - 1 if config.max_grammars else None,
        adapter=zeros() if config.num_adapters else None,
    )
