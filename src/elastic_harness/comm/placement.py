"""Which member computes which lanes. Placement can change at any time, and never changes a bit of the result. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from elastic_harness.comm.tree import maximal_spans

Ranges = tuple[tuple[int, int], ...]
_SEARCH_LIMIT = 16  # members up to which the best cut points are searched; beyond, the bigger ranges come first


def deal(
    lanes: int,
    members: Sequence[str],
    held: Mapping[str, Ranges],
    handicap: Mapping[str, int] | None = None,
    declined: Mapping[str, Collection[int]] | None = None,
) -> dict[str, Ranges]:
    """Return the lanes each member still has to compute, given those already finished (`held`).

    The missing lanes are cut into contiguous runs. Normally these are balanced (`balanced_cuts`). `handicap` gives
    members other work that they have to do first, in lanes; then the runs are cut so that all members end at about the
    same time. Members take the runs in the order of the lanes they already hold, so that neighbouring lanes meet and
    can be summed before they are sent. A lane that a member has `declined` goes to the one of the others that has the
    least to do; if all have declined it, it stays.
    """
    finished = [False] * lanes
    for ranges in held.values():
        for lo, hi in ranges:
            finished[lo:hi] = [True] * (hi - lo)
    missing = [lane for lane in range(lanes) if not finished[lane]]

    # Members stand in the order of the lanes that they hold already. A member that holds none stands where its share
    # would lie. So the lanes of a member lie side by side, and sum up before they are sent.
    def place(item: tuple[int, str]) -> tuple[float, int]:
        rank, member = item
        ranges = held.get(member, ())
        return (ranges[0][0] if ranges else rank * lanes / len(members), rank)

    order = [member for _, member in sorted(enumerate(members), key=place)]
    loads = tuple((handicap or {}).get(member, 0) for member in order)
    # Without handicaps no member has more than ⌈missing / members⌉ lanes. With them all end at about the same time.
    cuts = levelled_cuts(len(missing), loads) if any(loads) else balanced_cuts(len(missing), len(members))
    dealt = {m: missing[cuts[i] : cuts[i + 1]] for i, m in enumerate(order)}
    if declined:
        _pass_on(dealt, declined, dict(zip(order, loads, strict=True)))
    return {m: _ranges(dealt[m]) for m in order}


def _pass_on(dealt: dict[str, list[int]], declined: Mapping[str, Collection[int]], loads: Mapping[str, int]) -> None:
    """Move lanes that are dealt to members that have declined them."""
    for member, lanes in declined.items():
        for lane in sorted(set(dealt.get(member, ())).intersection(lanes)):
            others = [other for other in dealt if lane not in declined.get(other, ())]
            if others:
                to = min(others, key=lambda other: loads[other] + len(dealt[other]))
                dealt[member].remove(lane)
                dealt[to] = sorted([*dealt[to], lane])


def deal_to_rows(
    lanes: int,
    rows: Sequence[Sequence[str]],
    held: Mapping[str, Ranges],
    handicap: Mapping[str, int] | None = None,
    declined: Mapping[str, Collection[int]] | None = None,
) -> dict[str, Ranges]:
    """Deal the lanes to rows of members that compute together: all members of a row hold the same, and are dealt the
    same. The longest handicap in a row is the row's, and what one of its members has declined. A member in no row is
    dealt nothing."""
    busy = {row[0]: max(handicap.get(member, 0) for member in row) for row in rows} if handicap else None
    refused = {row[0]: {lane for m in row for lane in declined.get(m, ())} for row in rows} if declined else None
    dealt = deal(lanes, [row[0] for row in rows], {row[0]: held.get(row[0], ()) for row in rows}, busy, refused)
    return {member: dealt[row[0]] for row in rows for member in row}


def levelled_cuts(lanes: int, loads: Sequence[int]) -> tuple[int, ...]:
    """Return cut points of contiguous ranges that level unequal loads. One lane after the other goes to the part with
    the least load, and of equals to the earliest."""
    waiting = [(load, part) for part, load in enumerate(loads)]
    heapq.heapify(waiting)
    sizes = [0] * len(loads)
    for _ in range(lanes):
        load, part = waiting[0]
        sizes[part] += 1
        heapq.heapreplace(waiting, (load + 1, part))
    return (0, *itertools.accumulate(sizes))


@lru_cache(maxsize=256)
def balanced_cuts(lanes: int, parts: int) -> tuple[int, ...]:
    """Return cut points 0 = c₀ ≤ … ≤ c_parts = lanes of contiguous ranges. No range is longer than ⌈lanes / parts⌉,
    which bounds the step's time. Among such cuts those with the fewest spans win, because each span is a partial sum on
    the wire: 16 lanes on 3 members need 5 partial sums as 6 + 6 + 4, and 7 as 5 + 5 + 6."""
    base, extra = divmod(lanes, parts)
    if extra == 0 or parts > _SEARCH_LIMIT or base == 0:
        sizes = [base + (i < extra) for i in range(parts)]
        return tuple(sum(sizes[:i]) for i in range(parts + 1))
    return _fewest_spans(lanes, [range(max(1, base - 1), base + 2)] * parts)


def paced_cuts(lanes: int, paces: Sequence[int]) -> tuple[int, ...]:
    """Return cut points of contiguous ranges for parts that need unequal times for a lane. The longest time of a part
    is the least there is if each part has a lane, and among such cuts those with few spans win. paces: time per lane.
    There must be a lane for each part."""
    sizes = [1] * len(paces)
    ends = [(2 * pace, pace, part) for part, pace in enumerate(paces)]  # when each would end with one lane more
    heapq.heapify(ends)
    for _ in range(lanes - len(paces)):
        end, pace, part = ends[0]
        sizes[part] += 1
        heapq.heapreplace(ends, (end + pace, pace, part))
    if len(paces) > _SEARCH_LIMIT:
        return (0, *itertools.accumulate(sizes))
    longest = max(size * pace for size, pace in zip(sizes, paces, strict=True))
    options = [
        range(max(1, size - 2), min(size + 2, longest // pace) + 1) for size, pace in zip(sizes, paces, strict=True)
    ]
    return _fewest_spans(lanes, options)


def _fewest_spans(lanes: int, options: Sequence[range]) -> tuple[int, ...]:
    """Return the cut points with the fewest spans. options: the sizes that each part may have."""
    after = [(0, 0)]  # the fewest and the most lanes of the parts from the last one back
    for sizes in reversed(options):
        after.append((after[-1][0] + sizes[0], after[-1][1] + sizes[-1]))
    # best[end] = (spans, cuts): the cheapest way for the ranges so far to end at lane `end`
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for sizes, (least, most) in zip(options, reversed(after[:-1]), strict=True):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (spans, cuts) in best.items():
            for size in sizes:
                end = start + size
                if not least <= lanes - end <= most:
                    continue
                candidate = (spans + len(maximal_spans([(start, end)], lanes)), (*cuts, end))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return best[lanes][1]


def _ranges(lanes: Sequence[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for lane in lanes:
        if ranges and ranges[-1][1] == lane:
            ranges[-1] = (ranges[-1][0], lane + 1)
        else:
            ranges.append((lane, lane + 1))
    return tuple(ranges)


def merge_ranges(*parts: Ranges) -> Ranges:
    """Return the union of disjoint ranges, ascending, with neighbours joined."""
    return _ranges(sorted(lane for ranges in parts for lo, hi in ranges for lane in range(lo, hi)))
