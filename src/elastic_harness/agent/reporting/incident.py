"""One incident, one block: what, who, evidence, what was done, what you can do, where the log is. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_harness.contract.messages import Commit, PolicyDecision
from elastic_harness.exits import Exit, read_exit
from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code
from elastic_harness.incidents.naming import of_decision


@dataclass(frozen=True)
class Evidence:
    """The known facts about a worker's end. Nothing here is a guess."""

    member: str
    rank: int | None
    host: str
    pid: int
    lived_s: float
    where: str  # where in its work it was
    place: tuple[int | None, int | None]  # step and slot
    exit_code: int | None  # negative for a signal
    code: Code
    error: str  # of the user's code
    hang: str  # the evidence that it made no progress, in words
    diagnosis: tuple[str, ...]  # what was found out before it was ended for a hang, in lines
    garbled: str  # what was wrong with its messages
    oom_kills: int | None  # by how much the out-of-memory counter had risen
    tail: tuple[str, ...]  # the last lines of its log
    log: str


@dataclass(frozen=True)
class Incident:
    code: Code
    what: str
    who: str
    evidence: tuple[str, ...]
    done: str
    advice: str
    log: str
    member: str | None = None  # None: all members alike
    step: int | None = None
    slot: int | None = None

    def render(self) -> str:
        """Return the block as shown to the user."""
        code = f"{self.code.id} {self.code.name}; domain: {self.code.domain}, try again: {self.code.retry}"
        rows: list[tuple[str, str]] = [("code", code), ("what", self.what), ("who", self.who)]
        rows += [("evidence" if i == 0 else "", line) for i, line in enumerate(self.evidence)]
        rows += [("inferred", self.code.inferred), ("done", self.done), ("you can", self.advice), ("log", self.log)]
        body = "\n".join(f"│ {name:<9} {text}" for name, text in rows if text)
        return f"┌─ incident ───────────────────────────\n{body}\n└──────────────────────────────────────"

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event `incident`."""
        told = {name: value for name, value in vars(self).items() if name != "code"}
        code = self.code
        return {"code": code.id, "domain": code.domain, "retry": code.retry, "inferred": code.inferred, **told}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words."""
    if exit_code is None:
        return "ended in a way that is not known"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"ended with exit code {exit_code}"


def build(facts: Evidence, done: str, advice: str = "") -> Incident:
    """Return the block for one failed worker. A cause is named only where there is evidence for it."""
    evidence: list[str] = []
    end = read_exit(facts.exit_code)
    if facts.hang:
        overdue = facts.code is table.OVERDUE
        what = f"worker {facts.member} {'was ended' if overdue else 'hung'}: {facts.hang}"
        evidence += [*facts.diagnosis, "the agent ended it with SIGKILL after its progress deadline"]
        if overdue:
            evidence.append("the next worker at this step has longer, elastic.progress_timeout_factor times as long")
            advice = advice or "if such work is to be expected, raise elastic.progress_timeout_min_s"
        advice = advice or "if this repeats at the same place, look for a deadlock or slow storage in the log"
    elif facts.garbled:
        what = f"worker {facts.member} sent {facts.garbled}"
        evidence.append("the agent ended it with SIGKILL: nothing that it says counts after that")
        advice = advice or (
            "use one version of elastic_harness everywhere, and write nothing into descriptors that a worker inherits"
        )
    elif facts.error:
        what = f"worker {facts.member} failed: {facts.error}"
        evidence.append(describe_exit(facts.exit_code))
        advice = advice or "fix the error in the training script; the traceback is in the log"
    else:
        what = f"worker {facts.member} {describe_exit(facts.exit_code)}"
    if facts.code is table.KILLED_ON_REQUEST:
        evidence.append("`elastic-harness kill` asked for it")
    elif not facts.hang and not facts.garbled and facts.exit_code is not None and end.by_signal:
        evidence.append(_signal_evidence(-facts.exit_code, facts.oom_kills))
        if facts.oom_kills:
            advice = advice or "use less memory per worker (fewer workers, smaller micro-batch), or raise the limit"
        elif end in (Exit.CRASHED, Exit.ABORTED):
            advice = advice or "a native library crashed; faulthandler (PYTHONFAULTHANDLER=1) shows where"
    elif end is Exit.SUCCESS:
        evidence.append("it ended without an error, but before the last step")
        advice = advice or 'let the loop over run.steps() run to its end; to end the run early call run.stop("why")'
    if facts.tail:
        evidence.append("last lines of its log:")
        evidence += [f"  {line}" for line in facts.tail]
    else:
        evidence.append("it wrote nothing to its log")
    rank = "no rank yet" if facts.rank is None else f"rank {facts.rank}"
    who = f"{rank}, host {facts.host}, pid {facts.pid}, {facts.lived_s:.1f} s after its start"
    who += f", {facts.where}" if facts.where else ""
    return Incident(facts.code, what, who, tuple(evidence), done, advice, facts.log, facts.member, *facts.place)


def policy_decision(commit: Commit, decision: PolicyDecision, ledger: str) -> Incident:
    """Return the block for a committed step of which a policy has something to say."""
    norm = "" if commit.grad_norm is None else f", norm of the gradient {commit.grad_norm}"
    evidence = [f"loss of the step {commit.loss}{norm}"]
    evidence += [in_words(decision.evidence)] if decision.evidence else []
    evidence += [f"  slot {slot} read the samples {samples}" for slot, samples in commit.bad_samples.items()]
    done = {
        "warn": "the update was applied as it is",
        "scale": f"the gradient was multiplied by {decision.scale:g} before it was clipped, and the learning rate by "
        f"{decision.lr_scale:g} for this step",
        "skip": "weights, optimizer, buffers and moving average stay as they were; data and learning rate go on",
        "halt": "weights, optimizer, buffers and moving average stay as they were; the job stops",
    }
    return Incident(
        of_decision(decision.policy, decision.verdict, decision.lr_scale) or table.OWN_POLICY,
        decision.in_words(commit.step),
        f"all members alike: the policy {decision.policy} decides it from the summed gradient and the losses",
        tuple(evidence),
        done[decision.verdict],
        "look at the data of this step and at the learning rate, if it happens again",
        ledger,
        step=commit.step,
        slot=int(next(iter(commit.bad_samples))) if commit.bad_samples else None,
    )


def policy_rollback(version: int, reason: str, omitted: str, in_all: str, ledger: str) -> Incident:
    """Return the block for a run that goes back because a policy wants that."""
    return Incident(
        table.WENT_BACK,
        f"the run goes back to version {version} or before",
        "all members alike: a policy decides it from the summed gradient and the losses",
        (reason,),
        f"all workers are started again from the newest checkpoint that fits, and omit {omitted} (STEPS/SLOTS)",
        f"look at the data of these steps; a run with training.omit={in_all!r} from the start ends with the same bits",
        ledger,
    )


def rollback(version: int, reason: str, ledger: str) -> Incident:
    """Return the block for a run that goes back because what it did is in doubt."""
    return Incident(
        table.IN_DOUBT,
        f"what the run did since version {version} is in doubt",
        "all members: wrong bits may be in the sums that each of them has applied",
        (reason,),
        f"the run goes back to a checkpoint of version {version} or before; all workers are started again",
        "if it happens again, check the machines' memory with `elastic-harness burn-in`, and that the script does the "
        "same on every worker",
        ledger,
    )


def in_words(evidence: Mapping[str, Any]) -> str:
    """Return names and values in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in evidence.items())


def _signal_evidence(number: int, oom_kills: int | None) -> str:
    name = signal_name(number)
    if number != signal.SIGKILL:
        return f"{name}; the kernel does not record who sent it or why"
    if oom_kills is None:
        return f"{name}; by whom is unknown (no out-of-memory counter can be read here)"
    if oom_kills:
        return f"{name}; the control group's out-of-memory counter rose by {oom_kills}: the kernel ended it for memory"
    return f"{name}; by whom is unknown; the control group's out-of-memory counter did not rise"
