"""The command line of `elastic-harness launch`: torchrun's habits, and what elasticity adds."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_harness.errors import ConfigError

API_RESTARTS = 100
PLAIN_RESTARTS = 3

EPILOG = f"""\
A worker is restarted up to {API_RESTARTS} times at its place while the others go on. A script that does not use
elastic_harness.start() is restarted as a whole, up to {PLAIN_RESTARTS} times; --max-restarts sets both.
The same --run-dir again resumes the run.

exit codes: 0 success, 1 user code failed, 2 wrong configuration, 3 too few workers, 4 machine or disk,
130/143 interrupted (SIGINT/SIGTERM)
"""


@dataclass(frozen=True)
class LaunchOptions:
    """What a launch was asked for, with every default resolved; kept in the run folder."""

    workers: int
    min_workers: int
    max_workers: int
    spares: int
    max_restarts: int | None
    join_timeout_s: float
    grace_s: float
    quiet: bool
    command: tuple[str, ...]

    @property
    def api_restarts(self) -> int:
        return API_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def plain_restarts(self) -> int:
        return PLAIN_RESTARTS if self.max_restarts is None else self.max_restarts

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": list(self.command)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> LaunchOptions:
        return LaunchOptions(**{**data, "command": tuple(data["command"])})


@dataclass(frozen=True)
class LaunchRequest:
    """A parsed command line: the options, and which run folder it is about."""

    options: LaunchOptions
    run_dir: str | None
    run_id: str | None
    fresh: bool


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-harness launch",
        description="Start a training job whose workers may die at any moment.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def option(name: str, **settings: Any) -> None:
        spellings = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        parser.add_argument(*spellings, **settings)

    option("--nnodes", default="1", metavar="MIN:MAX", help="number of nodes (this version: 1)")
    option("--nproc-per-node", default="1", metavar="N", help="workers, or auto, cpu, gpu (default: 1)")
    option("--standalone", action="store_true", help="one machine, no outside store (the default with one node)")
    option("--min-workers", type=int, default=1, metavar="N", help="below this the job waits, alive (default: 1)")
    option("--max-workers", type=int, metavar="N", help="limit for `scale` (default: the larger of 8 and N)")
    option("--spares", type=int, default=0, metavar="K", help="warm workers that wait for a place (default: 0)")
    option("--max-restarts", type=int, metavar="N", help="restarts of a worker at its place (see below)")
    option("--join-timeout", type=float, default=600.0, metavar="S", help="wait this long for all workers at the start")
    option("--grace", type=float, default=10.0, metavar="S", help="time to save and leave when stopped (default: 10)")
    option("--run-dir", metavar="DIR", help="run folder (default: runs/<id>); an existing one is resumed")
    option("--run-id", metavar="ID", help="name of the run (default: from the time)")
    option("--fresh", action="store_true", help="start anew: an existing run folder is moved aside, not deleted")
    option("--quiet", action="store_true", help="do not show the workers' output (it is in their logs)")
    option("--no-python", action="store_true", help="run the script as a program of its own")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a Python module, as in python -m")
    option(
        "--config", metavar="FILE", help="train the built-in model: short for -m elastic_harness.train --config FILE"
    )
    parser.add_argument("script", nargs="?", help="the training script or module")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse(argv: Sequence[str]) -> LaunchRequest:
    """The request of a command line; ConfigError (or argparse's exit 2) says what is wrong."""
    given = build_parser().parse_args(list(argv))
    _one_node(given.nnodes)
    workers = _workers(given.nproc_per_node)
    max_workers = given.max_workers if given.max_workers is not None else max(8, workers)
    for name, value, least in (
        ("--min-workers", given.min_workers, 1),
        ("--spares", given.spares, 0),
        ("--max-restarts", given.max_restarts, 0),
        ("--join-timeout", given.join_timeout, 0),
        ("--grace", given.grace, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if not given.min_workers <= workers <= max_workers:
        raise ConfigError(
            f"--nproc-per-node is {workers}; it must lie between --min-workers ({given.min_workers}) and "
            f"--max-workers ({max_workers})"
        )
    if given.module and given.no_python:
        raise ConfigError("-m and --no-python exclude each other; leave one of them out")
    rest = [*([given.script] if given.script else []), *given.script_args]
    if given.config and (given.module or given.no_python):
        raise ConfigError("--config trains the built-in model; to pass it to a script, put it after the script")
    if given.config:
        rest = ["elastic_harness.train", "--config", given.config, *rest]
    if not rest:
        raise ConfigError("what is to be launched? Give a script, -m MODULE, or --config FILE")
    head: list[str] = []
    if not given.no_python:
        head = [sys.executable, *(["-m"] if given.module or given.config else [])]
    options = LaunchOptions(
        workers=workers,
        min_workers=given.min_workers,
        max_workers=max_workers,
        spares=given.spares,
        max_restarts=given.max_restarts,
        join_timeout_s=given.join_timeout,
        grace_s=given.grace,
        quiet=given.quiet,
        command=(*head, *rest),
    )
    return LaunchRequest(options, given.run_dir, given.run_id, given.fresh)


def _one_node(text: str) -> None:
    parts = text.split(":")
    if not all(p.isdigit() and int(p) >= 1 for p in parts) or len(parts) > 2:
        raise ConfigError(f"--nnodes is {text!r}; it must be N or MIN:MAX with whole numbers of at least 1")
    if any(int(p) != 1 for p in parts):
        raise ConfigError(
            f"--nnodes is {text!r}; this version runs on one node only. Use --nnodes 1 and --nproc-per-node N"
        )


def _workers(text: str) -> int:
    if text in ("auto", "gpu"):
        gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        if text == "gpu" and not gpus:
            raise ConfigError("--nproc-per-node is 'gpu', but this machine has no /dev/nvidia*; give a number or 'cpu'")
        return gpus or os.cpu_count() or 1
    if text == "cpu":
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node is {text!r}; it must be a number of at least 1, or auto, cpu or gpu")
    return int(text)
