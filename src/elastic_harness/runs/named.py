"""Where the runs of this machine are: RUN on a command line is a folder, or an id below `runs/`."""

from __future__ import annotations

from pathlib import Path

from elastic_harness.errors import ConfigError

RUNS = Path("runs")


def of_run(run: str | Path, *files: str) -> list[Path]:
    """Return the folder of a run, or those of its nodes here. A place that holds one of these files goes before one
    that is merely there. Raises ConfigError if there is none."""
    named = [Path(run), RUNS / run]
    nodes = sorted(RUNS.glob(f"{run}@*")) if str(run) and "/" not in str(run) else []
    for group in ([named[0]], [named[1]], nodes):
        found = [path for path in group if any((path / file).exists() for file in files)]
        if found:
            return found
    there = [path for path in named if path.exists()]
    if not there:
        raise ConfigError(
            f"there is no run {str(run)!r}: neither {named[0]} nor {named[1]} is there; `elastic-harness ls` lists the "
            "runs"
        )
    return there[:1]
