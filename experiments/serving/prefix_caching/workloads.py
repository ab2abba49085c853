"""Prompts with common prefixes as lists of page ids: recorded, chats and few-shot.

Equal ids mean equal pages with equal pages before them.
"""

import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.workloads import read_recording

DATA_VARIABLE = "JAXKV_DATA"
"""Environment variable with the folder of recordings."""
INSTRUCTION_PAGES = 8
"""Pages of the instruction at the start of a prompt."""
PAGE_SIZE = 16
"""Tokens of a page of a generated prompt."""


class PromptPages(NamedTuple):
    """A workload: prompts in order of arrival.

    Attributes:
      name: name of the workload.
      page_ids: page ids of each prompt.
      page_size: tokens of a page.
    """

    name: str
    page_ids: list[list[int]]
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages of all prompts, with repetitions."""
        return sum(map(len, self.page_ids))

    @property
    def num_distinct(self) -> int:
        """Distinct pages."""
        return len({page for ids in self.page_ids for page in ids})

    @property
    def longest(self) -> int:
        """Pages of the longest prompt."""
        return max(map(len, self.page_ids))


def depth_first_order(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the order of a depth-first walk of the tree of all prompts.

    The tree has a node for each page and a path from the root for each prompt. Sorted
    prompts that share a page are adjacent.

    Returns:
      Indices of the prompts; equal prompts keep their order.
    """
    return sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))


def count_shareable(prompts: Sequence[Sequence[int]], interval: int) -> int:
    """Counts pages that earlier prompts have too, up to a multiple of `interval`."""
    seen: set[int] = set()
    total = 0
    for ids in prompts:
        num = next((i for i, page in enumerate(ids) if page not in seen), len(ids))
        total += num - num % interval
        seen |= {*ids}
    return total


def read_prompt_pages(name: str) -> PromptPages:
    """Reads a recording with chunk ids.

    Args:
      name: path, or path below the folder in `JAXKV_DATA`.

    Raises:
      ValueError: the file does not exist, or has no prefixes.
    """
    folder = os.environ.get(DATA_VARIABLE, "")
    paths = [Path(name), Path(folder, name)] if folder else [Path(name)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        where = f", nor in {folder}" if folder else f"; {DATA_VARIABLE} names no folder"
        raise ValueError(
            f"{name}: no such file{where}; --trace takes any recording with hash_ids"
        )
    recording = read_recording(path)
    for doubt in recording.doubts:
        warnings.warn(doubt, stacklevel=2)
    if recording.chunk_ids is None or recording.chunk_tokens is None:
        raise ValueError(f"{path}: has no prefixes that prompts have in common")
    ids = [x.tolist() for x in recording.chunk_ids]
    return PromptPages(path.stem, ids, recording.chunk_tokens)


def make_chats(num_users: int, num_turns: int, seed: int) -> PromptPages:
    """Generates conversations: every turn's prompt contains all earlier turns.

    The order of the users is drawn. Half of the users share one instruction of
    `INSTRUCTION_PAGES` pages, the other half another. A turn adds 2 to 40 pages.

    Args:
      num_users: conversations, at least 1.
      num_turns: turns of each, at least 1.
      seed: seed of all draws.
    """
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    common = [_take(fresh, INSTRUCTION_PAGES) for _ in range(2)]
    histories = [common[user % 2] for user in range(num_users)]
    prompts = []
    for user in rng.permutation(np.repeat(np.arange(num_users), num_turns)):
        histories[user] = histories[user] + _take(fresh, rng.integers(2, 41))
        prompts.append(histories[user])
    return PromptPages("chats", prompts, PAGE_SIZE)


def make_few_shot(num_tasks: int, num_questions: int, seed: int) -> PromptPages:
    """Generates questions that follow the examples of their task, in random order.

    Prompts start with the same `INSTRUCTION_PAGES` pages. Examples take 16 to 64
    pages, a question 2 to 8.

    Args:
      num_tasks: tasks, at least 1.
      num_questions: questions of each task, at least 1.
      seed: seed of all draws.
    """
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    common = _take(fresh, INSTRUCTION_PAGES)
    shots = [common + _take(fresh, num) for num in rng.integers(16, 65, num_tasks)]
    tasks = rng.permutation(np.repeat(np.arange(num_tasks), num_questions))
    prompts = [shots[task] + _take(fresh, rng.integers(2, 9)) for task in tasks]
    return PromptPages("few-shot", prompts, PAGE_SIZE)


def _take(fresh: Iterator[int], num: int | np.integer) -> list[int]:
    """Returns unused ids."""
    return list(itertools.islice(fresh, int(num)))
