"""Carries a plan out: launches the job, lets its processes fail as they were told, and does to it from outside what a
process cannot do to itself. What happened, to whom and when is written down by whoever did it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastic_harness import processes
from elastic_harness.chaos import plan as plans
from elastic_harness.chaos.kinds import TABLE, Kind
from elastic_harness.chaos.plan import ChaosPlan, PlannedFault
from elastic_harness.contract.variables import FAILPOINTS, FAULTS
from elastic_harness.errors import HarnessError
from elastic_harness.etcd import server as etcd
from elastic_harness.etcd.server import ServerRecord
from elastic_harness.runs import folder as folders
from elastic_harness.runs.ledger import LEDGER
from elastic_harness.watched_job import Job, cli

POLL_S = 0.02
LEFT_BEHIND_S = 10.0
LAUNCHES_MAX = 20
AWAY_S = 6.0
FAULTS_FOLDER = "faults"
_KNOWN = (
    r"config\.yaml|run\.json|events\.jsonl|ledger\.jsonl|logs|checkpoints|lock|generation|hangs|weights\.safetensors|"
    r"imports\.json|origin\.json|doubt\.json"
)
_CHECKPOINT = r"step-\d{8}(\.damaged)?|latest|best"


@dataclass(frozen=True)
class JobEnd:
    """How a job ended that was carried out."""

    exit_code: int | None  # of its last launch; None: it was ended here, because it stood still
    launches: int
    took_s: float
    left: tuple[str, ...]  # what it left behind
    said: str  # the last lines of its output


def launch_command(plan: ChaosPlan, run_dir: Path, *options: str) -> list[str]:
    """Return the command that launches a plan's job, with further options of `launch`."""
    script = plan.command or ("-m", plans.MODULE, f"training.max_steps={plan.steps}", *plan.settings)
    given = ["launch", f"--nproc-per-node={plan.workers}", f"--spares={plan.spares}", *options]
    return cli(*given, "--run-dir", str(run_dir), *script)


def run_undisturbed(plan: ChaosPlan, run_dir: Path, limit_s: float) -> JobEnd:
    """Run the plan's job to its end on one worker, and let nothing happen to it."""
    with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as scratch:
        return _carry_out(replace(plan, faults=(), workers=1, spares=0), run_dir, Path(scratch), {}, limit_s)


def run_disturbed(plan: ChaosPlan, run_dir: Path, faults: Path, limit_s: float) -> JobEnd:
    """Run the plan's job to its end, with its faults. `faults` is the folder in which they are written down."""
    faults.mkdir(parents=True)
    return _carry_out(plan, run_dir, faults, {FAILPOINTS: plans.rules(plan), FAULTS: str(faults)}, limit_s)


def _carry_out(plan: ChaosPlan, run_dir: Path, faults: Path, told: Mapping[str, str], limit_s: float) -> JobEnd:
    """told: variables of the job's environment."""
    began, launches, begun, pids = time.monotonic(), 0, 0, set[int]()
    notice = faults / "notice"
    store = _Store(faults / "etcd") if plan.store else None
    where = ["--standalone"] if store is None else ["--store", store.address, "--run-id", run_dir.name]
    command = launch_command(plan, run_dir, *where, f"--notice-file={notice}", "--grace=30", "--quiet")
    output = run_dir.with_name(run_dir.name + ".log")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        while True:
            launches += 1
            notice.unlink(missing_ok=True)
            with Job(command, run_dir, output, plan.steps, plan.workers, told) as job:
                live = Live(plan, job, run_dir, faults, notice, store, begun)
                while job.advance():
                    live.look()
                    if time.monotonic() - began > limit_s:
                        break
                    time.sleep(POLL_S)
                job.stop()
                job.advance()
                pids |= {worker.pid for worker in job.story.workers.values()}
                code, said = job.exit_code, job.output_tail()
            begun = live.begun
            if time.monotonic() - began > limit_s:
                code = None
                break
            if not live.ends_job or launches >= LAUNCHES_MAX:
                break
    finally:
        if store is not None:
            store.close()
    took_s = time.monotonic() - began
    return JobEnd(code, launches, took_s, tuple(left_behind(run_dir, pids)), said)


class _Store:
    """An etcd that a job has for itself."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder = folder
        self.address = self.start().address

    def start(self) -> ServerRecord:
        return etcd.start(self._folder, self._port, "127.0.0.1")

    def stop(self) -> None:
        etcd.stop(self._folder)

    def signal(self, number: int) -> None:
        if (record := etcd.read(self._folder)) is not None:
            os.kill(record.pid, number)

    def wipe(self) -> None:
        self.stop()
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        self.start()

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.stop()


# ---- from outside


class Live:
    """A launch that goes on, and what is still to happen to it from outside."""

    def __init__(
        self, plan: ChaosPlan, job: Job, run_dir: Path, faults: Path, notice: Path, store: _Store | None, begun: int
    ) -> None:
        """begun: how many of the faults earlier launches have met."""
        self.store = store
        self.plan, self.job, self.run_dir, self.notice = plan, job, run_dir, notice
        self.ends_job = False  # one of the acts has ended it
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._faults, self._next = faults, begun

    @property
    def begun(self) -> int:
        """How many of the faults were let happen."""
        return self._next

    def look(self) -> None:
        """Let happen what is due: at its step, and as soon as the job has recovered from the fault before it."""
        while self._undo and time.monotonic() >= self._undo[0][0]:
            self._undo.pop(0)[1]()
        while self._next < len(self.plan.faults) and not self.ends_job and not self.job.story.finished:
            fault, kind = self.plan.faults[self._next], self.plan.kind(self._next)
            if not self._is_due(fault):
                return
            if kind.act:
                began = time.time()
                victims = ACTS[kind.act](self)
                if victims is None:  # not possible just now
                    return
                self._note(self._next, kind, victims, began)
                self.ends_job = kind.loses == "job"
            (self._faults / f"{plans.gate(self._next)}.json").write_text("{}")
            self._next += 1

    def _is_due(self, fault: PlannedFault) -> bool:
        story = self.job.story
        early = 0 if TABLE[fault.kind].act else plans.OPENED_EARLIER
        if story.last is None or story.running_step < fault.step - early:
            return False
        return fault.at_once or (not self._undo and self._has_happened(self._next - 1) and self._is_whole())

    def _has_happened(self, number: int) -> bool:
        """Whether all of a fault has happened, and was noticed if it is to be noticed."""
        if number < 0:
            return True
        kind = self.plan.kind(number)
        parts = [self._faults / f"{plans.fault_id(number, part)}.json" for part in range(max(1, len(kind.rules)))]
        if not all(part.exists() and part.stat().st_size for part in parts):
            return False
        members = [json.loads(part.read_text())["member"] for part in parts]
        noticed = kind.loses != "worker" or all(member in self.job.story.noticed for member in members)
        return noticed and (not kind.evicts or not self.job.story.alive(members[0]))

    def _is_whole(self) -> bool:
        """Whether all workers take part, without those that were sent away for good."""
        gone = sum(self.plan.kind(number).evicts for number in range(self._next))
        story = self.job.story
        whole = len(story.up()) == len(story.members) >= self.plan.workers - gone
        return whole and len(story.spares()) >= self.plan.spares

    def _note(self, number: int, kind: Kind, victims: Sequence[str], began: float) -> None:
        for part, member in enumerate(victims or ("",)):
            told = {"id": plans.fault_id(number, part), "t": began, "member": member, "pid": 0}
            told |= {"place": "outside", "action": kind.act, "step": self.job.story.running_step, "slot": None}
            (self._faults / f"{told['id']}.json").write_text(json.dumps(told))

    def signal(self, members: Sequence[str]) -> list[str] | None:
        """SIGKILL to these members at one moment. Return those that were there, None if there was none."""
        return [member for member in members if self.job.signal(member)] or None

    def later(self, undo: Callable[[], object]) -> None:
        """Do this in AWAY_S. The next fault waits for it."""
        self._undo.append((time.monotonic() + AWAY_S, undo))

    def record(self, name: str) -> int | None:
        """Return a process id from run.json."""
        with contextlib.suppress(HarnessError):
            return (folders.read_record(self.run_dir) or {}).get(name)
        return None


def _kill_two(live: Live) -> list[str] | None:
    up = [worker.member for worker in live.job.story.up()]
    return live.signal(up[:2]) if len(up) > 2 else None


def _kill_all(live: Live) -> list[str] | None:
    return live.signal([worker.member for worker in live.job.story.up()])


def _kill_spare(live: Live) -> list[str] | None:
    spares = [worker.member for worker in live.job.story.spares() if worker.spare]
    return next((struck for member in spares if (struck := live.signal([member]))), None)


def _kill_agent(live: Live) -> list[str] | None:
    return [] if _kill(live.record("agent_pid")) else None


def _kill_fork_server(live: Live) -> list[str] | None:
    for pid in processes.of_run(live.run_dir):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if b"elastic_harness.fork_server" in command and int(parent) == live.record("agent_pid"):
                if pid not in {worker.pid for worker in live.job.story.workers.values()}:
                    return [] if _kill(pid) else None
    return None


def _kill(pid: int | None) -> bool:
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _terminate_job(live: Live) -> list[str] | None:
    live.job.send(signal.SIGTERM)
    return []


def _interrupt_job(live: Live) -> list[str] | None:
    live.job.send(signal.SIGINT)
    return []


def _notice(live: Live) -> list[str] | None:
    live.notice.write_text("chaos says that this machine will go\n")
    return []


def _kill_job(live: Live) -> list[str] | None:
    """Kill launcher and agent, and wait until all that they had started is gone: the writer brings what is in memory to
    disk before it ends."""
    agent = live.record("agent_pid")
    if agent is None:
        return None
    live.job.send(signal.SIGSTOP)  # it would start another agent; and an agent whose launcher is gone drains
    _kill(agent)
    live.job.send(signal.SIGKILL)
    end = time.monotonic() + LEFT_BEHIND_S
    while (folders.locked(live.run_dir) or processes.of_run(live.run_dir)) and time.monotonic() < end:
        time.sleep(POLL_S)
    return []


def _newest_checkpoint(live: Live) -> Path | None:
    """Return the newest of at least two checkpoints."""
    found = sorted((live.run_dir / "checkpoints").glob("step-*[0-9]"))
    return found[-1] if len(found) > 1 else None


def _largest_of_a_killed_job(live: Live) -> Path | None:
    """Kill the job, and return the largest file of its newest checkpoint; None, and nothing is done, if it is too early
    for that."""
    if _newest_checkpoint(live) is None or _kill_job(live) is None:
        return None
    newest = _newest_checkpoint(live)
    assert newest is not None
    return max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _flip_checkpoint(live: Live) -> list[str] | None:
    largest = _largest_of_a_killed_job(live)
    if largest is None:
        return None
    _change(largest, largest.stat().st_size - 5, lambda byte: byte ^ 1)
    return []


def _tear_checkpoint(live: Live) -> list[str] | None:
    largest = _largest_of_a_killed_job(live)
    if largest is None:
        return None
    largest.unlink()
    return []


def _damage_ledger(live: Live) -> list[str] | None:
    if _kill_job(live) is None:
        return None
    path = live.run_dir / LEDGER
    _change(path, path.stat().st_size // 2, lambda byte: 0)
    return []


def _change(path: Path, at: int, change: Callable[[int], int]) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([change(byte)]))


def _fill_writer(live: Live) -> list[str] | None:
    """Let the checkpoint writer write no byte to any file for so long that it is told of."""
    for pid in processes.of_run(live.run_dir):
        with contextlib.suppress(OSError):
            if b"elastic_harness.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
                live.later(partial(_allow_writes, pid, before))
                return []
    return None


def _allow_writes(pid: int, limit: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def _store_away(live: Live) -> list[str] | None:
    assert live.store is not None
    live.store.stop()
    live.later(live.store.start)
    return []


def _stop_store(live: Live) -> list[str] | None:
    store = live.store
    assert store is not None
    store.signal(signal.SIGSTOP)
    live.later(lambda: store.signal(signal.SIGCONT))
    return []


def _wipe_store(live: Live) -> list[str] | None:
    assert live.store is not None
    live.store.wipe()
    return []


def _kill_without_store(live: Live) -> list[str] | None:
    _store_away(live)
    return live.signal([worker.member for worker in live.job.story.up()][:1])


ACTS: dict[str, Callable[[Live], list[str] | None]] = {
    "kill_two": _kill_two,
    "kill_all": _kill_all,
    "kill_spare": _kill_spare,
    "kill_agent": _kill_agent,
    "kill_fork_server": _kill_fork_server,
    "terminate_job": _terminate_job,
    "interrupt_job": _interrupt_job,
    "notice": _notice,
    "kill_job": _kill_job,
    "flip_checkpoint": _flip_checkpoint,
    "tear_checkpoint": _tear_checkpoint,
    "damage_ledger": _damage_ledger,
    "fill_writer": _fill_writer,
    "store_away": _store_away,
    "stop_store": _stop_store,
    "wipe_store": _wipe_store,
    "kill_without_store": _kill_without_store,
}
"""What is done from outside. Each returns the members that it happened to, and None if it could not be done yet."""


# ---- what is left


def left_behind(run_dir: Path, pids: set[int]) -> Iterator[str]:
    """Yield what an ended job left behind: processes, shared memory, files. Waits some seconds for processes that are
    about to end."""
    end = time.monotonic() + LEFT_BEHIND_S
    while (living := processes.of_run(run_dir)) and time.monotonic() < end:
        time.sleep(POLL_S)
    for pid in living:
        with contextlib.suppress(OSError):
            yield f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().decode(errors='replace')[:200]!r}"
            os.kill(pid, signal.SIGKILL)
    for name in os.listdir("/dev/shm"):
        if pids & {int(number) for number in re.findall(r"\d{2,}", name)}:
            yield f"/dev/shm/{name}"
    for folder, known in ((run_dir, _KNOWN), (run_dir / "checkpoints", _CHECKPOINT)):
        for path in folder.iterdir() if folder.is_dir() else ():
            if not re.fullmatch(known, path.name):
                yield f"{path}"
