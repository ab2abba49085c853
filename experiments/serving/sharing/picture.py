"""Four sequences of one prompt: which pages they hold in an engine, and a drawing."""

import dataclasses
import itertools
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.framework import Table, Texts, column
from experiments.framework.table import shown
from experiments.harness import stepping
from experiments.plotting import Box, boxes
from experiments.serving.sharing.requests import Client
from jaxkv.engine import EngineState
from jaxkv.memory import NO_PAGE
from jaxkv.sampling import Sampling

PROMPT = '''def read_lines(path):
    """Reads a text file."""
    '''
NUM_SEQUENCES = 4
NUM_TOKENS = 40
"""Of each sequence, at least, beyond the prompt."""


class PageTableScenes(Table):
    """Page tables of four sequences, scene by scene."""

    title: Texts = column("what the sequences are", key="scene", heading="scene")
    page_ids: Int[np.ndarray, "rows sequences columns"] = column(
        "physical page of every logical one, -1 beyond", is_told=False
    )
    num_filled: Int[np.ndarray, "rows sequences columns"] = column(
        "tokens in each", is_told=False
    )
    text: np.ndarray = column("what they say", is_told=False)

    @property
    @shown()
    def logical_pages(self) -> np.ndarray:
        """Pages that the tables name."""
        return np.array([np.sum(ids != NO_PAGE) for ids in self.page_ids])

    @property
    @shown(heading="physical pages")
    def pages(self) -> np.ndarray:
        """Pages that are there."""
        return np.array([np.unique(ids[ids != NO_PAGE]).size for ids in self.page_ids])


def serve_scenes(client: Client) -> PageTableScenes:
    """Serves the prompt three ways, each until its sequences have grown.

    Args:
      client: its engine has at least four slots, and beam search of that width.
    """
    num, server, progress = NUM_SEQUENCES, client.engine, client.progress
    tokenizer: Any = client.model.tokenizer
    same: dict[str, Any] = {"ignore_eos": True, "prefix_cache": False}
    same["max_tokens"] = NUM_TOKENS + 2 * server.config.steps_per_call
    drawn = dataclasses.replace(client.ask, seed=server.config.seed, **same)
    scenes = {
        "four requests with the same prompt, nothing shared": [
            dataclasses.replace(drawn, seed=server.config.seed + i) for i in range(num)
        ],
        "one request, four answers": [dataclasses.replace(drawn, n=num)],
        "one request, four beams": [Sampling(n=num, beam_width=num, **same)],
    }
    tokens = tokenizer.encode(PROMPT)
    rows = []
    for title, asks in progress.track(scenes.items(), "picture", "scenes"):
        for call in server.calls([tokens] * len(asks), asks):
            if call.state.table.length.sum() >= num * (len(tokens) + NUM_TOKENS):
                rows.append((title, *_look(call.state, server, tokenizer)))
                break
        server.clear()
    return PageTableScenes.of(rows)


def _look(
    state: EngineState, server: stepping.Stepper, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages of every sequence, tokens in each, and what they say."""
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
        for held, nums in zip(stepping.histories(state)[slots], filled, strict=True)
    ]
    return np.where(filled > 0, page_ids, NO_PAGE), filled, np.array(text)


INK = "0.15"
_LINE_CHARS, _MOST_COLUMNS = 9, 7
"""Of each of two lines of a page's text, and pages of a sequence; more do not fit."""
_FIRST_FOREIGN = "\N{LATIN SMALL LETTER TURNED A}"
"""Beyond European letters a font may have no sign."""
_SHADES = ("#eef3f8", "#c6dcec", "#8fbfe0", "#0072b2")
"""Fills of pages of one reader, of two, of three, and of four."""


def draw_scene(ax: Any, picture: PageTableScenes, i: int) -> None:
    """Draws the sequences of a scene as rows, their pages in token order, each once."""
    ax.set_axis_off()
    row, ids = picture.rows()[i], picture.page_ids[i]
    columns = min(ids.shape[1], _MOST_COLUMNS)
    ax.set(xlim=(0, columns), ylim=(NUM_SEQUENCES, 0))
    title = f"{row['scene'].capitalize()}: {row['logical_pages']} logical pages in "
    title += f"{row['pages']} physical ones"
    prompt = PROMPT.splitlines()[0]
    ax.set_title(title if i else f"{prompt} ... {title}")
    # Those that share a page are next to each other: they share all pages before it.
    order = np.lexsort(ids.T[::-1])
    filled = picture.num_filled[i] / picture.num_filled[i].max()
    for k in range(columns):
        first = 0
        for page, run in itertools.groupby(ids[order, k].tolist()):
            readers, reader = len([*run]), order[first]
            box = Box(k + 0.012, first + 0.04, 0.976, readers - 0.08)
            if page != NO_PAGE:
                words = picture.text[i, reader, k]
                _draw_page(ax, box, filled[reader, k], page, readers, words)
            first += readers


def _draw_page(
    ax: Any, box: Box, filled: float, page: int, readers: int, words: str
) -> None:
    """A page as high as its readers, filled in part."""
    shade = min(readers, len(_SHADES)) - 1
    full = box._replace(width=box.width * filled)
    boxes.rectangle(ax, full, facecolor=_SHADES[shade], linewidth=0)
    look: dict[str, Any] = {"edgecolor": _SHADES[3], "linewidth": 0.8}
    boxes.rectangle(ax, box, facecolor="none", **look)
    middle, color = box.y + box.height / 2, INK if shade < 3 else "white"
    # Line ends show, and a dot is drawn for a character that the font may lack.
    shown = "".join(
        "↵" if x == "\n" else x if x.isprintable() and x < _FIRST_FOREIGN else "·"
        for x in words
    )
    lines = [shown[i * _LINE_CHARS :][:_LINE_CHARS] for i in range(2)]
    look = {"color": color, "family": "DejaVu Sans Mono", "va": "bottom"}
    look["linespacing"] = 1.0
    boxes.text(ax, box.x + 0.03, middle + 0.1, "\n".join(lines), 9, **look)
    note = f"page {page}" if readers == 1 else f"page {page}\n{readers} readers"
    look = {"color": color, "ha": "right", "va": "top"}
    boxes.text(ax, box.x + box.width - 0.03, middle + 0.16, note, 9, **look)
