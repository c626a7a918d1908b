"""Any placement, after any history of losses and joins, gives the same bits; and no byte travels in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.comm import plan as planning
from elastic_harness.comm.placement import Ranges, balanced_cuts, deal, merge_ranges
from elastic_harness.comm.plan import Plan, make_plan
from elastic_harness.comm.tree import Node, key, maximal_nodes, parent_and_sibling, split

Vector = npt.NDArray[np.float32]
BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "BLOCK", BLOCK)
        yield


def flat(ranges: Ranges) -> list[int]:
    return [lane for lo, hi in ranges for lane in range(lo, hi)]


def tree_sum(node: Node, lanes: Sequence[Vector]) -> Vector:
    if node[1] - node[0] == 1:
        return lanes[node[0]]
    left, right = split(node)
    return tree_sum(left, lanes) + tree_sum(right, lanes)


def execute(plan: Plan, lanes: Sequence[Vector], world: int) -> list[Vector]:
    """Every rank's result: only what the plan sends is ever seen by another rank."""
    elements = len(lanes[0])
    holder = dict(plan.cover)
    received: dict[tuple[int, Node], Vector] = {}
    for t in plan.reduce:
        assert t.node is not None and holder[t.node] == t.source
        assert (t.target, t.node) not in received, "sent twice"
        assert (t.lo, t.hi) == plan.owned[t.target]
        received[t.target, t.node] = tree_sum(t.node, lanes)[t.lo : t.hi]
    results = [np.full(elements, np.nan, np.float32) for _ in range(world)]

    for rank, (lo, hi) in enumerate(plan.owned):

        def value(node: Node, rank: int = rank, lo: int = lo, hi: int = hi) -> Vector:
            if node in holder:
                return tree_sum(node, lanes)[lo:hi] if holder[node] == rank else received.pop((rank, node))
            left, right = split(node)
            return value(left) + value(right)

        if hi > lo:
            results[rank][lo:hi] = value((0, len(lanes)))
    assert not received, "sent, but never needed"
    for t in plan.gather:
        results[t.target][t.lo : t.hi] = results[t.source][t.lo : t.hi]
    return results


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, tuple[str, ...], dict[str, Ranges]]:
    """lanes, the members in the end and what each of them holds: after rounds in which members finish a part of what
    they were dealt, some die with all they had, and others join."""
    lanes = draw(st.integers(1, 24))
    members = [f"w{i}" for i in range(draw(st.integers(1, 6)))]
    held: dict[str, Ranges] = {}
    born = len(members)
    for _ in range(draw(st.integers(0, 3))):
        busy = {member: draw(st.integers(0, 5)) for member in members}
        dealt = deal(lanes, members, held, busy)
        assert_dealt_once(lanes, members, held, dealt, busy)
        for member in members:
            todo = flat(dealt[member])
            done = todo[: draw(st.integers(0, len(todo)))]
            held[member] = merge_ranges(held.get(member, ()), tuple((x, x + 1) for x in done))
        dead = draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
        joined = draw(st.integers(0, 2))
        members = [m for m in members if m not in dead] + [f"w{born + i}" for i in range(joined)]
        born += joined
        held = {m: r for m, r in held.items() if m in members and r}
    dealt = deal(lanes, members, held)
    assert_dealt_once(lanes, members, held, dealt, {})
    return lanes, tuple(members), {m: merge_ranges(held.get(m, ()), dealt[m]) for m in members}


def assert_dealt_once(
    lanes: int,
    members: Sequence[str],
    held: Mapping[str, Ranges],
    dealt: Mapping[str, Ranges],
    busy: Mapping[str, int],
) -> None:
    assert set(dealt) == set(members)
    everything = [lane for part in (held, dealt) for ranges in part.values() for lane in flat(ranges)]
    assert sorted(everything) == list(range(lanes))
    sizes = {member: len(flat(ranges)) for member, ranges in dealt.items()}
    if not any(busy.values()):
        assert max(sizes.values()) == -(-sum(sizes.values()) // len(members)), "nobody waits for an overloaded member"
        return
    first_free = min(size + busy[member] for member, size in sizes.items())
    last = max((size + busy[member] for member, size in sizes.items() if size), default=0)
    assert last <= first_free + 1, "nobody waits for an overloaded member"


@given(histories(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_any_history_gives_the_same_bits(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int, seed: int
) -> None:
    lanes, members, placed = history
    rng = np.random.default_rng(seed)
    gradients = [(rng.standard_normal(elements) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(lanes)]
    expected = tree_sum((0, lanes), gradients)
    plan = make_plan(members, lanes, placed, elements)
    for result in execute(plan, gradients, len(members)):
        assert result.tobytes() == expected.tobytes()


def test_a_plain_sum_would_show_the_placement() -> None:
    """The negative control: added up member by member, the same gradients give other bits."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(64).astype(np.float32) for _ in range(16)]
    sums = set()
    for world in (1, 2, 3, 4):
        cuts = balanced_cuts(16, world)
        total = np.zeros(64, np.float32)
        for lo, hi in pairwise(cuts):
            part = np.zeros(64, np.float32)
            for gradient in gradients[lo:hi]:
                part = part + gradient
            total = total + part
        sums.add(total.tobytes())
    assert len(sums) > 1


@given(histories(), st.integers(1, 40))
def test_owners_cover_every_element_once_in_whole_blocks(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int
) -> None:
    lanes, members, placed = history
    plan = make_plan(members, lanes, placed, elements)
    owned = [x for lo, hi in plan.owned for x in range(lo, hi)]
    assert owned == list(range(elements))
    assert all(lo % BLOCK == 0 or lo == elements for lo, _ in plan.owned)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 60))
def test_one_partial_each_travels_like_reduce_scatter_and_all_gather(world: int, level: int, elements: int) -> None:
    members = [f"w{i}" for i in range(world)]
    lanes = world << level
    placed = deal(lanes, members, {})
    plan = make_plan(members, lanes, placed, elements)
    if len(plan.cover) > world:
        return
    sent = sum(t.hi - t.lo for t in (*plan.reduce, *plan.gather))
    assert sent == 2 * (world - 1) * elements
    for rank in range(world):
        busy = sum(t.hi - t.lo for t in (*plan.reduce, *plan.gather) if t.source == rank)
        lo, hi = plan.owned[rank]
        assert busy == (elements - (hi - lo)) + (world - 1) * (hi - lo)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_power_of_two_of_members_holds_one_partial_each(world: int) -> None:
    members = [f"w{i}" for i in range(world)]
    plan = make_plan(members, 32, deal(32, members, {}), 100)
    assert len(plan.cover) == world


@given(st.integers(1, 200), st.integers(1, 20))
def test_cuts_are_balanced(lanes: int, parts: int) -> None:
    cuts = balanced_cuts(lanes, parts)
    assert len(cuts) == parts + 1 and cuts[0] == 0 and cuts[-1] == lanes
    sizes = [hi - lo for lo, hi in pairwise(cuts)]
    assert min(sizes) >= 0 and max(sizes) == -(-lanes // parts)


@given(st.integers(1, 70))
def test_every_node_of_the_tree_has_its_own_number(lanes: int) -> None:
    nodes: list[Node] = [(0, lanes)]
    for node in nodes:
        if node[1] - node[0] > 1:
            nodes.extend(split(node))
    assert len(nodes) == 2 * lanes - 1
    assert len({key(n, lanes) for n in nodes}) == len(nodes)
    for node in nodes[1:]:
        parent, sibling = parent_and_sibling(node, lanes)
        assert set(split(parent)) == {node, sibling}


@given(st.integers(1, 40), st.data())
def test_maximal_nodes_cover_what_is_held_and_nothing_else(lanes: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, lanes - 1)))
    nodes = maximal_nodes([(x, x + 1) for x in held], lanes)
    assert [x for lo, hi in nodes for x in range(lo, hi)] == sorted(held)
    for node in nodes:
        if node != (0, lanes):
            _, sibling = parent_and_sibling(node, lanes)
            assert sibling not in nodes, "two siblings are one larger node"
