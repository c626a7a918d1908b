"""Named places in the code where a test can make a worker fail. Without the environment variable they cost one lookup.

    ELASTIC_HARNESS_FAILPOINTS="apply.optimizer member=w1-1 step=3 kill; recovery.reported member=w2-1 hit=2 stop"

Each rule has the name of a place, conditions and an action. The conditions are `member=`, `step=` and `hit=N`: act the
N-th time that the place is reached with the other conditions met (default 1). The actions are `kill` (SIGKILL), `stop`
(SIGSTOP), `raise`, `exhaust` (MemoryError) and `pause:SECONDS`. A worker ignores rules with another member's id. So a
restarted worker, which is a new member, does not fail again.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from elastic_harness.contract.variables import FAILPOINTS, MEMBER
from elastic_harness.errors import ConfigError

PLACES = (
    "slot.forward",
    "slot.backward",
    "lane.finished",
    "exchange.posted",
    "exchange.partial_sent",
    "exchange.header_sent",
    "exchange.joined_sent",
    "exchange.headers_received",
    "exchange.gathered_sent",
    "exchange.spread_sent",
    "exchange.finished",
    "recheck.computed",
    "validation.batch",
    "validation.computed",
    "measured.told",
    "measured.known",
    "audit.blocks_sent",
    "audit.added_up",
    "rollback.decided",
    "apply.gradients",
    "apply.optimizer",
    "apply.skipped",
    "apply.finished",
    "recovery.released",
    "recovery.reported",
    "recovery.rebuilt",
    "recovery.reconciled",
    "recovery.receiving",
    "recovery.serving",
    "recovery.finished",
    "checkpoint.begun",
    "checkpoint.copying",
    "checkpoint.copied",
    "checkpoint.hashing",
    "checkpoint.sealed",
    "checkpoint.peer_copying",
    "checkpoint.writing",
    "checkpoint.syncing",
    "checkpoint.described",
    "checkpoint.renaming",
    "checkpoint.written",
    "checkpoint.pruning",
    "checkpoint.pruned",
    "checkpoint.uploading",
    "checkpoint.uploaded",
    "finish.saved",
    "finish.sent",
    "leave.began",
)


class InjectedError(RuntimeError):
    """The error of the `raise` action."""


@dataclass
class _Rule:
    place: str
    member: str | None
    step: int | None
    hit: int
    action: str
    passed: int = 0


def _parse(text: str) -> list[_Rule]:
    rules = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        place, *words = part.split()
        if place not in PLACES or not words:
            raise ConfigError(f"{FAILPOINTS}: {part!r} is not 'PLACE [condition …] ACTION' with a place of {PLACES}")
        conditions = dict(word.partition("=")[::2] for word in words[:-1])
        unknown = conditions.keys() - {"member", "step", "hit"}
        unknown |= {name for name in ("step", "hit") if not conditions.get(name, "1").isdecimal()}
        action = words[-1]
        if unknown or not (action in ("kill", "stop", "raise", "exhaust") or action.startswith("pause:")):
            raise ConfigError(
                f"{FAILPOINTS}: {part!r}: conditions are member=, step=, hit=; actions kill, stop, raise, exhaust, "
                "pause:S"
            )
        step = int(conditions["step"]) if "step" in conditions else None
        rules.append(_Rule(place, conditions.get("member"), step, int(conditions.get("hit", 1)), action))
    return rules


_RULES: list[_Rule] = []


def arm() -> None:
    """Take the rules of this member from the environment: at import, and again when a forked process has taken the
    environment of a worker."""
    member = os.environ.get(MEMBER, "")
    _RULES[:] = [r for r in _parse(os.environ.get(FAILPOINTS, "")) if r.member in (None, member)]


arm()


def failpoint(place: str, step: int | None = None) -> None:
    """Fail here if a rule says so."""
    if not _RULES:
        return
    for rule in _RULES:
        if rule.place != place or (rule.step is not None and rule.step != step):
            continue
        rule.passed += 1
        if rule.passed == rule.hit:
            _act(rule.action, place, step)


def _act(action: str, place: str, step: int | None) -> None:
    os.write(2, f"failpoint {place} (step {step}): {action}\n".encode())
    if action == "raise":
        raise InjectedError(f"injected at {place}, step {step}")
    if action == "exhaust":
        raise MemoryError(f"injected at {place}, step {step}")
    if action.startswith("pause:"):
        time.sleep(float(action.removeprefix("pause:")))
        return
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
