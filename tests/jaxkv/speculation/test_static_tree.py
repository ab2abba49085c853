"""The best static tree, against an enumeration of all trees."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxkv.speculation import static_tree
from jaxkv.speculation.static_tree import Topology

type Way = tuple[int, ...]
"""Ranks from the root to a node."""


def ways(tree: Topology) -> list[Way]:
    """Paths of the nodes, in order of storage."""
    paths: list[Way] = [()]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def gain(nodes: Any, acceptance: np.ndarray) -> float:
    """Expected number of accepted drafts."""
    return sum(
        float(np.prod([acceptance[depth, rank] for depth, rank in enumerate(path)]))
        for path in nodes
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num", [1, 3, 5])
def test_no_tree_of_as_many_nodes_gains_more(seed: int, num: int) -> None:
    """Acceptance need not fall with rank: a second guess may be right more often."""
    rng = np.random.default_rng(seed)
    acceptance = rng.random((3, 3)) / 2
    every = [
        path
        for depth in (1, 2, 3)
        for path in itertools.product(range(3), repeat=depth)
    ]
    if num == 5:  # 39 nodes are too many to try all subsets of five
        every = [path for path in every if sum(path) < 4 and path.count(2) < 2][:22]
    closed = (
        nodes
        for nodes in itertools.combinations(every, num)
        if all(path[:-1] in ((), *nodes) for path in nodes)
    )
    best = max(gain(nodes, acceptance) for nodes in closed)
    tree = static_tree.build(acceptance.tolist(), num)
    tree_gain = gain(ways(tree), acceptance)
    assert len({*ways(tree)}) == num
    assert tree_gain >= best - 1e-12
    if num < 5:
        assert tree_gain == pytest.approx(best)


def test_the_first_nodes_are_the_best_smaller_tree() -> None:
    acceptance = np.random.default_rng(1).random((4, 5))
    large_tree = static_tree.build(acceptance.tolist(), 30)
    for num in range(1, 30):
        part = static_tree.build(acceptance.tolist(), num)
        assert (part.parents, part.ranks) == (
            large_tree.parents[:num],
            large_tree.ranks[:num],
        )


def test_a_tree_is_no_larger_than_its_guesses() -> None:
    tree = static_tree.build([[0.5, 0.2], [0.4, 0.1]], 100)
    assert len(tree.parents) == 2 + 4
    assert (tree.width, max(tree.depths)) == (2, 2)
    only = static_tree.build([[0.5], [0.4], [0.0]], 5)
    assert only == static_tree.chain(3)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Topology((), ()), "must be of equal size"),
        (lambda: Topology((0, 2), (0, 0)), "must precede their children"),
        (lambda: Topology((0, 0), (1, 1)), "must differ between siblings"),
        (lambda: Topology((0,), (-1,)), "must be at least 0"),
        (lambda: static_tree.build([[0.5]], 0), "num=0 must be at least 1"),
        (lambda: static_tree.build([[1.5]], 1), "acceptance=1.5 must be in"),
        (lambda: static_tree.build([], 1), "must have at least one guess"),
    ],
)
def test_invalid_trees_are_refused(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        make()
    assert "\n" not in str(refused.value)
