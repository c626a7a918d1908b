"""One node's part in agreeing with others, message by message; the simulator looks at all of it together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_harness.membership import line, node, protocol
from elastic_harness.membership.codec import PACKED_FROM, encode, from_text, to_text
from elastic_harness.membership.lead import Lead
from elastic_harness.membership.node import (
    Carry,
    Deliver,
    Excluded,
    Happened,
    Node,
    NodeTick,
    Offered,
    Read,
    Saw,
)
from elastic_harness.membership.records import Known
from elastic_harness.membership.store import Change, Entry, Watch
from elastic_harness.membership.types import Generation, Limits, Report, node_of
from elastic_harness.simulate.store import EmbeddedStore

LIMITS = Limits(1, 8, 1)


class Nodes:
    """Nodes that reach a store at once, in the order in which they were made."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.now = 0.0
        self.store = EmbeddedStore(lambda: self.now)
        self.nodes: dict[str, Node] = {}
        self.leases: dict[str, int] = {}
        self.watches: dict[str, Watch] = {}
        self.seen: dict[str, list[node.Output]] = {}
        self.cut: set[str] = set()
        self.writes = 0

    def add(self, name: str, *, about: dict[str, Any] | None = None, known: Known = Known(), places: int = 1) -> Node:
        made = self.nodes[name] = Node(name, self.limits, places, known, about or {"seed": 1})
        self.seen[name] = []
        self._do(name, made.start())
        self.settle()
        return made

    def tell(self, name: str, *told: node.Input) -> None:
        for each in told:
            self._do(name, self.nodes[name].take(each, self.now))
        self.settle()

    def ready(self, name: str, member: str) -> None:
        self.tell(name, Happened(protocol.Ready(member)))

    def remove(self, name: str) -> None:
        """The node is gone, and its lease ends."""
        del self.nodes[name]
        self.store.revoke(self.leases[name])
        self.settle()

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        for name in list(self.nodes):
            for lease in self.leases.values():
                self.store.keep_alive(lease)
            self._do(name, self.nodes[name].take(NodeTick(), self.now))
        self.settle()

    def settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for name in list(self.nodes):
                if name in self.watches and name not in self.cut:
                    for change in self.watches[name].poll():
                        changed = True
                        self._do(name, self.nodes[name].take(Saw(change), self.now))

    def actions(self, name: str, kind: type) -> list[Any]:
        return [o.action for o in self.seen[name] if isinstance(o, Carry) and isinstance(o.action, kind)]

    def _do(self, name: str, outputs: Iterable[node.Output]) -> None:
        made = self.nodes[name]
        for output in outputs:
            self.seen[name].append(output)
            match output:
                case node.Register():
                    self.leases[name] = line.register(self.store, self.leases.get(name, 0), 1e9)
                    self._do(name, made.take(node.Registered(), self.now))
                case node.Follow():
                    self.watches[name], read = line.follow(self.store, output)
                    self._do(name, made.take(read, self.now))
                case node.Write():
                    self.writes += 1
                    self._do(name, made.take(line.write(self.store, output, self.leases[name]), self.now))


def two(nodes: Nodes, about: Mapping[str, dict[str, Any]] = {}) -> None:
    """A job of two nodes, which has formed its first generations."""
    for name in "ab":
        nodes.add(name, about=about.get(name))
    nodes.tick(4.0)
    for name in "ab":
        nodes.ready(name, f"{name}/w0")
    nodes.tick()
    report(nodes)


def report(nodes: Nodes, version: int = 3) -> None:
    """Members of a planned generation arrive, until there is none that is not formed."""
    for _ in range(4):
        for name in list(nodes.nodes):
            announced = nodes.actions(name, protocol.Announce)
            if announced and f"{name}/w0" in announced[-1].generation.members:
                number = announced[-1].generation.number
                nodes.tell(name, Happened(protocol.Reported(f"{name}/w0", Report(number, version))))
        nodes.tick()


def members(nodes: Nodes, name: str) -> tuple[str, ...]:
    return nodes.actions(name, protocol.Announce)[-1].generation.members


def test_two_nodes_form_a_generation() -> None:
    nodes = Nodes()
    two(nodes)
    assert set(members(nodes, "a")) == {"a/w0", "b/w0"} == set(members(nodes, "b"))
    assert nodes.actions("b", protocol.Publish)[-1].digest.generation == len(nodes.actions("b", protocol.Announce))


def test_in_peace_nothing_is_written() -> None:
    nodes = Nodes()
    two(nodes)
    nodes.tell("a", Happened(protocol.Committed(3)))
    before = nodes.writes
    for step in range(4, 400):
        for name in "ab":
            nodes.tell(name, Happened(protocol.Committed(step)))
        nodes.tick()
    assert nodes.writes <= before + 2  # the first commit that each node hears of


def test_addresses_arrive_when_every_member_has_one() -> None:
    nodes = Nodes()
    two(nodes)
    number = len(nodes.actions("a", protocol.Announce))
    nodes.tell("a", Offered(number, "0", "here"))
    assert not [o for o in nodes.seen["b"] if isinstance(o, Deliver)]
    nodes.tell("b", Offered(number, "1", "there"))
    assert [o for o in nodes.seen["a"] if isinstance(o, Deliver)][-1].values[number] == {"0": "here", "1": "there"}
    assert [o for o in nodes.seen["b"] if isinstance(o, Deliver)][-1].values[number] == {"0": "here", "1": "there"}


def test_a_value_of_one_member_arrives_too() -> None:
    """As NCCL has it, where only rank 0 has something to say."""
    nodes = Nodes()
    two(nodes)
    number = len(nodes.actions("a", protocol.Announce))
    nodes.tell("a", Offered(number, "id", "x"))
    nodes.tick()
    assert [o for o in nodes.seen["b"] if isinstance(o, Deliver)][-1].values[number] == {"id": "x"}


def test_a_node_that_differs_is_excluded_and_the_run_goes_on() -> None:
    nodes = Nodes()
    two(nodes)
    nodes.add("c", about={"seed": 2})
    nodes.ready("c", "c/w0")
    (excluded,) = [o for o in nodes.seen["c"] if isinstance(o, Excluded)]
    assert excluded.reason == "seed is 2 on this node and 1 in the run"
    nodes.tick()
    assert set(members(nodes, "a")) == {"a/w0", "b/w0"}


def test_a_node_that_knows_the_built_in_model_by_another_name_takes_part() -> None:
    """One goes on with what an earlier version recorded, one is new: whichever was first."""
    for first, second in (("models.gpt", "gpt.model"), ("gpt.model", "models.gpt")):
        nodes = Nodes()
        modules = {"a": first, "b": second}
        two(nodes, {name: {"model.class": f"elastic_harness.{module}.GPT"} for name, module in modules.items()})
        assert set(members(nodes, "a")) == {"a/w0", "b/w0"}


def test_a_node_that_leaves_disturbs_nobody() -> None:
    nodes = Nodes()
    two(nodes)
    nodes.tell("b", node.NodeLeaves())
    nodes.tick(protocol.LEAVING_S)
    last = nodes.actions("a", protocol.Announce)[-1].generation
    assert last.members == ("a/w0",) and not last.urgent
    assert not nodes.actions("a", protocol.Stop)


def test_a_node_can_be_asked_to_leave_through_another_one() -> None:
    """All nodes hear of it, and carry it out once; it is the named one that leaves."""
    nodes = Nodes()
    two(nodes)
    nodes.tell("a", Happened(protocol.DrainAsked("b")))
    nodes.tick()
    for name in "ab":
        assert [action.node for action in nodes.actions(name, protocol.Drain)] == ["b"]


def test_a_node_that_leaves_still_leaves_when_the_store_has_lost_everything() -> None:
    nodes = Nodes()
    two(nodes)
    nodes.tell("a", node.NodeLeaves())
    nodes.store = EmbeddedStore(lambda: nodes.now)
    for name in "ab":
        nodes.tell(name, node.LeaseEnded())
    nodes.tick(4.0)
    report(nodes)
    assert members(nodes, "b") == ("b/w0",)


@pytest.mark.parametrize("places", [8, 1], ids=["room for all", "room for one"])
def test_when_the_store_has_lost_everything_those_who_hold_the_state_go_on(places: int) -> None:
    """Whoever leads then, and however long it has been waiting itself."""
    nodes = Nodes(Limits(1, places, 1))
    nodes.add("a")
    nodes.tick(4.0)
    nodes.ready("a", "a/w0")
    report(nodes)
    nodes.store = EmbeddedStore(lambda: nodes.now)
    nodes.watches.clear()
    nodes.leases.clear()
    nodes.add("b")
    nodes.ready("b", "b/w0")
    nodes.tell("a", node.LeaseEnded())
    assert nodes.nodes["b"].leads
    before = len(nodes.actions("b", protocol.Announce))
    nodes.tick(4.0)
    first = nodes.actions("b", protocol.Announce)[before].generation
    assert first.members == ("a/w0", "b/w0")[:places]


def test_when_the_store_has_lost_everything_what_anybody_knew_counts() -> None:
    """Also of one who came and went while the leader waited; and no number is used again that nobody knows of."""
    nodes = Nodes()
    nodes.add("a", about={"seed": 1, "history": "h"}, known=Known(5, True, 1, 7))
    nodes.add("b", about={"seed": 1, "history": "h"}, known=Known(9, True, 2, 4))
    nodes.ready("a", "a/w0")
    nodes.remove("b")
    nodes.tick(4.0)
    assert nodes.actions("a", protocol.Announce)[0].generation.number > 9 + 100
    known = nodes.nodes["a"].state.own.known
    assert (known.lineage, known.from_step, known.born) == (2, 4, True)


def test_when_the_store_has_lost_everything_nobody_waits_for_a_worker_that_is_missing() -> None:
    nodes = Nodes()
    for name in "ab":
        nodes.add(name, places=2)
    nodes.tick(4.0)
    for name in "ab":
        nodes.ready(name, f"{name}/w0")
        nodes.ready(name, f"{name}/w1")
    nodes.tick()
    number = nodes.actions("a", protocol.Announce)[-1].generation.number
    for member in members(nodes, "a"):
        nodes.tell(node_of(member), Happened(protocol.Reported(member, Report(number, 3))))
    assert len(members(nodes, "a")) == 4 and nodes.actions("a", protocol.Publish)[-1].digest.generation == number
    pauses = len(nodes.actions("b", protocol.Pause))
    nodes.store = EmbeddedStore(lambda: nodes.now)
    nodes.watches.clear()
    for name in "ab":
        nodes.tell(name, node.LeaseEnded())
    nodes.tell("a", Happened(protocol.Lost("a/w0")))
    nodes.tick(4.0)
    assert set(members(nodes, "b")) == {"a/w1", "b/w0", "b/w1"}
    assert len(nodes.actions("b", protocol.Pause)) == pauses


def test_all_who_are_told_at_nearly_the_same_time_stop_together() -> None:
    """The first one is not let go without a checkpoint while the notices of the others are on their way."""
    nodes = Nodes()
    two(nodes)
    before = len(nodes.actions("a", protocol.Announce))
    nodes.tell("a", node.NodeLeaves())
    nodes.tick(protocol.LEAVING_S / 2)
    nodes.tell("b", node.NodeLeaves())
    assert nodes.actions("a", protocol.Stop) and nodes.actions("b", protocol.Stop)
    assert len(nodes.actions("a", protocol.Announce)) == before


def test_the_last_member_waits_for_the_workers_of_a_node_that_stays() -> None:
    """The job was stopped while a worker of the other node was started again."""
    nodes = Nodes()
    two(nodes)
    nodes.tell("b", Happened(protocol.Lost("b/w0")))
    nodes.tell("a", node.NodeLeaves())
    report(nodes)
    nodes.tick()
    assert members(nodes, "a") == ("a/w0",) and not nodes.actions("a", protocol.Stop)
    nodes.ready("b", "b/w1")
    nodes.tick()
    assert members(nodes, "a") == ("a/w0", "b/w1")


def test_if_all_leave_the_job_stops() -> None:
    nodes = Nodes()
    two(nodes)
    for name in "ab":
        nodes.cut.add("b")
        nodes.tell(name, node.NodeLeaves())
    nodes.cut.clear()
    report(nodes)
    for name in "ab":
        assert len(nodes.actions(name, protocol.Stop)) <= 1
    assert nodes.actions("a", protocol.Stop) or members(nodes, "a") != ("a/w0", "b/w0")


def test_a_stopped_job_begins_again_where_it_was() -> None:
    nodes = Nodes()
    two(nodes)
    number = nodes.actions("a", protocol.Announce)[-1].generation.number
    nodes.tell("b", Happened(protocol.StopAsked("enough")))
    assert [a.reason for a in nodes.actions("a", protocol.Stop)] == ["enough"]
    for name in "ab":
        nodes.remove(name)
    nodes.add("c")
    nodes.ready("c", "c/w0")
    nodes.tick()
    again = nodes.actions("c", protocol.Announce)
    assert [a.generation.members for a in again] == [("c/w0",)]
    assert again[0].generation.number > number
    assert nodes.nodes["c"].state.own.known.born, "it may have committed its first step"


def test_a_node_that_missed_a_stop_and_a_relaunch_has_no_part_in_what_follows() -> None:
    """It hears of everything at once: the end of its own job, and then of another, stopped as well, that counted on its
    workers."""
    nodes = Nodes()
    two(nodes)
    nodes.cut.add("b")
    nodes.tell("a", Happened(protocol.StopAsked("enough")))
    nodes.remove("a")
    for name in "cd":
        nodes.add(name)
        nodes.ready(name, f"{name}/w0")
        nodes.tick()
        assert members(nodes, name) == ("b/w0",), "its record tells of it as before"
        if name == "c":
            nodes.tell(name, Happened(protocol.StopAsked("enough again")))
            nodes.remove(name)
    carried = len(nodes.seen["b"])
    nodes.cut.clear()
    nodes.settle()
    assert [o.action for o in nodes.seen["b"][carried:] if isinstance(o, Carry)] == [protocol.Stop("enough")]
    assert members(nodes, "d") == ("d/w0",)


@pytest.mark.parametrize("is_gone", [False, True], ids=["it stays", "it goes"])
def test_a_worker_that_no_record_names_is_lost(is_gone: bool) -> None:
    """Whatever a node says of it, or does not."""
    lead = Lead("run/node/a.0", 1, LIMITS, 0.0, "origin")
    record: dict[str, Any] = {"about": {}, "places": 1, "members": ["b/w0"], "events": [], "values": {}}
    record |= {"known": vars(Known()), "veterans": []}
    ready = [[1, encode(protocol.Ready("b/w0"))]]
    lead = lead.read_all({"run/node/b.0": {**record, "events": ready}}, None, 0.0)
    assert lead.state is not None and lead.state.ready == ("b/w0",)
    lead = lead.changed("run/node/b.0", {**record, "members": []})
    if is_gone:
        lead = lead.ended("run/node/b.0")
    lead = lead.step(0.1)
    assert lead.state is not None and lead.state.ready == ()


def test_workers_of_a_node_that_comes_to_differ_are_lost() -> None:
    nodes = Nodes()
    two(nodes)
    nodes.tell("b", node.Described({"seed": 2}))
    assert [o for o in nodes.seen["b"] if isinstance(o, Excluded)]
    last = nodes.actions("a", protocol.Announce)[-1].generation
    assert last.members == ("a/w0",) and last.urgent and "1 lost" in last.reason


def test_a_job_that_finished_stays_finished() -> None:
    nodes = Nodes()
    two(nodes)
    for name in "ab":
        nodes.tell(name, Happened(protocol.Finished(f"{name}/w0", 9)))
    assert [a.version for a in nodes.actions("a", protocol.Done)] == [9]
    for name in "ab":
        nodes.remove(name)
    nodes.add("late")
    assert [a.version for a in nodes.actions("late", protocol.Done)] == [9]
    nodes.ready("late", "late/w0")
    nodes.tick(10.0)
    assert not nodes.actions("late", protocol.Announce)


def test_what_a_node_has_missed_counts_as_urgent() -> None:
    """A decision holds the newest actions only. What came before them may have been urgent."""
    nodes = Nodes()
    two(nodes)
    entry = nodes.store.get(node.DECISION)
    assert entry is not None
    decision = from_text(entry.value)
    planned = protocol.Announce(Generation(90, ("a/w0", "b/w0"), False, "1 joined"))
    for first, urgent in ((decision["count"] + 1, False), (decision["count"] + 9, True)):
        value = to_text({**decision, "count": first, "actions": [[first, encode(planned)]]})
        decision["count"] = first
        change = Change(entry.revision + first, node.DECISION, Entry(node.DECISION, value, entry.revision + first))
        (carried,) = [o for o in nodes.nodes["b"].take(Saw(change), 0.0) if isinstance(o, Carry)]
        assert isinstance(carried.action, protocol.Announce)
        assert carried.action.generation.urgent == urgent


def test_those_who_are_missing_do_not_cost_living_ones_their_place() -> None:
    """The leader and another node vanish at once: fewer are wanted then, and it must be the dead who go."""
    nodes = Nodes()
    for name in "abc":
        nodes.add(name)
    nodes.tick(4.0)
    for name in "abc":
        nodes.ready(name, f"{name}/w0")
    report(nodes)
    assert set(members(nodes, "c")) == {"a/w0", "b/w0", "c/w0"}
    nodes.cut |= {"b", "c"}
    nodes.remove("a")
    nodes.remove("b")
    nodes.cut.clear()
    nodes.settle()
    nodes.tick()
    last = nodes.actions("c", protocol.Announce)[-1].generation
    assert last.members == ("c/w0",) and last.urgent and "2 lost" in last.reason


def test_a_leader_that_comes_and_goes_is_not_waited_for() -> None:
    """Seen by a node whose own claim is refused because of it: nothing else would tell that nobody leads."""
    nodes = Nodes()
    two(nodes)
    nodes.cut.add("b")
    b = nodes.nodes["b"]
    nodes.remove("a")
    claim = next(o for o in b.take(Saw(Change(90, node.LEADER, None)), 0.0) if isinstance(o, node.Write))
    for revision, entry in ((91, Entry(node.LEADER, "run/node/c.0", 91)), (92, None)):
        b.take(Saw(Change(revision, node.LEADER, entry)), 0.0)
    assert node.Follow(everything=False) in b.take(node.WriteRefused(claim.number), 0.0)


def test_what_was_before_its_own_claim_does_not_unseat_a_leader() -> None:
    nodes = Nodes()
    two(nodes)
    a = nodes.nodes["a"]
    late = Change(1, node.LEADER, None)
    nodes._do("a", a.take(Saw(late), 0.0))
    assert a.leads


def test_who_holds_the_leaders_key_leads() -> None:
    nodes = Nodes()
    two(nodes)
    a, entry = nodes.nodes["a"], nodes.store.get(node.LEADER)
    assert entry is not None
    a.state = replace(a.state, lead=None)  # it stepped down, because a decision of its own was refused
    nodes._do("a", a.take(Read((entry,)), 0.0))
    assert a.leads


def test_a_folder_of_another_run_is_turned_away() -> None:
    nodes = Nodes()
    two(nodes)
    history = nodes.nodes["a"].state.own.history
    assert history and nodes.nodes["b"].state.own.history == history
    nodes.add("back", about={"seed": 1, "history": history})
    nodes.add("old", about={"seed": 1, "history": "another"}, known=Known(9, True, 3, 0))
    assert not [o for o in nodes.seen["back"] if isinstance(o, Excluded)]
    (excluded,) = [o for o in nodes.seen["old"] if isinstance(o, Excluded)]
    assert "run folder" in excluded.reason
    assert nodes.nodes["a"].state.own.known.lineage == 0


@pytest.mark.parametrize("value", [{"a": [1, "ü"]}, ["x" * PACKED_FROM, {"n": None}]], ids=["short", "packed"])
def test_text_comes_back(value: Any) -> None:
    assert from_text(to_text(value)) == value


def test_a_long_text_is_packed() -> None:
    values = {str(rank): f"{rank:05d}" + "address" * 200 for rank in range(100)}
    assert len(to_text(values)) < 20 * 100
    with pytest.raises(ValueError):
        from_text(to_text(values)[:-9] + "=")
