"""Recording of steps: page tables, states, drafts and experts, for a `RunTrace`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger
from jaxkv.engine import paging
from jaxkv.engine.drafting import Drafts, VerifyOutput
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import NO_PAGE, Copies, Pages, checkpointed, read_routes
from jaxkv.models import NO_EXPERT


class StepPages(NamedTuple):
    """Page tables, pool and queue while a step ran, after its plan was applied.

    Fields after `queue_swapped` are None in engines without such layers or options.
    """

    page_ids: Int32[Array, "slots pages_per_slot"]
    """Page table: pages of each slot in token order, `NO_PAGE` beyond them."""
    length: Int32[Array, " slots"]
    """Tokens of each slot whose K and V were written before the step."""
    ref: Int32[Array, " pages"]
    """Reference count of each page; 0 means free."""
    is_cached: Bool[Array, " pages"]
    """True if the page is in the prefix cache, which counts as one reference."""
    copied_from: Int32[Array, " slots"]
    """Shared page that the slot copied before a write, or `NO_PAGE`."""
    copied_to: Int32[Array, " slots"]
    """Page that the slot has in its place, or `NO_PAGE`."""
    num_cached: Int32[Array, " slots"]
    """Prompt tokens of the slot's sequence found in the prefix cache."""
    queue: Int32[Array, " places"]
    """Request ids of the queue in order; -1 beyond them."""
    queue_swapped: Int32[Array, " places"]
    """Swapped-out pages of each request in the queue."""
    is_on_host: Bool[Array, " places"] | None = None
    """True if the swapped-out pages are in host memory, not in the staging buffer."""
    window_ids: Int32[Array, "slots pages_per_slot"] | None = None
    """Pages of layers with a window; `NO_PAGE` behind it."""
    state_ids: Int32[Array, " slots"] | None = None
    """State of recurrent layers from which each slot continued, or `NO_STATE`."""
    state_ref: Int32[Array, " states"] | None = None
    """Sequences that continue from each state."""
    state_page: Int32[Array, " states"] | None = None
    """Cached page whose checkpoint the state is, or `NO_PAGE`."""
    draft_tokens: Int32[Array, "slots drafts"] | None = None
    """Drafts of each slot, -1 beyond them; none in a step without drafts."""
    draft_parents: Int32[Array, "slots drafts"] | None = None
    """Place of each draft's parent: 0 is the last known token, k the k-th draft."""
    draft_path: Int32[Array, "slots drafts"] | None = None
    """Places of the accepted drafts in order; 0 beyond them."""
    routes: Int32[Array, "rows mixtures top_k"] | None = None
    """Experts of the tokens fed, drafts included, then `NO_EXPERT`; None unless
    `EngineConfig.record_routes` is set."""


@jax.named_scope("info")
def record_pages(
    planned: EngineState,
    pages: Pages,
    copies: Copies,
    num_rows: Int32[Array, " slots"],
    drafts: Drafts | None,
    verified: VerifyOutput | None,
    config: EngineConfig,
) -> StepPages:
    """Makes the `StepPages` of a step.

    `planned` is the state after planning, `pages` are those after the model has run,
    and `num_rows` are the tokens fed, drafts included.
    """
    s = planned.sequences
    pool = planned.pool
    table = planned.table
    cache = planned.prefixes
    states = planned.states
    queue = planned.ledger.queue
    swapped = ledger.PROGRESS.read(planned.ledger.progress, "swapped_pages")
    step_pages = StepPages(
        page_ids=table.page_ids,
        length=table.length,
        ref=pool.ref,
        is_cached=jnp.zeros_like(pool.ref, bool) if cache is None else cache.pinned,
        copied_from=copies.source,
        copied_to=copies.target,
        num_cached=arrays.take(s.num_cached, planned.slots.sequence, fill=0),
        queue=arrays.take(s.request_id, queue, fill=-1),
        queue_swapped=arrays.take(swapped, queue, fill=0),
        window_ids=None if planned.windows is None else planned.windows.page_ids,
    )
    if planned.staging is not None:
        step_pages = step_pages._replace(is_on_host=paging.is_on_host(planned, queue))
    if states is not None:
        step_pages = step_pages._replace(
            state_ids=states.of_slot,
            state_ref=states.ref,
            state_page=jnp.where(checkpointed(states, cache), states.page, NO_PAGE),
        )
    if drafts is not None and verified is not None:
        index = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
        parents = index if drafts.parents is None else drafts.parents
        accepted = jnp.where(verified.emits, verified.accepted, 0)
        is_draft = index < drafts.num[:, None]
        is_accepted = is_draft & (index < accepted[:, None])
        step_pages = step_pages._replace(
            draft_tokens=jnp.where(is_draft, drafts.tokens, -1),
            draft_parents=jnp.where(is_draft, parents, 0),
            draft_path=jnp.where(is_accepted, verified.path, 0),
        )
    if pages.routes is not None:
        stored = read_routes(pages, table.page_ids)
        place = jnp.arange(stored.shape[1], dtype=jnp.int32)[None, :]
        is_fed = place >= table.length[:, None]
        is_fed &= place < (table.length + num_rows)[:, None]
        row = arrays.marked_indices(is_fed.reshape(-1), _num_route_rows(config))
        stored = stored.reshape(-1, *stored.shape[2:])
        step_pages = step_pages._replace(
            routes=arrays.take(stored, row, fill=NO_EXPERT)
        )
    return step_pages


def pad_drafts(pages: StepPages, config: EngineConfig) -> StepPages:
    """Pads the pages of steps without drafts, stacked, as of steps with drafts."""
    none = jnp.zeros((*pages.length.shape, config.max_drafts), jnp.int32)
    pages = pages._replace(draft_tokens=none - 1, draft_parents=none, draft_path=none)
    if (routes := pages.routes) is None:
        return pages
    num_new = _num_route_rows(config) - routes.shape[1]
    wide = ((0, 0), (0, num_new), (0, 0), (0, 0))
    return pages._replace(routes=jnp.pad(routes, wide, constant_values=NO_EXPERT))


def _num_route_rows(config: EngineConfig) -> int:
    return max(config.token_budget, config.max_slots * config.emit_width)
