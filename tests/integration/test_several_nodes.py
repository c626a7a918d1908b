"""Jobs on three hosts with a real etcd: whatever becomes of a host or its network, the weights are those of a run that
was never disturbed, and every sample is in the ledgers once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.hosts import Network

from elastic_harness.agent.decisions import store_view
from elastic_harness.errors import InfrastructureError
from elastic_harness.etcd.gateway import Gateway, encode
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership import node
from elastic_harness.membership.store import Put
from elastic_harness.membership.types import node_of
from etcd_servers import Cluster, certificates, want_password
from integration.launch_tools import SOURCE
from integration.several import RUN, Hosts
from integration.slow_link import SlowLink

pytestmark = pytest.mark.slow
STEPS = 14
PLACES = [
    "exchange.header_sent",
    *(pytest.param(p, marks=pytest.mark.soak) for p in ("slot.forward", "recovery.reported")),
]
Weights = Callable[[int], str]


@pytest.fixture
def hosts(tmp_path: Path, network: Network) -> Iterator[Hosts]:
    with (
        Cluster(tmp_path, host=network.machine.address) as cluster,
        Hosts(tmp_path, network, cluster, steps=STEPS) as job,
    ):
        yield job


def test_a_host_vanishes_and_comes_back(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.anew = True
    hosts.begin(3)
    hosts.advance(2)
    victim = (hosts.leader() + 1) % 3
    host = hosts.network.hosts[victim]
    host.kill_all()
    gone_at = time.monotonic()
    hosts.advance(2)
    assert time.monotonic() - gone_at < 10
    host.heal()
    hosts.launch(victim)
    hosts.fill(3)
    hosts.finish(undisturbed(STEPS), 0, 1, 2)
    known = hosts.jobs[(victim + 1) % 3].causes()  # all that another node knows; it may have missed answers
    assert known in (["EH-L107"], ["EH-L102 → EH-L107"])
    assert hosts.jobs[victim].causes()[-1] == "EH-W111", "its launcher may have heard SIGTERM before"


def test_the_leader_vanishes_and_another_host_leaves(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(3, nodes="1:3")
    victim = hosts.leader()
    hosts.network.hosts[victim].kill_all()
    hosts.advance(2)
    staying, leaving = (number for number in range(3) if number != victim)
    hosts.jobs[leaving].send(signal.SIGTERM)
    hosts.fill(1)
    hosts.until_ended(leaving, code=143)
    number, *_ = [e for e in hosts.jobs[staying].events("generation") if len(e["members"]) == 1][-1:]
    assert not number["urgent"], "the others were disturbed by a host that left"
    hosts.finish(undisturbed(STEPS), staying)


def test_a_fresh_host_alone_waits_for_those_with_checkpoints(hosts: Hosts, undisturbed: Weights) -> None:
    """It began at step 0, and the checkpoints of hosts that had only rebooted were worth nothing any more."""
    often = ("checkpoint.checkpoint_interval=2",)
    for number in range(2):
        hosts.launch(number, nodes="1:3", settings=often)
    hosts.fill(2)
    hosts.advance(4)
    hosts.until(lambda: all(job.events("checkpoint_saved") for job in hosts.jobs.values()), "a checkpoint on each host")
    for number in range(2):
        hosts.network.hosts[number].kill_all()
    hosts.launch(2, nodes="1:3", settings=often)
    hosts.until(lambda: "has a checkpoint of this run" in hosts.status().get("waiting", ""), "the wait for others")
    assert hosts.jobs[2].committed() == 0
    for number in range(2):
        hosts.network.hosts[number].heal()
        hosts.launch(number, nodes="1:3", settings=often)
    hosts.fill(3)
    assert hosts.status()["lineage"] == 1
    restored = [e["version"] for e in hosts.jobs[2].events("recovery") if e.get("version")]
    assert restored and restored[0] >= 2
    hosts.finish(undisturbed(STEPS), 0, 1, 2)


@pytest.mark.soak
def test_all_hosts_leave_at_once_and_go_on_later(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(2)
    hosts.advance(2)
    for number in range(2):
        hosts.jobs[number].send(signal.SIGTERM)
    hosts.until_stopped(0, 1)
    step = hosts.committed()
    assert not hosts.status()["nodes"]
    hosts.begin(2)
    hosts.until(lambda: hosts.jobs[0].events("recovery")[-1]["version"] >= step, "the restored state")
    assert hosts.status()["lineage"] == 1
    hosts.finish(undisturbed(STEPS), 0, 1)


def test_one_command_stops_all_hosts(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(3)
    asked = hosts.do(1, "stop", hosts.jobs[1].run_dir, "--timeout", 0)
    assert "still ending" in asked.stderr
    hosts.until_stopped(0, 1, 2)
    for number in range(3):
        hosts.launch(number)
    hosts.finish(undisturbed(STEPS), 0, 1, 2)
    late = hosts.launch(0)  # a node that comes when all is over does not begin again
    hosts.until_ended(0, code=0)
    assert "finished" in late.shown()


def test_a_host_that_is_cut_off_pauses_and_comes_back(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(3)
    hosts.advance(1)
    victim = (hosts.leader() + 1) % 3
    before = hosts.jobs[victim].committed()
    hosts.network.hosts[victim].cut()
    hosts.advance(3)
    assert hosts.jobs[victim].committed() <= before + 1, "the minority trained on"
    assert hosts.jobs[victim].alive
    hosts.network.hosts[victim].heal()  # it is tried again within a minute
    hosts.until(lambda: hosts.ready() == 3, "it to be ready")
    hosts.finish(undisturbed(STEPS), *(number for number in range(3) if number != victim))
    hosts.until_ended(victim, code=0)


def test_two_hosts_that_do_not_reach_each_other_do_not_block_the_job(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(3)
    a, b, _ = hosts.network.hosts
    a.cut(to=b)
    b.cut(to=a)
    cut_at = time.monotonic()
    hosts.advance(3)
    assert time.monotonic() - cut_at < 25
    assert "cannot reach node n" in hosts.jobs[0].shown() + hosts.jobs[1].shown()
    trains = {int(node_of(member).partition("-")[0][1:]) for member in hosts.status()["members"]}
    assert trains in ({0, 2}, {1, 2})
    hosts.finish(undisturbed(STEPS), *trains)
    hosts.until_ended(*{0, 1} - trains, code=0)


@pytest.mark.soak
def test_a_host_that_loses_the_store_alone_is_let_go(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(3)
    victim = hosts.leader()
    hosts.network.hosts[victim].cut(to=hosts.network.machine)
    others = [number for number in range(3) if number != victim]
    hosts.until(lambda: len(hosts.jobs[others[0]].events("generation")[-1]["members"]) == 2, "the others to go on")
    hosts.advance(2)
    hosts.until(lambda: "the store cannot be used" in hosts.jobs[victim].shown(), "word of it")
    hosts.network.hosts[victim].heal()
    hosts.fill(3)
    hosts.finish(undisturbed(STEPS), 0, 1, 2)


def test_the_store_is_away_returns_and_loses_everything(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(2)
    hosts.advance(1)  # all are connected
    (member,) = hosts.cluster.members
    member.stop()
    hosts.advance(2)  # training goes on
    hosts.until(lambda: "the store cannot be used" in hosts.jobs[0].shown(), "word of it")
    killed = hosts.jobs[1].events("worker_started")[-1]
    os.kill(killed["pid"], signal.SIGKILL)
    hosts.until(lambda: hosts.jobs[1].events("failure_detected"), "the loss to be noticed")
    member.start()
    hosts.until(lambda: "the store is back" in hosts.jobs[0].shown(), "the store")
    hosts.fill(2)
    member.stop()
    hosts.cluster.lose_data()
    member.start()
    hosts.cluster.wait()
    hosts.fill(2)
    assert hosts.status()["lineage"] == 0, "the state was lost with the store"
    hosts.finish(undisturbed(STEPS), 0, 1)


def test_values_that_somebody_overwrites_are_written_anew(hosts: Hosts, undisturbed: Weights) -> None:
    """All of them at once, and hanging on no lease; then the leader vanishes, and another one reads what is there."""
    hosts.begin(2, nodes="1:2")
    store = store_view.store_of(hosts.store, RUN)
    values = [e.key for e in store.range(node.EVERYTHING) if e.key != node.FENCE]
    store.txn({}, [Put(key, '["damaged"]') for key in values])
    hosts.advance(2)
    damaged = lambda: [e.key for e in store.range(node.EVERYTHING) if e.value == '["damaged"]']  # noqa: E731
    hosts.until(lambda: set(damaged()) <= {node.VALUES}, "the other values to be written anew")
    hosts.advance(2)  # addresses come with the next generation, for which members have to be between two steps
    hosts.until(lambda: not damaged(), "the addresses to be written anew")
    said = {e["key"] for job in hosts.jobs.values() for e in job.events("store_damaged")}
    assert node.DECISION in said and said <= set(values), said
    assert all(len(e["members"]) == 2 for job in hosts.jobs.values() for e in job.events("generation")[-1:])
    victim = hosts.leader()
    hosts.network.hosts[victim].kill_all()
    hosts.advance(2)
    hosts.finish(undisturbed(STEPS), 1 - victim)


@pytest.mark.soak
def test_too_few_nodes_wait_alive(hosts: Hosts, undisturbed: Weights) -> None:
    hosts.begin(2)
    hosts.advance(1)  # a group that is killed before it has formed has no state to keep
    hosts.network.hosts[1].kill_all()
    waiting = "waiting: workers of 1 of at least 2 nodes are ready"
    hosts.until(lambda: hosts.status().get("waiting") == waiting, "node 0 to wait")
    hosts.network.hosts[1].heal()
    hosts.launch(1)
    hosts.fill(2)
    assert hosts.status()["lineage"] == 0, "the state of the one that waited was lost"
    hosts.finish(undisturbed(STEPS), 0, 1)


@pytest.mark.soak
def test_nodes_that_differ_are_turned_away(hosts: Hosts, tmp_path: Path, undisturbed: Weights) -> None:
    hosts.launch(0, nodes="1:3")
    hosts.fill(1)
    hosts.advance(1)
    hosts.launch(1, nodes="1:3", settings=("seed=7",))
    hosts.until_ended(1, code=2)
    assert "does not fit the run" in hosts.jobs[1].shown() and "seed is 7 on this node" in hosts.jobs[1].shown()
    source = shutil.copytree(SOURCE, tmp_path / "old")
    init = source / "elastic_harness" / "__init__.py"
    init.write_text(re.sub(r'__version__ = "[^"]*"', '__version__ = "0.0.1"', init.read_text()))
    old = hosts.launch(2, nodes="1:3", source=source)
    hosts.until_ended(2, code=2)
    assert "0.0.1" in old.shown()
    hosts.forget(1)
    hosts.forget(2)
    hosts.finish(undisturbed(STEPS), 0)


@pytest.mark.parametrize("place", PLACES)
def test_workers_die_at_any_place(hosts: Hosts, undisturbed: Weights, place: str) -> None:
    hosts.begin(2, nproc=2)
    hosts.advance(1)
    hosts.order(1, place)
    hosts.order(2, "exchange.partial_sent")
    hosts.advance(2)
    hosts.fill(4)
    hosts.finish(undisturbed(STEPS), 0, 1)


def test_an_agent_is_killed_and_a_member_of_etcd_with_it(
    tmp_path: Path, network: Network, undisturbed: Weights
) -> None:
    with (
        Cluster(tmp_path, members=3, host=network.machine.address) as cluster,
        Hosts(tmp_path, network, cluster, steps=STEPS) as hosts,
    ):
        hosts.begin(3)
        os.kill(hosts.jobs[hosts.leader()].record()["agent_pid"], signal.SIGKILL)
        cluster.members[0].stop()
        hosts.advance(1)
        hosts.fill(3)
        cluster.members[1].send(signal.SIGSTOP)
        cluster.members[0].start()
        hosts.advance(1)
        cluster.members[1].send(signal.SIGCONT)
        hosts.finish(undisturbed(STEPS), 0, 1, 2)


@pytest.mark.soak
def test_a_store_with_certificates_and_a_password(tmp_path: Path, network: Network, undisturbed: Weights) -> None:
    """Neither the password nor what is in the key is in a log, in the folders or in the list of processes."""
    options, query = certificates(tmp_path, network.machine.address)
    (tmp_path / "secret").write_text("xyzzy-plugh")
    with (
        Cluster(tmp_path, options=options, host=network.machine.address, query=query) as cluster,
        Hosts(tmp_path, network, cluster, steps=STEPS) as hosts,
    ):
        want_password(cluster, "xyzzy-plugh")
        hosts.store += f"&user=root&password_file={tmp_path}/secret"
        hosts.anew = True  # as the list of processes shows it
        hosts.begin(2)
        os.kill(hosts.jobs[1].events("worker_started")[-1]["pid"], signal.SIGKILL)
        hosts.advance(2)
        hosts.fill(2)
        shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert f"{tmp_path}/secret" in shown
        hosts.finish(undisturbed(STEPS), 0, 1)
        kept = [path for number in range(2) for path in (tmp_path / f"run@n{number}").rglob("*") if path.is_file()]
        assert "xyzzy" not in shown + "".join(path.read_text(errors="ignore") for path in kept) + hosts.shown()


@pytest.mark.soak
def test_a_slow_network_that_loses_packets(hosts: Hosts, undisturbed: Weights) -> None:
    """100 ms one way, 200 ms there and back, and 2 % of packets lost: between the hosts, and to the store."""
    with SlowLink(hosts.network, 0.1, 0.02):
        hosts.begin(3)
        hosts.order(1, "slot.forward")
        hosts.advance(2)
        hosts.fill(3)
        hosts.finish(undisturbed(STEPS), 0, 1, 2)


@pytest.mark.soak
def test_a_store_that_is_full_stops_nobody(tmp_path: Path, network: Network, undisturbed: Weights) -> None:
    quota = ["--quota-backend-bytes", str(1 << 20)]
    with (
        Cluster(tmp_path, options=quota, host=network.machine.address) as cluster,
        Hosts(tmp_path, network, cluster, steps=STEPS) as hosts,
    ):
        hosts.begin(2)
        gateway = Gateway(cluster.address)
        store = EtcdStore(gateway)
        with pytest.raises(InfrastructureError, match="no space left"):
            for number in range(1000):
                store.txn({}, [Put(f"junk/{number}", "x" * 100_000)])
        os.kill(hosts.jobs[1].events("worker_started")[-1]["pid"], signal.SIGKILL)
        hosts.until(lambda: "no space left" in hosts.jobs[1].shown(), "word of it")
        assert hosts.jobs[0].alive and hosts.jobs[1].alive
        gateway.call("kv/deleterange", {"key": encode("junk/"), "range_end": encode("junk0")})
        store.compact(store.revision)
        gateway.call("maintenance/defragment", {})
        for alarm in gateway.call("maintenance/alarm", {"action": "GET"})["alarms"]:
            gateway.call("maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        hosts.until(lambda: "the store is back" in hosts.jobs[1].shown(), "the store")
        hosts.fill(2)
        hosts.finish(undisturbed(STEPS), 0, 1)
