"""A page manager in plain Python lists with the rules of the library.

It allocates the same page ids as `memory.page_pool` and `memory.page_table`, so that
tests compare states, not only sizes.
"""

import numpy as np

from jaxkv.memory import NO_PAGE, Pool, Table


class Oracle:
    """Pool and page tables of an engine. A refused operation returns False or None."""

    def __init__(
        self, num_pages: int, max_slots: int, max_pages_per_slot: int, page_size: int
    ) -> None:
        self.ref = [0] * num_pages
        self.free = list(reversed(range(num_pages)))  # the next page to take is last
        self.rows: list[list[int]] = [[] for _ in range(max_slots)]
        self.length = [0] * max_slots
        self.ahead = [0] * max_slots
        self.content: list[dict[int, int]] = [{} for _ in range(num_pages)]
        self.tokens: list[list[int]] = [[] for _ in range(max_slots)]
        self.buffer: dict[int, tuple[int, dict[int, int]]] = {}
        self.host: dict[int, dict[int, dict[int, int]]] = {}
        self.out: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        self.max_pages_per_slot = max_pages_per_slot
        self.page_size = page_size

    def places(self, slot: int) -> int:
        return self.length[slot] + self.ahead[slot]

    def pages_for(self, places: int) -> int:
        return sum(1 for _ in range(0, places, self.page_size))

    def live(self) -> list[bool]:
        return [self.places(slot) > 0 for slot in range(len(self.rows))]

    def allocate(self, want: list[int], max_pages: int) -> list[list[int]] | None:
        if any(n < 0 or n > max_pages for n in want) or sum(want) > len(self.free):
            return None
        taken = [[self.free.pop() for _ in range(n)] for n in want]
        self.share([page for row in taken for page in row])
        return taken

    def share(self, ids: list[int]) -> None:
        for page in ids:
            self.ref[page] += 1

    def release(self, ids: list[int]) -> None:
        for page in ids:
            self.ref[page] -= 1
            assert self.ref[page] >= 0, "the test released an unused page"
            if self.ref[page] == 0:
                self.free.append(page)

    def needs_copy(self, num_rows: list[int]) -> list[bool]:
        """Returns the slots that copy their last page before a write to it."""
        uses = list(self.ref)
        copies = [False] * len(self.rows)
        for slot, n in enumerate(num_rows):
            column = self.length[slot] // self.page_size
            if n > 0 and column < len(self.rows[slot]):
                page = self.rows[slot][column]
                copies[slot] = uses[page] > 1
                uses[page] -= copies[slot]
        return copies

    def reserve(
        self, places: list[int], max_new_pages: int, num_rows: list[int] | None = None
    ) -> dict[int, tuple[int, int]] | None:
        """Returns the copies, (source, target) by slot."""
        goal = [max(self.places(slot), n) for slot, n in enumerate(places)]
        grow = [self.pages_for(n) - len(self.rows[i]) for i, n in enumerate(goal)]
        if any(self.pages_for(n) > self.max_pages_per_slot for n in goal):
            return None
        if any(n > max_new_pages for n in grow):
            return None
        copies = self.needs_copy(num_rows or [0] * len(places))
        want = [n + copied for n, copied in zip(grow, copies, strict=True)]
        taken = self.allocate(want, max_new_pages + 1)
        if taken is None:
            return None
        copy_pages = {}
        for slot, ids in enumerate(taken):
            if copies[slot]:
                column = self.length[slot] // self.page_size
                copy_pages[slot] = (self.rows[slot][column], ids.pop(0))
                self.rows[slot][column] = copy_pages[slot][1]
                self.content[copy_pages[slot][1]] = dict(
                    self.content[copy_pages[slot][0]]
                )
                self.release([copy_pages[slot][0]])
            self.rows[slot] += ids
            self.ahead[slot] = goal[slot] - self.length[slot]
        return copy_pages

    def drop(self, mask: list[bool]) -> None:
        for slot, dropped in enumerate(mask):
            if dropped:
                self.release(self.rows[slot])
                self.rows[slot] = []
                self.length[slot] = 0
                self.ahead[slot] = 0
                self.tokens[slot] = []

    def write(self, tokens: list[list[int]]) -> None:
        """Writes drafts after each slot's tokens, before any is accepted."""
        for slot, new in enumerate(tokens):
            for place, token in enumerate(new, self.length[slot]):
                page = self.rows[slot][place // self.page_size]
                assert self.ref[page] == 1, "the test wrote to a shared page"
                self.content[page][place % self.page_size] = token

    def accept(self, tokens: list[list[int]]) -> None:
        """Accepts the first tokens that were written."""
        self.advance([len(new) for new in tokens])
        for slot, new in enumerate(tokens):
            self.tokens[slot] += new

    def read(self, slot: int) -> list[int]:
        """Returns the contents of a slot's pages, which should be its tokens."""
        places = (divmod(n, self.page_size) for n in range(self.length[slot]))
        row = self.rows[slot]
        return [self.content[row[column]][offset] for column, offset in places]

    def owned_pages(self, group: list[int], pinned: set[int]) -> list[int]:
        """Counts the pages of each slot that no earlier slot of its group has."""
        pages_by_group: dict[int, set[int]] = {}
        counts = []
        for slot, row in enumerate(self.rows):
            group_pages = pages_by_group.setdefault(group[slot], set())
            counts.append(len(set(row) - group_pages - pinned))
            group_pages |= set(row)
        return counts

    def swap_out(self, group: int, slots: list[int], places: int) -> bool:
        """Moves the written pages of a group to a buffer of limited size."""
        moved: dict[tuple[int, int], int] = {}
        new = {}
        free = [place for place in range(places) if place not in self.buffer]
        for slot in slots:
            row = self.rows[slot][: self.pages_for(self.length[slot])]
            for at in enumerate(row):
                moved.setdefault(at, len(moved))
            new[slot] = (self.tokens[slot], [moved[at] for at in enumerate(row)])
        if not 0 < len(moved) <= len(free):
            return False
        for (_, page), rank in moved.items():
            self.buffer[free[rank]] = (group, dict(self.content[page]))
        self.out[group] = {
            slot: (tokens, [free[rank] for rank in ranks])
            for slot, (tokens, ranks) in new.items()
        }
        self.drop([slot in slots for slot in range(len(self.rows))])
        return True

    def swap_in(self, group: int, seats: dict[int, int]) -> None:
        """Swaps a group in; `seats` are the slots of its sequences."""
        buffer_places = [
            place for place in sorted(self.buffer) if self.buffer[place][0] == group
        ]
        pages = {place: self.free.pop() for place in buffer_places}
        for place, page in pages.items():
            self.content[page] = self.buffer.pop(place)[1]
        for sequence, (tokens, places) in self.out.pop(group).items():
            slot = seats[sequence]
            self.rows[slot] = [pages[place] for place in places]
            self.share(self.rows[slot])
            self.tokens[slot] = tokens
            self.length[slot] = len(tokens)

    def take(self, group: int) -> None:
        """Moves a group's pages from the buffer to the host."""
        buffer_places = [
            place for place, (owner, _) in self.buffer.items() if owner == group
        ]
        self.host[group] = {place: self.buffer.pop(place)[1] for place in buffer_places}

    def bring(self, group: int, new: dict[int, int]) -> None:
        """Moves a group's pages from the host to new places of the buffer."""
        for place, content in self.host.pop(group).items():
            self.buffer[new[place]] = (group, content)
        self.out[group] = {
            sequence: (tokens, [new[place] for place in places])
            for sequence, (tokens, places) in self.out[group].items()
        }

    def advance(self, accepted: list[int]) -> None:
        for slot, n in enumerate(accepted):
            self.length[slot] += n
            self.ahead[slot] -= n

    def truncate(self, places: list[int]) -> None:
        for slot, n in enumerate(places):
            keep = max(self.length[slot], n)
            if keep < self.places(slot):
                self.ahead[slot] = keep - self.length[slot]
                self.release(self.rows[slot][self.pages_for(keep) :])
                self.rows[slot] = self.rows[slot][: self.pages_for(keep)]

    def fork(self, source: list[int]) -> None:
        before = [(list(row), *n) for row, *n in self._slots()]
        tokens = [list(row) for row in self.tokens]
        for slot, parent in enumerate(source):
            if parent >= 0:
                assert self.places(slot) == 0, "the test forked onto a slot in use"
                row, self.length[slot], _ = before[parent]
                self.rows[slot] = row[: self.pages_for(self.length[slot])]
                self.tokens[slot] = list(tokens[parent])
                self.share(self.rows[slot])

    def reorder(self, source: list[int]) -> None:
        before = [(list(row), *n) for row, *n in self._slots()]
        tokens = [list(row) for row in self.tokens]
        moved = [slot for slot, parent in enumerate(source) if parent >= 0]
        for slot in moved:
            self.rows[slot], self.length[slot], self.ahead[slot] = before[source[slot]]
            self.rows[slot] = list(self.rows[slot])
            self.share(self.rows[slot])
            self.tokens[slot] = list(tokens[source[slot]])
        for slot in moved:
            self.release(before[slot][0])

    def _slots(self) -> list[tuple[list[int], int, int]]:
        return list(zip(self.rows, self.length, self.ahead, strict=True))

    def check(self, pool: Pool, table: Table) -> None:
        """Asserts that the state in JAX has the same page ids."""
        free = set(self.free)
        assert len(free) == len(self.free)
        assert free == {page for page, uses in enumerate(self.ref) if uses == 0}
        width = self.max_pages_per_slot
        rows = [row + [NO_PAGE] * (width - len(row)) for row in self.rows]
        for expected, actual in (
            (self.ref, pool.ref),
            (self.free, np.asarray(pool.stack)[: len(self.free)]),
            (len(self.free), pool.num_free),
            (rows, table.page_ids),
            (self.length, table.length),
            (self.ahead, table.ahead),
        ):
            if not np.array_equal(expected, actual):
                np.testing.assert_array_equal(actual, expected)  # better message
