"""Scenes of paged memory, frame by frame: what pool, table and pages really held."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.framework import Record, Texts, column
from experiments.harness import model_shapes, stepping
from experiments.harness.sentences import Language, Scribe
from jaxkv.engine import EngineState
from jaxkv.memory import NO_PAGE, invariants, kv_layout, kv_pages, page_pool
from jaxkv.sampling import Sampling

MAX_LENGTH = 24

PerSlot = Int[np.ndarray, "frames slots columns"]
PerPlace = Int[np.ndarray, "frames pages page_size"]


class Frames(Record):
    """States one after the other, as arrays with a leading axis of frames."""

    caption: Texts = column("what happened")
    words: Texts = column("the words, by token: [vocab]")
    tokens: PerSlot = column("prompt and answer so far, -1 beyond")
    page_ids: PerSlot = column("the page table")
    length: Int[np.ndarray, "frames slots"] = column("tokens with K and V written")
    ref: Int[np.ndarray, "frames pages"] = column("uses of each page")
    held: PerPlace = column("tokens read from the keys, -1 where none was ever written")
    place: PerPlace = column("their positions, read from the values")
    copied: Int[np.ndarray, "frames pages"] = column(
        "page that a page was copied from in this frame, or -1; not told of beams, "
        "whose slots also map others' pages when they follow others"
    )

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

    def words_of(self, tokens: np.ndarray) -> list[str]:
        """The words of tokens, nothing where there is none."""
        return [str(self.words[token]) if token >= 0 else "" for token in tokens]


class FrameRequest(NamedTuple):
    """A request.

    Attributes:
      prompt: its words.
      sampling: what it asks for.
      step: the step from which on it is there.
    """

    prompt: str
    sampling: Sampling
    step: int = 0


class FrameRecorder(stepping.Stepper):
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
        config = model_shapes.bounds(
            max_slots,
            MAX_LENGTH,
            page_size=page_size,
            num_pages=num_pages,
            token_budget=MAX_LENGTH,
            max_beams=max_beams,
            steps_per_call=1,
            debug=True,
        )

        def blank_pages() -> kv_pages.Pages:
            """Pages of NaN, which mark places that were never written."""
            pages = kv_layout.FULL.make((1, num_pages, 1, page_size, 1), "float32")
            return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pages)

        super().__init__(config, Scribe(language=language), blank_pages)

    def record(
        self,
        asks: Sequence[FrameRequest],
        captions: Sequence[str],
        order: Sequence[int],
    ) -> Frames:
        """Runs a step for each caption, and looks at the state after each.

        Args:
          asks: the requests, sequences of all of them no more than slots.
          captions: what each step does; an empty one makes no frame.
          order: pages, in the order in which they shall be handed out; the others
            follow.

        Raises:
          ValueError: a request does not fit the engine.
          RuntimeError: a step broke an invariant of the pool, or copied pages that the
            tables do not show.
        """
        self.clear()
        num_pages = self.config.num_pages
        rest = [page for page in range(num_pages) if page not in order]
        every = jnp.asarray([*order, *rest], jnp.int32)
        self.state = self.state._replace(pool=page_pool.make_pool(num_pages, every))
        calls = self.calls(
            [self.language.encode(ask.prompt) for ask in asks],
            [ask.sampling for ask in asks],
            arrivals_s=[float(ask.step) for ask in asks],
        )
        before = np.asarray(self.state.table.page_ids)
        shots = []
        for step, (caption, call) in enumerate(zip(captions, calls, strict=False)):
            invariants.refuse(call.seen.violations, first_step=step)
            shot = _look(call.state, before)
            before, num_copied = shot["page_ids"], (shot["copied"] != NO_PAGE).sum()
            if not self.config.max_beams and num_copied != call.seen.num_copied.sum():
                raise RuntimeError(f"step {step}: {call.seen.num_copied=} differs")
            if caption:
                shots.append(shot | {"caption": np.array(caption)})
        stacked = {name: np.stack([shot[name] for shot in shots]) for name in shots[0]}
        return Frames(words=np.array(self.language.words), **stacked)


def _look(state: EngineState, before: np.ndarray) -> dict[str, np.ndarray]:
    """Reads one state; next to the page table before, also what was copied since."""
    page_ids = np.asarray(state.table.page_ids)
    copied = np.full(state.pool.ref.shape, NO_PAGE, np.int32)
    # A slot that runs on maps another page in a place only if it took a copy.
    moved = (before != page_ids) & (before != NO_PAGE) & (page_ids != NO_PAGE)
    if state.search is None:
        copied[page_ids[moved]] = before[moved]

    every = jnp.arange(state.pages.num_pages, dtype=jnp.int32)[:, None]
    held, place = (
        np.where(np.isnan(x), -1, x).astype(np.int32)[:, :, 0, 0]
        for x in map(np.asarray, state.pages.layout.read(state.pages, 0, every))
    )
    return {
        "tokens": stepping.histories(state),
        "page_ids": page_ids,
        "length": np.asarray(state.table.length),
        "ref": np.asarray(state.pool.ref),
        "held": held,
        "place": place,
        "copied": copied,
    }
