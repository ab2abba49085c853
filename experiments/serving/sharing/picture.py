"""Four sequences of one prompt, and which pages they hold: read from an engine."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.harness import Request
from experiments.serving.sharing import serving
from experiments.serving.sharing.serving import Server
from jaxkv.engine import EngineState
from jaxkv.memory import NO_PAGE
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling, beam_search

PROMPT = '''def read_lines(path):
    """Reads a text file."""
    '''
NUM_SEQUENCES = 4
NUM_TOKENS = 40
"""Of each sequence, at least, beyond the prompt."""


class Picture(NamedTuple):
    """Page tables of four sequences, scene by scene.

    Attributes:
      title: what the sequences are: [scenes].
      page_ids: physical page of every logical one, -1 beyond: [scenes, 4, columns].
      num_filled: tokens in each: [scenes, 4, columns].
      text: what they say: [scenes, 4, columns].
    """

    title: np.ndarray
    page_ids: Int[np.ndarray, "scenes sequences columns"]
    num_filled: Int[np.ndarray, "scenes sequences columns"]
    text: np.ndarray

    def num_pages(self, scene: int) -> tuple[int, int]:
        """Logical and physical pages of a scene."""
        mapped = self.page_ids[scene]
        mapped = mapped[mapped != NO_PAGE]
        return mapped.size, np.unique(mapped).size


def take(server: Server, ask: Sampling, *, seed: int, progress: Progress) -> Picture:
    """Serves the prompt three ways, each until its sequences have grown.

    Args:
      server: an idle engine of at least four slots, with beam search of that width.
      ask: how to draw.
      seed: of the draws.
      progress: may stop it; scenes that are complete then stand.
    """
    same: dict[str, Any] = {"ignore_eos": True, "prefix_cache": False}
    same["max_tokens"] = NUM_TOKENS + 2 * server.config.steps_per_call
    one = [dataclasses.replace(ask, seed=seed, n=NUM_SEQUENCES, **same)]
    four = [
        dataclasses.replace(ask, seed=seed + i, **same) for i in range(NUM_SEQUENCES)
    ]
    search = [Sampling(beam_width=NUM_SEQUENCES, n=NUM_SEQUENCES, **same)]
    scenes = {
        "four requests with the same prompt, nothing shared": four,
        "one request, four answers": one,
        "one request, four beams": search,
    }
    tokens = server.tokenizer.encode(PROMPT)
    shots: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
    for title, asks in progress.track(scenes.items(), "picture", "scenes"):
        requests = [Request(PROMPT, tokens, sampling) for sampling in asks]
        for call in server.calls(requests):
            if call.state.table.length.sum() >= NUM_SEQUENCES * (
                len(tokens) + NUM_TOKENS
            ):
                shots.append((title, *_look(call.state, server)))
                break
        server.clear()
    columns = [np.array(column) for column in zip(*shots, strict=True)]
    blank = np.zeros((0, NUM_SEQUENCES, 0), np.int32)
    return Picture(*columns) if shots else Picture(blank[:, 0, 0], blank, blank, blank)


def _look(
    state: EngineState, server: Server
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages of every sequence, tokens in each, and what they say."""
    size, width = server.config.page_size, server.config.max_pages_per_slot
    slots = np.flatnonzero(np.asarray(state.slots.sequence) >= 0)
    places, ids_of = np.asarray(state.table.length)[slots], state.table.page_ids
    pages = serving.pages_of(np.asarray(ids_of)[slots], places, size)
    columns = np.arange(width)[None, :]
    shape = (len(slots), width)
    page_ids, text = np.full(shape, NO_PAGE, np.int32), np.full(shape, "", object)
    filled = np.clip(places[:, None] - columns * size, 0, size).astype(np.int32)
    tokens = _tokens(state, slots)
    for i, ids in enumerate(pages):
        page_ids[i, : len(ids)] = ids
        for k in range(len(ids)):
            held = tokens[i, k * size : k * size + filled[i, k]]
            text[i, k] = server.tokenizer.decode(held.tolist())
    used = max(map(len, pages))
    return page_ids[:, :used], filled[:, :used], text[:, :used].astype(str)


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
