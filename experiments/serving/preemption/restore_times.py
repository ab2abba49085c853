"""Times the restore of one request by recomputation and by swapping.

The micro-benchmark of the paper (figure 19a) on this machine. Recomputation is one
engine step that prefills all tokens. Swapping consists of the two jitted functions that
copy pages between the pool and the device buffer and, for host memory, of the copies
between the buffer and NumPy arrays.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.harness import PromptRequest, make_benchmark_config, time_call
from jaxkv import engine, memory, scheduling
from jaxkv.clock import from_seconds
from jaxkv.engine import EngineConfig, init
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import (
    NO_PAGE,
    Pages,
    Staging,
    Table,
    advance_lengths,
    copy_in,
    copy_out,
    drop_slots,
    make_pool,
    make_staging,
    make_table,
)
from jaxkv.models import LoadedModel, PagedForward, make_model_pages
from jaxkv.sampling import Sampling
from jaxkv.serving import LOCAL, HostSpace, make_requests

POOL_TOKENS = 4096
"""Token places in the pool; a request's pages are scattered over it."""


Times = Float[np.ndarray, "rows repeats"]


class RestoreTimes(lab.ResultTable):
    """Times to restore one request by page size."""

    page_size: lab.Ints = lab.column("token places in a page")
    num_tokens: lab.Ints = lab.column("tokens of the request")
    num_bytes: lab.Ints = lab.column("bytes of its K and V", key="kv_bytes")
    recompute_s: Times = lab.column("prefill of the tokens", of=np.median)
    out_s: Times = lab.column("pool to device buffer", heading="out", of=np.median)
    in_s: Times = lab.column("device buffer to pool", heading="in", of=np.median)
    host_out_s: Times = lab.column(
        "device buffer to host memory", heading="to host", of=np.median
    )
    host_in_s: Times = lab.column(
        "host memory to device buffer", heading="from host", of=np.median
    )

    @property
    @lab.computed_column(heading="swap", of=np.median)
    def swap_s(self) -> Times:
        """Swap out and in through the device buffer."""
        return self.out_s + self.in_s

    @property
    @lab.computed_column(heading="swap through host", of=np.median)
    def swap_through_host_s(self) -> Times:
        """Swap out and in through host memory."""
        return self.swap_s + self.host_out_s + self.host_in_s


def time_restores(
    model: LoadedModel,
    request: PromptRequest,
    page_sizes: Sequence[int],
    *,
    repeats: int,
    numerics: Literal["fast", "reproducible"],
    progress: lab.Progress,
) -> RestoreTimes:
    """Times restores for each page size; if stopped, keeps the finished ones.

    Each time is measured `repeats` + 1 times, and the first measurement is dropped.
    """
    rows = []
    num_tokens = len(request.tokens)
    for page_size in progress.track(page_sizes, "one request", "page sizes"):
        num_pages = -(-num_tokens // page_size)
        config = make_benchmark_config(
            1,
            num_tokens + 1,
            page_size=page_size,
            num_pages=max(POOL_TOKENS // page_size, num_pages + 1),
            max_sequences=2,
            queue_capacity=2,
            token_budget=num_tokens,
            steps_per_call=1,
            max_swap_pages=num_pages + 1,
            numerics=numerics,
        )
        pages = make_model_pages(model.config, config)
        num_bytes = num_tokens * sum(
            leaf[:, 0].nbytes // page_size for leaf in jax.tree.leaves(pages)
        )
        read_s = _time_reading(model, request, config, repeats)
        moved_s = _time_moves(pages, num_tokens, config, repeats)
        host_s = _time_host(pages, num_tokens, config, repeats)
        rows.append((page_size, num_tokens, num_bytes, read_s, *moved_s, *host_s))
    return RestoreTimes.of(rows)


def _time_reading(
    model: LoadedModel,
    request: PromptRequest,
    config: EngineConfig,
    repeats: int,
) -> list[float]:
    """Times the step that prefills all tokens of the request, after which it ends."""
    state = init(config, make_model_pages(model.config, config))
    forward = PagedForward(model.config, config.numerics)
    policy = scheduling.fcfs()
    ask = Sampling.greedy(max_tokens=1)
    clock = from_seconds(0.0)
    drain = jax.jit(engine.drain, donate_argnames="state")
    times_s = []
    for _ in range(repeats + 1):
        batch = make_requests(
            [request.tokens],
            [ask],
            config=config,
            request_ids=[0],
            eos_ids=model.eos_ids,
            width=config.submit_width,
        )
        state, _ = LOCAL.submit(state, batch, config=config)
        read = functools.partial(
            LOCAL.run_steps, config=config, forward=forward, policy=policy
        )
        took_s, (state, info) = time_call(read, model.params, state, clock)
        if info.num_rows.sum() != len(request.tokens):
            raise RuntimeError("the tokens were not read in one step")
        state, _ = drain(state)
        times_s.append(took_s)
    return times_s[1:]


def _time_moves(
    pages: Pages, num_tokens: int, config: EngineConfig, repeats: int
) -> tuple[list[float], list[float]]:
    """Times swapping out and in of pages that are scattered over the pool."""
    rng = np.random.default_rng(0)
    pages = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), pages
    )
    order = jnp.asarray(rng.permutation(config.num_pages), jnp.int32)
    pool = make_pool(config.num_pages, order)
    table = make_table(1, config.max_pages_per_slot)
    places = jnp.asarray([num_tokens], jnp.int32)
    pool, table, _, enough = memory.reserve(
        pool,
        table,
        places,
        places,
        page_size=config.page_size,
        max_new_pages=config.max_pages_per_slot,
    )
    if not enough:
        raise RuntimeError("the request does not fit the pool")
    table = advance_lengths(table, places)
    staging = _staging(pages, config)

    @functools.partial(jax.jit, donate_argnames=("staging", "pool", "table"))
    def leave(pages, staging, pool, table):
        """Swaps the request of the first slot out, as a step does."""
        row = jnp.zeros((1,), jnp.int32)
        staging, left = copy_out(
            staging,
            pages,
            table,
            jnp.zeros_like(table.page_ids),
            row,
            row,
            page_size=pages.page_size,
        )
        return staging, *drop_slots(pool, table, left)

    @functools.partial(jax.jit, donate_argnames=("pages", "staging", "pool", "table"))
    def back(pages, staging, pool, table):
        """Swaps the request in."""
        group = jnp.arange(2, dtype=jnp.int32)
        pages, pool, table, staging = copy_in(
            staging, pages, pool, table, group, group == 0, jnp.asarray([0, -1])
        )
        return pages, staging, pool, table

    before = _first_layer(pages, table)
    out_s = []
    in_s = []
    for _ in range(repeats + 1):
        took_s, (staging, pool, table) = time_call(leave, pages, staging, pool, table)
        out_s.append(took_s)
        took_s, (pages, staging, pool, table) = time_call(
            back, pages, staging, pool, table
        )
        in_s.append(took_s)
    np.testing.assert_array_equal(_first_layer(pages, table), before)
    return out_s[1:], in_s[1:]


def _time_host(
    pages: Pages, num_tokens: int, config: EngineConfig, repeats: int
) -> tuple[list[float], list[float]]:
    """Times the copies from the buffer to host memory and back.

    Another request of one page precedes the timed request in the queue, so that the
    timed request is moved to the host. Without the other request, it is moved back.
    """
    num_pages = config.max_swap_pages - 1
    staging = _staging(pages, config)
    owner = np.array([0] + [1] * num_pages, np.int32)
    ids = np.full(staging.page_ids.shape, NO_PAGE, np.int32)
    ids[0, 0] = 0
    ids[1, :num_pages] = np.arange(1, num_pages + 1)
    state = init(config, pages)
    staging = staging._replace(
        owner=jnp.asarray(owner),
        page_ids=jnp.asarray(ids),
        length=jnp.asarray([1, num_tokens], jnp.int32),
    )
    sequences = state.sequences._replace(group=jnp.arange(2, dtype=jnp.int32))
    state = state._replace(sequences=sequences, staging=staging)
    space = HostSpace(num_pages, LOCAL.move)
    times_s = []
    for _ in range(repeats + 1):
        for waiting, num_away in (((0, 1), num_pages), ((1,), 0)):
            sequence = np.full(state.ledger.queue.shape, NO_SEQUENCE, np.int32)
            sequence[: len(waiting)] = waiting
            books = state.ledger._replace(queue=jnp.asarray(sequence))
            state = state._replace(ledger=books)
            took_s, state = time_call(space.exchange, state)
            if space.num_used != num_away:
                raise RuntimeError(f"{space.num_used=} pages with the host")
            times_s.append(took_s)
    return times_s[2::2], times_s[3::2]


def _staging(pages: Pages, config: EngineConfig) -> Staging:
    return make_staging(
        pages,
        num_places=config.max_swap_pages,
        num_sequences=config.max_sequences,
        pages_per_slot=config.max_pages_per_slot,
    )


def _first_layer(pages: Pages, table: Table) -> np.ndarray:
    arrays = pages.layout.read(pages, 0, table.page_ids)
    return np.stack([np.asarray(x) for x in arrays])
