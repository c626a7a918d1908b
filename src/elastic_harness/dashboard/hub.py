"""Keeps an eye on the runs that somebody looks at, in a thread of its own, and has what is to be sent to the pages."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_harness.dashboard.follow import Followed
from elastic_harness.dashboard.series import Series
from elastic_harness.dashboard.shown import COLUMNS, RunShown, rows, show
from elastic_harness.errors import ConfigError, HarnessError
from elastic_harness.runs import folder as folders
from elastic_harness.runs import named
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.summary import summary

LOOK_S = 0.25  # between two looks at the logs
SHOW_S = 0.5  # between two messages about a run, at least
ALWAYS_S = 2.0  # memory and the state are looked at anew even if the log has nothing
LINGER_S = 60.0  # a run that nobody looks at is still followed for so long
LIST_S = 2.0
Message = tuple[str, str]
"""The name of a part, and its JSON."""
Curve = tuple[int, int, list[list[Any]]]
"""How often its older points were changed, steps in a point, the points."""


class Catalogue:
    """Which runs there are, by name. A name in a request is looked up here, and never becomes a part of a path."""

    def __init__(self, what: str | None) -> None:
        """Take what a command line names: a run, or a folder of runs (None: `runs`). Raises ConfigError."""
        self._run: list[Path] = named.holding(what, folders.RECORD, EVENTS) if what is not None else []
        self._folder = named.RUNS if what is None else Path(what)
        if what is not None and not self._run and not self._folder.is_dir():
            named.of_run(what, folders.RECORD, EVENTS)  # which says what is missing
            raise ConfigError(f"{what!r} is no folder; name the folder of a run, or one with runs in it")
        self._listed_at = -math.inf
        self._found: dict[str, list[Path]] = {}
        self._rows: dict[Path, tuple[object, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    @property
    def what(self) -> str:
        """What is shown, in words."""
        return f"the run in {self._run[0]}" if self._run else f"the runs in {self._folder}"

    def paths(self) -> dict[str, list[Path]]:
        """Return the folders of each run, those of its nodes together."""
        if self._run:
            return {self._run[0].resolve().name.partition("@")[0]: [path.resolve() for path in self._run]}
        with self._lock:
            if time.monotonic() - self._listed_at > LIST_S:
                self._found = self._listed()
                self._listed_at = time.monotonic()
            return self._found

    def _listed(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.resolve().iterdir()):
                if (path / folders.RECORD).is_file() or (path / EVENTS).is_file():
                    found.setdefault(path.name.partition("@")[0], []).append(path)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return a line about each run, the newest first."""
        listed = [self._row(name, paths[0]) for name, paths in self.paths().items()]
        return sorted(listed, key=lambda row: -(row["created"] or 0))

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        """Return a line about a run. It is made anew only if its files have changed."""
        seen = (_changed_at(path / EVENTS), _changed_at(path / folders.RECORD), folders.locked(path))
        with self._lock:
            known = self._rows.get(path)
        if known is None or known[0] != seen:
            try:
                shown = summary(path, folders.read_record(path) or {}, "step_committed")
            except (HarnessError, OSError):
                shown = {"status": "damaged", "step": None, "loss": None, "created": None, "live": False}
            row = {key: shown.get(key) for key in ("status", "step", "loss", "created", "live")}
            known = seen, {"name": name, **row}
            with self._lock:
                self._rows[path] = known
        return known[1]


def _changed_at(path: Path) -> tuple[float, int]:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime, found.st_size
    return 0.0, 0


class Watched:
    """A run that somebody looks at. The hub's thread changes it, and all others read what it has to send."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.watchers = 0
        self.over = False  # another one has taken its place: pages are to connect again
        self.left_at = time.monotonic()  # when the last one went
        self.lock = threading.Lock()  # over `followed`
        self._changed = threading.Condition()
        self._sent: dict[str, tuple[int, str]] = {}  # part -> version, JSON
        self._version = 0
        self._series: Curve = (0, 1, [])
        self._shown: RunShown | None = None
        self._shown_at = -math.inf
        self._stale = True

    def look_once(self) -> None:
        """Read what is new, and make what is to be sent of it. A run that cannot be shown harms no other."""
        try:
            self._look()
        except Exception as error:  # a boundary between runs: whatever is in this one's files
            self.tell_of(error)

    def _look(self) -> None:
        with self.lock:
            self._stale |= self.followed.read()
            due_s = time.monotonic() - self._shown_at
            if not (self._stale and due_s >= SHOW_S) and due_s < ALWAYS_S:
                return
            before, self._shown = self._shown, show(self.followed, time.time(), self._shown)
            known = before.parts if before is not None else {}
            parts = {name: as_json(p) for name, p in self._shown.parts.items() if p is not known.get(name)}
            self._shown_at, self._stale = time.monotonic(), False
            drawn = self._drawn(self.followed.run.series)
        self._send(parts, drawn)

    def _drawn(self, series: Series) -> Curve:
        """Return the whole curve. Points that are known already, but for the last, are as they were."""
        remade, _, known = self._series
        old = known[:-1] if remade == series.remade else []
        return series.remade, series.apart, [*old, *rows(series.points[len(old) :])]

    def tell_of(self, trouble: Exception) -> None:
        """Tell the pages that the run cannot be shown, and why."""
        self._shown_at = time.monotonic()
        self._send({"trouble": as_json(f"{type(trouble).__name__}: {trouble}")}, self._series)

    def _send(self, parts: Mapping[str, str], series: Curve) -> None:
        with self._changed:
            if "trouble" not in parts:
                self._sent.pop("trouble", None)
            for name, text in parts.items():
                if name not in self._sent or self._sent[name][1] != text:
                    self._version += 1
                    self._sent[name] = self._version, text
            self._series = series
            self._changed.notify_all()

    def news(self, known: dict[str, int], timeout_s: float) -> list[Message]:
        """Return what has changed since `known`, which is brought up to date. Wait until there is something, for at
        most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > known.get("", 0), timeout_s)
            if self._version <= known.get("", 0):
                return []
            found = [(name, text) for name, (version, text) in self._sent.items() if version > known.get("", 0)]
            known[""] = self._version
            series = self._series
        return [("series", _curve(series, known)), *found]


def _curve(series: Curve, known: dict[str, int]) -> str:
    """Return the points of a curve from the first one that a page does not have yet. The last one it has may have
    grown."""
    remade, apart, points = series
    begin = max(0, known.get("points", 0) - 1) if known.get("remade") == remade else 0
    known["remade"], known["points"] = remade, len(points)
    told = {"columns": COLUMNS, "apart": apart, "from": begin, "rows": points[begin:]}
    return as_json(told)


class Hub:
    """All runs that somebody looks at."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._watched: dict[str, Watched] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[Watched | None]:
        """Follow a run while inside; None: there is none of that name. The first look at a long log takes a second."""
        watched = self._of(name)
        if watched is None:
            yield None
            return
        with self._lock:
            watched.watchers += 1
        try:
            yield watched
        finally:
            with self._lock:
                watched.watchers -= 1
                watched.left_at = time.monotonic()

    def _of(self, name: str) -> Watched | None:
        paths = self.catalogue.paths().get(name)
        if paths is None:
            return None
        with self._lock:
            known = self._watched.get(name)
            if known is not None and known.followed.paths == paths:
                return known
            if known is not None:  # the folder of another node has come
                known.over = True
            watched = self._watched[name] = Watched(Followed(name, paths))
        watched.look_once()
        return watched

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            with self._lock:
                now = time.monotonic()
                for name, watched in list(self._watched.items()):
                    if watched.watchers == 0 and now - watched.left_at > LINGER_S:
                        del self._watched[name]
                todo = [watched for watched in self._watched.values() if watched.watchers]
            for watched in todo:
                watched.look_once()


def event(message: Message) -> bytes:
    """Return a message as an event of a stream. JSON has no line breaks."""
    return f"event: {message[0]}\ndata: {message[1]}\n\n".encode()


def as_json(value: object) -> str:
    """Return a value as JSON, which has no numbers that are not finite: they are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return list(map(_finite, value)) if isinstance(value, list | tuple) else value
