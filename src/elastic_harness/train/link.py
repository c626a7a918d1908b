"""A worker's line to its coordinator: hears of generations, reports progress, passes small values.

`AgentLink` talks to the agent over the inherited socket; `standalone.StandaloneLink` plays the agent for a worker
that has none. One background thread receives; it never touches training state: all it does is record what was said
and, for an urgent change, break the transport's connections so that the main thread wakes up.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from elastic_harness.contract import wire
from elastic_harness.contract.codec import Unknown
from elastic_harness.contract.messages import (
    PROTOCOL,
    TO_AGENT,
    TO_WORKER,
    AllDone,
    AuditAsked,
    EndAsked,
    GetValue,
    Hello,
    Leave,
    LeftOut,
    Paused,
    Refusal,
    SetValue,
    Value,
)
from elastic_harness.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, GenerationChanged
from elastic_harness.membership.types import Digest, Generation, Report
from elastic_harness.train.heard import Heard


class Left(BaseException):
    """The coordinator let this worker go: the job is done, it was removed, or asked to stop. Not an error."""

    def __init__(self, reason: str, *, done: bool = False, save: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.done = done
        self.save = save  # a checkpoint was asked for, and there is no generation whose rank 0 would write it


class Link(Protocol):
    """What the training loop needs from a coordinator. `announced` is the newest generation heard of."""

    member: str
    wake: Callable[[], None]  # breaks the transport: whoever waits in it hears the news; set by `recovery._meet`
    leave_asked: Leave | None  # by whoever runs the job
    end_asked: EndAsked | None  # by the script, here or elsewhere
    audit_asked: int  # the number of the newest request to compare all members; 0: none

    def hello(self, fingerprint: dict[str, Any], max_steps: int, deadline_max_s: float) -> None: ...
    def next_generation(self, after: int, *, boundary: bool, formed: bool) -> Generation: ...
    def urgent(self, current: int) -> bool: ...
    def planned(self, current: int) -> int: ...
    def report(self, report: Report) -> None: ...
    def digest(self, generation: int) -> Digest: ...
    def kv_set(self, generation: int, key: str, value: bytes) -> None: ...
    def kv_get(self, generation: int, key: str) -> bytes: ...
    def send(self, message: object) -> None: ...
    def left_out(self, generation: Generation) -> None: ...
    def ask_to_stop(self, asked: EndAsked) -> None: ...
    def close(self) -> None: ...


class AgentLink:
    """The line to an agent. All waits end when a newer urgent generation is announced (`GenerationChanged`)."""

    def __init__(self, descriptor: int, member: str) -> None:
        self.member = member
        self.wake: Callable[[], None] = lambda: None
        self.leave_asked: Leave | None = None
        self.end_asked: EndAsked | None = None
        self.audit_asked = 0
        self._sock = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._channel = wire.Channel(self._sock)
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._heard = Heard()
        self._digests: dict[int, Digest] = {}
        self._values: dict[tuple[int, str], bytes] = {}
        self._done = False
        threading.Thread(target=self._listen, name="agent-link", daemon=True).start()

    # ---- what the coordinator said

    def _listen(self) -> None:
        while True:
            try:
                message = TO_WORKER.unpack(self._channel.receive())
            except wire.Closed:
                os._exit(0)  # the agent is gone, and with it the node: never train on as an orphan
            except Unknown:
                continue
            except wire.Malformed as error:
                os.write(2, f"elastic-harness: the agent sent {error}; use the same version for both\n".encode())
                os._exit(EXIT_INFRASTRUCTURE)
            try:
                with self._changed:
                    self._note_message(message)
                    self._changed.notify_all()
            except BaseException:  # thread boundary: without this thread the worker would wait for ever
                traceback.print_exc()
                os._exit(EXIT_INFRASTRUCTURE)

    def _note_message(self, message: object) -> None:
        """Note what the agent said. Urgent news break the transport, so that the main thread leaves its exchange."""
        match message:
            case Generation():
                self._heard = self._heard.announced(message)
                if message.urgent:
                    self.wake()
            case Paused():
                self._heard = self._heard.told_to_pause()
                self.wake()
            case Digest():
                self._digests = {message.generation: message}
            case Value(generation, key, value):
                self._values[generation, key] = base64.b64decode(value)
            case Leave():
                self.leave_asked = message
            case EndAsked():
                self.end_asked = message.or_earlier(self.end_asked)
            case AuditAsked(number):
                self.audit_asked = number
            case AllDone():
                self._done = True
            case Refusal(reason):
                os.write(2, f"elastic-harness: this worker was refused: {reason}\n".encode())
                os._exit(EXIT_CONFIG)

    def urgent(self, current: int) -> bool:
        """Whether generation `current` must not go on."""
        return self._heard.urgent(current)

    def planned(self, current: int) -> int:
        """The newest generation announced after `current`, else `current`."""
        return self._heard.planned(current)

    def next_generation(self, after: int, *, boundary: bool, formed: bool) -> Generation:
        """The newest generation beyond `after`; blocks, without limit, until the coordinator announces one that counts
        (see `Heard.next`). Raises `Left` when the job is done or was asked to stop."""
        with self._changed:
            while True:
                generation = self._heard.next(self.member, after, boundary=boundary, formed=formed)
                if generation is not None:
                    self._values = {k: v for k, v in self._values.items() if k[0] >= generation.number}
                    return generation
                if self._done:
                    raise Left("done", done=True)
                paused = self._heard.paused
                if self.leave_asked is not None and (boundary or paused):
                    raise Left(self.leave_asked.reason, save=paused and self.leave_asked.checkpoint)
                self._changed.wait()

    def digest(self, generation: int) -> Digest:
        """The leader's conclusion for `generation`; blocks until published. Raises GenerationChanged."""
        with self._changed:
            while generation not in self._digests:
                self._check(generation)
                self._changed.wait()
            self._check(generation)
            return self._digests[generation]

    def kv_get(self, generation: int, key: str) -> bytes:
        """A value another member set in this generation; blocks until it is there. Raises GenerationChanged."""
        self.send(GetValue(generation, key))
        with self._changed:
            while (generation, key) not in self._values:
                self._check(generation)
                self._changed.wait()
            return self._values[generation, key]

    def _check(self, generation: int) -> None:
        if self._heard.urgent(generation):
            raise GenerationChanged(f"generation {generation} is void")

    # ---- what this worker says

    def send(self, message: object) -> None:
        """Send one message; does not wait for an answer. The process ends if the agent is gone."""
        with self._send_lock:
            try:
                self._channel.send(TO_AGENT.pack(message))
            except wire.Closed:
                os._exit(0)

    def hello(self, fingerprint: dict[str, Any], max_steps: int, deadline_max_s: float) -> None:
        self.send(Hello(PROTOCOL, fingerprint, max_steps, deadline_max_s))

    def report(self, report: Report) -> None:
        self.send(report)

    def kv_set(self, generation: int, key: str, value: bytes) -> None:
        self.send(SetValue(generation, key, base64.b64encode(value).decode()))

    def left_out(self, generation: Generation) -> None:
        """This member is not part of a generation: it leaves, and says so, for the next one may want it again. If its
        node was asked to stop, it saves."""
        self.send(LeftOut(generation.number))
        stop = self.leave_asked
        reason = f"not a member of generation {generation.number} ({generation.reason})"
        raise Left(reason, save=stop is not None and stop.checkpoint)

    def ask_to_stop(self, asked: EndAsked) -> None:
        """Ask for the end of the run after a step, and tell the agent, which tells the others."""
        with self._changed:
            self.end_asked = asked.or_earlier(self.end_asked)
        self.send(asked)

    def close(self) -> None:
        """Nothing: the line is the process's own, and its end is how the agent learns that this worker is gone."""


class GenerationValues:
    """The link's key-value space of one generation, as a rendezvous needs it."""

    def __init__(self, link: Link, generation: int) -> None:
        self._link = link
        self._generation = generation

    def set(self, key: str, value: bytes) -> None:
        self._link.kv_set(self._generation, key, value)

    def get(self, key: str) -> bytes:
        return self._link.kv_get(self._generation, key)


def cancelled_by(link: Link, generation: int) -> Callable[[float], None]:
    """A wait that raises GenerationChanged as soon as the generation is void."""

    def wait(seconds: float) -> None:
        if link.urgent(generation):
            raise GenerationChanged(f"generation {generation} is void")
        if seconds > 0:
            time.sleep(seconds)

    return wait
