"""Where the runs of this machine are: RUN on a command line is a folder, or an id below `runs/`."""

from __future__ import annotations

from pathlib import Path

from elastic_harness.errors import ConfigError

RUNS = Path("runs")


def places(run: str | Path) -> tuple[Path, Path]:
    """Return where a run may be that a command line names."""
    return Path(run), RUNS / run


def holding(run: str | Path, *files: str) -> list[Path]:
    """Return the folder of a run that holds one of these files, or else those of its nodes here that do."""
    here, below = places(run)
    nodes = sorted(RUNS.glob(f"{run}@*")) if str(run) and "/" not in str(run) else []
    for group in ([here], [below], nodes):
        found = [path for path in group if any((path / file).exists() for file in files)]
        if found:
            return found
    return []


def of_run(run: str | Path, *files: str) -> list[Path]:
    """Return the folder of a run, or those of its nodes here. A folder that holds one of these files is preferred to
    one that merely exists. Raises ConfigError if there is none."""
    found = holding(run, *files) or [path for path in places(run) if path.exists()][:1]
    if not found:
        here, below = places(run)
        raise ConfigError(
            f"there is no run {str(run)!r}: neither {here} nor {below} is there; `elastic-harness ls` lists the runs"
        )
    return found
