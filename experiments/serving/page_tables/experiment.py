"""Walks through PagedAttention frame by frame.

Each frame shows the logical pages of a sequence, the page table with the physical page
and its number of filled places, and the physical pages with their reference counts. A
word is a token, and a page holds 4. The model recites known sentences, but all drawn
values are read from the engine between two steps: tables and counts from its state, and
words in physical pages from the cached keys.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from experiments import lab
from experiments.harness import SentenceLanguage
from experiments.serving.page_tables import drawing
from experiments.serving.page_tables.frames import (
    MAX_LENGTH,
    FrameRecorder,
    FrameRequest,
    Frames,
)
from jaxkv.sampling import Sampling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_PAGES = 9
PAGE_SIZE = 4
"""Page pool of the paper's figures."""
BEAM_WIDTH = 4
NUM_BEAM_PAGES = 17
"""Number of beams, and pages for them: a request is admitted only if its worst case
fits, in which beams share no page of their answers."""

PUBLISHED_SENTENCES = {
    "Alan Turing is a computer scientist and mathematician renowned for his work": 1.0,
    "Four score and seven years ago our fathers brought forth on this": 0.5,
    "Four score and seven years ago our mothers brought forth on this": 0.5,
    "It was the best of times it was the worst": 1.0,
}
"""Sentences that the model recites, with weights. "our" has 2 equally likely next
words."""

PROMPT_TEXT = "The young Alan Turing"
_MACHINE = "imagined a machine that"
_SYMBOLS = f"{_MACHINE} reads and writes symbols"
STORIES = {
    f"{_SYMBOLS} along one long tape": 0.090,
    f"{_SYMBOLS} on an endless tape and moves": 0.042,
    f"{_SYMBOLS} on an endless tape which never": 0.038,
    f"{_SYMBOLS} in squares of paper ruled like": 0.036,
    f"{_SYMBOLS} in squares of paper one after": 0.034,
    f"{_MACHINE} follows a written rule": 0.18,
    f"{_MACHINE} plays chess for you": 0.13,
    "studied mathematics at Cambridge": 0.22,
    "loved long distance running": 0.18,
    "went to Princeton and worked there with Alonzo Church for two years": 0.05,
}
"""Continuations of the beam search prompt, with probabilities. Beams end at a page
boundary twice, after which all four continue beams 1 and 2, as in the paper's figure
9."""


class Config(lab.ConfigRecord):
    """Seed of the sampled words."""

    seed: Annotated[int, lab.Range(0, 2**64 - 1)] = 5
    """Seed of the parallel samples; with some seeds, both choose the same word."""


CONFIGS = {"smoke": Config()}


class Result(lab.ResultRecord):
    """Frames of the 4 scenes."""

    one: Frames = lab.column("one request")
    two: Frames = lab.column("two requests")
    samples: Frames = lab.column("two samples of one prompt")
    beams: Frames = lab.column("beams of one prompt")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Records the scenes."""
    language = SentenceLanguage(PUBLISHED_SENTENCES, MAX_LENGTH)
    recorder = FrameRecorder(language, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    progress.show("one request")
    one = recorder.record(
        [
            FrameRequest(
                "Alan Turing is a computer scientist", Sampling.greedy(max_tokens=9)
            )
        ],
        [
            "The prompt is prefilled: two pages, the second half full.",
            "A word is written to the next free place.",
            "The second page is full.",
            "The next page is allocated; it may be any free page.",
        ],
        order=(7, 1, 5),
    )
    progress.show("two requests")
    two = recorder.record(
        [
            FrameRequest(
                "Four score and seven years ago our", Sampling.greedy(max_tokens=4)
            ),
            FrameRequest("It was the best of", Sampling.greedy(max_tokens=9), step=1),
        ],
        [
            "A's prompt is prefilled.",
            "B arrives; its prompt is prefilled while A decodes.",
            "Pages are in any order; only a sequence's last one has room.",
            "A has ended: its pages are free, B goes on.",
        ],
        order=(7, 1, 5, 2, 3),
    )
    progress.show("two samples of one prompt")
    samples = recorder.record(
        [
            FrameRequest(
                "Four score and seven years ago our",
                Sampling(n=2, seed=config.seed, max_tokens=9),
            )
        ],
        [
            "The prompt is prefilled once; both samples share both pages.",
            "Both write to page 1: A1 copies it first, then A2 owns it.",
        ],
        order=(7, 1, 3),
    )
    progress.show("beams")
    stories = {f"{PROMPT_TEXT} {story}": weight for story, weight in STORIES.items()}
    beams = FrameRecorder(
        SentenceLanguage(stories, MAX_LENGTH),
        num_pages=NUM_BEAM_PAGES,
        page_size=PAGE_SIZE,
        max_slots=BEAM_WIDTH,
        max_beams=BEAM_WIDTH,
    ).record(
        [FrameRequest(PROMPT_TEXT, Sampling(beam_width=BEAM_WIDTH, max_tokens=15))],
        [
            "",  # prefill of the prompt
            "Four beams share the prompt, and each has written a word.",
            *[""] * 9,
            "Beams 0 to 2 share two more pages, beam 3 does not.",
            "A word later the best continue beams 1, 1, 2, 2: only table rows move.",
            "Each has written its word to a page of its own, freed just now.",
        ],
        # Pages in the order of the paper's figure, then those that ending beams free.
        order=(0, 1, 6, 3, 2, 5, 4, 7, 8),
    )
    return Result(one, two, samples, beams)


def plot(ax: "Axes", result: Result) -> None:
    """Draws the scenes."""
    drawing.draw_scenes(
        ax,
        [
            ("One request: pages taken as it grows", result.one, ("A",)),
            ("Two requests in one pool", result.two, ("A", "B")),
            ("Two samples of one prompt: copy-on-write", result.samples, ("A1", "A2")),
            (f"Beam search of width {BEAM_WIDTH}", result.beams, ("0", "1", "2", "3")),
        ],
    )


def metrics(result: Result) -> dict[str, object]:
    """Returns tables and counts of every frame as text."""
    return {
        name: [
            {
                "frame": str(caption),
                "pages": _join_slots(frames, i, frames.pages),
                "filled": _join_slots(frames, i, frames.filled),
                "references": " ".join(map(str, frames.ref[i])),
            }
            for i, caption in enumerate(frames.caption)
        ]
        for name, frames in lab.field_values(result).items()
    }


def _join_slots(
    frames: Frames, frame: int, read: Callable[[int, int], Iterable[object]]
) -> str:
    slots = range(frames.length.shape[1])
    texts = (" ".join(map(str, read(frame, slot))) for slot in slots)
    return " | ".join(text or "-" for text in texts)


PUBLISHED_TABLES = {
    "grows": [{7: 4, 1: 2}, {7: 4, 1: 3}, {7: 4, 1: 4}, {7: 4, 1: 4, 5: 1}],
    "one": [{7: 4, 1: 3}, {7: 4, 1: 4}, {7: 4, 1: 4, 3: 1}],
    "two": [{7: 4, 1: 4, 3: 1}, {5: 4, 2: 2}],
    "samples": [{1: 2, 7: 2}],
    "copied": [{1: 1, 3: 1, 7: 2}],
    "beams": [{0: 4, 1: 3, 2: 1, 3: 3, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1}],
    "freed": [{0: 4, 1: 4, 3: 4, 6: 2, 7: 2}],
}
"""Tables of the figures by claim: pages with their filled places, or, for samples and
beams, with their reference counts."""


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the tables of the frames with those of the published figures."""
    samples = result.samples
    beams = result.beams
    rows_by_id = {
        "grows": [_row(result.one, i, 0) for i in range(4)],
        "one": [_row(result.two, i, 0) for i in range(3)],
        "two": [_row(result.two, 2, slot) for slot in (0, 1)],
        "samples": [_uses(samples, 0)],
        "copied": [_uses(samples, 1)],
        "beams": [_uses(beams, 1)],
        "freed": [_uses(beams, 2)],
    }
    for id, published in PUBLISHED_TABLES.items():
        # Equal entries of page and number, if the pages are in the same order.
        equal = sum(
            len(reference.items() & subset.items()) if [*reference] == [*subset] else 0
            for reference, subset in zip(published, rows_by_id[id], strict=True)
        )
        yield lab.measured(id, equal, published=sum(map(len, published)))
    written = [beams.pages(3, slot)[-1] for slot in range(BEAM_WIDTH)]
    yield lab.measured(
        "unused", sum(beams.ref[:3, page].max() == 0 for page in written)
    )


def _row(frames: Frames, frame: int, slot: int) -> dict[int, int]:
    """Returns a slot's pages in token order with their filled places."""
    pages = frames.pages(frame, slot)
    filled = frames.filled(frame, slot)
    return dict(zip(pages, filled, strict=True))


def _uses(frames: Frames, frame: int) -> dict[int, int]:
    """Returns pages in use with their reference counts."""
    return {page: int(n) for page, n in enumerate(frames.ref[frame]) if n}


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    metrics=metrics,
    panels=lab.Panels(1, 1, *drawing.SIZE_INCHES[::-1]),
)
