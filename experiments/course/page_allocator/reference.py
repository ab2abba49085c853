"""A page allocator for the KV cache, with copy-on-write."""


class PageAllocator:
    """Page tables of sequences over a pool of pages.

    Args:
      num_pages: pages of the pool, numbered from 0.
      page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        # SOLUTION
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.num_holders = [0] * num_pages
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        # END

    def append(self, sequence: str, num_tokens: int) -> list[list[int]] | None:
        """Makes room for tokens, for which an unknown sequence is created.

        Args:
          sequence: name of the sequence.
          num_tokens: new tokens, at least 1.

        Returns:
          Pairs `[source, destination]` of pages that must be copied before the tokens
          are written. None if the free pages do not suffice; then nothing changes.
        """
        # SOLUTION
        table = self.tables.get(sequence, [])
        length = self.lengths.get(sequence, 0)
        num_new = -(-(length + num_tokens) // self.page_size) - len(table)
        is_partial = length % self.page_size > 0
        must_copy = is_partial and self.num_holders[table[-1]] > 1
        if num_new + must_copy > len(self.free):
            return None
        pages = [self.free.pop() for _ in range(num_new + must_copy)]
        for page in pages:
            self.num_holders[page] = 1
        copies = []
        if must_copy:
            source = table[-1]
            self.num_holders[source] -= 1
            table = [*table[:-1], pages[0]]
            copies = [[source, pages.pop(0)]]
        self.tables[sequence] = [*table, *pages]
        self.lengths[sequence] = length + num_tokens
        return copies
        # END

    def fork(self, parent: str, child: str) -> None:
        """Creates a sequence with the tokens of another; no page is copied."""
        # SOLUTION
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for page in self.tables[child]:
            self.num_holders[page] += 1
        # END

    def release(self, sequence: str) -> None:
        """Removes a sequence; pages without a holder become free."""
        # SOLUTION
        del self.lengths[sequence]
        for page in self.tables.pop(sequence):
            self.num_holders[page] -= 1
            if self.num_holders[page] == 0:
                self.free.append(page)
        # END

    def table(self, sequence: str) -> list[int]:
        """Returns the pages of a sequence, in the order of its tokens."""
        # SOLUTION
        return self.tables[sequence]
        # END

    def num_free(self) -> int:
        """Returns the number of free pages."""
        # SOLUTION
        return len(self.free)
        # END
