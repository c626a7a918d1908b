"""The ledger: for every committed step, which samples it consumed and which members computed them.

The agent appends one JSON object a line. A line is written once per (lineage, step), whichever member reports it and
however often. A restored run opens a new lineage, whose lines supersede those of older lineages from its first step on.

Lines that have a `kind` are no steps. `StateLine`s are the two sides of every hand-over of the whole state. Every MiB a
line says how far the ledger reaches, so that the next agent need not read all of it. Lines of an unknown kind are
ignored.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from elastic_harness.errors import InfrastructureError
from elastic_harness.runs import json_lines
from elastic_harness.shape import WHOLE_MAX

if TYPE_CHECKING:  # the agent writes ledgers, and does not load NumPy
    import numpy as np
    import numpy.typing as npt

LEDGER = "ledger.jsonl"
CHECKPOINT = "checkpoint"  # stands in place of a member where the state came from a checkpoint
STATE = "state"
REACHED = "reached"
REACHED_EVERY_BYTES = 1 << 20
HASH_BYTES = 8  # of what names a slot's samples
LOSS_HASH_BYTES = 2  # of what names a slot's loss: it tells which slot of a step differs, the step's loss that one does


class LedgerError(InfrastructureError):
    """There is no ledger, or a line is none of a ledger. The message names it."""


def ids_hash(sample_ids: npt.NDArray[np.int64]) -> str:
    """Return the name that the ledger gives the samples of a slot: 8 bytes, in hexadecimal digits, of sha256 over their
    little-endian int64 ids. A worker computes it of what it reads (`train.slots`), and `verify` of what was due."""
    return hashlib.sha256(sample_ids.astype("<i8").tobytes()).hexdigest()[: 2 * HASH_BYTES]


def lane_of(slot: int, slots: int, lanes: int) -> int:
    """Return the lane that a slot is in: lane i is the slots from i·slots/lanes on, rounded down."""
    return ((slot + 1) * lanes - 1) // slots


@dataclass(frozen=True)
class LedgerLine:
    """One committed step as the ledger records it."""

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
    computed_by: tuple[tuple[str, int, int], ...]  # member, first lane, one past the last lane
    slot_samples: tuple[str, ...]  # per slot the `ids_hash` of the samples it read
    slot_weight: tuple[float, ...]  # per slot: 1 for a full one, 0 for an empty one
    loss: float
    skipped: str = ""  # why the update was not applied; empty, and left out of the file, if it was
    decisions: tuple[dict[str, Any], ...] = ()  # of policies that changed the update; left out if empty
    replicas: tuple[tuple[str, ...], ...] = ()  # rows of members, the i-th on shard i; left out with one shard
    gradient: str = ""  # hash of a part of the summed gradient, see `train.witness`; left out if it is not known
    slot_losses: tuple[str, ...] = ()  # per slot a short hash of its loss; left out if it is not known
    lr_scale: float = 1.0  # by what the batch has multiplied the learning rate; left out if 1

    @property
    def computed_by_shard(self) -> list[tuple[tuple[str, int, int], ...]]:
        """Who computed which lanes of each shard."""
        columns = zip(*self.replicas, strict=True)
        return [tuple(p for p in self.computed_by if p[0] in column) for column in columns] or [self.computed_by]

    @property
    def key(self) -> tuple[int, int]:
        return (self.lineage, self.step)

    def members_of(self, slot: int) -> list[str]:
        """Return who computed a slot: one member for each shard."""
        lane = lane_of(slot, self.slots, self.lanes)
        return [member for member, low, high in self.computed_by if low <= lane < high]

    def members_of_all(self, slots: Iterable[int]) -> tuple[str, ...]:
        """Return who computed some slots, each member once."""
        return tuple(dict.fromkeys(member for slot in slots for member in self.members_of(slot)))

    @staticmethod
    def from_json(record: Mapping[str, Any], where: str = "ledger line") -> LedgerLine:
        """Return the typed line of a JSON object. Raises LedgerError that names a missing or mistyped field."""
        missing = [name for name in _FIELD_NAMES if name not in record]
        if missing:
            raise LedgerError(f"{where}: field {missing[0]!r} is missing; it holds {sorted(record)}")
        integers = {name: _integer(record, name, where) for name in _INTEGERS}
        try:
            return LedgerLine(
                **integers,
                computed_by=tuple((str(member), int(low), int(high)) for member, low, high in record["computed_by"]),
                slot_samples=_unpacked_hashes(record["slot_samples"], HASH_BYTES),
                slot_weight=_unpacked_runs(record["slot_weight"]),
                loss=float("nan") if record["loss"] is None else float(record["loss"]),
                skipped=str(record.get("skipped") or ""),
                decisions=tuple(dict(decision) for decision in record.get("decisions", ())),
                replicas=_rows(record.get("replicas", ())),
                gradient=str(record.get("gradient") or ""),
                slot_losses=_unpacked_hashes(record.get("slot_losses") or "", LOSS_HASH_BYTES),
                lr_scale=float(record.get("lr_scale", 1.0)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise LedgerError(
                f"{where}: computed_by, slot_samples, slot_weight, loss, decisions, replicas, slot_losses or "
                f"lr_scale has the wrong shape ({error})"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads back. There are many slots, so their hashes are packed and
        equal weights counted. This halves the file and makes it ten times as fast to read."""
        runs = [[weight, len(list(same))] for weight, same in itertools.groupby(self.slot_weight)]
        packed = {name: _packed_hashes(getattr(self, name)) for name in ("slot_samples", "slot_losses")}
        line = {**asdict(self), **packed, "slot_weight": runs}
        return {name: value for name, value in line.items() if name not in _OPTIONAL or value not in _LEFT_OUT}


_OPTIONAL = ("skipped", "decisions", "replicas", "gradient", "slot_losses", "lr_scale")
_LEFT_OUT = ("", (), 1.0)
_FIELD_NAMES = tuple(field.name for field in fields(LedgerLine) if field.name not in _OPTIONAL)
_INTEGERS = tuple(field.name for field in fields(LedgerLine) if field.type in (int, "int"))


def _rows(replicas: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    rows = tuple(tuple(map(str, row)) for row in replicas)
    if len(set(map(len, rows))) > 1:
        raise ValueError(f"rows of {sorted(map(len, rows))} members")
    return rows


@dataclass(frozen=True)
class StateLine:
    """One side of a hand-over of the whole state. At `version`, `holder` held the state with this hash. `taken_from`:
    the holder that it was taken from; None on the giving side. A checkpoint is a holder too, called `CHECKPOINT`."""

    state: str
    lineage: int
    version: int
    generation: int
    holder: str
    taken_from: str | None

    @staticmethod
    def from_json(record: Mapping[str, Any], where: str = "ledger line") -> StateLine:
        """Return the typed line of a JSON object. Raises LedgerError that names a missing or mistyped field."""
        numbers = {name: _integer(record, name, where) for name in ("lineage", "version", "generation")}
        for name in ("state", "holder", "taken_from"):
            value = record.get(name)
            if not isinstance(value, str) and (value is not None or name != "taken_from"):
                raise LedgerError(f"{where}: {name} is {value!r}; it must be a string")
        return StateLine(record["state"], **numbers, holder=record["holder"], taken_from=record.get("taken_from"))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads back."""
        return {"kind": STATE, **asdict(self)}


def _integer(record: Mapping[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < WHOLE_MAX:
        raise LedgerError(f"{where}: {name} is {value!r}; it must be an integer of at least 0, below 2**63")
    return value


def parse_line(record: Mapping[str, Any]) -> LedgerLine | StateLine:
    """Return the line of a step or of a state. Raises LedgerError if it is neither."""
    return StateLine.from_json(record) if record.get("kind") == STATE else LedgerLine.from_json(record)


def _packed_hashes(hashes: Sequence[str]) -> str:
    return base64.b64encode(bytes.fromhex("".join(hashes))).decode()


def _unpacked_hashes(packed: str | Sequence[str], nbytes: int) -> tuple[str, ...]:
    """Return one hash per slot, from one base64 text, or from a list as in ledgers of earlier versions."""
    if isinstance(packed, str):
        text, digits = base64.b64decode(packed, validate=True).hex(), 2 * nbytes
        if len(text) % digits:
            raise ValueError(f"hashes of {digits} hexadecimal digits have {len(text)} of them together")
        return tuple([text[at : at + digits] for at in range(0, len(text), digits)])
    hashes = tuple(str(each) for each in packed)
    if any(len(bytes.fromhex(each)) != nbytes for each in hashes):
        raise ValueError(f"a slot's hash has {2 * nbytes} hexadecimal digits")
    return hashes


def _unpacked_runs(packed: Sequence[Any]) -> tuple[float, ...]:
    """Return one weight per slot, from [weight, how many] pairs, or from a plain list as in ledgers of earlier
    versions."""
    if packed and isinstance(packed[0], Sequence):
        return tuple(float(weight) for weight, count in packed for _ in range(count))
    return tuple(float(weight) for weight in packed)


class Reached:
    """How far a ledger goes, in a few numbers however long it is. A process that goes on with the ledger has to know
    this."""

    def __init__(self) -> None:
        self.from_step = 0  # of the newest lineage
        self.generation = 0  # the highest of all lines
        self.last: dict[str, Any] = {}  # the fields of the last line that its event has too; empty: there is no line
        self.states: set[StateLine] = set()  # hand-overs, as far as the ledger was read
        self._steps: dict[int, list[list[int]]] = {}  # lineage -> sorted ranges [low, high), which do not touch

    @property
    def lineage(self) -> int:
        return max(self._steps, default=0)

    @property
    def committed(self) -> int:
        """The highest step of the newest lineage, -1 if there is none."""
        return self._steps[self.lineage][-1][1] - 1 if self._steps else -1

    @property
    def farthest(self) -> int:
        """The highest step of all lineages, -1 if there is none."""
        return max((ranges[-1][1] - 1 for ranges in self._steps.values()), default=-1)

    def __contains__(self, key: tuple[int, int]) -> bool:
        ranges, step = self._steps.get(key[0], []), key[1]
        at = bisect_right(ranges, step, key=lambda known: known[0])
        return at > 0 and step < ranges[at - 1][1]

    def __len__(self) -> int:
        return sum(high - low for ranges in self._steps.values() for low, high in ranges)

    def include(self, line: LedgerLine) -> None:
        """Add a step, in any order."""
        self._include(line.lineage, line.step, line.step + 1, line.from_step)
        self.generation = max(self.generation, line.generation)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": REACHED,
            "from_step": self.from_step,
            "generation": self.generation,
            "last": self.last,
            "steps": {str(lineage): ranges for lineage, ranges in self._steps.items()},
        }

    def include_all(self, earlier: Mapping[str, Any]) -> None:
        """Add what `to_json` said of the lines before."""
        for lineage, ranges in earlier["steps"].items():
            for low, high in ranges:
                self._include(int(lineage), low, high, earlier["from_step"])
        self.generation = max(self.generation, earlier["generation"])
        self.last = self.last or dict(earlier["last"])

    def _include(self, lineage: int, low: int, high: int, from_step: int) -> None:
        if lineage >= self.lineage:
            known = self._steps.get(lineage)
            self.from_step = from_step if known is None else min(self.from_step, from_step)
        ranges = self._steps.setdefault(lineage, [])
        first = bisect_left(ranges, low, key=lambda known: known[1])
        after = bisect_right(ranges, high, key=lambda known: known[0])
        touching = ranges[first:after]
        ranges[first:after] = [[min([low, *(r[0] for r in touching)]), max([high, *(r[1] for r in touching)])]]


class LedgerWriter:
    """Appends each (lineage, step) once, also across restarts of the writing process.

    Opening an existing file cuts off a torn last line, the trace of a crash. It reads back to the line that last said
    how far the ledger reaches. A line is handed to the operating system before `append` returns. `sync` makes all lines
    durable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = json_lines.Appender(self.path)
        self.reached, self.damaged, self._bytes_since = reached(self.path)

    def append(self, record: LedgerLine | StateLine | Mapping[str, Any]) -> bool:
        """Append a line and return True. Return False if this (lineage, step), or this very line about a state, is
        already there. Raises InfrastructureError; a failed write leaves no trace."""
        line = record if isinstance(record, LedgerLine | StateLine) else parse_line(record)
        if isinstance(line, StateLine):
            return self._append_state(line)
        if line.key in self.reached:
            return False
        if self._bytes_since >= REACHED_EVERY_BYTES:
            self._file.append(self.reached.to_json())
            self._bytes_since = 0
        self._bytes_since += self._file.append(line.to_json())
        self.reached.include(line)
        self.reached.last = _told(line)
        return True

    def _append_state(self, line: StateLine) -> bool:
        if line in self.reached.states:
            return False
        self._bytes_since += self._file.append(line.to_json())
        self.reached.states.add(line)
        return True

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def reached(path: Path) -> tuple[Reached, list[str], int]:
    """Return how far a ledger goes, the damaged lines that were passed over, and how many bytes had to be read to learn
    it. Needs no more memory than the longest line does."""
    found, damaged, nbytes = Reached(), [], 0
    for line in json_lines.read_backwards(path):
        step, damage = _step_of(path, line)
        if step is not None:
            found.include(step)
            found.last = found.last or _told(step)
        elif damage:
            damaged.append(damage)
        elif line.record is not None and line.record["kind"] == STATE:
            state, damage = _state_of(path, line)
            found.states.update([state] if state is not None else [])
            damaged += [damage] if damage else []
        elif line.record is not None and line.record["kind"] == REACHED:
            try:
                found.include_all(line.record)
                break
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                damaged.append(f"{path} at byte {line.begin}: a {REACHED!r} line of the wrong shape ({error!r})")
        nbytes += line.end - line.begin
    return found, damaged, nbytes


def _told(line: LedgerLine) -> dict[str, Any]:
    names = ("lineage", "step", "generation", "world_size", "loss")
    return {name: getattr(line, name) for name in names} | ({"skipped": line.skipped} if line.skipped else {})


def _step_of(path: Path, line: json_lines.Line) -> tuple[LedgerLine | None, str]:
    """Return the step that a line tells of, or why it is no line of a ledger. Return neither for a line of another
    kind."""
    if line.record is None:
        return None, line.damage
    if "kind" in line.record:
        return None, ""
    try:
        return LedgerLine.from_json(line.record, f"{path} at byte {line.begin}"), ""
    except LedgerError as error:
        return None, str(error)


def _state_of(path: Path, line: json_lines.Line) -> tuple[StateLine | None, str]:
    """Return the side of a hand-over that a line tells of, or why it tells of none."""
    try:
        return StateLine.from_json(line.record or {}, f"{path} at byte {line.begin}"), ""
    except LedgerError as error:
        return None, str(error)


class LedgerEntry(NamedTuple):
    """Which line of which file tells of a step."""

    lineage: int
    from_step: int
    step: int
    file: int
    begin: int

    @property
    def key(self) -> tuple[int, int]:
        return (self.lineage, self.step)


@dataclass(frozen=True)
class Ledger:
    """A ledger, or those of several nodes together: where each line is. Lines are read when they are asked for, so that
    a ledger of any length can be judged. `states`: hand-overs of the whole state. `torn`: a torn last line was left
    out. `damaged`: the lines that are none of a ledger."""

    paths: tuple[Path, ...]
    entries: tuple[LedgerEntry, ...]
    torn: bool
    damaged: tuple[str, ...] = ()
    states: tuple[StateLine, ...] = ()

    @property
    def lineage(self) -> int:
        """The newest lineage that has a line (0 for an empty ledger)."""
        return max((entry.lineage for entry in self.entries), default=0)

    def line(self, entry: LedgerEntry) -> LedgerLine:
        """Read one line."""
        path = self.paths[entry.file]
        line, damage = _step_of(path, json_lines.read_at(path, entry.begin))
        if line is None:
            raise LedgerError(f"{damage or path}; the file was changed while it was being read")
        return line

    @property
    def lines(self) -> Iterator[LedgerLine]:
        """All lines, in file order."""
        return map(self.line, self.entries)

    def followed(self) -> Mapping[int, LedgerLine]:
        """The lines along the last lineage, by step: lineage k replaces all older lines from its `from_step` on."""
        return _Followed(self, follow_lineages(self.entries))


class _Followed(Mapping[int, LedgerLine]):
    def __init__(self, ledger: Ledger, entries: Mapping[int, LedgerEntry]) -> None:
        self._ledger = ledger
        self._entries = entries

    def __getitem__(self, step: int) -> LedgerLine:
        return self._ledger.line(self._entries[step])

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_ledger(*paths: str | Path) -> Ledger:
    """Return the ledger in a file or a run folder, or in several of them. A torn last line is left out. `damaged` names
    lines that are none of a ledger. Raises LedgerError if there is no ledger."""
    files = tuple(path / LEDGER if path.is_dir() else path for path in map(Path, paths))
    entries: list[LedgerEntry] = []
    damaged: list[str] = []
    states: list[StateLine] = []
    for number, file in enumerate(files):
        if not file.exists():
            raise LedgerError(f"{file}: there is no ledger here; give the folder of a run that has committed steps")
        for line in json_lines.read(file):
            step, damage = _step_of(file, line)
            if step is not None:
                entries.append(LedgerEntry(step.lineage, step.from_step, step.step, number, line.begin))
            elif damage:
                damaged.append(damage)
            elif line.record is not None and line.record["kind"] == STATE:
                state, damage = _state_of(file, line)
                states += [state] if state is not None else []
                damaged += [damage] if damage else []
    return Ledger(files, tuple(entries), any(map(json_lines.torn, files)), tuple(damaged), tuple(states))


_Line = TypeVar("_Line", LedgerLine, LedgerEntry)


def follow_lineages(lines: Iterable[_Line]) -> dict[int, _Line]:
    """Return the lines by step, after every lineage has superseded older ones. Among equal keys the first line
    counts."""
    by_lineage: dict[int, list[_Line]] = {}
    for line in lines:
        by_lineage.setdefault(line.lineage, []).append(line)
    followed: dict[int, _Line] = {}
    for lineage in sorted(by_lineage):
        start = min(line.from_step for line in by_lineage[lineage])
        followed = {step: line for step, line in followed.items() if step < start}
        for line in by_lineage[lineage]:
            followed.setdefault(line.step, line)
    return dict(sorted(followed.items()))


def lanes_covered_once(computed_by: Sequence[tuple[str, int, int]], lanes: int) -> str | None:
    """Return None if the half-open ranges cover [0, lanes) exactly once, else what is wrong with them."""
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
