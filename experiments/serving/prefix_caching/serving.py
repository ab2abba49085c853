"""Serves prompts with an engine whose model does no work, to count cache hits.

The engine schedules and admits requests, allocates pages and looks prompts up in the
prefix cache; only the forward pass is left out. Hits depend only on the equality of
pages, so an id represents the tokens of a page. A page has `PAGE_SIZE` tokens here,
independent of the page size of the workload.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from experiments import lab
from experiments.harness import Stepper
from jaxkv import engine, memory, scheduling
from jaxkv.engine import EngineConfig, EngineState, StepInfo
from jaxkv.memory import Pages, PrefixCache, Rows, Uses
from jaxkv.models import ForwardResult
from jaxkv.sampling import Sampling
from jaxkv.scheduling import NO_LIMIT

PAGE_SIZE = 2
"""Tokens of a page: the smallest size at which the engine updates pages in place."""
STEPS_PER_CALL = 32
"""Steps of a call."""

Eviction = Literal["lru", "fifo", "random"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


class CacheHits(NamedTuple):
    """Cache hits of requests.

    Attributes:
      num_cached: cached pages of each request.
      turn: number of requests served before each.
    """

    num_cached: Int[np.ndarray, " requests"]
    turn: Int[np.ndarray, " requests"]


def make_cache_engine(
    num_pages: int,
    longest: int,
    window: int,
    *,
    interval: int = 0,
    num_checkpoints: int = 0,
) -> Stepper:
    """Builds an engine that serves one request at a time; the first call compiles it.

    A request finds the pages of all requests before it, so that hits depend only on the
    order, the pool and the eviction rule.

    Args:
      num_pages: pages of the largest pool.
      longest: pages of the longest prompt.
      window: waiting requests that the policy sees.
      interval: pages between checkpoints of recurrent layers; 0 for a model without
        such layers.
      num_checkpoints: number of checkpoints, at least 1 with an interval.
    """
    tokens = PAGE_SIZE * longest + 2
    config = EngineConfig(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_slots=window,
        max_length=tokens,
        max_sequences=2 * (window + STEPS_PER_CALL),
        queue_capacity=window + STEPS_PER_CALL,
        submit_width=window + STEPS_PER_CALL,
        token_budget=max(tokens, window),
        steps_per_call=STEPS_PER_CALL,
        prefix_cache=True,
        state_interval=PAGE_SIZE * max(interval, 1),
        num_checkpoints=num_checkpoints,
    )

    def make_pages() -> Pages:
        pages = memory.make_pages(
            num_layers=1,
            num_pages=num_pages,
            num_kv_heads=2,  # with 1 head or place, the layout changes every step
            page_size=PAGE_SIZE,
            head_dim=2,
            dtype="float32",
        )
        if not interval:
            return pages
        return pages._replace(states=jnp.zeros((1, config.num_states, 1)))

    def no_model(params: None, pages: Pages, rows: Rows) -> ForwardResult:
        """Leaves the pages as they are; the next token is 0."""
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
    progress: lab.Progress = lab.QUIET,
) -> CacheHits | None:
    """Serves prompts that all arrive at once, in the given order.

    Args:
      server: an engine from `make_cache_engine`; its cache is emptied first.
      prompts: page ids of each prompt, in [0, 2**31). Equal ids are equal pages.
      num_pages: pages of the pool, more than the longest prompt has; None means all
        pages of the engine.
      cached_first: True to serve the request with the most cached tokens first, among
        those in the window.
      eviction: eviction rule: least recently used, first in first out, or random. A
        page is evicted only after all pages that extend it.
      progress: receives progress; may stop.

    Returns:
      The hits; None if stopped.

    Raises:
      ValueError: the pool is out of range, or a prompt does not fit.
    """
    max_pages = server.config.num_pages
    longest = max(map(len, prompts))
    num_pages = num_pages or max_pages
    if not longest < num_pages <= max_pages:
        raise ValueError(f"{num_pages=} must be in [{longest + 1}, {max_pages}]")
    server.clear()
    if surplus := max_pages - num_pages:
        # Surplus pages are allocated, so that one program serves any pool size.
        want = jnp.asarray([surplus], jnp.int32)
        pool, _, _ = memory.allocate(server.state.pool, want, max_pages=surplus)
        server.state = server.state._replace(pool=pool)
    # With this watermark a second request is never admitted. The program contains both
    # orders, so that one program serves both.
    policy = scheduling.fcfs(watermark=NO_LIMIT, cached_first=True)
    served = server.serve(
        # The last token is always computed. It follows the pages, on an unfilled page
        # of its own, so that all pages can be found.
        [[*np.repeat(ids, PAGE_SIZE).tolist(), 0] for ids in prompts],
        [Sampling.greedy(max_tokens=1)] * len(prompts),
        policy=policy._replace(cached_first=jnp.asarray(cached_first)),
        eviction=_EvictionRule(jnp.asarray(EVICTIONS.index(eviction), jnp.int32)),
        progress=progress,
    )
    if served is None:
        return None
    order = served.step_infos.request_id[served.step_infos.reason > 0]
    return CacheHits(served.num_cached // PAGE_SIZE, np.argsort(order))


class _EvictionRule(NamedTuple):
    """One of `EVICTIONS`, selected at run time."""

    index: Int32[Array, ""]

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the tick of entry for "fifo", else that of the last use."""
        return jnp.where(self.index == 1, uses.entered, uses.last_used)


def _step(
    params: None, state: EngineState, *, eviction: _EvictionRule, **options: Any
) -> tuple[EngineState, StepInfo]:
    """Runs a step, after which "random" redraws all eviction ranks."""
    state, info = engine.step(params, state, eviction=eviction, **options)

    def draw(_: Array, cache: PrefixCache) -> PrefixCache:
        key = jax.random.fold_in(jax.random.key(0), cache.tick)
        rank = jax.random.randint(key, cache.pinned.shape, 0, 2**20, jnp.int32)
        return memory.rerank(cache, rank)

    draws = (eviction.index == 2).astype(jnp.int32)
    return state._replace(prefixes=lax.fori_loop(0, draws, draw, state.prefixes)), info
