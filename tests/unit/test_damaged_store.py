"""Values in the store that no node wrote: ignored, said once, written anew by the node whose they are; and the job goes
on with whoever dies next."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.membership import node, protocol
from elastic_harness.membership.codec import from_text, to_text
from elastic_harness.membership.records import read_decision, read_record, read_state, read_values
from elastic_harness.membership.store import Put
from unit.test_node import Nodes, members, report, two

KEYS = (node.LEADER, node.DECISION, node.VALUES, node.STATE, "run/node/a.0", "run/node/b.0")
READERS = {node.DECISION: read_decision, node.STATE: read_state, node.VALUES: read_values}


def write(nodes: Nodes, key: str, value: str) -> None:
    """What somebody does with etcdctl: the value hangs on no lease then."""
    nodes.store.txn({}, [Put(key, value)])
    nodes.settle()


def whole(nodes: Nodes, key: str) -> bool:
    """Whether a node has written this value, on a lease if it is a node's own."""
    entry = nodes.store.get(key)
    if entry is None:
        return key.startswith(node.NODES) and len(nodes.store.range(key.rpartition(".")[0])) == 1
    try:
        READERS.get(key, str if key == node.LEADER else read_record)(entry.value)
    except ValueError:
        return False
    return key != node.LEADER or entry.value.startswith(node.NODES)


def complaints(nodes: Nodes, key: str) -> list[str]:
    """Which nodes said that the value is damaged; each as often as it did."""
    return [name for name in nodes.seen for o in nodes.seen[name] if isinstance(o, node.Damaged) and o.key == key]


def addressed(nodes: Nodes) -> None:
    """The members of the newest generation tell where they are, so that there are values."""
    number = nodes.actions("a", protocol.Announce)[-1].generation.number
    for rank, name in enumerate(nodes.nodes):
        nodes.tell(name, node.Offered(number, str(rank), f"at {name}"))
    nodes.tick()


@pytest.mark.parametrize("damage", ["", "{", "7", "[]", "null", "z!", "zAAAA", '{"is": "State"}', "[" * 100_000])
@pytest.mark.parametrize("key", KEYS)
def test_what_is_damaged_is_said_once_and_written_anew(key: str, damage: str) -> None:
    nodes = Nodes()
    two(nodes)
    addressed(nodes)
    write(nodes, key, damage)
    for _ in range(3):
        nodes.tick()
    said = complaints(nodes, key)
    assert said and len(said) == len(set(said)), said
    assert whole(nodes, key), nodes.store.get(key)
    nodes.remove("b")
    go_on(nodes, 20)
    assert members(nodes, "a") == ("a/w0",)


def go_on(nodes: Nodes, ticks: int) -> None:
    for _ in range(ticks):
        nodes.tick()
        report(nodes)


@pytest.mark.parametrize("key", [node.DECISION, node.STATE])
def test_a_leader_that_never_read_it_begins_with_what_the_nodes_know(key: str) -> None:
    """The leader dies, and nobody can read what it has left: as if the store had lost everything."""
    nodes = Nodes()
    two(nodes)
    (leading,) = [name for name in "ab" if nodes.nodes[name].leads]
    (other,) = set("ab") - {leading}
    numbers = [a.generation.number for a in nodes.actions(other, protocol.Announce)]
    nodes.cut.add(leading)
    nodes.store.txn({}, [Put(key, "damaged")])
    nodes.remove(leading)
    nodes.cut.clear()
    go_on(nodes, 40)
    made = nodes.nodes[other]
    assert made.state.led is not None and made.state.led.born
    last = nodes.actions(other, protocol.Announce)[-1].generation
    assert last.members == (f"{other}/w0",) and last.number > max(numbers)
    assert not nodes.actions(other, protocol.Evict) and not nodes.actions(other, protocol.Pause)[3:]


def test_a_leader_whose_decisions_are_damaged_while_it_decides_begins_anew() -> None:
    """Its write is refused. It reads what stands there, and can go on from nothing, though it leads as before."""
    nodes = Nodes()
    two(nodes)
    (leading,) = [name for name in "ab" if nodes.nodes[name].leads]
    numbers = [a.generation.number for a in nodes.actions(leading, protocol.Announce)]
    nodes.cut.add(leading)
    nodes.tell(leading, node.Happened(protocol.Lost(f"{leading}/w0")))
    nodes.tell(leading, node.Happened(protocol.Ready(f"{leading}/w1")))
    nodes.store.txn({}, [Put(node.DECISION, "damaged"), Put(node.STATE, "damaged")])
    nodes.cut.clear()
    nodes.settle()
    go_on(nodes, 40)
    for name in "ab":
        last = nodes.actions(name, protocol.Announce)[-1].generation
        assert set(last.members) == {"a/w0", "b/w0", f"{leading}/w1"} - {f"{leading}/w0"}
        assert last.number > max(numbers)


def test_a_node_of_which_the_next_leader_can_read_nothing_keeps_its_workers() -> None:
    nodes = Nodes()
    for name in "abc":
        nodes.add(name)
    nodes.tick(4.0)
    for name in "abc":
        nodes.ready(name, f"{name}/w0")
    report(nodes)
    (leading,) = [name for name in "abc" if nodes.nodes[name].leads]
    one, other = sorted(set("abc") - {leading})
    before = len(nodes.actions(one, protocol.Announce))
    nodes.cut |= {leading, one, other}
    nodes.store.txn({}, [Put(nodes.nodes[other].state.own.key, "damaged")])
    nodes.remove(leading)
    nodes.cut.clear()
    nodes.settle()
    go_on(nodes, 40)
    for name in (one, other):
        everyone = {m for a in nodes.actions(name, protocol.Announce)[-1:] for m in a.generation.members}
        assert everyone == {f"{one}/w0", f"{other}/w0"}
    assert whole(nodes, nodes.nodes[other].state.own.key)
    assert all(f"{other}/w0" in a.generation.members for a in nodes.actions(one, protocol.Announce)[before:])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("State") | st.just(10**400),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("is"), each, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in inside for each in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_value_in_the_store_ends_a_node(data: st.DataObject) -> None:
    """Any part of any value is replaced by anything: no node fails, and none reads anything it cannot act on."""
    nodes = Nodes()
    two(nodes)
    addressed(nodes)
    key = data.draw(st.sampled_from(KEYS))
    entry = nodes.store.get(key)
    assert entry is not None
    if key == node.LEADER:
        write(nodes, key, data.draw(st.text()))
    else:
        told = from_text(entry.value)
        path = data.draw(st.sampled_from(places(told)))
        write(nodes, key, to_text(replaced(told, path, data.draw(JSON))))
    for _ in range(3):
        nodes.tick()
    report(nodes)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | JSON.map(json.dumps) | st.binary(max_size=60).map(lambda b: "z" + b.hex()))
def test_readers_raise_nothing_but_value_errors(text: str) -> None:
    for read in (read_record, read_decision, read_state, read_values):
        try:
            read(text)
        except ValueError:
            continue
