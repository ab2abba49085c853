"""The best tree of guesses, where it is known how often each guess is right.

A guess is a node: the r-th best at its depth, behind its parent. If guesses are right
independently of each other, a node is accepted as often as all guesses on the way to it
are right together; the tokens that a tree gains in a step are the sum of that over its
nodes. A node is never accepted more often than its parent, so the n best nodes of all
there are form a tree, and there is none of n nodes that gains more.

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
    """A tree of guesses, its nodes in order of storage."""

    parents: tuple[int, ...]
    """Place of each node's parent: 0 is the root, the last known token, k the k-th
    node, from 1 on. Parents stand before their children."""
    ranks: tuple[int, ...]
    """Which guess of its depth each node is, 0 the best; siblings differ."""

    def __post_init__(self) -> None:
        """Refuses what is no tree.

        Raises:
          ValueError: says why.
        """
        validation.settle(self)
        if not self.parents or len(self.parents) != len(self.ranks):
            raise ValueError(
                f"parents={self.parents!r} and ranks={self.ranks!r} must be of equal "
                "size"
            )
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise ValueError(
                    f"parents={self.parents!r}: parents stand before their children"
                )
        if len({*zip(self.parents, self.ranks, strict=True)}) < len(self.ranks):
            raise ValueError(f"ranks={self.ranks!r} must differ between siblings")
        if min(self.ranks) < 0:
            raise ValueError(f"ranks={self.ranks!r} must be at least 0")

    @property
    def depths(self) -> tuple[int, ...]:
        """Of the nodes, 1 for children of the root."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return (*found[1:],)

    @property
    def width(self) -> int:
        """Children of a place at most."""
        return max(self.parents.count(parent) for parent in {*self.parents})


def chain(num: int) -> Topology:
    """A tree of `num` nodes, at least 1, each the best guess behind the one before."""
    return Topology(tuple(range(num)), (0,) * num)


def build(acceptance: Sequence[Sequence[float]], num: int) -> Topology:
    """Finds the tree that gains most tokens; of equal ones a deep one.

    Its first nodes are the best tree of so many: nodes stand in falling order of how
    often they are accepted.

    Args:
      acceptance: how often each guess is right if those before it are, in [0, 1]: by
        depth, then by rank.
      num: nodes, at least 1.

    Returns:
      The tree; smaller if there are not so many guesses.

    Raises:
      ValueError: a share or the number is out of range, or there are no guesses.
    """
    validation.integer("num", num, low=1)
    for share in (share for depth in acceptance for share in depth):
        validation.number("acceptance", share, low=0.0, high=1.0, hint="in [0, 1]")
    if not acceptance or not acceptance[0]:
        raise ValueError(f"{acceptance=} must have a guess at least")
    parents: list[int] = []
    ranks: list[int] = []
    # Candidates: the best first; of equal ones the deeper, then the better ranked.
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
