"""Which code a failure has, from the evidence alone. Pure.

Advice is no evidence, and neither is a guess: SIGKILL is a lack of memory only if the kernel counted one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_harness import errors
from elastic_harness.exits import Exit, read_exit
from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code

if TYPE_CHECKING:
    from elastic_harness.health.waits import Culprit

_BY_EXIT: Mapping[Exit, Code] = {
    Exit.SUCCESS: table.ENDED_EARLY,
    Exit.ERROR: table.EXITED,
    Exit.CONFIG: table.CONFIG_WRONG,
    Exit.MACHINE: table.MACHINE_FAILED,
    Exit.ABORTED: table.ABORTED,
    Exit.CRASHED: table.CRASHED,
    Exit.ENDED: table.ASKED_TO_END,
    Exit.KILLED: table.KILLED,
    Exit.SIGNAL: table.OTHER_SIGNAL,
    Exit.RELAYED: table.CHILD_KILLED,
}


def of_end(exit_code: int | None, *, known: Code | None = None, oom_kills: int | None = None) -> Code:
    """Return the code of a worker's end. exit_code: negative for a signal. known: what the worker said of itself, or
    why the agent ended it, which counts before its exit code. oom_kills: by how much the out-of-memory counter had
    risen."""
    if known is not None:
        return known
    end = read_exit(exit_code)
    return table.OUT_OF_MEMORY if end is Exit.KILLED and oom_kills else _BY_EXIT[end]


def of_hang(kind: Code, member: str, culprits: Sequence[Culprit]) -> Code:
    """Return the code of a member that was ended for a hang. kind: what the agent saw of it. culprits: at whom the
    chains of waits end, the gravest first. A process that is stopped is that, whoever waits for whom."""
    if kind is table.STOPPED:
        return kind
    for culprit in culprits:
        if member in culprit.members:
            return table.DEADLOCK if culprit.verdict == "deadlock" else kind
    waits = any(member in culprit.waiters for culprit in culprits)
    return table.WAITED_IN_VAIN if waits and kind is table.STANDS_STILL else kind


def of_decision(policy: str, verdict: str, lr_scale: float = 1.0) -> Code | None:
    """Return the code of what an update policy decided; None: it did what the run was told to do."""
    if policy == "omissions":
        return None
    if verdict == "halt":
        return table.POLICY_HALTED
    if verdict == "rollback":
        return table.WENT_BACK
    if policy == "nonfinite":
        return table.NOT_FINITE if verdict == "skip" else table.SLOTS_LEFT_OUT
    if policy == "spikes":
        if lr_scale != 1.0:
            return table.SPIKE_SLOWED
        return table.SPIKE_SKIPPED if verdict == "skip" else table.SPIKE
    return table.OWN_POLICY


def of_error(error: errors.HarnessError) -> Code:
    """Return the code of an error that ends the agent."""
    if isinstance(error, errors.ConfigError):
        return table.CONFIG_WRONG
    if isinstance(error, errors.UserCodeError):
        return table.POLICY_HALTED if isinstance(error, errors.Diverged) else table.SCRIPT_FAILED
    if isinstance(error, errors.CheckpointCorrupt):
        return table.CHECKPOINT_DAMAGED
    return table.RULE_BROKEN if isinstance(error, errors.Inconsistent) else table.AGENT_GAVE_UP


def of_event(event: Mapping[str, Any]) -> Code | None:
    """Return the code of an event; None if it is no failure. An event of an earlier version has no `code` in it: then
    its other fields decide."""
    given = event.get("code")
    if isinstance(given, str):
        return table.TABLE.get(given)
    found = _BY_EVENT.get(event.get("event", ""))
    try:
        return found(event) if callable(found) else found
    except (AttributeError, LookupError, TypeError):  # a script logged its own event under a name of ours
        return None


_ALARMS = {table.MEMORY_FILLS, table.MEMORY_FULL, table.SLOT_RETRIED, table.SLOT_DECLINED}
_ASKED_FOR = {table.PREEMPTED, table.TOLD_TO_GO, table.DRAIN_ASKED, table.STOPPED_ON_REQUEST}


def is_alarm(code: Code) -> bool:
    """Whether nothing ends because of it: it costs time, or may become a failure."""
    return code.family == "T" or code in _ALARMS


def was_asked_for(code: Code) -> bool:
    """Whether somebody told the run or a node to leave, and it did so in order."""
    return code in _ASKED_FOR


_BY_ALARM: Mapping[str, Code] = {
    "throughput": table.STEPS_SLOWER,
    "data": table.DATA_SLOW,
    "disk": table.DISK_SLOW,
    "store": table.STORE_SLOW,
    "clock": table.CLOCK_SET,
}


def _of_alarm(event: Mapping[str, Any]) -> Code:
    if event.get("kind") in _BY_ALARM:
        return _BY_ALARM[event["kind"]]
    return table.MEMORY_FULL if event.get("severity") == "critical" else table.MEMORY_FILLS


def _of_save(event: Mapping[str, Any]) -> Code:
    if event.get("fatal"):
        return table.NOT_SAVED_FATAL
    return table.NOT_UPLOADED if event["event"] == "upload_failed" else table.NOT_SAVED


def _of_drain(event: Mapping[str, Any]) -> Code:
    source = event.get("source")
    if source == "SIGTERM":
        return table.TOLD_TO_GO
    return table.DRAIN_ASKED if source in ("request", "file") else table.PREEMPTED


def _of_recheck(event: Mapping[str, Any]) -> Code | None:
    outcomes = {"ill": table.OTHER_BITS, "undecided": table.UNDECIDED, "random": table.NOT_REPEATABLE}
    return outcomes.get(event.get("outcome", ""))  # the same bits: that is evidence, and no failure


def _of_rollback(event: Mapping[str, Any]) -> Code:
    return table.WENT_BACK if event.get("omitted") else table.IN_DOUBT


def _of_commit(event: Mapping[str, Any]) -> Code | None:
    decisions: Sequence[Mapping[str, Any]] = event.get("decisions") or ()
    codes = [of_decision(d.get("policy", ""), d.get("verdict", ""), d.get("lr_scale") or 1.0) for d in decisions]
    return next((code for code in codes if code is not None), None)


def _of_failure(event: Mapping[str, Any]) -> Code:
    """Return the code of a failure that was written before there were codes, when the kind of a hang and what the
    counter showed were not written with it."""
    if event.get("detected_by") == "progress deadline":
        return table.STANDS_STILL
    name = event.get("signal")
    if isinstance(name, str):
        return of_end(-signal.Signals[name] if name in signal.Signals.__members__ else -signal.SIGRTMIN)
    return of_end(event.get("exit_code"))


def _of_end_of_run(event: Mapping[str, Any]) -> Code | None:
    return table.STOPPED_ON_REQUEST if event.get("status") == "stopped" else None


_BY_EVENT: Mapping[str, Code | Callable[[Mapping[str, Any]], Code | None]] = {
    "alarm": _of_alarm,
    "checkpoint_corrupt": table.CHECKPOINT_DAMAGED,
    "checkpoint_failed": _of_save,
    "checkpoint_passed_over": table.CHECKPOINT_NOT_WHOLE,
    "checkpoint_repaired": table.CHECKPOINT_REPAIRED,
    "checkpoint_writer_died": table.WRITER_DIED,
    "damaged_lines": table.LINES_DAMAGED,
    "drain": _of_drain,
    "exchange_broke": table.EXCHANGE_BROKE,
    "failure_detected": _of_failure,
    "keeper_failed": table.MEMORY_NOT_KEPT,
    "memory_passed_over": table.MEMORY_PASSED_OVER,
    "peer_copy_failed": table.NOT_COPIED,
    "peers_lost": table.PEERS_LOST,
    "recheck": _of_recheck,
    "rollback": _of_rollback,
    "rollback_decided": table.WENT_BACK,
    "run_finished": _of_end_of_run,
    "step_committed": _of_commit,
    "slot_declined": table.SLOT_DECLINED,
    "slot_retried": table.SLOT_RETRIED,
    "store_away": table.STORE_AWAY,
    "store_damaged": table.STORE_DAMAGED,
    "run_cut_off": table.CUT_OFF,
    "unreachable": table.UNREACHABLE,
    "upload_failed": _of_save,
    "worker_not_started": table.NOT_STARTED,
    "worker_slow": table.SLOW,
}
"""Events that are failures by their name, or whose fields decide."""
