"""The trackers: each takes the figures of steps. A package is imported only when its tracker is used.

Nothing here needs a network. Each tracker writes below `tracking/` in the run folder, unless its own environment
variables name another place or a server.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness.errors import ConfigError

PROJECT = "elastic-harness"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    id: str
    folder: Path  # for what the tracker writes on this machine
    resumes_at: int  # the first step that it has not; 0 for a new one
    settings: Mapping[str, Any]  # of the run, as run_configured tells them


class Tracker(ABC):
    """One tracker, open for one run."""

    late_s = 0.0  # what was flushed less long ago may be lost if this process is killed

    @abstractmethod
    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        """Take the figures of a step, at a time in UNIX seconds."""

    def go_back(self, step: int) -> bool:
        """Forget all figures from this step on. Return False if the tracker cannot."""
        return False

    def flush(self) -> None:  # noqa: B027 (nothing to do, for one that writes at once)
        """Write down what was logged, so that it survives this process."""

    def newest(self) -> int | None:
        """Return the newest step that the tracker itself knows to have, -1 for none; None if it cannot tell."""
        return None

    @abstractmethod
    def close(self) -> None: ...


def _await_newer_name(folder: Path) -> None:
    """Wait until a new event file sorts behind those that are there: TensorBoard reads them in the order of names,
    which begin with the second. At most a second, also if the clock was set back."""
    numbers = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
    seconds = [int(number) for number in numbers if number.isdigit()]
    until = time.monotonic() + 1.0
    while seconds and int(time.time()) <= max(seconds) and time.monotonic() < until:
        time.sleep(0.02)


class TensorBoard(Tracker):
    """Event files, written by TensorBoard's own package; neither torch nor TensorFlow is loaded."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder = Path(os.environ.get("TENSORBOARD_LOGDIR") or run.folder)
        _await_newer_name(folder)
        self._writer = EventFileWriter(str(folder))
        self.go_back(run.resumes_at)

    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=t, step=step, summary=summary))

    def go_back(self, step: int) -> bool:
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(self._event.Event(step=step, session_log=start))  # what it has from there on is void
        return True

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases; offline unless WANDB_API_KEY or WANDB_MODE say otherwise. `wandb sync` sends it later."""

    late_s = 30.0  # its own process writes, and cannot be asked to

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=run.id, name=run.id, resume="allow", mode=mode,
            dir=run.folder, config=dict(run.settings), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "unix_time": t}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """trackio, whose dashboard runs on this machine: `trackio show`."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._run_id, self._storage = run.id, SQLiteStorage
        self._run = trackio.init(project=PROJECT, name=run.id, resume="allow", config=dict(run.settings), embed=False)

    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "unix_time": t}, step=step)

    def newest(self) -> int | None:
        step = self._storage.get_max_step_for_run(PROJECT, self._run_id, run_id=self._run.id)
        return -1 if step is None else int(step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow, in a file store unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it needs no database
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or run.folder.as_uri()), Metric
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        known = self._client.search_runs([experiment], f"tags.elastic_harness_run = '{run.id}'")
        tags = {"elastic_harness_run": run.id, "mlflow.runName": run.id}
        self._run = (known[0] if known else self._client.create_run(experiment, tags=tags)).info.run_id
        names = known[0].data.metrics if known else ()
        histories = {name: self._client.get_metric_history(self._run, name) for name in names}
        self._has = {name: max(point.step for point in points) for name, points in histories.items()}
        self._points: list[Any] = []

    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        new = [name for name in figures if step > self._has.get(name, -1)]  # it may have been killed in mid-step
        ordered = sorted(new, key=lambda name: name == "loss")  # the last one, for `newest` asks for it
        self._points += [self._metric(name, figures[name], int(1000 * t), step) for name in ordered]

    def flush(self) -> None:
        for begin in range(0, len(self._points), 1000):
            self._client.log_batch(self._run, metrics=self._points[begin : begin + 1000])
        self._points = []

    def newest(self) -> int | None:
        return self._has.get("loss", -1)

    def close(self) -> None:
        self.flush()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


OTEL = "otel"
"""It takes spans, no figures: `tracking.otel`."""


def check(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no tracker."""
    known = [*TRACKERS, OTEL]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"there is no tracker {unknown[0]!r}; there are {', '.join(known)}")


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open a tracker. Raises ConfigError if its package is not installed."""
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.redirect_stdout(None):
            return TRACKERS[name](run)
    except ImportError as error:
        raise ConfigError(
            f"the tracker {name} needs its package ({error}): pip install 'elastic-harness[{name}]'"
        ) from error
