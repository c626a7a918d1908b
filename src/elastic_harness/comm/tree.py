"""The fixed binary tree over the lanes of a step: it alone fixes the order of additions. Pure.

A node is the half-open range of lanes it sums, `(lo, hi)`. A node of more than one lane splits at the largest power
of two below its size, so the left child is always a full subtree and consecutive lanes 2k, 2k+1 are siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic_harness.errors import Inconsistent

Node = tuple[int, int]


def split(node: Node) -> tuple[Node, Node]:
    """The two children of an inner node."""
    lo, hi = node
    size = hi - lo
    if size <= 1:
        raise Inconsistent(f"{node} is a leaf of the tree, and has no children")
    middle = lo + (1 << (size - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def parent_and_sibling(node: Node, lanes: int) -> tuple[Node, Node]:
    """The parent of a node below the root, and the parent's other child."""
    current = (0, lanes)
    while True:
        left, right = split(current)
        if node in (left, right):
            return current, right if node == left else left
        current = left if node[1] <= left[1] else right


def key(node: Node, lanes: int) -> int:
    """A number unique to the node: its split point, or `lanes + lo` for a leaf. Always below 2 × lanes."""
    lo, hi = node
    return lanes + lo if hi - lo == 1 else split(node)[0][1]


def maximal_nodes(held: Iterable[tuple[int, int]], lanes: int) -> list[Node]:
    """The fewest tree nodes that together cover exactly the lanes in `held` (half-open ranges), ascending."""
    ranges = list(held)

    def covered(node: Node) -> int:
        return sum(max(0, min(hi, node[1]) - max(lo, node[0])) for lo, hi in ranges)

    def walk(node: Node) -> Iterator[Node]:
        count = covered(node)
        if count == node[1] - node[0]:
            yield node
        elif count:
            for child in split(node):
                yield from walk(child)

    return list(walk((0, lanes)))
