"""What the folders of a run say of it to those who compute its steps again (`recompute`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.commands.manage import recorded_argv
from elastic_harness.errors import ConfigError
from elastic_harness.omissions import Entry
from elastic_harness.runs import folder as folders
from elastic_harness.runs import named
from elastic_harness.runs import origin as origins
from elastic_harness.runs.events import EVENTS, newest_events
from elastic_harness.runs.ledger import LEDGER, LedgerLine, read_ledger


@dataclass(frozen=True)
class Recorded:
    """What the folders of a run say of it. With several nodes here each of them has one."""

    folders: tuple[Path, ...]
    record: Mapping[str, Any]  # of run.json
    lines: Mapping[int, LedgerLine]  # by step, along the last lineage

    @property
    def path(self) -> Path:
        return self.folders[0]

    @property
    def omissions(self) -> tuple[Entry, ...]:
        """The steps and slots that rollbacks have made it omit."""
        return tuple(self.record.get("omissions") or ())

    def line(self, step: int) -> LedgerLine:
        """Return what is recorded of a step. Raises ConfigError if that is nothing."""
        if step in self.lines:
            return self.lines[step]
        first, last = min(self.lines), max(self.lines)
        origin = origins.read(self.path)
        if step > last:
            why = f"it has committed the steps {first} … {last} so far"
        elif origin is not None and step < first:
            why = f"it began at step {first} with the state of {origin}; replay that run"
        else:
            why = f"its ledger has the steps {first} … {last}, not this one; another node's folder may have it"
        raise ConfigError(f"there is no step {step} of {self.path}: {why}")

    def launched_with(self, *steps: int) -> list[list[str]]:
        """Return the command line under which each of these steps was committed. A resume may have given others: a
        schedule follows from `training.max_steps`. Where the events do not tell, it is the newest one."""
        wanted = {(self.line(step).lineage, step): step for step in steps}
        found, waiting = dict[int, list[str]](), list[int]()
        for event in newest_events(self.path / EVENTS) if (self.path / EVENTS).exists() else ():
            if event["event"] == "step_committed" and (event.get("lineage"), event.get("step")) in wanted:
                waiting.append(wanted.pop((event["lineage"], event["step"])))
            elif event["event"] == "run_started":
                found |= {step: event["argv"] for step in waiting if event.get("argv")}
                waiting = []
                if not wanted:
                    break
        return [recorded_argv(found.get(step, self.record["argv"])) for step in steps]

    def beginning(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint from which a step can be computed; None if there is none. A checkpoint that a
        later lineage has superseded does not count."""
        found = [checkpoint for folder in self.folders for checkpoint in newest(folder / origins.CHECKPOINTS)]
        fitting = [each for each in found if each.step <= step and self._followed(each)]
        return max(fitting, key=lambda checkpoint: checkpoint.step, default=None)

    def _followed(self, checkpoint: Checkpoint) -> bool:
        line = self.lines.get(checkpoint.step - 1)  # the step that made it
        return line is None or line.lineage == checkpoint.lineage


def find(run: str) -> Recorded:
    """Return what is recorded of the run that RUN names. Raises ConfigError if it cannot be computed again."""
    paths = named.holding(run, folders.RECORD)
    if not paths:
        loose = named.holding(run, LEDGER)
        if loose:
            raise ConfigError(
                f"{loose[0]} was trained without `elastic-harness launch`, so it has no command line to be launched "
                f"with again. Launch its script once with --run-dir {loose[0]}, which records that"
            )
        folders.resolve(run)  # raises: it says where it was looked for
    record = folders.read_record(paths[0]) or {}
    if record.get("argv") is None:
        raise ConfigError(f"{paths[0] / folders.RECORD} has no command line; launch it with --run-dir {paths[0]}")
    held = [path for path in paths if (path / LEDGER).exists()]
    lines = read_ledger(*held).followed() if held else {}
    if not lines:
        raise ConfigError(
            f"{paths[0]} has no committed step. Only a script that calls elastic_harness.start() has steps that can be "
            "computed again"
        )
    return Recorded(tuple(path.resolve() for path in paths), record, lines)
