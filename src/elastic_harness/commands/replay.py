"""`elastic-harness replay`: computes a recorded step again on this machine, and says whether the same bits come out."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elastic_harness.commands.progress_bar import ProgressBar
from elastic_harness.commands.recompute import Done, Outcome, recompute
from elastic_harness.commands.recorded import Recorded, find
from elastic_harness.errors import EXIT_OTHER_BITS, EXIT_SUCCESS, ConfigError
from elastic_harness.incidents import table

TEXT_CHARS = 400


def main(argv: Sequence[str]) -> int:
    """Replay a step. Return 0 if it and the steps before it, from the checkpoint on, are as recorded."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness replay",
        description="Compute a recorded step of a run again, from the nearest checkpoint on, and compare losses, "
        "samples and the gradient's hash with what was recorded. The run is only read; it may be training. The script "
        "is run again, so what it does outside of the run folder is done again, too.",
        epilog="exit codes: 0 the same bits, 5 other bits, 1 the script failed, 2 this cannot be replayed, 4 machine "
        "or disk",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="a committed step, counted from 0")
    parser.add_argument(
        "--slot", type=int, metavar="J", help="show this slot: its loss, its gradient's hash, its samples"
    )
    parser.add_argument("--on", type=int, metavar="N", help="workers (default: as many as were launched on a node)")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the replay, with its logs")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(list(argv))
    for name, value, least in (("--step", given.step, 0), ("--on", given.on, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    run = find(given.run)
    slots = run.line(given.step).slots
    if given.slot is not None and not 0 <= given.slot < slots:
        raise ConfigError(f"--slot is {given.slot}; the steps of this run have the slots 0 … {slots - 1}")
    outcome = recompute(run, given.step, slot=given.slot, workers=given.on, keep=given.keep, progress=bar_of_steps)
    print(json.dumps(as_json(run, outcome))) if given.json else _show(run, outcome)
    return EXIT_OTHER_BITS if outcome.found else EXIT_SUCCESS


@contextmanager
def bar_of_steps(steps: range, from_the_beginning: bool) -> Iterator[Done]:
    """Show a progress bar on standard error."""
    if from_the_beginning:
        told = f"no checkpoint is old enough, so all {len(steps)} steps from the run's beginning are computed"
        print(f"elastic-harness: {told}", file=sys.stderr, flush=True)
    with ProgressBar(f"computing {len(steps)} steps", len(steps)) as bar:
        yield bar.done


def as_json(run: Recorded, outcome: Outcome) -> dict[str, Any]:
    line = outcome.lines[outcome.last]
    return {
        "run": str(run.path),
        "first": outcome.first,
        "step": outcome.last,
        "workers": outcome.workers,
        "seconds": round(outcome.seconds, 3),
        "same": not outcome.found,
        "code": table.OTHER_BITS_AGAIN.id if outcome.found else None,
        "first_difference": min(outcome.found, default=None),
        "differences": [
            {"step": step, **{name: _plain(value) for name, value in vars(each).items()}}
            for step, found in outcome.found.items()
            for each in found
        ],
        "loss": _plain(line.loss),
        "gradient": line.gradient,
        "slot": None if outcome.slot is None else {k: _plain(v) for k, v in outcome.slot.items() if k in _OF_SLOT},
        "notes": list(outcome.notes),
        "kept": None if outcome.kept is None else str(outcome.kept),
    }


_OF_SLOT = ("step", "slot", "loss", "weight", "gradient", "samples", "texts")


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; a number that is not finite as text."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(run: Recorded, outcome: Outcome) -> None:
    steps = outcome.last + 1 - outcome.first
    whence = "the run's beginning" if outcome.first == min(run.lines) else f"the checkpoint of version {outcome.first}"
    print(
        f"{run.path}: step {outcome.last} computed again, from {whence} on: {steps} step{'s' * (steps > 1)} on "
        f"{outcome.workers} worker{'s' * (outcome.workers > 1)}, {outcome.seconds:.1f} s"
    )
    if outcome.slot is not None:
        _show_slot(run, outcome, outcome.slot)
    for note in outcome.notes:
        print(f"note: {note}")
    if outcome.kept is not None:
        print(f"kept: {outcome.kept}")
    if outcome.found:
        print(differs(outcome))
        return
    line = outcome.lines[outcome.last]
    gradient = f", gradient {line.gradient}" if run.line(outcome.last).gradient else "; its gradient was not recorded"
    skipped = f"; its update was skipped: {line.skipped}" if line.skipped else ""
    print(f"SAME: step {outcome.last} has loss {line.loss!r}{gradient}{skipped}")


def differs(outcome: Outcome) -> str:
    """Return in words which step is the first that came out otherwise, and in what."""
    first = min(outcome.found)
    lines = [f"DIFFERS: step {first} is the first that came out otherwise [{table.OTHER_BITS_AGAIN.id}]"]
    lines += [f"  {each}" for each in outcome.found[first]]
    later = len(outcome.found) - 1
    if later:
        lines.append(f"  {later} later step{'s' * (later > 1)} differ{'s' * (later == 1)} too")
    return "\n".join(lines)


def _show_slot(run: Recorded, outcome: Outcome, told: dict[str, Any]) -> None:
    members = ", ".join(run.line(outcome.last).members_of(told["slot"]))
    print(
        f"slot {told['slot']} of step {told['step']}: loss {told['loss']!r}, weight {told['weight']:g}, gradient "
        f"{told['gradient']}; when it was recorded {members} computed it"
    )
    texts = told["texts"]
    if len(texts) != len(told["samples"]):
        print(f"  samples {', '.join(map(str, told['samples']))}: {' '.join(texts)[:TEXT_CHARS]}")
        return
    for sample, text in zip(told["samples"], texts, strict=True):
        print(f"  sample {sample}: {text[:TEXT_CHARS]!r}{' …' * (len(text) > TEXT_CHARS)}")
