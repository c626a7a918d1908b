"""Training jobs whose workers fail exactly where a test says, and the checks that every such job has to pass.

A test reads as a story: `job.fill(4)`, then `job.fault(0, "exchange.header_sent")`, … and at the end `job.finish()`,
which demands the weights of a run that never failed. The job does only the steps it was allowed to do, so every fault
happens in a known step with a known number of workers, however slow the machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness.agent.control.server import request
from elastic_harness.contract.commands import GetStatus
from elastic_harness.errors import HarnessError
from elastic_harness.runs.ledger import read_ledger
from elastic_harness.runs.verify import verify
from integration.launch_tools import Job, run
from integration.preloaded import preloaded

TRAINER = Path(__file__).with_name("observed_trainer.py")
PATIENCE_S = 240.0
LANES = 12
TINY = (
    "training.global_batch_samples=12",
    f"training.lanes={LANES}",
    "trainer.log_interval_steps=1000",
    "data.seq_length=16",
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=64",
    "scheduler.warmup_steps=3",
    "elastic.progress_timeout_min_s=30",
    "elastic.deal_by_speed=false",  # faults wait for a member's third slot
)
FOREVER = 1 << 30


@dataclass(frozen=True)
class Fault:
    """One injected fault. rank None: whoever comes first."""

    id: str
    step: int
    rank: int | None
    place: str
    hit: int
    action: str

    @property
    def is_failure(self) -> bool:
        """Whether the worker is lost by it."""
        return not self.action.startswith("pause:")


class TrainingJob(Job):
    """A launch of the built-in trainer on a tiny model that stops before every step until the test lets it go on."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        *options: object,
        steps: int,
        settings: Sequence[str] = (),
        script: Path = TRAINER,
        variables: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> None:
        """`anew`: the launcher is a new process, and no fork of the `preloaded` one."""
        self.workers = workers
        self.steps = steps
        self.limit = 0
        self.faults: list[Fault] = []
        self._planned: dict[int, list[Fault]] = {}
        self.tests = folder / "orders"
        self.tests.mkdir(parents=True)
        self._write("limit", "0")
        self._arguments = (self.tests, *TINY, f"training.max_steps={steps}", *settings)
        self._script = script
        self._popen = subprocess.Popen if anew else preloaded().popen
        super().__init__(
            folder / "run",
            *self._arguments,
            script=script,
            options=("--nproc-per-node", workers, *options),
            variables=variables,
            popen=self._popen,
        )

    def relaunch(self, workers: int) -> None:
        """Launch the same run folder again, after it ended."""
        assert self.process.poll() is not None
        self._file.close()
        self.workers = workers
        options = ("--nproc-per-node", workers)
        super().__init__(self.run_dir, *self._arguments, script=self._script, options=options, popen=self._popen)

    # ---- waiting

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            value = condition()
            if value:
                return value
            assert not ended, f"the job ended with {self.process.returncode} before {what}:\n{self.shown()}"
            time.sleep(0.01)
        raise AssertionError(f"waited {PATIENCE_S} s for {what}; orders {self._orders()}:\n{self.shown()}")

    def wait(self) -> int:
        self.until(lambda: self.process.poll() is not None, "the end of the job")
        return super().wait()

    def status(self) -> dict[str, Any]:
        """What the agent says now; empty while there is none."""
        with contextlib.suppress(HarnessError, OSError, ValueError):
            path = self.record().get("control")
            return request(path, GetStatus()) if path else {}
        return {}

    def ready(self) -> int:
        """Living workers that have said hello."""
        return sum(row["state"] != "starting" and not row["leaving"] for row in self.status().get("workers", ()))

    # ---- steering

    def allow(self, limit: int) -> None:
        """The steps below `limit` may begin."""
        self.limit = max(self.limit, limit)
        self._write("limit", str(self.limit))

    def hold_joiners(self) -> None:
        """Workers that are started from now on do not join before `admit_joiners`."""
        self._write("hold", "")

    def admit_joiners(self) -> None:
        (self.tests / "hold").unlink()

    def until_committed(self, limit: int) -> None:
        self.until(lambda: self.committed() >= min(limit, self.steps), f"the commit of step {limit - 1}")

    def committed(self) -> int:
        """Steps committed so far, in the newest lineage."""
        events = self.events("step_committed")
        return events[-1]["step"] + 1 if events else 0

    def advance(self, steps: int = 1) -> None:
        """Do some steps."""
        self.allow(self.limit + steps)
        self.until_committed(self.limit)

    def fill(self, world: int | None = None, *, spares: int = 0) -> None:
        """Let workers join, doing as few steps as that takes, until `world` are members and `spares` wait."""
        world = self.workers if world is None else world
        self.until(lambda: self.ready() >= world + spares, f"{world + spares} ready workers")
        self.until(lambda: self.events("generation"), "the first generation")
        while True:
            status = self.status()
            number, formed = status.get("generation") or 0, bool(status.get("formed"))
            if formed and len(status["members"]) == world:
                return
            if formed or number <= 1:  # what the agent is about to do needs no step
                self.until(lambda old=(number, formed): old != self._generation(), f"{world} members")
                continue
            assert self.limit < self.steps - 1, f"no steps are left to form a group of {world}\n{self.shown()}"
            self.advance()  # a planned change begins with the step after one that everybody did knowing of it

    def _generation(self) -> tuple[int, bool]:
        status = self.status()
        return status.get("generation") or 0, bool(status.get("formed"))

    def order(
        self,
        rank: int | None,
        place: str,
        action: str = "kill",
        *,
        hit: int = 1,
        step: int | None = None,
        lasting: int = 1,
    ) -> Fault:
        """Plan a fault for the next step, or a later one, and as many as it is `lasting`; it happens once, to the
        member that has this rank when the step begins."""
        step = self.limit if step is None else step
        assert step >= self.limit, "that step may have begun already"
        fault = Fault(f"f{len(self.faults)}", step, rank, place, hit, action)
        self.faults.append(fault)
        for affected in range(step, step + lasting):
            self._planned.setdefault(affected, []).append(fault)
            self._write(f"faults-{affected}.json", json.dumps([vars(f) for f in self._planned[affected]]))
        return fault

    def order_for_joiner(self, place: str, action: str = "kill", *, hit: int = 1) -> Fault:
        """Plan a fault for the next worker that passes `place` before its first step."""
        fault = Fault(f"j{len(self.faults)}", -1, None, place, hit, action)
        self.faults.append(fault)
        self._write("joiners.json", json.dumps([vars(f) for f in self.faults if f.id.startswith("j")]))
        return fault

    def fault(self, rank: int | None, place: str, action: str = "kill", *, hit: int = 1) -> Fault:
        """Do a step in which `rank` fails at `place`; returns once the loss was recovered from. A step more is done:
        those that had committed before the loss learn of it when they begin the next one."""
        fault = self.order(rank, place, action, hit=hit)
        self.play()
        return fault

    def play(self, steps: int = 2) -> None:
        """Do the next step, in which everything ordered for it happens, and one more or several."""
        self.advance(steps)
        self.settle()

    def settle(self) -> None:
        """Wait until every fault ordered so far has happened and was recovered from."""
        for fault in self.faults:
            if fault.step < self.limit:
                member = self.until(lambda f=fault: self.victim(f), f"fault {fault} to happen")
                if fault.is_failure:
                    self.until(lambda m=member: m in self.failed(), f"the agent to notice {fault} of {member}")
        self.until(self._on_its_way, "the recovery")

    def _on_its_way(self) -> bool:
        """Whether all members of the newest generation live and take part in it, or will from the next step on."""
        if self.process.poll() is not None or self.events("run_finished"):
            return True
        generation, failed = self.events("generation")[-1], self.failed()
        if set(generation["members"]) & set(failed):
            return False
        return not generation["urgent"] or bool(self.status().get("formed"))

    def victim(self, fault: Fault) -> str | None:
        """Who suffered the fault; None if it has not happened."""
        with contextlib.suppress(FileNotFoundError):
            words = (self.tests / f"fired-{fault.id}").read_text().split()
            return words[0] if len(words) == 2 else None
        return None

    def failed(self) -> dict[str, dict[str, Any]]:
        """The `failure_detected` event of every member that has one."""
        return {e["member"]: e for e in self.events("failure_detected")}

    def _write(self, name: str, text: str) -> None:
        temporary = self.tests / f".{name}"
        temporary.write_text(text)
        os.replace(temporary, self.tests / name)

    def _orders(self) -> dict[str, str]:
        return {p.name: p.read_text() for p in self.tests.iterdir() if p.name.startswith(("limit", "fa", "fi", "j"))}

    # ---- the end

    def finish(self, *, expected: str | None = None, victims: Sequence[str] = ()) -> dict[str, Any]:
        """Let the job run to its end and demand everything: see `check`. `victims`: members that the test killed
        itself."""
        self.allow(FOREVER)
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self.check(expected, victims)

    def check(self, expected: str | None, victims: Sequence[str] = ()) -> dict[str, Any]:
        """What every finished job has to satisfy; returns its `run_finished` event."""
        finished = self.events("run_finished")[-1]
        assert (finished["status"], finished["version"]) == ("finished", self.steps)
        if expected is not None:
            assert finished["weights_sha256"] == expected, "these are not the weights of the undisturbed run"
        self.check_faults(victims)
        self.check_records()
        self.check_lanes()
        self.check_leaks()
        return finished

    def check_faults(self, victims: Sequence[str] = ()) -> None:
        """Every fault happened, was noticed and was recovered from; and nothing else failed."""
        missing = [f for f in self.faults if self.victim(f) is None]
        assert not missing, f"never happened: {missing}"
        lost = {str(self.victim(f)): f for f in self.faults if f.is_failure}
        assert len(lost) == sum(f.is_failure for f in self.faults), "one member suffered two faults"
        failed = self.failed()
        assert set(failed) == set(lost) | set(victims), f"failed: {sorted(failed)}, faults: {lost}\n{self.output}"
        assert len(self.events("failure_detected")) == len(failed), "a failure was reported twice"
        for member, fault in lost.items():
            log, = (self.run_dir / "logs").glob(f"worker-*-{member}.log")
            assert f"failpoint {fault.place} " in log.read_text()
            if fault.action == "kill":
                assert failed[member]["signal"] == "SIGKILL", failed[member]
            if fault.action == "raise":
                assert failed[member]["exit_code"] == 1, failed[member]
        self._check_recoveries(set(failed))

    def _check_recoveries(self, failed: set[str]) -> None:
        """After each loss of a member a generation without it took over and completed its recovery."""
        generations = {e["number"]: e for e in self.events("generation")}
        recovered = {e["generation"] for e in self.events("recovery")}
        ended = self.events("run_finished")[-1]["t"]
        for member in failed:
            held = [n for n, e in generations.items() if member in e["members"]]
            after = [n for n in generations if held and n > max(held)]
            if held and not after:
                done = [e for e in self.events("step_committed") if e["step"] == self.steps - 1]
                assert done and done[-1]["t"] <= ended, f"nobody took over from {member}"
            elif held:
                assert any(n in recovered for n in after) or max(generations) not in recovered
        numbers = list(generations)
        assert numbers == sorted(set(numbers)), "a generation number came back"

    def check_records(self) -> None:
        """Every step exactly once in each lineage, every sample exactly once overall."""
        committed = Counter((e["lineage"], e["step"]) for e in self.events("step_committed"))
        assert not [k for k, n in committed.items() if n > 1], "a step was committed twice"
        assert set(read_ledger(self.run_dir).followed()) == set(range(self.steps))
        verdict = verify(self.run_dir)
        assert verdict.ok, str(verdict)

    def check_lanes(self) -> None:
        """Whoever finished a lane and lived is the one that contributed it: nothing finished is computed again."""
        failed = set(self.failed())
        by_lane: dict[tuple[int, int], list[str]] = {}
        for path in self.tests.glob("lanes-*"):
            for line in path.read_text().splitlines():
                step, low, high = json.loads(line)
                for lane in range(low, high):
                    by_lane.setdefault((step, lane), []).append(path.name.removeprefix("lanes-"))
        lines = read_ledger(self.run_dir).followed()
        if read_ledger(self.run_dir).lineage > 0:
            return  # steps after a restore were done more than once, by intention
        for (step, lane), members in by_lane.items():
            alive = [m for m in members if m not in failed]
            assert len(alive) <= 1, f"lane {lane} of step {step} was computed by {members}, of whom {alive} lived"
            holder = next(m for m, lo, hi in lines[step].computed_by if lo <= lane < hi)
            assert holder in members
            # a victim that was killed later had lived through this step
            assert holder in (alive or [holder]) or holder in failed, f"lane {lane} of step {step}: {holder}, {members}"

    def check_leaks(self) -> None:
        """No process (see `wait`), thread, socket, shared memory or temporary file is left."""
        for path in self.tests.glob("left-*.json"):
            left = json.loads(path.read_text())
            assert set(left["threads"]) <= {"agent-link"}, f"{path.name}: threads {left['threads']}"
            assert len(left["sockets"]) <= 1, f"{path.name}: sockets {left['sockets']}"
        pids = {str(e["pid"]) for e in self.events("worker_started")}
        shared = [n for n in os.listdir("/dev/shm") if pids & set(re.findall(r"\d+", n))]
        assert not shared, f"left in /dev/shm: {shared}"
        names = {p.name for p in self.run_dir.iterdir()}
        known = {"config.yaml", "run.json", "events.jsonl", "ledger.jsonl", "logs", "checkpoints", "lock", "generation"}
        known |= {"hangs"}
        assert names <= known | {"weights.safetensors", "imports.json"}, f"left in the run folder: {names - known}"
        checkpoints = self.run_dir / "checkpoints"
        odd = [p.name for p in checkpoints.iterdir() if not re.fullmatch(r"step-\d{8}(\.damaged)?|latest|best", p.name)]
        assert not odd, f"left among the checkpoints: {odd}"

    def scale(self, workers: int) -> None:
        """`elastic-harness scale`."""
        done = run("scale", self.run_dir, "--workers", workers)
        assert done.returncode == 0, done.stderr
        self.workers = workers

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> str:
        return self.kill_rank(rank, number)
