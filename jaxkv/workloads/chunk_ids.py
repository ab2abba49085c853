"""Ids of the chunks of prompts, and the tokens that a prefix cache has of each prompt.

Equal ids mean equal tokens from the start of the prompt to the end of the chunk. All
ids are in one array, so that 10^7 of them take 80 MB.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from jaxtyping import Int32, Int64


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
        self.flat, self.starts = flat, starts

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
        found = np.zeros(len(self), np.int32)
        for prompt, array in enumerate(self):
            ids = array.tolist()
            num_found = 0
            while num_found < len(ids) and ids[num_found] in cache:
                num_found += 1
            found[prompt] = num_found
            for chunk in reversed(ids[:capacity]):
                cache[chunk] = None
                cache.move_to_end(chunk)
            while len(cache) > capacity:
                cache.popitem(last=False)
        return found
