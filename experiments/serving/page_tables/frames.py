"""Records the page pool, page tables and page contents of an engine, frame by frame."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from experiments import lab
from experiments.harness import (
    SentenceLanguage,
    SentenceModel,
    Stepper,
    make_benchmark_config,
    slot_tokens,
)
from jaxkv.engine import EngineState
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import DEFAULT_LAYOUT, NO_PAGE, Pages, make_pool, raise_if_violated
from jaxkv.sampling import Sampling

MAX_LENGTH = 24

PerSlot = Int[np.ndarray, "frames slots columns"]
PerPlace = Int[np.ndarray, "frames pages page_size"]


class Frames(lab.ResultRecord):
    """Engine states as arrays with a leading axis of frames."""

    caption: lab.Texts = lab.column("text of the frame")
    words: lab.Texts = lab.column("word of each token: [vocab]")
    tokens: PerSlot = lab.column("prompt and answer so far, -1 beyond")
    page_ids: PerSlot = lab.column("page table")
    length: Int[np.ndarray, "frames slots"] = lab.column("tokens with K and V written")
    ref: Int[np.ndarray, "frames pages"] = lab.column("reference count of each page")
    held: PerPlace = lab.column(
        "tokens read from the keys, -1 for places never written"
    )
    place: PerPlace = lab.column("positions of these tokens, read from the values")
    copied: Int[np.ndarray, "frames pages"] = lab.column(
        "source of a page that was copied in this frame, or -1; always -1 for beams, "
        "whose slots also map pages of other beams"
    )

    def filled(self, frame: int, slot: int) -> list[int]:
        """Returns the number of filled places in each page of a slot."""
        size = self.held.shape[2]
        length = int(self.length[frame, slot])
        return [min(size, length - i) for i in range(0, length, size)]

    def ever_used(self) -> list[bool]:
        """Returns True for each page that is in use in any frame."""
        return (self.ref > 0).any(0).tolist()

    def owners(self, frame: int, page: int) -> list[int]:
        """Returns the slots whose tables contain a page."""
        return (self.page_ids[frame] == page).any(1).nonzero()[0].tolist()

    def pages(self, frame: int, slot: int) -> list[int]:
        """Returns the pages of a slot in token order."""
        row = self.page_ids[frame, slot]
        return row[row != NO_PAGE].tolist()

    def words_of(self, tokens: np.ndarray) -> list[str]:
        """Returns the words of tokens, "" for -1."""
        return [str(self.words[token]) if token >= 0 else "" for token in tokens]


class FrameRequest(NamedTuple):
    """A request.

    Attributes:
      prompt: words of the prompt.
      sampling: sampling parameters.
      step: step of its arrival.
    """

    prompt: str
    sampling: Sampling
    step: int = 0


class FrameRecorder(Stepper):
    """An engine with few pages in a chosen order, recorded step by step.

    One compiled program runs all scenes.
    """

    def __init__(
        self,
        language: SentenceLanguage,
        *,
        num_pages: int,
        page_size: int,
        max_slots: int = 2,
        max_beams: int = 0,
    ) -> None:
        """Builds the engine; see `EngineConfig` for the sizes."""
        self.language = language
        config = make_benchmark_config(
            max_slots,
            MAX_LENGTH,
            page_size=page_size,
            num_pages=num_pages,
            token_budget=MAX_LENGTH,
            max_beams=max_beams,
            steps_per_call=1,
            debug=True,
        )

        def blank_pages() -> Pages:
            """Returns pages of NaN, which mark places that were never written."""
            pages = DEFAULT_LAYOUT.make((1, num_pages, 1, page_size, 1), "float32")
            return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pages)

        super().__init__(config, SentenceModel(language=language), blank_pages)

    def record(
        self,
        asks: Sequence[FrameRequest],
        captions: Sequence[str],
        order: Sequence[int],
    ) -> Frames:
        """Runs a step for each caption and records the state after it.

        Args:
          asks: requests with at most `max_slots` sequences in total.
          captions: text of each step; a step with an empty text is not recorded.
          order: pages in the order of allocation; the remaining pages follow.

        Raises:
          ValueError: a request does not fit the engine.
          RuntimeError: a step broke an invariant of the pool, or the tables do not show
            the pages that it copied.
        """
        self.clear()
        num_pages = self.config.num_pages
        other_pages = [page for page in range(num_pages) if page not in order]
        every = jnp.asarray([*order, *other_pages], jnp.int32)
        self.state = self.state._replace(pool=make_pool(num_pages, every))
        calls = self.calls(
            [self.language.encode(ask.prompt) for ask in asks],
            [ask.sampling for ask in asks],
            arrivals_s=[float(ask.step) for ask in asks],
        )
        before = np.full(self.state.table.page_ids.shape, NO_PAGE, np.int32)
        rows = np.full(len(before), NO_SEQUENCE, np.int32)
        shots = []
        for step, (caption, call) in enumerate(zip(captions, calls, strict=False)):
            raise_if_violated(call.step_infos.violations, first_step=step)
            shot = _look(call.state, before, rows)
            before = shot["page_ids"]
            num_copied = (shot["copied"] != NO_PAGE).sum()
            if (
                not self.config.max_beams
                and num_copied != call.step_infos.num_copied.sum()
            ):
                raise RuntimeError(
                    f"step {step}: {call.step_infos.num_copied=} differs"
                )
            if caption:
                shots.append(shot | {"caption": np.array(caption)})
        stacked = {name: np.stack([shot[name] for shot in shots]) for name in shots[0]}
        return Frames(words=np.array(self.language.words), **stacked)


def _look(
    state: EngineState, before: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Reads a state.

    Slots are drawn in rows: a sequence keeps its row in `rows`, which is updated,
    though its slot changes when another one ends. `before` is the page table of the
    previous step, by row.
    """
    sequence = np.asarray(state.slots.sequence)
    rows[~np.isin(rows, sequence)] = NO_SEQUENCE
    new = [x for x in sequence if x >= 0 and x not in rows]
    rows[np.flatnonzero(rows == NO_SEQUENCE)[: len(new)]] = new
    runs = rows != NO_SEQUENCE
    slot = [np.flatnonzero(sequence == x)[0] for x in rows[runs]]

    def by_row(values: ArrayLike, empty: int) -> np.ndarray:
        rows = np.full_like(np.asarray(values), empty)
        rows[runs] = np.asarray(values)[slot]
        return rows

    page_ids = by_row(state.table.page_ids, NO_PAGE)
    copied = np.full(state.pool.ref.shape, NO_PAGE, np.int32)
    # A running slot maps another page in the same place only after a copy.
    moved = (before != page_ids) & (before != NO_PAGE) & (page_ids != NO_PAGE)
    if state.search is None:
        copied[page_ids[moved]] = before[moved]

    every = jnp.arange(state.pages.num_pages, dtype=jnp.int32)[:, None]
    held, place = (
        np.where(np.isnan(x), -1, x).astype(np.int32)[:, :, 0, 0]
        for x in map(np.asarray, state.pages.layout.read(state.pages, 0, every))
    )
    return {
        "tokens": by_row(slot_tokens(state), -1),
        "page_ids": page_ids,
        "length": by_row(state.table.length, 0),
        "ref": np.asarray(state.pool.ref),
        "held": held,
        "place": place,
        "copied": copied,
    }
