"""The table of codes: each is stable, each failure has exactly one, and each can really be written."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_harness import errors, omissions
from elastic_harness.agent.workers.restarts import failure_code
from elastic_harness.contract.checkpoint_event import ALARMING, alarm
from elastic_harness.exits import Exit, read_exit
from elastic_harness.health import spikes
from elastic_harness.health.waits import Culprit
from elastic_harness.incidents import naming, table
from elastic_harness.incidents.code import FAMILIES, Code
from elastic_harness.incidents.page import troubleshooting
from elastic_harness.runs.events import EventLog, read_events
from elastic_harness.train import nonfinite

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "elastic_harness"
PUBLISHED = {
    "EH-W101": "killed from outside",
    "EH-W102": "ended by a polite signal",
    "EH-W103": "crashed in native code",
    "EH-W104": "a library called abort()",
    "EH-W105": "ended by another signal",
    "EH-W106": "killed on request",
    "EH-W107": "its child was killed",
    "EH-W108": "the machine failed a worker",
    "EH-W109": "a worker could not be started",
    "EH-W110": "a worker sent nonsense",
    "EH-W111": "the run was cut off",
    "EH-H101": "a worker stands still",
    "EH-H102": "a worker was stopped",
    "EH-H103": "a piece of work took too long",
    "EH-H104": "workers wait for each other",
    "EH-H105": "a worker waited in vain",
    "EH-H106": "a worker never called start()",
    "EH-H107": "a worker closed its link and lived on",
    "EH-M101": "ended by the kernel for memory",
    "EH-M102": "memory will be full soon",
    "EH-M103": "memory is nearly full",
    "EH-M104": "a slot ran out of memory, and was tried again",
    "EH-M105": "a slot was left to another worker for memory",
    "EH-M106": "a worker had no memory for a slot",
    "EH-M107": "no worker has the memory for a slot",
    "EH-T101": "a worker is slower than the others",
    "EH-T102": "steps are slower than they were",
    "EH-T103": "steps wait for data",
    "EH-T104": "the disk holds the agent up",
    "EH-T105": "the store answers late",
    "EH-T106": "the wall clock was set",
    "EH-N101": "an update that is not finite was skipped",
    "EH-N102": "slots that are not finite were left out",
    "EH-N103": "a step stands out",
    "EH-N104": "a step that stands out was skipped",
    "EH-N105": "a lower learning rate after a spike",
    "EH-N106": "the run went back before bad numbers",
    "EH-N107": "a policy ended the run",
    "EH-N108": "going back did not help",
    "EH-N109": "a policy of the script spoke",
    "EH-C101": "a worker computes other bits",
    "EH-C102": "committed steps are in doubt",
    "EH-C103": "nobody can say whose bits are right",
    "EH-C104": "bits that do not repeat",
    "EH-C105": "members finished with different weights",
    "EH-C106": "in doubt again at the same place",
    "EH-C107": "no checkpoint from before the doubt",
    "EH-C108": "computed again, other bits",
    "EH-C109": "a rule of the harness is broken",
    "EH-S101": "a checkpoint could not be saved",
    "EH-S102": "the run ended for want of a checkpoint",
    "EH-S103": "a damaged checkpoint was set aside",
    "EH-S104": "a checkpoint that is not whole was passed over",
    "EH-S105": "a checkpoint was repaired",
    "EH-S106": "an upload failed",
    "EH-S107": "the checkpoint writer died",
    "EH-S108": "snapshots in memory were passed over",
    "EH-S109": "copies on other nodes have ended",
    "EH-S110": "snapshots in memory end with the job",
    "EH-S111": "damaged lines in log or ledger",
    "EH-S112": "the trained weights could not be written",
    "EH-S113": "the agent cannot go on",
    "EH-P101": "the cloud takes the machine back",
    "EH-P102": "the node got SIGTERM",
    "EH-P103": "the node was asked to go",
    "EH-P104": "the machine went before a boundary came",
    "EH-P105": "stopped on request",
    "EH-L101": "an exchange broke",
    "EH-L102": "two nodes cannot reach each other",
    "EH-L103": "the store cannot be used",
    "EH-L104": "a value in the store is not ours",
    "EH-L105": "the run waits for workers",
    "EH-L106": "too few workers are left",
    "EH-L107": "workers of another node were lost",
    "EH-U101": "the script raised an error",
    "EH-U102": "the script raised an error in a slot",
    "EH-U103": "a slot fails wherever it is computed",
    "EH-U104": "the script ended with an exit code of its own",
    "EH-U105": "the script ended before the last step",
    "EH-U106": "the script left the loop over the steps",
    "EH-U107": "every worker failed in the script",
    "EH-U108": "the script cannot be imported",
    "EH-U109": "other samples under the same numbers",
    "EH-U110": "the code after training failed",
    "EH-U111": "workers say different things of one version",
    "EH-R101": "a setting is wrong",
    "EH-R102": "a worker does not fit the run",
    "EH-R103": "a node does not fit the run",
}
"""What is in events and pages of users by now. Add to it; never change or remove a line."""

HARMLESS = {
    "audited", "checkpoint_downloaded", "checkpoint_loaded", "checkpoint_saved", "checkpoint_uploaded", "generation",
    "recovery", "run_configured", "run_started", "slot_replayed", "stop_asked", "store_back", "validation",
    "worker_fast_again", "worker_joined", "worker_started", "worker_stopped",
}  # fmt: skip
"""Events that are no failures."""
NAMED_BY_THEIR_WRITER = {"drained", "evicted", "hang", "incident", "waiting"}
"""Events that are written with a code, because their other fields do not tell it."""


def documented_events() -> set[str]:
    """The names in the table of docs/events.md."""
    text = (ROOT / "docs" / "events.md").read_text().partition("## Events")[2].partition("## The ledger")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_codes_and_names_never_change() -> None:
    assert {code.id: code.name for code in table.TABLE.values()} == PUBLISHED
    assert len(PUBLISHED) >= 40


def test_every_row_is_whole() -> None:
    constants = [value for value in vars(table).values() if isinstance(value, Code)]
    assert len(constants) == len({code.id for code in constants}) == len({code.name for code in constants})
    for code in constants:
        assert re.fullmatch(r"EH-[A-Z]1\d\d", code.id) and code.family in FAMILIES, code.id
        for said in (code.symptom, code.meaning, code.evidence, code.inferred, code.done, *code.what_next()):
            assert said.strip() == said != "" and "{" not in said, (code.id, said)
        assert code.meaning.endswith("."), code.id
    assert {code.family for code in constants} == set(FAMILIES)


def test_what_is_known_of_the_place_is_filled_in() -> None:
    told = table.SLOT_FAILED.what_next({"run": "runs/first", "member": "w1-2", "step": 7, "slot": None})
    assert "`elastic-harness logs runs/first w1-2 -n 40`" in told[0]
    assert "`elastic-harness replay runs/first --step 7`" in told[1]
    assert "RUN" in table.KILLED.what_next()[-1]


# ---- every failure has exactly one code


@pytest.mark.parametrize("code", [None, *range(-64, 256)])
def test_every_end_of_a_process_has_a_code(code: int | None) -> None:
    found = naming.of_end(code)
    assert found is naming.of_end(code, oom_kills=0)
    with_oom = naming.of_end(code, oom_kills=1)
    assert with_oom is (table.OUT_OF_MEMORY if read_exit(code) is Exit.KILLED else found)


def test_a_bare_kill_is_no_lack_of_memory() -> None:
    for unknown in (None, 0):
        assert naming.of_end(-signal.SIGKILL, oom_kills=unknown) is table.KILLED
    assert table.KILLED.domain == "unknown"
    assert naming.of_end(-signal.SIGKILL, oom_kills=1) is table.OUT_OF_MEMORY


def test_what_the_agent_did_itself_counts_before_the_exit_code() -> None:
    for known in (table.KILLED_ON_REQUEST, table.STANDS_STILL, table.OTHER_BITS, table.SLOT_FAILED):
        assert naming.of_end(-signal.SIGKILL, known=known, oom_kills=3) is known


def test_who_waits_for_a_culprit_is_none() -> None:
    one_hangs = [Culprit("hangs", ("a",), ("b", "c"))]
    assert naming.of_hang(table.STANDS_STILL, "a", one_hangs) is table.STANDS_STILL
    assert naming.of_hang(table.STANDS_STILL, "b", one_hangs) is table.WAITED_IN_VAIN
    assert naming.of_hang(table.STOPPED, "b", one_hangs) is table.STOPPED
    assert naming.of_hang(table.OVERDUE, "b", one_hangs) is table.OVERDUE
    circle = [Culprit("deadlock", ("a", "b"), ("c",)), Culprit("slow", ("d",), ("e",))]
    found = [naming.of_hang(table.STANDS_STILL, member, circle) for member in "abce"]
    assert found == [table.DEADLOCK, table.DEADLOCK, table.WAITED_IN_VAIN, table.WAITED_IN_VAIN]
    assert naming.of_hang(table.STANDS_STILL, "f", []) is table.STANDS_STILL


def test_policies_are_told_by_their_names() -> None:
    assert (nonfinite.NAME, spikes.NAME, omissions.NAME) == ("nonfinite", "spikes", "omissions")
    assert naming.of_decision("omissions", "skip") is None
    for policy, verdict in itertools.product(("nonfinite", "spikes", "mine"), ("warn", "scale", "skip", "halt")):
        assert naming.of_decision(policy, verdict) is not None


def of_class(kind: type[errors.HarnessError]) -> list[type[errors.HarnessError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in of_class(below))]


@pytest.mark.parametrize("kind", of_class(errors.HarnessError), ids=lambda kind: kind.__name__)
def test_an_error_ends_the_run_with_its_own_exit_code(kind: type[errors.HarnessError]) -> None:
    error = kind.__new__(kind)  # it is told by its class alone
    assert naming.of_error(error).exit_code == error.exit_code


def test_each_exit_code_of_a_run_belongs_to_a_code() -> None:
    ends = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    by_signal = {errors.EXIT_INTERRUPTED, errors.EXIT_TERMINATED}
    assert {code.exit_code for code in table.TABLE.values()} - {None} == ends - {errors.EXIT_SUCCESS} - by_signal | {
        errors.EXIT_TERMINATED
    }


def test_every_event_is_a_failure_with_a_code_or_harmless() -> None:
    known = set(naming._BY_EVENT) | HARMLESS | NAMED_BY_THEIR_WRITER
    in_scripts = {"memory_passed_over", "peer_copy_failed", "keeper_failed"}  # of a CheckpointManager: docs/checkpoints
    assert documented_events() | in_scripts == known
    assert not set(naming._BY_EVENT) & (HARMLESS | NAMED_BY_THEIR_WRITER)
    assert set(naming._BY_EVENT) >= ALARMING


def test_every_event_that_is_written_is_documented() -> None:
    calls = r"(?:\.event|\.emit|LogEvent|[_.]report|[_.]tell|\btell)\(\s*\"(\w+)\""
    written = {name for path in SOURCE.rglob("*.py") for name in re.findall(calls, path.read_text())}
    unwritten_here = {"checkpoint_begun", "snapshot_taken", "peer_copied", "keeping"}  # told to the agent or a script
    assert written - unwritten_here <= documented_events() | {"memory_passed_over", "peer_copy_failed", "keeper_failed"}
    assert len(written) > 30


# ---- every code can be written


def through_events() -> set[Code | None]:
    """All that `of_event` can say."""
    fields: list[dict[str, Any]] = [
        {}, {"severity": "critical"}, {"fatal": True}, {"omitted": "3"}, {"status": "stopped"},
        *({"source": source} for source in ("SIGTERM", "request", "file", "aws", "gcp", "azure")),
        *({"outcome": outcome} for outcome in ("same", "ill", "undecided", "random")),
        *({"kind": kind} for kind in ("memory", "throughput", "data", "disk", "store", "clock")),
    ]  # fmt: skip
    decided = itertools.product(
        ("nonfinite", "spikes", "mine"), ("warn", "scale", "skip", "halt", "rollback"), (1.0, 0.5)
    )
    fields += [{"decisions": [{"policy": p, "verdict": v, "lr_scale": s}]} for p, v, s in decided]
    return {naming.of_event({"event": event, **each}) for event in naming._BY_EVENT for each in fields}


def test_no_code_is_dead() -> None:
    """Each is named where something fails, or comes out of a decision about what was seen."""
    culprits = [Culprit("deadlock", ("a",), ("b",))]
    decided = {naming.of_end(code) for code in range(-64, 256)} | through_events()
    decided |= {naming.of_end(-9, oom_kills=1), failure_code(["killed"])[0]}
    decided |= {naming.of_hang(table.STANDS_STILL, member, culprits) for member in "ab"}
    decided |= {naming.of_error(kind.__new__(kind)) for kind in of_class(errors.InfrastructureError)}
    named = {
        name
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "incidents"
        for name in re.findall(r"\btable\.([A-Z_]+)\b", path.read_text())
    }
    reached = {code.id for code in decided if code} | {getattr(table, name).id for name in named if name != "TABLE"}
    assert reached == set(table.TABLE)


def test_a_failure_gets_its_code_when_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("store_away", error="x")
    log.emit("hang", code="EH-H104")
    log.emit("generation", number=1)
    log.close()
    assert [event.get("code") for event in read_events(tmp_path / "events.jsonl")] == ["EH-L103", "EH-H104", None]


def test_an_event_without_a_code_is_from_an_earlier_version() -> None:
    def code(**event: Any) -> str | None:
        found = naming.of_event({"event": "failure_detected", **event})
        return found.id if found else None

    assert code(signal="SIGKILL", exit_code=None) == "EH-W101"
    assert code(signal="SIGSEGV", exit_code=None) == "EH-W103"
    assert code(signal="signal 77", exit_code=None) == "EH-W105"
    assert code(signal=None, exit_code=2) == "EH-R101"
    assert code(signal="SIGKILL", detected_by="progress deadline") == "EH-H101"
    assert code(signal="SIGKILL", code="EH-Z999") is None, "of a later version"


@pytest.mark.parametrize("event", [*naming._BY_EVENT, "mine"])
@pytest.mark.parametrize("value", [[1], {"a": 1}, 7, None, "x"])
def test_what_a_script_logs_never_ends_the_job(tmp_path: Path, event: str, value: Any) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    names = ("code", "decisions", "outcome", "source", "status", "severity", "signal", "exit_code", "omitted")
    for name in names:
        log.emit(event, **{name: value})
    log.close()
    assert len(list(read_events(tmp_path / "events.jsonl"))) == len(names)


def test_an_alarm_on_the_screen_has_the_code() -> None:
    assert alarm("upload_failed", {"error": "no"}) == "upload failed: no [EH-S106]"
    assert alarm("checkpoint_saved", {}) == ""


def test_the_page_is_made_from_the_table() -> None:
    written = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    assert written == troubleshooting(), "run `make docs`"
    for code in table.TABLE.values():
        assert f"#### {code.id} {code.name}" in written
