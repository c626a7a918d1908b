"""torchrun's own agents and plain scripts, with our rendezvous on a real etcd."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.torchrun import EtcdTensorStore
from etcd_servers import VERSIONS, Cluster
from integration.launch_tools import environment
from integration.preloaded import preloaded
from integration.script_tools import SCRIPTS

pytestmark = pytest.mark.slow
PATIENCE_S = 90.0


class Node:
    """One torchrun, with all that it starts."""

    def __init__(self, cluster: Cluster, log: Path, *, nodes: str, steps: int, step_s: float) -> None:
        hosts = ",".join(e.removeprefix("http://") for e in cluster.endpoints)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "etcd-v3", "--rdzv-endpoint", hosts, "--rdzv-id", "job", "--max-restarts", "5"]
        command += ["--rdzv-conf", "keep_alive_interval=1,last_call_timeout=2", "--local-addr", "127.0.0.1"]
        command += ["--log-dir", str(log.with_suffix(".logs"))]
        command += [str(SCRIPTS / "plain_sum.py"), str(steps), str(step_s)]
        self.log = log
        with log.open("wb") as output:
            self.process = preloaded().popen(command, stdout=output, env=environment(), start_new_session=True)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """As if its power were cut: torchrun and its workers at once."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()


def descendants(pid: int) -> list[int]:
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    return children + [d for c in children for d in descendants(c)]


def until(said: str, node: Node) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while said not in node.output:
        assert node.process.poll() is None and time.monotonic() < give_up_at, node.output[-3000:]
        time.sleep(0.05)


@contextmanager
def running(cluster: Cluster, tmp_path: Path, count: int, **options: object) -> Iterator[list[Node]]:
    nodes: list[Node] = []
    try:
        for number in range(count):
            nodes.append(Node(cluster, tmp_path / f"node{number}.log", **options))  # type: ignore[arg-type]
        yield nodes
    finally:
        for node in nodes:
            node.end()


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_scripts_meet(tmp_path: Path, version: str) -> None:
    with Cluster(tmp_path, version) as cluster, running(cluster, tmp_path, 2, nodes="2", steps=3, step_s=0.0) as nodes:
        for node in nodes:
            assert node.process.wait(PATIENCE_S) == 0, node.output[-3000:]
            assert "finished with 2" in node.output


def test_the_loss_of_any_node_leaves_the_others_training(tmp_path: Path) -> None:
    """The first one to come is the first to be lost; one etcd member is lost as well, and comes back."""
    with Cluster(tmp_path, members=3) as cluster:
        with running(cluster, tmp_path, 3, nodes="1:3", steps=100, step_s=0.1) as nodes:
            for node in nodes:
                give_up_at = time.monotonic() + PATIENCE_S
                while "world 3" not in "".join(n.output for n in nodes):
                    assert time.monotonic() < give_up_at, node.output[-3000:]
                    time.sleep(0.05)
            rank_0 = next(node for node in nodes if "step" in node.output)
            cluster.members[0].stop()
            rank_0.kill()
            rest = [node for node in nodes if node is not rank_0]
            cluster.members[0].start()
            for node in rest:
                assert node.process.wait(PATIENCE_S) == 0, node.output[-3000:]
                assert "finished with 2" in node.output


# ---- the store that torch's agents share, beside torch's own


@pytest.fixture(params=["torch's own", "etcd"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dist.Store, dist.Store]]:
    """Two clients of one store, as C++ uses them."""
    if request.param == "etcd":
        with Cluster(tmp_path) as cluster:
            first, second = (EtcdTensorStore(Gateway(cluster.address), "test/") for _ in range(2))
            yield dist.PrefixStore("p", first), dist.PrefixStore("p", second)
    else:
        first = dist.TCPStore("127.0.0.1", 0, is_master=True)
        second = dist.TCPStore("127.0.0.1", first.port, is_master=False)
        yield dist.PrefixStore("p", first), dist.PrefixStore("p", second)


def test_the_store_does_what_torch_s_own_does(stores: tuple[dist.Store, dist.Store]) -> None:
    first, second = stores
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert first.check(["a"]) and not first.check(["a", "b"])
    later = threading.Timer(0.3, lambda: second.set("b", "x"))
    later.start()
    assert first.get("b") == b"x"
    later.join()
    first.wait(["a", "b"])
    first.wait(["a", "b"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError):
        first.wait(["c"], timedelta(seconds=0.2))
    assert first.compare_set("d", "", "1") == b"1"
    assert second.compare_set("d", "2", "3") == b"1"
    assert second.compare_set("d", "1", "4") == b"4" and first.get("d") == b"4"
    before = first.num_keys()
    assert first.delete_key("d") and not second.delete_key("d")
    assert first.num_keys() == before - 1
    counted = [threading.Thread(target=lambda s=store: [s.add("n", 1) for _ in range(20)]) for store in stores]
    for thread in counted:
        thread.start()
    for thread in counted:
        thread.join()
    assert first.add("n", 0) == 40 and second.add("n", 2) == 42 and first.get("n") == b"42"
