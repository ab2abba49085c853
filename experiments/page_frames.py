"""Scenes of paged memory, frame by frame: what pool, table and pages really held."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.sentences import Language, Scribe
from jaxkv import (
    answers,
    beams,
    caching,
    engine,
    paging,
    queueing,
    scheduling,
    states,
    tables,
)
from jaxkv.paging import NO_PAGE
from jaxkv.sampling import Sampling
from jaxkv.states import EngineConfig, EngineState

MAX_LENGTH = 24


class Frames(NamedTuple):
    """States one after the other, as arrays with a leading axis of frames.

    Attributes:
      caption: what happened: [frames].
      words: the words, by token: [vocab].
      tokens: prompt and answer so far, -1 beyond: [frames, slots, max_length].
      page_ids: the page table: [frames, slots, columns].
      length: tokens whose K and V are written: [frames, slots].
      ref: uses of each page: [frames, pages].
      held: tokens read from the keys of each page, -1 where none was ever written:
        [frames, pages, page_size].
      place: their positions, read from the values, likewise.
      copied: page that a page was copied from in this frame, or -1: [frames, pages].
    """

    caption: np.ndarray
    words: np.ndarray
    tokens: np.ndarray
    page_ids: np.ndarray
    length: np.ndarray
    ref: np.ndarray
    held: np.ndarray
    place: np.ndarray
    copied: np.ndarray

    def filled(self, frame: int, slot: int) -> list[int]:
        """Token places that are filled in each page of a slot."""
        size, length = self.held.shape[2], int(self.length[frame, slot])
        return [min(size, length - i) for i in range(0, length, size)]

    def owners(self, frame: int, page: int) -> list[int]:
        """Slots whose tables hold a page."""
        return (self.page_ids[frame] == page).any(1).nonzero()[0].tolist()

    def pages(self, frame: int, slot: int) -> list[int]:
        """Pages of a slot, in token order."""
        row = self.page_ids[frame, slot]
        return row[row != NO_PAGE].tolist()


class Search(NamedTuple):
    """A beam search without the scheduler; slots are beams.

    Attributes:
      pages: K and V.
      pool: who uses which page.
      table: pages of each beam.
      tokens: words of each beam, the last one not written yet: [beams, max_length].
      group: scores.
    """

    pages: caching.Pages
    pool: paging.Pool
    table: tables.Table
    tokens: jax.Array
    group: beams.Beams


class Ask(NamedTuple):
    """A request.

    Attributes:
      prompt: its words.
      sampling: what it asks for.
      step: the step from which on it is there.
    """

    prompt: str
    sampling: Sampling
    step: int = 0


class Stage:
    """An engine of few pages, handed out in an order of ours, that runs step by step.

    One program serves all scenes that are played on it.
    """

    def __init__(self, language: Language, *, num_pages: int, page_size: int) -> None:
        """Sets an engine of two slots up; see `EngineConfig` for the sizes."""
        self.language = language
        self.config = EngineConfig(
            num_pages=num_pages,
            page_size=page_size,
            max_slots=2,
            max_length=MAX_LENGTH,
            max_sequences=2,
            queue_capacity=2,
            submit_width=2,
            token_budget=MAX_LENGTH,
            steps_per_call=1,
            debug=True,
        )
        self._submit = jax.jit(queueing.submit, static_argnames="config")
        self._run = jax.jit(
            engine.run_steps,
            static_argnames=("config", "forward", "logits_fn", "num_steps"),
        )

    def play(
        self, asks: Sequence[Ask], captions: Sequence[str], order: Sequence[int]
    ) -> Frames:
        """Runs a step for each caption, and looks at the state after each.

        Args:
          asks: the requests, sequences of all of them no more than slots.
          captions: what each step does.
          order: pages, in the order in which they shall be handed out; the others
            follow.

        Raises:
          RuntimeError: a step broke an invariant of the pool, or copied pages that the
            tables do not show.
        """
        config = self.config
        num, size = config.num_pages, config.page_size
        state = states.init(config, blank_pages(num, size))
        state = state._replace(pool=make_pool(num, order))
        requests = answers.make_requests(
            [self.language.encode(ask.prompt) for ask in asks],
            [ask.sampling for ask in asks],
            config=config,
            arrivals_s=[float(ask.step) for ask in asks],
            width=config.submit_width,
        )
        state, _ = self._submit(state, requests, config=config)
        shots = []
        for step in range(len(captions)):
            before = state
            state, info = self._run(
                *(None, state, answers.clock(float(step))),
                config=config,
                forward=Scribe(vocab_size=len(self.language.words)),
                policy=scheduling.fcfs(),
                logits_fn=self.language.logits,
            )
            if any(np.any(count) for count in info.violations):
                raise RuntimeError(f"step {step} broke {info.violations=}")
            shots.append(look(state, before))
            if (shots[-1]["copied"] != NO_PAGE).sum() != info.num_copied.sum():
                raise RuntimeError(f"step {step}: {info.num_copied=} differs")
        return gather(shots, captions, self.language)


def make_pool(num_pages: int, order: Sequence[int]) -> paging.Pool:
    """Makes a pool that hands out the pages of `order` first, then the others."""
    rest = [page for page in range(num_pages) if page not in order]
    return paging.make_pool(num_pages, jnp.asarray([*order, *rest], jnp.int32))


def blank_pages(num_pages: int, page_size: int) -> caching.Pages:
    """Pages of not-a-numbers: what is none was written."""
    shape = (1, num_pages, 1, page_size, 1)
    # Two arrays: no buffer can be donated twice.
    return caching.Pages(*(jnp.full(shape, jnp.nan, "float32") for _ in range(2)))


def look(
    state: EngineState | Search, before: EngineState | None = None
) -> dict[str, np.ndarray]:
    """Reads one state; next to the one before, also what was copied since."""
    page_ids = np.asarray(state.table.page_ids)
    copied = np.full(state.pool.ref.shape, NO_PAGE, np.int32)
    if isinstance(state, Search):
        tokens = np.asarray(state.tokens)
    else:
        s, row = state.sequences, np.asarray(state.slots.sequence)
        place = np.arange(s.tokens.shape[1])[None, :]
        known = np.where(row >= 0, np.asarray(s.num_tokens)[row], 0)
        tokens = np.where(place < known[:, None], np.asarray(s.tokens)[row], -1)
    if before is not None:
        old = np.asarray(before.table.page_ids)
        # A slot that runs on maps another page in a place only if it took a copy.
        moved = (old != page_ids) & (old != NO_PAGE) & (page_ids != NO_PAGE)
        copied[page_ids[moved]] = old[moved]

    def read(leaf: jax.Array) -> np.ndarray:
        values = np.asarray(leaf)[0, :, 0, :, 0]
        return np.where(np.isnan(values), -1, values).astype(np.int32)

    return {
        "tokens": tokens,
        "page_ids": page_ids,
        "length": np.asarray(state.table.length),
        "ref": np.asarray(state.pool.ref),
        "held": read(state.pages.k),
        "place": read(state.pages.v),
        "copied": copied,
    }


def gather(
    shots: list[dict[str, np.ndarray]], captions: Sequence[str], language: Language
) -> Frames:
    """Stacks what `look` saw."""
    stacked = {name: np.stack([shot[name] for shot in shots]) for name in shots[0]}
    return Frames(caption=np.array(captions), words=np.array(language.words), **stacked)
