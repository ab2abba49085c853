"""Prompts that begin alike, as lists of page ids: recorded ones, chats, few-shot ones.

Where ids are equal, pages are, and all pages before them.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.workloads import recordings

DATA = "JAXKV_DATA"
"""Environment variable: a folder of recordings."""
INSTRUCTION = 8
"""Pages of what stands before everything."""
PAGE_SIZE = 16
"""Tokens that a page of a made-up prompt stands for."""


class PromptPages(NamedTuple):
    """A workload: prompts in order of arrival.

    Attributes:
      name: what they are.
      page_ids: of each prompt.
      page_size: tokens that a page stands for.
    """

    name: str
    page_ids: list[list[int]]
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages of all prompts, each counted every time."""
        return sum(map(len, self.page_ids))

    @property
    def num_distinct(self) -> int:
        """Pages that somebody has to compute."""
        return len({page for ids in self.page_ids for page in ids})

    @property
    def longest(self) -> int:
        """Pages of the longest prompt."""
        return max(map(len, self.page_ids))


def depth_first_order(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Says in which order to visit prompts so that their tree is walked depth first.

    The tree has a node for each page and a prompt for each path from the root. Those
    that go on from a page follow one another if prompts are sorted as words are.

    Returns:
      Indices of the prompts; equal ones keep their order.
    """
    return sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))


def read_recording(name: str) -> PromptPages:
    """Reads a recording in Mooncake's format.

    Args:
      name: its path, or one below the folder that `JAXKV_DATA` names.

    Raises:
      ValueError: there is no such file, or it is no such recording.
    """
    folder = os.environ.get(DATA, "")
    paths = [Path(name), Path(folder, name)] if folder else [Path(name)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        where = f", nor in {folder}" if folder else f"; {DATA} names no folder"
        raise ValueError(
            f"{name}: no such file{where}; --trace takes any file of Mooncake's format"
        )
    chunk_ids = recordings.read(path).chunk_ids
    if chunk_ids is None:
        raise ValueError(f"{path}: does not say what its prompts have in common")
    return PromptPages(path.stem, [x.tolist() for x in chunk_ids], recordings.CHUNK)


def make_chats(num_users: int, num_turns: int, seed: int) -> PromptPages:
    """Makes conversations: every turn begins with all that was said before.

    Whose turn it is, is drawn. Half of the users have one instruction in common, of
    `INSTRUCTION` pages, half another. A turn adds 2 to 40 pages, question and answer.

    Args:
      num_users: at least 1.
      num_turns: of each, at least 1.
      seed: of all draws.
    """
    rng, fresh = np.random.default_rng(seed), itertools.count()
    common = [_take(fresh, INSTRUCTION) for _ in range(2)]
    said = [common[user % 2] for user in range(num_users)]
    prompts = []
    for user in rng.permutation(np.repeat(np.arange(num_users), num_turns)):
        said[user] = said[user] + _take(fresh, rng.integers(2, 41))
        prompts.append(said[user])
    return PromptPages("chats", prompts, PAGE_SIZE)


def make_few_shot(num_tasks: int, num_questions: int, seed: int) -> PromptPages:
    """Makes questions that come behind the examples of their task, in any order.

    Examples are 16 to 64 pages long, a question 2 to 8; `INSTRUCTION` pages come first,
    the same for all.

    Args:
      num_tasks: at least 1.
      num_questions: of each task, at least 1.
      seed: of all draws.
    """
    rng, fresh = np.random.default_rng(seed), itertools.count()
    common = _take(fresh, INSTRUCTION)
    shots = [common + _take(fresh, num) for num in rng.integers(16, 65, num_tasks)]
    tasks = rng.permutation(np.repeat(np.arange(num_tasks), num_questions))
    prompts = [shots[task] + _take(fresh, rng.integers(2, 9)) for task in tasks]
    return PromptPages("few-shot", prompts, PAGE_SIZE)


def _take(fresh: Iterator[int], num: int | np.integer) -> list[int]:
    """Ids that were never taken."""
    return list(itertools.islice(fresh, int(num)))
