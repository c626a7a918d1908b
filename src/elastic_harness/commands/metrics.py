"""`elastic-harness metrics`: the metrics of runs for Prometheus, by HTTP or as a file. It reads run folders, live or
ended, and asks nothing of a training job."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic_harness.commands.beside import asked_to_end
from elastic_harness.errors import EXIT_SUCCESS, ConfigError, InfrastructureError
from elastic_harness.metrics import RunMetrics, text
from elastic_harness.metrics.server import MetricsServer
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.named import of_run

EPILOG = """\
  elastic-harness metrics RUN                        print them once
  elastic-harness metrics RUN --port 9464            serve http://127.0.0.1:9464/metrics until Ctrl-C
  elastic-harness metrics RUN --file DIR/run.prom    write a file anew until the run ends, for the textfile collector
                                                     of node_exporter; `launch --metrics-file` does so for a launch
  elastic-harness metrics --make rules               alert rules for Prometheus; dashboard: for Grafana

docs/metrics.md lists all metrics.
"""
SHUTDOWN_LOOKS_S = 3600.0  # nobody shuts the server down: it ends with the process
PORT = 9464  # the port that OpenTelemetry's exporters for Prometheus have


def main(argv: Sequence[str]) -> int:
    """Print, write or serve metrics."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness metrics",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("--port", type=int, metavar="N", help=f"serve them here; 0: a free one (usually {PORT})")
    parser.add_argument(
        "--address", default="127.0.0.1", metavar="A", help="at which to listen; others may read all metrics there"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="replace FILE again and again until the runs end")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="how often --file is replaced")
    parser.add_argument("--once", action="store_true", help="with --file: write it once")
    parser.add_argument("--make", choices=("rules", "dashboard"), help="print what is made from the table of metrics")
    parser.add_argument("--json", action="store_true", help="the values as one JSON object, in place of text")
    given = parser.parse_args(list(argv))
    if given.make:
        return _make(given.make)
    if not given.runs:
        raise ConfigError("name a run; `elastic-harness ls` lists the runs")
    if given.port is not None and not 0 <= given.port < 1 << 16:
        raise ConfigError(f"--port is {given.port}; it must be between 0 and 65535")
    if not given.every > 0:
        raise ConfigError(f"--every is {given.every:g}; it must be a time above 0 in seconds")
    if sum((given.port is not None, given.file is not None, given.json)) > 1:
        raise ConfigError("--port, --file and --json exclude each other; leave all but one out")
    if given.once and given.file is None:
        raise ConfigError("--once is for --file; without that the metrics are printed once")
    folders_given = [path for run in given.runs for path in of_run(run, folders.RECORD, EVENTS)]
    runs = [RunMetrics(path) for path in dict.fromkeys(folders_given)]
    if given.port is not None:
        return _serve(runs, given.address, given.port)
    if given.file is not None:
        write_until_end(runs, given.file, 0.0 if given.once else given.every)
    elif given.json:
        print(json.dumps([run.read().as_object() for run in runs]))
    else:
        print(text(runs), end="")
    return EXIT_SUCCESS


def _make(what: str) -> int:
    from elastic_harness.metrics import alerts, grafana

    print(alerts.rules() if what == "rules" else grafana.dashboard(), end="")
    return EXIT_SUCCESS


def _serve(runs: Sequence[RunMetrics], address: str, port: int) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    with MetricsServer(address, port, lambda openmetrics: text(runs, openmetrics=openmetrics)) as server:
        print(f"{server.url}  (Ctrl-C ends)", flush=True)
        with asked_to_end() as asked:
            threading.Thread(target=server.serve_forever, args=(SHUTDOWN_LOOKS_S,), daemon=True).start()
            reading = threading.Thread(target=text, args=(runs,), daemon=True)  # a long log, before the first scrape
            reading.start()
            asked.wait()
    return EXIT_SUCCESS


def write_until_end(runs: Sequence[RunMetrics], file: Path, every_s: float) -> None:
    """Replace a file every so many seconds until no run is live, or Ctrl-C or SIGTERM comes, and once more then.
    every_s 0: once. Raises InfrastructureError if the file cannot be written the first time; later it is tried again,
    so that a full disk leaves the file old and ends nothing."""
    with asked_to_end() as asked:
        _replace(file, text(runs))
        while every_s and not asked.is_set() and any(run.live for run in runs):
            asked.wait(every_s)
            with contextlib.suppress(InfrastructureError):
                _replace(file, text(runs))
        with contextlib.suppress(InfrastructureError):
            _replace(file, text(runs))


def _replace(file: Path, told: str) -> None:
    """Replace a file at once. It is not synced: after a power cut it would be written anew."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text(told)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {file}: {error.strerror or error}; name a file in a folder that is there and writable"
        ) from error
