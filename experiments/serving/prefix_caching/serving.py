"""Serves prompts by an engine whose model costs nothing, to see what its cache finds.

Requests are scheduled, admitted, given pages and looked up in the prefix cache by the
engine itself; only the forward pass is left out. Of a page nothing matters but whether
it is equal to another one, so an id stands for its tokens: `PAGE_SIZE` of them here,
however many a page would have.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from jaxkv.engine import EngineConfig, EngineState, step
from jaxkv.engine.requests import Requests, drain, submit
from jaxkv.engine.state import FINISHED, init
from jaxkv.memory import Prefixes, Uses, kv_pages, page_pool, prefix_eviction
from jaxkv.models import ForwardResult
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface
from jaxkv.serving import outputs

PAGE_SIZE = 2
"""Tokens of a page: the fewest of which an engine keeps its pages in place."""
STEPS = 32
"""Steps of a call."""

Eviction = Literal["lru", "fifo", "random"]
EVICTIONS: tuple[Eviction, ...] = ("lru", "fifo", "random")


class Hits(NamedTuple):
    """What requests found.

    Attributes:
      num_cached: pages that each request found in the cache.
      turn: how many requests were served before each.
    """

    num_cached: Int[np.ndarray, " requests"]
    turn: Int[np.ndarray, " requests"]


def bounds(num_pages: int, longest: int, window: int) -> EngineConfig:
    """Makes the bounds of an engine.

    Args:
      num_pages: pages of the largest pool that it will be given.
      longest: pages of the longest prompt.
      window: requests of the queue that the policy sees.
    """
    tokens = PAGE_SIZE * longest + 2
    return EngineConfig(
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


class Server:
    """An engine that serves one request at a time, each beginning with an empty cache.

    So every request finds what those before it left, whatever is computed together
    elsewhere: hits depend on the order, on the pool and on who is evicted, on nothing
    else.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Takes the bounds, as `bounds` makes them; compiles at the first call."""
        self.config = config

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_pages: int | None = None,
        cached_first: bool = False,
        eviction: Eviction = "lru",
        progress: Progress = QUIET,
    ) -> Hits | None:
        """Serves prompts that all wait from the start, in the order given.

        Args:
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
        config, num_pages = self.config, num_pages or self.config.num_pages
        longest = max(map(len, prompts))
        if not longest < num_pages <= config.num_pages:
            raise ValueError(
                f"{num_pages=} must be in [{longest + 1}, {config.num_pages}]"
            )
        state = _with_pool_of(_idle(config), num_pages)
        # While one runs, no number of free pages lets another one in.
        alone = interface.NO_LIMIT
        # The rule is in the program either way, so that one serves both.
        policy = fcfs.fcfs(watermark=alone, cached_first=True)
        policy = policy._replace(cached_first=jnp.asarray(cached_first))
        rule = _Rule(jnp.asarray(EVICTIONS.index(eviction), jnp.int32))
        num_cached = np.zeros(len(prompts), int)
        waiting, served = 0, list[int]()
        while len(served) < len(prompts):
            if progress.stopped:
                return None
            if waiting < len(prompts):
                requests = self._requests(prompts, waiting)
                state, taken = _submit(state, requests, config=config)
                waiting += int(np.asarray(taken).sum())
            state, info = _run(state, policy, rule, config=config)
            ended = np.asarray(info.reason) > 0
            if not ended.any():
                raise ValueError("a prompt does not fit the engine")
            served += np.asarray(info.request_id)[ended].tolist()
            state, drained = _drain(state)
            done = np.asarray(drained.status) == FINISHED
            names = np.asarray(drained.request_id)[done]
            num_cached[names] = np.asarray(drained.num_cached)[done] // PAGE_SIZE
        return Hits(num_cached, np.argsort(served))

    def _requests(self, prompts: Sequence[Sequence[int]], first: int) -> Requests:
        """As many of the next requests as a call of `submit` takes."""
        names = range(first, min(first + self.config.submit_width, len(prompts)))
        ask = Sampling.greedy(max_tokens=1)
        # The last token is always computed: one more than the pages have, so that all
        # of them can be found. It stands on a page of its own, which is never full.
        tokens = [[*np.repeat(prompts[i], PAGE_SIZE).tolist(), 0] for i in names]
        return outputs.make_requests(
            tokens,
            [ask] * len(names),
            config=self.config,
            request_ids=names,
            width=self.config.submit_width,
        )


def _idle(config: EngineConfig) -> EngineState:
    pages = kv_pages.make_pages(
        num_layers=1,
        num_pages=config.num_pages,
        num_kv_heads=2,  # pages of one head, or one place, are laid out anew every step
        page_size=config.page_size,
        head_dim=2,
        dtype="float32",
    )
    return init(config, pages)


def _with_pool_of(state: EngineState, num_pages: int) -> EngineState:
    """Takes all other pages out of the pool, so that one program serves any size."""
    surplus = state.pool.ref.shape[0] - num_pages
    if not surplus:
        return state
    want = jnp.asarray([surplus], jnp.int32)
    pool, _, _ = page_pool.allocate(state.pool, want, max_pages=surplus)
    return state._replace(pool=pool)


def _no_model(
    params: None, pages: kv_pages.Pages, rows: kv_pages.Rows
) -> ForwardResult:
    """Reads and writes nothing; the next token is 0."""
    del params
    return ForwardResult(jnp.zeros((rows.logit_rows.shape[0], 2), jnp.float32), pages)


class _Info(NamedTuple):
    """What of a step the host asks for."""

    reason: Int32[Array, "steps slots"]
    request_id: Int32[Array, "steps slots"]


class _Rule(NamedTuple):
    """One of `EVICTIONS`, all in one program."""

    index: Int32[Array, ""]

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """The tick of the last use, or that of entry."""
        return jnp.where(self.index == 1, uses.entered, uses.last_used)


def _run_steps(
    state: EngineState, policy: fcfs.FCFS, rule: _Rule, *, config: EngineConfig
) -> tuple[EngineState, _Info]:
    """As `engine.run_steps`, with a rule of eviction."""

    def body(state: EngineState, _: None) -> tuple[EngineState, _Info]:
        state, info = step.step(
            None, state, config=config, forward=_no_model, policy=policy, eviction=rule
        )
        draws = (rule.index == 2).astype(jnp.int32)
        cache = lax.fori_loop(0, draws, _at_random, state.prefixes)
        return state._replace(prefixes=cache), _Info(info.reason, info.request_id)

    return lax.scan(body, state, None, length=config.steps_per_call)


def _at_random(_: Array, cache: Prefixes) -> Prefixes:
    """Draws all ranks anew."""
    key = jax.random.fold_in(jax.random.key(0), cache.tick)
    rank = jax.random.randint(key, cache.pinned.shape, 0, 2**20, jnp.int32)
    return prefix_eviction.rank_anew(cache, rank)


_run = jax.jit(_run_steps, static_argnames="config", donate_argnames="state")
_submit = jax.jit(submit, static_argnames="config", donate_argnames="state")
_drain = jax.jit(drain, donate_argnames="state")
