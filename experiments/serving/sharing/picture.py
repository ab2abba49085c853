"""Page tables of 4 sequences with one prompt, and their drawing."""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from experiments import lab
from experiments.harness import Stepper, slot_tokens
from experiments.serving.sharing.requests import Client
from jaxkv.engine import EngineState
from jaxkv.memory import NO_PAGE
from jaxkv.sampling import Sampling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROMPT_TEXT = '''def read_lines(path):
    """Reads a text file."""
    '''
NUM_SEQUENCES = 4
NUM_TOKENS = 40
"""Fewest tokens of each sequence after the prompt."""


class PageTableScenes(lab.ResultTable):
    """Page tables of 4 sequences in each scene."""

    title: lab.Texts = lab.column("kind of sequences", key="scene", heading="scene")
    page_ids: Int[np.ndarray, "rows sequences columns"] = lab.column(
        "physical page of each logical page, -1 beyond", is_reported=False
    )
    num_filled: Int[np.ndarray, "rows sequences columns"] = lab.column(
        "tokens in each page", is_reported=False
    )
    text: np.ndarray = lab.column("text of each page", is_reported=False)

    @property
    @lab.computed_column()
    def logical_pages(self) -> np.ndarray:
        """Number of entries of the page tables."""
        return np.array([np.sum(ids != NO_PAGE) for ids in self.page_ids])

    @property
    @lab.computed_column(heading="physical pages")
    def pages(self) -> np.ndarray:
        """Number of distinct pages."""
        return np.array([np.unique(ids[ids != NO_PAGE]).size for ids in self.page_ids])


def serve_scenes(client: Client) -> PageTableScenes:
    """Serves the prompt as requests, samples and beams, until its sequences have grown.

    Args:
      client: client of an engine with at least 4 slots and beam search of width 4.
    """
    num = NUM_SEQUENCES
    server = client.engine
    progress = client.progress
    tokenizer: Any = client.model.tokenizer
    same: dict[str, Any] = {"ignore_eos": True, "prefix_cache": False}
    same["max_tokens"] = NUM_TOKENS + 2 * server.config.steps_per_call
    sampling = dataclasses.replace(client.ask, seed=server.config.seed, **same)
    scenes = {
        "four requests with the same prompt, without sharing": [
            dataclasses.replace(sampling, seed=server.config.seed + i)
            for i in range(num)
        ],
        "one request, four answers": [dataclasses.replace(sampling, n=num)],
        "one request, four beams": [Sampling(n=num, beam_width=num, **same)],
    }
    tokens = tokenizer.encode(PROMPT_TEXT)
    rows = []
    for title, asks in progress.track(scenes.items(), "picture", "scenes"):
        for call in server.calls([tokens] * len(asks), asks):
            if call.state.table.length.sum() >= num * (len(tokens) + NUM_TOKENS):
                rows.append((title, *_look(call.state, server, tokenizer)))
                break
        server.clear()
    return PageTableScenes.of(rows)


def _look(
    state: EngineState, server: Stepper, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns pages, filled places and texts of every sequence."""
    slots = np.flatnonzero(np.asarray(state.slots.sequence) >= 0)
    places = np.asarray(state.table.length)[slots, None]
    starts = np.arange(0, places.max(), server.config.page_size)
    filled = np.clip(places - starts, 0, server.config.page_size).astype(np.int32)
    page_ids = np.asarray(state.table.page_ids)[slots, : starts.size]
    text = [
        [
            tokenizer.decode(held[start : start + num].tolist())
            for start, num in zip(starts, nums, strict=True)
        ]
        for held, nums in zip(slot_tokens(state)[slots], filled, strict=True)
    ]
    return np.where(filled > 0, page_ids, NO_PAGE), filled, np.array(text)


TEXT_COLOR = "0.15"
_LINE_CHARS = 9
_MOST_COLUMNS = 7
"""Characters in each of the 2 lines of a page, and pages of a sequence, that fit."""
_FIRST_FOREIGN = "\N{LATIN SMALL LETTER TURNED A}"
"""First character beyond the European letters; a font may lack the following ones."""
_SHADES = ("#eef3f8", "#c6dcec", "#8fbfe0", "#0072b2")
"""Fills of pages by number of readers, 1 to 4."""


def draw_scene(ax: "Axes", picture: PageTableScenes, i: int) -> None:
    """Draws the sequences of a scene as rows; a shared page spans its rows."""
    ax.set_axis_off()
    row = picture.rows()[i]
    ids = picture.page_ids[i]
    columns = min(ids.shape[1], _MOST_COLUMNS)
    ax.set(xlim=(0, columns), ylim=(NUM_SEQUENCES, 0))
    title = f"{row['scene'].capitalize()}: {row['logical_pages']} logical pages in "
    title += f"{row['pages']} physical ones"
    prompt = PROMPT_TEXT.splitlines()[0]
    ax.set_title(title if i else f"{prompt} ... {title}")
    # Sequences that share a page are adjacent, since they share all pages before it.
    order = np.lexsort(ids.T[::-1])
    filled = picture.num_filled[i] / picture.num_filled[i].max()
    for k in range(columns):
        first = 0
        for page, run in itertools.groupby(ids[order, k].tolist()):
            readers = len([*run])
            reader = order[first]
            box = lab.Box(k + 0.012, first + 0.04, 0.976, readers - 0.08)
            if page != NO_PAGE:
                words = picture.text[i, reader, k]
                _draw_page(ax, box, filled[reader, k], page, readers, words)
            first += readers


def _draw_page(
    ax: "Axes", box: lab.Box, filled: float, page: int, readers: int, words: str
) -> None:
    """Draws a page with its filled part, as high as its number of readers."""
    shade = min(readers, len(_SHADES)) - 1
    full = box._replace(width=box.width * filled)
    lab.draw_rectangle(ax, full, facecolor=_SHADES[shade], linewidth=0)
    lab.draw_rectangle(ax, box, facecolor="none", edgecolor=_SHADES[3], linewidth=0.8)
    middle = box.y + box.height / 2
    color = TEXT_COLOR if shade < 3 else "white"
    # Line ends are visible; characters that the font may lack are dots.
    shown = "".join(
        "↵" if x == "\n" else x if x.isprintable() and x < _FIRST_FOREIGN else "·"
        for x in words
    )
    lines = [shown[i * _LINE_CHARS :][:_LINE_CHARS] for i in range(2)]
    look = {"color": color, "family": "DejaVu Sans Mono", "va": "bottom"}
    text = "\n".join(lines)
    lab.draw_text(ax, box.x + 0.03, middle + 0.1, text, 9, linespacing=1.0, **look)
    note = f"page {page}" if readers == 1 else f"page {page}\n{readers} readers"
    look = {"color": color, "ha": "right", "va": "top"}
    lab.draw_text(ax, box.x + box.width - 0.03, middle + 0.16, note, 9, **look)
