"""Four sequences of one prompt: which pages they hold in an engine, and a drawing."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.framework import Table, Texts, column
from experiments.framework.table import shown
from experiments.harness import Request
from experiments.plotting import Box, boxes
from experiments.serving.sharing.requests import Host
from experiments.serving.sharing.server import Server, pages_of
from jaxkv.engine import EngineState
from jaxkv.memory import NO_PAGE
from jaxkv.sampling import Sampling, beam_search

PROMPT = '''def read_lines(path):
    """Reads a text file."""
    '''
NUM_SEQUENCES = 4
NUM_TOKENS = 40
"""Of each sequence, at least, beyond the prompt."""


class Picture(Table):
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


def take(host: Host) -> Picture:
    """Serves the prompt three ways, each until its sequences have grown.

    Args:
      host: its engine has at least four slots, and beam search of that width.
    """
    server, num = host.server, NUM_SEQUENCES
    same: dict[str, Any] = {"ignore_eos": True, "prefix_cache": False}
    same["max_tokens"] = NUM_TOKENS + 2 * server.config.steps_per_call
    drawn = dataclasses.replace(host.ask, seed=host.seed, **same)
    scenes = {
        "four requests with the same prompt, nothing shared": [
            dataclasses.replace(drawn, seed=host.seed + i) for i in range(num)
        ],
        "one request, four answers": [dataclasses.replace(drawn, n=num)],
        "one request, four beams": [Sampling(n=num, beam_width=num, **same)],
    }
    tokens = server.tokenizer.encode(PROMPT)
    rows = []
    for title, asks in host.progress.track(scenes.items(), "picture", "scenes"):
        requests = [Request(PROMPT, tokens, sampling) for sampling in asks]
        for call in server.calls(requests):
            if call.state.table.length.sum() >= num * (len(tokens) + NUM_TOKENS):
                rows.append((title, *_look(call.state, server)))
                break
        server.clear()
    return Picture.of(rows)


def _look(
    state: EngineState, server: Server
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages of every sequence, tokens in each, and what they say."""
    size = server.config.page_size
    slots = np.flatnonzero(np.asarray(state.slots.sequence) >= 0)
    places = np.asarray(state.table.length)[slots]
    pages = pages_of(np.asarray(state.table.page_ids)[slots], places, size)
    shape = (len(slots), max(map(len, pages)))
    page_ids, text = np.full(shape, NO_PAGE, np.int32), np.full(shape, "", object)
    starts = size * np.arange(shape[1])[None, :]
    filled = np.clip(places[:, None] - starts, 0, size).astype(np.int32)
    tokens = _tokens(state, slots)
    for i, ids in enumerate(pages):
        page_ids[i, : len(ids)] = ids
        for k in range(len(ids)):
            held = tokens[i, k * size : k * size + filled[i, k]]
            text[i, k] = server.tokenizer.decode(held.tolist())
    return page_ids, filled, text.astype(str)


def _tokens(state: EngineState, slots: np.ndarray) -> np.ndarray:
    """Tokens of the sequences in some slots; those of beams lie scattered."""
    s = state.sequences
    row = np.asarray(state.slots.sequence)[slots]
    tokens = np.asarray(s.tokens)[row]
    if state.search is None or not np.asarray(state.search.width)[s.group[row[0]]]:
        return tokens
    sample = np.asarray(s.params.sample)[row]
    rows = row[np.argsort(sample)]
    holder = beam_search.unroll(
        state.search.parents[rows],
        jnp.asarray(sample, jnp.int32),
        # From the newest token back, which is not written yet.
        jnp.asarray(s.num_tokens[row], jnp.int32),
    )
    holder, place = np.maximum(holder, 0), np.arange(tokens.shape[1])[None, :]
    return np.asarray(s.tokens)[rows[holder], place]


GREY, INK = "0.55", "0.15"

_TITLE, _GAP = 0.95, 0.35
"""Heights above and below a scene, in rows."""
_MAX_CHARS = 18
"""Of a page's text; more would leave the page."""
_FIRST_FOREIGN = "\N{LATIN SMALL LETTER TURNED A}"
"""Beyond European letters a font may have no sign."""
_SHADES = ("#eef3f8", "#c6dcec", "#8fbfe0", "#0072b2")
"""Fills of pages of one reader, of two, of three, and of four."""


def draw(ax: Any, picture: Picture) -> None:
    """Draws sequences as rows, their pages in token order; a page is drawn once."""
    ax.set_axis_off()
    height = _TITLE + NUM_SEQUENCES + _GAP
    for i, row in enumerate(picture.rows()):
        top, ids = i * height + _TITLE, picture.page_ids[i]
        columns = ids.shape[1]
        ax.set(xlim=(0, columns), ylim=(len(picture) * height - _GAP, 0))
        look = {"va": "bottom", "color": INK}
        ax.text(0, top - 0.16, row["scene"], fontsize=8, **look)
        text = f"{row['logical_pages']} logical pages in {row['pages']} physical ones"
        ax.text(columns, top - 0.16, text, ha="right", fontsize=7, **look)
        # Those that share a page stand together: whoever shares one shares all before.
        order = np.lexsort(ids.T[::-1])
        for k in range(columns):
            _draw_column(ax, picture, i, order, k, top)


def _draw_column(
    ax: Any, picture: Picture, scene: int, order: np.ndarray, column: int, top: float
) -> None:
    """One column of pages, those of several readers as high as these."""
    ids = picture.page_ids[scene, order, column].tolist()
    filled = picture.num_filled[scene, order, column] / picture.num_filled[scene].max()
    text = picture.text[scene, order, column]
    for page in dict.fromkeys(ids):
        if page == NO_PAGE:
            continue
        first, readers = ids.index(page), ids.count(page)
        shade = min(readers, len(_SHADES)) - 1
        box = Box(column + 0.012, top + first + 0.05, 0.976, readers - 0.1)
        full = box._replace(width=box.width * filled[first])
        boxes.rectangle(ax, full, facecolor=_SHADES[shade], linewidth=0)
        look: dict[str, Any] = {"edgecolor": _SHADES[3], "linewidth": 0.5}
        boxes.rectangle(ax, box, facecolor="none", **look)
        is_dark, middle = shade == len(_SHADES) - 1, top + first + readers / 2
        words = "".join(map(_drawable, text[first][:_MAX_CHARS]))
        look = {"va": "center_baseline", "color": "white" if is_dark else INK}
        mono = {"family": "DejaVu Sans Mono", "fontsize": 6.1}
        ax.text(box.x + 0.02, middle - 0.14, words, **look | mono)
        note = f"page {page}" if readers == 1 else f"page {page}, {readers} readers"
        look |= {"color": GREY} if readers == 1 else {}
        right = box.x + box.width - 0.02
        ax.text(right, middle + 0.26, note, ha="right", fontsize=4.6, **look)


def _drawable(char: str) -> str:
    """Stands for a character: line ends show, and what the font may lack is a dot."""
    if char == "\n":
        return "↵"
    return char if char.isprintable() and char < _FIRST_FOREIGN else "·"
