"""What a node of several consists of, part by part: its line to the store, its options, its address, the ledgers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.agent.decisions import own_address, store_view
from elastic_harness.agent.decisions.store_link import StoreLink
from elastic_harness.agent.options import parse
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership import node
from elastic_harness.membership.decide import Form, Pause, View, decide
from elastic_harness.membership.store import Put, TooLarge, Unavailable
from elastic_harness.membership.types import Generation, Limits, node_of
from elastic_harness.simulate.store import EmbeddedStore
from elastic_harness.train.progress import Formed
from etcd_servers import Cluster

PATIENCE_S = 10.0


class Trouble:
    """A store for several threads that can be made to fail."""

    def __init__(self) -> None:
        self.store = EmbeddedStore(time.monotonic)
        self.error: Exception | None = None
        self.lock = threading.Lock()
        self.delay_s = 0.0  # of each renewal of a lease
        self.after: Exception | None = None  # raised once, after a transaction took place

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            time.sleep(self.delay_s if name == "keep_alive" else 0.0)
            with self.lock:
                if self.error is not None:
                    raise self.error
                result = getattr(self.store, name)(*arguments, **named)
                if name == "txn" and self.after is not None:
                    lost, self.after = self.after, None
                    raise lost
                return result

        return call


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def link(trouble: Trouble) -> Iterator[StoreLink]:
    link = StoreLink(trouble, trouble, 1.0, lambda: None)  # type: ignore[arg-type]
    yield link
    trouble.error = None
    link.close()


def heard(link: StoreLink, kind: type) -> Any:
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        for told in link.heard():
            if isinstance(told, kind):
                return told
        assert time.monotonic() < give_up_at, f"heard no {kind.__name__}; trouble: {link.trouble}"
        time.sleep(0.01)


def registered(link: StoreLink) -> None:
    link.ask(node.Register())
    heard(link, node.Registered)


def write(number: int = 1, key: str = "run/head/x", revision: int = 0) -> node.Write:
    return node.Write(number, ((key, "v"),), {key: revision}, leased=True)


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_write_takes_place_once_though_its_answer_is_lost(link: StoreLink, trouble: Trouble) -> None:
    registered(link)
    link.ask(node.Follow(everything=False))
    heard(link, node.Read)
    trouble.after = Unavailable("lost", maybe_applied=True)
    link.ask(write())
    assert heard(link, node.Wrote).number == 1
    assert trouble.store.get("run/head/x").revision == 1  # type: ignore[union-attr]


def test_a_write_that_expects_what_is_not_so_is_refused(link: StoreLink, trouble: Trouble) -> None:
    registered(link)
    link.ask(write(revision=7))
    assert heard(link, node.WriteRefused).number == 1


@pytest.mark.parametrize("error", [Unavailable("away"), InfrastructureError("database space exceeded")], ids=str)
def test_whatever_is_wrong_with_the_store_may_pass(link: StoreLink, trouble: Trouble, error: Exception) -> None:
    """A full etcd refuses writes: that is no reason to end a job that trains."""
    registered(link)
    trouble.error = error
    link.ask(write())
    until(lambda: link.trouble is not None)
    assert str(error) in link.trouble[1]  # type: ignore[index]
    trouble.error = None
    heard(link, node.Wrote)
    until(lambda: link.trouble is None)


def test_what_is_too_large_is_an_error(tmp_path: Path) -> None:
    """It would be too large again: nothing would be decided any more, and nobody would know why."""
    with Cluster(tmp_path, options=["--max-request-bytes", "20000"]) as cluster:
        stores = [EtcdStore(Gateway(cluster.address, timeout_s=5.0)) for _ in range(2)]
        link = StoreLink(*stores, 2.0, lambda: None)
        try:
            registered(link)
            link.ask(node.Write(1, (("run/head/x", "x" * 30_000),), {"run/head/x": 0}, leased=True))
            with pytest.raises(TooLarge, match=r"run/head/x with 30,000 bytes.*--max-request-bytes"):
                heard(link, node.Wrote)
        finally:
            link.close()


def test_a_store_that_never_lets_us_in_is_an_error(link: StoreLink, trouble: Trouble) -> None:
    trouble.error = ConfigError("authentication failed")
    link.ask(node.Register())
    with pytest.raises(ConfigError, match="authentication"):
        heard(link, node.Registered)


def test_a_lease_that_ended_is_told(link: StoreLink, trouble: Trouble) -> None:
    registered(link)
    trouble.store = EmbeddedStore(time.monotonic, lease=1000)  # it has lost everything
    heard(link, node.LeaseEnded)
    link.ask(write())
    heard(link, node.WriteRefused)
    registered(link)
    link.ask(write(2))
    heard(link, node.Wrote)


def test_late_renewals_are_told_before_the_lease_is_lost(link: StoreLink, trouble: Trouble) -> None:
    """Of the lease of one second a renewal takes more than a quarter. That is told once."""
    registered(link)
    trouble.delay_s = 0.3
    late: list[float] = []
    until(lambda: late.extend(filter(None, [link.late_renewal()])) or late)
    assert 0.3 <= late[0] < 1.0 and link.trouble is None
    assert not link.heard(), "the lease lives"
    until(lambda: len(link._renewals) >= 2)
    assert link.late_renewal() is None


def test_the_lease_is_given_back(trouble: Trouble) -> None:
    link = StoreLink(trouble, trouble, 60.0, lambda: None)  # type: ignore[arg-type]
    registered(link)
    link.ask(write())
    heard(link, node.Wrote)
    link.close()
    assert trouble.store.get("run/head/x") is None


def test_a_history_that_is_gone_is_read_anew(link: StoreLink, trouble: Trouble) -> None:
    registered(link)
    link.ask(node.Follow(everything=True))
    heard(link, node.Read)
    with trouble.lock:
        for number in range(3):
            trouble.store.txn({}, [Put("run/node/x", str(number))])
        trouble.store.compact(2)
    assert heard(link, node.Read).entries[-1].value == "2"


def test_an_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["http://127.0.0.1:2379"]
    assert own_address.own_address("127.0.0.1", here) == "127.0.0.1"
    assert own_address.own_address("localhost", here) in ("127.0.0.1", "::1")
    assert own_address.own_address("lo", here) == "127.0.0.1"
    assert own_address.own_address(None, ["http://no-such-host.invalid:1", *here]) != ""
    monkeypatch.setattr(own_address, "_towards", lambda host, _: {"127.0.0.1": "127.0.0.1"}.get(host, "10.1.2.3"))
    with pytest.raises(ConfigError, match="no other machine"):
        own_address.own_address("lo", ["http://10.0.0.1:2379"])
    assert own_address.own_address(None, ["http://127.0.0.1:2379"]) == "10.1.2.3", "others reach it otherwise"
    for wrong in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=r"--host .*lo"):
            own_address.own_address(wrong, ["http://10.0.0.1:2379"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nnodes 2", "--store etcd://HOST:2379"),
        ("--nnodes 3:2 --store etcd://h --run-id j", "MIN:MAX"),
        ("--nnodes 2 --store etcd://h", "--run-id is None"),
        ("--nnodes 2 --store etcd://h --run-id a/b", "--run-id is 'a/b'"),
        ("--nnodes 2 --store etcd://h --run-id j --node-name a/b", "--node-name is 'a/b'"),
        ("--nnodes 2 --store etcd://h --run-id j --standalone", "--standalone and --store"),
        ("--nnodes 2 --store ftp://h --run-id j", "ftp://"),
        ("--nnodes 2 --store etcd://u:p@h --run-id j", "password"),
        ("--host 1.2.3.4", "there is no --store"),
        ("--nnodes 2 --store etcd://h --run-id j --node-timeout 1", "at least 2"),
        ("--nnodes 2 --store etcd://h --run-id j --min-workers 99", "--max-workers"),
    ],
)
def test_options_that_do_not_fit(arguments: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse([*arguments.split(), "train.py"])
    assert said in str(raised.value)


def test_options_of_several_nodes() -> None:
    given = "--nnodes 2:4 --store etcd://h --run-id j --nproc-per-node 8 --min-workers 12 train.py"
    options = parse(given.split()).options
    assert (options.min_nodes, options.max_workers, options.min_workers, options.store_id) == (2, 32, 12, "j")


def test_a_run_is_forgotten_unless_nodes_are_there(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        address = "etcd://" + cluster.endpoints[0].partition("//")[2]
        options = parse(f"--store {address} --run-id job train.py".split()).options
        assert "knows no such run" in store_view.forget(options)
        with pytest.raises(ConfigError, match="knows no run 'job'"):
            store_view.status(address, "job")
        store = store_view.store_of(address, "job")
        known = '{"number":0,"born":false,"lineage":0,"from_step":0,"saved":false,"doubts":[],"omissions":[]}'
        record = f'{{"about":{{}},"places":2,"members":[],"known":{known},"events":[],"values":{{}}}}'
        store.txn({}, [Put(node.DECISION, "{}"), Put(node.STATE, "{}"), Put(f"{node.NODES}a-1.0", record)])
        assert "1 nodes are in the run" in store_view.forget(options)
        with pytest.raises(InfrastructureError, match=r"run/head/decision .* \(origin is missing\)"):
            store_view.status(address, "job")
        store.txn({}, deletes=[node.DECISION])
        there = {"places": 2, "ready": 0, "ranks": [], "draining": False}
        assert store_view.status(address, "job")["nodes"] == {"a-1": there}
        store.txn({}, deletes=[f"{node.NODES}a-1.0"])
        assert "is forgotten" in store_view.forget(options)
        assert store.range("") == []


def test_the_first_member_of_each_node_speaks() -> None:
    members = ("a/w0", "b/w0", "a/w1", "c/w5")
    generation = Generation(1, members, True, "")
    formed = [Formed(generation, None, rank, None) for rank in range(4)]  # type: ignore[arg-type]
    assert [f.on_node for f in formed] == [(0, 2), (0, 1), (1, 2), (0, 1)]
    assert [f.speaks for f in formed] == [True, True, False, True]
    alone = Generation(1, ("w0-1", "w1-1"), True, "")
    assert [Formed(alone, None, rank, None).speaks for rank in range(2)] == [True, False]  # type: ignore[arg-type]


def test_too_few_nodes_wait() -> None:
    limits = Limits(1, 8, 4, min_nodes=2)
    view = View(None, ("a/w0", "a/w1"))
    assert decide(700.0, view, limits) == Pause("waiting: workers of 1 of at least 2 nodes are ready")
    decision = decide(700.0, View(None, ("a/w0", "b/w1")), limits)
    assert isinstance(decision, Form) and {node_of(m) for m in decision.members} == {"a", "b"}


def test_who_is_leaving_is_let_go_at_a_boundary() -> None:
    current = Generation(1, ("a/w0", "b/w0", "c/w0"), True, "")
    view = View(current, current.members, leaving=frozenset({"b/w0"}))
    assert decide(0.0, view, Limits(1, 8, 3)) == Form(("a/w0", "c/w0"), urgent=False, reason="1 removed")
    without_it = decide(0.0, view, Limits(3, 8, 3))
    assert isinstance(without_it, Pause), "the job would have to wait: it trains as long as it can"
