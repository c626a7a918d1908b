"""The commands of the control socket: status, stop, scale, drain, audit, kill."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from typing import Any

from elastic_harness.agent.loop import Agent
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract import wire
from elastic_harness.contract.commands import AuditRun, DrainNode, GetStatus, KillWorker, ScaleRun, StopRun
from elastic_harness.errors import EXIT_TERMINATED, ConfigError
from elastic_harness.health.preemption import ON_REQUEST
from elastic_harness.incidents import table


def answer(agent: Agent, command: object) -> wire.Message:
    """Carry out a command. Raises HarnessError for a command that is refused; the error travels back as a message."""
    match command:
        case GetStatus():
            return status(agent)
        case StopRun():
            agent.stop(EXIT_TERMINATED, "on request", everywhere=True)
            return {"stopping": True}
        case ScaleRun(workers):
            if agent.outcome is not None:
                raise ConfigError("the run is ending; it cannot be scaled any more")
            agent.supervisor.scale(workers)
            return status(agent)
        case DrainNode(node):
            if node in ("", agent.supervisor.status().get("node")):
                agent.draining.begin(ON_REQUEST)
            else:
                agent.supervisor.drain_other(node)
            return {"draining": True}
        case AuditRun(number):
            if agent.outcome is not None:
                raise ConfigError("the run is ending; it cannot be audited any more")
            agent.supervisor.audit(number)
            return {"asked": True}
        case KillWorker(worker):
            return _kill(agent, worker)
        case _:
            raise ConfigError(f"{command} cannot be carried out")


def status(agent: Agent) -> dict[str, Any]:
    """Return the run as `elastic-harness status` shows it."""
    now = time.monotonic()
    rows = [
        {
            "member": worker.member,
            "index": worker.index,
            "rank": worker.rank,
            "pid": worker.pid,
            "state": worker.board.read().where if worker.hello else "starting",
            "leaving": worker.released.reason if worker.released is not None else "",
            "pace": _pace(worker),
            "age_s": round(now - worker.started_at, 1),
            "log": str(worker.log.path),
        }
        for worker in agent.workers.values()
        if worker.running
    ]
    return {
        "run_id": agent.folder.record["run_id"],
        "run_dir": str(agent.folder.path),
        "status": agent.folder.record.get("status"),
        "agent_pid": os.getpid(),
        "workers": rows,
        "checkpoints": agent.checkpoints,
        "draining": agent.draining.status(),
        **agent.supervisor.status(),
    }


def _pace(worker: Worker) -> dict[str, Any] | None:
    """Return how fast a worker was in its last step; None if that is not known."""
    pace = worker.board.pace()
    return None if pace is None else {**asdict(pace), "slow": bool(pace.slow)}


def _names(worker: Worker) -> tuple[str, ...]:
    return (worker.member, worker.member.rpartition("/")[2], f"w{worker.index}", f"rank{worker.rank}")


def _kill(agent: Agent, name: str) -> wire.Message:
    for worker in agent.workers.values():
        if worker.running and name in _names(worker):
            worker.blame(table.KILLED_ON_REQUEST)
            worker.signal(signal.SIGKILL)
            return {"killed": worker.member, "pid": worker.pid, "rank": worker.rank}
    raise ConfigError(f"no worker {name!r} is running; `elastic-harness status` lists them")
