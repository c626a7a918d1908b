"""The fixed binary tree over the lanes of a step. It alone fixes the order of additions. Pure.

A place in the tree is a span: the half-open range of lanes that it sums, `(lo, hi)`. A span of more than one lane
splits at the largest power of two below its size. So the left half is always a full subtree, and consecutive lanes 2k
and 2k+1 are siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic_harness.errors import Inconsistent

Span = tuple[int, int]


def split(span: Span) -> tuple[Span, Span]:
    """Return the two halves of a span of more than one lane."""
    lo, hi = span
    size = hi - lo
    if size <= 1:
        raise Inconsistent(f"{span} is a leaf of the tree, and has no children")
    middle = lo + (1 << (size - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def parent_and_sibling(span: Span, lanes: int) -> tuple[Span, Span]:
    """Return the parent of a span below the root, and the parent's other half."""
    current = (0, lanes)
    while True:
        left, right = split(current)
        if span in (left, right):
            return current, right if span == left else left
        current = left if span[1] <= left[1] else right


def key(span: Span, lanes: int) -> int:
    """Return a number unique to the span: its split point, or `lanes + lo` for a leaf. Always below 2 × lanes."""
    lo, hi = span
    return lanes + lo if hi - lo == 1 else split(span)[0][1]


def maximal_spans(held: Iterable[tuple[int, int]], lanes: int) -> list[Span]:
    """Return the fewest spans that together cover exactly the lanes in `held` (half-open ranges), ascending."""
    ranges = list(held)

    def covered(span: Span) -> int:
        return sum(max(0, min(hi, span[1]) - max(lo, span[0])) for lo, hi in ranges)

    def walk(span: Span) -> Iterator[Span]:
        count = covered(span)
        if count == span[1] - span[0]:
            yield span
        elif count:
            for child in split(span):
                yield from walk(child)

    return list(walk((0, lanes)))
