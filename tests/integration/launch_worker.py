"""A worker without torch that speaks the agent's protocol: its "training" is counting, exchanged through the agent.

Behaves as a real worker does at every change of the membership, so that launcher and agent can be tested with real
processes and real signals in seconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time

from elastic_harness.contract import wire
from elastic_harness.contract.board import Phase
from elastic_harness.contract.messages import PROTOCOL


class Changed(Exception):
    """A newer urgent generation, or a pause."""


class Left(Exception):
    """This worker has nothing more to do."""


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.member = os.environ["ELASTIC_HARNESS_MEMBER"]
        self.index = int(os.environ["LOCAL_RANK"])
        self.run_dir = os.environ["ELASTIC_HARNESS_RUN_DIR"]
        self.sock = socket.socket(fileno=int(os.environ["ELASTIC_HARNESS_FD"]))
        self.decoder = wire.Decoder()
        self.inbox: list[dict] = []
        self.board = mmap.mmap(int(os.environ["ELASTIC_HARNESS_BOARD_FD"]), 4096)
        self.beat = 0
        self.version = -1
        self.lineage = 0
        self.generation: dict = {"number": 0, "members": [], "urgent": True}
        self.newest: dict | None = None
        self.paused = False
        self.stop: dict | None = None
        self.done = False
        self.digests: dict[int, dict] = {}
        self.values: dict[tuple[int, str], str] = {}

    # ---- talking

    def send(self, type: str, **fields: object) -> None:
        wire.send(self.sock, {"type": type, **fields})

    def show(self, phase: int, step: int = -1, slot: int = -1, deadline_s: float = 0.0) -> None:
        self.beat += 1
        values = (self.beat, self.generation["number"], phase, step, slot, time.time(), int(deadline_s * 1000))
        struct.pack_into("<QqqqqdQ", self.board, 0, *values)

    def take(self, timeout_s: float | None = None) -> None:
        """Receive one message; urgent changes raise."""
        while not self.inbox:
            if timeout_s is not None and not select.select([self.sock], [], [], timeout_s)[0]:
                return
            data = self.sock.recv(1 << 16)
            if not data:
                os._exit(0)
            self.inbox += map(wire.decode, self.decoder.feed(data))
        message = self.inbox.pop(0)
        match message["type"]:
            case "generation":
                self.newest, self.paused = message, False
            case "pause":
                self.paused = True
            case "digest":
                self.digests[message["generation"]] = message
            case "kv":
                self.values[(message["generation"], message["key"])] = message["value"]
            case "stop":
                self.stop = message
            case "done":
                self.done = True
            case "refuse":
                print("refused:", message["reason"])
                sys.exit(2)
        self.check()

    def check(self) -> None:
        newer = self.newest is not None and self.newest["number"] > self.generation["number"]
        if self.paused or (newer and self.newest["urgent"]):
            raise Changed

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.take(left)

    # ---- training

    def run(self) -> None:
        fingerprint = {"run.seed": self.options.seed, "exactness": "strict"}
        self.send("hello", protocol=PROTOCOL, member=self.member, pid=os.getpid(), fingerprint=fingerprint)
        self.show(Phase.WAITING)
        switch = False
        while True:
            try:
                if not switch:
                    self.wait_generation()
                switch = self.one_generation()
            except Changed:
                switch = False

    def wait_generation(self) -> None:
        while self.paused or self.newest is None or self.newest["number"] <= self.generation["number"]:
            if self.done:
                raise Left("done")
            if self.stop:
                raise Left("stopped")
            self.show(Phase.WAITING)
            try:
                self.take()
            except Changed:
                pass

    def one_generation(self) -> bool:
        """Live through one generation; True if a planned one follows."""
        self.generation = self.newest
        number, members = self.generation["number"], self.generation["members"]
        if self.member not in members:
            self.send("leaving", generation=number)
            raise Left("left out")
        began = time.monotonic()
        self.show(Phase.RECOVERY)
        self.send(
            "report",
            generation=number,
            version=self.version,
            record=self.version - 1 if self.version > 0 else None,
            lanes=[],
            checkpoints=self.checkpoints() if self.version < 0 else [],
            verified=True,
            lineages=[],
        )
        while number not in self.digests:
            self.take()
        digest = self.digests[number]
        self.version, self.lineage = digest["version"], digest["lineage"]
        self.from_step = digest["from_step"]
        kind = digest["sources"][self.member]["kind"]
        if kind in ("keep", "replay") and members[0] == self.member and self.version > 0:
            self.commit(self.version - 1, members)  # whoever was to report it may have died before it did
        ms = (time.monotonic() - began) * 1000
        self.send(
            "event",
            event="recovery",
            fields={
                "generation": number,
                "member": self.member,
                "version": self.version,
                "stages": {"reconcile_ms": ms},
                "total_ms": ms,
                "resumed_step": self.version,
            },
        )
        while True:
            if self.version >= self.options.steps:
                self.finish()
                raise Changed
            self.step(members.index(self.member), members)
            planned = [int(self.values[(number, f"{self.version - 1}/{m}")].split(":")[1]) for m in members]
            if self.stop and all(self.values[(number, f"{self.version - 1}/{m}")].endswith("stop") for m in members):
                if members[0] == self.member and self.stop["checkpoint"]:
                    self.save()
                raise Left("stopped")
            if min(planned) > number:
                return True

    def step(self, rank: int, members: list[str]) -> None:
        number, step, options = self.generation["number"], self.version, self.options
        self.misbehave(step)
        self.show(Phase.SLOT, step, rank, options.deadline_s)
        self.sleep(options.step_s)
        self.show(Phase.EXCHANGE, step)
        planned = max(number, self.newest["number"] if self.newest else 0)
        mine = f"{rank}:{planned}:{'stop' if self.stop else 'go'}"
        self.send("kv_set", generation=number, key=f"{step}/{self.member}", value=mine)
        self.values[(number, f"{step}/{self.member}")] = mine
        for member in members:
            key = (number, f"{step}/{member}")
            if key not in self.values:
                self.send("kv_get", generation=number, key=key[1])
                while key not in self.values:
                    self.take()
        self.show(Phase.APPLY, step)
        self.version += 1
        if rank == 0:
            self.commit(step, members)
            if options.save_every and self.version % options.save_every == 0:
                self.save()
            print(f"step {step} of {options.steps} on {len(members)}")
        self.show(Phase.USER, step)

    def commit(self, step: int, members: list[str]) -> None:
        number = self.generation["number"]
        lanes = [[m, i * 12 // len(members), (i + 1) * 12 // len(members)] for i, m in enumerate(members)]
        self.send(
            "commit",
            lineage=self.lineage,
            step=step,
            generation=number,
            world_size=len(members),
            loss=1.0 / (step + 1),
            tokens=12,
            lr=0.1,
            grad_norm=None,
            step_s=self.options.step_s,
            ledger={
                "step": step,
                "generation": number,
                "world_size": len(members),
                "epoch": 0,
                "position": step * 12,
                "count": 12,
                "slots": 12,
                "lanes": 12,
                "computed_by": [x for x in lanes if x[1] < x[2]],
                "slot_samples": ["0" * 16] * 12,
                "slot_weight": [1.0] * 12,
                "loss": 1.0 / (step + 1),
                "from_step": self.from_step,
            },
        )

    def misbehave(self, step: int) -> None:
        options = self.options
        if options.hang_at == step and self.first_life():
            self.show(Phase.SLOT, step, 0, options.deadline_s)
            time.sleep(600)
        if options.raise_at == step and (options.raise_index is None or options.raise_index == self.index):
            raise ValueError(f"planted at step {step}")
        if options.slot_error_at == step:
            self.show(Phase.SLOT, step, 3)
            self.send("slot_error", step=step, slot=3, error="ValueError: bad sample", traceback="", samples=[17, 4])
            sys.exit(1)
        if options.segv_at == step and self.first_life() and self.index == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if options.leave_at == step:
            raise Left("user code left its loop")

    def first_life(self) -> bool:
        return self.member.endswith("-1")

    def finish(self) -> None:
        self.show(Phase.FINISHED)
        self.send("finished", version=self.version, weights_sha256="ab" * 32, final_loss=0.5)
        while not self.done:
            if self.newest is not None and self.newest["number"] > self.generation["number"]:
                raise Changed  # a planned one too: there is no step any more at whose end it could happen
            self.take()
        raise Left("done")

    # ---- checkpoints are numbers in a file, the newest first

    def save(self) -> None:
        with open(os.path.join(self.run_dir, "fake-checkpoint.tmp"), "w") as file:
            json.dump([self.version, *self.checkpoints()], file)
        os.replace(file.name, file.name[:-4])
        self.send(
            "event", event="checkpoint_saved", fields={"step": self.version, "path": "x", "seconds": 0, "bytes": 0}
        )

    def checkpoints(self) -> list[int]:
        try:
            with open(os.path.join(self.run_dir, "fake-checkpoint")) as file:
                return [version for version in json.load(file) if isinstance(version, int)]
        except OSError:
            return []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--deadline-s", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--hang-at", type=int)
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--raise-index", type=int)
    parser.add_argument("--slot-error-at", type=int)
    parser.add_argument("--segv-at", type=int)
    parser.add_argument("--leave-at", type=int)
    parser.add_argument("--raise-early", action="store_true")
    parser.add_argument("--raise-early-from", type=int, default=99, metavar="INDEX")
    parser.add_argument("--mute-at-first", type=int, metavar="INDEX")
    options = parser.parse_args()
    if os.environ["ELASTIC_HARNESS_MEMBER"] == f"w{options.mute_at_first}-1":
        time.sleep(600)
    if options.raise_early or int(os.environ["LOCAL_RANK"]) >= options.raise_early_from:
        raise RuntimeError("planted before start()")
    worker = Worker(options)
    try:
        worker.run()
    except Left as left:
        print(f"left: {left}")
    except Exception as error:
        worker.send("error", error=f"{type(error).__name__}: {error}", traceback="")
        raise


if __name__ == "__main__":
    main()
