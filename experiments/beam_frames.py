"""The scene of the beams: a search on real tables, played without the scheduler.

`beams.step` names parents and words, `tables.reorder` lets slots continue others, and
`tables.reserve` finds the pages for what they write next, as a step of the engine does.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments import page_frames
from experiments.page_frames import Frames, Search
from experiments.sentences import Language, Scribe
from jaxkv import beams, caching, emission, tables


def play(
    language: Language,
    prompt: str,
    *,
    width: int,
    captions: dict[int, tuple[str, str]],
    num_pages: int,
    page_size: int,
    order: Sequence[int],
) -> Frames:
    """Searches with beams, and looks at the state around some of its steps.

    Args:
      language: what follows what.
      prompt: the words to begin with.
      width: beams, each in a slot of its own.
      captions: by the number of tokens written before a step: what it did to the
        tables, and what it then wrote; an empty one makes no frame.
      num_pages: pages in the pool.
      page_size: token places in a page.
      order: as for `Stage.play`.
    """
    words = language.encode(prompt)
    tokens = jnp.full((width, page_frames.MAX_LENGTH), -1, jnp.int32)
    tokens = tokens.at[:, : len(words)].set(jnp.asarray(words, jnp.int32)[None, :])
    columns = -(-page_frames.MAX_LENGTH // page_size)
    search = Search(
        pages=page_frames.blank_pages(num_pages, page_size),
        pool=page_frames.make_pool(num_pages, order),
        table=tables.make_table(width, columns),
        tokens=tokens,
        group=beams.make_beams(width),
    )
    first = jnp.arange(width, dtype=jnp.int32) == 0
    write = jax.jit(_write, static_argnames=("language", "page_size"))
    choose = jax.jit(_choose, static_argnames=("language", "start"))
    search = write(search, first.astype(jnp.int32) * len(words), language, page_size)
    shots, said = [], []
    for length in range(len(words), max(captions) + 1):
        moved = choose(search, language, start=len(words))
        ones = jnp.ones((width,), jnp.int32)
        search = write(moved, ones, language, page_size)
        both = captions.get(length, ("", ""))
        for caption, now in zip(both, (moved, search), strict=True):
            if caption:
                shots.append(page_frames.look(now))
                said.append(caption)
    return page_frames.gather(shots, said, language)


def _write(
    search: Search, num_rows: jax.Array, language: Language, page_size: int
) -> Search:
    """Writes the next `num_rows` known words of each slot to its pages."""
    length, num_slots = search.table.length, num_rows.shape[0]
    pool, table, copies, _ = tables.reserve(
        *(search.pool, search.table, length + num_rows, num_rows),
        page_size=page_size,
        max_new_pages=search.table.page_ids.shape[1],
    )
    pages = caching.copy(search.pages, copies.source, copies.target)
    place = jnp.arange(page_frames.MAX_LENGTH, dtype=jnp.int32)[None, :]
    is_new = (place >= length[:, None]) & (place < (length + num_rows)[:, None])
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    rows = caching.Rows(
        token=search.tokens.reshape(-1),
        position=jnp.where(is_new, place, -1).reshape(-1),
        slot=jnp.repeat(slot, page_frames.MAX_LENGTH),
        page_ids=table.page_ids,
        logit_rows=slot,
    )
    result = Scribe(vocab_size=len(language.words))(None, pages, rows)
    table = tables.advance(table, num_rows)
    return search._replace(pages=result.pages, pool=pool, table=table)


def _choose(search: Search, language: Language, *, start: int) -> Search:
    """Chooses beams and their next words, and moves the table rows."""
    width = search.table.length.shape[0]
    length = start + search.group.length
    answer = emission.Answer(
        tokens=search.tokens,
        num_tokens=jnp.broadcast_to(length, (width,)),
        prompt_length=jnp.full((width,), start, jnp.int32),
        request_id=jnp.zeros((width,), jnp.int32),
    )
    blank = jnp.zeros((width, len(language.words)), "float32")
    best, logprobs = beams.choices(
        language.logits(answer, blank), max_beams=width, max_stops=1
    )
    params = beams.Params(
        width=jnp.full((), width, jnp.int32),
        length_penalty=jnp.zeros((), "float32"),
        early_stopping=jnp.full((), beams.FULL, jnp.int32),
        stop_tokens=jnp.full((1,), -1, jnp.int32),
        limit=jnp.full((), page_frames.MAX_LENGTH, jnp.int32),
    )
    going = jnp.ones((), bool)
    group, parent, word = beams.step(search.group, params, best, logprobs, going)
    pool, table = tables.reorder(search.pool, search.table, parent)
    tokens = search.tokens[parent]
    tokens = tokens.at[:, length].set(word)
    return search._replace(pool=pool, table=table, tokens=tokens, group=group)
