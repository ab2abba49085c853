"""The model runner: packs the rows of a step, selects a program, returns logits.

Fast numerics have these programs: "decode", one row per slot, if every slot feeds at
most one token; "verify", `1 + draft length` rows per slot, with speculation; and
"mixed", `token_budget` packed rows, for steps with prefill. The device selects the
program by loops of zero or one trip, because a `cond` would copy the pages.
Reproducible numerics have one program of exactly `ROW_TILE` rows, which runs as often
as the step's rows need.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import arrays
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine.drafting import Drafts, Tree
from jaxkv.engine.paging import StatePlan, locate_states
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import Pages, Rows
from jaxkv.models import ROW_TILE, Forward

type Logits = Float[Array, "logit_rows vocab"]
type DraftLogits = Float[Array, "slots drafts vocab"] | None
type _Run = Callable[[Pages, Rows], Any]
"""The model applied to its parameters; results have `logits` and `pages`."""


class ModelOutput(NamedTuple):
    """Output of the model for the rows of a step."""

    logits: Logits
    """Logits of the last known token of each slot, then of the spare rows."""
    drafted: DraftLogits
    """Logits of the drafts of each slot."""
    pages: Pages
    spare_sequence: Int32[Array, " spare"]
    """Sequence of each spare logit row, or `NO_SEQUENCE`."""
    spare_position: Int32[Array, " spare"]
    """Position of the token fed in each spare logit row."""


type _Carry = tuple[Logits, DraftLogits, EngineState]


class _PackedRows(NamedTuple):
    """Rows of a step, packed for any of the programs."""

    rows: Rows
    target: Int32[Array, " rows"]
    """Logit row of each packed row, or -1 for none."""


def feed(
    params: PyTree[ArrayOrShape],
    state: EngineState,
    num_rows: Int32[Array, " slots"],
    forks: Int32[Array, " slots"],
    drafts: Drafts | None = None,
    state_plan: StatePlan | None = None,
    *,
    config: EngineConfig,
    forward: Forward,
) -> ModelOutput:
    """Feeds the next `num_rows` tokens of each slot, at most `token_budget` in all.

    Args:
      params: parameters of the model.
      state: the engine, with pages reserved for all rows and `length` not yet advanced.
      num_rows: rows of each slot; its drafts are the last of them.
      forks: slot that each slot is forked from, whose logits it gets, or `NO_SEQUENCE`.
      drafts: the drafts; None if there is no drafter.
      state_plan: the states of recurrent layers; None without such layers.
      config: the engine's configuration.
      forward: the model.

    Returns:
      The logits and the pages.
    """

    def probe(params: PyTree[ArrayOrShape], pages: Pages, packed: _PackedRows) -> Array:
        rows = packed.rows if config.numerics == "fast" else _tile(packed, 0)
        return forward(params, pages, rows).logits

    num_drafts = None if drafts is None else drafts.num
    tree = None if drafts is None else drafts.tree
    slot = jnp.arange(config.max_slots, dtype=jnp.int32)
    source = jnp.where(forks >= 0, forks, slot)
    wanted = _RowCounts(num_rows, source, num_drafts, tree, state_plan)
    packed = _pack(state, wanted, config)
    shape = jax.eval_shape(probe, params, state.pages, packed)
    blank = jnp.zeros((packed.rows.logit_rows.shape[0], shape.shape[1]), shape.dtype)
    run = functools.partial(forward, params)
    if config.numerics == "fast":
        logits, drafted, pages = _feed_fast(run, state, wanted, blank, config)
    else:

        def one(index: Array, carry: tuple[Logits, Pages]) -> tuple[Logits, Pages]:
            logits, pages = carry
            result = run(pages, _tile(packed, index))
            target = lax.dynamic_slice_in_dim(packed.target, index * ROW_TILE, ROW_TILE)
            return arrays.put(logits, target, result.logits), result.pages

        num_tiles = (jnp.sum(num_rows, dtype=jnp.int32) + ROW_TILE - 1) // ROW_TILE
        with jax.named_scope("tiles"):
            logits, pages = lax.fori_loop(0, num_tiles, one, (blank, state.pages))
        logits, drafted = _split_drafts(logits, config)
        logits = arrays.write_prefix(logits, logits[wanted.source])
    spare = packed.rows.logit_rows[config.max_slots : config.num_logit_rows]
    assert packed.rows.slot is not None
    spare_slot = arrays.take(packed.rows.slot, spare, fill=-1)
    return ModelOutput(
        logits,
        drafted,
        pages,
        spare_sequence=arrays.take(state.slots.sequence, spare_slot, fill=NO_SEQUENCE),
        spare_position=arrays.take(packed.rows.position, spare, fill=-1),
    )


class _RowCounts(NamedTuple):
    """Rows that each slot feeds."""

    num_rows: Int32[Array, " slots"]
    source: Int32[Array, " slots"]
    """Slot whose logits each slot gets."""
    num_drafts: Int32[Array, " slots"] | None
    tree: Tree | None
    state_plan: StatePlan | None


def _feed_fast(
    run: _Run,
    state: EngineState,
    wanted: _RowCounts,
    blank: Float[Array, "all_rows vocab"],
    config: EngineConfig,
) -> tuple[Logits, DraftLogits, Pages]:
    """Runs the smallest program that has room for the step's rows."""
    busy = jnp.any(wanted.num_rows > 0)
    has_chunks = jnp.any(wanted.num_rows > 1)

    def several(length: int | None) -> Callable[[_Carry, _RowCounts], _Carry]:
        return functools.partial(_run_packed, run, config, length)

    def verify(carry: _Carry, wanted: _RowCounts) -> _Carry:
        """Runs the program of the smallest draft length that has room."""
        has_chunks = jnp.any(wanted.num_rows > 1)
        for length in config.draft_buckets:
            few = jnp.all(wanted.num_rows <= 1 + length)
            with jax.named_scope("verify"):
                carry = arrays.update_if(
                    has_chunks & few, several(length), carry, wanted
                )
            has_chunks &= ~few
        with jax.named_scope("mixed"):
            return arrays.update_if(has_chunks, several(None), carry, wanted)

    # The inputs of the rows are in the loops' carries. Else the compiler would hoist
    # rows, embedding and first products, which do not change from trip to trip, out of
    # the loops, where they would run even without a trip.
    carry = (*_split_drafts(blank, config), state)
    decode = functools.partial(_decode, run, config)
    with jax.named_scope("decode"):
        carry = arrays.update_if(busy & ~has_chunks, decode, carry, wanted)
    if config.draft_buckets:
        # One outer loop, so that decode steps skip all of these programs at once.
        carry = arrays.update_if(has_chunks, verify, carry, wanted)
    else:
        with jax.named_scope("mixed"):
            carry = arrays.update_if(has_chunks, several(None), carry, wanted)
    logits, drafted, state = carry
    return logits, drafted, state.pages


def _decode(
    run: _Run, config: EngineConfig, carry: _Carry, wanted: _RowCounts
) -> _Carry:
    """Runs the program of one row per slot."""
    logits, drafted, state = carry
    num_rows = wanted.num_rows
    place = jnp.where(num_rows > 0, state.table.length, -1)
    position = place
    if state.table.evicted is not None:
        position = jnp.where(num_rows > 0, state.table.position, -1)
    rows = Rows(
        token=_tokens(state, state.slots.sequence, position),
        position=position,
        slot=None,
        page_ids=state.table.page_ids,
        logit_rows=wanted.source,
        place=None if state.table.evicted is None else place,
        states=locate_states(wanted.state_plan, None, position, config),
        window_ids=state.window_ids,
        adapter=_adapters(state, state.slots.sequence),
        in_answer=_in_answer(state, state.slots.sequence, position, config),
    )
    result = run(state.pages, rows)
    after = state._replace(pages=result.pages)
    if logits.shape[0] == num_rows.shape[0]:
        return result.logits, drafted, after
    # A prompt with log-probabilities may feed one token, which takes a spare logit row.
    rows = _pack(state, wanted._replace(num_drafts=None), config).rows
    assert rows.slot is not None
    slot = arrays.take(rows.slot, rows.logit_rows[: logits.shape[0]], fill=-1)
    slot = arrays.write_prefix(slot, jnp.arange(num_rows.shape[0], dtype=jnp.int32))
    spread = result.logits[jnp.maximum(slot, 0)]
    return jnp.where((slot >= 0)[:, None], spread, logits), drafted, after


def _run_packed(
    run: _Run,
    config: EngineConfig,
    length: int | None,
    carry: _Carry,
    wanted: _RowCounts,
) -> _Carry:
    """Runs the program of `1 + length` rows per slot; of packed rows if it is None."""
    _, drafted, state = carry
    _, source, num_drafts, tree, _ = wanted
    rows = _pack(state, wanted, config, length).rows
    if tree is not None and num_drafts is not None:
        rows = _mask_trees(rows, state.table.length, num_drafts, tree)
    logit_rows = arrays.write_prefix(rows.logit_rows, rows.logit_rows[source])
    result = run(state.pages, rows._replace(logit_rows=logit_rows))
    logits, draft_logits = _split_drafts(result.logits, config)
    if drafted is not None and draft_logits is not None:
        drafted = arrays.write_prefix(drafted, draft_logits)
    return logits, drafted, state._replace(pages=result.pages)


def _split_drafts(
    logits: Float[Array, "rows vocab"], config: EngineConfig
) -> tuple[Logits, DraftLogits]:
    """Separates the logits of the drafts, equally many per slot."""
    if not config.max_drafts:
        return logits, None
    drafted = logits[config.num_logit_rows :]
    shape = config.max_slots, -1, logits.shape[1]
    return logits[: config.num_logit_rows], drafted.reshape(shape)


def _mask_trees(
    rows: Rows,
    root: Int32[Array, " slots"],
    num_drafts: Int32[Array, " slots"],
    tree: Tree,
) -> Rows:
    """Sets positions and attention masks of token trees (tree attention).

    The rows have the drafts in consecutive token places after `root`, the place of the
    last known token. Each draft gets the position of its depth, and attends to its
    ancestors and to the known tokens.
    """
    place = rows.position
    slot = rows.slot
    if slot is None:
        slot = jnp.arange(place.shape[0], dtype=jnp.int32)
        slot //= place.shape[0] // root.shape[0]
    has_tree = num_drafts > 0
    draft = place - arrays.take(root, slot, fill=0) - 1
    is_draft = arrays.take(has_tree, slot, fill=False) & (place >= 0) & (draft >= 0)
    at = slot, jnp.where(is_draft, draft, -1)
    depth = arrays.take(tree.depth, at, fill=0)
    return rows._replace(
        position=jnp.where(is_draft, place - draft - 1 + depth, place),
        place=place,
        context=jnp.where(has_tree, root + 1, -1),
        ancestors=arrays.take(tree.ancestors, at, fill=False),
    )


def _tile(packed: _PackedRows, index: int | Array) -> Rows:
    """Returns the `index`-th tile of the rows."""

    def cut(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, index * ROW_TILE, ROW_TILE)

    rows = packed.rows
    assert rows.slot is not None
    every = jnp.arange(ROW_TILE, dtype=jnp.int32)
    return rows._replace(
        token=cut(rows.token),
        position=cut(rows.position),
        slot=cut(rows.slot),
        place=None if rows.place is None else cut(rows.place),
        logit_rows=jnp.where(cut(packed.target) >= 0, every, -1),
        states=jax.tree.map(cut, rows.states),
        adapter=None if rows.adapter is None else cut(rows.adapter),
        in_answer=None if rows.in_answer is None else cut(rows.in_answer),
    )


@jax.named_scope("pack")
def _pack(
    state: EngineState,
    wanted: _RowCounts,
    config: EngineConfig,
    length: int | None = None,
) -> _PackedRows:
    """Packs the rows of all slots contiguously, in order of slots and positions.

    With a `length`, every slot has exactly `1 + length` rows, padded where it feeds
    fewer.
    """
    num_rows = wanted.num_rows
    num_drafts = wanted.num_drafts
    if length is None:
        num_packed = config.token_budget
        length = config.max_drafts
        if config.numerics == "reproducible":
            # At least two tiles: the slice of a single one does not change from trip to
            # trip, so XLA would compile another program of it, with other rounding.
            num_packed = max(2, -(-num_packed // ROW_TILE)) * ROW_TILE
        # All pairs, not `cumsum`: XLA's kernel for that loses the named scope.
        upto = jnp.tri(config.max_slots, dtype=jnp.bool_)
        end = jnp.sum(jnp.where(upto, num_rows, 0), axis=1, dtype=jnp.int32)
        row = jnp.arange(num_packed, dtype=jnp.int32)
        used = row < end[-1]
        before = jnp.sum(end[None, :] <= row[:, None], axis=1, dtype=jnp.int32)
        slot = jnp.where(used, before, -1)
        start = arrays.take(state.table.length - (end - num_rows), slot, fill=0)
        position = jnp.where(used, start + row, -1)
        sequence = arrays.take(state.slots.sequence, slot, fill=NO_SEQUENCE)
    else:
        rows_per_slot = 1 + length
        slot = None
        index = jnp.arange(rows_per_slot, dtype=jnp.int32)[None, :]
        position = state.table.length[:, None] + index
        position = jnp.where(index < num_rows[:, None], position, -1).reshape(-1)
        sequence = jnp.repeat(state.slots.sequence, rows_per_slot)
        end = jnp.arange(config.max_slots, dtype=jnp.int32) * rows_per_slot + num_rows
    place = None
    if (evicted := state.table.evicted) is not None:
        # Only without drafts, whose packing has no column of slots.
        assert slot is not None
        place = position
        shift = arrays.take(evicted, slot, fill=0)
        position = jnp.where(place >= 0, place + shift, -1)
    # Logit rows: the last known token of each slot, spare rows, drafts.
    last = end - 1 if num_drafts is None else end - 1 - num_drafts
    last = jnp.where(num_rows > 0, last, -1)
    logit_rows = [last]
    if config.num_logit_rows > config.max_slots:
        # Prompt tokens whose log-probabilities are requested. The last token of a slot
        # has the slot's logit row.
        s = state.sequences
        keep_logprobs = position + 1 < arrays.take(s.prompt_length, sequence, fill=0)
        keep_logprobs &= arrays.take(s.keep_prompt_logprobs, sequence, fill=False)
        spare = arrays.marked_indices(
            keep_logprobs, config.num_logit_rows - config.max_slots
        )
        logit_rows.append(spare)
    if length and num_drafts is None:
        logit_rows.append(jnp.full((last.shape[0] * length,), -1, jnp.int32))
    elif num_drafts is not None:
        index = jnp.arange(1, length + 1, dtype=jnp.int32)[None, :]
        is_draft = (index <= num_drafts[:, None]) & (last >= 0)[:, None]
        drafts = jnp.where(is_draft, last[:, None] + index, -1).reshape(-1)
        logit_rows.append(drafts)
    logit_rows = jnp.concatenate(logit_rows)
    index = jnp.arange(logit_rows.shape[0], dtype=jnp.int32)
    target = arrays.put(jnp.full_like(position, -1), logit_rows, index)
    rows = Rows(
        token=_tokens(state, sequence, position),
        position=position,
        slot=slot,
        page_ids=state.table.page_ids,
        logit_rows=logit_rows,
        place=place,
        states=locate_states(wanted.state_plan, slot, position, config),
        window_ids=state.window_ids,
        adapter=_adapters(state, sequence),
        in_answer=_in_answer(state, sequence, position, config),
    )
    return _PackedRows(rows, target)


def _adapters(
    state: EngineState, sequence: Int32[Array, " rows"]
) -> Int32[Array, " rows"] | None:
    """Returns the adapters of sequences, 0 for none; None without adapters."""
    adapter = state.sequences.adapter
    return None if adapter is None else arrays.take(adapter, sequence, fill=0)


def _in_answer(
    state: EngineState,
    sequence: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    config: EngineConfig,
) -> Bool[Array, " rows"] | None:
    """Returns True for tokens of answers; None unless "quest" reads it."""
    if config.evict != "quest":
        return None
    prompt = arrays.take(state.sequences.prompt_length, sequence, fill=0)
    return position >= prompt


def _tokens(
    state: EngineState,
    sequence: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """Returns the tokens of sequences at some positions."""
    s = state.sequences
    tokens = arrays.take(s.tokens, (sequence, position), fill=0)
    if (search := state.search) is None:
        return tokens
    # A beam's own row has its last token; earlier tokens may be in rows of other beams.
    group = arrays.take(s.group, sequence, fill=NO_SEQUENCE)
    beam = arrays.take(search.width, group, fill=0) > 0
    num_tokens = jnp.zeros(s.group.shape, jnp.int32)
    num_tokens = arrays.put(num_tokens, state.slots.sequence, state.slots.num_tokens)
    again = position < arrays.take(num_tokens, sequence, fill=0) - 1
    again &= position >= arrays.take(s.prompt_length, sequence, fill=0)
    path = arrays.take(search.path, (sequence, position), fill=0)
    return jnp.where(beam & again, path, tokens)
