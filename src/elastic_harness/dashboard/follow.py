"""Follows one run: reads what is new in its folders, and asks none of its processes."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_harness.config_file import read_yaml
from elastic_harness.dashboard.live_run import Event, LiveRun
from elastic_harness.dashboard.series import Point, Series, point_of
from elastic_harness.errors import HarnessError
from elastic_harness.runs import folder as folders
from elastic_harness.runs import json_lines
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.ledger import LEDGER, LedgerError, LedgerLine
from elastic_harness.runs.skim import LogReader

CONFIG = "config.yaml"
HANGS = "hangs"
LOGS = "logs"
TEXT_BYTES = 1 << 16  # of a log or of stacks, the end of which is shown
ZOOMED_MAX = 4000  # points
LEDGER_LINES_MAX = 64  # that are looked at for the newest step


class Followed:
    """A run, and how far its folders were read. With several nodes, those of its nodes here. Not to be used by two
    threads at once."""

    def __init__(self, name: str, paths: list[Path]) -> None:
        self.name = name
        self.paths = paths
        self.run = LiveRun()
        self._readers = [LogReader(path / EVENTS) for path in paths]
        self._configured_at = 0.0
        self._steps_wanted: int | None = None

    @property
    def live(self) -> bool:
        return any(map(folders.locked, self.paths))

    def read(self) -> bool:
        """Read what is new. Return whether there was anything. A log that was begun anew is read from its beginning."""
        if any(reader.replaced() for reader in self._readers):
            remade = self.run.series.remade + 1  # pages know by it that their points are of another log
            self.run = LiveRun()
            self.run.series.remade = remade
            self._readers = [LogReader(path / EVENTS) for path in self.paths]
        found = False
        for begin, node, event in self._new():
            self.run.take(event, begin, node)
            found = True
        return found

    def _new(self) -> Iterator[tuple[int, str, Event]]:
        """Yield new events in the order of time, with where their lines begin in the first folder's log; -1: they are
        of another one."""
        logs = [self._of(number) for number in range(len(self.paths))]
        if len(logs) == 1:
            yield from logs[0]
        else:
            yield from heapq.merge(*logs, key=lambda each: _time(each[2]))

    def _of(self, number: int) -> Iterator[tuple[int, str, Event]]:
        node = self.paths[number].name.partition("@")[2]
        with contextlib.suppress(OSError):
            for begin, event in self._readers[number].read():
                yield (begin if number == 0 else -1), node, event

    def record(self) -> dict[str, Any]:
        """Return what run.json says; nothing if it is not there, or damaged."""
        with contextlib.suppress(HarnessError):
            return folders.read_record(self.paths[0]) or {}
        return {}

    def steps_wanted(self) -> int | None:
        """Return with how many steps the run ends, as far as its settings say it in steps."""
        with contextlib.suppress(OSError):
            changed_at = (self.paths[0] / CONFIG).stat().st_mtime
            if changed_at != self._configured_at:
                self._configured_at, self._steps_wanted = changed_at, _steps_wanted(self.paths[0] / CONFIG)
        return self._steps_wanted

    def newest_step(self) -> LedgerLine | None:
        """Return what the ledger has of the newest step."""
        with contextlib.suppress(OSError):
            lines = json_lines.read_backwards(self.paths[0] / LEDGER)
            for _, line in zip(range(LEDGER_LINES_MAX), lines, strict=False):
                if line.record is not None and "kind" not in line.record:
                    with contextlib.suppress(LedgerError):
                        return LedgerLine.from_json(line.record)
        return None

    def zoomed(self, first: int, last: int) -> list[Point]:
        """Return the steps of a range, finer than in the whole run. Only that part of the log is read."""
        points = self.run.series.points
        known = [point for point in points if point.begin >= 0]
        before = [point for point in known if point.first <= first] or known[:1]
        after = [point for point in known if point.first > last]
        if not before:
            return []
        end = after[0].begin if after else self._readers[0].read_to
        fine = Series(ZOOMED_MAX)
        with contextlib.suppress(OSError):
            for begin, event in self._readers[0].between(before[-1].begin, end):
                if event["event"] == "step_committed":
                    with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):
                        fine.add(point_of(event, begin))
        return [point for point in fine.points if point.last >= first and point.first <= last]

    def texts(self) -> dict[str, Path]:
        """Return the logs and stacks that may be shown, by their names: plain files that lie in this run's folders."""
        found: dict[str, Path] = {}
        for path in self.paths:
            for folder, suffix in ((LOGS, ".log"), (HANGS, ".txt")):
                with contextlib.suppress(OSError):
                    files = [f for f in (path / folder).iterdir() if f.suffix == suffix and not f.is_symlink()]
                    found.update({f"{folder}/{f.name}": f for f in files if f.is_file()})
        return found

    def text(self, name: str) -> str | None:
        """Return the end of a log, or of stacks; None if there is none of that name."""
        path = self.texts().get(name)
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TEXT_BYTES))
                text = file.read(TEXT_BYTES).decode(errors="replace")
        except OSError:
            return None
        return text if size <= TEXT_BYTES else f"… {size - TEXT_BYTES:,} bytes before\n{text.partition(chr(10))[2]}"


def _steps_wanted(config: Path) -> int | None:
    with contextlib.suppress(HarnessError):
        training = read_yaml(config).get("training")
        if isinstance(training, dict) and not (training.get("max_tokens") or training.get("max_epochs")):
            steps = training.get("max_steps")
            return steps if isinstance(steps, int) else None
    return None


def _time(event: Event) -> float:
    t = event.get("t")
    return float(t) if isinstance(t, int | float) else 0.0
