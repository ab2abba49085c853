"""The best static draft tree, for tree attention with given acceptance rates.

A node is a guess: the r-th best of its depth, given its parent. If guesses are right
independently of each other, a node is accepted with the product of the probabilities on
its path; a tree gains the sum of these over its nodes, in tokens per step. A node is
never accepted more often than its parent, so the n best nodes form a tree, and no tree
of n nodes gains more.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3; Chen et al. 2024,
arXiv:2402.12374 (Sequoia), section 3.1.
"""

import dataclasses
import heapq
from collections.abc import Sequence

from jaxkv import validation


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Topology:
    """Tree of guesses, its nodes in order of storage."""

    parents: tuple[int, ...]
    """Place of each node's parent: 0 is the root, the last known token; k the k-th
    node, from 1 on. Parents precede their children."""
    ranks: tuple[int, ...]
    """Rank of each node among the guesses of its depth, 0 the best; siblings differ."""

    def __post_init__(self) -> None:
        """Validates the tree.

        Raises:
          ValueError: the fields differ in length, a parent follows its child, or
            siblings have equal ranks.
        """
        validation.check_fields(self)
        if not self.parents or len(self.parents) != len(self.ranks):
            raise ValueError(
                f"parents={self.parents!r} and ranks={self.ranks!r} must be of equal "
                "size"
            )
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise ValueError(
                    f"parents={self.parents!r} must precede their children"
                )
        if len({*zip(self.parents, self.ranks, strict=True)}) < len(self.ranks):
            raise ValueError(f"ranks={self.ranks!r} must differ between siblings")
        if min(self.ranks) < 0:
            raise ValueError(f"ranks={self.ranks!r} must be at least 0")

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 1 for children of the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return (*depths[1:],)

    @property
    def width(self) -> int:
        """Largest number of children of a node."""
        return max(self.parents.count(parent) for parent in {*self.parents})


def chain(num: int) -> Topology:
    """Returns a chain of `num` nodes, at least 1, each the best guess of its depth."""
    return Topology(tuple(range(num)), (0,) * num)


def build(acceptance: Sequence[Sequence[float]], num: int) -> Topology:
    """Builds the tree that gains most tokens; ties go to deeper nodes.

    Its first k nodes are the best tree of k nodes: nodes are in descending order of
    their acceptance probability.

    Args:
      acceptance: probability in [0, 1] that each guess is right if its parent is: by
        depth, then by rank.
      num: nodes, at least 1.

    Returns:
      The tree; smaller if there are fewer guesses.

    Raises:
      ValueError: a probability or `num` is out of range, or `acceptance` is empty.
    """
    validation.integer("num", num, low=1)
    for share in (share for depth in acceptance for share in depth):
        validation.number("acceptance", share, low=0.0, high=1.0, hint="in [0, 1]")
    if not acceptance or not acceptance[0]:
        raise ValueError(f"{acceptance=} must have at least one guess")
    parents: list[int] = []
    ranks: list[int] = []
    # Candidates: the best first; ties go to the deeper, then to the better ranked.
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent: int, depth: int, worth: float) -> None:
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth]):
                heapq.heappush(heap, (-worth * share, -depth, rank, parent))

    offer(0, 0, 1.0)
    while heap and len(parents) < num:
        worth, depth, rank, parent = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        offer(len(parents), 1 - depth, -worth)
    return Topology((*parents,), (*ranks,))
