"""The ledger: for every committed step, which samples it consumed and who computed them.

One JSON object a line, appended by the agent. A line is written once per (lineage, step), whoever reports it
and however often; a restored run opens a new lineage, whose lines supersede those of older lineages from its
first step on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from elastic_harness.errors import InfrastructureError
from elastic_harness.shape import WHOLE_MAX, parse

FILE_NAME = "ledger.jsonl"


class LedgerError(InfrastructureError):
    """The ledger file cannot be read as a ledger; the message names file and line."""


@dataclass(frozen=True)
class LedgerLine:
    """One committed step as the ledger records it.

    `computed_by` holds (member, first lane, one past the last lane). `slot_samples` holds, per slot, the
    first eight bytes (hexadecimal) of sha256 over the little-endian int64 sample ids that were read for it.
    """

    lineage: int
    from_step: int
    step: int
    generation: int
    world_size: int
    epoch: int
    position: int
    count: int
    slots: int
    lanes: int
    computed_by: tuple[tuple[str, int, int], ...]
    slot_samples: tuple[str, ...]
    slot_weight: tuple[float, ...]
    loss: float

    @property
    def key(self) -> tuple[int, int]:
        return (self.lineage, self.step)

    @staticmethod
    def from_json(record: Mapping[str, Any], where: str = "ledger line") -> LedgerLine:
        """The typed line of a JSON object; LedgerError names a missing or mistyped field."""
        missing = [name for name in _FIELD_NAMES if name not in record]
        if missing:
            raise LedgerError(f"{where}: field {missing[0]!r} is missing; it holds {sorted(record)}")
        integers: dict[str, int] = {}
        for name in _INTEGERS:
            value = record[name]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < WHOLE_MAX:
                raise LedgerError(f"{where}: {name} is {value!r}; it must be an integer of at least 0, below 2**63")
            integers[name] = value
        try:
            return LedgerLine(
                **integers,
                computed_by=tuple((str(member), int(low), int(high)) for member, low, high in record["computed_by"]),
                slot_samples=tuple(str(digest) for digest in record["slot_samples"]),
                slot_weight=tuple(float(weight) for weight in record["slot_weight"]),
                loss=float("nan") if record["loss"] is None else float(record["loss"]),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise LedgerError(
                f"{where}: computed_by, slot_samples, slot_weight or loss has the wrong shape ({error})"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads back."""
        return asdict(self)


_FIELD_NAMES = tuple(field.name for field in fields(LedgerLine))
_INTEGERS = tuple(field.name for field in fields(LedgerLine) if field.type in (int, "int"))


class LedgerWriter:
    """Appends each (lineage, step) once, also across restarts of the process that writes.

    Opening an existing file reads the keys it holds and cuts away a torn last line, the trace of a crash.
    A line is handed to the operating system before `append` returns; `fsync` makes all of them durable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        lines, whole_bytes, _ = _scan(self.path)
        self._keys: set[tuple[int, int]] = {line.key for line in lines}
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self._descriptor).st_size > whole_bytes:
            os.ftruncate(self._descriptor, whole_bytes)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, record: LedgerLine | Mapping[str, Any]) -> bool:
        """True if written, False if this (lineage, step) is already there. A failed write leaves no trace."""
        line = record if isinstance(record, LedgerLine) else LedgerLine.from_json(record)
        if line.key in self._keys:
            return False
        data = json.dumps(line.to_json(), separators=(",", ":")).encode() + b"\n"
        size_before = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            os.ftruncate(self._descriptor, size_before)
            raise
        self._keys.add(line.key)
        return True

    def fsync(self) -> None:
        """Everything appended so far survives a power cut once this returns."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True)
class Ledger:
    """A ledger as read: all lines in file order, and whether a torn last line was left out."""

    path: Path
    lines: tuple[LedgerLine, ...]
    torn: bool

    @property
    def lineage(self) -> int:
        """The newest lineage that has a line (0 for an empty ledger)."""
        return max((line.lineage for line in self.lines), default=0)

    def followed(self) -> dict[int, LedgerLine]:
        """Step → line along the last lineage: lineage k replaces all older lines from its `from_step` on."""
        return follow(self.lines)


def read_ledger(path: str | Path) -> Ledger:
    """The ledger in `path`, a file or a run folder; a torn last line is left out, other damage raises."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.exists():
        raise LedgerError(f"{file}: there is no ledger here; give the folder of a run that has committed steps")
    lines, _, torn = _scan(file)
    return Ledger(file, tuple(lines), torn)


def follow(lines: Iterable[LedgerLine]) -> dict[int, LedgerLine]:
    """Step → line after every lineage has superseded its elders; among equal keys the first line counts."""
    by_lineage: dict[int, list[LedgerLine]] = {}
    for line in lines:
        by_lineage.setdefault(line.lineage, []).append(line)
    followed: dict[int, LedgerLine] = {}
    for lineage in sorted(by_lineage):
        start = min(line.from_step for line in by_lineage[lineage])
        followed = {step: line for step, line in followed.items() if step < start}
        for line in by_lineage[lineage]:
            followed.setdefault(line.step, line)
    return dict(sorted(followed.items()))


def lanes_covered_once(computed_by: Sequence[tuple[str, int, int]], lanes: int) -> str | None:
    """None if the half-open ranges cover [0, lanes) exactly once, else what is wrong with them."""
    position, previous = 0, "nobody"
    for member, low, high in sorted(computed_by, key=lambda part: (part[1], part[2])):
        if low >= high or low < 0 or high > lanes:
            return f"{member} is recorded for lanes [{low}, {high}), which is no part of [0, {lanes})"
        if low < position:
            return f"lane {low} was computed by both {previous} and {member}"
        if low > position:
            return f"lane {position} was computed by nobody"
        position, previous = high, member
    return None if position == lanes else f"lane {position} was computed by nobody"


def _scan(path: Path) -> tuple[list[LedgerLine], int, bool]:
    """All whole lines, the bytes they take, and whether a torn last line follows."""
    if not path.exists():
        return [], 0, False
    data = path.read_bytes()
    lines: list[LedgerLine] = []
    position = 0
    number = 0
    while position < len(data):
        number += 1
        end = data.find(b"\n", position)
        if end < 0:
            return lines, position, True
        where = f"{path} line {number}"
        try:
            record = parse(data[position:end])
        except ValueError as error:
            if end + 1 == len(data):
                return lines, position, True
            raise LedgerError(f"{where}: not JSON ({error}); the file was damaged after it was written") from error
        if not isinstance(record, dict):
            raise LedgerError(f"{where}: holds {type(record).__name__}, it must be a JSON object")
        lines.append(LedgerLine.from_json(record, where))
        position = end + 1
    return lines, position, False
