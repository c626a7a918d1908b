"""The store's conformance suite: every implementation must pass these same tests. `make_store` names them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership.store import Change, Compacted, Put, Store
from elastic_harness.simulate.store import EmbeddedStore
from etcd_servers import VERSIONS, Cluster, polled

SLACK_S = 1.5  # etcd looks for leases that have ended twice a second
_NUMBERS = itertools.count()


class Clock:
    """Time that passes when a test says so, or, where a real server counts it, real time."""

    def __init__(self, real: bool) -> None:
        self.now = 0.0
        self._real = real

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if self._real:
            time.sleep(seconds)
        self.now += seconds


@pytest.fixture(params=["embedded", *(pytest.param(f"etcd {v}", marks=pytest.mark.slow) for v in VERSIONS)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(kind: str) -> Clock:
    return Clock(real=kind != "embedded")


@pytest.fixture
def store(kind: str, clock: Clock, clusters: Callable[[str], Cluster]) -> Store:
    if kind == "embedded":
        return EmbeddedStore(clock)
    return EtcdStore(Gateway(clusters(kind.removeprefix("etcd ")).address), f"{next(_NUMBERS)}/")


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """One etcd of each version, started when the first test needs it."""
    with ExitStack() as running:

        @cache
        def of(version: str) -> Cluster:
            return running.enter_context(Cluster(tmp_path_factory.mktemp("etcd"), version))

        yield of


def test_a_missing_key_is_none_and_has_revision_zero(store: Store) -> None:
    assert store.get("a") is None
    assert store.range("") == []
    assert store.txn({"a": 0}, [Put("a", "1")])[0]
    assert not store.txn({"a": 0}, [Put("a", "2")])[0]
    entry = store.get("a")
    assert entry is not None and entry.value == "1"


def test_a_transaction_is_all_or_nothing_and_one_revision(store: Store) -> None:
    before = store.revision
    applied, revision = store.txn({}, [Put("a", "1"), Put("b", "1")])
    assert applied and revision == before + 1
    assert {e.revision for e in store.range("")} == {revision}
    applied, unchanged = store.txn({"a": revision, "b": 0}, [Put("a", "2")], ["b"])
    assert not applied and unchanged == revision
    assert [e.value for e in store.range("")] == ["1", "1"]
    applied, newer = store.txn({"a": revision, "b": revision}, [Put("a", "2")], ["b"])
    assert applied and newer == revision + 1
    assert [(e.key, e.value, e.revision) for e in store.range("")] == [("a", "2", newer)]


def test_of_two_writers_that_saw_the_same_one_loses(store: Store) -> None:
    _, seen = store.txn({}, [Put("generation", "1")])
    assert store.txn({"generation": seen}, [Put("generation", "2 by A")])[0]
    assert not store.txn({"generation": seen}, [Put("generation", "2 by B")])[0]


def test_a_range_is_ordered_and_bounded_by_its_prefix(store: Store) -> None:
    store.txn({}, [Put("run/2", ""), Put("run/10", ""), Put("rum", ""), Put("run/1", "")])
    assert [e.key for e in store.range("run/")] == ["run/1", "run/10", "run/2"]


def test_a_transaction_that_changes_a_key_twice_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="once"):
        store.txn({}, [Put("a", "1")], ["a"])


def test_deleting_what_is_not_there_changes_nothing(store: Store) -> None:
    before = store.revision
    assert store.txn({}, (), ["nothing"]) == (True, before)


def test_keys_vanish_with_their_lease(store: Store, clock: Clock) -> None:
    lease = store.lease(2.0)
    store.txn({}, [Put("node/0", "here", lease), Put("node/1", "for ever")])
    clock.advance(1.3)
    assert store.keep_alive(lease)
    clock.advance(1.3)
    assert store.get("node/0") is not None
    watch = store.watch("node/", store.revision + 1)
    clock.advance(0.7 + SLACK_S)
    assert store.get("node/0") is None
    assert store.get("node/1") is not None
    assert [c.key for c in polled(watch, 1)] == ["node/0"]
    assert not store.keep_alive(lease)
    with pytest.raises(ValueError, match="lease"):
        store.txn({}, [Put("node/0", "again", lease)])


def test_revoking_a_lease_takes_its_keys_at_once(store: Store) -> None:
    lease = store.lease(100.0)
    store.txn({}, [Put("a", "", lease), Put("b", "", lease)])
    before = store.revision
    store.revoke(lease)
    assert store.range("") == [] and store.revision == before + 1
    store.revoke(lease)


def test_a_key_written_without_the_lease_outlives_it(store: Store, clock: Clock) -> None:
    lease = store.lease(1.0)
    store.txn({}, [Put("a", "leased", lease)])
    store.txn({}, [Put("a", "kept")])
    clock.advance(1.0 + SLACK_S)
    assert not store.keep_alive(lease)
    assert store.get("a") is not None


def test_a_watch_sees_the_past_from_its_revision_and_everything_after(store: Store) -> None:
    _, first = store.txn({}, [Put("a", "1")])
    _, second = store.txn({}, [Put("a", "2"), Put("other", "x")])
    watch = store.watch("a", second)
    assert [(c.revision, c.entry and c.entry.value) for c in polled(watch, 1)] == [(second, "2")]
    assert watch.poll() == []
    _, third = store.txn({}, (), ["a"])
    assert polled(watch, 1) == [Change(third, "a", None)]
    earlier = store.watch("", first)
    changes = polled(earlier, 4)
    assert [c.revision for c in changes] == [first, second, second, third]
    assert sorted(c.key for c in changes) == ["a", "a", "a", "other"]
    watch.close()
    store.txn({}, [Put("a", "3")])
    assert watch.poll() == []


def test_a_watch_that_begins_before_what_is_kept_says_so(store: Store) -> None:
    for number in range(6):
        _, revision = store.txn({}, [Put("a", str(number))])
    assert isinstance(store, EmbeddedStore | EtcdStore)
    store.compact(revision - 1)
    with pytest.raises(Compacted) as caught:
        polled(store.watch("a", revision - 3), 1)
    assert revision - 1 <= caught.value.oldest <= revision
    assert [c.revision for c in polled(store.watch("a", revision), 1)] == [revision]


def test_a_watch_on_compacted_history_says_so() -> None:
    store = EmbeddedStore(Clock(real=False), history_max=3)
    for number in range(6):
        store.txn({}, [Put("a", str(number))])
    with pytest.raises(Compacted) as caught:
        store.watch("a", 1)
    assert caught.value.oldest == 4
    assert len(store.watch("a", 4).poll()) == 3
    assert store.watch("a", store.revision + 1).poll() == []


def test_an_open_watch_that_is_overtaken_by_compaction_says_so() -> None:
    store = EmbeddedStore(Clock(real=False), history_max=3)
    watch = store.watch("a", 1)
    for number in range(6):
        store.txn({}, [Put("a", str(number))])
    with pytest.raises(Compacted):
        watch.poll()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "delete", "poll"])), max_size=40))
def test_replaying_a_watch_gives_the_store(actions: list[tuple[str, str]]) -> None:
    store = EmbeddedStore(Clock(real=False))
    watch = store.watch("", 1)
    mirror: dict[str, str] = {}

    def follow() -> None:
        for change in watch.poll():
            if change.entry is None:
                del mirror[change.key]
            else:
                mirror[change.key] = change.entry.value

    for number, (key, action) in enumerate(actions):
        if action == "put":
            store.txn({}, [Put(key, str(number))])
        elif action == "delete":
            store.txn({}, (), [key])
        else:
            follow()
    follow()
    assert mirror == {e.key: e.value for e in store.range("")}
