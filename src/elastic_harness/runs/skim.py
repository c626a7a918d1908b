"""Reads an event log from its beginning on, and what is added to it. A long log is skimmed.

Nearly all lines of a long log tell of steps that were committed as they should. Of a long row of such lines only some
are parsed: the first and the last ones, and evenly spread ones between. All other lines are parsed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from elastic_harness import shape

CHUNK_BYTES = 1 << 22
COMMITS_MAX = 4096  # of a log, that are parsed where nothing else happened
BEFORE, AFTER = 8, 3  # commits before and after any other line, which are parsed: they say what a failure cost
_LINE_BYTES = 160  # about the shortest line of a commit
_COMMIT = b'"event":"step_committed"'
_HEAD_BYTES = 80  # of a line: its time and its event stand there
_TELLING = re.compile(b'"(?:code|decisions|skipped|reason)"')  # in a commit that is not like the others
_QUIET = (b'"event":"checkpoint_saved"', b'"event":"checkpoint_uploaded"', b'"event":"validation"')
"""They do not change how long steps take, so commits around them are like all others."""

Event = dict[str, Any]


class LogReader:
    """Reads one log. Not to be used by two threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_to = 0
        self._identity: tuple[int, int] | None = None
        self._farthest = -1  # the highest step that was read

    def replaced(self) -> bool:
        """Return whether the file is another one than before, or was cut: then it has to be read anew."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        known = self._identity
        return known is not None and (known != (now.st_dev, now.st_ino) or now.st_size < self.read_to)

    def read(self) -> Iterator[tuple[int, Event]]:
        """Yield what is new since the last call, with the offset of its line. None is there while there is no file. A
        torn last line is read when it is whole. Lines that are no event are passed over. Raises OSError."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            self._identity = found.st_dev, found.st_ino
            apart = max(1, (found.st_size - self.read_to) // _LINE_BYTES // COMMITS_MAX)
            file.seek(self.read_to)
            rest = b""
            while text := file.read(CHUNK_BYTES):
                whole, newline, rest = (rest + text).rpartition(b"\n")
                if newline:
                    begin, self.read_to = self.read_to, self.read_to + len(whole) + 1
                    yield from self._events(whole.split(b"\n"), begin, apart)

    def between(self, begin: int, end: int) -> Iterator[tuple[int, Event]]:
        """Yield what lies between two offsets at which lines begin, skimmed as finely as so much allows."""
        part = LogReader(self.path)
        with open(self.path, "rb") as file:
            file.seek(begin)
            left = max(0, end - begin)
            apart = max(1, left // _LINE_BYTES // COMMITS_MAX)
            rest, at = b"", begin
            while left > 0 and (text := file.read(min(CHUNK_BYTES, left))):
                left -= len(text)
                whole, newline, rest = (rest + text).rpartition(b"\n")
                if newline:
                    yield from part._events(whole.split(b"\n"), at, apart)
                    at += len(whole) + 1

    def _events(self, lines: Sequence[bytes], begin: int, apart: int) -> Iterator[tuple[int, Event]]:
        """Yield the events of some lines, of which the first begins at an offset."""
        if apart == 1:
            wanted: Iterator[int] = iter(range(len(lines)))
        else:
            wanted = self._wanted(lines, apart)
        at, known = begin, 0
        for number in wanted:
            at += sum(map(len, lines[known:number])) + number - known
            known = number
            event = _event(lines[number])
            if event is not None:
                if event["event"] == "step_committed" and isinstance(event.get("step"), int):
                    self._farthest = max(self._farthest, event["step"])
                yield at, event

    def _wanted(self, lines: Sequence[bytes], apart: int) -> Iterator[int]:
        """Yield the numbers of the lines that are to be parsed."""
        others = [number for number, line in enumerate(lines) if not _is_ordinary(line)]
        quiet: set[int] = set()  # of the row that goes on
        low = 0
        for other in (*others, len(lines)):
            if other < len(lines) and any(word in lines[other][:_HEAD_BYTES] for word in _QUIET):
                quiet.add(other)
                continue
            yield from self._of_a_row(lines, low, other, quiet, apart)
            if other < len(lines):
                yield other
            low, quiet = other + 1, set()

    def _of_a_row(self, lines: Sequence[bytes], low: int, high: int, quiet: Set[int], apart: int) -> Iterable[int]:
        """Return what is parsed of a row of commits, and quiet lines between them: everything, unless the commits are
        many, follow one another, and are new."""
        inner_low, inner_high = low + AFTER, high - BEFORE
        if inner_high - inner_low <= apart or not self._is_plain(lines, low, high, quiet):
            return range(low, high)
        inner = sorted({*range(inner_low, inner_high, apart), *(n for n in quiet if inner_low <= n < inner_high)})
        return itertools.chain(range(low, inner_low), inner, range(inner_high, high))

    def _is_plain(self, lines: Sequence[bytes], low: int, high: int, quiet: Set[int]) -> bool:
        """Whether the commits of a row follow one another, and none of them was read before."""
        commits = high - low - len(quiet)
        if commits == 0:
            return False
        begin = next(number for number in range(low, high) if number not in quiet)
        end = next(number for number in range(high - 1, low - 1, -1) if number not in quiet)
        first, last = _event(lines[begin]) or {}, _event(lines[end]) or {}
        steps = first.get("step"), last.get("step")
        if not (isinstance(steps[0], int) and isinstance(steps[1], int)):
            return False
        in_order = steps[1] - steps[0] == commits - 1 and first.get("lineage") == last.get("lineage")
        return in_order and steps[0] > self._farthest


def _is_ordinary(line: bytes) -> bool:
    return line.find(_COMMIT, 0, _HEAD_BYTES) > 0 and _TELLING.search(line) is None


def _event(line: bytes) -> Event | None:
    try:
        event = shape.parse(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
