"""A random storm against a job on three hosts with a real etcd: hosts vanish, are cut off or lose sight of one another
or of the store, nodes leave and come, agents and workers die, the store goes away. For SOAK_MINUTES (default 2); the
seed is printed, and SOAK_SEED repeats the choices (not their timing)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.hosts import Network

from elastic_harness import failpoints
from etcd_servers import Cluster
from integration.harness import FOREVER
from integration.several import Hosts

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0), pytest.mark.usefixtures("namespaces")]
STEPS = 40
PLACES = [p for p in failpoints.PLACES if p.startswith(("slot.", "lane.", "exchange.", "apply.", "recovery."))]


def test_storm_of_hosts(tmp_path: Path, undisturbed: Callable[[int], str], capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or time.time_ns() % 2**31)
    rng = random.Random(seed)
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES") or 2)
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        folder = tmp_path / str(rounds)
        folder.mkdir()
        with (
            Network(3) as network,
            Cluster(folder, host=network.machine.address) as cluster,
            Hosts(folder, network, cluster, steps=STEPS) as hosts,
        ):
            storm = Storm(hosts, rng)
            try:
                storm.rage()
                storm.end(undisturbed(STEPS))
            finally:
                with capsys.disabled():
                    print(f"\nstorm of hosts: SOAK_SEED={seed}, round {rounds}: {', '.join(storm.done)}")
        rounds += 1


class Storm:
    """One job. At least one node is always undisturbed, as far as its own host and network go."""

    def __init__(self, hosts: Hosts, rng: random.Random) -> None:
        self.hosts, self.rng = hosts, rng
        self.nproc = rng.randint(1, 2)
        self.disturbed: set[int] = set()
        self.leaving: set[int] = set()
        self.done: list[str] = []

    def rage(self) -> None:
        self.hosts.begin(3, nodes="1:3", nproc=self.nproc)
        while self.hosts.limit < STEPS - 10:
            for _ in range(self.rng.randint(1, 2)):
                event = self.rng.choice(
                    [self.vanish, self.cut, self.part, self.blind, self.leave, self.agent, self.worker, self.store]
                    + [self.place] * 2 + [self.mend] * 3
                )  # fmt: skip
                event()
            self.hosts.advance(self.rng.randint(1, 3))

    def end(self, expected: str) -> None:
        for number in sorted(self.disturbed):
            self._mend(number)
        self.hosts.allow(FOREVER)
        self.hosts.until_ended(0, 1, 2, code=0)
        ends = [job.events("run_finished")[-1] for job in self.hosts.jobs.values()]
        weights = {end["weights_sha256"] for end in ends if end["version"] == STEPS}
        assert weights == {expected}, f"{ends}\n{self.hosts.shown()}"  # some may have come back too late
        self.hosts.check_ledgers()

    def say(self, *words: object) -> None:
        self.done.append(" ".join(map(str, words)))

    def victim(self) -> int | None:
        """A node for something to happen to; None if the last one that is well would be it."""
        well = [number for number in range(3) if number not in self.disturbed]
        if len(well) < 2:
            return None
        self.disturbed.add(number := self.rng.choice(well))
        return number

    def vanish(self) -> None:
        if (number := self.victim()) is not None:
            self.say("vanish", number)
            self.hosts.network.hosts[number].kill_all()

    def cut(self) -> None:
        if (number := self.victim()) is not None:
            self.say("cut", number)
            self.hosts.network.hosts[number].cut()

    def part(self) -> None:
        """Two hosts lose sight of each other, one of them perhaps of the other only."""
        if (number := self.victim()) is not None:
            other = self.rng.choice([n for n in range(3) if n != number])
            self.say("part", number, other)
            a, b = self.hosts.network.hosts[number], self.hosts.network.hosts[other]
            a.cut(to=b)
            if self.rng.random() < 0.5:
                b.cut(to=a)
                self.disturbed.add(other)

    def blind(self) -> None:
        if (number := self.victim()) is not None:
            self.say("blind", number)
            self.hosts.network.hosts[number].cut(to=self.hosts.network.machine)

    def leave(self) -> None:
        if (number := self.victim()) is not None:
            self.say("leave", number)
            self.leaving.add(number)
            self.hosts.jobs[number].send(signal.SIGTERM)

    def agent(self) -> None:
        number = self.rng.randrange(3)
        self.say("agent", number)
        if self.hosts.jobs[number].alive:
            self._signal(self.hosts.jobs[number].record()["agent_pid"], signal.SIGKILL)

    def worker(self) -> None:
        number = self.rng.randrange(3)
        self.say("worker", number)
        started = self.hosts.jobs[number].events("worker_started")
        if self.hosts.jobs[number].alive and started:
            self._signal(started[-1]["pid"], self.rng.choice([signal.SIGKILL, signal.SIGSTOP]))

    def place(self) -> None:
        place, rank = self.rng.choice(PLACES), self.rng.randrange(3 * self.nproc)
        self.say(place, rank)
        self.hosts.order(rank, place)

    def store(self) -> None:
        seconds = self.rng.choice([0.1, 2.0, 8.0])
        self.say("store", seconds)
        (member,) = self.hosts.cluster.members
        member.stop()
        self.hosts.allow(self.rng.randint(0, 2))
        time.sleep(seconds)
        member.start()

    def mend(self) -> None:
        if self.disturbed:
            self._mend(self.rng.choice(sorted(self.disturbed)))

    def _mend(self, number: int) -> None:
        self.say("mend", number)
        self.hosts.network.hosts[number].heal()
        self.disturbed.discard(number)
        if number in self.leaving:
            self.leaving.discard(number)
            self.hosts.allow()
            self.hosts.until(lambda: not self.hosts.jobs[number].alive, f"node {number} to leave")
        if not self.hosts.jobs[number].alive:
            self.hosts.launch(number, nodes="1:3", nproc=self.nproc)

    def _signal(self, pid: int | None, number: int) -> None:
        """None: there is no agent just now."""
        try:
            if pid is not None:
                os.kill(pid, number)
        except ProcessLookupError:
            self.say("(gone)")
