"""Named places in the code where a test, or chaos, can make a process of a job fail. Without the environment variable
they cost one lookup.

    ELASTIC_HARNESS_FAILPOINTS="apply.optimizer member=w1-1 step=3 kill; recovery.reported member=w2-* from=9 stop"

Each rule has the name of a place, conditions and an action. The conditions are

    member=   a member's id, or a pattern such as w1-*; a restarted worker is a new member
    step=     in this step alone; from= in this step and all later ones. A place without a step counts as one of the
              newest step that the process has passed elsewhere
    slot=     in this slot alone
    hit=N     from the N-th time on that the process passes the place with the other conditions met (default 1)
    times=N   so many times (default 1)
    once=ID   in no more than one process of the job: the first one writes down under this ID, in the folder that
              ELASTIC_HARNESS_FAULTS names, whom it happened to, and when
    after=ID  once that has happened; until=ID only before
    chance=P  with this probability, drawn from the rest of the rule, member and step

and the actions are those of `ACTIONS`, some of which take a number as in `pause:0.5`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from elastic_harness.contract.variables import FAILPOINTS, FAULTS, MEMBER
from elastic_harness.errors import ConfigError

PLACES = (
    "step.begun",
    "slot.forward",
    "slot.backward",
    "lane.computed",
    "lane.finished",
    "exchange.posted",
    "exchange.partial_sent",
    "exchange.header_sent",
    "exchange.joined_sent",
    "exchange.headers_received",
    "exchange.gathered_sent",
    "exchange.spread_sent",
    "exchange.added_up",
    "exchange.finished",
    "transport.received",
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


# ---- rules


@dataclass
class _Rule:
    place: str
    member: str | None
    step: int | None
    hit: int
    action: str
    first: int | None = None
    slot: int | None = None
    times: int = 1
    once: str = ""
    after: str = ""
    until: str = ""
    chance: float = 1.0
    passed: int = field(default=0, repr=False)
    claimed: bool | None = field(default=None, repr=False)  # whether this is the process of `once`; None: not known yet

    def meets(self, place: str, step: int | None, slot: int | None) -> bool:
        """Whether the rule acts now. Counts the times that the place is passed."""
        if self.place != place or (self.slot is not None and self.slot != slot):
            return False
        if self.step is not None and self.step != step:
            return False
        if self.first is not None and (step is None or step < self.first):
            return False
        if self.after and not os.path.exists(_told(self.after)):
            return False
        if self.until and os.path.exists(_told(self.until)):
            return False
        if self.chance < 1 and random.Random(repr((self, _member(), step))).random() >= self.chance:
            return False
        self.passed += 1
        return self.hit <= self.passed < self.hit + self.times and self._is_here(step, slot)

    def _is_here(self, step: int | None, slot: int | None) -> bool:
        if self.once and self.claimed is None:
            self.claimed = claim(self.once, self.place, self.action, step, slot)
        return self.claimed is not False


def claim(name: str, place: str, action: str, step: int | None = None, slot: int | None = None) -> bool:
    """Write down that a fault happens in this process; False if it has happened elsewhere. Raises ConfigError without
    a folder for that."""
    told = {"id": name, "t": time.time(), "member": _member(), "pid": os.getpid(), "place": place, "action": action}
    path = Path(_told(name))
    if path.exists():
        return False
    whole = path.with_name(f".{name}-{os.getpid()}")
    whole.write_text(json.dumps({**told, "step": step, "slot": slot}))
    try:
        os.link(whole, path)  # one process alone can make it, and nobody sees a part of it
    except FileExistsError:
        return False
    finally:
        whole.unlink()
    return True


def _told(name: str) -> str:
    folder = os.environ.get(FAULTS)
    if not folder:
        raise ConfigError(f"{FAILPOINTS} names a fault {name}; set {FAULTS} to the folder for it as well")
    return os.path.join(folder, f"{name}.json")


def _member() -> str:
    return os.environ.get(MEMBER, "")


_WHOLE = {"step": "step", "from": "first", "slot": "slot", "hit": "hit", "times": "times"}


def _parse(text: str) -> list[_Rule]:
    rules = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        place, *words = part.split()
        if place not in PLACES or not words:
            raise ConfigError(f"{FAILPOINTS}: {part!r} is not 'PLACE [condition …] ACTION' with a place of {PLACES}")
        conditions, given = dict(word.partition("=")[::2] for word in words[:-1]), dict[str, Any]()
        unknown = conditions.keys() - {"member", "once", "after", "until", "chance", *_WHOLE}
        for name, attribute in _WHOLE.items():
            if not conditions.get(name, "1").isdecimal():
                unknown.add(name)
            elif name in conditions:
                given[attribute] = int(conditions[name])
        if not _is_number(conditions.get("chance", "1")):
            unknown.add("chance")
        action = words[-1]
        if unknown or not _is_action(action):
            raise ConfigError(
                f"{FAILPOINTS}: {part!r}: conditions are member=, once=, after=, until=, chance= and, as integers, "
                f"{', '.join(f'{name}=' for name in _WHOLE)}; actions {', '.join(ACTIONS)}, of which pause and spin "
                "take seconds and exit a code, as in pause:0.5"
            )
        given |= {name: conditions[name] for name in ("once", "after", "until") if name in conditions}
        given["chance"] = float(conditions.get("chance", 1))
        rule = _Rule(place, conditions.get("member"), None, 1, action)
        rules.append(replace(rule, **given))
    return rules


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _is_action(text: str) -> bool:
    name, colon, number = text.partition(":")
    return name in ACTIONS and (name in _WITH_A_NUMBER) == bool(colon) and (not colon or _is_number(number))


_RULES: list[_Rule] = []
_newest_step: int | None = None


def arm() -> None:
    """Take the rules of this member from the environment: at import, and again when a forked process has taken the
    environment of a worker."""
    rules = _parse(os.environ.get(FAILPOINTS, ""))
    _RULES[:] = [r for r in rules if r.member is None or fnmatchcase(_member(), r.member)]


def strike(probability: float, after_step: int, action: str) -> None:
    """Let this process fail in a step, from `after_step` on, with this probability in each."""
    rule = _Rule("slot.forward", None, None, 1, action, first=after_step, chance=probability)
    _RULES[:] = [*(known for known in _RULES if known != rule), rule]


def failpoint(place: str, step: int | None = None, slot: int | None = None, values: Any = None) -> None:
    """Fail here if a rule says so. values: what can be damaged here: tensors, bytes that can
    be written, or a function that gives them."""
    global _newest_step
    if not _RULES:
        return
    _newest_step = step if step is not None else _newest_step
    for rule in _RULES:
        if rule.meets(place, _newest_step, slot):
            _act(rule.action, place, step, values)


# ---- actions


def _act(action: str, place: str, step: int | None, values: Any = None) -> None:
    name, _, number = action.partition(":")
    if name != "note":
        os.write(2, f"failpoint {place} (step {step}): {action}\n".encode())
    ACTIONS[name](_Here(place, step, values() if callable(values) else values, float(number or 0)))


@dataclass(frozen=True)
class _Here:
    """Where an action happens, and its number."""

    place: str
    step: int | None
    values: Any
    number: float

    def __str__(self) -> str:
        return f"injected at {self.place}, step {self.step}"


def _sends(number: signal.Signals) -> Callable[[_Here], None]:
    return lambda here: os.kill(os.getpid(), number)


def _crash(here: _Here) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise(here: _Here) -> None:
    raise InjectedError(str(here))


def _hang_up(here: _Here) -> None:
    """Close the connection to the agent, whatever else has a descriptor of it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if _is_link(int(name)):
                with socket.socket(fileno=os.dup(int(name))) as link:
                    link.shutdown(socket.SHUT_RDWR)


def _is_link(descriptor: int) -> bool:
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family == socket.AF_UNIX


def _exhaust(here: _Here) -> None:
    raise MemoryError(str(here))


def _spin(here: _Here) -> None:
    until = time.perf_counter() + here.number
    while time.perf_counter() < until:
        pass


def loop_for_ever(here: _Here) -> None:
    while True:
        pass


def keep_the_lock(here: _Here) -> None:
    """Keep the interpreter's lock in C."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.usleep(600_000_000)


def read_from_nobody(here: _Here) -> None:
    path = os.path.join(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # else to open it would block
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    os.read(descriptor, 1)


def _flip(here: _Here) -> None:
    """Flip one bit: the lowest one of the first byte, or in each tensor the sign of the element farthest from 0."""
    if isinstance(here.values, memoryview):
        here.values[0] ^= 1
        return
    for element in _farthest(here.values):
        element.neg_()


def _make_nan(here: _Here) -> None:
    for element in _farthest(here.values):
        element.fill_(float("nan"))


def _farthest(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the element farthest from 0 of each tensor, as a tensor that shares its memory."""
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            flat = tensor.data.view(-1)
            yield flat[int(flat.abs().argmax())]


def _note(here: _Here) -> None:
    """Write down that this place was passed, for a verdict."""
    path = Path(os.environ[FAULTS]) / f"notes-{_member().replace('/', '.')}.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps([time.time(), here.place, here.step, _member(), here.values]) + "\n")


_WITH_A_NUMBER = ("pause", "spin", "exit")
ACTIONS: dict[str, Callable[[_Here], None]] = {
    "kill": _sends(signal.SIGKILL),
    "stop": _sends(signal.SIGSTOP),
    "terminate": _sends(signal.SIGTERM),
    "interrupt": _sends(signal.SIGINT),
    "abort": lambda here: os.abort(),
    "crash": _crash,
    "exit": lambda here: os._exit(int(here.number)),
    "raise": _raise,
    "exhaust": _exhaust,
    "hang-up": _hang_up,
    "pause": lambda here: time.sleep(here.number),
    "spin": _spin,
    "loop": loop_for_ever,
    "lock": keep_the_lock,
    "read": read_from_nobody,
    "flip": _flip,
    "nan": _make_nan,
    "note": _note,
}
"""What a rule can do. crash: SIGSEGV. exit: without any clean-up. exhaust: MemoryError. hang-up: close the link to the
agent. spin: compute in vain. loop, lock and read never end: in Python, in C with the interpreter's lock, in a read
from a pipe that nobody writes to. flip and nan damage values."""

arm()
