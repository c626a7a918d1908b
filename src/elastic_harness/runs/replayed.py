"""Recorded steps that are computed again: what a run that does so is told (`replay.json`), and what came out otherwise.

A replay is a run in a folder of its own, which holds a checkpoint of the recorded run. Nobody trains with its result.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, shape
from elastic_harness.errors import InfrastructureError
from elastic_harness.omissions import Entry
from elastic_harness.runs.ledger import LedgerLine

FILE = "replay.json"
SLOT_REPLAYED = "slot_replayed"  # the event that tells of `ReplayOrder.slot`


@dataclass(frozen=True)
class ReplayOrder:
    """What a replay computes."""

    run: str  # the recorded run's folder
    first: int  # the version that it begins with
    step: int  # the last step
    slot: int | None  # of that step, computed once more by itself
    fingerprint: dict[str, Any]  # of the recorded run
    omissions: tuple[Entry, ...] = ()  # of its rollbacks
    slots: tuple[tuple[int, int], ...] = ()  # (step, slots) where their number changes, if it follows the workers

    def write(self, folder: Path) -> None:
        durable_file.write(folder / FILE, json.dumps(asdict(self), indent=1).encode() + b"\n")


def read(folder: Path) -> ReplayOrder | None:
    """Return what the run in this folder computes again; None if it is a run like any other. Raises
    InfrastructureError if the file is damaged."""
    try:
        return shape.build(ReplayOrder, shape.parse_object((folder / FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"{folder / FILE} cannot be read ({error}); the folder belongs to a replay, which can be removed"
        ) from error


@dataclass(frozen=True)
class StepDifference:
    """One fact of a step that came out otherwise. slots: those that it is about; none: the whole step."""

    fact: str
    recorded: Any  # of several slots a list
    computed: Any
    slots: tuple[int, ...] = ()
    members: tuple[str, ...] = ()  # who computed these slots when it was recorded
    members_now: tuple[str, ...] = ()  # and again

    def __str__(self) -> str:
        if not self.slots:
            return f"{self.fact}: recorded {self.recorded!r}, computed {self.computed!r}"
        several = f"slots {', '.join(map(str, self.slots[:8]))}{', …' * (len(self.slots) > 8)}"
        named = several if len(self.slots) > 1 else f"slot {self.slots[0]}"
        then, now = ", ".join(self.members), ", ".join(self.members_now)
        return f"{self.fact} of {named}, computed by {then} when it was recorded, by {now} now"


def differences(recorded: LedgerLine, computed: LedgerLine) -> list[StepDifference]:
    """Return what of a step differs, to the bit. Facts that an earlier version did not record are not compared. Who
    computed what may differ."""
    found = []
    for name, fact in _OF_THE_STEP.items():
        pair = getattr(recorded, name), getattr(computed, name)
        same = pair[0] == pair[1] or (name == "gradient" and "" in pair)
        if not (_same_number(*pair) if name == "loss" else same):
            found.append(StepDifference(fact, *pair))
    if (recorded.slots, recorded.lanes) != (computed.slots, computed.lanes):
        return found
    for name, fact in _OF_A_SLOT.items():
        before, now = getattr(recorded, name), getattr(computed, name)
        slots = _differing(before, now)
        if slots:
            members = (recorded.members_of_all(slots), computed.members_of_all(slots))
            found.append(StepDifference(fact, [before[s] for s in slots], [now[s] for s in slots], slots, *members))
    return found


_OF_THE_STEP = {
    "slots": "number of slots",
    "lanes": "number of lanes",
    "epoch": "epoch",
    "position": "position in the data",
    "count": "number of samples",
    "loss": "loss",
    "gradient": "hash of the gradient",
    "skipped": "why the update was skipped",
}
_OF_A_SLOT = {"slot_samples": "samples", "slot_weight": "weight", "slot_losses": "loss"}


def _same_number(recorded: float, computed: float) -> bool:
    """Return whether two numbers have the same bits. All NaNs are one."""
    return struct.pack("<d", recorded) == struct.pack("<d", computed) or (recorded != recorded and computed != computed)


def _differing(recorded: Sequence[Any], computed: Sequence[Any]) -> tuple[int, ...]:
    """Return the slots whose values differ; none if one of the two was not recorded."""
    if not recorded or not computed:
        return ()
    return tuple(slot for slot, pair in enumerate(zip(recorded, computed, strict=True)) if pair[0] != pair[1])
