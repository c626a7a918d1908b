"""The requests that a command sends to an agent on the run's control socket. Each answer is a JSON object of its
own."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_harness.contract.codec import Codec


@dataclass(frozen=True)
class GetStatus:
    """Tell what the run does."""


@dataclass(frozen=True)
class StopRun:
    """Stop at the next step boundary, on all nodes."""


@dataclass(frozen=True)
class ScaleRun:
    """Train with that many workers from now on."""

    workers: int


@dataclass(frozen=True)
class DrainNode:
    """Let a node go at a step boundary, while the others go on. "": the node that is asked."""

    node: str


@dataclass(frozen=True)
class AuditRun:
    """Compare all members, state and computing, in the next step. number: of this request, greater than of earlier
    ones."""

    number: int


@dataclass(frozen=True)
class KillWorker:
    """Kill a worker, as a test of recovery."""

    worker: str


COMMANDS = Codec(
    {
        "status": GetStatus,
        "stop": StopRun,
        "scale": ScaleRun,
        "drain": DrainNode,
        "audit": AuditRun,
        "kill": KillWorker,
    },
    tag="command",
)
