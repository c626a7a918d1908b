"""The command line of `elastic-harness launch`: torchrun's options, and those of elasticity."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_harness import shape
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.etcd.address import Address
from elastic_harness.names import TRAINER, check_name

_SCRIPTS_OWN = frozenset({"-h", "--help", "-m", "--module", "--config"})  # after a script these are never for launch
API_RESTARTS = 100
PLAIN_RESTARTS = 3

EPILOG = f"""\
A worker is restarted up to {API_RESTARTS} times at its place while the others go on; once it has taken part in 10 new
steps the count begins anew. A script that does not use elastic_harness.start() is restarted as a whole, up to
{PLAIN_RESTARTS} times; --max-restarts sets both.
The same --run-dir again resumes the run.
Arguments after a script are the script's. Without one of your own (--config FILE, or -m elastic_harness.train) options
may stand anywhere.

several machines: the same command on each, in any order and at any time, with an etcd that all of them reach
  elastic-harness launch --nnodes 2:8 --store etcd://10.0.0.1:2379 --run-id my-job --nproc-per-node 8 train.py
A node that is stopped (Ctrl-C) or drained (SIGTERM, `elastic-harness drain`, a notice) leaves at a step boundary, and
the others go on; `elastic-harness stop` stops all. See docs/cluster.md.

exit codes: 0 success, 1 user code failed, 2 wrong configuration, 3 too few workers, 4 machine or disk,
130/143 interrupted (SIGINT/SIGTERM)
"""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch, with every default resolved. They are kept in the run folder."""

    workers: int  # of this node
    min_workers: int  # of the whole job, as is max_workers
    max_workers: int
    spares: int
    max_restarts: int | None  # None: API_RESTARTS or PLAIN_RESTARTS, by the kind of script
    join_timeout_s: float
    grace_s: float  # to save and leave when stopped
    quiet: bool
    command: tuple[str, ...]  # that each worker runs
    min_nodes: int = 1
    store: str | None = None  # None: one node alone
    store_id: str = ""  # the run's name in the store
    node_name: str | None = None
    host: str | None = None  # the address at which other nodes reach this one
    node_timeout_s: float = 3.0  # after so long a lost node is missed
    fork_server: bool = True
    preemption_notices: str = "none"  # the cloud whose metadata service is asked
    notice_file: str | None = None  # this node is drained when it is there

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
        """Return the options that `to_json` gave. Raises InfrastructureError for anything else."""
        try:
            return shape.build(LaunchOptions, data)
        except ValueError as error:
            raise InfrastructureError(f"the options in run.json are damaged: {error}; launch it again") from error


@dataclass(frozen=True)
class LaunchRequest:
    """A parsed command line: the options, and the run folder that it is about."""

    options: LaunchOptions
    run_dir: str | None
    run_id: str | None
    fresh: bool
    origin: str | None = None  # RUN[@VERSION] that a new run begins from
    weights_only: bool = False
    dashboard: bool = False  # a page shows the run, as long as the launch goes on
    notes: tuple[str, ...] = ()  # what may have been meant otherwise
    metrics_file: str | None = None  # which is kept up to date for Prometheus while the job lives
    trackers: tuple[str, ...] = ()  # to which each step is shown while the job lives


def build_parser(*, built_in: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a command line. `built_in`: it takes the settings of the built-in trainer in place of a
    script."""
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

    option("--nnodes", default="1", metavar="MIN:MAX", help="nodes: at least MIN, at most MAX (default: 1)")
    option("--store", metavar="URL", help="etcd://HOST:PORT[,…] through which several nodes agree (etcds:// for TLS)")
    option("--node-name", metavar="NAME", help="what this node is called (default: its host name)")
    option("--host", metavar="ADDRESS", help="address, name or interface others reach this node at (default: found)")
    option(
        "--node-timeout", type=float, default=3.0, metavar="S", help="a silent node is given up after S (default: 3)"
    )
    option("--nproc-per-node", default="1", metavar="N", help="workers, or auto, cpu, gpu (default: 1)")
    option("--standalone", action="store_true", help="one machine, no outside store (the default with one node)")
    option("--min-workers", type=int, default=1, metavar="N", help="below this the job waits, alive (default: 1)")
    option("--max-workers", type=int, metavar="N", help="limit (default: 8 or N; of several nodes MAX × N)")
    option("--spares", type=int, default=0, metavar="K", help="warm workers that wait for a place (default: 0)")
    option("--max-restarts", type=int, metavar="N", help="restarts of a worker at its place (see below)")
    option("--join-timeout", type=float, default=600.0, metavar="S", help="wait this long for all workers at the start")
    option("--grace", type=float, default=10.0, metavar="S", help="time to save and leave when stopped (default: 10)")
    option(
        "--preemption-notices",
        choices=("none", "aws", "gcp", "azure"),
        default="none",
        help="ask this cloud's metadata service each second whether the machine will go (default: none)",
    )
    option("--notice-file", metavar="FILE", help="drain this node when FILE appears; its first line says why")
    option("--run-dir", metavar="DIR", help="run folder (default: runs/<id>); an existing one is resumed")
    option("--run-id", metavar="ID", help="name of the run (default: from the time)")
    option("--fresh", action="store_true", help="start anew: an existing run folder is moved aside, not deleted")
    option(
        "--from",
        dest="origin",
        metavar="RUN[@VERSION]",
        help="begin a new run with another's state (of its newest checkpoint) under the settings given here",
    )
    option("--weights-only", action="store_true", help="with --from: take the weights alone and begin at step 0")
    option("--metrics-file", metavar="FILE", help="keep the run's metrics there, for Prometheus (docs/metrics.md)")
    option(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help="show the run in tensorboard, wandb, trackio, mlflow or otel; may be given again (docs/tracking.md)",
    )
    option("--dashboard", action="store_true", help="show the run on a page as well (see: elastic-harness dashboard)")
    option("--quiet", action="store_true", help="do not show the workers' output (it is in their logs)")
    option(
        "--no-fork-server",
        action="store_true",
        help="start each worker as a new process; by default those of a script that uses elastic_harness are forked "
        "from a process that has imported torch, so that a restarted one is there in a moment",
    )
    option("--no-python", action="store_true", help="run the script as a program of its own")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a Python module, as in python -m")
    option(
        "--config", metavar="FILE", help="train the built-in model: short for -m elastic_harness.train --config FILE"
    )
    if built_in:
        parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the trainer's settings")
        return parser
    parser.add_argument("script", nargs="?", help="the training script or module")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse(argv: Sequence[str]) -> LaunchRequest:
    """Return the request of a command line. Raises ConfigError, or exits with argparse's 2, and says what is wrong."""
    given = _given(list(argv))
    min_nodes, max_nodes = _nodes(given)
    workers = _workers(given.nproc_per_node)
    max_workers = given.max_workers
    if max_workers is None:
        max_workers = workers * max_nodes if given.store is not None else max(8, workers)
    for name, value, least in (
        ("--min-workers", given.min_workers, 1),
        ("--spares", given.spares, 0),
        ("--max-restarts", given.max_restarts, 0),
        ("--join-timeout", given.join_timeout, 0),
        ("--grace", given.grace, 0),
        ("--node-timeout", given.node_timeout, 2),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if given.store is not None and not given.min_workers <= max_workers:
        raise ConfigError(f"--min-workers is {given.min_workers}; it must be at most --max-workers ({max_workers})")
    if given.store is None and not given.min_workers <= workers <= max_workers:
        raise ConfigError(
            f"--nproc-per-node is {workers}; it must lie between --min-workers ({given.min_workers}) and "
            f"--max-workers ({max_workers})"
        )
    command = _command(given)
    options = LaunchOptions(
        workers=workers,
        min_workers=given.min_workers,
        max_workers=max_workers,
        spares=given.spares,
        max_restarts=given.max_restarts,
        join_timeout_s=given.join_timeout,
        grace_s=given.grace,
        quiet=given.quiet,
        command=command,
        min_nodes=min_nodes,
        store=given.store,
        store_id=given.run_id or "",
        node_name=given.node_name,
        host=given.host,
        node_timeout_s=given.node_timeout,
        fork_server=not given.no_fork_server,
        preemption_notices=given.preemption_notices,
        notice_file=None if given.notice_file is None else os.path.abspath(given.notice_file),
    )
    if given.weights_only and given.origin is None:
        raise ConfigError("--weights-only says what to take from another run; name that run: --from RUN[@VERSION]")
    return LaunchRequest(
        options,
        given.run_dir,
        given.run_id,
        given.fresh,
        given.origin,
        given.weights_only,
        given.dashboard,
        _notes(given),
        given.metrics_file,
        tuple(dict.fromkeys(given.track)),
    )


def _given(argv: list[str]) -> argparse.Namespace:
    """Return what a command line says. Arguments after a script belong to the script. With the built-in trainer our
    options count wherever they stand among its settings. An argument that is neither an option nor a setting is an
    error."""
    given = build_parser().parse_args(argv)
    if given.module and given.script == TRAINER:
        at = len(argv) - len(given.script_args) - 1
        argv = [*argv[:at], *argv[at + 1 :]]
    elif not given.config:
        return given
    elif given.module or given.no_python:
        raise ConfigError("--config trains the built-in model; to pass it to a script, put it after the script")
    given = build_parser(built_in=True).parse_intermixed_args(argv)
    given.script, given.script_args, given.module = TRAINER, given.overrides, True
    if given.config:
        given.script_args = ["--config", given.config, *given.overrides]
    return given


def _command(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that each worker runs."""
    if given.module and given.no_python:
        raise ConfigError("-m and --no-python exclude each other; leave one of them out")
    if not given.script:
        raise ConfigError("what is to be launched? Give a script, -m MODULE, or --config FILE")
    python = [] if given.no_python else [sys.executable, *(["-m"] if given.module else [])]
    return (*python, given.script, *given.script_args)


def _notes(given: argparse.Namespace) -> tuple[str, ...]:
    """Return notes on options that do something else than they seem to. Of ours that stand behind a script: the script
    may want them itself."""
    one = given.standalone and given.store is None and given.nnodes != "1"
    here = [f"--standalone is one node, this machine; for --nnodes {given.nnodes} give --store instead"] if one else []
    ours = {name for action in build_parser()._actions for name in action.option_strings} - _SCRIPTS_OWN
    if given.script == TRAINER:
        return tuple(here)
    found = dict.fromkeys(word.partition("=")[0] for word in given.script_args)
    return tuple(here) + tuple(
        f"{name} stands after {given.script}, so it is handed to that and is no option of launch; if you meant "
        f"launch, put it before {given.script}"
        for name in found
        if name in ours
    )


def _nodes(given: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the greatest number of nodes, and whether the options for several nodes were given."""
    text = given.nnodes
    parts = text.split(":")
    if not all(p.isdigit() and int(p) >= 1 for p in parts) or len(parts) > 2 or int(parts[0]) > int(parts[-1]):
        raise ConfigError(f"--nnodes is {text!r}; it must be N or MIN:MAX with whole numbers of at least 1")
    least, most = int(parts[0]), int(parts[-1])
    if given.standalone and given.store is None and least == 1:
        return 1, 1  # as torchrun's users write it; `_notes` says so
    if most > 1 and given.store is None:
        raise ConfigError(
            f"--nnodes is {text!r}; several nodes need an etcd through which they agree: --store etcd://HOST:2379. "
            "`elastic-harness etcd start` starts one for trying things out"
        )
    if given.store is not None and given.standalone:
        raise ConfigError("--standalone and --store exclude each other; leave one of them out")
    if given.store is not None:
        Address.parse(given.store)
        check_name("--run-id", given.run_id, "several nodes find each other by it, so give each the same: ")
        if given.node_name is not None:
            check_name("--node-name", given.node_name)
    elif given.run_id is not None:
        check_name("--run-id", given.run_id, "it names the folder below runs/: ")
    for name, value in (("--node-name", given.node_name), ("--host", given.host)):
        if given.store is None and value is not None:
            raise ConfigError(f"{name} is {value!r}, but there is no --store: it is for several nodes")
    return least, most


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
