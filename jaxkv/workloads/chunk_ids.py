"""Ids of the chunks of prompts, and the tokens that a prefix cache has of each prompt.

Equal ids mean equal tokens from the start of the prompt to the end of the chunk, so
that an id follows one other id only, and its chunk has one length. A trace may
contradict that: `find_contradiction` names a row, and `shared_tokens` bounds what
chunks of several lengths have in common. All ids are in one array, so that 10^7 of them
take 80 MB.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from jaxtyping import Int, Int32, Int64

_BLOCK_TOKENS = 1 << 20
_NUM_PARTS = 16
"""Ids, and parts of the ids, that are searched at a time."""


class ChunkIds(Sequence[np.ndarray]):
    """A sequence of arrays, the chunk ids of each prompt, stored as one array.

    Attributes:
      flat: ids of all prompts, one prompt after the other.
      starts: index in `flat` of the first chunk of each prompt, and at the end the
        number of ids.
    """

    def __init__(
        self, flat: Int64[np.ndarray, " ids"], starts: Int64[np.ndarray, " bounds"]
    ) -> None:
        """Takes the ids, and one bound more than there are prompts."""
        self.flat = flat
        self.starts = starts

    def __len__(self) -> int:
        return self.starts.size - 1

    @overload
    def __getitem__(self, index: int) -> Int64[np.ndarray, " chunks"]: ...
    @overload
    def __getitem__(self, index: slice) -> "ChunkIds": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        index = range(len(self))[index]
        return self.flat[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Int64[np.ndarray, " chunks"]]:
        for index in range(len(self)):
            yield self[index]

    @property
    def counts(self) -> Int64[np.ndarray, " prompts"]:
        """Number of chunks of each prompt."""
        return np.diff(self.starts)

    def take(self, prompts: Int64[np.ndarray, " taken"]) -> "ChunkIds":
        """Returns the ids of some prompts, in the order of their indices."""
        counts = self.counts[prompts]
        starts = np.concatenate([[0], np.cumsum(counts)])
        shift = np.repeat(self.starts[prompts] - starts[:-1], counts)
        return ChunkIds(self.flat[shift + np.arange(shift.size)], starts)

    def find_contradiction(
        self, num_tokens: Int[np.ndarray, " prompts"], size: int
    ) -> tuple[int, int, str] | None:
        """Finds a prompt that uses an id for other tokens than an earlier prompt does.

        Args:
          num_tokens: tokens of each prompt.
          size: tokens of a chunk.

        Returns:
          The prompt, the earlier one, and the reason; None if there is none.
        """
        places, ends = self._find_partial(num_tokens, size)
        order = np.argsort(self.flat[places], kind="stable")
        places = places[order]
        ends = ends[order]
        pair = self._find_pair(places, ends)
        if pair is not None:
            return (*pair, "ends after another number of tokens than")
        # A chunk follows one other chunk. In parts, since a sort of all takes memory.
        is_start = np.zeros(self.flat.size + 1, bool)
        is_start[self.starts] = True
        low_bytes = self.flat.astype("<i8", copy=False).view(np.uint8)[::8]
        for part in range(_NUM_PARTS):
            places = np.flatnonzero(low_bytes % _NUM_PARTS == part)
            places = places[np.argsort(self.flat[places], kind="stable")]
            lowest = np.iinfo(np.int64).min
            before = np.where(is_start[places], lowest, self.flat[places - 1])
            pair = self._find_pair(places, before)
            if pair is not None:
                return (*pair, "follows another chunk than")
        return None

    def _find_pair(
        self, places: Int64[np.ndarray, " places"], values: Int[np.ndarray, " places"]
    ) -> tuple[int, int] | None:
        """Finds two prompts with the same id and different values, the later first.

        Args:
          places: indices in `flat`, sorted by id, then by prompt.
          values: a value of each.
        """
        ids = self.flat[places]
        is_wrong = (ids[1:] == ids[:-1]) & (values[1:] != values[:-1])
        if not is_wrong.any():
            return None
        at = int(np.argmax(is_wrong))
        later, earlier = self._prompts_of(places[[at + 1, at]]).tolist()
        return later, earlier

    def shared_tokens(
        self, num_tokens: Int[np.ndarray, " prompts"], size: int
    ) -> Int64[np.ndarray, " prompts"]:
        """Returns the leading tokens of each prompt that earlier prompts may have had.

        Chunks end where the longest earlier prompt with their id ended.

        Args:
          num_tokens: tokens of each prompt.
          size: tokens of a chunk.
        """
        places, ends = self._find_partial(num_tokens, size)
        _, index = np.unique(self.flat[places], return_inverse=True)
        order = np.argsort(index, kind="stable")
        # Keys of later ids are larger, so that each id begins its own maximum.
        keys = (index[order] << 32) + ends[order]
        longest = np.maximum.accumulate(keys)
        is_known = np.append(False, index[order][1:] == index[order][:-1])
        is_known = is_known[: order.size]
        before = np.append(0, longest[:-1])[: order.size] & (2**32 - 1)
        is_cut = is_known & (before < ends[order])
        limits = num_tokens.astype(np.int64)
        prompts = self._prompts_of(places[order])
        np.minimum.at(limits, prompts[is_cut], before[is_cut])
        return limits

    def _prompts_of(
        self, places: Int64[np.ndarray, " places"]
    ) -> Int64[np.ndarray, " places"]:
        """Returns the prompts to which indices in `flat` belong."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def _find_partial(
        self, num_tokens: Int[np.ndarray, " prompts"], size: int
    ) -> tuple[Int64[np.ndarray, " places"], Int64[np.ndarray, " places"]]:
        """Finds the ids that end before a full chunk in some prompt.

        Returns:
          Their indices in `flat`, and the tokens of their prompts up to their ends.
        """
        last = self.starts[1:][self.counts * size > num_tokens] - 1
        ids = np.unique(self.flat[last])
        parts = [np.zeros(0, np.int64)]
        for start in range(0, self.flat.size if ids.size else 0, _BLOCK_TOKENS):
            block = self.flat[start : start + _BLOCK_TOKENS]
            at = np.minimum(np.searchsorted(ids, block), ids.size - 1)
            parts.append(start + np.flatnonzero(ids[at] == block))
        places = np.concatenate(parts)
        prompts = self._prompts_of(places)
        ends = (places - self.starts[prompts] + 1) * size
        return places, np.minimum(ends, num_tokens[prompts])

    def num_known(self) -> Int32[np.ndarray, " prompts"]:
        """Counts the leading chunks of each prompt that an earlier prompt had as well.

        They are those that an unbounded prefix cache could find.
        """
        order = np.argsort(self.flat, kind="stable")
        in_order = self.flat[order]
        is_first = np.ones(order.size, bool)
        np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
        del in_order
        # The prompt in which an id is found first: the sort is stable.
        prompt = np.repeat(np.arange(len(self), dtype=np.int32), self.counts)[order]
        first_prompt = prompt[is_first][np.cumsum(is_first) - 1]
        is_new = np.empty(order.size, bool)
        is_new[order] = first_prompt == prompt
        # Chunks before the first new one.
        new = np.append(np.flatnonzero(is_new), self.flat.size)
        first_new = new[np.searchsorted(new, self.starts[:-1])]
        return np.minimum(first_new - self.starts[:-1], self.counts).astype(np.int32)

    def num_cached(self, capacity: int) -> Int32[np.ndarray, " prompts"]:
        """Counts the leading chunks of each prompt in a cache of `capacity` chunks.

        The cache evicts the least recently used chunk. A prompt uses its chunks from
        the last to the first, so that the ends of prompts are evicted first, and a
        chunk only after the chunks that follow it.
        """
        cache: OrderedDict[int, None] = OrderedDict()
        num_cached = np.zeros(len(self), np.int32)
        for prompt, array in enumerate(self):
            ids = array.tolist()
            num_found = 0
            while num_found < len(ids) and ids[num_found] in cache:
                num_found += 1
            num_cached[prompt] = num_found
            for chunk in reversed(ids[:capacity]):
                cache[chunk] = None
                cache.move_to_end(chunk)
            while len(cache) > capacity:
                cache.popitem(last=False)
        return num_cached
