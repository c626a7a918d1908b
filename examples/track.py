"""Show a run in TensorBoard, or as CSV: follows what the run writes down, from a process of its own.

    python examples/track.py runs/first --tensorboard tb/first      while it runs, or afterwards
    python examples/track.py runs/first                             CSV on standard output

The run's events have one writer, the agent, and each step once, whichever worker was rank 0. So nothing is logged twice
or missed when workers die, nothing of it is in the training process, and this program may be started, killed and
started again at any time: it begins with the first step each time. If all workers die, the run goes back to its newest
checkpoint: `lineage` counts that, and what was logged after that step is void.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

FIGURES = ("loss", "lr", "grad_norm", "step_s", "tokens", "world_size")
POLL_S = 0.5


class Tracker(Protocol):
    def log(self, step: int, figures: dict[str, float]) -> None: ...
    def go_back(self, step: int) -> None:
        """All that was logged from this step on is void."""

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()  # an earlier one of ours, which would overlap; all of it is written again
        self._folder, self._make = str(folder), SummaryWriter
        self._writer = SummaryWriter(self._folder)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._make(self._folder, purge_step=step)  # TensorBoard drops what it has from there on

    def close(self) -> None:
        self._writer.close()


class Csv:
    def __init__(self) -> None:
        print("step", *FIGURES, sep=",")

    def log(self, step: int, figures: dict[str, float]) -> None:
        print(step, *(figures.get(name, "") for name in FIGURES), sep=",", flush=True)

    def go_back(self, step: int) -> None:
        print(f"# the rows from step {step} on are void; they come again", flush=True)

    def close(self) -> None:
        pass


def follow(path: Path) -> Iterator[dict[str, Any]]:
    """Every event of a run in order, as it is written, until the run has finished and was not resumed."""
    position, finished = 0, False
    while not finished:
        if path.exists():
            with open(path, "rb") as file:
                file.seek(position)
                whole = file.read().rpartition(b"\n")[0]  # a line that is being written comes next time
            position += len(whole) + bool(whole)
            for event in map(json.loads, whole.splitlines()):
                finished = event["event"] == "run_finished" or (finished and event["event"] != "run_started")
                yield event
        if not finished:
            time.sleep(POLL_S)


def track(events: Iterator[dict[str, Any]], tracker: Tracker) -> None:
    lineage = newest = 0
    for event in events:
        if event["event"] != "step_committed":
            continue
        step = event["step"]
        if event["lineage"] > lineage and step <= newest:
            tracker.go_back(step)
        lineage, newest = event["lineage"], step
        tracker.log(step, {name: event[name] for name in FIGURES if event.get(name) is not None})
    tracker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder; it need not be there yet")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="for TensorBoard, in a folder of its own")
    given = parser.parse_args()
    tracker: Tracker = TensorBoard(given.tensorboard) if given.tensorboard else Csv()
    track(follow(given.run / "events.jsonl"), tracker)


if __name__ == "__main__":
    sys.exit(main())
