"""Exceptions, grouped by what the caller does about them, and their exit codes.

HarnessError
├── ConfigError            fix the configuration            exit 2
├── UserCodeError          fix the training script          exit 1
│   ├── Diverged           fix the data or the settings     exit 1
│   └── OutOfMemory        use less memory                  exit 1
├── InfrastructureError    look at the machine              exit 4
│   ├── CheckpointCorrupt  load an older checkpoint
│   └── Inconsistent       report it: our own rules are broken
└── Recoverable            handled inside the training loop, never seen by user code
    ├── PeerFailed         a peer or the link to it broke during a collective
    │   └── Unreachable    the network between here and some peers is cut
    ├── Declined           this worker has not the memory for a slot
    └── GenerationChanged  the membership moved on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LESS_MEMORY = (
    "Use less memory for a slot: shorter samples, activation checkpointing, or in a new run (--from this one) a "
    "smaller training.micro_batch_samples, which makes more and smaller slots of the same batch"
)
EXIT_SUCCESS = 0
EXIT_USER_CODE = 1
EXIT_CONFIG = 2
EXIT_TOO_FEW_WORKERS = 3
EXIT_INFRASTRUCTURE = 4
EXIT_OTHER_BITS = 5  # of replay, burn-in and audit
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class HarnessError(Exception):
    """The base of all errors that this package raises on purpose."""

    exit_code = EXIT_INFRASTRUCTURE


class ConfigError(HarnessError):
    """The configuration or the command line is wrong. The message names the key, the value and what is allowed."""

    exit_code = EXIT_CONFIG


class UserCodeError(HarnessError):
    """The training script failed in a way that another worker would repeat."""

    exit_code = EXIT_USER_CODE


class Diverged(UserCodeError):
    """Training makes no progress: the updates of many steps in a row were not finite."""


class OutOfMemory(UserCodeError):
    """This worker has not the memory for a slot, not even after everything was freed that can be."""

    def __init__(self, step: int, slot: int, samples: Sequence[int], cause: str) -> None:
        super().__init__(
            f"there is not enough memory for slot {slot} of step {step}: {cause}; its samples are {list(samples)}. "
            f"{LESS_MEMORY}"
        )
        self.step, self.slot, self.samples = step, slot, tuple(samples)
        self.cause = f"out of memory: {cause}"


class InfrastructureError(HarnessError):
    """The machine, the disk or the network failed, and the harness could not work around it."""

    exit_code = EXIT_INFRASTRUCTURE


class CheckpointCorrupt(InfrastructureError):
    """A checkpoint's bytes do not match its manifest."""


class Inconsistent(InfrastructureError):
    """An invariant is broken that must hold whatever fails: by a bug of ours, or by memory that changed. To go on could
    mean to train on wrong numbers, so the run stops. This is no `assert`, because PYTHONOPTIMIZE would remove it."""


class Recoverable(HarnessError):
    """Is raised and caught inside the training loop, and leads to a recovery."""


class PeerFailed(Recoverable):
    """A collective broke: a peer died, the gate refused the step, or this worker broke the group because it heard of a
    newer generation. `peers` are the members that it was waiting for, as far as known. A transport knows only their
    `ranks`. Code that knows the members calls `name`."""

    def __init__(self, message: str, peers: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers
        self.ranks = ranks

    def name(self, members: Sequence[str]) -> None:
        """Fill in `peers` from `ranks`."""
        self.peers = self.peers or tuple(members[rank] for rank in self.ranks)


class Unreachable(PeerFailed):
    """No packet comes from these ranks, as the kernel says. The ranks need not have done anything wrong. `ways`: for
    each rank its address, and how the kernel shows it."""

    def __init__(self, ways: Mapping[int, str]) -> None:
        told = ", ".join(f"rank {rank} at {way}" for rank, way in sorted(ways.items()))
        super().__init__(f"the network is cut to {told}", ranks=tuple(sorted(ways)))
        self.ways = dict(sorted(ways.items()))


class Declined(Recoverable):
    """This worker has not the memory for a slot. Another one is to compute the slot's lane."""

    def __init__(self, lane: int, cause: OutOfMemory) -> None:
        super().__init__(cause.cause)
        self.lane, self.slot, self.samples = lane, cause.slot, cause.samples


class GenerationChanged(Recoverable):
    """A newer generation was announced. Everything that belongs to the old one is void."""
