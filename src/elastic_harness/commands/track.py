"""`elastic-harness track`: shows a run in TensorBoard, Weights & Biases, trackio, MLflow or OpenTelemetry, while it
runs or later. It may be killed and started again at any time: each step is logged once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from elastic_harness.commands.beside import asked_to_end
from elastic_harness.errors import EXIT_SUCCESS
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.named import of_run
from elastic_harness.tracking import trackers
from elastic_harness.tracking.follow import FOLDER, follow

EPILOG = f"""\
  elastic-harness track RUN tensorboard              then: tensorboard --logdir RUN/{FOLDER}/tensorboard
  elastic-harness track RUN wandb mlflow             offline, unless WANDB_… and MLFLOW_… variables say otherwise
  elastic-harness launch --track tensorboard …       the same, for as long as this launch lives

docs/tracking.md says more.
"""


def main(argv: Sequence[str]) -> int:
    """Follow a run until it ends."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness track",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("trackers", nargs="+", metavar="TRACKER", help=", ".join([*trackers.TRACKERS, trackers.OTEL]))
    given = parser.parse_args(list(argv))
    trackers.check(given.trackers)
    (path, *_) = of_run(given.run, folders.RECORD, EVENTS)
    run_id = str((folders.read_record(path) or {}).get("run_id") or path.name)
    with asked_to_end() as asked:
        follow(path, run_id, list(dict.fromkeys(given.trackers)), lambda: folders.locked(path), asked)
    return EXIT_SUCCESS
