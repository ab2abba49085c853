"""Scenes of paged memory, frame by frame: what pool, table and pages really held."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import Language, Scribe
from jaxkv import clock
from jaxkv.engine import EngineConfig, EngineState
from jaxkv.engine.requests import submit
from jaxkv.engine.state import init
from jaxkv.engine.step import run_steps
from jaxkv.memory import NO_PAGE, invariants, kv_pages, page_pool
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs
from jaxkv.serving import outputs

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
        Not told of beams: their slots also map others' pages when they follow others.
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

    def ever_used(self) -> list[bool]:
        """Whether each page is in use in any frame."""
        return (self.ref > 0).any(0).tolist()

    def owners(self, frame: int, page: int) -> list[int]:
        """Slots whose tables hold a page."""
        return (self.page_ids[frame] == page).any(1).nonzero()[0].tolist()

    def pages(self, frame: int, slot: int) -> list[int]:
        """Pages of a slot, in token order."""
        row = self.page_ids[frame, slot]
        return row[row != NO_PAGE].tolist()


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

    def __init__(
        self,
        language: Language,
        *,
        num_pages: int,
        page_size: int,
        max_slots: int = 2,
        max_beams: int = 0,
    ) -> None:
        """Sets an engine up; see `EngineConfig` for the sizes."""
        self.language = language
        self.config = EngineConfig(
            num_pages=num_pages,
            page_size=page_size,
            max_slots=max_slots,
            max_length=MAX_LENGTH,
            max_sequences=max_slots,
            queue_capacity=max_slots,
            token_budget=MAX_LENGTH,
            max_beams=max_beams,
            submit_width=max_slots,
            steps_per_call=1,
            debug=True,
        )
        self._submit = jax.jit(submit, static_argnames="config")
        self._run = jax.jit(
            run_steps,
            static_argnames=("config", "forward"),
            # It runs for milliseconds: to optimise it would take longer.
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def play(
        self, asks: Sequence[Ask], captions: Sequence[str], order: Sequence[int]
    ) -> Frames:
        """Runs a step for each caption, and looks at the state after each.

        Args:
          asks: the requests, sequences of all of them no more than slots.
          captions: what each step does; an empty one makes no frame.
          order: pages, in the order in which they shall be handed out; the others
            follow.

        Raises:
          RuntimeError: a request does not fit the engine; or a step broke an invariant
            of the pool, or copied pages that the tables do not show.
        """
        config = self.config
        num, size = config.num_pages, config.page_size
        state = init(config, _blank_pages(num, size))
        state = state._replace(pool=_make_pool(num, order))
        requests = outputs.make_requests(
            [self.language.encode(ask.prompt) for ask in asks],
            [ask.sampling for ask in asks],
            config=config,
            arrivals_s=[float(ask.step) for ask in asks],
            width=config.submit_width,
        )
        state, taken = self._submit(state, requests, config=config)
        if taken.sum() != sum(ask.sampling.num_sequences for ask in asks):
            raise RuntimeError(f"{taken=}: a request does not fit {config}")
        shots = []
        for step, caption in enumerate(captions):
            before = state
            state, info = self._run(
                *(None, state, clock.from_seconds(float(step))),
                config=config,
                forward=Scribe(language=self.language),
                policy=fcfs.fcfs(),
            )
            invariants.refuse(info.violations, first_step=step)
            shot = _look(state, before)
            num_copied = (shot["copied"] != NO_PAGE).sum()
            if state.search is None and num_copied != info.num_copied.sum():
                raise RuntimeError(f"step {step}: {info.num_copied=} differs")
            if caption:
                shots.append(shot)
        return _gather(shots, [text for text in captions if text], self.language)


def _make_pool(num_pages: int, order: Sequence[int]) -> page_pool.Pool:
    """Makes a pool that hands out the pages of `order` first, then the others."""
    rest = [page for page in range(num_pages) if page not in order]
    return page_pool.make_pool(num_pages, jnp.asarray([*order, *rest], jnp.int32))


def _blank_pages(num_pages: int, page_size: int) -> kv_pages.Pages:
    """Pages of not-a-numbers: what is none was written."""
    shape = (1, num_pages, 1, page_size, 1)
    # Two arrays: no buffer can be donated twice.
    return kv_pages.Pages(*(jnp.full(shape, jnp.nan, "float32") for _ in range(2)))


def _look(state: EngineState, before: EngineState) -> dict[str, np.ndarray]:
    """Reads one state; next to the one before, also what was copied since."""
    page_ids = np.asarray(state.table.page_ids)
    copied = np.full(state.pool.ref.shape, NO_PAGE, np.int32)
    old = np.asarray(before.table.page_ids)
    # A slot that runs on maps another page in a place only if it took a copy.
    moved = (old != page_ids) & (old != NO_PAGE) & (page_ids != NO_PAGE)
    if state.search is None:
        copied[page_ids[moved]] = old[moved]

    def read(leaf: jax.Array) -> np.ndarray:
        values = np.asarray(leaf)[0, :, 0, :, 0]
        return np.where(np.isnan(values), -1, values).astype(np.int32)

    return {
        "tokens": _histories(state),
        "page_ids": page_ids,
        "length": np.asarray(state.table.length),
        "ref": np.asarray(state.pool.ref),
        "held": read(state.pages.k),
        "place": read(state.pages.v),
        "copied": copied,
    }


def _histories(state: EngineState) -> np.ndarray:
    """Tokens of each slot; those of a beam stand where they were chosen."""
    s, slots = state.sequences, np.asarray(state.slots.sequence)
    tokens = np.full((len(slots), s.tokens.shape[1]), -1, np.int32)
    for slot, row in enumerate(slots):
        if row < 0:
            continue
        num = int(s.num_tokens[row])
        if state.search is None:
            tokens[slot, :num] = s.tokens[row, :num]
            continue
        for place in reversed(range(num)):
            tokens[slot, place] = s.tokens[row, place]
            # Rows of a group lie side by side: nobody was there before it.
            row = s.group[row] + state.search.parents[row, place]
    return tokens


def _gather(
    shots: list[dict[str, np.ndarray]], captions: Sequence[str], language: Language
) -> Frames:
    """Stacks what `_look` saw."""
    stacked = {name: np.stack([shot[name] for shot in shots]) for name in shots[0]}
    return Frames(caption=np.array(captions), words=np.array(language.words), **stacked)
