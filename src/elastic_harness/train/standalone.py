"""Coordination without an agent: one worker under plain `python`, or several under torchrun, whose failures end the
job's processes and whose restart resumes from a checkpoint.

The same decisions are taken by the same pure functions (`reconcile`); only who collects the reports differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, file_lock
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.messages import (
    Alarm,
    Commit,
    DoubtfulState,
    EndAsked,
    FastAgain,
    HandOver,
    LastStepDone,
    Leave,
    LogEvent,
    Rechecked,
    SlowWorker,
    UnfitPeer,
)
from elastic_harness.contract.wire import as_fields
from elastic_harness.errors import ConfigError, InfrastructureError, UserCodeError
from elastic_harness.membership.reconcile import reconcile
from elastic_harness.membership.types import Digest, Generation, Report
from elastic_harness.names import check_name, integer_variable
from elastic_harness.omissions import Entry, Omission, as_omissions, listed, no_help, since
from elastic_harness.runs.events import EVENTS, SCHEMA, EventLog
from elastic_harness.runs.fingerprints import differing, in_words
from elastic_harness.runs.ledger import LEDGER, LedgerWriter, Reached, reached
from elastic_harness.shape import build, expect, parse_object
from elastic_harness.train.link import Left

DOUBT = "doubt.json"
"""Since which versions a run without an agent was in doubt, and what it omits: for the workers that start next."""


class StandaloneLink:
    """Plays the coordinator for a fixed set of workers that live and die together."""

    def __init__(self, run_dir: Path, rank: int, world: int, store: Any) -> None:
        self.member = f"rank{rank}"
        self.wake: Callable[[], None] = lambda: None
        self.leave_asked: Leave | None = None
        self.end_asked: EndAsked | None = None
        self.audit_asked = 0
        self._run_dir = run_dir
        self._rank = rank
        self._store = store
        self._generation = Generation(1, tuple(f"rank{r}" for r in range(world)), True, "a fixed set of workers")
        self._finished = False
        self._goes_back = ""
        self._writes = rank == 0
        self._events: EventLog | None = None
        self._ledger: LedgerWriter | None = None
        self._held_lock: int | None = None

    # ---- what the coordinator says

    def urgent(self, current: int) -> bool:
        return False

    def planned(self, current: int) -> int:
        return current

    def next_generation(self, after: int, *, boundary: bool, formed: bool) -> Generation:
        if self._finished:
            if self._store is not None:
                for member in self._generation.members:
                    self._get(f"finished/{member}")
            self._let_go()
            raise Left("done", done=True)
        if self._goes_back:
            raise InfrastructureError(f"{self._goes_back}. This process ends; started again, it goes on from there")
        if after >= self._generation.number:
            raise InfrastructureError(
                "a peer failed, and without our launcher there is nobody to recover in place: this process ends, and "
                "a restart resumes from the newest checkpoint. `elastic-harness launch` would have gone on."
            )
        return self._generation

    def digest(self, generation: int) -> Digest:
        reports = {m: build(Report, json.loads(self._get(f"report/{m}"))) for m in self._generation.members}
        ledger = self._run_dir / LEDGER
        known = reached(ledger)[0] if ledger.exists() else Reached()
        lineage, from_step, (doubts, omissions) = known.lineage, known.from_step, _doubts(self._run_dir)
        for begun, version in doubts:
            if begun > lineage:  # the run has not gone back yet
                lineage, from_step = begun, version
        digest, _ = reconcile(
            self._generation,
            reports,
            born=len(known) > 0,
            lineage=lineage,
            from_step=from_step,
            doubts=doubts,
        )
        return replace(digest, omissions=omissions)

    def kv_set(self, generation: int, key: str, value: bytes) -> None:
        self._store.set(f"kv/{key}", value)

    def kv_get(self, generation: int, key: str) -> bytes:
        return self._get(f"kv/{key}")

    def _get(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise InfrastructureError(f"no answer from the other workers ({key}): {error}") from error

    # ---- what the worker says

    def hello(self, fingerprint: dict[str, Any], max_steps: int, deadline_max_s: float) -> None:
        if self._writes:
            self._held_lock = file_lock.take(self._run_dir / "lock", busy(self._run_dir))
            self._check(fingerprint)
        self._store.set("hello", b"1") if self._store is not None and self._writes else None
        if self._store is not None:
            self._get("hello")
        if self._writes:
            self._events = EventLog(self._run_dir / EVENTS)
            self._ledger = LedgerWriter(self._run_dir / LEDGER)
            world = len(self._generation.members)
            self._events.emit("run_started", schema=SCHEMA, run_id=self._run_dir.name, nproc=world)
            self._events.emit("generation", **as_fields(self._generation), world_size=world)

    def _check(self, fingerprint: dict[str, Any]) -> None:
        """Compare this program with the one that began the run; note it if that is this one."""
        noted = self._run_dir / "fingerprint.json"
        if not noted.exists():
            durable_file.remove_leftovers(noted)
            durable_file.write(noted, json.dumps(fingerprint, indent=1).encode())
            return
        try:
            known = parse_object(noted.read_bytes())
        except ValueError as error:
            raise InfrastructureError(
                f"{noted} is damaged ({error}); restore it, or remove it if this is the program that began the run"
            ) from error
        _same(known, fingerprint, self._run_dir)

    def report(self, report: Report) -> None:
        if self._store is None:
            self._store = _Values()
        self._store.set(f"report/{self.member}", json.dumps(as_fields(report)))

    def send(self, message: object) -> None:
        if isinstance(message, LastStepDone):
            self._finished = True
            self._store.set(f"finished/{self.member}", b"1")
        match message:  # any of them may be ended before it can say more
            case DoubtfulState():
                self._note_doubt(message)
            case UnfitPeer(member, reason):
                print(f"elastic-harness: worker {member} computes wrong: {reason}", file=sys.stderr, flush=True)
            case Rechecked():
                print(f"elastic-harness: {message.in_words()}", file=sys.stderr, flush=True)
            case SlowWorker():
                print(f"elastic-harness: {message.in_words(self.member)}", file=sys.stderr, flush=True)
            case Alarm():
                print(f"elastic-harness: alarm: {message.message}", file=sys.stderr, flush=True)
        if self._events is None or self._ledger is None:
            return
        match message:
            case HandOver(line):
                self._ledger.append(line)
            case Commit():
                if self._ledger.append(message.ledger or {}):
                    self._events.emit("step_committed", **message.metrics)
                    for decision in message.decisions:
                        print(f"elastic-harness: {decision.in_words(message.step)}", file=sys.stderr, flush=True)
            case LogEvent(event, fields) | CheckpointEvent(event, fields):
                self._events.emit(event, **fields)
            case Rechecked():
                self._events.emit("recheck", **as_fields(message))
            case Alarm():
                self._events.emit("alarm", **as_fields(message))
            case SlowWorker() | FastAgain():
                slow = "worker_slow" if isinstance(message, SlowWorker) else "worker_fast_again"
                self._events.emit(slow, member=self.member, **as_fields(message))
            case DoubtfulState(_, version, reason):
                omits = {"omitted": listed(message.omissions)} if message.omissions else {}
                self._events.emit("rollback", to=version, members=self._generation.members, reason=reason, **omits)
            case LastStepDone():
                self._events.emit("run_finished", status="finished", exit_code=0, **as_fields(message))

    def _note_doubt(self, doubt: DoubtfulState) -> None:
        """Note that the run goes back when it is started again. Raises UserCodeError if that would not help."""
        doubts, omissions = _doubts(self._run_dir)
        begun = doubt.lineage + 1, doubt.version
        if begun not in doubts:  # no other worker has noted it
            if why := no_help(omissions, doubt.omissions):
                raise UserCodeError(f"{doubt.reason}. {why}")
            every = as_omissions((*omissions, *since(doubt.omissions, begun[0])))
            noted = json.dumps({"doubts": sorted({*doubts, begun}), "omissions": every})
            durable_file.write(self._run_dir / DOUBT, noted.encode())
        text = f"going back to version {doubt.version}: {doubt.reason}"
        if doubt.omissions:
            text += f"; {listed(doubt.omissions)} is omitted from now on"
        print(f"elastic-harness: {text}", file=sys.stderr, flush=True)
        self._goes_back = text

    def ask_to_stop(self, asked: EndAsked) -> None:
        """Ask for the end of the run after a step: the others hear of it with that step's header."""
        self.end_asked = asked.or_earlier(self.end_asked)
        fields = {"member": self.member, "step": asked.step, "reason": asked.reason}
        self.send(LogEvent("stop_asked", fields))

    def close(self) -> None:
        self._let_go()
        for log in (self._events, self._ledger):
            if log is not None:
                log.close()
        self._events = self._ledger = None

    def _let_go(self) -> None:
        if self._held_lock is not None:
            os.close(self._held_lock)
            self._held_lock = None

    def left_out(self, generation: Generation) -> None:
        raise AssertionError("a fixed set of workers leaves nobody out")


def _doubts(run_dir: Path) -> tuple[list[tuple[int, int]], tuple[Omission, ...]]:
    """Return the lineages that began because of a doubt, the version at which each did, and what the run omits since
    then."""
    try:
        noted = parse_object((run_dir / DOUBT).read_bytes())
        expect(noted, {"doubts": list[tuple[int, int]], "omissions": list[Entry] | None})
        return [(lineage, version) for lineage, version in noted["doubts"]], as_omissions(noted.get("omissions") or ())
    except FileNotFoundError:
        return [], ()
    except ValueError as error:
        raise InfrastructureError(f"{run_dir / DOUBT} is damaged ({error}); restore it") from error


def busy(run_dir: Path) -> str:
    """That another job has this folder, for `file_lock.take`."""
    return f"the run folder {run_dir} belongs to a live job, process {{holder}}; choose another one or stop that job"


class _Values(dict[str, Any]):
    """The store of a world of one."""

    def set(self, key: str, value: bytes | str) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str, default: Any = None) -> bytes:
        return bytes(self[key])


def _same(known: dict[str, Any], own: dict[str, Any], run_dir: Path) -> None:
    own = json.loads(json.dumps(own))
    others = differing(known, own)
    if others:
        shown = in_words(others, known, own, "this process")
        raise ConfigError(
            f"this program does not fit the run in {run_dir}: {shown}. Make them equal, or begin a new run from its "
            f"state with these: start(…, resume_from={str(run_dir)!r}, run_dir=NEW)"
        )


def connect(run_dir: str | Path | None, program: str) -> tuple[StandaloneLink, Path]:
    """The link for a process that has no agent, and its run folder. Under torchrun: collective."""
    world, rank = integer_variable("WORLD_SIZE", 1), integer_variable("RANK", 0)
    if world == 1:
        folder = Path(run_dir) if run_dir is not None else Path("runs") / time.strftime(f"{program}-%Y%m%d-%H%M%S")
        if run_dir is None:
            print(f"elastic-harness: this run writes to {folder}; run_dir= chooses, and resumes", flush=True)
        return StandaloneLink(folder, 0, 1, None), folder
    if not 0 <= rank < world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}; RANK must be one of 0 … WORLD_SIZE - 1")
    import torch.distributed as dist

    address, port = os.environ.get("MASTER_ADDR", ""), integer_variable("MASTER_PORT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp = dist.TCPStore(address, port, world, rank == 0 and not agent_store, timedelta(minutes=10))
    except RuntimeError as error:
        raise InfrastructureError(
            f"the workers cannot meet at MASTER_ADDR:MASTER_PORT = {address}:{port}: {str(error).splitlines()[0]}; "
            "choose a port that is free on that host"
        ) from error
    store = dist.PrefixStore(f"elastic_harness/{attempt}", tcp)
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "torchrun")
    if run_dir is None:
        check_name("--rdzv-id", run_id, "it names the run's folder, unless run_dir= does: ")
    folder = Path(run_dir) if run_dir is not None else Path("runs") / f"{program}-{run_id}"
    return StandaloneLink(folder, rank, world, store), folder
