"""The messages between the agent, its fork server and the blanks that the server forks."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_harness.contract.codec import Codec

# ---- agent → fork server


@dataclass(frozen=True)
class Preload:
    """Import these modules."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Fork:
    """Fork so many blanks."""

    count: int


TO_FORK_SERVER = Codec({"import": Preload, "fork": Fork})

# ---- fork server → agent


@dataclass(frozen=True)
class Preloaded:
    """The modules are imported. A change of one of these files makes the server stale."""

    files: tuple[tuple[str, int, int], ...]  # path, time of the last change in nanoseconds, bytes


@dataclass(frozen=True)
class UnsafeModule:
    """A module leaves something behind that a forked process must not inherit. The server ends."""

    module: str
    why: str


@dataclass(frozen=True)
class BlankForked:
    """A blank was forked. The agent's end of the connection to it comes with this message."""


@dataclass(frozen=True)
class NotForked:
    """So many blanks could not be forked."""

    count: int
    why: str


FROM_FORK_SERVER = Codec({"ready": Preloaded, "unsafe": UnsafeModule, "blank": BlankForked, "refused": NotForked})

# ---- blank → agent → blank


@dataclass(frozen=True)
class BlankPid:
    """The blank's process id."""

    pid: int


@dataclass(frozen=True)
class BlankOrder:
    """The worker that a blank has to become. The descriptor for its output comes with this message, and then the
    descriptors that `variables` name."""

    command: tuple[str, ...]
    environment: dict[str, str]
    variables: dict[str, tuple[int, ...]]  # name → which of the descriptors, counted after the output's
    niceness: int


BLANK = Codec({"pid": BlankPid, "order": BlankOrder})
