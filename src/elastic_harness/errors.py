"""Exceptions, grouped by what the caller does about them, and the exit codes they map to.

HarnessError
├── ConfigError            fix the configuration            exit 2
├── UserCodeError          fix the training script          exit 1
│   └── Diverged           fix the data or the settings     exit 1
├── InfrastructureError    look at the machine              exit 4
│   ├── CheckpointCorrupt  load an older checkpoint
│   └── Inconsistent       report it: our own rules are broken
└── Recoverable            handled inside the training loop, never seen by user code
    ├── PeerFailed         a peer or the link to it broke during a collective
    │   └── Unreachable    the network between here and some peers is cut
    └── GenerationChanged  the membership moved on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXIT_SUCCESS = 0
EXIT_USER_CODE = 1
EXIT_CONFIG = 2
EXIT_TOO_FEW_WORKERS = 3
EXIT_INFRASTRUCTURE = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class HarnessError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = EXIT_INFRASTRUCTURE


class ConfigError(HarnessError):
    """The configuration or the command line is wrong; the message names the key, the value and what is allowed."""

    exit_code = EXIT_CONFIG


class UserCodeError(HarnessError):
    """The training script failed in a way that another worker would repeat."""

    exit_code = EXIT_USER_CODE


class Diverged(UserCodeError):
    """Training does not get on: the updates of many steps in a row were not finite."""


class InfrastructureError(HarnessError):
    """The machine, the disk or the network failed in a way the harness could not work around."""

    exit_code = EXIT_INFRASTRUCTURE


class CheckpointCorrupt(InfrastructureError):
    """A checkpoint's bytes do not match its manifest."""


class Inconsistent(InfrastructureError):
    """What must hold whatever fails does not: a bug of ours, or memory that changed. Going on could train on wrong
    numbers, so nobody does. It is no `assert`, which PYTHONOPTIMIZE would take out."""


class Recoverable(HarnessError):
    """Raised and caught inside the training loop; leads to a recovery."""


class PeerFailed(Recoverable):
    """A collective broke: a peer died, the gate refused the step, or this worker broke the group because of newer news.
    `peers` are the members it was waiting for, as far as known. A transport knows their `ranks`;
    whoever knows the members calls `name`."""

    def __init__(self, message: str, peers: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers
        self.ranks = ranks

    def name(self, members: Sequence[str]) -> None:
        """Fill in `peers`."""
        self.peers = self.peers or tuple(members[rank] for rank in self.ranks)


class Unreachable(PeerFailed):
    """The kernel itself says so: no packet comes from these ranks, which need not have done anything wrong. `ways`: for
    each of them its address, and how it shows."""

    def __init__(self, ways: Mapping[int, str]) -> None:
        told = ", ".join(f"rank {rank} at {way}" for rank, way in sorted(ways.items()))
        super().__init__(f"the network is cut to {told}", ranks=tuple(sorted(ways)))
        self.ways = dict(sorted(ways.items()))


class GenerationChanged(Recoverable):
    """A newer generation was announced; whatever belongs to the old one is void."""
