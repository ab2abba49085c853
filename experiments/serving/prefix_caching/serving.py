"""Serves prompts by an engine whose model costs nothing, to see what its cache finds.

Requests are scheduled, admitted, given pages and looked up in the prefix cache by the
engine itself; only the forward pass is left out. Of a page nothing matters but whether
it is equal to another one, so an id stands for its tokens: `PAGE_SIZE` of them here,
however many a page would have.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from experiments.harness.stepping import Stepper
from jaxkv.engine import EngineConfig, EngineState, StepInfo, step
from jaxkv.memory import Prefixes, Uses, kv_layout, kv_pages, page_pool, prefix_eviction
from jaxkv.models import ForwardResult
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface

PAGE_SIZE = 2
"""Tokens of a page: the fewest of which an engine keeps its pages in place."""
STEPS = 32
"""Steps of a call."""

Eviction = Literal["lru", "fifo", "random"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


class CacheHits(NamedTuple):
    """What requests found.

    Attributes:
      num_cached: pages that each request found in the cache.
      turn: how many requests were served before each.
    """

    num_cached: Int[np.ndarray, " requests"]
    turn: Int[np.ndarray, " requests"]


def make_cache_engine(num_pages: int, longest: int, window: int) -> Stepper:
    """Makes an engine that serves one request at a time; it compiles at its first call.

    So every request finds what those before it left, whatever is computed together
    elsewhere: hits depend on the order, on the pool and on the eviction alone.

    Args:
      num_pages: pages of the largest pool that it will be given.
      longest: pages of the longest prompt.
      window: requests of the queue that the policy sees.
    """
    tokens = PAGE_SIZE * longest + 2
    config = EngineConfig(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_slots=window,
        max_length=tokens,
        max_sequences=2 * (window + STEPS),
        queue_capacity=window + STEPS,
        submit_width=window + STEPS,
        token_budget=max(tokens, window),
        steps_per_call=STEPS,
        prefix_cache=True,
    )
    make_pages = functools.partial(
        kv_layout.make_pages,
        num_layers=1,
        num_pages=num_pages,
        num_kv_heads=2,  # of one head, or place, they are laid out anew every step
        page_size=PAGE_SIZE,
        head_dim=2,
        dtype="float32",
    )

    def no_model(params: None, pages: Any, rows: kv_pages.Rows) -> ForwardResult:
        """Reads and writes nothing; the next token is 0."""
        logits = jnp.zeros((rows.logit_rows.shape[0], 2), jnp.float32)
        return ForwardResult(logits, pages)

    return Stepper(config, no_model, make_pages, step=_step)


def serve_prompts(
    server: Stepper,
    prompts: Sequence[Sequence[int]],
    *,
    num_pages: int | None = None,
    cached_first: bool = False,
    eviction: Eviction = "lru",
    progress: Progress = QUIET,
) -> CacheHits | None:
    """Serves prompts that all wait from the start, in the order given.

    Args:
      server: an engine that `make_cache_engine` made; its cache is emptied first.
      prompts: ids of the pages of each, in [0, 2**31). Equal ids are equal pages.
      num_pages: pages of the pool, one more at least than the longest prompt has;
        None means all that the engine has.
      cached_first: whether those go first who find the most tokens in the cache,
        among the first that wait.
      eviction: who is evicted: the page that was not used for longest, the one
        that entered first, or anyone; always after all pages that go on from it.
      progress: is asked whether to stop.

    Returns:
      What they found; None if it was stopped.

    Raises:
      ValueError: the pool is out of range, or a prompt does not fit.
    """
    most, longest = server.config.num_pages, max(map(len, prompts))
    num_pages = num_pages or most
    if not longest < num_pages <= most:
        raise ValueError(f"{num_pages=} must be in [{longest + 1}, {most}]")
    server.clear()
    if surplus := most - num_pages:
        # All other pages are taken out of the pool: one program serves any size.
        want = jnp.asarray([surplus], jnp.int32)
        pool, _, _ = page_pool.allocate(server.state.pool, want, max_pages=surplus)
        server.state = server.state._replace(pool=pool)
    # While one runs, no number of free pages lets another one in. Both rules are in
    # the program either way, so that one serves all.
    policy = fcfs.fcfs(watermark=interface.NO_LIMIT, cached_first=True)
    served = server.serve(
        # The last token is always computed: one more than the pages have, so that
        # all of them can be found. Its page is its own, and never full.
        [[*np.repeat(ids, PAGE_SIZE).tolist(), 0] for ids in prompts],
        [Sampling.greedy(max_tokens=1)] * len(prompts),
        policy=policy._replace(cached_first=jnp.asarray(cached_first)),
        eviction=_EvictionRule(jnp.asarray(EVICTIONS.index(eviction), jnp.int32)),
        progress=progress,
    )
    if served is None:
        return None
    order = served.seen.request_id[served.seen.reason > 0]
    return CacheHits(served.num_cached // PAGE_SIZE, np.argsort(order))


class _EvictionRule(NamedTuple):
    """One of `EVICTIONS`, all in one program."""

    index: Int32[Array, ""]

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """The tick of the last use, or that of entry."""
        return jnp.where(self.index == 1, uses.entered, uses.last_used)


def _step(
    params: None, state: EngineState, *, eviction: _EvictionRule, **rest: Any
) -> tuple[EngineState, StepInfo]:
    """A step, behind which "random" draws all ranks anew."""
    state, info = step.step(params, state, eviction=eviction, **rest)

    def draw(_: Array, cache: Prefixes) -> Prefixes:
        key = jax.random.fold_in(jax.random.key(0), cache.tick)
        rank = jax.random.randint(key, cache.pinned.shape, 0, 2**20, jnp.int32)
        return prefix_eviction.rank_anew(cache, rank)

    draws = (eviction.index == 2).astype(jnp.int32)
    return state._replace(prefixes=lax.fori_loop(0, draws, draw, state.prefixes)), info
