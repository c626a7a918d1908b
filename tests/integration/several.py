"""One job on several hosts, which are network namespaces here, with a real etcd on a machine of its own.

    hosts.launch(0); hosts.launch(1); …; hosts.advance(3); hosts.network.hosts[1].kill_all(); …; hosts.finish(0, 2)

As in `harness.py`, the job does only the steps that it was allowed to do, and ends on the weights of the undisturbed
run; the ledgers of all nodes together have every sample once.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, Network

from elastic_harness.agent.decisions import store_view
from elastic_harness.errors import HarnessError
from elastic_harness.membership.types import node_of
from elastic_harness.runs.verify import verify
from etcd_servers import Cluster
from integration.harness import FOREVER, TINY, TRAINER
from integration.launch_tools import SOURCE, Job, command, environment
from integration.preloaded import preloaded

PATIENCE_S = 120.0
RUN = "job"


@dataclass(frozen=True)
class Place:
    """This machine in place of a host: what happens to a network cannot be tested there."""

    address: str = "127.0.0.1"
    name: str = ""


@dataclass(frozen=True)
class Loopback:
    """Several nodes on this machine."""

    hosts: Sequence[Place] = (Place(),) * 4


class NodeJob(Job):
    """One node's launch."""

    def __init__(
        self,
        host: Host | Place,
        folder: Path,
        nodes: str,
        options: Sequence[object],
        script: Sequence[object],
        source: Path,
        anew: bool,
        variables: Mapping[str, str],
    ):
        self.host = host
        super().__init__(
            folder,
            *script,
            script=TRAINER,
            options=tuple(options),
            variables={"PYTHONPATH": str(source), **variables},
            popen=host.popen
            if isinstance(host, Host) and (anew or source != SOURCE)
            else partial(preloaded().popen, namespace=host.name),
            where=("--nnodes", nodes, "--run-id", RUN, "--host", host.address),
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def committed(self) -> int:
        """Steps that this node knows to be committed."""
        return max((e["step"] + 1 for e in self.events("step_committed")), default=0)


class Hosts:
    """The hosts of one test. `jobs`: the newest launch on each. `anew`: launchers are new processes, and no forks of
    the `preloaded` one."""

    def __init__(self, folder: Path, network: Network | Loopback, cluster: Cluster, *, steps: int) -> None:
        self.folder, self.network, self.cluster, self.steps = folder, network, cluster, steps
        self.store = cluster.url
        self.anew = False
        self.jobs: dict[int, NodeJob] = {}
        self.limit = 0
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._write("limit", "0")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            job.close()

    def launch(
        self,
        number: int,
        *options: object,
        nodes: str = "2:3",
        nproc: int = 1,
        settings: Any = (),
        source: Path = SOURCE,
        variables: Mapping[str, str] | None = None,
    ) -> NodeJob:
        """Launch a node, perhaps again. `source`: where its package is."""
        if number in self.jobs:
            self.jobs[number].close()
        script = (self.orders, *TINY, f"training.max_steps={self.steps}", *settings)
        given = ("--store", self.store, "--node-name", f"n{number}", "--nproc-per-node", nproc, *options)
        self.jobs[number] = NodeJob(
            self.network.hosts[number],
            self.folder / f"run@n{number}",
            nodes,
            given,
            script,
            source,
            self.anew,
            variables or {},
        )
        return self.jobs[number]

    def begin(self, count: int, *options: object, nodes: str = "2:3", nproc: int = 1) -> None:
        """Launch so many nodes, and wait until all of their workers are members."""
        for number in range(count):
            self.launch(number, *options, nodes=nodes, nproc=nproc)
        self.fill(count * nproc)

    def forget(self, number: int) -> None:
        """A node that had no part in the run."""
        self.jobs.pop(number).close()

    # ---- waiting and steering

    def happens(self, condition: Callable[[], Any], within_s: float) -> Any:
        give_up_at = time.monotonic() + within_s
        while True:
            value = condition()
            if value or time.monotonic() > give_up_at:
                return value
            time.sleep(0.02)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        value = self.happens(condition, PATIENCE_S)
        assert value, f"waited {PATIENCE_S} s for {what}:\n{self.shown()}"
        return value

    def shown(self) -> str:
        return "\n".join(f"---- n{n}\n{job.shown()}" for n, job in sorted(self.jobs.items())) + f"\n{self._status()}"

    def status(self) -> dict[str, Any]:
        """What the store knows; {} if it does not answer."""
        try:
            return store_view.status(self.store, RUN)
        except HarnessError:
            return {}

    def ready(self) -> int:
        """Workers that are, or could be, members."""
        return sum(row["ready"] for row in self.status().get("nodes", {}).values())

    def _status(self) -> str:
        return json.dumps(self.status(), indent=1)

    def committed(self) -> int:
        return max((job.committed() for job in self.jobs.values()), default=0)

    def allow(self, steps: int = 1) -> None:
        """Some more steps may be done."""
        self.limit += steps
        self._write("limit", str(self.limit))

    def advance(self, steps: int = 1) -> None:
        """Do some steps."""
        self.allow(steps)
        self.until(lambda: self.committed() >= min(self.limit, self.steps), f"the commit of step {self.limit - 1}")

    def fill(self, world: int) -> None:
        """Do steps until there are so many members, from all nodes that are up."""
        self.until(lambda: self.ready() >= world, f"{world} ready workers")
        self.until(lambda: self.status().get("generation"), "the first generation")
        while True:
            if self.happens(lambda: self._complete(world), 1.0):  # as far as it needs no step
                return
            assert self.limit < self.steps - 2, f"no steps are left to form a group of {world}\n{self.shown()}"
            self.advance()

    def _complete(self, world: int) -> bool:
        status = self.status()
        there = {node_of(member) for member in status.get("members", ())} <= status.get("nodes", {}).keys()
        return there and bool(status.get("formed")) and len(status["members"]) == world

    def leader(self) -> int:
        """The number of the node that leads."""
        name = self.until(lambda: self.status().get("leader"), "a leader")
        return int(name.partition("-")[0][1:])

    def order(self, rank: int, place: str, action: str = "kill") -> None:
        """Let a rank fail at a place of the next step."""
        fault = {"id": f"f{self.limit}-{rank}-{place}", "rank": rank, "place": place, "hit": 1, "action": action}
        path = self.orders / f"faults-{self.limit}.json"
        planned = json.loads(path.read_text()) if path.exists() else []
        self._write(path.name, json.dumps([*planned, fault]))

    def _write(self, name: str, text: str) -> None:
        temporary = self.orders / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.orders / name)

    def do(self, number: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        """An `elastic-harness` command on a host."""
        return subprocess.run(
            ["ip", "netns", "exec", self.network.hosts[number].name, *command(*arguments)],
            env=environment(), capture_output=True, text=True,
        )  # fmt: skip

    # ---- the end

    def until_ended(self, *numbers: int, code: int) -> None:
        for number in numbers:
            job = self.jobs[number]
            self.until(lambda j=job: not j.alive, f"the end of node {number}")
            assert job.process.returncode == code, self.shown()
            job.check_nothing_left()

    def until_stopped(self, *numbers: int) -> None:
        """Nodes that were asked to stop do so. Let them do a step now and then: who has not heard of it when there is
        no step left waits in its script, until it is ended without a checkpoint."""
        while any(self.jobs[number].alive for number in numbers):
            if self.committed() >= self.limit:
                self.allow()
            assert self.limit < self.steps, f"they do not stop\n{self.shown()}"
            time.sleep(0.5)
        self.until_ended(*numbers, code=143)

    def finish(self, expected: str, *numbers: int) -> None:
        """These nodes finish, with these weights; the ledgers of all have every step once."""
        self.allow(FOREVER)
        self.until_ended(*numbers, code=0)
        for number in numbers:
            job = self.jobs[number]
            end = job.events("run_finished")[-1]
            assert (end["status"], end["version"]) == ("finished", self.steps), self.shown()
            assert end["weights_sha256"] == expected, "these are not the weights of the undisturbed run"
        self.check_ledgers()

    def check_ledgers(self) -> None:
        folders = [job.run_dir for job in self.jobs.values()]
        verdict = verify(*folders)
        assert verdict.ok and verdict.steps == self.steps, f"{verdict}\n{self.shown()}"
