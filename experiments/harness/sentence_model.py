"""A model that knows a few sentences by heart and reads them from its pages.

For figures of paged memory: the next word is determined by the words so far, and K and
V are words and positions, so the content of a page can be read directly. The model
reads only its pages, so its output depends on the page table.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxkv import arrays
from jaxkv.memory import NO_PAGE, Pages, Rows
from jaxkv.models import ForwardResult

_IMPOSSIBLE = -30.0
"""Logit of a word that does not follow."""


class SentenceLanguage:
    """Sentences with weights; a word is a token.

    The probability of the next word is its share of the weight of all sentences that
    start with the words so far. After words that start no sentence, all words are
    equally likely.
    """

    def __init__(self, sentences: Mapping[str, float], max_length: int) -> None:
        """Builds the table of next words.

        Args:
          sentences: weight, above 0, by sentence; words are separated by blanks.
          max_length: tokens of a sequence, more than any sentence has words.
        """
        self.max_length = max_length
        texts = [text.split() for text in sentences]
        self.words = tuple(dict.fromkeys(word for text in texts for word in text))
        self._ids = {word: i for i, word in enumerate(self.words)}
        weights: dict[tuple[int, ...], dict[int, float]] = {}
        for text, weight in sentences.items():
            ids = self.encode(text)
            for end in range(1, len(ids)):
                follows = weights.setdefault(tuple(ids[:end]), {})
                follows[ids[end]] = follows.get(ids[end], 0.0) + weight
        self._known = np.full((len(weights), max_length), -1, np.int32)
        self._law = np.full((len(weights), len(self.words)), _IMPOSSIBLE, np.float32)
        for row, (prefix, follows) in enumerate(weights.items()):
            self._known[row, : len(prefix)] = prefix
            total = sum(follows.values())
            for word, weight in follows.items():
                self._law[row, word] = np.log(weight / total)

    def encode(self, text: str) -> list[int]:
        """Converts words to token ids."""
        return [self._ids[word] for word in text.split()]

    def logits(
        self, tokens: Int32[Array, "rows max_length"]
    ) -> Float[Array, "rows vocab"]:
        """Returns the logits of the next word.

        Args:
          tokens: words so far, -1 after them. All words are equally likely after words
            that start no sentence.
        """
        match = jnp.all(tokens[:, None, :] == self._known[None], axis=2)
        law = jnp.asarray(self._law)[jnp.argmax(match, axis=1)]
        return jnp.where(jnp.any(match, axis=1)[:, None], law, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceModel:
    """A forward pass that writes words as keys and their positions as values."""

    language: SentenceLanguage

    def __call__(self, params: None, pages: Pages, rows: Rows) -> ForwardResult:
        """Writes the rows, reads earlier words from the pages, predicts the next."""
        word, place = (
            x.astype(pages.dtype)[:, None, None] for x in (rows.token, rows.position)
        )
        pages = pages.layout.write(pages, 0, word, place, rows)
        last = arrays.take(rows.position, rows.logit_rows, fill=-1)
        slot = rows.logit_rows
        if rows.slot is not None:
            slot = arrays.take(rows.slot, slot, fill=-1)
        page_ids = arrays.take(rows.page_ids, slot, fill=NO_PAGE)
        words, _ = pages.layout.read(pages, 0, page_ids)
        held = words[:, : self.language.max_length, 0, 0]
        past = jnp.arange(held.shape[1], dtype=jnp.int32)[None, :] <= last[:, None]
        # Unwritten pages contain NaN.
        tokens = jnp.where(past & ~jnp.isnan(held), held, -1).astype(jnp.int32)
        return ForwardResult(self.language.logits(tokens), pages)
