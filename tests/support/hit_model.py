"""A reference of the prefix cache in plain Python: hits, insertion and eviction.

The model reads the schedule from the `StepInfo` of the engine: the sequence of each
slot and its fed tokens. From the tokens it computes cache hits, their pages, insertions
and evictions, by a dictionary from (salt, all tokens up to the end of a page) to the
page. It shares no code with the engine's cache and has no hashes, so it does not model
full hash buckets.

The model fails if the engine differs: a request with more or fewer cached pages would
emit its next token in another step.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.engine import EngineConfig, EngineState, StepInfo
from tests.support.engines import Ask
from tests.support.oracle import Oracle

type Key = tuple[int, tuple[int, ...]]
"""Salt, and all tokens up to the end of a page."""


@dataclasses.dataclass
class Known:
    """A sequence: its tokens, and its part in the shared prefill of its request."""

    tokens: list[int]
    salt: int
    use_prefix_cache: bool
    was_fed: bool = False
    source: int | None = None
    """Slot that feeds the common tokens for this sequence."""
    num_common: int = 0
    """Common tokens that it feeds for its group; 0 if no sequence waits for it."""

    @property
    def goal(self) -> int:
        """Tokens that it must have fed."""
        if self.source is not None:
            return 0
        return self.num_common or len(self.tokens)


class HitModel:
    """The cache and the pages of all slots; `Oracle` allocates the pages."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.size = config.page_size
        self.pages = Oracle(
            config.num_pages, config.max_slots, config.max_pages_per_slot, self.size
        )
        self.known: dict[tuple[int, int], Known] = {}
        self.slots: list[tuple[int, int] | None] = [None] * config.max_slots
        self.page_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.parent: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.tick = 0
        self.num_cached: collections.Counter[int] = collections.Counter()
        """Cached tokens of each request at its first admission."""
        self.num_found = self.num_entered = self.num_evicted = 0
        """Pages found, also after preemptions; pages inserted; pages evicted."""

    def submit(self, ask: Ask) -> None:
        wish = ask.sampling
        for sample in range(wish.num_sequences):
            self.known[ask.request_id, sample] = Known(
                list(ask.prompt), wish.salt, wish.prefix_cache
            )

    def replay(self, info: StepInfo) -> None:
        """Replays the steps of one call."""
        for step in range(len(info.num_rows)):
            self.step(jax.tree.map(lambda values, step=step: values[step], info))

    def step(self, info: Any) -> None:
        pages = self.pages
        assert info.enough
        names = [
            (int(name), int(sample)) if name >= 0 else None
            for name, sample in zip(info.request_id, info.sample, strict=True)
        ]
        old = {name: slot for slot, name in enumerate(self.slots) if name is not None}
        left = [name is not None and name not in names for name in self.slots]
        came = [
            slot
            for slot, name in enumerate(names)
            if name is not None and name not in old
        ]
        assert sum(left) == info.num_preempted
        self.let_go(left)
        self.move([old.get(name) for name in names])
        self.slots = names
        readers = self.seat(came)
        assert bool(readers) == bool(info.num_admitted)

        hits = {slot: self.match(slot) for slot in readers}
        self.start(hits)
        num_rows = info.num_rows.tolist()
        places = [0 if name is None else self.known[name].goal for name in names]
        growth = [
            max(0, pages.pages_for(n) - len(row))
            for n, row in zip(places, pages.rows, strict=True)
        ]
        wanted = sum(growth) + sum(pages.needs_copy(num_rows))
        self.evict(max(0, wanted - len(pages.free)))
        copies = pages.reserve(places, self.config.max_pages_per_slot, num_rows)
        assert copies is not None
        assert len(copies) == info.num_copied
        in_use = self.config.num_pages - len(pages.free) - len(self.last_uses())
        assert in_use == info.used_pages

        before = list(pages.length)
        pages.advance(num_rows)
        assert min(pages.ahead) >= 0
        self.keep(before)
        fed = [n > 0 for n in num_rows]
        self.fork(fed)
        for slot, sequence in self.running():
            sequence.was_fed |= fed[slot]
            draws = fed[slot] and pages.length[slot] == len(sequence.tokens)
            assert draws == info.num_emitted[slot], names[slot]
            sequence.tokens += info.tokens[slot][: int(draws)].tolist()

        self.let_go((info.reason > 0).tolist())

    def move(self, source: list[int | None]) -> None:
        """Moves running sequences to other slots, `source` being the slots before."""
        pages = self.pages
        target = {x: slot for slot, x in enumerate(source)}
        for _, sequence in self.running():
            if sequence.source is not None:
                sequence.source = target[sequence.source]
        pages.rows = [[] if x is None else pages.rows[x] for x in source]
        pages.length = [0 if x is None else pages.length[x] for x in source]
        pages.ahead = [0 if x is None else pages.ahead[x] for x in source]

    def cancel(self, request_id: int) -> None:
        """Empties the slots of a request between two calls."""
        self.let_go([name is not None and name[0] == request_id for name in self.slots])

    def let_go(self, is_leaving: list[bool]) -> None:
        """Empties slots; the last use of their pages is now."""
        leaving = [slot for slot, leaves in enumerate(is_leaving) if leaves]
        self.touch(page for slot in leaving for page in self.pages.rows[slot])
        self.pages.drop(is_leaving)
        for slot in leaving:
            self.slots[slot] = None

    def running(self) -> list[tuple[int, Known]]:
        return [
            (slot, self.known[name])
            for slot, name in enumerate(self.slots)
            if name is not None
        ]

    def seat(self, came: Sequence[int]) -> list[int]:
        """Makes the first slot of each new request feed the common tokens."""
        groups: dict[int, list[int]] = {}
        for slot in came:
            name = self.slots[slot]
            assert name is not None
            groups.setdefault(name[0], []).append(slot)
        sequences = dict(self.running())
        for first, *others in groups.values():
            texts = [sequences[slot].tokens for slot in (first, *others)]
            common = 0
            while all(common < len(text) for text in texts) and (
                len({text[common] for text in texts}) == 1
            ):
                common += 1
            sequences[first].source = None
            sequences[first].num_common = common if others else 0
            for slot in others:
                sequences[slot].source = first
                sequences[slot].num_common = 0
        return [first for first, *_ in groups.values()]

    def fork(self, fed: list[bool]) -> None:
        """Forks waiting sequences onto the pages of the common tokens."""
        sequences = dict(self.running())
        source = [-1] * len(self.slots)
        for slot, sequence in sequences.items():
            reader = sequence.source
            if reader is not None:
                common = sequences[reader].num_common
                if fed[reader] and self.pages.length[reader] == common:
                    source[slot] = reader
                    sequence.source = None
                    fed[slot] = True
        self.pages.fork(source)
        for reader in set(source) - {-1}:
            sequences[reader].num_common = 0

    def match(self, slot: int) -> list[int]:
        """Returns the cached pages of a slot; at least one token is left to feed."""
        sequence = dict(self.running())[slot]
        hit_pages: list[int] = []
        if sequence.use_prefix_cache:
            for end in range(self.size, sequence.goal, self.size):
                page = self.page_of.get((sequence.salt, tuple(sequence.tokens[:end])))
                if page is None:
                    break
                hit_pages.append(page)
        return hit_pages

    def start(self, hits: dict[int, list[int]]) -> None:
        """Starts new requests on cached pages, and counts the first time."""
        self.touch(page for ids in hits.values() for page in ids)
        for slot, ids in hits.items():
            name = self.slots[slot]
            assert name is not None
            self.pages.share(ids)
            self.pages.rows[slot] = list(ids)
            self.pages.length[slot] = len(ids) * self.size
            self.num_found += len(ids)
            if not self.known[name].was_fed:
                self.num_cached[name[0]] += len(ids) * self.size

    def keep(self, before: list[int]) -> None:
        """Inserts filled pages: the first of every slot, then the second, and so on."""
        pages = self.pages
        size = self.size
        first = [length // size for length in before]
        num_filled = [
            length // size - column
            for length, column in zip(pages.length, first, strict=True)
        ]
        for k in range(max(num_filled)):
            entries: list[tuple[int, int, int]] = []
            for slot, sequence in self.running():
                if not sequence.use_prefix_cache or k >= num_filled[slot]:
                    continue
                column = first[slot] + k
                row_page = pages.rows[slot][column]
                tokens = tuple(sequence.tokens[: (column + 1) * size])
                key = sequence.salt, tokens
                if key not in self.page_of:
                    parent = self.page_of[key[0], tokens[:-size]] if column else None
                    self.page_of[key], self.key_of[row_page] = row_page, key
                    self.parent[row_page] = parent
                    self.num_entered += 1
                    pages.share([row_page])
                entries.append((slot, column, self.page_of[key]))
            self.touch(page for _, _, page in entries)
            swaps = [
                entry for entry in entries if pages.rows[entry[0]][entry[1]] != entry[2]
            ]
            pages.share([page for _, _, page in swaps])
            pages.release([pages.rows[slot][column] for slot, column, _ in swaps])
            for slot, column, page in swaps:
                pages.rows[slot][column] = page

    def touch(self, ids: Iterable[int]) -> None:
        self.tick += 1
        self.used |= dict.fromkeys(ids, self.tick)

    def depth(self, page: int) -> int:
        return len(self.key_of[page][1]) // self.size - 1

    def last_uses(self) -> dict[int, int]:
        """Returns the time at which each page, or a page after it, was last used.

        Pages that are in use, or have a later page in use, are left out.
        """
        last: dict[int, int] = {}
        busy: set[int] = set()
        for page in sorted(self.key_of, key=self.depth, reverse=True):
            last[page] = max(last.get(page, 0), self.used[page])
            if self.pages.ref[page] > 1:
                busy.add(page)
            parent = self.parent[page]
            if parent is not None:
                last[parent] = max(last.get(parent, 0), last[page])
                busy |= {parent} if page in busy else set()
        return {page: tick for page, tick in last.items() if page not in busy}

    def evict(self, num: int) -> None:
        """Evicts the least recently used page, then the deepest, then the lowest id."""
        if not num:
            return
        last = self.last_uses()
        order = sorted(last, key=lambda page: (last[page], -self.depth(page), page))
        victims = order[:num]
        for page in victims:
            del self.page_of[self.key_of.pop(page)], self.parent[page]
        self.num_evicted += len(victims)
        self.pages.release(victims)

    def check(self, state: EngineState) -> None:
        """Asserts that tables, counts and cached pages equal those of the engine."""
        self.pages.check(state.pool, state.table)
        assert state.prefixes is not None
        cache = state.prefixes
        pinned, salts, held, parents = (
            np.asarray(x)
            for x in (cache.pinned, cache.salt, cache.tokens, cache.parent)
        )
        assert set(np.flatnonzero(pinned).tolist()) == set(self.key_of)
        for page, (salt, tokens) in self.key_of.items():
            assert salts[page] == salt
            assert held[page].tolist() == list(tokens[-self.size :])
            parent = self.parent[page]
            assert parents[page] == (-1 if parent is None else parent)
