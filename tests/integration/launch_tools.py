"""Starts real jobs through the command line, waits for what they write, and checks that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_harness import processes
from elastic_harness.agent.control.server import request
from elastic_harness.contract.commands import GetStatus
from elastic_harness.runs import episodes
from elastic_harness.runs.events import read_events

if TYPE_CHECKING:
    from integration.preloaded import Started

SOURCE = Path(__file__).parents[2] / "src"
FAKE_WORKER = Path(__file__).with_name("launch_worker.py")
PATIENCE_S = 60.0
BY_CHANCE = ("EH-L101", "EH-L105")


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_HARNESS_", "COV_"))}
    return {**kept, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "elastic_harness", *map(str, arguments)]


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        command(*arguments), env=environment(), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
    )


def workers(count: int, *more: object) -> tuple[object, ...]:
    """Options of `launch` for so many workers."""
    return ("--nproc-per-node", count, *more)


class Job:
    """A launch under test. `output` is complete once `wait` has returned."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: object,
        script: Path = FAKE_WORKER,
        options: tuple = (),
        variables: Mapping[str, str] | None = None,
        popen: Callable[..., subprocess.Popen[bytes] | Started] = subprocess.Popen,
        where: Sequence[object] = ("--standalone",),
    ) -> None:
        self.run_dir = run_dir
        self.output = ""
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        if script == FAKE_WORKER:  # it starts in a moment by itself: it does not import torch
            options = ("--no-fork-server", *options)
        self._file = open(run_dir.with_name(run_dir.name + f".out-{time.time_ns()}"), "w+b")
        self.process = popen(
            command("launch", *where, "--run-dir", run_dir, *options, script, *arguments),
            env={**environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    # ---- what it wrote

    def events(self, *names: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        return [e for e in read_events(path) if not names or e["event"] in names] if path.exists() else []

    def causes(self) -> list[str]:
        """The codes of all first causes, as `explain` tells them, each with those that followed from it. Whether an
        exchange broke first, or the job had to wait, is chance, and left out."""
        return causes(self.run_dir)

    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text())

    def shown(self) -> str:
        return Path(self._file.name).read_text()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; the job must still be running then."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                value = condition()
                assert value, f"the job ended with {self.process.returncode} before {what}:\n{self.shown()}"
                return value
            time.sleep(0.002)
        raise AssertionError(f"waited {PATIENCE_S} s for {what}:\n{self.shown()}")

    def until_step(self, step: int) -> None:
        self.until(lambda: any(e["step"] >= step for e in self.events("step_committed")), f"step {step}")

    def until_event(self, name: str, count: int = 1) -> dict[str, Any]:
        events = self.until(lambda: len(e := self.events(name)) >= count and e, f"{count} x {name}")
        return events[count - 1]

    def status(self) -> dict[str, Any]:
        """What the agent says now."""
        return request(self.record()["control"], GetStatus())

    def members(self) -> list[str]:
        """The members of the newest generation, in rank order."""
        return self.events("generation")[-1]["members"]

    def pid(self, member: str) -> int:
        return next(e["pid"] for e in self.events("worker_started") if e["member"] == member)

    # ---- what is done to it

    def kill_ranks(self, *ranks: int, number: int = signal.SIGKILL) -> set[str]:
        """Signal the workers at these ranks, as nearly at once as possible."""
        members = self.members()
        victims = {members[rank]: self.pid(members[rank]) for rank in ranks}
        for pid in victims.values():
            os.kill(pid, number)
        return set(victims)

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> str:
        return self.kill_ranks(rank, number=number).pop()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code; fails the test if anything is left behind."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.shown()}") from None
        self.output = self.shown()
        self.check_nothing_left()
        return code

    def finish(self) -> dict[str, Any]:
        """The job must succeed, with every step committed exactly once per lineage; the run_finished event."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}"
        finished = self.events("run_finished")[-1]
        assert finished["status"] == "finished"
        committed = [(e["lineage"], e["step"]) for e in self.events("step_committed")]
        assert len(set(committed)) == len(committed)
        if finished["version"] is not None:
            newest = {step for _, step in committed}
            assert newest == set(range(finished["version"]))
        numbers = [e["number"] for e in self.events("generation")]
        assert numbers == sorted(set(numbers)), "a generation number came back"
        started = [e["member"] for e in self.events("worker_started")]
        assert len(set(started)) == len(started), "a member id came back"
        return finished

    def check_nothing_left(self) -> None:
        left = left_behind(self.run_dir)
        assert not left, f"left behind: {left}\n{self.shown()}"
        assert not (self.run_dir / "control.sock").exists()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()
        for pid in processes.of_run(self.run_dir):
            os.kill(pid, signal.SIGKILL)


def causes(run_dir: Path) -> list[str]:
    """As `Job.causes`."""
    damaged: list[str] = []
    events = episodes.in_order({"": read_events(run_dir / "events.jsonl", damaged.append)}, damaged.append)
    failures = episodes.tell(events, damaged.append).failures
    assert not damaged
    codes = [dict.fromkeys(code.id for code in failure.codes) for failure in failures]
    return [" → ".join(code for i, code in enumerate(each) if not i or code not in BY_CHANCE) for each in codes]


def left_behind(run_dir: Path, patience_s: float = 5.0) -> list[int]:
    """The processes of a run that are still there after a while: one that the kernel ends with its parent takes one."""
    end = time.monotonic() + patience_s
    while (left := processes.of_run(run_dir)) and time.monotonic() < end:
        time.sleep(0.01)
    return left
