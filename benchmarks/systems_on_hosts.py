"""The three systems with each worker on a host of its own, one of which may vanish; else as in `systems`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import (
    HERE,
    RIVALS_VENV,
    ROOT,
    BenchmarkError,
    JsonLines,
    child,
    elastic_harness_argv,
    environment,
    tail,
)
from benchmarks.hosts import Network
from benchmarks.systems import (
    free_port,
    rival_environment,
    torchft_settings,
    torchrun_settings,
)
from elastic_harness.agent.decisions import store_view
from elastic_harness.membership.node import NODES
from elastic_harness.membership.store import Watch

RUN_ID = "node-loss"
LEAST = 2
EMULATED = HERE / "emulated.yaml"
QUICK_ETCD = {"ETCD_HEARTBEAT_INTERVAL": "50", "ETCD_ELECTION_TIMEOUT": "500"}


@dataclass(frozen=True)
class Work:
    """What is trained: emulated.py, each slot of which waits so long."""

    slot_s: float
    overrides: tuple[str, ...] = ()


class OnHosts:
    """A system on all hosts of a network, seen through what each host commits. `commits` has what those that have not
    vanished tell, and what the vanished ones told before."""

    name = "system"

    def __init__(self, folder: Path, network: Network, work: Work) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.network, self.work = folder, network, work
        self.workers = len(network.hosts)
        self.settings: dict[str, Any] = {}
        self.commits: list[dict[str, Any]] = []
        self.logs = [JsonLines(self.commits_path(index)) for index in range(self.workers)]
        self.lost: set[int] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        raise NotImplementedError

    def commits_path(self, index: int) -> Path:
        return self.folder / f"commits-{index}.jsonl"

    def spared(self) -> set[int]:
        """The hosts without which the system cannot go on."""
        return set()

    def poll(self) -> None:
        for index, log in enumerate(self.logs):
            if index not in self.lost:
                self.commits += log.poll()

    def lose(self, index: int) -> None:
        """The host vanishes; what it might still write is not read."""
        self.poll()
        self.lost.add(index)
        self.network.hosts[index].kill_all()

    def healthy(self) -> None:
        for index, process in self._processes.items():
            if index not in self.lost and process.poll() is not None:
                said = tail(self._log(index))
                raise BenchmarkError(f"{self.name} on host {index} ended with {process.returncode}:\n{said}")

    def stop(self) -> None:
        """All but what runs on the hosts, which ends with their network."""
        self._stack.close()

    def _environment(self, index: int) -> dict[str, str]:
        """Of a rival's workers on a host."""
        env = rival_environment(self.folder, self.commits_path(index), EMULATED, self.work.overrides)
        return env | {"BENCH_SLOT_S": str(self.work.slot_s), "GLOO_SOCKET_IFNAME": "eth0"}

    def _log(self, index: int) -> Path:
        return self.folder / f"host-{index}.log"

    def _run(self, index: int, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        with self._log(index).open("ab") as sink:
            self._processes[index] = self.network.hosts[index].popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(env), cwd=ROOT
            )


class Ours(OnHosts):
    """`elastic-harness launch` on each host, with an etcd on this machine. `quick`: what is the least that the launch
    takes, and an etcd to match."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        work: Work,
        *,
        name: str = "ours",
        quick: bool = False,
        max_workers: int | None = None,
    ) -> None:
        super().__init__(folder, network, work)
        self.name = name
        self.workers = max_workers or self.workers
        self._etcd = QUICK_ETCD if quick else {}
        arguments = ["launch", "--nnodes", f"{LEAST}:{len(network.hosts)}", "--nproc-per-node", "1", "--run-id", RUN_ID]
        arguments += ["--node-timeout", "2"] if quick else []
        arguments += ["--max-workers", str(max_workers)] if max_workers else []
        slots = ["--slot-s", str(work.slot_s), *work.overrides]
        self.settings = {
            "arguments": arguments,
            "program": ["emulated.py", "--config", EMULATED.name, *slots],
            "etcd": self._etcd or "its defaults",
        }
        self._command = [str(HERE / "emulated.py"), "--config", str(EMULATED), *slots]
        self._watch: Watch | None = None
        self.url = ""
        self.gone_at: dict[int, float] = {}  # when etcd said that the host's lease had ended

    def commits_path(self, index: int) -> Path:
        return self._run_dir(index) / "events.jsonl"

    def start(self) -> None:
        self._start_etcd()
        for index, host in enumerate(self.network.hosts):
            where = ["--store", self.url, "--host", host.address, "--node-name", f"host{index}"]
            where += ["--run-dir", str(self._run_dir(index))]
            command = [*elastic_harness_argv(), *self.settings["arguments"], *where, *self._command]
            self._run(index, command, environment())

    def _start_etcd(self) -> None:
        port, folder = free_port(), str(self.folder / "etcd")
        etcd = [*elastic_harness_argv(), "etcd"]
        run, env = subprocess.run, environment(**self._etcd)
        self._stack.callback(run, [*etcd, "stop", "--dir", folder], env=env, capture_output=True)
        start = [*etcd, "start", "--dir", folder, "--port", str(port), "--listen", self.network.machine.address]
        run(start, env=env, check=True, capture_output=True)
        self.url = f"etcd://{self.network.machine.address}:{port}"
        store = store_view.store_of(self.url, RUN_ID)
        self._watch = store.watch(NODES, store.revision + 1)
        self._stack.callback(self._watch.close)

    def poll(self) -> None:
        for index, log in enumerate(self.logs):
            if index not in self.lost:
                self.commits += [row for row in log.poll() if row["event"] == "step_committed"]
        for change in self._watch.poll() if self._watch is not None else ():
            if change.entry is None:
                self.gone_at.setdefault(_index_of(change.key.removeprefix(NODES)), time.time())

    def status(self) -> dict[str, Any]:
        return store_view.status(self.url, RUN_ID)

    def leader(self) -> int | None:
        """The host whose node leads."""
        name = self.status()["leader"]
        return _index_of(name) if name else None

    def between(self, event: str, t_low: float, t_high: float) -> list[dict[str, Any]]:
        """What the hosts that are left tell of in a stretch of time, in its order."""
        rows = [row for index, log in enumerate(self.logs) if index not in self.lost for row in log.rows]
        return sorted((r for r in rows if r["event"] == event and t_low < r["t"] <= t_high), key=lambda r: r["t"])

    def kill_worker(self, index: int) -> None:
        """Kill the worker of a host alone, by its process id."""
        self.poll()
        (pid,) = [row["pid"] for row in self.logs[index].rows if row["event"] == "worker_started"][-1:]
        os.kill(pid, signal.SIGKILL)

    def _run_dir(self, index: int) -> Path:
        return self.folder / f"run-{index}"


class Torchft(OnHosts):
    """One replica on each host; the lighthouse is on this machine, where nothing is lost."""

    name = "torchft"

    def __init__(self, folder: Path, network: Network, work: Work) -> None:
        super().__init__(folder, network, work)
        self.settings = torchft_settings(LEAST)

    def start(self) -> None:
        port = free_port()
        lighthouse = [str(RIVALS_VENV / "bin" / "torchft_lighthouse"), "--bind", f"[::]:{port}"]
        self._stack.enter_context(child([*lighthouse, *self.settings["lighthouse"]], self.folder / "lighthouse.log"))
        for index, host in enumerate(self.network.hosts):
            env = self._environment(index) | {
                "TORCHFT_LIGHTHOUSE": f"http://{self.network.machine.address}:{port}",
                "BENCH_TORCHFT": json.dumps(self.settings),
                "BENCH_WORKER": str(index),
                "BENCH_HOST": host.address,
            }
            self._run(index, [RIVALS_VENV / "bin" / "python", "-m", "benchmarks.rivals.torchft_worker"], env)


class Torchrun(OnHosts):
    """One agent on each host with the c10d rendezvous, which lives on the first one."""

    name = "torchrun"

    def __init__(self, folder: Path, network: Network, work: Work) -> None:
        super().__init__(folder, network, work)
        self.settings = torchrun_settings("--nnodes", f"{LEAST}:{self.workers}", "--nproc-per-node", "1")
        self.settings["rdzv_conf"] = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        self.settings["gloo_timeout_s"] = 1

    def spared(self) -> set[int]:
        return {0}

    def start(self) -> None:
        endpoint = f"{self.network.hosts[0].address}:29400"
        for index, host in enumerate(self.network.hosts):
            env = (
                self._environment(index) | self.settings["environment"] | {"BENCH_TORCHRUN": json.dumps(self.settings)}
            )
            command = [str(RIVALS_VENV / "bin" / "torchrun"), *self.settings["arguments"]]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", RUN_ID]
            command += ["--rdzv-conf", f"{self.settings['rdzv_conf']},is_host={int(index == 0)}"]
            command += ["--local-addr", host.address, "--log-dir", str(self.folder / f"logs-{index}")]
            self._run(index, [*command, "-m", "benchmarks.rivals.torchrun_worker"], env)


def _index_of(node: str) -> int:
    """host2-1f00ab.0 → 2"""
    return int(node.partition("-")[0].removeprefix("host"))
